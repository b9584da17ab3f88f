"""Calibration metrics of an evaluation that never holds all its logits: the sums of a state, gathered on a device.

Needs torch. Nothing in `update` waits for the device: what is left out stays in place, with weight 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hf_calib._errors import InputTypeError, check, expected
from hf_calib.metrics.checks import FloatArray, check_n_bins
from hf_calib.metrics.state import CalibrationState, sum_shapes
from hf_calib.metrics.sums import TopLabel, class_gaps, top_label_error, uniform_edges

# Beyond, as in a vocabulary, no class has enough rows, and the sums would take most of the time.
MOST_CLASSES_APART = 10_000
_IGNORED_LABEL = -100
_LEFT_OUT = -1  # stands in `correct` for a prediction that is not used: to drop it would wait for the device
_CHUNK_ELEMENTS = 2**19  # temporaries of a chunk of rows stay small, however large batch and vocabulary are


class _Scores(NamedTuple):
    """R rows of logits over C classes as E predictions: one per row (softmax) or one per logit (sigmoid)."""

    predicted: Tensor  # (E,) the class; of a sigmoid the label that it decides
    confidence: Tensor  # (E,) probability of what was predicted
    correct: Tensor  # (E,) bool
    used: Tensor  # (E,) bool, False where the label is ignored or invalid
    nll: Tensor  # (E,) nats
    brier: Tensor  # (E,)
    row_used: Tensor  # (R,) bool, whether any label of the row counts
    row_finite: Tensor  # (R,) bool, False where a probability that counts is NaN
    probs: Tensor | None  # (R, C) float64; None where classes have no sums of their own
    true: tuple[Tensor, Tensor]  # (R, k) which classes may be true, and (R, k) bool, whether they are


class StreamingCalibration:
    """Calibration metrics gathered batch by batch on the device, without keeping logits.

    For evaluations too large to keep as an (N, C) matrix, or spread over processes. It gives what the
    functions of `hf_calib.metrics` give for the softmax of all logits at once.

    Each batch is reduced to the float64 sums of a `CalibrationState`, O(C M) numbers in all, and to two numbers per
    prediction (confidence, correct), for the adaptive ECE and adaptive losses. `update` never waits for the device.

    Args:
        n_bins: M, at least 1.
        multi_label: False: logits (..., C) are one softmax per row, labels (...) are class indices. True:
            each logit is a sigmoid whose label is 0 or 1, and each is one binary prediction, with
            confidence max(p, 1 - p) and Brier score (p - y)^2.

    Notes:
        Labels of -100 are left out. float16 and bfloat16 logits are widened to float32. The NLL comes from
        logits, so it is exact where `negative_log_likelihood` has to clip a probability that underflowed.

    >>> stream = StreamingCalibration()
    >>> stream.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> {name: round(value, 3) for name, value in stream.compute().items()}
    {'accuracy': 0.5, 'nll': 0.72, 'brier': 0.549, 'ece': 0.425, 'adaptive_ece': 0.06,
     'classwise_ece': 0.425, 'mce': 0.731}
    """

    def __init__(self, *, n_bins: int = 15, multi_label: bool = False) -> None:
        self.n_bins = check_n_bins(n_bins)
        self.multi_label = bool(multi_label)
        self._n_classes = 0  # until something is seen
        self._confidences: list[Tensor] = []
        self._correct: list[Tensor] = []

    @torch.no_grad()
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add one batch; values are checked in `compute`, because to look at them here would wait for the device.

        Args:
            logits: (..., C) float, any float dtype.
            labels: (...) int in [0, C), or with multi_label (..., C) of 0 and 1; -100 is left out.
        """
        self._check_batch(logits, labels)
        n_classes = logits.shape[-1]
        # The sums are float64, which "mps" does not have.
        self._start(n_classes, torch.device("cpu") if logits.device.type == "mps" else logits.device)
        rows = logits.to(self._checks.device).reshape(-1, n_classes)
        if not labels.is_floating_point():
            labels = labels.long()  # in narrow ones C and -100 would wrap around
        targets = labels.to(rows.device).reshape(rows.shape if self.multi_label else rows.shape[:1])
        score = _score_sigmoid if self.multi_label else _score_softmax
        step = max(1, _CHUNK_ELEMENTS // n_classes)
        for chunk, chunk_labels in zip(rows.split(step), targets.split(step), strict=True):
            wide = chunk if chunk.dtype == torch.float64 else chunk.float()
            scores = score(wide, chunk_labels, self._by_class)
            invalid = ~scores.used & (chunk_labels.flatten() != _IGNORED_LABEL)
            not_finite = scores.row_used & ~scores.row_finite
            self._checks += torch.stack([part.sum() for part in (scores.row_used, not_finite, invalid)])
            self._add(scores)

    def all_reduce(self) -> None:
        """Give every process what all of them saw, in the order of the ranks; does nothing where there is only one.

        Call it on every process, once, after the last batch; a process that saw no batch takes part too.
        """
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        device = self._collective_device()
        confidences, correct = self._used()
        header = torch.tensor([self._n_classes, len(correct)], device=device)
        seen_classes, n_predictions = torch.stack(_all_gather(header)).T.tolist()
        n_classes = max(seen_classes)
        if n_classes == 0:
            return
        for theirs in seen_classes:
            way_out = "evaluate the same model on all"
            check(theirs in (0, n_classes), f"every process to see {n_classes} classes", theirs, way_out)
        self._start(n_classes, device)
        home = self._checks.device
        own = [self._checks, *self._sums.values()]
        total = torch.cat([part.flatten() for part in own]).to(device)
        dist.all_reduce(total)
        for part, summed in zip(own, total.to(home).split([part.numel() for part in own]), strict=True):
            part.copy_(summed.view_as(part))
        padded = torch.full((2, max(n_predictions)), _LEFT_OUT, dtype=torch.float64, device=device)
        padded[:, : len(correct)] = torch.stack([confidences.double(), correct.double()])
        gathered = torch.cat(_all_gather(padded), dim=1).to(home)
        self._confidences, self._correct = [gathered[0]], [gathered[1].to(torch.int8)]

    def state(self) -> CalibrationState:
        """All sums so far as a state in numpy, to be merged, sent or reported on; of several labels, of all decisions.

        >>> stream = StreamingCalibration()
        >>> stream.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        >>> stream.state().n_rows
        2
        """
        return self._state_and_top()[0]

    def compute(self) -> dict[str, float]:
        """All metrics of what was seen so far.

        Returns:
            The keys of `LOGGED_METRICS` in its order: accuracy, nll (nats), brier, ece, adaptive_ece,
            classwise_ece and mce (all but nll and brier are fractions); classwise_ece for up to 10,000 classes.
        """
        state, top = self._state_and_top()
        return state.compute() | {
            "adaptive_ece": top_label_error(top, n_bins=self.n_bins, binning="quantile")
        }

    @property
    def confidences(self) -> FloatArray:
        """The confidence of each prediction, (N,) float64, in the order they came."""
        return self._used()[0].double().cpu().numpy()

    @property
    def correct(self) -> FloatArray:
        """1.0 where the prediction is right and 0.0 where not, (N,) float64, in the order they came."""
        return self._used()[1].double().cpu().numpy()

    @property
    def class_gaps(self) -> FloatArray:
        """The binned calibration error of each of up to 10,000 classes, (C,); NaN where it has no labels."""
        return class_gaps(self.state().class_bins())

    def _state_and_top(self) -> tuple[CalibrationState, TopLabel]:
        self._check_seen()
        state = CalibrationState.sized(self._n_classes, self.n_bins, by_class=self._by_class)
        for name, sums in self._sums.items():
            state.sums[name][:] = sums.cpu().numpy()
        confidences, correct = (part.double().cpu().numpy() for part in self._used())
        state.add_to_cells(confidences, correct)
        return state, TopLabel(confidences, correct)

    @property
    def _by_class(self) -> bool:
        return self._n_classes <= MOST_CLASSES_APART

    def _check_batch(self, logits: Tensor, labels: Tensor) -> None:
        for name, value in (("logits", logits), ("labels", labels)):
            if not isinstance(value, Tensor):
                way_out = "numpy arrays go to the functions of hf_calib.metrics"
                raise InputTypeError(expected(name, "be a torch.Tensor", type(value).__name__, way_out))
        if not logits.is_floating_point():
            way_out = "pass the model's logits"
            raise InputTypeError(expected("logits", "be floating point", logits.dtype, way_out))
        if not self.multi_label and (labels.is_floating_point() or labels.dtype == torch.bool):
            way_out = "pass class indices, or set multi_label=True for one 0/1 label per class"
            raise InputTypeError(expected("labels", "be integers", labels.dtype, way_out))
        shape = logits.shape if self.multi_label else logits.shape[:-1]
        got = f"{tuple(labels.shape)} beside logits {tuple(logits.shape)}"
        way_out = "set multi_label=True only for one 0/1 label per class"
        check(labels.shape == shape, f"labels to have shape {tuple(shape)}", got, way_out)
        has_classes = logits.ndim > 0 and logits.shape[-1] >= (1 if self.multi_label else 2)
        way_out = "a single sigmoid output needs multi_label=True"
        check(has_classes, "logits to have a class axis (..., C)", tuple(logits.shape), way_out)

    def _check_seen(self) -> None:
        """Raise unless the sums mean something."""
        n_rows, not_finite, invalid = map(int, self._checks.tolist()) if self._n_classes else (0, 0, 0)
        allowed = "be 0, 1 or -100" if self.multi_label else f"lie in 0..{self._n_classes - 1} or be -100"
        way_out = "check that the labels and the model's head mean the same classes"
        check(not invalid, f"labels to {allowed}", f"{invalid} that do not", way_out)
        got = f"NaN in {not_finite} of {n_rows} rows"
        check(not not_finite, "probabilities to be finite", got, "look for overflow in the model's logits")
        way_out = "call update with logits first; labels of -100 do not count"
        check(n_rows > 0, "the state to have seen at least one label", "none", way_out)

    def _start(self, n_classes: int, device: torch.device) -> None:
        """Make room for the first batch, or check that a later one has as many classes."""
        if self._n_classes:
            requirement = f"the number of classes to stay {self._n_classes}"
            check(n_classes == self._n_classes, requirement, n_classes, "use one for each label set")
            return
        self._n_classes = n_classes
        shapes = sum_shapes(n_classes, self.n_bins, by_class=self._by_class)
        # Rows, those that are not finite, invalid labels.
        self._checks = torch.zeros(3, dtype=torch.float64, device=device)
        self._sums = {name: self._checks.new_zeros(shape) for name, shape in shapes.items()}
        # Edges rounded to float32 put every float32 value into the same bin as the float64 edges do.
        interior = torch.from_numpy(uniform_edges(self.n_bins)[1:-1])
        self._edges = {dtype: interior.to(device, dtype) for dtype in (torch.float32, torch.float64)}

    def _add(self, scores: _Scores) -> None:
        used, sums = scores.used, self._sums
        edges = self._edges[scores.confidence.dtype]
        parts = (scores.confidence, scores.correct, scores.nll, scores.brier)
        confidence, correct, nll, brier = torch.where(
            used, torch.stack([part.double() for part in parts]), 0.0
        )
        ones, gap = used.double(), confidence - correct
        groups = scores.predicted if self._by_class else torch.zeros_like(scores.predicted)
        slots = torch.bucketize(scores.confidence, edges) + groups * self.n_bins
        _scatter(sums["bins"], slots, [ones, ones, confidence, confidence.square(), correct])
        _scatter(sums["scores"], groups, [ones, nll, nll.square(), brier, brier.square(), gap, gap.square()])
        if scores.probs is not None:
            self._add_classes(scores)
        self._confidences.append(scores.confidence)
        self._correct.append(torch.where(used, scores.correct.to(torch.int8), _LEFT_OUT))

    def _add_classes(self, scores: _Scores) -> None:
        """Add the probability of every class of every row (R, C) to the bins of its class."""
        assert scores.probs is not None
        counted = scores.used.view_as(scores.true[0]).expand_as(scores.probs)
        first_slots = torch.arange(self._n_classes, device=counted.device) * self.n_bins
        slots = torch.bucketize(scores.probs, self._edges[scores.probs.dtype]) + first_slots
        probs = torch.where(counted, scores.probs.double(), 0.0)
        classes, holds = scores.true
        _scatter(self._sums["class_bins"][:2], slots, [counted.double(), probs])
        _scatter(self._sums["class_bins"][2:], slots.gather(1, classes), [holds.double()])
        self._sums["class_squares"] += probs.square().sum(dim=0)

    def _used(self) -> tuple[Tensor, Tensor]:
        """Confidence and correctness of the predictions that count."""
        if not self._n_classes:
            return torch.empty(0), torch.empty(0)
        correct = torch.cat(self._correct)
        used = correct != _LEFT_OUT
        return torch.cat(self._confidences)[used], correct[used]

    def _collective_device(self) -> torch.device:
        """Where the default process group can exchange tensors, also for a process that saw no batch."""
        if "gloo" in dist.get_backend():
            return torch.device("cpu")
        if self._n_classes:
            return self._checks.device
        return torch.accelerator.current_accelerator() or torch.device("cpu")


def _score_softmax(logits: Tensor, labels: Tensor, by_class: bool) -> _Scores:
    """One prediction per row: logits (R, C), labels (R,) class indices."""
    n_classes = logits.shape[1]
    used = (labels >= 0) & (labels < n_classes)
    targets = labels.long().clamp(0, n_classes - 1).unsqueeze(1)
    predicted = logits.argmax(dim=1)
    if by_class:
        shifted = logits - logits.amax(dim=1, keepdim=True)
        probs = shifted.exp()
        total = probs.sum(dim=1, keepdim=True)
        probs /= total
        confidence, finite = probs.amax(dim=1), total.squeeze(1).isfinite()
        nll = (total.log() - shifted.gather(1, targets)).squeeze(1)
        off = probs.scatter_add(1, targets, -torch.ones_like(total))
        brier = off.square_().sum(dim=1, dtype=torch.float64)
    else:  # few passes over the logits, with one matrix beside them
        probs = logits.softmax(dim=1)
        confidence = probs.amax(dim=1)
        finite = confidence.isfinite()
        nll = logits.amax(dim=1) - logits.gather(1, targets).squeeze(1) - confidence.log()
        probs.scatter_(1, targets, 0)
        brier = (torch.linalg.vector_norm(probs, dim=1).square() + probs.sum(dim=1).square()).double()
    return _Scores(
        predicted=predicted,
        confidence=confidence,
        correct=(predicted == labels) & used,
        used=used,
        nll=nll,
        brier=brier,
        row_used=used,
        row_finite=finite,
        probs=probs if by_class else None,
        true=(targets, used.unsqueeze(1)),
    )


def _score_sigmoid(logits: Tensor, labels: Tensor, by_class: bool) -> _Scores:
    """One prediction per logit: logits (R, C), labels (R, C) of 0 and 1."""
    positive = labels == 1
    used = positive | (labels == 0)
    probs = logits.sigmoid()
    classes = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    return _Scores(
        predicted=classes.flatten(),
        confidence=logits.abs().sigmoid().flatten(),
        correct=((logits > 0) == positive).flatten(),
        used=used.flatten(),
        # Not binary_cross_entropy_with_logits, which is NaN for an infinite (masked) logit.
        nll=-F.logsigmoid(torch.where(positive, logits, -logits)).flatten(),
        brier=(probs - positive.to(probs.dtype)).square_().flatten(),
        row_used=used.any(dim=1),
        row_finite=(~used | probs.isfinite()).all(dim=1),
        probs=probs if by_class else None,
        true=(classes, positive),
    )


def _scatter(sums: Tensor, slots: Tensor, values: list[Tensor]) -> None:
    """Add each of the values to its slot of sums (K, ...); not bincount, which waits for the device."""
    for total, value in zip(sums, values, strict=True):
        total.view(-1).scatter_add_(0, slots.flatten(), value.flatten())


def _all_gather(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts
