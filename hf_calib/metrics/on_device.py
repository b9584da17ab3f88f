"""The scores of logits on a device for a `CalibrationState`, and sums over processes.

This module needs torch. `LogitScores.add` never waits for the device: predictions that do not count
stay, with weight 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hf_calib._errors import check
from hf_calib.metrics.checks import FloatArray, check_type
from hf_calib.metrics.sums import uniform_edges

_IGNORED_LABEL = -100
# With so few classes, softmax takes several times as long as its parts.
_FEW_CLASSES = 16
# The confidence of a prediction that does not count; dropping it would wait for the device.
_LEFT_OUT = -1
# Of the sum of soft labels, as in the losses.
_SUM_TOLERANCE = 5e-3
# It limits the temporaries of a chunk of rows.
_CHUNK_ELEMENTS = 2**19


def check_batch(
    logits: Any, labels: Any, *, n_classes: int, multi_label: bool, soft_labels: bool
) -> None:
    """Raise unless the tensors fit each other and the classes; values are not read."""
    for name, value in (("logits", logits), ("labels", labels)):
        is_tensor = isinstance(value, Tensor)
        requirement = f"{name} to be a torch.Tensor"
        way_out = "pass probabilities in numpy arrays to update"
        check_type(is_tensor, requirement, type(value).__name__, way_out)
    is_float = logits.is_floating_point()
    way_out = "pass the model's logits"
    check_type(is_float, "logits to be floating point", logits.dtype, way_out)
    is_one_per_class = multi_label or soft_labels
    are_integers = not (labels.is_floating_point() or labels.dtype == torch.bool)
    way_out = "pass class indices, or set multi_label=True for one 0/1 label per class"
    fits = is_one_per_class or are_integers
    check_type(fits, "labels to be integers", labels.dtype, way_out)
    shape = tuple(logits.shape)
    wanted = shape if is_one_per_class else shape[:-1]
    got = f"{tuple(labels.shape)} for logits {shape}"
    way_out = "set multi_label=True only for one 0/1 label per class"
    check(labels.shape == wanted, f"labels to have shape {wanted}", got, way_out)
    fewest = 1 if multi_label else 2
    has_classes = len(shape) > 0 and shape[-1] >= fewest
    way_out = "a single sigmoid output needs multi_label=True"
    check(has_classes, "logits to have a class axis (..., C)", shape, way_out)
    requirement = f"logits to have the {n_classes} classes of the state"
    way_out = "use one state for each label set"
    check(shape[-1] == n_classes, requirement, shape[-1], way_out)


class Fetched(NamedTuple):
    """The scores of N predictions, the sums of classes, and the counts (5,) of rows."""

    # Confidence, correctness, NLL and Brier score, (N,) each.
    scores: list[FloatArray]
    class_bins: FloatArray | None
    counts: FloatArray


class _Softmax(NamedTuple):
    """The probabilities (R, C) of logits, and what belongs to the largest of each row (R, 1)."""

    probs: Tensor
    largest: Tensor
    predicted: Tensor
    confidence: Tensor


class LogitScores:
    """The scores of logits (..., C) with labels on one device, until a state reads them."""

    def __init__(
        self, n_classes: int, n_bins: int, *, by_class: bool, device: torch.device
    ) -> None:
        # The sums are float64, which "mps" does not support.
        self._device = torch.device("cpu") if device.type == "mps" else device
        self._n_bins = n_bins
        self._class_bins: Tensor | None = None
        if by_class:
            self._class_bins = self._zeros(3, n_classes, n_bins)
        # The numbers of rows, of those that are not finite, of invalid indices, of invalid 0/1
        # labels, and of rows of soft labels that are not shares.
        self._counts = self._zeros(5)
        # Of each chunk, the confidence, correctness, NLL and Brier score of its predictions.
        self._kept: list[list[Tensor]] = []
        # With edges rounded to float32, every float32 value is in the same bin as with float64
        # edges.
        interior = torch.from_numpy(uniform_edges(n_bins)[1:-1])
        self._edges = {
            dtype: interior.to(self._device, dtype)
            for dtype in (torch.float32, torch.float64)
        }

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)

    @torch.no_grad()
    def add(
        self, logits: Tensor, labels: Tensor, *, multi_label: bool, soft_labels: bool
    ) -> None:
        """Add a batch that `check_batch` has passed."""
        n_classes = logits.shape[-1]
        rows = logits.to(self._device).reshape(-1, n_classes)
        if not labels.is_floating_point():
            # In narrow integers C and -100 would wrap around.
            labels = labels.long()
        n_labels = n_classes if multi_label or soft_labels else 1
        targets = labels.to(self._device).reshape(len(rows), n_labels)
        step = max(1, _CHUNK_ELEMENTS // n_classes)
        for chunk, own in zip(rows.split(step), targets.split(step), strict=True):
            wide = chunk if chunk.dtype == torch.float64 else chunk.float()
            is_given = own != _IGNORED_LABEL
            if multi_label:
                used = self._add_decisions(wide, own)
                self._counts[3] += (is_given & ~used).sum()
            elif soft_labels:
                used = self._add_shares(wide, own)
                self._counts[4] += (is_given.any(dim=1, keepdim=True) & ~used).sum()
            else:
                used = self._add_indices(wide, own)
                self._counts[2] += (is_given & ~used).sum()

    @property
    def n_kept(self) -> int:
        """The number of predictions that wait to be read, with those that do not count."""
        return sum(len(columns[0]) for columns in self._kept)

    def fetch(self) -> Fetched:
        """Wait for the device, and return what the predictions add to a state."""
        columns = [torch.cat(parts) for parts in zip(*self._kept, strict=True)]
        used = columns[0] != _LEFT_OUT
        own = [column[used].double().cpu().numpy() for column in columns]
        class_bins = None
        if self._class_bins is not None:
            class_bins = self._class_bins.cpu().numpy()
        return Fetched(own, class_bins, self._counts.cpu().numpy())

    def _add_indices(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Add one prediction per row of logits (R, C); return whether its label (R, 1) is valid."""
        n_classes = logits.shape[1]
        used = (labels >= 0) & (labels < n_classes)
        targets = labels.clamp(0, n_classes - 1)
        probs, largest, predicted, confidence = _softmax(logits)
        self._add_classes(probs, used, used, targets)
        correct = predicted == labels
        nll = largest - logits.gather(1, targets) - confidence.log()
        others = probs.scatter_(1, targets, 0)
        # 1 - p of the label, accurate near p = 1.
        rest = others.sum(dim=1, keepdim=True).double()
        norm = torch.linalg.vector_norm(others, dim=1, keepdim=True).double()
        brier = norm.square() + rest.square()
        self._keep(used, [confidence, correct, nll, brier])
        return used

    def _add_shares(self, logits: Tensor, shares: Tensor) -> Tensor:
        """Add one prediction per row of logits (R, C); return whether labels (R, C) are shares."""
        wide = shares.double()
        sums = wide.sum(dim=1, keepdim=True)
        used = (sums - 1).abs() <= _SUM_TOLERANCE
        used &= shares.amin(dim=1, keepdim=True) >= 0
        # Without their rounding, the shares of the rows add up to the number of rows.
        wide = (wide / sums).where(used, 0)
        probs, largest, predicted, confidence = _softmax(logits)
        self._add_classes(probs, used, wide)
        correct = wide.gather(1, predicted)
        # 0 times the infinite term of a masked class would be NaN.
        log_probs = (logits - largest + confidence.log()).where(wide > 0, 0)
        nll = -(wide * log_probs).sum(dim=1, keepdim=True)
        brier = (probs - wide).square().sum(dim=1, keepdim=True)
        self._keep(used, [confidence, correct, nll, brier])
        return used

    def _add_decisions(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Add one prediction per logit (R, C); return whether its label (R, C) is 0 or 1."""
        positive = labels == 1
        used = positive | (labels == 0)
        probs = logits.sigmoid()
        self._add_classes(probs, used, positive)
        confidence = logits.abs().sigmoid()
        correct = (logits > 0) == positive
        # `binary_cross_entropy_with_logits` would be NaN for an infinite (masked) logit.
        nll = -F.logsigmoid(torch.where(positive, logits, -logits))
        brier = (probs - positive.to(probs.dtype)).square_()
        self._keep(used, [confidence, correct, nll, brier])
        return used

    def _add_classes(
        self,
        probs: Tensor,
        used: Tensor,
        shares: Tensor,
        classes: Tensor | None = None,
    ) -> None:
        """Add the probabilities (R, C) of every class, and the shares of labels (R, C).

        With classes (R, 1), the shares are (R, 1), those of these classes.
        """
        if self._class_bins is None:
            return
        first_slots = torch.arange(probs.shape[1], device=probs.device) * self._n_bins
        slots = torch.bucketize(probs, self._edges[probs.dtype]) + first_slots
        rows, probabilities, true_rows = self._class_bins
        _scatter(rows, slots, used.expand_as(probs))
        _scatter(probabilities, slots, torch.where(used, probs, 0.0))
        of_labels = slots if classes is None else slots.gather(1, classes)
        _scatter(true_rows, of_labels, shares)

    def _keep(self, used: Tensor, columns: list[Tensor]) -> None:
        """Keep predictions (R, k): confidence, correct, nll in nats and Brier score."""
        confidence, *others = columns
        is_finite = confidence.isfinite()
        self._counts[0] += used.any(dim=1).sum()
        self._counts[1] += (used & ~is_finite).any(dim=1).sum()
        kept = confidence.where(used & is_finite, _LEFT_OUT)
        self._kept.append([each.flatten() for each in (kept, *others)])


def _softmax(logits: Tensor) -> _Softmax:
    """The softmax of rows of logits (R, C)."""
    largest = logits.amax(dim=1, keepdim=True)
    predicted = logits.argmax(dim=1, keepdim=True)
    if logits.shape[1] > _FEW_CLASSES:
        probs = logits.softmax(dim=1)
    else:
        probs = (logits - largest).exp_()
        probs /= probs.sum(dim=1, keepdim=True)
    return _Softmax(probs, largest, predicted, probs.amax(dim=1, keepdim=True))


def _scatter(sums: Tensor, slots: Tensor, term: Tensor) -> None:
    """Add a term to the slots of its sums, without bincount, which waits for the device."""
    sums.view(-1).scatter_add_(0, slots.flatten(), term.double().flatten())


# ---- Several processes ----


def n_processes() -> int:
    """The number of processes of the default group of torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def summed(array: NDArray[Any]) -> NDArray[Any]:
    """The sum of the arrays of all processes, which have one shape."""
    total = torch.from_numpy(array).to(_device_of_processes())
    dist.all_reduce(total)
    return total.cpu().numpy()


def gathered(array: NDArray[Any]) -> list[NDArray[Any]]:
    """The arrays (K, n) of all processes in the order of the ranks; n may differ."""
    lengths = _all_gather(np.array([array.shape[1]]))
    longest = int(max(lengths)[0])
    padded = np.pad(array, [(0, 0), (0, longest - array.shape[1])])
    parts = _all_gather(padded)
    return [part[:, : n[0]] for part, n in zip(parts, lengths, strict=True)]


def _all_gather(array: NDArray[Any]) -> list[NDArray[Any]]:
    own = torch.from_numpy(array).to(_device_of_processes())
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return [part.cpu().numpy() for part in parts]


def _device_of_processes() -> torch.device:
    """The device whose tensors the processes can send."""
    device = torch.accelerator.current_accelerator()
    if device is None or "gloo" in dist.get_backend():
        return torch.device("cpu")
    return device
