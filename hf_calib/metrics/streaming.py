"""Calibration metrics of an evaluation that does not keep its logits: the sums of a state, computed on a device.

This module needs torch. `update` never waits for the device: predictions that do not count stay, with weight 0.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hf_calib._errors import check
from hf_calib.metrics.checks import (
    FloatArray,
    check_flag,
    check_n_bins,
    check_type,
)
from hf_calib.metrics.state import CalibrationState, cells_of, empty_sums, terms_of
from hf_calib.metrics.sums import (
    TopLabel,
    add_to,
    class_gaps,
    top_label_error,
    uniform_edges,
)

# With more classes, as in a vocabulary, no class has enough rows, and the sums would need most of the time.
MOST_CLASSES_APART = 10_000
_IGNORED_LABEL = -100
_FEW_CLASSES = (
    16  # With so few classes, softmax takes several times as long as its parts.
)
_LEFT_OUT = (
    -1
)  # A prediction in `correct` that is not used; dropping it would wait for the device.
_CHUNK_ELEMENTS = 2**19  # It limits the temporaries of a chunk of rows.


class StreamingCalibration:
    """Calibration metrics that are updated in batches on the device, without keeping the logits.

    Use it for evaluations that are too large for an (N, C) matrix, or that run on several processes. The values are
    those of the functions of `hf_calib.metrics` for all rows; the NLL is exact even if a probability underflows.

    Args:
        multi_label: if False, logits (..., C) are one softmax per row, and labels (...) are class indices. If True,
            each logit is a sigmoid with a label of 0 or 1 and counts as one binary prediction, with confidence
            max(p, 1 - p) and Brier score (p - y)^2.

    >>> stream = StreamingCalibration()
    >>> stream.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> [round(stream.compute()[name], 3) for name in ("accuracy", "nll", "brier", "ece")]
    [0.5, 0.72, 0.549, 0.425]
    """

    def __init__(self, *, n_bins: int = 15, multi_label: bool = False) -> None:
        check_flag("multi_label", multi_label)
        self.n_bins = check_n_bins(n_bins)
        self.multi_label = bool(multi_label)
        self._n_classes = 0  # It is set by the first batch.
        self._confidences: list[Tensor] = []
        self._correct: list[Tensor] = []

    @torch.no_grad()
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add one batch. Values are checked in `compute`, because a check here would wait for the device.

        Args:
            logits: (..., C), any float dtype.
            labels: (...) int in [0, C), or with multi_label (..., C) of 0 and 1; -100 is ignored.
        """
        self._check_batch(logits, labels)
        n_classes = logits.shape[-1]
        # The sums are float64, which "mps" does not support.
        self._start(
            n_classes,
            torch.device("cpu") if logits.device.type == "mps" else logits.device,
        )
        rows = logits.to(self._checks.device).reshape(-1, n_classes)
        if not labels.is_floating_point():
            labels = labels.long()  # In narrow integers C and -100 would wrap around.
        targets = labels.to(rows.device).reshape(
            len(rows), n_classes if self.multi_label else 1
        )
        step = max(1, _CHUNK_ELEMENTS // n_classes)
        for chunk, own in zip(rows.split(step), targets.split(step), strict=True):
            wide = chunk if chunk.dtype == torch.float64 else chunk.float()
            add = self._add_sigmoid if self.multi_label else self._add_softmax
            used, confidence = add(wide, own)
            row_used = used.any(dim=1)
            not_finite = (used & ~confidence.isfinite()).any(dim=1)
            invalid = ~used & (own != _IGNORED_LABEL)
            self._checks += torch.stack(
                [part.sum() for part in (row_used, not_finite, invalid)]
            )

    def all_reduce(self) -> None:
        """Share the sums of all processes, in the order of the ranks; each calls it once, after the last batch."""
        if not (
            dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        ):
            return
        device = torch.device("cpu")
        if "gloo" not in dist.get_backend():
            seen_on = self._checks.device if self._n_classes else None
            device = seen_on or torch.accelerator.current_accelerator() or device
        top = self.top_label
        header = torch.tensor([self._n_classes, len(top.correct)], device=device)
        seen_classes, n_predictions = torch.stack(_all_gather(header)).T.tolist()
        n_classes = max(seen_classes)
        if n_classes == 0:
            return
        for theirs in seen_classes:
            way_out = "evaluate the same model on all"
            check(
                theirs in (0, n_classes),
                f"every process to see {n_classes} classes",
                theirs,
                way_out,
            )
        self._start(n_classes, device)
        for part in (self._checks, *self._sums.values()):
            total = part.to(device)
            dist.all_reduce(total)
            part.copy_(total)
        padded = torch.full(
            (2, max(n_predictions)), _LEFT_OUT, dtype=torch.float64, device=device
        )
        padded[:, : len(top.correct)] = torch.from_numpy(np.stack(top))
        gathered = torch.cat(_all_gather(padded), dim=1).to(self._checks.device)
        self._confidences, self._correct = [gathered[0]], [gathered[1].to(torch.int8)]

    def state(self) -> CalibrationState:
        """Return the sums as a `CalibrationState` to merge, send or report; with multi_label, of all decisions."""
        state, top = self._without_cells(), self.top_label
        add_to(state.sums["cells"], cells_of(top.confidence), [1.0, *top])
        return state

    def _without_cells(self) -> CalibrationState:
        n_rows, not_finite, invalid = (
            map(int, self._checks.tolist()) if self._n_classes else (0, 0, 0)
        )
        allowed = (
            "be 0, 1 or -100"
            if self.multi_label
            else f"lie in 0..{self._n_classes - 1} or be -100"
        )
        way_out = "check that the labels and the model's head mean the same classes"
        check(not invalid, f"labels to {allowed}", f"{invalid} that do not", way_out)
        got = f"NaN in {not_finite} of {n_rows} rows"
        check(
            not not_finite,
            "probabilities to be finite",
            got,
            "look for overflow in the model's logits",
        )
        way_out = "call update with logits first; labels of -100 do not count"
        check(n_rows > 0, "the state to have seen at least one label", "none", way_out)
        state = CalibrationState(
            n_classes=self._n_classes, n_bins=self.n_bins, by_class=self._by_class
        )
        for name, sums in self._sums.items():
            state.sums[name] += sums.cpu().numpy()
        state.sums["bins"][0] = state.sums["bins"][
            1
        ]  # No row has a weight other than 1.
        return state

    def compute(self) -> dict[str, float]:
        """Return all metrics as in `CalibrationState.compute`; classwise_ece only for up to 10,000 classes."""
        state = self._without_cells()
        return state.compute_with(
            top_label_error(self.top_label, n_bins=self.n_bins, binning="quantile")
        )

    @property
    def class_gaps(self) -> FloatArray:
        """Return the binned calibration error (C,) of each of up to 10,000 classes; NaN for a class without labels."""
        return class_gaps(self._without_cells().class_bins())

    @property
    def top_label(self) -> TopLabel:
        """Return the confidences (N,) of the predictions that count and their correctness (N,), 1.0 or 0.0."""
        if not self._n_classes:
            return TopLabel(np.empty(0), np.empty(0))
        confidences, correct = torch.cat(self._confidences), torch.cat(self._correct)
        used = correct != _LEFT_OUT
        return TopLabel(
            *(each[used].double().cpu().numpy() for each in (confidences, correct))
        )

    def _check_batch(self, logits: Tensor, labels: Tensor) -> None:
        for name, value in (("logits", logits), ("labels", labels)):
            got, way_out = (
                type(value).__name__,
                "numpy arrays go to the functions of hf_calib.metrics",
            )
            check_type(
                isinstance(value, Tensor), f"{name} to be a torch.Tensor", got, way_out
            )
        way_out = "pass the model's logits"
        check_type(
            logits.is_floating_point(),
            "logits to be floating point",
            logits.dtype,
            way_out,
        )
        whole = not (labels.is_floating_point() or labels.dtype == torch.bool)
        way_out = (
            "pass class indices, or set multi_label=True for one 0/1 label per class"
        )
        check_type(
            self.multi_label or whole, "labels to be integers", labels.dtype, way_out
        )
        shape = tuple(logits.shape if self.multi_label else logits.shape[:-1])
        got = f"{tuple(labels.shape)} for logits {tuple(logits.shape)}"
        way_out = "set multi_label=True only for one 0/1 label per class"
        check(
            tuple(labels.shape) == shape, f"labels to have shape {shape}", got, way_out
        )
        has_classes = logits.ndim > 0 and logits.shape[-1] >= (
            1 if self.multi_label else 2
        )
        way_out = "a single sigmoid output needs multi_label=True"
        check(
            has_classes,
            "logits to have a class axis (..., C)",
            tuple(logits.shape),
            way_out,
        )

    def _start(self, n_classes: int, device: torch.device) -> None:
        """Allocate the sums at the first batch, or check the number of classes of a later batch."""
        if self._n_classes:
            requirement = f"the number of classes to stay {self._n_classes}"
            check(
                n_classes == self._n_classes,
                requirement,
                n_classes,
                "use one for each label set",
            )
            return
        self._n_classes, self._by_class = n_classes, n_classes <= MOST_CLASSES_APART
        # The counts of rows, of rows that are not finite, and of invalid labels.
        self._checks = torch.zeros(3, dtype=torch.float64, device=device)
        sums = empty_sums(n_classes, self.n_bins, by_class=self._by_class)
        self._sums = {
            name: torch.from_numpy(each).to(device) for name, each in sums.items()
        }
        # With edges rounded to float32, every float32 value is in the same bin as with float64 edges.
        interior = torch.from_numpy(uniform_edges(self.n_bins)[1:-1])
        self._edges = {
            dtype: interior.to(device, dtype)
            for dtype in (torch.float32, torch.float64)
        }

    def _add_softmax(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Add one prediction per row: logits (R, C), labels (R, 1); see `_add`."""
        used = (labels >= 0) & (labels < self._n_classes)
        targets = labels.clamp(0, self._n_classes - 1)
        largest, predicted = (
            logits.amax(dim=1, keepdim=True),
            logits.argmax(dim=1, keepdim=True),
        )
        if self._n_classes > _FEW_CLASSES:
            probs = logits.softmax(dim=1)
        else:
            probs = (logits - largest).exp_()
            probs /= probs.sum(dim=1, keepdim=True)
        if self._by_class:
            self._add_classes(probs, used, targets, used)
        confidence = probs.amax(dim=1, keepdim=True)
        nll = largest - logits.gather(1, targets) - confidence.log()
        others = probs.scatter_(1, targets, 0)
        rest = others.sum(
            dim=1, keepdim=True
        ).double()  # 1 - p of the label, accurate near p = 1.
        brier = (
            torch.linalg.vector_norm(others, dim=1, keepdim=True).double().square()
            + rest.square()
        )
        return self._add(used, predicted, [confidence, predicted == labels, nll, brier])

    def _add_sigmoid(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Add one prediction per logit: logits (R, C), labels (R, C) of 0 and 1; see `_add`."""
        positive = labels == 1
        used = positive | (labels == 0)
        probs = logits.sigmoid()
        classes = torch.arange(self._n_classes, device=logits.device).expand_as(logits)
        if self._by_class:
            self._add_classes(probs, used, classes, positive)
        # `binary_cross_entropy_with_logits` would be NaN for an infinite (masked) logit.
        nll = -F.logsigmoid(torch.where(positive, logits, -logits))
        brier = (probs - positive.to(probs.dtype)).square_()
        return self._add(
            used,
            classes,
            [logits.abs().sigmoid(), (logits > 0) == positive, nll, brier],
        )

    def _add_classes(
        self, probs: Tensor, used: Tensor, classes: Tensor, true: Tensor
    ) -> None:
        """Add the probabilities (R, C) of every class that is used; the classes (R, k) are true."""
        first_slots = torch.arange(self._n_classes, device=probs.device) * self.n_bins
        slots = torch.bucketize(probs, self._edges[probs.dtype]) + first_slots
        counted = torch.where(used, probs.double(), 0.0)
        _scatter(
            self._sums["class_bins"][:2],
            slots,
            [used.double().expand_as(probs), counted],
        )
        _scatter(
            self._sums["class_bins"][2:], slots.gather(1, classes), [true.double()]
        )
        self._sums["class_squares"] += counted.square().sum(dim=0)

    def _add(
        self, used: Tensor, predicted: Tensor, parts: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Add predictions (R, k) with valid labels: confidence, correct, nll in nats, brier."""
        confidence = parts[0]
        wide = torch.stack([part.double() for part in parts])
        in_bin, terms = terms_of(used.double(), *torch.where(used, wide, 0.0))
        slots = torch.bucketize(confidence, self._edges[confidence.dtype])
        if self._by_class:
            slots += predicted * self.n_bins
        _scatter(self._sums["bins"][1:], slots, in_bin)
        self._sums["scores"] += torch.stack(terms).flatten(1).sum(dim=1, keepdim=True)
        self._confidences.append(confidence.flatten())
        self._correct.append(
            torch.where(used, parts[1].to(torch.int8), _LEFT_OUT).flatten()
        )
        return used, confidence


def _scatter(sums: Tensor, slots: Tensor, terms: list[Tensor]) -> None:
    """Add the terms to the slots of their sums (K, ...), without bincount, which waits for the device."""
    for total, term in zip(sums, terms, strict=True):
        total.view(-1).scatter_add_(0, slots.flatten(), term.flatten())


def _all_gather(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts
