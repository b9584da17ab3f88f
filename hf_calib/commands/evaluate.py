"""`hf-calib evaluate`: the calibration of a model on labelled rows, or of predictions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

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
from hf_calib.predictions.predictions import logs_of
from hf_calib.report import CalibrationReport, ood_section, report_on_predictions
from hf_calib.report.making import report_on_table
from hf_calib.report.sections import OodSection
from hf_calib.scaling.saved_map import map_title, method_of

if TYPE_CHECKING:
    from hf_calib.commands.options import Evaluate


def run(options: Evaluate, running: Running) -> CalibrationReport:
    """The report; predictions of more rows than are held at once are measured in one pass."""
    check_output(options.output)
    of_held_rows = {
        "--ood-data": options.ood_data,
        "--soft-labels": options.soft_labels,
    }
    of_rows = {
        **of_held_rows,
        "--by": options.by,
        "--weight-column": options.weight_column,
    }
    check_labels = partial(check_kind, reading=options, single_only=of_rows)
    source = open_source(options, running, check_labels)
    is_held = source.is_held and options.weight_column is None
    for option, value in of_held_rows.items():
        got = "more rows" if options.weight_column is None else "--weight-column"
        requirement = (
            f"{option} to be used without weights, on rows that fit into memory"
        )
        check(is_held or not value, requirement, got, "leave it out")
    if options.soft_labels is not None and isinstance(source, FileSource):
        n_files = len(source.tables["data"].files)
        check(
            n_files == 1,
            "--soft-labels to go with one file of predictions",
            f"{n_files} files, whose rows have no stated order",
            "write the predictions into one file",
        )
    report: Any = _measure(source, options, running)
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


def _measure(
    source: FileSource | ModelSource, options: Evaluate, running: Running
) -> CalibrationReport:
    """The report on the rows, of what kind they are."""
    if isinstance(source, FileSource) and not source.is_held:
        table, name = source.tables["data"], source.name
        running.stages(f"measuring {counted(len(table.files), 'file')}")
        return report_on_table(
            table,
            name,
            options.n_bins,
            class_names=options.class_names,
            workers=options.workers,
            on_rows=running.progress,
        )
    told: Any = {"class_names": options.class_names}
    if options.soft_labels is not None:
        names, n_rows = source.size()
        told["soft_labels"] = load_soft_labels(options.soft_labels, n_rows, len(names))
    predicted = source.predictions()
    running.stages(f"measuring {counted(len(predicted), 'row')}")
    report = report_on_predictions(
        predicted, source.name, options.n_bins, source.beside, **told
    )
    notes = [*report.notes, *source.notes]
    if source.beside is not None:
        title = map_title(method_of(source.beside))
        notes.append(
            f"After calibration: as hf_calib.pipeline serves the model, by the {title} next to it. "
            "A plain pipeline serves what is measured before."
        )
    found: CalibrationReport = replace(report, about=source.about(), notes=tuple(notes))
    return found


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
