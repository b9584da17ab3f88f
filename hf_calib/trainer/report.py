"""The last evaluation of a `CalibrationTrainer`, written beside the model for its card."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from hf_calib.report import CalibrationReport, OodSection, ood_section, report_on_predictions
from hf_calib.report.writing import write_to
from hf_calib.scaling.saved_map import MAP_NAME, OF_PAIRS
from hf_calib.trainer.calibration_map import FittedMap

if TYPE_CHECKING:
    from hf_calib.trainer.evaluation import Evaluation

REPORT = f"{REPORT_FOLDER}/report.json"


def about_map(trainer: Any, scaler: Any, split: str, n_examples: int) -> dict[str, Any]:
    """What calibration.json says beside a map: the loss, the rows and the base model, as far as they are recorded."""
    loss, criterion = trainer.calibration_loss, getattr(scaler, "criterion", None)
    train = trainer.train_dataset
    calibration: dict[str, Any] = {"split": split, "n": n_examples}
    if split in ("calibration", "evaluation"):
        calibration |= {"name": _dataset_name(trainer.calibration_split)}
    roles: dict[str, dict[str, Any]] = {
        "train": {"name": _dataset_name(train), "n": len_of(train)},
        "calibration": calibration,
    }
    if isinstance(trainer.calibration_loss, AdaptiveLoss) and trainer.calibration_split is not None:
        held_out = trainer.calibration_split
        own = "evaluation" if trainer.calibration_dataset is None else "calibration"
        same = calibration if own == split else {"split": own, "n": len_of(held_out)}
        roles["gammas"] = {**same, "name": _dataset_name(held_out)}
    known = {
        role: {key: value for key, value in rows.items() if value is not None} for role, rows in roles.items()
    }
    base = getattr(trainer.model_config, "_name_or_path", None)
    names = trainer.class_names
    return {
        **({} if criterion is None else {"criterion": criterion}),
        "split": split,
        "n_examples": n_examples,
        "loss": loss.name,
        "loss_kwargs": loss.hyperparameters,
        **({} if loss.class_weights is None else {"class_weights": loss.class_weights.tolist()}),
        **(OF_PAIRS if trainer.n_classes == 1 and not loss.multi_label else {}),
        "folded": False,
        "data": {role: rows for role, rows in known.items() if rows},
        **({"base_model": base} if is_hub_name(base) else {}),
        "class_names": [names[number] for number in sorted(names)],  # which adapters do not know
    }


def len_of(dataset: Any) -> int | None:
    """How many rows; None for a stream."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _dataset_name(dataset: Any) -> str | None:
    """A dataset's name, with its owner where the files came from the Hub."""
    info = getattr(dataset, "info", None)
    for source in getattr(info, "download_checksums", None) or ():
        from_hub = re.match(r"hf://datasets/([^/@]+/[^/@]+)[/@]", source)
        if from_hub:
            return from_hub[1]
    name = getattr(info, "dataset_name", None)
    return name if is_dataset_name(name) else None


def with_map(trainer: Any) -> Evaluation | None:
    """The last evaluation, if it measured the map that the trainer has now."""
    evaluation = trainer.last_evaluation
    if trainer.calibration_map is None or evaluation is None:
        return None
    if evaluation.calibrated is None or evaluation.calibration_map is not trainer.calibration_map:
        return None
    return evaluation


def measured(trainer: Any) -> dict[str, Any]:
    """The entry "metrics" of calibration.json: the metrics before and after the map, on which rows."""
    evaluation = with_map(trainer)
    if evaluation is None:
        return {}
    found, prefix = evaluation.metrics(), evaluation.prefix
    columns = {
        column: {
            name: found[key] if math.isfinite(found[key]) else None
            for name in LOGGED_METRICS
            if (key := f"{prefix}_{name}{end}") in found
        }
        for column, end in (("before", ""), ("after", "_calibrated"))
    }
    return {"metrics": {**_rows(trainer, evaluation), "n_bins": evaluation.n_bins, **columns}}


def report_of(trainer: Any, outside: Mapping[str, Any] | None = None) -> CalibrationReport | None:
    """The report on the last evaluation, before and, if there is a map, after it; None without finite logits.

    Soft labels of a multi-label model, which are neither 0 nor 1, have none either.

    Args:
        trainer: with an evaluation.
        outside: name -> logits (N, C) of inputs from elsewhere, for a section each; not for multi-label models.
    """
    evaluation = trainer.last_evaluation
    if evaluation is None or not evaluation.rows:
        return None
    logits, labels = evaluation.logits_and_labels()
    logits = logits.astype(np.float64)
    report = report_on(trainer, logits, labels, trainer.calibration_map, sentences=evaluation.sentences())
    if report is None or report.multi_label:
        return None if report is None else replace(report, about=_rows(trainer, evaluation))
    return replace(
        report,
        about=_rows(trainer, evaluation),
        out_of_distribution=tuple(
            _ood_section(name, logits, other.astype(np.float64), trainer.calibration_map)
            for name, other in (outside or {}).items()
        ),
    )


