"""Decisions that are saved with a model as plain data, and applied to the output of its pipeline."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import InputValueError, check, expected, few, printable
from hf_calib._files import report_files, whole_file
from hf_calib._records import (
    MOST_BYTES_OF_A_MAP,
    check_record,
    check_same_weights,
    count,
    digest,
    fits,
    number,
    or_none,
    read_json,
    share,
)
from hf_calib._text import counted
from hf_calib.decisions.promise import TITLES
from hf_calib.decisions.rules import (
    AbstainRule,
    CostRule,
    LabelThresholds,
    PredictionSets,
    Rule,
    TopLabelRule,
)
from hf_calib.metrics.checks import check_names, check_real, check_type
from hf_calib.metrics.sums import Interval

DECISIONS = "decisions.json"
# The folder of a report on the rule.
RULE_REPORT = "decisions"
VERSION = 1
#: A note for a model with a rule, whose calibrator has just been folded in.
OUTDATED = f"{DECISIONS} is left out: its rule is for uncalibrated probabilities. Run hf-calib decide again."
RULES: dict[str, type[Rule]] = {
    rule.kind: rule
    for rule in (AbstainRule, TopLabelRule, CostRule, LabelThresholds, PredictionSets)
}
CONFIG = "config.json"
CALIBRATION = "calibration.json"
# A file of this size is read in less than 100 MB of memory.
_MOST_BYTES = 2**22
# What a damaged file may raise, where a value is read or a rule is made from it.
_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
)
_WAY_OUT = (
    "save them with Decisions.save, or hf-calib decide --output; "
    f"this version reads version {VERSION}"
)


def _interval_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The kind of a value and the ends of its interval, each of this kind."""
    return lambda ends: fits(ends, [kind]) and len(ends) == 3 and ends[1] <= ends[2]


_SHARES = ("answered", "accuracy", "coverage")
_RESULTS = {
    f"{name}?": _interval_of(share if name in _SHARES else number) for name in TITLES
}
# Other versions may have other fields than these two.
_VERSION_FIELDS = {"version": int, "rule": str}
# The fields that are those of `Decisions`.
_ABOUT = {
    "class_names": [str],
    "n_measured": count,
    "n_of_fit": count,
    "fingerprint": or_none(digest),
    "calibrator": or_none(digest),
}
# What an option may be is known to its rule.
_OF_RULE = {"options": dict, "fitted": {"thresholds_?": [share]}}
_FIELDS = {**_VERSION_FIELDS, **_OF_RULE, **_ABOUT, "measured": _RESULTS}


@dataclass(frozen=True, eq=False)
class Decisions:
    """A fitted rule with the class names of a model, which is saved with the model.

    Call it on the output of a plain pipeline, `decisions(pipe(texts, top_k=None))`, or on
    probabilities (N, C); it returns class names. For class indices call
    `decisions.rule.predict(probs)`.

    Args:
        rule: a rule fitted to probabilities as the model serves them.
        class_names: C names in the model's order.
        measured, n_measured: results of `rule.measure` or `measure_fit`, and the number of rows.
        fingerprint: hash of the model's weights by `hf_calib.export.folder.fingerprint`; None if
            unknown.
        n_of_fit: how many of the rows that the results are from are among those of the fit.
        calibrator: hash of the calibrator next to the model by `calibrator_of`; None without one.

    >>> rule = CostRule([[0, 1, 0.3], [10, 0, 0.3]])
    >>> decisions = Decisions(rule, ("ham", "spam"))
    >>> decisions([[{"label": "spam", "score": 0.9}, {"label": "ham", "score": 0.1}],
    ...     [{"label": "ham", "score": 0.9}, {"label": "spam", "score": 0.1}]])
    ['spam', None]
    """

    rule: Rule
    class_names: tuple[str, ...]
    measured: Mapping[str, Interval] = field(default_factory=dict)
    n_measured: int = 0
    fingerprint: str | None = None
    n_of_fit: int = 0
    calibrator: str | None = None

    def __post_init__(self) -> None:
        is_rule = isinstance(self.rule, Rule)
        got = type(self.rule).__name__
        way_out = "pass a rule of hf_calib.decisions"
        check_type(is_rule, "rule to be fitted", got, way_out)
        n_classes = self.rule.n_classes
        # A file may hold fewer thresholds than `fit` makes.
        least = 1 if self.rule.independent else 2
        requirement = f"rule to be fitted to at least {least} classes"
        check(n_classes >= least, requirement, n_classes, "fit it again")
        check_names("class_names", self.class_names)
        names = tuple(map(str, self.class_names or ()))
        # The instance is frozen.
        object.__setattr__(self, "class_names", names)
        requirement = f"class_names to be {n_classes} different names"
        way_out = "name each of the model's classes once, in its order"
        are_named = len(names) == len(set(names)) == n_classes and all(names)
        check(are_named, requirement, few(names) or "none", way_out)

    def __call__(self, outputs: Any) -> list[Any]:
        """Return for each text a class name, or None to abstain; for labels and sets,
        a list of names.

        Outputs are the result of `pipe(texts, top_k=None)` for one text, a list of texts or a
        dataset (one by one), or probs (N, C) in the model's order.
        """
        # A pipeline that is called on a dataset gives its results one by one.
        if isinstance(outputs, Iterator | tuple):
            outputs = list(outputs)
        if isinstance(outputs, list):
            # There are no texts.
            if not outputs:
                return []
            is_one_text = isinstance(outputs[0], Mapping)
            texts = [outputs] if is_one_text else outputs
            outputs = [self._scores(row, text) for text, row in enumerate(texts)]
        decided = self.rule.predict(outputs)
        names = self.class_names
        if decided.ndim == 2:
            return [[names[c] for c in np.flatnonzero(row)] for row in decided]
        return [names[c] if c >= 0 else None for c in decided]

    def _scores(self, row: Any, text: int) -> ArrayLike:
        """The scores of a text from a pipeline in the model's order; probabilities are unchanged."""
        is_list = isinstance(row, list)
        if not is_list or not all(isinstance(entry, Mapping) for entry in row):
            return row
        scores = {str(entry.get("label")): entry.get("score") for entry in row}
        way_out = "pass the output of the pipeline unchanged"
        for name, score in scores.items():
            check_real(f"the score of {name} for text {text}", score, way_out)
        names = self.class_names
        # Of a label that is there twice, one score would be lost.
        is_whole = len(row) == len(scores) and scores.keys() == set(names)
        classes = f"the model's {len(names)} classes ({few(names)})"
        requirement = f"the outputs to score each of {classes}"
        got = f"{len(row)} ({few(list(scores))}) for text {text}"
        way_out = "call the pipeline with top_k=None; check that the decisions are this model's"
        check(is_whole, requirement, got, way_out)
        return np.array([scores[name] for name in names], float)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write decisions.json to the folder of the model, completely or not at all."""
        record = self.to_dict()
        text = json.dumps(record, indent=2, allow_nan=False)
        # A line for each number makes large costs several times larger.
        if len(text) > _MOST_BYTES:
            text = json.dumps(record, allow_nan=False)
        requirement = f"{DECISIONS} to have at most {_MOST_BYTES:,} bytes"
        way_out = "round the costs, or make a rule for fewer classes"
        check(len(text) <= _MOST_BYTES, requirement, f"{len(text):,}", way_out)
        with whole_file(Path(folder) / DECISIONS) as unfinished:
            unfinished.write_text(text + "\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Return the content of decisions.json in JSON types."""
        rule = self.rule
        fitted = {name: getattr(rule, name).tolist() for name in rule.fitted}
        measured = {name: list(ends) for name, ends in self.measured.items()}
        about = {name: getattr(self, name) for name in _ABOUT}
        about["class_names"] = list(self.class_names)
        return {
            "version": VERSION,
            "rule": rule.kind,
            "options": rule.options(),
            "fitted": fitted,
            "measured": measured,
            **about,
        }

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | None = None,
    ) -> Decisions:
        """Load the decisions.json of a model with the same classes, weights and calibrator.

        The model is a folder or, if there is none with this name, a repository on the Hub.
        `revision` is a branch, tag or commit; `token` is None for the stored token. Weights are
        compared by the fingerprint in calibration.json.
        """
        with _in_one_line("the decisions", "be loadable", name):
            folder = _folder_of(name, revision=revision, token=token)
            source = folder / DECISIONS
            if not source.is_file():
                raise FileNotFoundError(f"no {DECISIONS} in it")
            record = read_json(source, {}, _MOST_BYTES)
            settings = _object_in(folder / CONFIG)
            calibration = _object_in(folder / CALIBRATION)
            names = _names_in(settings)
        decisions = cls.from_dict(record, str(source))
        requirement = (
            f"the classes of the decisions to be those of config.json ({few(names)})"
        )
        are_same = not names or names == decisions.class_names
        got = f"{few(decisions.class_names)} in {source}"
        way_out = "fit the rule again on probabilities of this model"
        check(are_same, requirement, got, way_out)
        decisions.check_weights(calibration.get("fingerprint"))
        # A rule for predictions, or one alone in a folder, is for no known model.
        is_of_model = decisions.fingerprint is not None and (settings or calibration)
        is_same = decisions.calibrator == _hash_in(calibration, settings)
        which = "no" if decisions.calibrator is None else "another"
        requirement = f"{DECISIONS} to be for the calibrator next to the model"
        got = f"a rule for {which} calibrator"
        check(is_same or not is_of_model, requirement, got, "fit it again")
        return decisions

    @classmethod
    def from_dict(cls, record: Any, source: str = DECISIONS) -> Decisions:
        """Return decisions from the result of `to_dict`; every field is checked."""
        with _in_one_line(source, "hold decisions"):
            rule = _rule_in(record)
            results = record["measured"]
            measured = {
                name: Interval(*results[name]) for name in TITLES if name in results
            }
            about = {name: record[name] for name in _ABOUT}
            decisions = cls(rule=rule, measured=measured, **about)
            # It raises if a result is missing.
            decisions.sentence()
        return decisions

    def check_weights(self, weights: str | None) -> None:
        """Raise if the rule was fitted for other weights than those of this fingerprint;
        None is unknown.
        """
        got = "a rule that was fitted on probabilities of other weights, "
        got += "whose promise may not hold for these"
        check_same_weights(DECISIONS, self.fingerprint, weights, got, "fit it again")

    def sentence(self) -> str:
        """Return the decisions in one sentence, with their measured results if there are any."""
        which = " of the fit" if self.n_of_fit else " not used for the fit"
        if 0 < self.n_of_fit < self.n_measured:
            which = f", {self.n_of_fit:,} of them from the fit"
        rows = f"on {counted(self.n_measured, 'row')}{which}"
        return self.rule.sentence(self.measured, rows)


