"""Facts for the card from the JSON files of a model's folder, each checked before use."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import CONFIG_NAME

from hf_calib._errors import InputError, printable
from hf_calib._text import plain_name
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.metrics.sums import Interval
from hf_calib.predictions.prompts import PromptTemplate
from hf_calib.predictions.reading import ROW_OPTIONS
from hf_calib.report.labels import TITLES as MULTI_LABEL_TITLES
from hf_calib.report.measures import MEASURES
from hf_calib.report.saved import read_report
from hf_calib.scaling.saved_map import MAP_NAME, recorded_in
from hf_calib.tasks import Task, task_of

REPORT_FOLDER = "calibration"
STREAMED_FIGURE = "reliability.png"  # of an evaluation that kept no logits, for which there is no report
# Metrics of the card, by their keys in reports and logs; all are in the report.
METRICS = ("accuracy", "nll", "brier", "ece", "adaptive_ece", "classwise_ece", "mce", "smooth_ece")
_LONGEST = 200  # characters of a text that a card shows
_BY_COMMAND = f"with hf-calib calibrate, or with hf-calib evaluate FOLDER --output FOLDER/{REPORT_FOLDER}."


class Consistency(NamedTuple):
    """The consistency test of an ECE; see `hf_calib.metrics.consistency_test`."""

    value: float
    expected: float
    p_value: float


class Split(NamedTuple):
    """Rows that were used for something: names of dataset and split, how many, which part; any may be unknown.

    Rows of another part of the same split are other rows.
    """

    name: str | None = None
    split: str | None = None
    n: int | None = None
    part: str | None = None


@dataclass(frozen=True)
class Results:
    """Measurements before and after the map.

    Args:
        rows: what was measured.
        seen: how many of these rows the map was fitted on.
        n_bins: of the binned errors; None if unknown.
        level: of the intervals, in (0, 1); None where there are none.
        metrics: "before" and "after", or only "value" where the model was measured as it is served; then by key.
        tests: the consistency tests, by the same names.
        figures: paths in the folder.
        options: of `hf-calib evaluate`, which measures the same rows; none where it cannot.
        autocast: "bf16" or "fp16" where the model was measured in 16 bits; it is saved in 32.
    """

    rows: Split
    seen: int
    n_bins: int | None
    level: float | None
    metrics: Mapping[str, Mapping[str, Interval]]
    tests: Mapping[str, Consistency]
    figures: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    autocast: str | None = None

    @property
    def has_report(self) -> bool:
        """Whether they are from a report, with intervals and tests."""
        return self.level is not None


@dataclass(frozen=True)
class Facts:
    """A folder's model.

    Args:
        task: its row of `TASKS`; None if unknown.
        has_own_code: whether the network is none of transformers', and its code is in the folder.
        class_names: by class number; none if unknown.
        multi_label: whether its probabilities are sigmoids.
        record: calibration.json, or what the config has of it: method, loss, split and so on; None without a map.
        folded: whether the map is in the weights.
        splits: "train", "calibration" and "test", where known.
        results: None where nothing was measured, or not with these weights.
        versions: of packages, by name.
        prompt: how a text becomes the model's input, of a language model's option tokens; None for others.
    """

    task: Task | None
    has_own_code: bool
    class_names: tuple[str, ...]
    multi_label: bool
    record: Mapping[str, Any] | None
    folded: bool
    splits: Mapping[str, Split]
    results: Results | None
    versions: Mapping[str, str]
    prompt: PromptTemplate | None = None

    @property
    def is_read_by_commands(self) -> bool:
        """Whether `hf-calib evaluate` and `calibrate` take the model itself, not only a file of predictions."""
        return self.task is None or self.task.classifier is not None

    @property
    def is_read_unlabelled(self) -> bool:
        """Whether `hf-calib calibrate` takes inputs without labels."""
        return self.is_read_by_commands and (self.task is None or self.task.reads_unlabelled)


def read_facts(folder: Path) -> Facts:
    """Read config.json, calibration.json and calibration/report.json.

    A file that is no such file, or about other weights, is left out with a warning.
    """
    config = _json(folder / CONFIG_NAME)
    record = _json(folder / MAP_NAME) or recorded_in(config)
    names = _mapping(config.get("id2label"))
    known = [text(names, number) for number in sorted(filter(str.isdecimal, names), key=int)]
    splits = {role: _split(found) for role, found in _mapping(record.get("data")).items()}
    made_with = _mapping(record.get("versions")) or {"hf_calib": record.get("hf_calib")}
    return Facts(
        task=task_of(config),
        has_own_code="auto_map" in config,
        class_names=tuple(name for name in known if name is not None),
        multi_label=config.get("problem_type") == "multi_label_classification",
        record=record if record.get("method") or record.get("temperature") is not None else None,
        folded=recorded_in(config).get("folded", record.get("folded")) is True,
        splits=splits,
        results=_reported(folder, record) or _streamed(folder, record),
        versions={name: text(made_with, name) or "" for name in made_with},
        prompt=_prompt(config),
    )


def _prompt(config: Mapping[str, Any]) -> PromptTemplate | None:
    try:
        return PromptTemplate.of(config)
    except InputError as error:
        _left_out(f"{CONFIG_NAME}: {error}", "Write it with PromptTemplate.to_dict()")
        return None


def text(record: Mapping[str, Any], key: str) -> str | None:
    """An entry that is text and not empty, in one line that a card can show; else None."""
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        return None
    value = printable(value)
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."


def number(record: Mapping[str, Any], key: str) -> float | None:
    """An entry that is a finite number; else None."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def count(record: Mapping[str, Any], key: str) -> int | None:
    """An entry that is a whole number, not negative; else None."""
    found = number(record, key)
    return int(found) if found is not None and found >= 0 and found == int(found) else None


