"""Facts for the card from the JSON files of a model's folder."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import CONFIG_NAME

from hf_calib._errors import InputError
from hf_calib._files import REPORT
from hf_calib._records import (
    MOST_BYTES_OF_A_MAP,
    count,
    fits,
    number,
    or_none,
    read_json,
)
from hf_calib.decisions import Decisions
from hf_calib.decisions.saved import DECISIONS
from hf_calib.metrics import Interval
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.models.classifier import CONFIG_KINDS, StoredWeights, Task, task_of
from hf_calib.models.prompts import PromptTemplate
from hf_calib.report.multi_label import TITLES as MULTI_LABEL_TITLES
from hf_calib.scaling import FOLDABLE_SCALERS
from hf_calib.scaling.saved_map import (
    MAP_NAME,
    RECORD_KINDS,
    ROWS_KINDS,
    check_in_weights,
    load_map,
    map_title,
    recorded_in,
)

REPORT_FOLDER = "calibration"
# Metrics of the card, by their keys in reports and logs; all are in the report.
METRICS = (
    "accuracy",
    "nll",
    "brier",
    "ece",
    "adaptive_ece",
    "classwise_ece",
    "mce",
    "smooth_ece",
)
# These titles leave room for two columns of numbers next to them on a phone.
_SHORT = {
    "nll": "NLL (nats)",
    "brier": "Brier score",
    "ece": "ECE",
    "mce": "Maximum CE",
}
_FIGURES = (
    "reliability",
    "smooth_reliability",
    "confidence_histogram",
    "risk_coverage",
    "classwise",
)
# What rounding may add to the ends of a metric's range.
_ROUNDING = 1e-9
_METRIC = {"title": str, **dict.fromkeys(Interval._fields, or_none(number))}


def are_metrics(found: Any) -> bool:
    """Whether a value of JSON may be the metrics of a report, each in its range."""
    return fits(found, dict) and all(_is_metric(*each) for each in found.items())


def _is_metric(key: str, metric: Any) -> bool:
    """Whether a value of JSON may be the metric of this key, with an interval or without one."""
    if not fits(metric, _METRIC):
        return False
    value, low, high = (metric[name] for name in Interval._fields)
    known = [each for each in (value, low, high) if each is not None]
    most = 1.0
    # Over all classes, the Brier score of a sure and wrong prediction is 2.
    if "brier" in key:
        most = 2.0
    if "nll" in key:
        most = math.inf
    if not all(-_ROUNDING <= each <= most + _ROUNDING for each in known):
        return False
    if low is None or high is None:
        return low is high
    return low <= high


_STATE = {"metrics": are_metrics}
REPORT_KINDS = {
    "about": ROWS_KINDS,
    "before": or_none(_STATE),
    "after": or_none(_STATE),
    "n_examples": count,
    "n_bins": count,
    "confidence_level": number,
    "verdict": str,
}
# The most temperatures that are shown.
_FEW = 6


@dataclass(frozen=True)
class Results:
    """Measurements "before" and "after" calibration, or only the "value" of a model as it is
    served.
    """

    # The metrics of each column by their keys, as report.json has them.
    columns: Mapping[str, Mapping[str, Any]]
    # The rows, how many of them a calibrator was fitted on ("seen"), and "autocast".
    about: Mapping[str, Any]
    n_bins: int | None
    # That of the intervals; None without a report, which has intervals and a verdict.
    level: float | None = None
    verdict: str = ""
    # The paths of the figures in the folder.
    figures: Sequence[str] = ()

    @property
    def titles(self) -> dict[str, str]:
        """The metrics' names in the table, by key."""
        found = {
            key: metric["title"]
            for metrics in self.columns.values()
            for key, metric in metrics.items()
        }
        return {key: _SHORT.get(key, title) for key, title in found.items()}


@dataclass(frozen=True)
class Facts:
    """A folder's model."""

    config: Mapping[str, Any]
    # calibration.json, or its part in config.json; empty without a calibrator.
    record: Mapping[str, Any]
    folded: bool
    task: Task | None
    prompt: PromptTemplate | None
    # None where nothing was measured, or not with these weights.
    results: Results | None
    # A sentence on the rule next to the model.
    decisions: str | None

    @property
    def title(self) -> str:
        """The calibrator's name in a sentence."""
        fitted = self.record.get("parameters") or self.record
        return map_title(_method(self.record), fitted.get("choice"))

    @property
    def settings(self) -> list[str]:
        """The calibrator's temperatures, if there are few, and its criterion."""
        known = {**self.record, **self.record.get("parameters", {})}
        # A calibrator may be a single weight without a bias, which people know as a
        # temperature.
        scale = self.record.get("weight")
        if (
            isinstance(scale, float)
            and scale > 0
            and not np.any(self.record.get("bias") or 0)
        ):
            known["temperature"] = 1 / scale
        found = {
            name: np.ravel(known.get(name) or [])
            for name in ("temperature", "temperatures")
        }
        few = {
            name: values for name, values in found.items() if 0 < len(values) <= _FEW
        }
        said = [
            f"{name} {', '.join(f'{value:.4f}' for value in values)}"
            for name, values in few.items()
        ]
        return (
            [*said, f"criterion: {known['criterion']}"]
            if known.get("criterion")
            else said
        )

    @property
    def splits(self) -> dict[str, tuple[Mapping[str, Any], str]]:
        """The rows of each role, and what they were used for."""
        rows = dict(self.record.get("data") or {})
        n_fitted = self.record.get("n_examples")
        rows["calibration"] = {"n": n_fitted} | rows.get(
            "calibration", {"split": self.record.get("split")}
        )
        # Without results there are no numbers that are of any rows.
        of_test = rows.pop("test", {})
        if self.results is not None:
            rows["test"] = {**of_test, **self.results.about}
        uses = {
            "train": "the weights",
            "gammas": "the loss's gammas",
            "calibration": "the calibrator",
        }
        if rows.get("gammas") == rows["calibration"]:
            uses["calibration"] = f"the calibrator and {uses.pop('gammas')}"
        uses["test"] = "the numbers above"
        return {role: (rows[role], use) for role, use in uses.items() if role in rows}