# ---- Files ----


def rule_files(folder: Path) -> list[Path]:
    """The rule of an earlier `hf-calib decide` in a folder, and the report on it."""
    rule = [folder / DECISIONS] if (folder / DECISIONS).is_file() else []
    return [*rule, *report_files(folder / RULE_REPORT)]


def calibrator_of(name: str | os.PathLike[str]) -> str | None:
    """Return a hash of the calibrator next to a model and not in its weights; None without one."""
    with _in_one_line("the decisions", "be loadable", name):
        folder = _folder_of(name)
        return _hash_in(_object_in(folder / CALIBRATION), _object_in(folder / CONFIG))


@contextmanager
def _in_one_line(what: str, requirement: str, name: object = "") -> Iterator[None]:
    """A context that converts the errors of files, of their values and of the Hub into one line."""
    try:
        yield
    except _ERRORS as error:
        # Most of a long text would be cut off again.
        reason = printable(str(error)[:1000])[:300]
        got = f"{name} ({reason})" if name else reason
        raise InputValueError(expected(what, requirement, got, _WAY_OUT)) from error


def _folder_of(name: str | os.PathLike[str], **where: Any) -> Path:
    """A model's folder, or one with the files of a repository on the Hub that are read here."""
    if os.path.isdir(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    files = [DECISIONS, CONFIG, CALIBRATION]
    return Path(snapshot_download(str(name), allow_patterns=files, **where))


def _object_in(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    return read_json(path, {}, MOST_BYTES_OF_A_MAP) if path.is_file() else {}


def _names_in(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The class names in a config.json in the order of their ids; empty if there are none."""
    by_id = settings.get("id2label") or {}
    if not isinstance(by_id, dict) or not all(each.isdecimal() for each in by_id):
        raise ValueError(f"{CONFIG} with an id2label that does not name the classes")
    # In the file "10" may be before "2".
    return tuple(str(by_id[c]) for c in sorted(by_id, key=int))


def _hash_in(calibration: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    """The hash of the calibrator in a calibration.json; None if it is in the weights."""
    record = settings.get("calibration")
    is_folded = isinstance(record, dict) and record.get("folded") is True
    # Only calibrators that fold have a weight: another one is not in the weights.
    if not calibration or (is_folded and "weight" in calibration):
        return None
    parts = ("method", "settings", "parameters", "weight", "bias")
    own = {name: calibration.get(name) for name in parts}
    return sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def _rule_in(record: Any) -> Rule:
    """The fitted rule of a decisions.json, whose fields are checked."""
    check_record(DECISIONS, record, _VERSION_FIELDS)
    kind = record["rule"]
    version = record["version"]
    if kind not in RULES or version != VERSION:
        raise ValueError(f"the rule {kind!r:.40} of version {version!r:.40}")
    _check_fields("fields", record.keys() ^ _FIELDS.keys())
    check_record(DECISIONS, record, _FIELDS)
    options = record["options"]
    rule = RULES[kind](**options)
    # A missing option would have a default, which may not be the one of the fit.
    _check_fields("options", options.keys() ^ rule.options().keys())
    fitted = record["fitted"]
    _check_fields("fitted", fitted.keys() ^ set(rule.fitted))
    for name, values in fitted.items():
        setattr(rule, name, np.array(values))
    return rule


def _check_fields(what: str, differing: Collection[str]) -> None:
    """Raise for fields of an object that are missing or unknown."""
    got = f"other fields: {few(sorted(differing))}"
    check(not differing, f"{what} to be those of the rule", got, "save them again")
