"""`hf-calib decide`: a rule fitted on held-out rows, and what it does on others, before and after calibration."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from sklearn.base import clone

from hf_calib._errors import InputValueError, check, expected, few
from hf_calib._files import check_output, whole_folder
from hf_calib.commands import console
from hf_calib.commands.calibrate import FOLDED, METHODS, fit, make_scaler, split_roles
from hf_calib.commands.source import FileSource, ModelSource, Running, open_source
from hf_calib.decisions import AbstainRule, CostRule, Decisions, PredictionSets
from hf_calib.decisions.promise import PromiseCurve
from hf_calib.decisions.rules import Part, Rule, measure_parts, percent, promise_curve
from hf_calib.metrics.sums import Interval
from hf_calib.predictions.predictions import LabelKind, Predictions
from hf_calib.report import DecisionSection, report_on_predictions
from hf_calib.scaling.saved_map import recorded_in

if TYPE_CHECKING:
    from hf_calib.commands.options import Decide

ABSTAIN = "abstain"  # the column of a file of costs that is no class
_FOLDS = 5
_CURVE = (0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995)

# The rule, unfitted, for a model of these class names.
MakeRule = Callable[[Sequence[str]], Rule]


@dataclass(frozen=True)
class Decided:
    """The outcome of `decide`."""

    name: str  # of the model, or of the predictions
    decisions: Decisions  # the rule for the probabilities as they are, and what it was measured to do
    section: DecisionSection  # the same after calibration too
    method: str | None  # the post-hoc scaler of "after"; None where the model is calibrated already
    n_calibrated_on: int  # rows that the scaler was fitted on, and the rule not
    held_out: str  # which rows were measured, in words
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        names = ("name", "method", "n_calibrated_on", "held_out")
        found = {name: getattr(self, name) for name in names} | {"notes": list(self.notes)}
        rule = {"rule": self.decisions.rule.kind, "options": self.decisions.rule.options()}
        return {**found, **rule, "n_measured": self.decisions.n_measured, **self.section.to_dict()}


def run(options: Decide, running: Running) -> Decided:
    """Fit a rule on probabilities, and measure it on other rows, before and after calibration.

    Without test data it is measured by cross-fitting in five folds; the rule that is written is fitted on all rows
    either way. The scaler for "after" is fitted on half of the rows, and the rule for "after" on the other half.
    """
    make_rule, rows = choose_rule(options), options.rows()
    make_scaler(options.method, None, 15, METHODS if rows is None else FOLDED)
    check_output(options.output)
    check_labels = partial(_check_labels, source=options.source)
    sets = {"data": rows, "test_data": options.rows("test_data", "test_split")}
    source = open_source(options.source, sets, options, running, check_labels=check_labels)
    is_folded, weights = False, None
    if isinstance(source, ModelSource):
        is_folded = bool(recorded_in(source.classifier.model.config).get("folded"))
        weights = source.about()["fingerprint"]
    elif not source.is_held:
        source.sample()
        check_labels(source.kind)
    rule = make_rule(source.class_names)
    _check_rows(rule, source.n_rows(), is_split="test_data" not in source.sets, is_calibrated=is_folded)
    scaler = None if is_folded else make_scaler(options.method, None, 15, METHODS)
    decided, reported = _measure(source, rule, scaler, options)
    decided = replace(decided, decisions=replace(decided.decisions, fingerprint=weights))
    if options.output is not None:
        running.stages(f"writing to {options.output}")
        report = report_on_predictions(reported, source.name, 15, scaler)
        with whole_folder(options.output) as folder:
            if not decided.decisions.rule.answers_nothing:
                decided.decisions.save(folder)
            report = replace(report, decisions=decided.section, notes=decided.notes)
            report.save(folder / "decisions")
    return decided


def show(decided: Decided) -> None:
    """A rule's results before and after calibration, and the rows they are from."""
    console.print_table(f"Decisions of {decided.name}", *decided.section.table())
    lines = decided.section.sentences()
    if decided.method:
        lines.append(
            f"After calibration: {decided.method}, fitted on {decided.n_calibrated_on:,} other rows."
        )
    console.print_lines([*lines, f"Measured on {decided.held_out}, with 95% intervals."])