def read_facts(folder: Path) -> Facts:
    """The facts in config.json, calibration.json, the report and decisions.json.

    A file that is unreadable, or about other weights, is left out with a warning, so that a run
    ends with its card.
    """
    config = _json(folder / CONFIG_NAME, CONFIG_KINDS)
    recorded = recorded_in(config)
    record = _record(folder, recorded) or recorded
    weights = StoredWeights(folder)
    wanted = record.get("fingerprint")
    if wanted is not None and not weights.have(wanted):
        _left_out(f"{MAP_NAME}, which is about other weights", "Calibrate this model.")
        recorded = {}
        record = {}
    # The config comes first: it belongs to the weights.
    # A calibrator that does not fold may be next to folded ones.
    is_in_weights = bool(recorded.get("folded", record.get("folded")))
    return Facts(
        config,
        record,
        folded=is_in_weights and _method(record) in FOLDABLE_SCALERS,
        task=task_of(config),
        prompt=PromptTemplate.of(config),
        results=_reported(weights, record) or _streamed(record),
        decisions=_decisions(weights, record.get("fingerprint")),
    )


def _method(record: Mapping[str, Any]) -> Any:
    """The name of a recorded calibrator; a temperature's record may have none."""
    return record.get("method", "temperature")


def _record(folder: Path, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The calibration.json, if its calibrator can be loaded and is, where it is folded,
    that of the weights.
    """
    record = _json(folder / MAP_NAME, RECORD_KINDS, MOST_BYTES_OF_A_MAP)
    try:
        if record:
            saved = load_map(folder)
            check_in_weights(saved if recorded.get("folded") else None, recorded, "it")
    except InputError as error:
        _left_out(str(error), "Save the calibrated model again.")
        return {}
    return record


def _reported(weights: StoredWeights, record: Mapping[str, Any]) -> Results | None:
    folder = weights.folder
    report = _json(folder / REPORT_FOLDER / REPORT, REPORT_KINDS)
    if not report:
        return None
    wanted = report["about"].get("fingerprint")
    is_known = wanted == record.get("fingerprint")
    # A report without a calibrator is compared with the weights themselves.
    if not record:
        is_known = wanted is None or weights.have(wanted)
    if not is_known:
        way_out = "Measure these weights: hf-calib calibrate, or hf-calib evaluate FOLDER --output FOLDER/calibration."
        _left_out(
            f"{REPORT_FOLDER}/report.json, which is about other weights, or another calibrator",
            way_out,
        )
        return None
    names = ["value"] if report["after"] is None else ["before", "after"]
    states = {name: report[name if name == "after" else "before"] for name in names}
    figures = [f"{REPORT_FOLDER}/figures/{name}.png" for name in _FIGURES]
    return Results(
        columns={name: _shown(state["metrics"]) for name, state in states.items()},
        about={**report["about"], "n": report["n_examples"]},
        n_bins=report["n_bins"],
        level=report["confidence_level"],
        verdict=report["verdict"],
        figures=[path for path in figures if (folder / path).is_file()],
    )


def _streamed(record: Mapping[str, Any]) -> Results | None:
    """Measurements of a trainer's evaluation that kept no logits."""
    measured, columns = record.get("metrics") or {}, {}
    for column in ("before", "after"):
        values = measured.get(column, {}).items()
        entries = {
            key: {"title": LOGGED_METRICS[key], "value": value, "low": None}
            for key, value in values
        }
        columns[column] = _shown(entries)
    if not all(columns.values()):
        return None
    return Results(columns, measured, measured.get("n_bins"))


def _shown(metrics: Mapping[str, Any]) -> dict[str, Any]:
    keys = [key for key in (*METRICS, *MULTI_LABEL_TITLES) if key in metrics]
    return {key: metrics[key] for key in keys if metrics[key]["value"] is not None}


def _decisions(weights: StoredWeights, known: str | None) -> str | None:
    folder = weights.folder
    if not (folder / DECISIONS).is_file():
        return None
    try:
        decisions = Decisions.from_pretrained(folder)
        own = decisions.fingerprint
        if known is None and own is not None and not weights.have(own):
            # No fingerprint is empty, so the weights are refused as others.
            known = ""
        decisions.check_weights(known)
    except InputError as error:
        _left_out(
            f"{DECISIONS}: {error}", "Run hf-calib decide again, or remove the file."
        )
        return None
    return decisions.sentence()


def _json(path: Path, kinds: Mapping[str, Any], *most_bytes: int) -> dict[str, Any]:
    """A JSON file; empty, with a warning if there is one, where it cannot be read."""
    try:
        # A link to nothing is there as well, and is warned of.
        return read_json(path, kinds, *most_bytes) if os.path.lexists(path) else {}
    except InputError as error:
        _left_out(f"{path.name}: {error}", "Save the model or the report again.")
        return {}


def _left_out(what: str, way_out: str) -> None:
    warnings.warn(
        f"The model card leaves out {what}. {way_out}", UserWarning, stacklevel=5
    )
