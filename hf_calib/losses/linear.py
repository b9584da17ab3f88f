"""A loss over a large vocabulary without its logits: the head's product, the loss and their gradients in chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from hf_calib._errors import InputTypeError, check, expected
from hf_calib.losses.loss import CalibrationLoss, check_loss
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.losses.statistics.door import check_labels

# Logits of a chunk: few enough to be little beside the head's weight, enough for its product to be efficient.
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
    r"""The loss of the logits `hidden @ weight.T`, which are never there as a whole.

    For language models, whose logits and their gradient are most of a training step's memory. With labels that are
    shifted by one position it is the loss of the next token: `hidden[:, :-1]`, `labels[:, 1:]`.

    $$z = \frac{c \tanh((W h + b) / c)}{T}$$

    with the cap c (Gemma's `final_logit_softcapping`) and the temperature T left out unless they are given.

    Args:
        hidden: (N, H) or (B, L, H), float: the last hidden states.
        weight: (V, H) of the head, in the dtype of the hidden states, except under autocast.
        labels: (N,) or (B, L), integers in [0, V), -100 for rows without loss, which cost nothing.
        loss: from `hf_calib.losses`; any that has a value per row.
        bias: (V,) of the head.
        softcap: c, above 0.
        temperature: T, above 0; a tensor (of one element) gets its gradient.
        reduction: "mean" over the rows that count, or "sum".
        num_items_in_batch: divide the sum by this instead, as for the loss itself.

    Returns:
        A scalar, in nats, float32 or float64.

    Notes:
        The gradients are made in the forward pass, chunk by chunk: the backward pass only hands them out, once. Those
        of the weight and the bias are summed in float32 at least. Beside them two chunks of logits are held. Under
        autocast the product is in autocast's dtype, as that of `torch.nn.Linear`. No gradients of gradients.

    >>> from hf_calib.losses import focal
    >>> hidden, weight = torch.randn(6, 4), torch.randn(50, 4)
    >>> labels = torch.tensor([3, 49, -100, 0, 7, 7])
    >>> ours = linear_calibration_loss(hidden, weight, labels, focal(gamma=2.0))
    >>> torch.allclose(ours, focal(gamma=2.0)(hidden @ weight.T, labels))
    True
    """
    _check(hidden, weight, labels, loss, bias, reduction)
    fits = softcap is None or softcap > 0
    check(fits, "softcap to be above 0", softcap, "leave it out where there is none")
    if temperature is not None:
        _check_temperature(temperature)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    scale = None if temperature is None else torch.as_tensor(temperature, device=hidden.device)
    with torch.autocast(device, enabled=False):
        rows = labels.flatten() != IGNORE_INDEX
        counted = rows.nonzero().squeeze(1)
        states = hidden.flatten(0, -2)
        if len(counted) < len(states):
            states = states.index_select(0, counted)
        own = labels.flatten().long().index_select(0, counted)
        has_gradient = torch.is_grad_enabled()
        total: Tensor = _LinearLoss.apply(states, weight, bias, scale, own, loss, softcap, has_gradient)
        if num_items_in_batch is not None:
            return total / num_items_in_batch
        if reduction == "sum":
            return total
        items = loss.normalizer(labels.long(), total.dtype).to(total)
        return total / items.where(items > 0, 1)


class _LinearLoss(torch.autograd.Function):
    """The sum over rows; the gradients are those of the sum, until the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: Tensor | None,
        labels: Tensor,
        loss: CalibrationLoss,
        softcap: float | None,
        has_gradient: bool,
    ) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        needed = [has_gradient and need for need in ctx.needs_input_grad[:4]]
        found: list[Tensor | None] = [None, None, None, None]
        for i, tensor in enumerate((hidden, weight, bias, temperature)):
            if tensor is not None and needed[i]:
                dtype = hidden.dtype if i == 0 else wide
                found[i] = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
        of_hidden, of_weight, of_bias, of_temperature = found
        total = torch.zeros((), dtype=wide, device=hidden.device)
        elements = CPU_CHUNK_ELEMENTS if hidden.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
        size = max(1, elements // len(weight))
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            states = hidden[rows]
            product = linear(states, weight, bias)
            with torch.set_grad_enabled(any(needed)):
                leaves = [product.requires_grad_(any(needed))]
                logits = product if softcap is None else softcap * torch.tanh(product / softcap)
                if temperature is not None:
                    scale = temperature.detach().requires_grad_(needed[3])
                    leaves += [scale] if needed[3] else []
                    logits = logits / scale.to(logits.dtype)
                value = loss(logits, labels[rows], reduction="sum")
            total += value.detach()
            if not any(needed):
                continue
            slope, *of_scale = torch.autograd.grad(value, leaves)
            del product, logits, value, leaves  # so that no third chunk is held
            if of_hidden is not None:
                torch.mm(slope, weight, out=of_hidden[rows])
            if of_weight is not None:
                of_weight.addmm_(slope.T.to(wide), states.to(wide))
            if of_bias is not None:
                of_bias += slope.sum(0, dtype=wide)
            if of_temperature is not None:
                of_temperature += of_scale[0]
        ctx.found = found
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias, temperature)]
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True, under which they would pass for constants
            raise RuntimeError(
                "linear_calibration_loss has no gradients of gradients. Make the logits, and call the loss on them."
            )
        found, ctx.found = ctx.found, None
        if found is None:
            raise RuntimeError(
                "The gradients of linear_calibration_loss were handed out by an earlier backward pass. Call it again, "
                "or add the losses up before backward."
            )
        pairs = zip(found, ctx.dtypes, strict=True)
        scaled = [None if gradient is None else gradient.mul_(slope).to(dtype) for gradient, dtype in pairs]
        return (*scaled, None, None, None, None)


