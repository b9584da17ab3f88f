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

    `trainer.add_callback(TrainingTrace(trainer))` writes `training_trace.json` in `output_dir`, for `Trace.load`. Of
    each evaluation set ("eval"; several by their names), of a fixed random sample of the training rows ("training") and
    of `test_dataset` ("test") it has what a `TracedSet` lists. The papers' figures of the ECE by epoch are of test
    rows, those of bins of validation rows. The bins are those of the loss's table of gammas where it has one, else
    equal-mass bins of the evaluation rows' confidences, as in AdaFocal's figures; what lies beyond the outer edges
    counts in the outer bins. Of a table it has the gammas after the evaluation, which hold until the next one.

    It costs a forward pass over these sets at each evaluation; random streams are left as found. Rows have one label.
    A resumed training goes on with the record in `output_dir`.

    References:
        Ghosh et al. 2022, "AdaFocal", figures 1, 2, 4, 5 and 34; Tao et al. 2023, "Dual focal loss", figure 4; Lin et
        al. 2025, "Uncertainty weighted gradients", figure 5a.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        n_training_rows: int = 1000,
        n_kept_rows: int = 200,
        test_dataset: Any = None,
    ) -> None:
        self.trainer, self.n_kept_rows = trainer, n_kept_rows
        known, dataset = trainer.eval_dataset, trainer.train_dataset
        named = (
            {f"eval_{name}": rows for name, rows in known.items()}
            if isinstance(known, dict)
            else None
        )
        self.sets: dict[str, Any] = named or {"eval": known}
        # Only these have bins of their own.
        self.evaluated = frozenset(self.sets)
        if test_dataset is not None:
            self.sets["test"] = test_dataset
        self.numbers = {name: np.arange(len(rows)) for name, rows in self.sets.items()}
        if n_training_rows:
            self.numbers["training"] = _drawn(
                len(dataset), n_training_rows, trainer.args.seed
            )
            self.sets["training"] = Subset(dataset, self.numbers["training"].tolist())
        self.entries: list[dict[str, Any]] = []
        self.is_recording = False

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Begin a record, or go on with that of a resumed training."""
        several = self.trainer.calibration_loss.multi_label
        check(
            not several,
            "TrainingTrace to go with one label per row",
            "several",
            "leave it out",
        )
        file = Path(args.output_dir, FILE)
        earlier = (
            json.loads(file.read_text())["entries"]
            if state.global_step and file.exists()
            else []
        )
        self.entries = [
            entry for entry in earlier if entry["step"] <= state.global_step
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
        if not self.is_recording or any(
            entry["step"] == state.global_step for entry in self.entries
        ):
            return
        loss = self.trainer.calibration_loss
        gammas = getattr(loss, "gammas", None)
        edges = np.empty(0) if gammas is None else loss.edges.numpy()
        recorded = {}
        # Test and training rows come last, in the bins of the evaluation rows.
        for name, loader in self.loaders.items():
            found = self._scores(loader)
            if name in self.evaluated and gammas is None:
                edges = _equal_mass_edges(found[:, 0], args.n_bins)
            kept = _drawn(len(found), self.n_kept_rows, args.seed)
            # Of tokens, and where some rows have no label, those that have one are counted.
            numbers = (
                self.numbers[name]
                if len(found) == len(self.numbers[name])
                else np.arange(len(found))
            )
            recorded[name] = {
                "rows": numbers[kept].tolist(),
                **_summary(found, edges, kept, args.n_bins),
            }
        entry = {"step": state.global_step, "epoch": state.epoch, "sets": recorded}
        if gammas is not None:
            entry["gammas"] = gammas.tolist()
        self.entries.append(entry)
        if state.is_world_process_zero:
            with whole_file(Path(args.output_dir, FILE)) as unfinished:
                unfinished.write_text(
                    json.dumps({"loss": loss.name, "entries": self.entries}) + "\n"
                )

    @torch.no_grad()
    def _scores(self, loader: Any) -> FloatArray:
        """(N, 5) of each row with a label: confidence, whether it is right, label, rival, largest logit."""
        trainer, parts = self.trainer, []
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
    columns = [
        log_p.amax(dim=1).exp(),
        correct,
        of_label.squeeze(1).exp(),
        rival.exp(),
        logits.amax(dim=1),
    ]
    return torch.stack(columns, dim=1).masked_fill((labels < 0).unsqueeze(1), torch.nan)


def _drawn(n: int, at_most: int, seed: int) -> NDArray[np.int64]:
    """The numbers of a random subset of n rows, in order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=generator)[:at_most].sort().values.numpy()


def _equal_mass_edges(confidences: FloatArray, n_bins: int) -> FloatArray:
    """The papers' edges (M + 1,), interpolated between sorted confidences."""
    ranks = np.linspace(0, len(confidences), n_bins + 1)
    return np.interp(ranks, np.arange(len(confidences)), np.sort(confidences))


