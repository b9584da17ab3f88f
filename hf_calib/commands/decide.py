"""`hf-calib decide`: a rule fitted on held-out rows, and what it does on others, before and after calibration."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import InputValueError, expected, few
from hf_calib._files import check_output, whole_folder
from hf_calib.commands.fitting import FOLDED, METHODS, fit, make_scaler, split_roles
from hf_calib.commands.opening import Opened, Running, name_of, open_source, task_of_source
from hf_calib.decisions import AbstainRule, CostRule, Decisions, PredictionSets
from hf_calib.decisions.measured import PromiseCurve
from hf_calib.decisions.rules import Part, Rule, measure_parts, percent, promise_curve
from hf_calib.metrics.sums import Interval
from hf_calib.models.reading import RowSet
from hf_calib.predictions.kinds import LabelKind
from hf_calib.predictions.predictions import Predictions
from hf_calib.report import CalibrationReport, DecisionSection, report_on_predictions
from hf_calib.report.writing import write_report
from hf_calib.scaling.saved_map import recorded_in

if TYPE_CHECKING:
    from hf_calib.commands.options import Decide
    from hf_calib.models.classifier import Classifier

ABSTAIN = "abstain"  # the column of a file of costs that is no class
_FOLDS = 5
_CURVE = (0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995)

# The rule, unfitted, for a model of these class names.
MakeRule = Callable[[Sequence[str]], Rule]


@dataclass(frozen=True)
class Decided:
    """The outcome of `decide`.

    Args:
        name: of the model, or of the file of predictions.
        decisions: the rule for the probabilities as they are, and what it was measured to do.
        section: the same after calibration too.
        method: the post-hoc scaler of "after"; None where the model is calibrated already.
        n_calibrated_on: rows that the scaler was fitted on; the rule saw none of them.
        held_out: which rows were measured, in words.
        notes: warnings of the fits.
    """

    name: str
    decisions: Decisions
    section: DecisionSection
    method: str | None
    n_calibrated_on: int
    held_out: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        return {
            "name": self.name,
            "rule": self.decisions.rule.kind,
            "options": self.decisions.rule.options(),
            **self.section.to_dict(),
            "method": self.method,
            "n_calibrated_on": self.n_calibrated_on,
            "n_measured": self.decisions.n_measured,
            "held_out": self.held_out,
            "notes": list(self.notes),
        }


def choose_rule(options: Decide) -> MakeRule:
    """The rule that the options ask for: one of accuracy, costs and alpha; an accuracy of 0.95 without any."""
    accuracy, costs, alpha = options.accuracy, options.costs, options.alpha
    delta, by_class, sets = options.delta, options.by_class, options.sets
    asked = {"accuracy": accuracy, "costs": costs, "alpha": alpha}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        way_out = "run the command once for each rule"
        raise InputValueError(
            expected("the rule", f"be one of {', '.join(asked)}", " and ".join(given), way_out)
        )
    for option, changed, rules in (
        ("delta", delta != 0.05, ("accuracy",)),
        ("by_class", by_class, ("accuracy", "alpha")),
        ("sets", sets != "lac", ("alpha",)),
    ):
        chosen = given[0] if given else "accuracy"
        if changed and chosen not in rules:
            requirement = f"be given with {' or '.join(rules)} only"
            raise InputValueError(expected(option, requirement, f"it with {chosen}", f"leave {option} out"))
    if costs is not None:
        table = _read_costs(costs)
        return lambda names: CostRule(_ordered(table, names, costs))
    rule: Rule = (
        AbstainRule(accuracy=0.95 if accuracy is None else accuracy, delta=delta, by_class=by_class)
        if alpha is None
        else PredictionSets(alpha=alpha, method=sets, by_class=by_class)
    )
    return lambda names: copy.copy(rule)


def decide(options: Decide, running: Running) -> Decided:
    """Fit a rule on probabilities, and measure it on other rows, before and after calibration.

    Without test data it is measured by cross-fitting in five folds; the rule that is written is fitted on all rows
    either way. The scaler for "after" is fitted on half of the rows, and the rule for "after" on the other half.

    Raises:
        ValueError: if source, data or method are wrong, or the rows are too few for the promise.
        TypeError: if columns or arrays are of the wrong kind.
    """
    make_rule = choose_rule(options)
    source, method, seed = options.source, options.method, options.seed
    output, reading = options.output, options.reading
    rows = options.rows(options.data, options.split)
    test = options.rows(options.test_data, options.test_split, "test_data")
    task = task_of_source(source, rows, trust_remote_code=running.trust_remote_code)
    if task is not None:
        _check_decides(task.labels, source)
    make_scaler(method, "nll", 15, METHODS if rows is None else FOLDED)
    check_output(output)
    is_folded = False
    chosen: list[Rule] = []

    def check_rule(classifier: Classifier) -> None:
        nonlocal is_folded
        is_folded = bool(recorded_in(classifier.model.config).get("folded"))
        chosen.append(make_rule(classifier.class_names))

    sets = {"data": rows or RowSet(source), "test_data": test}
    opened = open_source(source, task, sets, reading, running, prepare=check_rule, sampled=True)
    _check_decides(opened.kind, source)
    rule = chosen[0] if chosen else make_rule(opened.class_names)
    _check_rows(rule, opened.n_rows("data"), is_split=test is None, is_calibrated=is_folded)
    scaler = None if is_folded else make_scaler(method, "nll", 15, METHODS)
    decided, report = _measure(opened, rule, scaler, method, seed, is_saved=output is not None)
    if output is not None:
        running.stages(f"writing to {output}")
        with whole_folder(output) as folder:
            if not decided.decisions.rule.answers_nothing:
                decided.decisions.save(folder)
            write_report(report, folder / "decisions")
    return decided


def _check_decides(kind: LabelKind, source: str) -> None:
    """Refuse labels that a rule makes no promise for."""
    if kind.sigmoid:
        way_out = "fit LabelThresholds of hf_calib.decisions: a threshold for each label"
        requirement = "have one class a row"
        got = f"a sigmoid for each label in {source}"
        raise InputValueError(expected("the predictions", requirement, got, way_out))
    if not kind.independent:
        way_out = "its promises hold for rows that are independent of each other, as tokens are not"
        raise InputValueError(expected("the model", "classify texts or images", source, way_out))


def _measure(
    opened: Opened, rule: Rule, scaler: Any, method: str, seed: int, *, is_saved: bool
) -> tuple[Decided, CalibrationReport]:
    """Fit the rule, before and after the scaler where there is one, and measure it on rows that neither has seen."""
    found, tested = opened.predictions("data"), opened.predictions("test_data")
    assert found is not None
    weights = None
    if opened.classifier is not None:
        from hf_calib.export.fingerprint import fingerprint

        weights = fingerprint(opened.classifier.model)
    if tested is None:
        measured = found
        held_out = (
            f"all {len(found):,} rows, each by a rule that was fitted without it "
            f"(cross-fitting in {_FOLDS} folds, drawn with seed {seed})"
        )
        folds = np.random.default_rng(seed).permutation(len(found)) % _FOLDS
        parts = [(found.select(folds != k), found.select(folds == k)) for k in range(_FOLDS)]
    else:
        _, measured, held_out = split_roles(found, tested, seed)
        parts = [(found, tested)]
    notes: list[str] = list(opened.samples)
    n_shared = opened.n_shared()
    if n_shared:
        notes.append(
            f"{n_shared:,} of the {len(measured):,} measured rows are also among those to fit on. The rule looks "
            "better on these than on new rows. Measure on other test data."
        )
    opened.running.stages(f"fitting the rule on {len(found):,} rows, measuring {len(measured):,}")
    fitted, of_the_fit = _fitted(rule, found.probabilities(), found.labels)
    plain: list[Part] = [(p.probabilities(), p.labels, q.probabilities(), q.labels) for p, q in parts]
    before = measure_parts(rule, plain)
    curves = {"as it is" if scaler is None else "before": _curve(rule, plain)}
    after_notes: list[str] = []
    after, n_calibrated_on, n_fitted_after, reported = None, 0, None, measured
    if scaler is not None:
        # The promise needs rows that the scaler has not seen: on those that it has, confidences fit too well.
        calibrating, rest, _ = split_roles(found, None, seed)
        opened.running.stages(f"calibrating on {len(calibrating):,} of these rows")
        notes += fit(scaler, calibrating)
        n_calibrated_on, n_fitted_after = len(calibrating), len(rest)
        whole = _calibrated_part(scaler, rest, measured)
        _, after_notes = _fitted(rule, whole[0], rest.labels)
        calibrated = [whole] if tested is not None else [_own_part(scaler, p, q, seed) for p, q in parts]
        after = measure_parts(rule, calibrated)
        curves["after calibration"] = _curve(rule, calibrated)
        reported = rest if tested is None else measured
    section = DecisionSection(
        rule.promise(),
        len(found),
        before,
        after,
        {name: curve for name, curve in curves.items() if curve is not None and curve.promised},
        n_fitted_after=n_fitted_after,
        n_folds=_FOLDS if tested is None else 0,
    )
    notes += [note if after is None else f"Before calibration: {note}" for note in of_the_fit]
    notes += [f"After calibration: {note}" for note in after_notes]
    for state in (before, after):
        notes += [] if state is None else _broken_promise(rule, state)
    if is_saved and fitted.answers_nothing:
        notes.append("No decisions.json was written: its rule would hand over every input.")
    elif after is not None and is_saved:
        notes.append(
            "decisions.json is for the probabilities as they are. For those after calibration, calibrate the "
            "model first (hf-calib calibrate), and decide for the calibrated one on other rows."
        )
    name = name_of(opened.source)
    decided = Decided(
        name,
        Decisions(fitted, found.names, before, len(measured), weights),
        section,
        None if scaler is None else method,
        n_calibrated_on,
        held_out,
        tuple(notes),
    )
    report = report_on_predictions(reported, name, 15, scaler)
    return decided, replace(report, decisions=section, notes=tuple(notes))


def _fitted(rule: Rule, probs: ArrayLike, labels: ArrayLike) -> tuple[Rule, list[str]]:
    """A copy of a rule that is fitted, and the warnings of the fit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = copy.copy(rule).fit(probs, labels)
    return fitted, [str(warning.message) for warning in caught]


def _own_part(scaler: Any, pool: Predictions, others: Predictions, seed: int) -> Part:
    """Rows after a scaler like this one, fitted on half of the pool: neither on the rule's half nor on the others."""
    from sklearn.base import clone

    calibrating, rest, _ = split_roles(pool, None, seed)
    own = clone(scaler)
    fit(own, calibrating)
    return _calibrated_part(own, rest, others)


def _calibrated_part(scaler: Any, rows: Predictions, others: Predictions) -> Part:
    """Rows to fit a rule on, and others to measure it on, after a fitted scaler."""
    probs, other_probs = (scaler.predict_proba(part.as_logits()) for part in (rows, others))
    return probs, rows.labels, other_probs, others.labels


def _broken_promise(rule: Rule, measured: Mapping[str, Interval]) -> list[str]:
    """A warning where the answers are right less often than promised, beyond chance."""
    kept = measured.get("accuracy")
    if not isinstance(rule, AbstainRule) or kept is None or kept.high >= rule.accuracy:
        return []
    return [
        f"On the measured rows {kept.value:.1%} of the answers are right ({kept.low:.1%} to {kept.high:.1%}), "
        f"less than the {percent(rule.accuracy)} promised. They are unlike the calibration rows, perhaps in "
        "the shares of their classes. Fit on rows that are drawn as the inputs will be."
    ]


def _curve(rule: Rule, parts: Sequence[Part]) -> PromiseCurve | None:
    """Other promised accuracies, of a rule that promises one."""
    if not isinstance(rule, AbstainRule):
        return None
    return promise_curve(rule, parts, sorted({*_CURVE, rule.accuracy}))


def _check_rows(rule: Rule, n_rows: int, *, is_split: bool, is_calibrated: bool) -> None:
    """Raise where the rows that are left to fit the rule on are too few, before the model is run."""
    parts = []
    left = n_rows
    for is_taken, share, purpose in (
        (is_split, _FOLDS, "in turn to measure on"),
        (not is_calibrated, 2, "to calibrate on"),
    ):
        if is_taken:
            parts.append(purpose)
            left -= -(-left // share)
    try:
        rule.check_rows(left)
    except InputValueError as error:
        if not parts:
            raise
        message = f"{error} (of the data's {n_rows:,} rows, some are {' and some '.join(parts)})"
        raise InputValueError(message) from None


def _read_costs(path: Path) -> Any:
    import pandas

    way_out = "write a csv file: true classes in the first column, decisions in the header"
    try:
        table = pandas.read_csv(path, index_col=0, keep_default_na=False, dtype=str)
    except (OSError, ValueError) as error:
        raise InputValueError(
            expected("costs", "be readable as csv", f"{path} ({error})", way_out)
        ) from error
    try:
        values = table.astype(float)
    except ValueError as error:
        raise InputValueError(expected("costs", "hold numbers", f"{error} in {path}", way_out)) from error
    values.index = values.index.astype(str)
    return values


def _ordered(table: Any, names: Sequence[str], path: Path) -> NDArray[np.float64]:
    """The costs in the model's order of classes."""
    columns = [*names, ABSTAIN] if ABSTAIN in table.columns and ABSTAIN not in names else list(names)
    for what, found, wanted in (("rows", table.index, names), ("columns", table.columns, columns)):
        if sorted(found) != sorted(wanted):
            requirement = f"be the model's classes ({few(names)})"
            way_out = f"name each class once; a last column {ABSTAIN!r} holds the cost of handing over"
            raise InputValueError(
                expected(f"the {what} of {path}", requirement, few(list(found)) or "none", way_out)
            )
    return table.loc[list(names), columns].to_numpy(dtype=np.float64)