def _reported(folder: Path, record: Mapping[str, Any]) -> Results | None:
    path = folder / REPORT_FOLDER / "report.json"
    if not path.is_file():
        return None
    try:
        report = read_report(path)
    except InputError as error:
        _left_out(f"{REPORT_FOLDER}/report.json: {error}", f"Write it again {_BY_COMMAND}")
        return None
    about = _mapping(report.get("about"))
    if record and about.get("fingerprint") != record.get("fingerprint"):
        _left_out(
            f"{REPORT_FOLDER}/report.json, which is about other weights", f"Measure these {_BY_COMMAND}"
        )
        return None
    columns = ("before", "after") if report["after"] is not None else ("before",)
    level = number(report, "confidence_level")
    named = {"before": "before" if len(columns) == 2 else "value", "after": "after"}
    metrics = {}
    tests = {}
    for column in columns:
        state = report[column]
        metrics[named[column]] = _values(_mapping(state["metrics"]))
        test = _mapping(state.get("consistency_test"))  # reports on several labels a row have none
        found = [number(test, key) for key in Consistency._fields]
        if None not in found:
            tests[named[column]] = Consistency(*found)  # type: ignore[arg-type]
    figures = (f"{REPORT_FOLDER}/figures/{name}" for name in _FIGURES)
    return Results(
        rows=_split({**about, "n": report["n_examples"]}),
        seen=count(about, "seen") or 0,
        n_bins=report["n_bins"],
        level=level if level is not None and 0 < level < 1 else 0.95,
        metrics=metrics,
        tests=tests,
        figures=tuple(path for path in figures if (folder / path).is_file()),
        options=_options(about.get("options")),
        autocast=_autocast(about),
    )


_FIGURES = (
    "reliability.png",
    "smooth_reliability.png",
    "confidence_histogram.png",
    "risk_coverage.png",
    "classwise.png",
    "label_errors.png",
)


def _streamed(folder: Path, record: Mapping[str, Any]) -> Results | None:
    """Measurements of a trainer's evaluation that kept no logits."""
    measured = _mapping(record.get("metrics"))
    metrics = {}
    for column in ("before", "after"):
        found = _mapping(measured.get(column))
        values = {key: number(found, key) for key in LOGGED_METRICS}
        metrics[column] = {key: Interval(value) for key, value in values.items() if value is not None}
    if not (metrics["before"] and metrics["after"]):
        return None
    has_figure = measured.get("figure") is True and (folder / STREAMED_FIGURE).is_file()
    return Results(
        rows=_split(measured),
        seen=count(measured, "seen") or 0,
        n_bins=count(measured, "n_bins"),
        level=None,
        metrics=metrics,
        tests={},
        figures=(STREAMED_FIGURE,) if has_figure else (),
        autocast=_autocast(measured),
    )


def _autocast(measured: Mapping[str, Any]) -> str | None:
    found = text(measured, "autocast")
    return found if found in ("bf16", "fp16") else None


def _values(metrics: Mapping[str, Any]) -> dict[str, Interval]:
    found = {}
    for key in (*METRICS, *MULTI_LABEL_TITLES):
        entry = _mapping(metrics.get(key))
        value = number(entry, "value")
        if value is not None:
            low, high = number(entry, "low"), number(entry, "high")
            found[key] = Interval(value) if low is None or high is None else Interval(value, low, high)
    return found


def _split(entry: object) -> Split:
    record = _mapping(entry)
    name = text(record, "name")
    plain = None if name is None else plain_name(name)
    return Split(plain, text(record, "split"), count(record, "n"), text(record, "part"))


def _options(value: object) -> tuple[str, ...]:
    """Options that say which rows are read, with values that need no quotes; none where one is anything else."""
    words = value if isinstance(value, list) else []
    plain = [isinstance(word, str) and re.fullmatch(r"[\w./:=,+@-]{1,200}", word) for word in words]
    return tuple(words) if all(plain) and set(words[::2]) <= ROW_OPTIONS and len(words) % 2 == 0 else ()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        return _mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        _left_out(f"{path.name}, which is not readable as JSON ({error})", "Save the model again.")
        return {}


def _left_out(what: str, way_out: str) -> None:
    warnings.warn(f"The model card says nothing of {what}. {way_out}", UserWarning, stacklevel=4)


def title_of_metric(key: str) -> str:
    """As reports call it."""
    return MULTI_LABEL_TITLES.get(key) or MEASURES[key].title
