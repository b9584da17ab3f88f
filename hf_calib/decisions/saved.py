"""Decisions that are saved with a model as plain data, and applied to the output of its pipeline."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from hashlib import sha256
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import InputValueError, check, expected, few, printable
from hf_calib._files import whole_file
from hf_calib._records import (
    MOST_BYTES_OF_A_MAP,
    check_record,
    check_same_weights,
    count,
    digest,
    fits,
    number,
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
from hf_calib.metrics.checks import check_type
from hf_calib.metrics.sums import Interval

DECISIONS = "decisions.json"
# The folder of a report on the rule.
RULE_REPORT = "decisions"
VERSION = 1
#: A note for a model with a rule, whose calibrator has just been folded in.
OUTDATED = f"{DECISIONS} is left out: its rule is for uncalibrated probabilities. Run hf-calib decide again."
RULES: dict[str, type[Rule]] = {
    r.kind: r
    for r in (AbstainRule, TopLabelRule, CostRule, LabelThresholds, PredictionSets)
}
CONFIG = "config.json"
CALIBRATION = "calibration.json"
_MOST_BYTES = 2**22  # A file of this size is read in less than 100 MB of memory.
_WAY_OUT = f"save them with Decisions.save, or hf-calib decide --output; this version reads version {VERSION}"


def _is_interval(value: Any, kind: Callable[[Any], bool]) -> bool:
    return fits(value, [kind]) and len(value) == 3 and value[1] <= value[2]


def _is_of_shares(value: Any) -> bool:
    return _is_interval(value, share)


def _is_of_numbers(value: Any) -> bool:
    return _is_interval(value, number)


_SHARES = ("answered", "accuracy", "coverage")
_RESULTS = {
    f"{name}?": _is_of_shares if name in _SHARES else _is_of_numbers for name in TITLES
}
_VERSION_FIELDS = {"version": int, "rule": str}
# The other fields of decisions.json; earlier files do not have the last three.
_FIELDS = {
    "options": dict,
    "fitted": {"thresholds_?": [share], "pooled_?": [bool]},
    "class_names": [str],
    "measured": _RESULTS,
    "n_measured": count,
    "of_fit?": bool,
    "fingerprint?": digest,
    "calibrator?": digest,
}


@dataclass(frozen=True, eq=False)
class Decisions:
    """A fitted rule with the class names of a model, which is saved with the model.

    Call it on the output of a plain pipeline, `decisions(pipe(texts, top_k=None))`, or on probabilities (N, C); it
    returns class names. For class indices call `decisions.rule.predict(probs)`.

    Args:
        rule: a rule fitted to probabilities as the model serves them.
        class_names: C names in the model's order.
        measured, n_measured: results of `rule.measure` or `measure_fit`, and the number of rows.
        fingerprint: hash of the model's weights by `hf_calib.export.folder.fingerprint`; None if unknown.
        of_fit: whether the rule was fitted on rows that the results are from.
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
    of_fit: bool = False
    calibrator: str | None = None

    def __post_init__(self) -> None:
        got = type(self.rule).__name__
        way_out = "pass a rule of hf_calib.decisions"
        check_type(isinstance(self.rule, Rule), "rule to be fitted", got, way_out)
        is_list = not isinstance(self.class_names, str)
        way_out = "write a tuple of names"
        check_type(is_list, "class_names to be several", self.class_names, way_out)
        names = tuple(map(str, self.class_names))
        n_classes = self.rule.n_classes
        object.__setattr__(self, "class_names", names)
        way_out = "name each of the model's classes once, in its order"
        named = len(names) == len(set(names)) == n_classes
        requirement = f"class_names to be {n_classes} different names"
        check(named, requirement, few(names) or "none", way_out)
        least = 1 if self.rule.independent else 2
        requirement = f"rule to be fitted to at least {least} classes"
        check(n_classes >= least, requirement, n_classes, "fit it again")

    def __call__(self, outputs: Any) -> list[Any]:
        """Return for each text a class name, or None to abstain; for labels and sets, a list of names.

        Outputs are the result of `pipe(texts, top_k=None)` for one text, a list of texts or a dataset (one by one), or
        probs (N, C) in the model's order.
        """
        if isinstance(outputs, Iterator):
            outputs = list(outputs)
        if isinstance(outputs, list):
            if not outputs:  # There are no texts.
                return []
            texts = [outputs] if isinstance(outputs[0], Mapping) else outputs
            outputs = [self._scores(row, i) for i, row in enumerate(texts)]
        decided = self.rule.predict(outputs)
        if decided.ndim == 2:
            return [
                [self.class_names[c] for c in np.flatnonzero(row)] for row in decided
            ]
        return [self.class_names[c] if c >= 0 else None for c in decided]

    def _scores(self, row: Any, text: int) -> ArrayLike:
        """The scores of a text from a pipeline in the model's order; probabilities are unchanged."""
        if not (
            isinstance(row, list) and all(isinstance(entry, Mapping) for entry in row)
        ):
            return row
        found = {str(entry.get("label")): entry.get("score") for entry in row}
        got = few([f"{label}: {score}" for label, score in found.items()])
        are_numbers = all(
            isinstance(score, Real) and not isinstance(score, bool)
            for score in found.values()
        )
        way_out = "pass the output of the pipeline unchanged"
        requirement = "the scores of the outputs to be numbers"
        check_type(are_numbers, requirement, f"{got} for text {text}", way_out)
        names = self.class_names
        requirement = f"the outputs to score each of the model's {len(names)} classes ({few(names)})"
        way_out = "call the pipeline with top_k=None; check that the decisions are this model's"
        holds = len(row) == len(found) and found.keys() == set(names)
        check(holds, requirement, f"{len(row)} ({got}) for text {text}", way_out)
        return np.array([found[name] for name in names], float)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write decisions.json to the folder of the model, completely or not at all."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        if len(text) > _MOST_BYTES:
            text = json.dumps(self.to_dict(), allow_nan=False)
        way_out = "round the costs, or make a rule for fewer classes"
        requirement = f"{DECISIONS} to have at most {_MOST_BYTES:,} bytes"
        check(len(text) <= _MOST_BYTES, requirement, f"{len(text):,}", way_out)
        with whole_file(Path(folder) / DECISIONS) as unfinished:
            unfinished.write_text(text, encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Return the content of decisions.json in JSON types."""
        return {
            "version": VERSION,
            "rule": self.rule.kind,
            "options": self.rule.options(),
            "fitted": {
                name: getattr(self.rule, name).tolist() for name in self.rule.fitted
            },
            "class_names": list(self.class_names),
            "measured": {
                name: list(interval) for name, interval in self.measured.items()
            },
            "n_measured": self.n_measured,
            "of_fit": self.of_fit,
            "fingerprint": self.fingerprint,
            "calibrator": self.calibrator,
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
        with _loadable(name):
            folder = _folder_of(name, revision=revision, token=token)
            if not (folder / DECISIONS).is_file():
                raise FileNotFoundError(f"no {DECISIONS} in it")
            record = read_json(folder / DECISIONS, {}, _MOST_BYTES)
            settings = _object_in(folder / CONFIG)
            calibration = _object_in(folder / CALIBRATION)
            names = _names_in(settings)
        decisions = cls.from_dict(record, str(folder / DECISIONS))
        requirement = (
            f"the classes of the decisions to be those of config.json ({few(names)})"
        )
        got = f"{few(decisions.class_names)} in {folder / DECISIONS}"
        way_out = "fit the rule again on probabilities of this model"
        check(not names or names == decisions.class_names, requirement, got, way_out)
        decisions.check_weights(calibration.get("fingerprint"))
        if decisions.fingerprint is not None and (settings or calibration):
            here = _hash_in(calibration, settings)
            requirement = f"{DECISIONS} to be for the calibrator next to the model"
            got = f"a rule for {'no' if decisions.calibrator is None else 'another'} calibrator"
            way_out = "fit it again"
            check(decisions.calibrator == here, requirement, got, way_out)
        return decisions

    @classmethod
    def from_dict(cls, record: Any, source: str = DECISIONS) -> Decisions:
        """Return decisions from the result of `to_dict`; every field is checked."""
        try:
            check_record(DECISIONS, record, _VERSION_FIELDS)
            kind = record["rule"]
            if kind not in RULES or record["version"] != VERSION:
                version = repr(record["version"])[:40]
                raise ValueError(f"the rule {repr(kind)[:40]} of version {version}")
            check_record(DECISIONS, record, _FIELDS)
            names = {key.removesuffix("?") for key in _VERSION_FIELDS | _FIELDS}
            _check_fields("fields", record.keys() - names)
            options = record["options"]
            names = {each.name for each in fields(RULES[kind])}  # type: ignore[arg-type]
            _check_fields("options", options.keys() ^ names)
            rule = RULES[kind](**options)
            _check_fields("fitted", record["fitted"].keys() ^ set(rule.fitted))
            for name in rule.fitted:
                setattr(rule, name, np.array(record["fitted"][name]))
            measured = {
                name: Interval(*ends)
                for name, ends in record["measured"].items()
                if name in TITLES
            }
            decisions = cls(
                rule,
                record["class_names"],
                measured,
                record["n_measured"],
                record.get("fingerprint"),
                record.get("of_fit") or False,
                record.get("calibrator"),
            )
            decisions.sentence()  # It raises if a result is missing.
            return decisions
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            # Most of a long text would be cut off again.
            reason = printable(str(error)[:1000])[:300]
            raise InputValueError(
                expected(source, "hold decisions", reason, _WAY_OUT)
            ) from error

    def check_weights(self, weights: str | None) -> None:
        """Raise if the rule was fitted for other weights than those of this fingerprint; None is unknown."""
        got = "a rule that was fitted on probabilities of other weights, "
        got += "whose promise may not hold for these"
        named = self.fingerprint
        check_same_weights(DECISIONS, named, weights, got, "fit it again")

    def sentence(self) -> str:
        """Return the decisions in one sentence, with their measured results if there are any."""
        which = "of the fit" if self.of_fit else "not used for the fit"
        return self.rule.sentence(
            self.measured, f"on {counted(self.n_measured, 'row')} {which}"
        )


# ---- Files ----


def calibrator_of(name: str | os.PathLike[str]) -> str | None:
    """Return a hash of the calibrator next to a model and not in its weights; None without one."""
    with _loadable(name):
        folder = _folder_of(name)
        return _hash_in(_object_in(folder / CALIBRATION), _object_in(folder / CONFIG))


@contextmanager
def _loadable(name: object) -> Iterator[None]:
    """A context that converts the errors of files and of the Hub into one line."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        got = f"{name} ({printable(str(error)[:1000])[:300]})"
        raise InputValueError(
            expected("the decisions", "be loadable", got, _WAY_OUT)
        ) from error


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
    return tuple(
        str(by_id[c]) for c in sorted(by_id, key=int)
    )  # "10" may be before "2".


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


def _check_fields(what: str, differing: Collection[str]) -> None:
    """Raise for fields of an object that are missing or unknown."""
    got = f"other fields: {few(sorted(differing))}"
    check(not differing, f"{what} to be those of the rule", got, "save them again")
