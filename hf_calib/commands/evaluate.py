"""`hf-calib evaluate`: the calibration of a model on labelled rows, or of predictions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_calib._errors import check
from hf_calib._files import check_output
from hf_calib._text import counted
from hf_calib.commands.output import check_holds_no_results
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
from hf_calib.report.sections import OodSection

if TYPE_CHECKING:
    from hf_calib.commands.options import Evaluate


def run(options: Evaluate, running: Running) -> CalibrationReport:
    """The report on the rows of a model or of files."""
    check_output(options.output)
    check_holds_no_results(options.output)
    if options.weight_column is not None:
        options.check_unused("rows without weights")
    source = open_source(options, running, partial(check_kind, options=options))
    n_files = source.n_files()
    check(
        n_files is None or options.soft_labels is None,
        "--soft-labels to go with one file of predictions",
        f"{n_files} files, whose rows have no stated order",
        "write the predictions into one file",
    )
    report = _measure(source, options, running)
    if options.ood_data:
        running.stages("predicting the out-of-distribution inputs")
        names = [name for name in source.sets if name.startswith("ood_data ")]
        sections = tuple(_elsewhere(source, name) for name in names)
        report = replace(report, out_of_distribution=sections)
    if options.output is not None:
        report.save(options.output)
    return report


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
    notes = (*report.notes, *source.notes, *source.on_serving())
    about = source.about()
    return replace(report, about=about, notes=notes, n_files=source.n_files())


def _elsewhere(source: FileSource | ModelSource, name: str) -> OodSection:
    """The section on inputs of none of the classes, also after a calibrator next to the model."""
    own = source.predictions()
    before = (own.as_logits(), source.logits(name))
    after: Any = None
    if source.beside is not None:
        probs = map(source.beside.predict_proba, before)
        after = tuple(map(logs_of, probs))
    return ood_section(
        name.removeprefix("ood_data "),
        before,
        after,
        # Scores that need logits are left out of both states, so that these can be
        # compared.
        probabilities=own.logits is None or after is not None,
    )
