"""`TrainingTrace`: what the figures of training dynamics need, recorded at each evaluation."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy

from hf_calib._errors import InputValueError, expected
from hf_calib._files import check_output, whole_file
from hf_calib.losses.adaptive import GammaTableLoss
from hf_calib.metrics.checks import FloatArray, IntArray, check_integer
from hf_calib.metrics.sums import (
    BinnedRows,
    BinSums,
    TopLabel,
    as_bin_sums,
    mean_bins,
    quantile_edges,
    top_label_error,
)
from hf_calib.trainer.callbacks import CalibrationCallback
from hf_calib.trainer.evaluation_pass import SCORES

TRACE = "training_trace.json"
TRAINING = "training"
_DIGITS = 6  # of the recorded numbers


class TrainingTrace(CalibrationCallback, ExportableState):
    """Records at each evaluation how calibrated the model is on the evaluation set and on training rows, bin by bin.

    For the figures of `hf_calib.papers` and of `hf_calib.papers.plots.dynamics`: pass it to
    `CalibrationTrainer(..., callbacks=[TrainingTrace()])`, or set `training_trace=True` in its arguments, and
    read `training_trace.json` in `output_dir` with `hf_calib.papers.Trace.load`. The updates of an adaptive
    loss between evaluations are in `trainer.state.log_history`; see `AdaFocalCallback`.

    Recorded are, of the evaluation set ("eval"; several by their names) and of a fixed random sample of the training
    rows ("training"):

    * accuracy, ECE and adaptive ECE;
    * for each of M bins its edges, the number of predictions, their mean confidence and their accuracy; and the number
      and mean of the label's probabilities in it, by which an adaptive loss looks training rows up. The bins are
      those of the loss's table where it has one, else equal-mass bins of the evaluation set's confidences, as in
      AdaFocal's figures. What lies beyond the outer edges counts in the outer bins;
    * for the same few rows each time: confidence, whether it is right, probability of the label and of its rival (the
      largest below the label's, as in dual focal loss), maximum logit. Where a set has another number of labels than
      at its first evaluation (another evaluation set after a resume, tokens masked at random), its rows are not the
      same: they are left out of that evaluation;

    and of a loss with a table of gammas the gammas before and after the evaluation.

    The evaluation set costs no forward pass of its own. The training rows cost one over `n_training_rows` rows at
    each evaluation; random transforms of the training set are applied to them. Weights, random streams and logs are
    as without it, bit for bit. The history is in every checkpoint, and a resumed training continues it. The file is
    rewritten whole at each evaluation, by the main process. Left out are evaluations of other sets than the trainer's
    own, those that other callbacks begin within an evaluation, and those whose logits are not finite.

    Args:
        n_training_rows: how many training rows the sample has; 0 for none.
        n_kept_rows: of how many rows of each set the rows' own numbers are kept. 200 rows take 20 kB in the
            file, and 60 kB in `trainer_state.json`, for each evaluation and both sets.

    Raises:
        TypeError: if a number is not an integer.
        ValueError: if it is below 0. When the training begins: if there are no evaluations, labels are several a row,
            the training set has no length, a resumed training has another seed or other bins, or a folder is in the
            file's place.
        OSError: when the training begins, if the file cannot be written.

    Notes:
        The rows are drawn by the seed of the arguments. A hyperparameter search records nothing.

    References:
        Ghosh et al. 2022, "AdaFocal", figures 1, 2, 5 and 34; Tao et al. 2023, "Dual focal loss", figure 4.

    Example:
        >>> TrainingTrace(n_training_rows=500).n_training_rows
        500
    """

    def __init__(self, *, n_training_rows: int = 1000, n_kept_rows: int = 200) -> None:
        self.n_training_rows = check_integer("n_training_rows", n_training_rows, 0, "0 is for none")
        self.n_kept_rows = check_integer("n_kept_rows", n_kept_rows, 0, "0 is for none")
        self.is_recording = False
        self.settings: dict[str, Any] = {}  # of the trainer; the same in all of a trace
        self.entries: list[dict[str, Any]] = []
        self.rows: dict[str, list[int]] = {}
        self._gammas: list[float] | None = None
        self._resumed_at = -1
        self._loader: Any = None
        self._training_rows: IntArray = np.empty(0, np.intp)

    def state(self) -> dict[str, Any]:
        """The state that checkpoints keep; see `transformers.trainer_callback.ExportableState`."""
        return {
            "args": {"n_training_rows": self.n_training_rows, "n_kept_rows": self.n_kept_rows},
            "attributes": {"settings": self.settings, "entries": self.entries, "rows": self.rows},
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._attached()
        self.is_recording = not trainer.is_searching
        if not self.is_recording:
            return
        self._check(args, state, trainer)
        self._gammas = self._table()
        n_gammas = None if self._gammas is None else len(self._gammas)
        self.settings = {"seed": args.seed, "n_bins": args.n_bins, "n_gammas": n_gammas}
        # An evaluation before the first step of a resumed training is none of the uninterrupted one's.
        self._resumed_at = state.global_step or -1
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        # The Trainer keeps the state of callbacks that the checkpoint knows: of one that is new as well.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        kept = {} if saved is None else saved["attributes"]
        self._check_is_the_same(saved)
        self.entries, self.rows = list(kept.get("entries", [])), dict(kept.get("rows", {}))
        self._draw_training_rows()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._gammas = self._table()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._attached()
        present, known = trainer.present_evaluation, trainer.eval_dataset
        own = list(known.values()) if isinstance(known, dict) else [known]
        if not self.is_recording or present is None or state.global_step == self._resumed_at:
            return
        if not any(present.dataset is each for each in own):
            return
        name, scores = present.done.prefix, _numbers(present.done)
        if scores is None:
            return
        table = trainer.calibration_loss if isinstance(trainer.calibration_loss, GammaTableLoss) else None
        edges = quantile_edges(scores[:, 0], args.n_bins) if table is None else table.edges.numpy()
        if not self.entries or self.entries[-1]["step"] != state.global_step:
            entry = {"step": state.global_step, "epoch": state.epoch, "sets": {}}
            if table is not None:
                entry["gammas"] = {"before": self._gammas, "after": self._table()}
            self.entries.append(entry)
        sets = self.entries[-1]["sets"]
        sets[name] = self._summary(name, scores, edges)
        if self._loader is not None and TRAINING not in sets:  # several evaluation sets make one entry
            scores = _numbers(trainer.held_out.over(self._loader, keep_scores=True))
            if scores is not None:
                sets[TRAINING] = self._summary(TRAINING, scores, edges)
        if state.is_world_process_zero:
            self._write(Path(str(args.output_dir)), trainer.calibration_loss.name)

    def before_train_end(self, state: Any) -> None:
        self.is_recording = False

    def _check(self, args: Any, state: Any, trainer: Any) -> None:
        if args.eval_strategy == IntervalStrategy.NO:
            got, way_out = "eval_strategy='no'", "set eval_strategy='epoch'"
            raise InputValueError(expected("TrainingTrace", "have evaluations to record", got, way_out))
        if trainer.calibration_loss.multi_label:
            got, way_out = "several labels a row", "leave it out"
            raise InputValueError(expected("TrainingTrace", "go with one label a row", got, way_out))
        if self.n_training_rows and not hasattr(trainer.train_dataset, "__len__"):
            got, way_out = "a training set without a length", "set n_training_rows=0"
            raise InputValueError(expected("TrainingTrace", "draw training rows", got, way_out))
        trainer.raise_everywhere(
            partial(_check_place, Path(str(args.output_dir))), here=state.is_world_process_zero
        )

    def _check_is_the_same(self, saved: dict[str, Any] | None) -> None:
        """A trace follows the same rows and has the same bins at each evaluation."""
        if saved is None:
            return
        settings = (
            state["args"] | state["attributes"].get("settings", {}) for state in (saved, self.state())
        )
        before, now = (
            ", ".join(f"{name}={value}" for name, value in sorted(each.items())) for each in settings
        )
        if before != now:
            requirement = f"be that of the checkpoint ({before})"
            way_out = "resume with the same, or train anew"
            raise InputValueError(expected("TrainingTrace", requirement, now, way_out))

    def _draw_training_rows(self) -> None:
        trainer = self._attached()
        dataset = trainer.train_dataset
        self._loader = None
        if self.n_training_rows:
            self._training_rows = _drawn(len(dataset), self.n_training_rows, trainer.args.seed)
            rows = self._training_rows.tolist()
            by_index = hasattr(dataset, "select")
            sample = dataset.select(rows) if by_index else torch.utils.data.Subset(dataset, rows)
            self._loader = trainer.get_test_dataloader(sample)

    def _summary(self, name: str, scores: FloatArray, edges: NDArray[Any]) -> dict[str, Any]:
        kept = _drawn(len(scores), self.n_kept_rows, self.settings["seed"])
        # Of tokens, and where some rows have no label, those that have one are counted.
        by_row = name == TRAINING and len(scores) == len(self._training_rows)
        numbers = (self._training_rows[kept] if by_row else kept).tolist()
        n_at_first = next((e["sets"][name]["n"] for e in self.entries if name in e["sets"]), len(scores))
        followed = self.rows.setdefault(name, numbers)
        if n_at_first == len(scores) and numbers == followed:
            rows = dict(zip(SCORES, map(_rounded, scores[kept].T), strict=True))
        else:
            rows = {score: [None] * len(followed) for score in SCORES}
        return {"n": len(scores), **_calibration(scores, edges, self.settings["n_bins"]), "rows": rows}

    def _table(self) -> list[float] | None:
        loss = self._attached().calibration_loss
        return _rounded(loss.gammas.numpy()) if isinstance(loss, GammaTableLoss) else None

    def _write(self, folder: Path, loss: str) -> None:
        trace = {"version": 1, "loss": loss, "rows": self.rows, "entries": self.entries}
        try:
            with whole_file(folder / TRACE) as unfinished:
                unfinished.write_text(
                    json.dumps(trace, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8"
                )
        except OSError as error:  # a figure's numbers are no reason to lose a training
            warnings.warn(
                f"{TRACE} could not be written ({error}). The training goes on; the next evaluation tries again.",
                stacklevel=2,
            )


def _check_place(folder: Path) -> None:
    check_output(folder)
    if (folder / TRACE).is_dir():
        way_out = "remove it, or choose another output_dir"
        raise InputValueError(expected(str(folder / TRACE), "be a file", "a folder", way_out))


def _drawn(n: int, at_most: int, seed: int) -> IntArray:
    """The numbers of a random subset of n rows, in order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(n, generator=generator)[:at_most].sort().values.numpy()


def _numbers(current: Any) -> FloatArray | None:
    """(N, 5) of a pass, as `SCORES` names them; None where there is no label, or where logits are not finite."""
    scores = current.scores[0].double().numpy() if current.scores else np.empty((0, len(SCORES)))
    return scores if len(scores) and np.isfinite(scores).all() else None


def _calibration(scores: FloatArray, edges: NDArray[Any], n_bins: Any) -> dict[str, Any]:
    confidence, correct, of_label = scores.T[:3]
    m = len(edges) - 1

    def bins_of(values: FloatArray, bins: IntArray) -> BinSums:
        return as_bin_sums(np.ones(len(values)) @ BinnedRows(bins, m, None, values, correct))

    # (low, high] for predictions and [low, high) for labels, as AdaFocal has them.
    bins = mean_bins(bins_of(confidence, np.searchsorted(edges[1:-1], confidence, side="left")))
    by_label = np.searchsorted(edges[1:-1], of_label, side="right")
    labels = mean_bins(bins_of(of_label, by_label))
    ece, adaptive_ece = (
        top_label_error(TopLabel(confidence, correct), n_bins=n_bins, binning=binning)
        for binning in ("uniform", "quantile")
    )
    return {
        "accuracy": float(correct.mean()),
        "ece": ece,
        "adaptive_ece": adaptive_ece,
        "bins": {
            "edges": _rounded(edges),
            "counts": _rounded(bins.counts),
            "confidence": _rounded(bins.confidence),
            "accuracy": _rounded(bins.accuracy),
            "label_counts": _rounded(labels.counts),
            "label_probability": _rounded(labels.confidence),
        },
    }


def _rounded(values: NDArray[Any]) -> list[Any]:
    """As JSON has them: NaN, of empty bins, is null."""
    return [None if np.isnan(value) else float(f"{value:.{_DIGITS}g}") for value in values.tolist()]
