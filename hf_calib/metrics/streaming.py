"""Calibration metrics of an evaluation that never holds all its logits."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib.metrics._batch_scores import BatchScores, score_sigmoid, score_softmax
from hf_calib.metrics.checks import FloatArray, check_n_bins
from hf_calib.metrics.sums import (
    BinMeans,
    BinSums,
    TopLabel,
    binned_error,
    class_gaps,
    mean_bins,
    top_label_error,
    uniform_edges,
)

_N_SCALARS = 7  # predictions, correct, nll, brier, rows, rows that are not finite, invalid labels
_LEFT_OUT = -1  # stands in `correct` for a prediction that is not used: to drop it would wait for the device
# Beyond, as in a vocabulary, no class has enough rows, and the sums would take most of the time.
MOST_CLASSES_APART = 10_000
_CHUNK_ELEMENTS = 2**19  # temporaries of a chunk of rows stay small, however large batch and vocabulary are


class StreamingCalibration:
    """Calibration metrics gathered batch by batch on the device, without keeping logits.

    For evaluations too large to keep as an (N, C) matrix, or spread over processes. It gives what the
    functions of `hf_calib.metrics` give for the softmax of all logits at once.

    Each batch is reduced to float64 sums, O(C M) numbers in all, and to two numbers per prediction
    (confidence, correct), which the adaptive ECE needs. `update` never waits for the device.

    Args:
        n_bins: M, at least 1.
        temperature: T > 0; logits are divided by it.
        multi_label: False: logits (..., C) are one softmax per row, labels (...) are class indices. True:
            each logit is a sigmoid whose label is 0 or 1, and each is one binary prediction, with
            confidence max(p, 1 - p) and Brier score (p - y)^2.

    Raises:
        TypeError: if n_bins is not an integer.
        ValueError: if n_bins or temperature is out of range.

    Notes:
        Labels of -100 are left out. float16 and bfloat16 logits are widened to float32. The NLL comes from
        logits, so it is exact where `negative_log_likelihood` has to clip a probability that underflowed.

    >>> state = StreamingCalibration()
    >>> state.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    >>> {name: round(value, 3) for name, value in state.compute().items()}
    {'accuracy': 0.5, 'nll': 0.72, 'brier': 0.549, 'ece': 0.425, 'adaptive_ece': 0.06,
     'classwise_ece': 0.425, 'mce': 0.731}
    """

    def __init__(self, *, n_bins: int = 15, temperature: float = 1.0, multi_label: bool = False) -> None:
        if not (math.isfinite(temperature) and temperature > 0):
            way_out = "1.0 leaves the logits as they are"
            raise InputValueError(expected("temperature", "be a finite number above 0", temperature, way_out))
        self.n_bins = check_n_bins(n_bins)
        self.temperature = float(temperature)
        self.multi_label = bool(multi_label)
        self._n_classes = 0  # until something is seen
        self._sums = torch.empty(0, dtype=torch.float64)
        self._edges: dict[torch.dtype, torch.Tensor] = {}
        self._confidences: list[torch.Tensor] = []
        self._correct: list[torch.Tensor] = []

    @torch.no_grad()
    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add one batch.

        Args:
            logits: (..., C) float, any float dtype.
            labels: (...) int in [0, C), or with multi_label (..., C) of 0 and 1; -100 is left out.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if shapes do not fit each other or the batches before. The values are checked in
                `compute`, because to look at them here would wait for the device.
        """
        self._check_batch(logits, labels)
        n_classes = logits.shape[-1]
        # The sums are float64, which "mps" does not have.
        device = torch.device("cpu") if logits.device.type == "mps" else logits.device
        self._start(n_classes, device)
        rows = logits.to(self._sums.device).reshape(-1, n_classes)
        if not labels.is_floating_point():
            labels = labels.long()  # in narrow ones C and -100 would wrap around
        targets = labels.to(self._sums.device).reshape(rows.shape if self.multi_label else rows.shape[:1])
        score = score_sigmoid if self.multi_label else score_softmax
        step = max(1, _CHUNK_ELEMENTS // n_classes)
        for chunk, chunk_labels in zip(rows.split(step), targets.split(step), strict=True):
            wide = chunk if chunk.dtype == torch.float64 else chunk.float()
            self._add(score(wide, chunk_labels, self.temperature, by_class=self._by_class))

    def merge(self, other: StreamingCalibration) -> None:
        """Add another state of the same settings, as if its batches had come here too.

        Raises:
            ValueError: if n_bins, temperature, multi_label or the number of classes differ.
        """
        for name in ("n_bins", "temperature", "multi_label"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                way_out = "merge states that were made alike"
                raise InputValueError(expected(f"the other state's {name}", f"be {mine}", theirs, way_out))
        if not other._n_classes:
            return
        self._start(other._n_classes, other._sums.device)
        device = self._sums.device
        self._sums += other._sums.to(device)
        self._confidences += [part.to(device) for part in other._confidences]
        self._correct += [part.to(device) for part in other._correct]

    def all_reduce(self) -> None:
        """Give every process the state of all of them; does nothing where there is only one.

        Call it on every process, once, after the last batch; a process that saw no batch takes part too.
        Predictions are then in the order of the ranks.

        Raises:
            ValueError: if the processes saw different numbers of classes.
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
            if theirs not in (0, n_classes):
                way_out = "evaluate the same model on all"
                raise InputValueError(expected("every process", f"see {n_classes} classes", theirs, way_out))
        self._start(n_classes, device)
        home = self._sums.device
        total = self._sums.to(device)
        dist.all_reduce(total)
        padded = torch.full((2, max(n_predictions)), _LEFT_OUT, dtype=torch.float64, device=device)
        padded[:, : len(correct)] = torch.stack([confidences.double(), correct.double()])
        gathered = torch.cat(_all_gather(padded), dim=1).to(home)
        self._sums = total.to(home)
        self._confidences, self._correct = [gathered[0]], [gathered[1].to(torch.int8)]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All that was seen so far and the settings, as tensors on the CPU, for safetensors or torch.save.

        >>> state = StreamingCalibration()
        >>> state.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        >>> saved = state.state_dict()
        >>> StreamingCalibration.from_state_dict(saved).compute() == state.compute()
        True
        """
        confidences, correct = self._used()
        settings = [self.n_bins, self.temperature, self.multi_label, self._n_classes]
        return {
            "settings": torch.tensor(settings, dtype=torch.float64),
            "sums": self._sums.detach().cpu().clone(),
            "confidences": confidences.detach().cpu().clone(),
            "correct": correct.detach().cpu().to(torch.int8),
        }

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, torch.Tensor]) -> StreamingCalibration:
        """A state that goes on where the saved one stood.

        Raises:
            ValueError: if saved is not a result of `state_dict`.
        """
        _check_saved(saved)
        n_bins, temperature, multi_label, n_classes = saved["settings"].tolist()
        state = cls(n_bins=int(n_bins), temperature=temperature, multi_label=bool(multi_label))
        if n_classes:
            state._start(int(n_classes), torch.device("cpu"))
            state._sums.copy_(saved["sums"])
            state._confidences = [saved["confidences"].clone()]
            state._correct = [saved["correct"].clone()]
        return state

    def compute(self) -> dict[str, float]:
        """All metrics of what was seen so far.

        Returns:
            The keys of `LOGGED_METRICS` in its order: accuracy, nll (nats), brier, ece, adaptive_ece,
            classwise_ece and mce (all but nll and brier are fractions); classwise_ece for up to 10,000 classes.

        Raises:
            ValueError: if nothing was seen, logits were not finite, or labels were out of range.
        """
        scalars, bins, classes = self._checked_sums()
        n_predictions, correct, nll, brier = scalars[:4].tolist()
        top = TopLabel(self.confidences, self.correct)
        adaptive = top_label_error(top, n_bins=self.n_bins, binning="quantile")
        found = {
            "accuracy": correct / n_predictions,
            "nll": nll / n_predictions,
            "brier": brier / n_predictions,
            "ece": float(binned_error(bins, n_predictions)),
            "adaptive_ece": adaptive,
            "classwise_ece": float(np.nanmean(class_gaps(classes))) if self._by_class else None,
            "mce": float(binned_error(bins, n_predictions, "max")),
        }
        return {name: value for name, value in found.items() if value is not None}

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
        """The binned calibration error of each class, (C,); NaN for one whose labels were all left out.

        Raises:
            ValueError: if there are more than 10,000 classes, whose errors are not gathered.
        """
        if not self._by_class:
            way_out = "take what looks at the predicted class only"
            requirement = f"be asked for with at most {MOST_CLASSES_APART:,} classes"
            raise InputValueError(expected("class_gaps", requirement, f"{self._n_classes:,}", way_out))
        return class_gaps(self._checked_sums()[2])

    @property
    def bins(self) -> BinMeans:
        """The counts, mean confidence and accuracy, (M,) each, of the equal-width bins."""
        return mean_bins(self._checked_sums()[1])

    @property
    def _by_class(self) -> bool:
        return self._n_classes <= MOST_CLASSES_APART

    def _check_batch(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        for name, value in (("logits", logits), ("labels", labels)):
            if not isinstance(value, torch.Tensor):
                way_out = "numpy arrays go to the functions of hf_calib.metrics"
                raise InputTypeError(expected(name, "be a torch.Tensor", type(value).__name__, way_out))
        if not logits.is_floating_point():
            raise InputTypeError(
                expected("logits", "be floating point", logits.dtype, "pass the model's logits")
            )
        if not self.multi_label and (labels.is_floating_point() or labels.dtype == torch.bool):
            way_out = "pass class indices, or set multi_label=True for one 0/1 label per class"
            raise InputTypeError(expected("labels", "be integers", labels.dtype, way_out))
        shape = logits.shape if self.multi_label else logits.shape[:-1]
        if labels.shape != shape:
            got = f"{tuple(labels.shape)} beside logits {tuple(logits.shape)}"
            way_out = "set multi_label=True only for one 0/1 label per class"
            raise InputValueError(expected("labels", f"have shape {tuple(shape)}", got, way_out))
        if logits.ndim == 0 or logits.shape[-1] < (1 if self.multi_label else 2):
            way_out = "a single sigmoid output needs multi_label=True"
            raise InputValueError(
                expected("logits", "have a class axis (..., C)", tuple(logits.shape), way_out)
            )

    def _start(self, n_classes: int, device: torch.device) -> None:
        """Make room for the first batch, or check that a later one has as many classes."""
        if self._n_classes == 0:
            self._n_classes = n_classes
            self._sums = torch.zeros(_n_sums(self.n_bins, n_classes), dtype=torch.float64, device=device)
            # Edges rounded to float32 put every float32 value into the same bin as the float64 edges do.
            interior = torch.from_numpy(uniform_edges(self.n_bins)[1:-1])
            self._edges = {dtype: interior.to(device, dtype) for dtype in (torch.float32, torch.float64)}
        elif n_classes != self._n_classes:
            way_out = "use one state for each label set"
            raise InputValueError(
                expected("the number of classes", f"stay {self._n_classes}", n_classes, way_out)
            )

    def _add(self, scores: BatchScores) -> None:
        scalars, bins, classes = self._split()
        used = scores.used
        per_prediction = torch.stack(
            [used.double(), scores.correct.double(), scores.nll.double(), scores.brier.double()]
        )
        scalars[:4] += torch.where(used, per_prediction, 0.0).sum(dim=1)
        scalars[4] += scores.row_used.sum()
        scalars[5] += (scores.row_used & ~scores.row_finite).sum()
        scalars[6] += scores.invalid.sum()
        slots = self._slots(scores.confidence, used)
        _add_to_slots(bins, slots, scores.confidence, scores.correct)
        if scores.classes is not None:
            probs, hits, counted = scores.classes
            first_slots = torch.arange(self._n_classes, device=slots.device) * (self.n_bins + 1)
            _add_to_slots(classes, self._slots(probs, counted) + first_slots, probs, hits)
        self._confidences.append(scores.confidence)
        self._correct.append(torch.where(used, scores.correct.to(torch.int8), _LEFT_OUT))

    def _split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the sums: scalars, (3, M + 1) of the bins and (3, C (M + 1)) of the classes' bins, if any.

        One tensor holds them all, so that processes exchange them in one message. The three are count,
        confidence and correct; the extra slot of each row of bins takes what is left out, and is never read.
        """
        slots = self.n_bins + 1
        sizes = [_N_SCALARS, 3 * slots, 3 * slots * _apart(self._n_classes)]
        scalars, bins, classes = self._sums.split(sizes)
        return scalars, bins.view(3, -1), classes.view(3, -1)

    def _slots(self, values: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        return torch.where(used, torch.bucketize(values, self._edges[values.dtype]), self.n_bins)

    def _used(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Confidence and correctness of the predictions that count."""
        if not self._n_classes:
            return self._sums, self._sums
        correct = torch.cat(self._correct)
        used = correct != _LEFT_OUT
        return torch.cat(self._confidences)[used], correct[used]

    def _checked_sums(self) -> tuple[FloatArray, BinSums, BinSums]:
        """The sums on the host, once they are known to mean something."""
        if not self._n_classes:
            raise InputValueError(_nothing_seen())
        scalars, bins, classes = (part.cpu().numpy() for part in self._split())
        n_predictions, n_rows, not_finite, invalid = (int(scalars[index]) for index in (0, 4, 5, 6))
        if invalid:
            allowed = "be 0, 1 or -100" if self.multi_label else f"lie in 0..{self._n_classes - 1} or be -100"
            way_out = "check that the labels and the model's head mean the same classes"
            raise InputValueError(expected("labels", allowed, f"{invalid} that do not", way_out))
        if not_finite:
            got = f"NaN in {not_finite} of {n_rows} rows"
            way_out = "look for overflow in the model's logits"
            raise InputValueError(expected("probabilities", "be finite", got, way_out))
        if not n_predictions:
            raise InputValueError(_nothing_seen())
        per_class = classes.reshape(3, _apart(self._n_classes), self.n_bins + 1)
        return scalars, BinSums(*bins[:, :-1]), BinSums(*per_class[:, :, :-1])

    def _collective_device(self) -> torch.device:
        """Where the default process group can exchange tensors, also for a process that saw no batch."""
        if "gloo" in dist.get_backend():
            return torch.device("cpu")
        if self._n_classes:
            return self._sums.device
        return torch.accelerator.current_accelerator() or torch.device("cpu")


def _add_to_slots(sums: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, hits: torch.Tensor) -> None:
    """Add one, the value and the hit of each prediction to its slot of sums (3, slots)."""
    weights = (torch.ones_like(values, dtype=torch.float64), values.double(), hits.double())
    for total, weight in zip(sums, weights, strict=True):
        # Not bincount, which waits for the device to learn its largest index.
        total.scatter_add_(0, slots.flatten(), weight.flatten())


def _check_saved(saved: Mapping[str, torch.Tensor]) -> None:
    way_out = "pass what state_dict returned, whole"
    names = {"settings", "sums", "confidences", "correct"}
    if set(saved) != names or saved["settings"].shape != (4,):
        raise InputValueError(expected("saved", f"hold {sorted(names)}", sorted(saved), way_out))
    n_bins, _, _, n_classes = map(int, saved["settings"].tolist())
    size = _n_sums(n_bins, n_classes) if n_classes else 0
    if len(saved["sums"]) != size or saved["confidences"].shape != saved["correct"].shape:
        got = f"{len(saved['sums'])} sums, {len(saved['confidences'])} confidences, {len(saved['correct'])} correct"
        raise InputValueError(
            expected("saved", f"hold {size} sums, and as many confidences as correct", got, way_out)
        )


def _n_sums(n_bins: int, n_classes: int) -> int:
    return _N_SCALARS + 3 * (1 + _apart(n_classes)) * (n_bins + 1)


def _apart(n_classes: int) -> int:
    """How many classes have sums of their own."""
    return n_classes if n_classes <= MOST_CLASSES_APART else 0


def _all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def _nothing_seen() -> str:
    way_out = "call update with logits first; labels of -100 do not count"
    return expected("the state", "have seen at least one label", "none", way_out)