def choose_rule(options: Decide) -> MakeRule:
    """The rule that the options ask for: one of accuracy, costs and alpha; an accuracy of 0.95 without any."""
    asked = {name: getattr(options, name) for name in ("accuracy", "costs", "alpha")}
    given = [name for name, value in asked.items() if value is not None]
    way_out = "run the command once for each rule"
    check(len(given) < 2, f"the rule to be one of {', '.join(asked)}", " and ".join(given), way_out)
    chosen = given[0] if given else "accuracy"
    for option, changed, rules in (
        ("delta", options.delta != 0.05, ("accuracy",)),
        ("by_class", options.by_class, ("accuracy", "alpha")),
        ("sets", options.sets != "lac", ("alpha",)),
    ):
        requirement = f"{option} to be given with {' or '.join(rules)} only"
        check(not changed or chosen in rules, requirement, f"it with {chosen}", f"leave {option} out")
    if options.costs is not None:
        return read_costs(options.costs)
    rule: Rule
    if options.alpha is None:
        accuracy = 0.95 if options.accuracy is None else options.accuracy
        rule = AbstainRule(accuracy=accuracy, delta=options.delta, by_class=options.by_class)
    else:
        rule = PredictionSets(alpha=options.alpha, method=options.sets, by_class=options.by_class)
    return lambda names: copy.copy(rule)


def read_costs(path: Path) -> MakeRule:
    """A rule by the costs in a csv file, in the order of the model's classes."""
    import pandas

    way_out = "write a csv file: true classes in the first column, decisions in the header"
    try:
        table = pandas.read_csv(path, index_col=0, keep_default_na=False, dtype=str)
    except (OSError, ValueError) as error:
        got = f"{path} ({error})"
        raise InputValueError(expected("costs", "be readable as csv", got, way_out)) from error
    try:
        costs = table.astype(float)
    except ValueError as error:
        raise InputValueError(expected("costs", "hold numbers", f"{error} in {path}", way_out)) from error
    costs.index = costs.index.astype(str)

    def ordered(names: Sequence[str]) -> Rule:
        columns = [*names, ABSTAIN] if ABSTAIN in costs.columns and ABSTAIN not in names else list(names)
        for what, found, wanted in (("rows", costs.index, names), ("columns", costs.columns, columns)):
            requirement = f"the {what} of {path} to be the model's classes ({few(names)})"
            way_out = f"name each class once; a last column {ABSTAIN!r} holds the cost of handing over"
            check(sorted(found) == sorted(wanted), requirement, few(list(found)) or "none", way_out)
        return CostRule(costs.loc[list(names), columns].to_numpy(dtype=np.float64))

    return ordered


def _check_labels(kind: LabelKind, source: str) -> None:
    """Refuse labels that a rule makes no promise for."""
    way_out = "fit LabelThresholds of hf_calib.decisions: a threshold for each label"
    got = f"a sigmoid for each label in {source}"
    check(not kind.sigmoid, "the predictions to have one class a row", got, way_out)
    way_out = "its promises hold for rows that are independent of each other, as tokens are not"
    check(kind.independent, "the model to classify texts or images", source, way_out)


