"""Calibration during training: `TrainingTrace` records it, and `Trace` reads the record for figures."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Subset
from transformers import TrainerCallback

from hf_calib._errors import check
from hf_calib._files import whole_file

FloatArray = NDArray[np.float64]
FILE = "training_trace.json"


class TrainingTrace(TrainerCallback):
    """Records at each evaluation how calibrated a model is on its evaluation rows and on training rows, bin by bin.

    `trainer.add_callback(TrainingTrace(trainer))` writes `training_trace.json` in `output_dir`, for
    `Trace.load`. Of each evaluation set ("eval"; several by their names), of a fixed random sample
    of the training rows ("training") and of `test_dataset` ("test") it has what a `TracedSet`
    lists. The papers' figures of the ECE by epoch are of test rows, those of bins of validation
    rows. The bins are those of the loss's table of gammas where it has one, else equal-mass bins of
    the evaluation rows' confidences, as in AdaFocal's figures; what lies beyond the outer edges
    counts in the outer bins. Of a table it has the gammas after the evaluation, which hold until
    the next one.

    It costs a forward pass over these sets at each evaluation; random streams are left as found.
    Rows have one label. A resumed training goes on with the record in `output_dir`.

    References:
        Ghosh et al. 2022, "AdaFocal", figures 1, 2, 4, 5 and 34; Tao et al. 2023, "Dual focal
        loss", figure 4; Lin et al. 2025, "Uncertainty weighted gradients", figure 5a.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        n_training_rows: int = 1000,
        n_kept_rows: int = 200,
        test_dataset: Any = None,
    ) -> None:
        self.trainer = trainer
        self.n_kept_rows = n_kept_rows
        known = trainer.eval_dataset
        self.sets: dict[str, Any] = {"eval": known}
        if isinstance(known, dict):
            self.sets = {f"eval_{name}": rows for name, rows in known.items()}
        # Only these have bins of their own.
        self.evaluated = frozenset(self.sets)
        if test_dataset is not None:
            self.sets["test"] = test_dataset
        self.numbers = {name: np.arange(len(rows)) for name, rows in self.sets.items()}
        if n_training_rows:
            dataset = trainer.train_dataset
            drawn = _drawn(len(dataset), n_training_rows, trainer.args.seed)
            self.numbers["training"] = drawn
            self.sets["training"] = Subset(dataset, drawn.tolist())
        self.entries: list[dict[str, Any]] = []
        self.is_recording = False

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Begin a record, or go on with that of a resumed training."""
        one_label = not self.trainer.calibration_loss.multi_label
        requirement = "TrainingTrace to go with one label per row"
        check(one_label, requirement, "several", "leave it out")
        file = Path(args.output_dir, FILE)
        self.entries = []
        if state.global_step and file.exists():
            earlier = json.loads(file.read_text())["entries"]
            self.entries = [
                each for each in earlier if each["step"] <= state.global_step
            ]
        self.loaders = {
            name: self.trainer.get_test_dataloader(rows)
            for name, rows in self.sets.items()
        }
        self.is_recording = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop recording: later evaluations are of the best model, or with a calibrator."""
        self.is_recording = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the first evaluation at a step."""
        steps = [entry["step"] for entry in self.entries]
        if not self.is_recording or state.global_step in steps:
            return
        loss = self.trainer.calibration_loss
        gammas = getattr(loss, "gammas", None)
        edges = np.empty(0) if gammas is None else loss.edges.numpy()
        recorded = {}
        # Test and training rows come last, in the bins of the evaluation rows.
        for name, loader in self.loaders.items():
            scores = self._scores(loader)
            if name in self.evaluated and gammas is None:
                edges = _equal_mass_edges(scores[:, 0], args.n_bins)
            kept = _drawn(len(scores), self.n_kept_rows, args.seed)
            numbers = self.numbers[name]
            if len(scores) != len(numbers):
                # Of tokens, and where some rows have no label, those that have one are counted.
                numbers = np.arange(len(scores))
            summary = _summary(scores, edges, kept, args.n_bins)
            recorded[name] = {"rows": numbers[kept].tolist(), **summary}
        entry = {"step": state.global_step, "epoch": state.epoch, "sets": recorded}
        if gammas is not None:
            entry["gammas"] = gammas.tolist()
        self.entries.append(entry)
        if state.is_world_process_zero:
            text = json.dumps({"loss": loss.name, "entries": self.entries})
            with whole_file(Path(args.output_dir, FILE)) as unfinished:
                unfinished.write_text(text + "\n")

    @torch.no_grad()
    def _scores(self, loader: Any) -> FloatArray:
        """(N, 5) of each row with a label: confidence, whether it is right, label, rival, largest logit."""
        trainer = self.trainer
        parts = []
        modes = [(module, module.training) for module in trainer.model.modules()]
        with torch.random.fork_rng():
            trainer.model.eval()
            for batch in loader:
                labels = batch.pop("labels").reshape(-1)
                with trainer.compute_loss_context_manager():
                    logits = trainer.model(**batch).logits
                scores = _row_scores(logits.reshape(len(labels), -1).float(), labels)
                parts.append(trainer.accelerator.gather_for_metrics(scores).cpu())
        for module, mode in modes:
            module.training = mode
        found = torch.cat(parts).double().numpy()
        return found[~np.isnan(found[:, 0])]


def _row_scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(N, 5), NaN without a label; the rival is the largest probability strictly below the label's, 0 for none."""
    log_p = logits.log_softmax(dim=1)
    of_label = log_p.gather(1, labels.clamp_min(0).unsqueeze(1))
    rival = log_p.masked_fill(log_p >= of_label, -torch.inf).amax(dim=1)
    correct = (logits.argmax(dim=1) == labels).float()
    confidence = log_p.amax(dim=1).exp()
    p = of_label.squeeze(1).exp()
    columns = [confidence, correct, p, rival.exp(), logits.amax(dim=1)]
    has_no_label = (labels < 0).unsqueeze(1)
    return torch.stack(columns, dim=1).masked_fill(has_no_label, torch.nan)


