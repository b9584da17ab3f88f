"""`hf-calib decide`: a rule fitted on held-out rows, and what it does on others."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_calib._errors import InputValueError, check, expected, few
from hf_calib._files import check_output, whole_folder
from hf_calib._text import counted
from hf_calib.commands.source import FileSource, ModelSource, Running, open_source
from hf_calib.decisions import AbstainRule, CostRule, Decisions, PredictionSets
from hf_calib.decisions.rules import Rule, TopLabelRule, percent
from hf_calib.decisions.saved import DECISIONS, RULE_REPORT, calibrator_of
from hf_calib.metrics.sums import Interval
from hf_calib.predictions.predictions import TOP_LABELS, LabelKind, holds_model
from hf_calib.report import DecisionSection, report_on_predictions
from hf_calib.report.document import Table

if TYPE_CHECKING:
    from hf_calib.commands.options import Decide

# The column of a file of costs that is no class.
ABSTAIN = "abstain"


@dataclass(frozen=True)
class Decided:
    """The outcome of `decide`."""

    # Of the model, or of the predictions.
    name: str
    # The fitted rule.
    decisions: Decisions
    # Its results.
    section: DecisionSection
    # The rows that these are from.
    measured: Any
    notes: tuple[str, ...]

    @property
    def lines(self) -> list[Any]:
        """A rule's results, and the rows they are from."""
        title = f"Decisions of {self.name}"
        table = Table(title, *self.section.table(), title=title)
        measured = f"Measured on {counted(self.decisions.n_measured, 'row')}."
        return [table, *self.section.sentences(), measured]

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        rule = self.decisions.rule
        return {
            "name": self.name,
            "notes": list(self.notes),
            "rule": rule.kind,
            "options": rule.options(),
            "n_measured": self.decisions.n_measured,
            **self.section.to_dict(),
        }


def run(options: Decide, running: Running) -> Decided:
    """Fit a rule on all of the data, and measure it on the test data, or on the rows of the fit."""
    make_rule = choose_rule(options)
    check_output(options.output)

    def check_labels(kind: LabelKind) -> None:
        requirement = "the predictions to have one class per row"
        got = f"a sigmoid for each label in {few(options.source)}"
        way_out = (
            "fit LabelThresholds of hf_calib.decisions: a threshold for each label"
        )
        check(not kind.sigmoid, requirement, got, way_out)
        requirement = "the model to classify texts or images"
        way_out = (
            "decide needs rows that are independent of each other, as tokens are not"
        )
        check(kind.independent, requirement, few(options.source), way_out)

    source = open_source(options, running, check_labels)
    _check_is_own(source, options.output)
    names, n_rows = source.size()
    # Of a model they are the names in its data, and its rule has its own.
    if isinstance(source, FileSource) and options.class_names is not None:
        names = tuple(options.class_names)
    rule = make_rule(names)
    if source.kind is TOP_LABELS:
        rule = _for_top_labels(rule)
    # Rows that are too few are refused before a model predicts them.
    rule.check_rows(n_rows)
    decided = _measure(source, rule, names, options)
    if options.output is not None:
        running.stages(f"writing to {options.output}")
        report = report_on_predictions(decided.measured, source.name, options.n_bins)
        notes = (*report.notes, *decided.notes)
        report = replace(report, decisions=decided.section, notes=notes)
        with whole_folder(options.output) as folder:
            if not rule.answers_nothing:
                decided.decisions.save(folder)
            report.save(folder / RULE_REPORT)
        if rule.answers_nothing:
            # The rule of an earlier run would be taken for this one's.
            (options.output / DECISIONS).unlink(missing_ok=True)
    return decided


def _check_is_own(source: FileSource | ModelSource, output: Path | None) -> None:
    """Raise if the rule of a model would stand next to another one."""
    if output is None or isinstance(source, FileSource) or not holds_model(str(output)):
        return
    is_own = os.path.realpath(source.model) == os.path.realpath(output)
    requirement = f"output to be {source.model}, or a folder without a model"
    way_out = "name another folder; a rule is for the probabilities of one model"
    check(is_own, requirement, output, way_out)


def choose_rule(options: Decide) -> Callable[[Sequence[str]], Rule]:
    """The unfitted rule that the options ask for, for the names of the classes;
    an accuracy of 0.95 by default.
    """
    rules = ("accuracy", "costs", "alpha")
    given = [name for name in rules if getattr(options, name) is not None]
    requirement = "the rule to be one of accuracy, costs, alpha"
    way_out = "run the command once for each rule"
    check(len(given) < 2, requirement, " and ".join(given), way_out)
    (chosen,) = given or ["accuracy"]
    for needed in ("accuracy", "accuracy or alpha", "alpha"):
        if chosen not in needed:
            options.check_unused(needed)
    if options.costs is not None:
        return read_costs(options.costs)
    rule: Rule
    if options.alpha is not None:
        rule = PredictionSets(
            alpha=options.alpha, method=options.sets, by_class=options.by_class
        )
    else:
        accuracy = 0.95 if options.accuracy is None else options.accuracy
        rule = AbstainRule(
            accuracy=accuracy, delta=options.delta, by_class=options.by_class
        )
    # Only costs need the names of the classes.
    return lambda names: rule


def _for_top_labels(rule: Rule) -> Rule:
    """The rule for rows of which only the confidence of the predicted class is known."""
    requirement = "the predictions to have a score for each class"
    way_out = "give an accuracy, without by_class, for the confidences of top labels"
    fits = isinstance(rule, AbstainRule) and not rule.by_class
    check(fits, requirement, "the confidences of top labels", way_out)
    return TopLabelRule(**rule.options())


def read_costs(path: Path) -> Callable[[Sequence[str]], Rule]:
    """The rule by the costs in a csv file, which names the classes in any order."""
    import pandas

    try:
        # As texts, classes called NA or 01 keep their names.
        table = pandas.read_csv(path, index_col=0, keep_default_na=False, dtype=str)
        costs = table.astype(float)
    except (OSError, ValueError) as error:
        way_out = "write a csv file: true classes in the first column, decisions in the header"
        got = f"{path} ({error})"
        message = expected("costs", "be a csv file of numbers", got, way_out)
        raise InputValueError(message) from error

    def ordered(names: Sequence[str]) -> Rule:
        rows = list(names)
        columns = list(names)
        if ABSTAIN in costs.columns and ABSTAIN not in names:
            columns.append(ABSTAIN)
        has_rows = sorted(costs.index) == sorted(rows)
        is_whole = has_rows and sorted(costs.columns) == sorted(columns)
        what = "columns" if has_rows else "rows"
        found = costs.columns if has_rows else costs.index
        requirement = f"the {what} of {path} to be the model's classes ({few(names)})"
        got = few([repr(name) for name in found]) or "none"
        way_out = f"name each class once; a last column {ABSTAIN!r} holds the cost of abstaining"
        check(is_whole, requirement, got, way_out)
        return CostRule(costs.loc[rows, columns].to_numpy())

    return ordered


def _measure(
    source: FileSource | ModelSource,
    rule: Rule,
    names: tuple[str, ...],
    options: Decide,
) -> Decided:
    """Fit the rule in place, and measure it on the test data, or else on the rows of the fit."""
    found = source.served()
    of_fit = "test_data" not in source.sets
    measured = found if of_fit else source.served("test_data")
    n_shared = source.n_shared()
    # A rule by costs has nothing to fit, so all rows are new to it.
    n_fitted = len(found) if rule.fitted else 0
    n_measured = len(measured)
    source.running.stages(
        f"fitting the rule on {counted(len(found), 'row')}, measuring {n_measured:,}"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rule.fit(found.probabilities(), found.labels)
    warned = [str(each.message) for each in caught]
    notes = [*source.notes, *warned, *source.on_serving()]
    is_apart = source.beside is not None
    calibrator = calibrator_of(options.source[0]) if is_apart else None
    if n_shared and rule.fitted:
        notes.append(
            f"{n_shared:,} of the {n_measured:,} measured rows are also among those to fit on. The rule looks "
            "better on these than on new rows. Measure on other test data."
        )
    measure = rule.measure_fit if of_fit else rule.measure
    results = measure(measured.probabilities(), measured.labels)
    if isinstance(rule, AbstainRule):
        notes += _unlike(rule, results.get("accuracy"))
    if options.output is not None and rule.answers_nothing:
        has_earlier = (options.output / DECISIONS).is_file()
        earlier = " That of an earlier rule was removed." if has_earlier else ""
        notes.append(
            f"No {DECISIONS} was written: its rule would always abstain.{earlier}"
        )
    section = DecisionSection(
        rule.promise(),
        n_fitted,
        results,
        of_fit=of_fit and n_fitted > 0,
        n_shared=n_shared,
    )
    n_of_fit = 0
    if n_fitted:
        n_of_fit = n_measured if of_fit else n_shared
    decisions = Decisions(
        rule,
        names,
        results,
        n_measured,
        source.about().get("fingerprint"),
        n_of_fit=n_of_fit,
        calibrator=calibrator,
    )
    return Decided(source.name, decisions, section, measured, tuple(notes))


def _unlike(rule: AbstainRule, kept: Interval | None) -> list[str]:
    """A note where the measured rows break the promise,
    as it is kept on rows that are like those of the fit.
    """
    if kept is None or kept.high >= rule.accuracy:
        return []
    value, low, high, promised = map(percent, (*kept, rule.accuracy))
    return [
        f"On the measured rows {value} of the answers are correct ({low} to {high}), less than the {promised} "
        "promised. These rows are unlike the others, perhaps in the shares of their classes. Fit on rows that are "
        "drawn as the inputs will be."
    ]