def _check_rows(rule: Rule, n_rows: int, *, is_split: bool, is_calibrated: bool) -> None:
    """Raise where the rows that are left to fit the rule on are too few, before the model is run."""
    left, parts = n_rows, []
    if is_split:
        left -= -(-left // _FOLDS)
        parts.append("in turn to measure on")
    if not is_calibrated:
        left -= -(-left // 2)
        parts.append("to calibrate on")
    try:
        rule.check_rows(left)
    except InputValueError as error:
        taken = f" (of the data's {n_rows:,} rows, some are {' and some '.join(parts)})" if parts else ""
        raise InputValueError(f"{error}{taken}") from None


class _State(NamedTuple):
    """A rule for some probabilities: fitted, with the warnings of that, measured, with other promises."""

    rule: Rule
    warned: list[str]
    results: Mapping[str, Interval]
    curve: PromiseCurve | None

    @classmethod
    def of(cls, rule: Rule, probs: Any, labels: Any, parts: Sequence[Part]) -> _State:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fitted = copy.copy(rule).fit(probs, labels)
        warned, results, curve = [str(each.message) for each in caught], measure_parts(rule, parts), None
        if isinstance(rule, AbstainRule):
            curve = promise_curve(rule, parts, sorted({*_CURVE, rule.accuracy}))
            kept = results.get("accuracy")
            if kept is not None and kept.high < rule.accuracy:
                warned.append(
                    f"On the measured rows {kept.value:.1%} of the answers are right ({kept.low:.1%} to "
                    f"{kept.high:.1%}), less than the {percent(rule.accuracy)} promised. They are unlike the "
                    "calibration rows, perhaps in the shares of their classes. Fit on rows that are drawn as the "
                    "inputs will be."
                )
        return cls(fitted, warned, results, curve)


def _measure(
    source: FileSource | ModelSource, rule: Rule, scaler: Any, options: Decide
) -> tuple[Decided, Predictions]:
    """Fit the rule, before and after the scaler where there is one, and measure it on rows that neither has seen."""
    found, tested, seed = source.predictions(), source.tested(), options.seed
    if tested is None:
        measured, folds = found, np.random.default_rng(seed).permutation(len(found)) % _FOLDS
        drawn = f"(cross-fitting in {_FOLDS} folds, drawn with seed {seed})"
        held_out = f"all {len(found):,} rows, each by a rule that was fitted without it {drawn}"
        parts = [(found.select(folds != k), found.select(folds == k)) for k in range(_FOLDS)]
    else:
        _, measured, held_out = split_roles(found, tested, seed)
        parts = [(found, tested)]
    notes, n_shared = list(source.notes), source.n_shared()
    if n_shared:
        notes.append(
            f"{n_shared:,} of the {len(measured):,} measured rows are also among those to fit on. The rule looks "
            "better on these than on new rows. Measure on other test data."
        )
    source.running.stages(f"fitting the rule on {len(found):,} rows, measuring {len(measured):,}")
    plain: list[Part] = [(p.probabilities(), p.labels, q.probabilities(), q.labels) for p, q in parts]
    before = _State.of(rule, found.probabilities(), found.labels, plain)
    states, reported, n_calibrated_on, n_fitted_after = {"as it is": before}, measured, 0, None
    if scaler is not None:
        # The promise needs rows that the scaler has not seen: on those that it has, confidences fit too well.
        calibrating, rest, _ = split_roles(found, None, seed)
        source.running.stages(f"calibrating on {len(calibrating):,} of these rows")
        notes += fit(scaler, calibrating)
        n_calibrated_on, n_fitted_after = len(calibrating), len(rest)
        own = _calibrated(scaler, rest, measured)
        calibrated = [own] if tested is not None else [_cross_fitted(scaler, *part, seed) for part in parts]
        states = {"before": before, "after calibration": _State.of(rule, own[0], own[1], calibrated)}
        reported = rest if tested is None else measured
    for name, state in states.items():
        stage = "" if scaler is None else f"{name.removesuffix(' calibration').capitalize()} calibration: "
        notes += [f"{stage}{note}" for note in state.warned]
    if options.output is not None and before.rule.answers_nothing:
        notes.append("No decisions.json was written: its rule would hand over every input.")
    elif options.output is not None and scaler is not None:
        notes.append(
            "decisions.json is for the probabilities as they are. For those after calibration, calibrate the "
            "model first (hf-calib calibrate), and decide for the calibrated one on other rows."
        )
    after = states.get("after calibration")
    section = DecisionSection(
        rule.promise(),
        len(found),
        before.results,
        None if after is None else after.results,
        {name: state.curve for name, state in states.items() if state.curve and state.curve.promised},
        n_fitted_after=n_fitted_after,
        n_folds=_FOLDS if tested is None else 0,
    )
    decisions = Decisions(before.rule, found.names, before.results, len(measured))
    method = None if scaler is None else options.method
    return Decided(source.name, decisions, section, method, n_calibrated_on, held_out, tuple(notes)), reported


def _cross_fitted(scaler: Any, pool: Predictions, others: Predictions, seed: int) -> Part:
    """Rows after a scaler like this one, fitted on half of the pool: neither on the rule's half nor on the others."""
    calibrating, rest, _ = split_roles(pool, None, seed)
    own = clone(scaler)
    fit(own, calibrating)
    return _calibrated(own, rest, others)


def _calibrated(scaler: Any, rows: Predictions, others: Predictions) -> Part:
    """Rows to fit a rule on, and others to measure it on, after a fitted scaler."""
    probs, other_probs = (scaler.predict_proba(part.as_logits()) for part in (rows, others))
    return probs, rows.labels, other_probs, others.labels
