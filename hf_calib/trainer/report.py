"""The last evaluation of a `CalibrationTrainer`, written beside the model for its card."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_calib._files import whole_file
from hf_calib._text import is_hub_name
from hf_calib.cards.facts import REPORT_FOLDER, STREAMED_FIGURE
from hf_calib.cards.metadata import is_dataset_name
from hf_calib.losses import AdaptiveLoss
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.plots import reliability_diagram, save_figure
from hf_calib.predictions.predictions import Predictions
from hf_calib.report import CalibrationReport, ood_section, report_on_predictions
from hf_calib.scaling.saved_map import MAP_NAME, OF_PAIRS

REPORT = f"{REPORT_FOLDER}/report.json"


def about_map(trainer: Any, scaler: Any, split: str, n_examples: int) -> dict[str, Any]:
    """What calibration.json says beside a map: the loss, the rows and the base model, as far as they are recorded."""
    loss, held_out, names = trainer.calibration_loss, trainer.calibration_split, trainer.class_names
    own = "evaluation" if trainer.calibration_dataset is None else "calibration"
    calibration = {"split": split, "n": n_examples}
    if split in ("calibration", "evaluation"):
        calibration |= _named(held_out)
    roles = {
        "train": {**_size(trainer.train_dataset), **_named(trainer.train_dataset)},
        "calibration": calibration,
    }
    if isinstance(loss, AdaptiveLoss) and held_out is not None:
        same = calibration if own == split else {"split": own, **_size(held_out)}
        roles["gammas"] = {**same, **_named(held_out)}
    base = getattr(trainer.model_config, "_name_or_path", None)
    known = {
        "criterion": getattr(scaler, "criterion", None),
        "split": split,
        "n_examples": n_examples,
        "loss": loss.name,
        "loss_kwargs": loss.hyperparameters,
        "class_weights": None if loss.class_weights is None else loss.class_weights.tolist(),
        **(OF_PAIRS if trainer.n_classes == 1 and not loss.multi_label else {}),
        "folded": False,
        "data": {role: rows for role, rows in roles.items() if rows},
        "base_model": base if is_hub_name(base) else None,
        "class_names": [names[number] for number in sorted(names)],  # which adapters do not know
    }
    return {key: value for key, value in known.items() if value is not None}


def _size(dataset: Any) -> dict[str, Any]:
    """How many rows, but for a stream."""
    with suppress(TypeError, NotImplementedError):
        return {"n": len(dataset)}
    return {}


def _named(dataset: Any) -> dict[str, Any]:
    """A dataset's name, with its owner where the files came from the Hub."""
    info = getattr(dataset, "info", None)
    sources = [
        re.match(r"hf://datasets/([^/@]+/[^/@]+)[/@]", s)
        for s in getattr(info, "download_checksums", None) or ()
    ]
    names = [found[1] for found in sources if found] or [getattr(info, "dataset_name", None)]
    return {"name": names[0]} if is_dataset_name(names[0]) else {}


def with_map(trainer: Any) -> Any:
    """The last evaluation, if it measured the map that the trainer has now."""
    evaluation = trainer.last_evaluation
    measured = evaluation is not None and evaluation.calibrated is not None
    return evaluation if measured and evaluation.calibration_map is trainer.calibration_map else None


def measured(trainer: Any) -> dict[str, Any]:
    """The entry "metrics" of calibration.json: the metrics before and after the map, on which rows."""
    evaluation = with_map(trainer)
    if evaluation is None:
        return {}
    found = {key.removeprefix(f"{evaluation.prefix}_"): value for key, value in evaluation.metrics().items()}
    finite = {key: value if math.isfinite(value) else None for key, value in found.items()}
    before = {name: finite[name] for name in LOGGED_METRICS if name in finite}
    after = {name: finite[f"{name}_calibrated"] for name in before}
    rows = _rows(trainer, evaluation)
    return {"metrics": {**rows, "n_bins": evaluation.n_bins, "before": before, "after": after}}