def _summary(
    scores: FloatArray, edges: FloatArray, kept: NDArray[np.int64], n_bins: int
) -> dict[str, Any]:
    """The fields of a `TracedSet` at one evaluation."""
    confidence, correct, of_label, rival, max_logit = scores.T

    def ece(edges: FloatArray) -> float:
        """Of bins (low, high]; as in the papers' code, the smallest confidence is in none of equal mass."""
        bins = np.searchsorted(edges, confidence, side="left")
        return abs(np.bincount(bins, confidence - correct)[1:]).sum() / len(scores)

    def mean_by_bin(values: FloatArray, bins: NDArray[Any]) -> FloatArray:
        with np.errstate(invalid="ignore"):  # a mean of an empty bin is NaN
            return np.bincount(bins, values, n) / np.bincount(bins, minlength=n)

    # (low, high] for predictions and [low, high) for labels, as AdaFocal has them.
    n = len(edges) - 1
    bins = np.searchsorted(edges[1:-1], confidence, side="left")
    label_bins = np.searchsorted(edges[1:-1], of_label, side="right")
    found = {
        "n": len(scores),
        "accuracy": correct.mean(),
        "ece": ece(np.linspace(0, 1, n_bins + 1)),
        "adaptive_ece": ece(_equal_mass_edges(confidence, n_bins)),
        "edges": edges,
        "counts": np.bincount(bins, minlength=n),
        "bin_confidence": mean_by_bin(confidence, bins),
        "bin_accuracy": mean_by_bin(correct, bins),
        "label_counts": np.bincount(label_bins, minlength=n),
        "label_probability": mean_by_bin(of_label, label_bins),
        "row_confidence": confidence[kept],
        "row_correct": correct[kept],
        "row_label_probability": of_label[kept],
        "row_rival_probability": rival[kept],
        "row_max_logit": max_logit[kept],
    }
    return {name: np.asarray(value, float).tolist() for name, value in found.items()}


class TracedSet(SimpleNamespace):
    """One set of rows at T evaluations: M bins of its predictions, and R rows followed one by one, as arrays.

    `steps`, `epochs`, `n`, `accuracy`, `ece` (of equal-width bins) and `adaptive_ece` are (T,). `edges` (T, M + 1) are
    the evaluation set's, also where this is the training or the test set. (T, M) are, by the confidence, `counts`,
    `bin_confidence` (AdaFocal's C_val) and `bin_accuracy` (A_val), and by the label's probability `label_counts` and
    its mean `label_probability` (C_train where this is the training set); a mean of an empty bin is NaN. Of the `rows`
    (R,) followed, (T, R) are `row_confidence`, `row_correct`, `row_label_probability`, `row_rival_probability` (the
    largest below the label's, 0 where there is none) and `row_max_logit`.
    """

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
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        way_out = "train with trainer.add_callback(TrainingTrace(trainer))"
        check(
            path.is_file(),
            f"{path} to be a file of TrainingTrace",
            "no such file",
            way_out,
        )
        saved = json.loads(path.read_text())
        entries = saved["entries"]
        found: dict[str, list[dict[str, Any]]] = {}
        for entry in entries:
            for name, fields in entry["sets"].items():
                when = {"steps": entry["step"], "epochs": entry["epoch"]}
                found.setdefault(name, []).append(when | fields)
        sets = {}
        for name, traced in found.items():
            arrays = {
                key: np.array([each[key] for each in traced], float)
                for key in traced[0]
            }
            sets[name] = TracedSet(**(arrays | {"rows": np.array(traced[0]["rows"])}))
        tables = {
            entry["step"]: entry["gammas"] for entry in entries if "gammas" in entry
        }
        gammas = np.array(list(tables.values())) if tables else np.empty((0, 0))
        return cls(saved["loss"], sets, np.array(list(tables), float), gammas)


def learned_epoch(
    epochs: ArrayLike, correct: ArrayLike, *, when: str = "last"
) -> FloatArray:
    """The epoch (R,) from which on each row is right until the end, or is right first; infinity if it never is.

    `epochs` (T,) rise, `correct` is (T, R). Wang et al. 2021, "Rethinking calibration of deep neural networks", whose
    groups AdaFocal's figure 34 shows.

    >>> correct = [[0, 1, 0], [1, 0, 0], [1, 1, 0]]
    >>> learned_epoch([1, 2, 3], correct), learned_epoch([1, 2, 3], correct, when="first")
    (array([ 2.,  3., inf]), array([ 2.,  1., inf]))
    """
    at = np.asarray(epochs, float)
    right = np.asarray(correct, float) > 0.5
    check(
        when in ("last", "first"), "when to be last or first", repr(when), "see above"
    )
    fits = len(right) == len(at) and bool((np.diff(at) > 0).all())
    way_out = "pass the evaluations in their order, one row each"
    check(fits, f"{len(right)} epochs that rise", at.tolist(), way_out)
    if when == "last":
        right = np.logical_and.accumulate(right[::-1])[::-1]  # from here to the end
    return np.where(right.any(axis=0), at[right.argmax(axis=0)], np.inf)


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
    names = [
        f"to {ends[0]}",
        *(f"{low} to {high}" for low, high in pairwise(ends)),
        f"after {ends[-1]}",
    ]
    return {name: (group == k) & ~never for k, name in enumerate(names)} | {
        "never": never
    }