def _drawn(n: int, at_most: int, seed: int) -> NDArray[np.int64]:
    """The numbers of a random subset of n rows, in order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=generator)[:at_most].sort().values.numpy()


def _equal_mass_edges(confidences: FloatArray, n_bins: int) -> FloatArray:
    """The papers' edges (M + 1,), interpolated between sorted confidences."""
    ranks = np.linspace(0, len(confidences), n_bins + 1)
    return np.interp(ranks, np.arange(len(confidences)), np.sort(confidences))


def _ece(confidence: FloatArray, correct: FloatArray, edges: FloatArray) -> float:
    """Of bins (low, high]; as in the papers' code, the smallest confidence is in none of equal mass."""
    bins = np.searchsorted(edges, confidence, side="left")
    gaps = np.bincount(bins, confidence - correct)
    return float(np.abs(gaps[1:]).sum() / len(confidence))


def _summary(
    scores: FloatArray, edges: FloatArray, kept: NDArray[np.int64], n_bins: int
) -> dict[str, Any]:
    """The fields of a `TracedSet` at one evaluation."""
    confidence, correct, of_label, rival, max_logit = scores.T
    # (low, high] for predictions and [low, high) for labels, as AdaFocal has them.
    n = len(edges) - 1
    bins = np.searchsorted(edges[1:-1], confidence, side="left")
    label_bins = np.searchsorted(edges[1:-1], of_label, side="right")
    counts = np.bincount(bins, minlength=n)
    label_counts = np.bincount(label_bins, minlength=n)
    equal_width = np.linspace(0, 1, n_bins + 1)
    equal_mass = _equal_mass_edges(confidence, n_bins)
    with np.errstate(invalid="ignore"):
        # A mean of an empty bin is NaN.
        bin_confidence = np.bincount(bins, confidence, n) / counts
        bin_accuracy = np.bincount(bins, correct, n) / counts
        label_probability = np.bincount(label_bins, of_label, n) / label_counts
    found = {
        "n": len(scores),
        "accuracy": correct.mean(),
        "ece": _ece(confidence, correct, equal_width),
        "adaptive_ece": _ece(confidence, correct, equal_mass),
        "edges": edges,
        "counts": counts,
        "bin_confidence": bin_confidence,
        "bin_accuracy": bin_accuracy,
        "label_counts": label_counts,
        "label_probability": label_probability,
        "row_confidence": confidence[kept],
        "row_correct": correct[kept],
        "row_label_probability": of_label[kept],
        "row_rival_probability": rival[kept],
        "row_max_logit": max_logit[kept],
    }
    return {name: np.asarray(value, float).tolist() for name, value in found.items()}