def report_of(trainer: Any, outside: Mapping[str, Any] | None = None) -> CalibrationReport | None:
    """The report on the last evaluation, before and after a map, with sections on logits (N, C) from outside by name.

    None without finite logits, and for soft labels of a multi-label model, which are neither 0 nor 1.
    """
    evaluation, scaler = trainer.last_evaluation, trainer.calibration_map
    if evaluation is None or not evaluation.rows:
        return None
    logits, labels = evaluation.logits_and_labels()
    inside = logits.astype(np.float64)
    report = report_on(trainer, inside, labels, scaler, sentences=evaluation.sentences())
    if report is None:
        return None
    sections = []
    for name, found in ({} if report.multi_label else outside or {}).items():
        pair = inside, found.astype(np.float64)
        after = None if scaler is None else tuple(map(scaler.affine_map(), pair))
        sections.append(ood_section(name, pair, after))
    return replace(report, about=_rows(trainer, evaluation), out_of_distribution=tuple(sections))


def report_on(
    trainer: Any,
    logits: NDArray[np.float64],
    labels: NDArray[Any],
    scaler: Any,
    *,
    sentences: NDArray[np.int64] | None = None,
    name: str | None = None,
) -> CalibrationReport | None:
    """The report on logits (N, C), before and after a fitted scaler or None, on a trainer's classes and settings.

    None as for `report_of`; by default its name is the loss's. Sentences are (N,) numbers, of tokens.
    """
    hard = labels.ndim == 1 or np.isin(labels, (0, 1, -100)).all()
    if not (hard and np.isfinite(logits).all()):
        return None
    names = trainer.class_names
    class_names = tuple(str(names.get(i, i)) for i in range(logits.shape[1]))
    predictions = Predictions(labels, logits=logits, class_names=class_names, sentences=sentences)
    title, n_bins = name or trainer.calibration_loss.name, trainer.calibration_config.n_bins
    return report_on_predictions(predictions, title, n_bins, scaler)


def write_results(
    trainer: Any, folder: Path, outside: Mapping[str, Any] | None = None
) -> CalibrationReport | None:
    """Write what the last evaluation showed into the folder of a model with the trainer's map, where the card looks.

    Returns the report in the folder `calibration`; None where no logits were kept, or not of this map: there are only
    metrics then, and a diagram.
    """
    path, fitted, evaluation = folder / MAP_NAME, trainer.fitted_map, with_map(trainer)
    if not fitted.is_in(path):
        fitted.save(path)
    (folder / REPORT).unlink(missing_ok=True)  # of an earlier evaluation
    record = json.loads(path.read_text(encoding="utf-8"))
    record.pop("metrics", None)
    record |= {key: value for key, value in fitted.about.items() if key != "folded"} | measured(trainer)
    report = None if evaluation is None else report_of(trainer, outside)
    if report is not None:
        weights = {key: record[key] for key in ("fingerprint",) if key in record}
        report = replace(report, about={**report.about, **weights})
        report.save(folder / REPORT_FOLDER)
    elif (
        evaluation is not None and None not in record["metrics"]["after"].values()
    ):  # of NaN there is no diagram
        save_figure(
            reliability_diagram(evaluation.panels(), n_bins=evaluation.n_bins), folder / STREAMED_FIGURE
        )
        record["metrics"]["figure"] = True
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
    return report


def _rows(trainer: Any, evaluation: Any) -> dict[str, Any]:
    """Which rows an evaluation was on, and how many of them the map was fitted on."""
    dataset, raw, precision = evaluation.dataset, evaluation.raw, trainer.accelerator.mixed_precision
    is_train = dataset is not None and dataset is trainer.train_dataset
    split = "evaluation" if evaluation.prefix == "eval" else evaluation.prefix
    rows = {"split": "train" if is_train else split}
    if precision in ("bf16", "fp16"):
        rows["autocast"] = precision
    rows |= _named(dataset)
    if raw is not None and not raw.multi_label:
        rows["n"] = len(raw.top_label.correct)
    elif not isinstance(dataset, dict):
        rows |= _size(dataset)
    if dataset is not None and dataset is trainer.calibration_split:
        rows["seen"] = rows.get("n") or trainer.fitted_map.about["n_examples"]
    return rows