def _check_temperature(temperature: Tensor | float) -> None:
    if isinstance(temperature, Tensor):
        got = f"shape {tuple(temperature.shape)}"
        one = temperature.numel() == 1
        check(one, "temperature to be one number", got, "divide the logits themselves")
        if temperature.device.type != "cpu":  # the host does not wait for the device, which asserts by itself
            torch._assert_async(temperature.detach() > 0, "temperature is above 0")
            return
        temperature = temperature.detach()
    above = bool(temperature > 0)
    check(above, "temperature to be above 0", float(temperature), "1.0 changes nothing")


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, loss: CalibrationLoss, bias: Tensor | None, reduction: str
) -> None:
    check_loss(loss)
    way_out = "make the logits, and call the loss on them"
    got = f"{loss.name!r}, which couples the batch"
    check(not loss.couples_batch, "loss to have a value per row", got, way_out)
    check(not loss.multi_label, "loss to be single-label", f"a multi-label {loss.name!r}", way_out)
    fits = reduction in ("mean", "sum")
    way_out = "the gradients are summed over the rows"
    check(fits, "reduction to be 'mean' or 'sum'", repr(reduction), way_out)
    converted = torch.is_autocast_enabled(hidden.device.type)
    for name, tensor in {"weight": weight, "bias": bias}.items():
        if tensor is not None:
            same = tensor.is_floating_point() and (converted or tensor.dtype == hidden.dtype)
            if not same:
                got = f"{tensor.dtype} for {hidden.dtype}"
                way_out = "convert one of them"
                raise InputTypeError(expected(name, "have the float dtype of hidden", got, way_out))
    fits = hidden.dim() >= 2 and weight.dim() == 2 and weight.shape[1] == hidden.shape[-1]
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    got = " and ".join(str(tuple(tensor.shape)) for tensor in (hidden, weight, bias) if tensor is not None)
    requirement = "hidden and weight to be (N, H), (V, H) and, of a bias, (V,)"
    check(fits, requirement, got, "pass the head's own weight")
    fits = labels.shape == hidden.shape[:-1] and not labels.is_floating_point()
    requirement = f"labels to be integers of shape {tuple(hidden.shape[:-1])}"
    check(fits, requirement, f"{tuple(labels.shape)} {labels.dtype}", "one for each hidden state")
    if labels.device.type == "cpu":  # elsewhere it would wait for the device, which asserts by itself
        check_labels(labels.flatten(), len(weight))