def report_on(
    trainer: Any,
    logits: NDArray[np.float64],
    labels: NDArray[Any],
    scaler: Any,
    *,
    sentences: NDArray[np.int64] | None = None,
    name: str | None = None,
) -> CalibrationReport | None:
    """The report on logits (N, C), before and, if there is a fitted scaler, after it; None as for `report_of`.

    Args:
        trainer: with the names of the classes and the settings.
        logits: of its model.
        labels: (N,) ids; or (N, C) of several labels a row.
        scaler: fitted, or None.
        sentences: (N,) of tokens, or None.
        name: in titles; by default the loss's.
    """
    if not np.isfinite(logits).all():
        return None
    if labels.ndim == 2 and not np.isin(labels, (0, 1, -100)).all():
        return None
    names = trainer.class_names
    class_names = tuple(str(names.get(i, i)) for i in range(logits.shape[1]))
    predictions = Predictions(labels, logits=logits, class_names=class_names, sentences=sentences)
    return report_on_predictions(
        predictions, name or trainer.calibration_loss.name, trainer.calibration_config.n_bins, scaler
    )


def _ood_section(name: str, inside: Any, outside: Any, scaler: Any) -> OodSection:
    if scaler is None:
        return ood_section(name, (inside, outside))
    in_the_head = scaler.affine_map()
    return ood_section(name, (inside, outside), (in_the_head(inside), in_the_head(outside)))


def write_results(
    trainer: Any, folder: Path, outside: Mapping[str, Any] | None = None
) -> CalibrationReport | None:
    """Write what the last evaluation showed into a folder with this trainer's model, where the card looks for it.

    Args:
        trainer: with a map.
        folder: of the model; one without this map's calibration.json gets it.
        outside: as for `report_of`.

    Returns:
        The report in the folder `calibration`; or None where no logits were kept, or not of this map. There are only
        metrics then, and a diagram.
    """
    path = folder / MAP_NAME
    fitted: FittedMap = trainer.fitted_map
    if not fitted.is_in(path):
        fitted.save(path)
    (folder / REPORT).unlink(missing_ok=True)  # of an earlier evaluation
    about = {key: value for key, value in fitted.about.items() if key != "folded"}
    record = (
        {key: value for key, value in _read(path).items() if key != "metrics"} | about | measured(trainer)
    )
    evaluation = with_map(trainer)
    report = None if evaluation is None else report_of(trainer, outside)
    if report is not None:
        weights = {key: record[key] for key in ("fingerprint",) if key in record}
        report = replace(report, about={**report.about, **weights})
        write_to(folder / REPORT_FOLDER, report)
    elif (
        evaluation is not None and None not in record["metrics"]["after"].values()
    ):  # of NaN there is no diagram
        diagram = reliability_diagram(evaluation.panels(), n_bins=evaluation.n_bins)
        save_figure(diagram, folder / STREAMED_FIGURE)
        record["metrics"]["figure"] = True
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
    return report


def _rows(trainer: Any, evaluation: Evaluation) -> dict[str, Any]:
    """Which rows an evaluation was on, and how many of them the map was fitted on."""
    dataset = evaluation.dataset
    split = "evaluation" if evaluation.prefix == "eval" else evaluation.prefix
    if dataset is not None and dataset is trainer.train_dataset:
        split = "train"
    rows: dict[str, Any] = {"split": split}
    if trainer.accelerator.mixed_precision in ("bf16", "fp16"):
        rows["autocast"] = trainer.accelerator.mixed_precision
    name = _dataset_name(dataset)
    if name is not None:
        rows["name"] = name
    n_rows = None
    if evaluation.raw is not None and not evaluation.raw.multi_label:
        n_rows = len(evaluation.raw.confidences)
    elif not isinstance(dataset, dict):
        n_rows = len_of(dataset)
    if n_rows is not None:
        rows["n"] = n_rows
    if dataset is not None and dataset is trainer.calibration_split:
        rows["seen"] = n_rows or trainer.fitted_map.about["n_examples"]
    return rows


def _read(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
