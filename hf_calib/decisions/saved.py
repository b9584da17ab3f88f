"""Decisions saved beside a model, as plain data, and applied to what its pipeline returns."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputValueError, check, expected, few
from hf_calib._files import whole_file
from hf_calib.decisions.measured import TITLES
from hf_calib.decisions.rules import AbstainRule, CostRule, LabelThresholds, PredictionSets, Rule, percent
from hf_calib.metrics.resamples import Interval

FILE = "decisions.json"
VERSION = 1
RULES: dict[str, type[Rule]] = {r.kind: r for r in (AbstainRule, CostRule, LabelThresholds, PredictionSets)}
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
        names, rule = tuple(map(str, self.class_names)), self.rule
        object.__setattr__(self, "class_names", names)
        n_classes = len(np.asarray(rule.costs) if isinstance(rule, CostRule) else rule._fitted_thresholds())
        way_out = "name each of the model's classes once, in its order"
        named = len(names) == len(set(names)) == n_classes
        check(named, f"class_names to be {n_classes} different names", few(names), way_out)

    def __call__(self, outputs: Any) -> list[Any]:
        """For each text the name of a class, or None for "hand over"; of labels and of sets, a list of names.

        Outputs are what `pipe(texts, top_k=None)` returns, of one text, of a list of texts, or one by one as for a
        dataset of them; or probs (N, C) in the model's order.
        """
        if isinstance(outputs, Iterator):
            outputs = list(outputs)
        if isinstance(outputs, list) and not outputs:  # no texts
            return []
        first = outputs[0] if isinstance(outputs, Sequence) else None
        if isinstance(first, Mapping):
            outputs = self._matrix([outputs])
        elif isinstance(first, list) and isinstance((first or [{}])[0], Mapping):
            outputs = self._matrix(outputs)
        decided = self.rule.predict(outputs)
        if decided.ndim == 2:
            return [[self.class_names[c] for c in np.flatnonzero(row)] for row in decided]
        return [self.class_names[c] if c >= 0 else None for c in decided]

    def _matrix(self, rows: Sequence[Any]) -> NDArray[np.float64]:
        """The scores (N, C) of a pipeline's outputs, in the model's order."""
        names = self.class_names
        requirement = f"the outputs to score each of the model's {len(names)} classes ({few(names)})"
        way_out = "call the pipeline with top_k=None; check that the decisions are this model's"
        scores = []
        for i, row in enumerate(rows):
            found = {entry.get("label"): entry.get("score") for entry in row}
            holds = found.keys() == set(names) and len(row) == len(found)
            if not (holds and all(isinstance(score, Real) for score in found.values())):
                listed = few([f"{entry.get('label')}: {entry.get('score')}" for entry in row])
                check(False, requirement, f"{len(row)} ({listed}) for text {i}", way_out)
            scores.append([found[name] for name in names])
        return np.array(scores, float)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write decisions.json into a folder, the model's: the whole file or nothing."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        with whole_file(Path(folder) / FILE) as unfinished:
            unfinished.write_text(text + "\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """The content of decisions.json, in JSON's own types."""
        return {
            "version": VERSION,
            "rule": self.rule.kind,
            "options": self.rule.options(),
            "fitted": {name: getattr(self.rule, name).tolist() for name in self.rule.fitted},
            "class_names": list(self.class_names),
            "measured": {name: list(interval) for name, interval in self.measured.items()},
            "n_measured": self.n_measured,
            **({} if self.fingerprint is None else {"fingerprint": self.fingerprint}),
        }

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None
    ) -> Decisions:
        """Load the decisions.json of a model, whose config.json has to have the same classes.

        Args:
            name: a local folder; or a model on the Hub, whose file is downloaded once and kept in its cache.
            revision: branch, tag or commit on the Hub.
            token: for the Hub; None uses the stored one.
        """
        folder = Path(name) if os.path.isdir(name) else _downloaded(str(name), revision, token)
        path, config = folder / FILE, folder / "config.json"
        way_out = "write one with hf-calib decide --output, or Decisions.save"
        check(path.is_file(), f"the model to come with a {FILE}", f"none in {name}", way_out)
        decisions = cls.from_dict(_read(path), str(path))
        read = _read(config) if config.is_file() else None
        by_id = read.get("id2label") if isinstance(read, dict) else None
        if by_id and all(map(str.isdecimal, by_id)):
            names = tuple(str(by_id[c]) for c in sorted(by_id, key=int))  # "10" may stand before "2"
            requirement = f"the classes of the decisions to be those of config.json ({few(names)})"
            got = f"{few(decisions.class_names)} in {path}"
            way_out = "fit the rule again on probabilities of this model"
            check(names == decisions.class_names, requirement, got, way_out)
        return decisions

    @classmethod
    def from_dict(cls, record: Any, source: str = FILE) -> Decisions:
        """Decisions from the result of `to_dict`."""
        try:
            if record["version"] != VERSION or record["rule"] not in RULES:
                raise ValueError(f"the rule {record['rule']!r} of version {record['version']!r}")
            rule = RULES[record["rule"]](**record["options"])
            for name in rule.fitted:
                values = np.array(record["fitted"][name])
                if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():  # false for NaN too
                    raise ValueError(f"{name} that are not one number in [0, 1] for each class")
                setattr(rule, name, values)
            measured = {
                name: Interval(*found) for name, found in record["measured"].items() if name in TITLES
            }
            return cls(rule, record["class_names"], measured, record["n_measured"], record.get("fingerprint"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise InputValueError(expected(source, "hold decisions", reason[:300], _WAY_OUT)) from error

    def sentence(self) -> str:
        """The decisions in one sentence, with their measured results if there are any."""
        found = {name: interval.value for name, interval in self.measured.items()}
        rows = f"on {self.n_measured:,} rows that it was not fitted on"
        results = ""
        if isinstance(self.rule, AbstainRule):
            accuracy = f"{percent(self.rule.accuracy)} accuracy"
            if self.rule.answers_nothing:
                return f"It hands over every input: {accuracy} could not be promised."
            if "answered" in found:
                kept = f"{found['accuracy']:.1%} of its answers were right" if "accuracy" in found else "none"
                share = f"{found['answered']:.0%} of inputs at {accuracy}"
                return f"It answers {share} and hands over the rest ({kept}, {rows})."
        elif "cost" in found:
            results = f" ({found['cost']:.4g} per input, {found['cost_argmax']:.4g} without, {rows})"
        elif "coverage" in found:
            results = f" ({found['coverage']:.1%}, with {found['size']:.2f} classes on average, {rows})"
        return f"It {self.rule.promise()}{results}."


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
