"""Decisions that are saved with a model as plain data, and applied to the output of its pipeline."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import InputValueError, check, expected, few, printable
from hf_calib._files import whole_file
from hf_calib._text import counted
from hf_calib.decisions.promise import TITLES
from hf_calib.decisions.rules import (
    AbstainRule,
    CostRule,
    LabelThresholds,
    PredictionSets,
    Rule,
)
from hf_calib.metrics.sums import Interval

DECISIONS = "decisions.json"
VERSION = 1
#: A note for a model with a rule, whose calibrator has just been folded in.
OUTDATED = f"{DECISIONS} is left out: its rule is for uncalibrated probabilities. Run hf-calib decide again."
RULES: dict[str, type[Rule]] = {
    r.kind: r for r in (AbstainRule, CostRule, LabelThresholds, PredictionSets)
}
_WAY_OUT = f"save them with Decisions.save, or hf-calib decide --output; this version reads version {VERSION}"


@dataclass(frozen=True, eq=False)
class Decisions:
    """A fitted rule with the class names of a model, which is saved with the model.

    Call it on the output of a plain pipeline, `decisions(pipe(texts, top_k=None))`, or on probabilities (N, C); it
    returns class names. For class indices call `decisions.rule.predict(probs)`.

    Args:
        rule: a rule fitted to probabilities as the model serves them.
        class_names: C names in the model's order.
        measured, n_measured: results of `rule.measure` on rows that it was not fitted to, if any, and their number.
        fingerprint: hash of the model's weights by `hf_calib.export.folder.fingerprint`; None if unknown.

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
        names, n_classes = tuple(map(str, self.class_names)), self.rule.n_classes
        object.__setattr__(self, "class_names", names)
        way_out = "name each of the model's classes once, in its order"
        named = len(names) == len(set(names)) == n_classes
        check(
            named, f"class_names to be {n_classes} different names", few(names), way_out
        )

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
        found = {entry.get("label"): entry.get("score") for entry in row}
        got = few([f"{label}: {score}" for label, score in found.items()])
        names = self.class_names
        requirement = f"the outputs to score each of the model's {len(names)} classes ({few(names)})"
        way_out = "call the pipeline with top_k=None; check that the decisions are this model's"
        holds = len(row) == len(found) and found.keys() == set(names)
        check(holds, requirement, f"{len(row)} ({got}) for text {text}", way_out)
        return np.array([found[name] for name in names], float)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write decisions.json to the folder of the model, completely or not at all."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
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
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | None = None,
    ) -> Decisions:
        """Load the decisions.json of a model whose config.json has the same classes.

        The model is a folder or, if there is none with this name, a repository on the Hub. `revision` is a branch, tag
        or commit; `token` is None for the stored token.
        """
        try:
            folder = Path(name)
            if not os.path.isdir(name):
                from huggingface_hub import snapshot_download

                where: Any = {"revision": revision, "token": token}
                where["allow_patterns"] = [DECISIONS, "config.json"]
                folder = Path(snapshot_download(str(name), **where))
            if not (folder / DECISIONS).is_file():
                raise FileNotFoundError(f"no {DECISIONS} in it")
            record = json.loads((folder / DECISIONS).read_text(encoding="utf-8"))
            config = folder / "config.json"
            settings = (
                json.loads(config.read_text(encoding="utf-8"))
                if config.is_file()
                else {}
            )
        except (OSError, ValueError, RecursionError) as error:
            got = f"{name} ({printable(error)[:300]})"
            raise InputValueError(
                expected("the decisions", "be loadable", got, _WAY_OUT)
            ) from error
        decisions = cls.from_dict(record, str(folder / DECISIONS))
        by_id = settings.get("id2label") or dict(enumerate(decisions.class_names))
        names = tuple(
            str(by_id[c]) for c in sorted(by_id, key=int)
        )  # "10" may be before "2".
        requirement = (
            f"the classes of the decisions to be those of config.json ({few(names)})"
        )
        got = f"{few(decisions.class_names)} in {folder / DECISIONS}"
        way_out = "fit the rule again on probabilities of this model"
        check(names == decisions.class_names, requirement, got, way_out)
        return decisions

    @classmethod
    def from_dict(cls, record: Any, source: str = DECISIONS) -> Decisions:
        """Return decisions from the result of `to_dict`."""
        try:
            if record["version"] != VERSION or record["rule"] not in RULES:
                raise ValueError(
                    f"the rule {record['rule']!r} of version {record['version']!r}"
                )
            rule = RULES[record["rule"]](**record["options"])
            for name in rule.fitted:
                values = np.array(record["fitted"][name])
                if (
                    values.ndim != 1 or not ((values >= 0) & (values <= 1)).all()
                ):  # This is False for NaN.
                    raise ValueError(
                        f"{name} that are not one number in [0, 1] for each class"
                    )
                setattr(rule, name, values)
            found = record["measured"].items()
            measured = {
                name: Interval(*interval) for name, interval in found if name in TITLES
            }
            weights = record.get("fingerprint")
            decisions = cls(
                rule, record["class_names"], measured, record["n_measured"], weights
            )
            decisions.sentence()  # It raises if a result is missing.
            return decisions
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = "no " * isinstance(error, KeyError) + printable(error)[:300]
            raise InputValueError(
                expected(source, "hold decisions", reason, _WAY_OUT)
            ) from error

    def check_weights(self, weights: str | None) -> None:
        """Raise if the rule was fitted for other weights than those of this fingerprint; None is unknown."""
        if None not in (weights, self.fingerprint) and weights != self.fingerprint:
            fitted = "its rule was fitted on probabilities of other weights"
            raise InputValueError(
                f"{fitted}, and its promise is not known to hold for these"
            )

    def sentence(self) -> str:
        """Return the decisions in one sentence, with their measured results if there are any."""
        return self.rule.sentence(
            self.measured, f"on {counted(self.n_measured, 'row')} not used for the fit"
        )
