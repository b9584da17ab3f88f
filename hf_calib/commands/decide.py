"""`hf-calib decide`: a rule fitted on held-out rows, and what it does on others."""

from __future__ import annotations

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
from hf_calib.decisions.saved import DECISIONS, calibrator_of
from hf_calib.predictions.predictions import TOP_LABELS, LabelKind, check_same_classes
from hf_calib.report import DecisionSection, report_on_predictions
from hf_calib.report.document import Table
from hf_calib.scaling.saved_map import map_title, method_of

if TYPE_CHECKING:
    from hf_calib.commands.options import Decide

ABSTAIN = "abstain"  # the column of a file of costs that is no class


@dataclass(frozen=True)
class Decided:
    """The outcome of `decide`."""

    name: str  # of the model, or of the predictions
    decisions: Decisions  # the fitted rule
    section: DecisionSection  # its results
    measured: Any  # the rows that these are from
    held_out: (
        str  # which rows these are, and whether the rule was fitted on them, in words
    )
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        found = {
            "name": self.name,
            "held_out": self.held_out,
            "notes": list(self.notes),
        }
        rule = {
            "rule": self.decisions.rule.kind,
            "options": self.decisions.rule.options(),
        }
        return {
            **found,
            **rule,
            "n_measured": self.decisions.n_measured,
            **self.section.to_dict(),
        }


def run(options: Decide, running: Running) -> Decided:
    """Fit a rule on all of the data, and measure it on the test data, or on the rows of the fit."""
    make_rule = choose_rule(options)
    check_output(options.output)

    def check_labels(kind: LabelKind) -> None:
        way_out = (
            "fit LabelThresholds of hf_calib.decisions: a threshold for each label"
        )
        got = f"a sigmoid for each label in {options.source}"
        check(
            not kind.sigmoid, "the predictions to have one class per row", got, way_out
        )
        way_out = (
            "decide needs rows that are independent of each other, as tokens are not"
        )
        check(
            kind.independent,
            "the model to classify texts or images",
            options.source,
            way_out,
        )

    source = open_source(options, running, check_labels)
    names, n_rows = source.size()
    rule = make_rule(names)
    is_file = isinstance(source, FileSource)
    if is_file and source.predictions().kind is TOP_LABELS:
        rule = _for_top_labels(rule)
    rule.check_rows(n_rows)
    decided = _measure(source, rule, options)
    if options.output is not None:
        running.stages(f"writing to {options.output}")
        report = report_on_predictions(decided.measured, source.name, options.n_bins)
        with whole_folder(options.output) as folder:
            if not rule.answers_nothing:
                decided.decisions.save(folder)
            report = replace(
                report,
                decisions=decided.section,
                notes=(*report.notes, *decided.notes),
            )
            report.save(folder / "decisions")
        if rule.answers_nothing:
            (options.output / DECISIONS).unlink(missing_ok=True)
    return decided


def shown(decided: Decided) -> list[Any]:
    """A rule's results, and the rows they are from."""
    title = f"Decisions of {decided.name}"
    measured = f"Measured on {decided.held_out}."
    table = Table(title, *decided.section.table(), title=title)
    return [table, *decided.section.sentences(), measured]


def choose_rule(options: Decide) -> Callable[[Sequence[str]], Rule]:
    """The unfitted rule that the options ask for, for the names of the classes; an accuracy of 0.95 by default."""
    given = [
        name
        for name in ("accuracy", "costs", "alpha")
        if getattr(options, name) is not None
    ]
    way_out = "run the command once for each rule"
    check(
        len(given) < 2,
        "the rule to be one of accuracy, costs, alpha",
        " and ".join(given),
        way_out,
    )
    (chosen,) = given or ["accuracy"]
    for option, rules in {
        "delta": "accuracy",
        "by_class": "accuracy or alpha",
        "sets": "alpha",
    }.items():
        fits = chosen in rules or getattr(options, option) == getattr(
            type(options), option
        )
        requirement = f"{option} to be given with {rules} only"
        check(fits, requirement, f"it with {chosen}", f"leave {option} out")
    if options.costs is not None:
        return read_costs(options.costs)
    accuracy = 0.95 if options.accuracy is None else options.accuracy
    rule: Rule = AbstainRule(
        accuracy=accuracy, delta=options.delta, by_class=options.by_class
    )
    if options.alpha is not None:
        rule = PredictionSets(
            alpha=options.alpha, method=options.sets, by_class=options.by_class
        )
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
        costs = pandas.read_csv(
            path, index_col=0, keep_default_na=False, dtype=str
        ).astype(float)
    except (OSError, ValueError) as error:
        way_out = "write a csv file: true classes in the first column, decisions in the header"
        got = f"{path} ({error})"
        raise InputValueError(
            expected("costs", "be a csv file of numbers", got, way_out)
        ) from error

    def ordered(names: Sequence[str]) -> Rule:
        columns = (
            [*names, ABSTAIN]
            if ABSTAIN in costs.columns and ABSTAIN not in names
            else list(names)
        )
        for what, found, wanted in (
            ("rows", costs.index, names),
            ("columns", costs.columns, columns),
        ):
            requirement = (
                f"the {what} of {path} to be the model's classes ({few(names)})"
            )
            way_out = f"name each class once; a last column {ABSTAIN!r} holds the cost of abstaining"
            check(
                sorted(found) == sorted(wanted),
                requirement,
                few(list(map(repr, found))) or "none",
                way_out,
            )
        return CostRule(costs.loc[list(names), columns].to_numpy())

    return ordered


def _measure(source: FileSource | ModelSource, rule: Rule, options: Decide) -> Decided:
    """Fit the rule in place, and measure it on the test data, or else on the rows of the fit."""
    found = source.served()
    of_fit = "test_data" not in source.sets
    measured = found if of_fit else source.served("test_data")
    check_same_classes("the test data", found, measured)
    n_shared = source.n_shared()
    n_fitted = len(found) if rule.fitted else 0
    n_rows = counted(len(measured), "row")
    held_out = f"all {n_rows} of the test data"
    if of_fit:
        held_out = f"the {n_rows} that the rule was fitted on"
        held_out += ", with intervals that hold for this rule on new inputs"
    if of_fit and not rule.fitted:
        held_out = f"all {n_rows}"
    source.running.stages(
        f"fitting the rule on {counted(len(found), 'row')}, measuring {len(measured):,}"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rule.fit(found.probabilities(), found.labels)
    notes = [*source.notes, *(str(each.message) for each in caught)]
    calibrator = None
    if source.beside is not None:
        calibrator = calibrator_of(options.source)
        title = map_title(method_of(source.beside))
        notes.append(
            f"The probabilities are those of hf_calib.pipeline, by the {title} next to the model. "
            "A plain pipeline serves others, for which the rule is not made."
        )
    if n_shared and rule.fitted:
        notes.append(
            f"{n_shared:,} of the {len(measured):,} measured rows are also among those to fit on. The rule looks "
            "better on these than on new rows. Measure on other test data."
        )
    measure = rule.measure_fit if of_fit else rule.measure
    results = measure(measured.probabilities(), measured.labels)
    if isinstance(rule, AbstainRule):
        kept = results.get("accuracy")
        if kept is not None and kept.high < rule.accuracy:
            notes.append(
                f"On the measured rows {percent(kept.value)} of the answers are correct ({percent(kept.low)} to "
                f"{percent(kept.high)}), less than the {percent(rule.accuracy)} promised. These rows are unlike the "
                "others, perhaps in the shares of their classes. Fit on rows that are drawn as the inputs will be."
            )
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
    decisions = Decisions(
        rule,
        found.names,
        results,
        len(measured),
        source.about().get("fingerprint"),
        of_fit=n_fitted > 0 and (of_fit or n_shared > 0),
        calibrator=calibrator,
    )
    return Decided(source.name, decisions, section, measured, held_out, tuple(notes))