class TracedSet(SimpleNamespace):
    """One set of rows at T evaluations: M bins of its predictions, and R rows followed one by one, as arrays.

    `steps`, `epochs`, `n`, `accuracy`, `ece` (of equal-width bins) and `adaptive_ece` are (T,).
    `edges` (T, M + 1) are the evaluation set's, also where this is the training or the test set.
    (T, M) are, by the confidence, `counts`, `bin_confidence` (AdaFocal's C_val) and `bin_accuracy`
    (A_val), and by the label's probability `label_counts` and its mean `label_probability` (C_train
    where this is the training set); a mean of an empty bin is NaN. Of the `rows` (R,) followed, (T,
    R) are `row_confidence`, `row_correct`, `row_label_probability`, `row_rival_probability` (the
    largest below the label's, 0 where there is none) and `row_max_logit`.
    """

    @classmethod
    def of(cls, evaluations: Sequence[Mapping[str, Any]]) -> TracedSet:
        fields = {
            name: np.array([each[name] for each in evaluations], float)
            for name in evaluations[0]
        }
        fields["rows"] = np.array(evaluations[0]["rows"])
        return cls(**fields)

    @property
    def gaps(self) -> FloatArray:
        """(T, M) confidence minus accuracy of each bin, above 0 where it is over-confident."""
        return self.bin_confidence - self.bin_accuracy


@dataclass(frozen=True)
class Trace:
    """A record of `TrainingTrace`: the sets, and (T, M) gammas at (T,) steps, (0, 0) for a loss without a table."""

    loss: str
    sets: Mapping[str, TracedSet]
    steps: FloatArray
    gammas: FloatArray

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read `training_trace.json`, or the one in the folder of a training."""
        file = Path(path)
        if file.is_dir():
            file = file / FILE
        requirement = f"{file} to be a file of TrainingTrace"
        way_out = "train with trainer.add_callback(TrainingTrace(trainer))"
        check(file.is_file(), requirement, "no such file", way_out)
        saved = json.loads(file.read_text())
        found: dict[str, list[dict[str, Any]]] = {}
        steps = []
        gammas = []
        for entry in saved["entries"]:
            when = {"steps": entry["step"], "epochs": entry["epoch"]}
            for name, fields in entry["sets"].items():
                found.setdefault(name, []).append(when | fields)
            if "gammas" in entry:
                steps.append(entry["step"])
                gammas.append(entry["gammas"])
        sets = {name: TracedSet.of(evaluations) for name, evaluations in found.items()}
        table = np.array(gammas) if gammas else np.empty((0, 0))
        return cls(saved["loss"], sets, np.array(steps, float), table)


def learned_epoch(epochs: ArrayLike, correct: ArrayLike) -> FloatArray:
    """The epoch (R,) from which on each row is right until the end; infinity if it is wrong there.

    `epochs` (T,) rise, `correct` is (T, R). Wang et al. 2021, "Rethinking calibration of deep
    neural networks", whose groups AdaFocal's figure 34 shows.

    >>> learned_epoch([1, 2, 3], [[0, 1, 0], [1, 0, 0], [1, 1, 0]])
    array([ 2.,  3., inf])
    """
    at = np.asarray(epochs, float)
    right = np.asarray(correct, float) > 0.5
    fits = len(right) == len(at) and bool((np.diff(at) > 0).all())
    way_out = "pass the evaluations in their order, one row each"
    check(fits, f"{len(right)} epochs that rise", at.tolist(), way_out)
    right_from_here = np.logical_and.accumulate(right[::-1])[::-1]
    first = right_from_here.argmax(axis=0)
    return np.where(right_from_here.any(axis=0), at[first], np.inf)


def learned_groups(
    learned: ArrayLike, boundaries: Sequence[float]
) -> dict[str, NDArray[np.bool_]]:
    """Masks (R,) of rows by when they were learned: up to the first boundary, to the next, and so on; and never.

    >>> groups = learned_groups([1, 3, 7, np.inf], [2, 5])
    >>> {name: mask.tolist() for name, mask in groups.items()}
    {'to 2': [True, False, False, False], '2 to 5': [False, True, False, False],
     'after 5': [False, False, True, False], 'never': [False, False, False, True]}
    """
    rise = len(boundaries) > 0 and bool((np.diff(boundaries) > 0).all())
    check(rise, "boundaries to be numbers that rise", [*boundaries], "sort them")
    never = np.isinf(learned)
    group = np.searchsorted(boundaries, learned, side="left")
    ends = [f"{limit:g}" for limit in boundaries]
    between = [f"{low} to {high}" for low, high in pairwise(ends)]
    names = [f"to {ends[0]}", *between, f"after {ends[-1]}"]
    groups = {name: (group == k) & ~never for k, name in enumerate(names)}
    return groups | {"never": never}
