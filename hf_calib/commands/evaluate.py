"""`hf-calib evaluate`: the calibration of a model on labelled rows, or of predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hf_calib._errors import check
from hf_calib._files import check_output
from hf_calib._text import counted
from hf_calib.commands.source import (
    FileSource,
    ModelSource,
    Running,
    check_kind,
    open_source,
)
from hf_calib.predictions.formats import load_soft_labels
from hf_calib.predictions.predictions import TOP_LABELS, logs_of
from hf_calib.report import CalibrationReport, ood_section, report_on_predictions
from hf_calib.report.sections import OodSection
from hf_calib.scaling.saved_map import map_title, method_of

if TYPE_CHECKING:
    from hf_calib.commands.options import Evaluate


def run(options: Evaluate, running: Running) -> CalibrationReport:
    """The report on the rows of a model or of files."""
    check_output(options.output)
    unweighted = {
        "--ood-data": options.ood_data,
        "--soft-labels": options.soft_labels,
    }
    of_rows = {
        **unweighted,
        "--by": options.by,
        "--weight-column": options.weight_column,
    }
    check_labels = partial(check_kind, reading=options, single_only=of_rows)
    source = open_source(options, running, check_labels)
    for option, value in unweighted.items():
        is_alone = options.weight_column is None or not value
        requirement = f"{option} to be used without weights"
        check(is_alone, requirement, "--weight-column", "leave it out")
    _check_whole(source, unweighted)
    report = _measure(source, options, running)
    if options.ood_data:
        running.stages("predicting the out-of-distribution inputs")
        sections = [
            _elsewhere(source, name)
            for name in source.sets
            if name.startswith("ood_data ")
        ]
        report = replace(report, out_of_distribution=tuple(sections))
    if options.output is not None:
        report.save(options.output)
    return report


def _check_whole(
    source: FileSource | ModelSource, options: Mapping[str, object]
) -> None:
    """Raise for options that need all probabilities, or one order of the rows, of other files."""
    if isinstance(source, ModelSource):
        return
    is_top = source.predictions().kind is TOP_LABELS
    for option, value in options.items():
        requirement = f"{option} to go with a score for each class"
        got = "the confidences of top labels"
        check(not (is_top and value), requirement, got, "leave it out")
    n_files = source.n_files()
    check(
        n_files is None or not options["--soft-labels"],
        "--soft-labels to go with one file of predictions",
        f"{n_files} files, whose rows have no stated order",
        "write the predictions into one file",
    )


def _measure(
    source: FileSource | ModelSource, options: Evaluate, running: Running
) -> CalibrationReport:
    """The report on the rows, of what kind they are."""
    soft_labels = None
    if options.soft_labels is not None:
        names, n_rows = source.size()
        soft_labels = load_soft_labels(options.soft_labels, n_rows, len(names))
    predicted = source.predictions()
    running.stages(f"measuring {counted(len(predicted), 'row')}")
    report = report_on_predictions(
        predicted,
        source.name,
        options.n_bins,
        source.beside,
        soft_labels=soft_labels,
        class_names=options.class_names,
    )
    notes = [*report.notes, *source.notes]
    if source.beside is not None:
        title = map_title(method_of(source.beside))
        notes.append(
            f"After calibration: as hf_calib.pipeline serves the model, by the {title} next to it. "
            "A plain pipeline serves what is measured before."
        )
    about = source.about()
    return replace(report, about=about, notes=tuple(notes), n_files=source.n_files())


def _elsewhere(source: FileSource | ModelSource, name: str) -> OodSection:
    """The section on inputs of none of the classes, also after a calibrator next to the model."""
    own = source.predictions()
    before = (own.as_logits(), source.logits(name))
    after = None
    if source.beside is not None:
        served = [source.beside.predict_proba(each) for each in before]
        after = (logs_of(served[0]), logs_of(served[1]))
    return ood_section(
        name.removeprefix("ood_data "),
        before,
        after,
        probabilities=own.logits is None or after is not None,
    )
