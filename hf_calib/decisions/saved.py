"""Decisions saved beside a model, as plain data, and applied to what its pipeline returns."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputValueError, expected, few
from hf_calib._files import whole_file
from hf_calib.decisions._rule import Rule, percent
from hf_calib.decisions.abstain import AbstainRule
from hf_calib.decisions.costs import CostRule
from hf_calib.decisions.measured import TITLES
from hf_calib.decisions.sets import PredictionSets
from hf_calib.decisions.thresholds import LabelThresholds
from hf_calib.metrics.bootstrap import Interval

FILE = "decisions.json"
VERSION = 1
RULES: dict[str, type[Rule]] = {
    rule.kind: rule for rule in (AbstainRule, CostRule, LabelThresholds, PredictionSets)
}
_WAY_OUT = (
    f"save it again with Decisions.save, or hf-calib decide --output; this version reads version {VERSION}"
)


@dataclass(frozen=True, eq=False)
class Decisions:
    """A fitted rule with the names of the model's classes, which is saved beside the model.

    Calling it decides on what a plain pipeline returns, `decisions(pipe(texts, top_k=None))`, or on
    probabilities (N, C), and names the classes. For class numbers call `decisions.rule.predict(probs)`.

    Args:
        rule: fitted on probabilities as the model serves them.
        class_names: C of them, in the model's order.
        measured: what `rule.measure` found on rows that it was not fitted on; or nothing.
        n_measured: how many rows those were.
        fingerprint: of the weights that gave the probabilities, see `hf_calib.export.fingerprint`; None if unknown.

    Raises:
        ValueError: if the rule is not fitted, or the names are not one for each of its classes.

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

    def __post_init__(self) -> None:
        names = tuple(map(str, self.class_names))
        object.__setattr__(self, "class_names", names)
        n_classes = _n_classes(self.rule)
        if len(names) != n_classes or len(set(names)) < n_classes:
            way_out = "name each of the model's classes once, in its order"
            raise InputValueError(
                expected("class_names", f"be {n_classes} different names", few(names), way_out)
            )

    def __call__(self, outputs: Any) -> list[Any]:
        """Decide on each text.

        Args:
            outputs: what `pipe(texts, top_k=None)` returns, for each text a list of {"label", "score"} of all
                classes, perhaps one by one, as for a dataset of texts; or probs (N, C) in the model's order.

        Returns:
            For each text the name of a class, or None for "hand over"; of labels and of sets, a list of names.

        Raises:
            ValueError: if the outputs are not of all classes of the model, or no probabilities.
        """
        if isinstance(outputs, Iterator):
            outputs = list(outputs)
        if isinstance(outputs, list) and not outputs:  # no texts
            return []
        scores = self._matrix(outputs) if _from_pipeline(outputs) else outputs
        decided = self.rule.predict(scores)
        if decided.ndim == 2:
            return [[self.class_names[c] for c in np.flatnonzero(row)] for row in decided]
        return [self.class_names[c] if c >= 0 else None for c in decided]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write decisions.json into a folder, the model's: the whole file or nothing."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        with whole_file(Path(folder) / FILE) as unfinished:
            unfinished.write_text(text + "\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """The content of decisions.json, in JSON's own types."""
        fitted = {name: values.tolist() for name, values in vars(self.rule).items() if name.endswith("_")}
        return {
            "version": VERSION,
            "rule": self.rule.kind,
            "options": self.rule.options(),
            "fitted": fitted,
            "class_names": list(self.class_names),
            "measured": {name: list(interval) for name, interval in self.measured.items()},
            "n_measured": self.n_measured,
            **({} if self.fingerprint is None else {"fingerprint": self.fingerprint}),
        }

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None
    ) -> Decisions:
        """Load the decisions.json of a model.

        Args:
            name: a local folder; or a model on the Hub, whose file is downloaded once and kept in its cache.
            revision: branch, tag or commit on the Hub.
            token: for the Hub; None uses the stored one.

        Raises:
            ValueError: if there is none, it is no such file, of another version, or for other classes than those
                of the model's config.json beside it.
        """
        folder = Path(name) if os.path.isdir(name) else _downloaded(str(name), revision, token)
        path = folder / FILE
        if not path.is_file():
            way_out = "write one with hf-calib decide --output, or Decisions.save"
            raise InputValueError(expected("the model", f"come with a {FILE}", f"none in {name}", way_out))
        decisions = cls.from_dict(_read(path), str(path))
        names = _names_in(folder / "config.json")
        if names not in (None, decisions.class_names):
            got = f"{few(decisions.class_names)} in {path}"
            requirement = f"be those of config.json ({few(names or ())})"
            way_out = "fit the rule again on probabilities of this model"
            raise InputValueError(expected("the classes of the decisions", requirement, got, way_out))
        return decisions

    @classmethod
    def from_dict(cls, record: Any, source: str = FILE) -> Decisions:
        """Decisions from the result of `to_dict`, with every field checked."""
        try:
            if record["version"] != VERSION:
                raise ValueError(f"version {str(record['version'])[:20]!r}")
            kind = record["rule"]
            if kind not in RULES:
                raise ValueError(f"the rule {str(kind)[:40]!r}")
            rule = RULES[kind](**record["options"])
            names = record["class_names"]
            if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
                raise ValueError("class_names that are not names")
            _restore(rule, record["fitted"], len(names))
            measured = {
                name: _interval(values) for name, values in record["measured"].items() if name in TITLES
            }
            weights = record.get("fingerprint")
            if weights is not None and not (
                isinstance(weights, str) and re.fullmatch("[0-9a-f]{64}", weights)
            ):
                raise ValueError(f"the fingerprint {str(weights)[:40]!r}")
            return cls(rule, tuple(names), measured, int(_finite(record["n_measured"])), weights)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise InputValueError(expected(source, "hold decisions", reason[:300], _WAY_OUT)) from error

    def sentence(self) -> str:
        """The decisions in one sentence, with their measured results if there are any."""
        found = self.measured
        rows = f"on {self.n_measured:,} rows that it was not fitted on"
        if isinstance(self.rule, AbstainRule) and self.rule.answers_nothing:
            return f"It hands over every input: {percent(self.rule.accuracy)} accuracy could not be promised."
        if isinstance(self.rule, AbstainRule) and "answered" in found:
            kept = (
                f"{found['accuracy'].value:.1%} of its answers were right" if "accuracy" in found else "none"
            )
            return (
                f"It answers {found['answered'].value:.0%} of inputs at {percent(self.rule.accuracy)} accuracy and "
                f"hands over the rest ({kept}, {rows})."
            )
        if isinstance(self.rule, CostRule) and "cost" in found:
            costs = f"{found['cost'].value:.4g} per input, {found['cost_argmax'].value:.4g} without"
            return f"It {self.rule.promise()} ({costs}, {rows})."
        if isinstance(self.rule, PredictionSets) and "coverage" in found:
            sets = f"{found['coverage'].value:.1%}, with {found['size'].value:.2f} classes on average"
            return f"It {self.rule.promise()} ({sets}, {rows})."
        return f"It {self.rule.promise()}."

    def _matrix(self, outputs: Sequence[Any]) -> NDArray[np.float64]:
        """The scores (N, C) of a pipeline's outputs, in the model's order."""
        rows = [outputs] if isinstance(outputs[0], Mapping) else outputs  # one text
        number = {name: c for c, name in enumerate(self.class_names)}
        scores = np.empty((len(rows), len(number)))
        for i, row in enumerate(rows):
            found = {entry.get("label"): entry.get("score") for entry in row}
            if found.keys() != number.keys() or len(row) > len(found):
                requirement = f"score the model's {len(number)} classes ({few(self.class_names)})"
                got = f"{len(row)} ({few([entry.get('label') for entry in row])}) for text {i}"
                way_out = "call the pipeline with top_k=None; check that the decisions are this model's"
                raise InputValueError(expected("the outputs", requirement, got, way_out))
            if not all(isinstance(score, Real) for score in found.values()):
                way_out = "call the pipeline with top_k=None"
                got = few([f"{name!r}: {score!r}" for name, score in found.items()])
                raise InputValueError(expected("the outputs", "have a score for each class", got, way_out))
            scores[i, [number[name] for name in found]] = list(found.values())
        return scores


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} in place of a number")
    return float(value)


def _restore(rule: Rule, fitted: Mapping[str, Any], n_classes: int) -> None:
    """Give a rule the arrays (C,) that `fit` made, each number in [0, 1]."""
    names = {"labels": {"thresholds_", "pooled_"}, "costs": set()}.get(rule.kind, {"thresholds_"})
    if fitted.keys() != names:
        raise ValueError(f"the fitted {few(sorted(fitted)) or 'nothing'} for a rule {rule.kind!r}")
    for name, values in fitted.items():
        if name == "pooled_":
            array: NDArray[Any] = np.array([value is True for value in values])
        else:
            array = np.array([_finite(value) for value in values])
            if not ((array >= 0) & (array <= 1)).all():
                raise ValueError(f"{name} out of [0, 1]")
        if array.shape != (n_classes,):
            raise ValueError(f"{len(array)} {name} for {n_classes} classes")
        setattr(rule, name, array)


def _n_classes(rule: Rule) -> int:
    return len(np.asarray(rule.costs) if isinstance(rule, CostRule) else rule._fitted_thresholds())


def _from_pipeline(outputs: Any) -> bool:
    if not isinstance(outputs, Sequence) or not len(outputs):
        return False
    first = outputs[0]
    return isinstance(first, Mapping) or (isinstance(first, list) and isinstance((first or [{}])[0], Mapping))


def _names_in(config: Path) -> tuple[str, ...] | None:
    """The class names of a config.json in the order of their ids; None where it has none."""
    found = _read(config) if config.is_file() else None
    names = found.get("id2label") if isinstance(found, Mapping) else None
    if not isinstance(names, Mapping) or not all(number.isdecimal() for number in names):
        return None
    return tuple(str(names[number]) for number in sorted(names, key=int))  # "10" may stand before "2"


def _interval(values: Any) -> Interval:
    value, low, high = map(_finite, values)
    return Interval(value, low, high)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        got = f"{path} ({error})"
        raise InputValueError(expected("the file", "be readable as JSON", got, _WAY_OUT)) from error


def _downloaded(name: str, revision: str | None, token: str | None) -> Path:
    """The cached copy of a Hub model's decisions and config, and of nothing else of it."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(name, revision=revision, token=token, allow_patterns=[FILE, "config.json"])
    except (OSError, ValueError) as error:
        got = f"{name} ({' '.join(str(error).split())[:300]})"
        way_out = "name a folder with decisions.json, or a model on the Hub"
        raise InputValueError(expected("the decisions", "be loadable", got, way_out)) from error
    return Path(found)
