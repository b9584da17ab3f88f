"""Losses without logits as input: of hidden states with the head of a large vocabulary, and of a
CrossEncoder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from hf_calib._errors import InputTypeError, check, expected
from hf_calib.losses.arithmetic import wide
from hf_calib.losses.checks import check_items, check_labels
from hf_calib.losses.loss import CalibrationLoss, check_loss, divisor_of
from hf_calib.losses.statistics.definitions import IGNORE_INDEX

# The number of logits in a chunk: small next to the head's weight, and large enough for an
# efficient product.
CPU_CHUNK_ELEMENTS = 2**23
DEVICE_CHUNK_ELEMENTS = 2**24


def linear_calibration_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss: CalibrationLoss,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: Tensor | float | None = None,
    reduction: str = "mean",
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:
    r"""Compute the loss of the logits `hidden @ weight.T` in chunks, without storing all logits.

    Use it for language models, where the logits and their gradient need most of a training step's
    memory. For the loss of the next token, shift the labels by one position: pass `hidden[:, :-1]`
    and `labels[:, 1:]`.

    $$z = \frac{c \tanh((W h + b) / c)}{T}$$

    Args:
        hidden: (N, H) or (B, L, H), float, the last hidden states.
        weight: (V, H), the head's weight in the dtype of the hidden states, except under autocast;
            `bias`: (V,).
        labels: (N,) or (B, L), integers in [0, V); -100 for rows without loss, which need no
            computation.
        loss: a loss of `hf_calib.losses` that has a value per row.
        softcap: c > 0, such as Gemma's `final_logit_softcapping`.
        temperature: T > 0; a tensor with one element gets a gradient.
        reduction: "mean" over the rows that are not ignored, or "sum". It and `num_items_in_batch`
            are as in the loss.

    Returns:
        A scalar, in nats, float32 or float64.

    Notes:
        The gradients are computed in the forward pass, chunk by chunk; the backward pass returns
        them, once. Those of the weight and the bias are summed in float32 or float64. In addition,
        two chunks of logits are in memory. Under autocast the product has autocast's dtype, as in
        `torch.nn.Linear`. Second derivatives are not supported.

    >>> from hf_calib.losses import focal
    >>> hidden, weight = torch.randn(6, 4), torch.randn(50, 4)
    >>> labels = torch.tensor([3, 49, -100, 0, 7, 7])
    >>> ours = linear_calibration_loss(hidden, weight, labels, focal(gamma=2.0))
    >>> torch.allclose(ours, focal(gamma=2.0)(hidden @ weight.T, labels))
    True
    """
    _check(hidden, weight, labels, loss, bias, reduction)
    if num_items_in_batch is not None:
        check_items(num_items_in_batch, reduction, labels)
    is_number = isinstance(softcap, Real | Tensor) and not isinstance(softcap, bool)
    fits = softcap is None or (is_number and 0 < softcap < math.inf)
    check(fits, "softcap to be above 0", softcap, "leave it out if there is none")
    scale = None
    if temperature is not None:
        scale = _checked_temperature(temperature).to(hidden.device)
    device = hidden.device.type
    head: list[Any] = [hidden.flatten(0, -2), weight, bias]
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        head = [None if each is None else each.to(dtype) for each in head]
    with torch.autocast(device, enabled=False):
        own = labels.flatten().long()
        counted = (own != IGNORE_INDEX).nonzero().squeeze(1)
        if len(counted) < len(own):
            own = own.index_select(0, counted)
            head[0] = head[0].index_select(0, counted)
        has_gradient = torch.is_grad_enabled()
        total: Tensor = _LinearLoss.apply(
            loss, own, softcap, has_gradient, *head, scale
        )
        weights = loss.row_weights(labels)
        items = num_items_in_batch
        return total / divisor_of(weights, total.dtype, reduction, items)


class _LinearLoss(torch.autograd.Function):
    """The sum over rows, whose gradients are computed in the forward pass and scaled in the
    backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: CalibrationLoss,
        labels: Tensor,
        softcap: float | None,
        has_gradient: bool,
        *given: Any,
    ) -> Tensor:
        hidden, weight, bias, temperature = given
        wanted = [has_gradient and needed for needed in ctx.needs_input_grad[4:]]
        gradients = _Gradients(given, wanted)
        total = torch.zeros((), dtype=wide(hidden), device=hidden.device)
        elements = CPU_CHUNK_ELEMENTS if hidden.is_cpu else DEVICE_CHUNK_ELEMENTS
        size = max(1, elements // len(weight))
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            logits = linear(hidden[rows], weight, bias)
            leaves = [logits.requires_grad_(any(wanted))]
            with torch.enable_grad():
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                if temperature is not None:
                    scale = temperature.detach().requires_grad_(any(wanted))
                    leaves.append(scale)
                    logits = logits / scale.to(logits.dtype)
                value = loss(logits, labels[rows], reduction="sum")
            total += value.detach()
            if any(wanted):
                slopes = torch.autograd.grad(value, leaves)
                # This avoids a third chunk in memory.
                del logits, value, leaves
                gradients.add(rows, *slopes)
        ctx.gradients = gradients
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # With create_graph=True the gradients would count as constants.
            message = "linear_calibration_loss has no gradients of gradients. Compute the logits, and call the loss "
            raise RuntimeError(message + "on them.")
        if ctx.gradients is None:
            message = "An earlier backward pass already used the gradients of this loss. Call it again, or add the "
            raise RuntimeError(message + "losses up before backward.")
        scaled = ctx.gradients.times(slope)
        ctx.gradients = None
        return (None, None, None, None, *scaled)


class _Gradients:
    """Those of the hidden states, the weight, the bias and the temperature, where they are
    wanted."""

    def __init__(self, given: Sequence[Any], wanted: Sequence[bool]) -> None:
        self._given = given
        self._found: list[Tensor | None] = []
        for tensor, is_wanted in zip(given, wanted, strict=True):
            found = None
            if tensor is not None and is_wanted:
                # Only the rows of the hidden states are not summed.
                is_summed = tensor is not given[0]
                dtype = wide(tensor) if is_summed else tensor.dtype
                found = torch.zeros_like(tensor, dtype=dtype)
            self._found.append(found)

    def add(self, rows: slice, slope: Tensor, of_temperature: Any = None) -> None:
        """Add those of a chunk, for the slopes of its logits and of its temperature."""
        hidden, weight, *_ = self._given
        by_hidden, by_weight, by_bias, by_temperature = self._found
        if by_hidden is not None:
            torch.mm(slope, weight, out=by_hidden[rows])
        if by_weight is not None:
            dtype = by_weight.dtype
            by_weight.addmm_(slope.T.to(dtype), hidden[rows].to(dtype))
        if by_bias is not None:
            by_bias += slope.sum(0, dtype=by_bias.dtype)
        if by_temperature is not None:
            by_temperature += of_temperature

    def times(self, slope: Tensor) -> list[Tensor | None]:
        """All of them times the slope, in the dtypes of their tensors; they are used up."""
        scaled = []
        for tensor, found in zip(self._given, self._found, strict=True):
            scaled.append(None if found is None else found.mul_(slope).to(tensor.dtype))
        return scaled


def _checked_temperature(temperature: Tensor | float) -> Tensor:
    requirement = "temperature to be one number"
    way_out = "divide the logits themselves"
    is_number = not isinstance(temperature, str | bool)
    check(is_number, requirement, repr(temperature), way_out)
    scale = torch.as_tensor(temperature)
    got = f"{scale.dtype} of shape {tuple(scale.shape)}"
    fits = scale.numel() == 1 and scale.dtype != torch.bool
    check(fits, requirement, got, way_out)
    requirement = "temperature to be above 0"
    if scale.is_cpu:
        value = scale.item()
        check(0 < value < math.inf, requirement, value, "1.0 changes nothing")
    else:
        # The host does not wait; the device itself asserts.
        torch._assert_async(scale.detach() > 0, f"expected {requirement}")
    return scale


def _check(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss: CalibrationLoss,
    bias: Tensor | None,
    reduction: str,
) -> None:
    check_loss(loss)
    way_out = "compute the logits, and call the loss on them"
    got = f"{loss.name!r}, which couples the rows"
    is_of_rows = loss.entry.is_of_single_rows
    check(is_of_rows, "loss to have a value per row", got, way_out)
    got = f"a multi-label {loss.name!r}"
    check(not loss.multi_label, "loss to be single-label", got, way_out)
    fits = reduction in ("mean", "sum")
    way_out = "the gradients are summed over the rows"
    check(fits, "reduction to be 'mean' or 'sum'", repr(reduction), way_out)
    head = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    _check_dtypes(hidden, head)
    requirement = "hidden and weight to be (N, H) and (V, H), and bias to be (V,)"
    shapes = [tuple(tensor.shape) for tensor in (hidden, *head.values())]
    of_classes = tuple(weight.shape[:1])
    fits = hidden.dim() >= 2 and shapes[1] == (*of_classes, hidden.shape[-1])
    fits = fits and (bias is None or shapes[2] == of_classes)
    got = " and ".join(map(str, shapes))
    check(fits, requirement, got, "pass the head's own weight")
    fits = labels.shape == hidden.shape[:-1] and not labels.is_floating_point()
    requirement = f"labels to be integers of shape {tuple(hidden.shape[:-1])}"
    got = f"{tuple(labels.shape)} {labels.dtype}"
    check(fits, requirement, got, "one for each hidden state")
    check_labels(labels.flatten(), len(weight))


def _check_dtypes(hidden: Tensor, head: Mapping[str, Tensor]) -> None:
    """Raise unless the head can be multiplied by the hidden states; autocast would convert both."""
    autocast = torch.is_autocast_enabled(hidden.device.type)
    for name, tensor in head.items():
        fits = tensor.is_floating_point() and (autocast or tensor.dtype == hidden.dtype)
        if not fits:
            requirement = "have the float dtype of hidden"
            got = f"{tensor.dtype} for {hidden.dtype}"
            message = expected(name, requirement, got, "convert one of them")
            raise InputTypeError(message)


class for_cross_encoder(torch.nn.Module):  # noqa: N801, it is used as a function
    """A calibration loss for the CrossEncoderTrainer of `sentence_transformers`,
    instead of its own losses.

    Pass it as `CrossEncoderTrainer(model, ..., loss=for_cross_encoder(model, focal(gamma=2.0)))`.
    With one logit the loss is that of a sigmoid and labels are 0 or 1; with several it is that of a
    softmax and labels are class indices.

    Args:
        model: the `CrossEncoder` that is trained.
        loss: a loss of `hf_calib.losses`.
    """

    def __init__(self, model: Any, loss: Any) -> None:
        super().__init__()
        check_loss(loss)
        if not (hasattr(model, "preprocess") and hasattr(model, "num_labels")):
            got = type(model).__name__
            way_out = "pass the sentence_transformers.CrossEncoder; other logits go to the loss itself"
            message = expected("model", "be a CrossEncoder", got, way_out)
            raise InputTypeError(message)
        self.has_sigmoid = model.num_labels == 1
        if self.has_sigmoid:
            loss.check_multi_label()
        self.model = model
        self.loss = loss

    def forward(
        self, inputs: Sequence[Sequence[str]], labels: Tensor, **options: Any
    ) -> Tensor:
        """Compute the mean loss, in nats, of columns of texts; the model gets the options, such as
        prompt and task."""
        features = self.model.preprocess(list(zip(*inputs, strict=True)), **options)
        for name, feature in features.items():
            if isinstance(feature, Tensor):
                features[name] = feature.to(self.model.device)
        scores = self.model(features)["scores"]
        rows = labels.view(-1)
        if self.has_sigmoid:
            return self.loss(scores, rows.to(scores.dtype)[:, None])
        return self.loss(scores, rows.long())
