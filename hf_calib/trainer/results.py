"""Records of a run, and the reports on its evaluations: what a saved model, its card and its report
say.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hf_calib._files import remove_files, report_files, whole_file
from hf_calib._text import is_hub_name
from hf_calib.cards.facts import REPORT_FOLDER
from hf_calib.cards.metadata import is_dataset_name
from hf_calib.losses import AdaptiveLoss, CalibrationLoss
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.predictions.predictions import Predictions
from hf_calib.report import CalibrationReport, ood_section, report_on_predictions
from hf_calib.scaling.saved_map import MAP_NAME, OF_PAIRS, SavedMap, save_map
from hf_calib.trainer.calibration_map import is_in
from hf_calib.trainer.checks import Splits
from hf_calib.trainer.evaluation import Evaluation


@dataclass(frozen=True)
class Results:
    """What is known of a run at some time, for its records and its report."""

    loss: CalibrationLoss
    loss_record: Mapping[str, Any]  # Empty if the training was with another loss.
    splits: Splits
    n_bins: int
    n_classes: int | None
    class_names: Mapping[int, str]  # Empty if the model has none.
    base_model: str | None
    mixed_precision: str
    fitted: SavedMap | None = None
    evaluation: Evaluation | None = None  # The last one.

    @property
    def scaler(self) -> Any:
        """The fitted calibrator, or None."""
        return None if self.fitted is None else self.fitted.scaler

    @property
    def evaluation_with_map(self) -> Evaluation | None:
        """The last evaluation, if it was with the calibrator as it is now."""
        evaluation = self.evaluation
        if evaluation is None or evaluation.calibrated is None:
            return None
        return evaluation if evaluation.calibration_map is self.scaler else None


# ---- Entries of calibration.json ----


def about_map(
    results: Results, scaler: Any, split: str, n_examples: int
) -> dict[str, Any]:
    """The further entries of calibration.json: the loss, the rows and the base model, as far as
    recorded.
    """
    names = results.class_names
    trained_with = results.loss_record
    is_pair = results.n_classes == 1 and not results.loss.multi_label
    known = {
        "criterion": getattr(scaler, "criterion", None),
        "split": split,
        "n_examples": n_examples,
        "loss": trained_with.get("loss"),
        "loss_kwargs": trained_with.get("hyperparameters"),
        "class_weights": trained_with.get("class_weights"),
        "pos_weight": trained_with.get("pos_weight"),
        **(OF_PAIRS if is_pair else {}),
        "folded": False,
        "data": _data(results, split, n_examples),
        "base_model": results.base_model if is_hub_name(results.base_model) else None,
        # Adapters do not have them.
        "class_names": [names[index] for index in sorted(names)],
    }
    return {key: value for key, value in known.items() if value is not None}


def _data(results: Results, split: str, n_examples: int) -> dict[str, Any]:
    """The rows by what they were used for: the training, the calibrator and the gammas."""
    held_out = results.splits.held_out
    role = "evaluation" if results.splits.calibration is None else "calibration"
    described = described_rows(held_out)
    fitted_on: dict[str, Any] = {"split": split, "n": n_examples}
    if split in (
        "calibration",
        "evaluation",
    ):  # Other names are of rows that the trainer does not have.
        fitted_on = {**described, **fitted_on}
    found = {"train": described_rows(results.splits.train), "calibration": fitted_on}
    if isinstance(results.loss, AdaptiveLoss) and held_out is not None:
        found["gammas"] = fitted_on if role == split else {"split": role, **described}
    return {use: rows for use, rows in found.items() if rows}


def described_rows(dataset: Any) -> dict[str, Any]:
    """The number of rows, except for a stream, and the name, with its owner if the files are from
    the Hub.
    """
    found: dict[str, Any] = {}
    with suppress(TypeError, NotImplementedError):
        found["n"] = len(dataset)
    info = getattr(dataset, "info", None)
    files = " ".join(getattr(info, "download_checksums", None) or ())
    with_owner = re.search(r"hf://datasets/([^/@]+/[^/@]+)[/@]", files)
    name = with_owner[1] if with_owner else getattr(info, "dataset_name", None)
    if is_dataset_name(name):
        found["name"] = name
    return found


def measured(results: Results) -> dict[str, Any]:
    """The entry "metrics" of calibration.json: the metrics before and after calibration, and their
    rows.
    """
    evaluation = results.evaluation_with_map
    if evaluation is None:
        return {}
    finite = {}
    for key, value in evaluation.metrics().items():
        name = key.removeprefix(f"{evaluation.prefix}_")
        finite[name] = value if math.isfinite(value) else None  # JSON has no NaN.
    names = [name for name in LOGGED_METRICS if name in finite]
    return {
        "metrics": {
            **_evaluated_rows(results, evaluation),
            "n_bins": evaluation.n_bins,
            "before": {name: finite[name] for name in names},
            "after": {name: finite[f"{name}_calibrated"] for name in names},
        }
    }


def _evaluated_rows(results: Results, evaluation: Evaluation) -> dict[str, Any]:
    """The rows of an evaluation, and the number of rows to which the calibrator was fitted."""
    dataset = evaluation.dataset
    if dataset is not None and dataset is results.splits.train:
        split = "train"
    elif evaluation.prefix == "eval":
        split = "evaluation"
    else:
        split = evaluation.prefix
    rows = {"split": split, **described_rows(dataset)}
    if evaluation.has_soft_labels:
        rows["soft_labels"] = True
    if results.mixed_precision in ("bf16", "fp16"):
        rows["autocast"] = results.mixed_precision
    if evaluation.raw is not None and not evaluation.multi_label:
        rows["n"] = evaluation.raw.n_rows  # The number of tokens.
    # The calibrator has seen these rows, which a reader of the metrics has to know.
    if (
        results.fitted is not None
        and dataset is not None
        and dataset is results.splits.held_out
    ):
        rows["seen"] = rows.get("n") or results.fitted.about["n_examples"]
    return rows


# ---- Reports ----


def report_of(
    results: Results, outside: Mapping[str, Any] | None = None
) -> CalibrationReport | None:
    """Return the report on the last evaluation before and after calibration, with sections on OOD
    logits by name.

    It is None if no logits were kept, for soft labels, and in the cases of `report_on`.
    """
    evaluation = results.evaluation
    if evaluation is None or not evaluation.rows or evaluation.has_soft_labels:
        return None
    predictions = evaluation.predictions(results.class_names)
    report = report_on(predictions, results.loss.name, results.n_bins, results.scaler)
    if report is None:
        return None
    sections = []
    if outside and not report.multi_label:
        logits, _ = evaluation.logits_and_labels()
        inside = logits.astype(np.float64)
        for name, found in outside.items():
            pair = (inside, found.astype(np.float64))
            sections.append(ood_section(name, pair, _calibrated(pair, results.scaler)))
    return replace(
        report,
        about=_evaluated_rows(results, evaluation),
        out_of_distribution=tuple(sections),
    )


def _calibrated(arrays: tuple[Any, ...], scaler: Any) -> tuple[Any, ...] | None:
    if scaler is None:
        return None
    mapping = scaler.affine_map()
    return tuple(mapping(each) for each in arrays)


def report_on(
    predictions: Predictions, name: str, n_bins: int, scaler: Any
) -> CalibrationReport | None:
    """Return the report on logits before and after a fitted calibrator or None.

    It is None without finite logits, and for multi-label labels that are neither 0 nor 1.
    """
    logits: Any = predictions.logits
    is_hard = (
        predictions.labels.ndim == 1 or np.isin(predictions.labels, (0, 1, -100)).all()
    )
    if not is_hard or not np.isfinite(logits).all():
        return None
    wide = replace(predictions, logits=logits.astype(np.float64))
    return report_on_predictions(wide, name, n_bins, scaler)


def write_results(
    results: Results, folder: Path, outside: Mapping[str, Any] | None = None
) -> CalibrationReport | None:
    """Write the results of the last evaluation to the folder of a model with the trainer's
    calibrator, for the card.

    Return the report in the folder `calibration`, or None, with only metrics written, if no such
    logits were kept.
    """
    fitted = results.fitted
    assert fitted is not None
    path = folder / MAP_NAME
    if not is_in(fitted, path):
        save_map(fitted.scaler, path, fitted.about)
    # The report there is of an earlier evaluation.
    remove_files(folder, report_files(folder / REPORT_FOLDER))

    record = json.loads(path.read_text(encoding="utf-8"))
    record.pop("metrics", None)
    # The copy that was saved says itself whether the calibrator is folded into it.
    record |= {key: value for key, value in fitted.about.items() if key != "folded"}
    record |= measured(results)

    report = None
    if results.evaluation_with_map is not None:
        report = report_of(results, outside)
    if report is not None:
        about = dict(report.about)
        if "fingerprint" in record:  # It ties the report to these weights.
            about["fingerprint"] = record["fingerprint"]
        report = replace(report, about=about)
        report.save(folder / REPORT_FOLDER)
    with whole_file(path) as unfinished:
        unfinished.write_text(
            json.dumps(record, allow_nan=False) + "\n", encoding="utf-8"
        )
    return report
