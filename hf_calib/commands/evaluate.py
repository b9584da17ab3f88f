"""`hf-calib evaluate`: the calibration of a model on labelled rows, or of a file of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_calib._errors import InputValueError, expected, few
from hf_calib._files import check_output
from hf_calib._text import short_names
from hf_calib.commands.opening import (
    Opened,
    Running,
    check_kind,
    is_predictions_file,
    name_of,
    open_source,
    task_of_source,
)
from hf_calib.models.reading import RowSet
from hf_calib.predictions.logs import is_log
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.soft_labels import load_soft_labels
from hf_calib.predictions.table import open_predictions
from hf_calib.report import OodSection, ood_section, report_on_predictions
from hf_calib.report.any_report import AnyReport
from hf_calib.report.of_predictions import report_on_table, weighted_report
from hf_calib.report.writing import write_to

if TYPE_CHECKING:
    from hf_calib.commands.options import Evaluate


def evaluate(options: Evaluate, running: Running) -> AnyReport:
    """The report; predictions of more rows than are held at once are measured in one pass.

    Raises:
        ValueError: if source or data are missing, unreadable or do not fit.
        TypeError: if columns or arrays are of the wrong kind.
    """
    output, n_bins, reading = options.output, options.n_bins, options.reading
    rows, soft_labels = options.rows(options.data, options.split), options.soft_labels
    sources = [options.source] if isinstance(options.source, str) else list(options.source)
    check_output(output)
    of_held_rows = {"--ood-data": options.ood_data, "--soft-labels": soft_labels}
    if rows is None and (len(sources) > 1 or is_predictions_file(sources[0])) and not is_log(sources[0]):
        running.stages(f"reading {few(sources)}")
        table = open_predictions(sources, **reading.of_tables)
        if not table.fits_into_memory() or (len(sources) > 1 and not any(of_held_rows.values())):
            _check_not_in_one_pass(of_held_rows)
            running.stages(f"measuring {len(table.files):,} files")
            found = report_on_table(
                table, name_of(table.name), n_bins, workers=options.workers, on_rows=running.rows
            )
            write_to(output, found)
            return found
    if options.weight_column is not None:
        _check_not_in_one_pass(of_held_rows)
    source = _only(sources)
    task = task_of_source(source, rows, trust_remote_code=running.trust_remote_code)
    kind = None if task is None else task.labels
    of_rows = {**of_held_rows, "--by": reading.by, "--weight-column": reading.weight_column}
    check_kind(kind, reading, of_rows)
    ood = options.ood_data or []
    names = short_names(ood)
    outside = {
        f"ood_data {name}": options.rows(
            each, options.ood_split, "ood_data", labelled=False, dataset_config=None
        )
        for name, each in zip(names, ood, strict=True)
    }
    opened = open_source(source, task, {"data": rows or RowSet(source), **outside}, reading, running)
    if opened.kind.sigmoid:
        check_kind(opened.kind, reading, of_rows)
    shares = None
    if soft_labels is not None:
        n_rows = opened.n_rows("data")
        shares = load_soft_labels(soft_labels, n_rows, len(opened.class_names))
    predicted = opened.predictions("data")
    assert predicted is not None
    running.stages(f"measuring {len(predicted):,} rows")
    report: Any
    if options.weight_column is not None:
        report = weighted_report(predicted, name_of(source), n_bins, class_names=reading.class_names)
    else:
        names_of_data: Any = {"soft_labels": shares, "class_names": reading.class_names}
        report = report_on_predictions(predicted, name_of(source), n_bins, **names_of_data)
    report = replace(report, about=_about(opened), notes=(*report.notes, *opened.notes()))
    if names:
        running.stages("predicting inputs from elsewhere")
        report = replace(report, out_of_distribution=tuple(_sections(opened, predicted, names)))
    write_to(output, report)
    return report


def _only(sources: Sequence[str]) -> str:
    if len(sources) > 1:
        way_out = "name the folder of the files, or one model"
        raise InputValueError(expected("the source", "be one", ", ".join(sources), way_out))
    return sources[0]


def _check_not_in_one_pass(options: Mapping[str, object]) -> None:
    for option, value in options.items():
        if value:
            got = "weights, several files, or rows for one pass"
            raise InputValueError(
                expected(option, "go with one file of rows that are held", got, "leave it out")
            )


def _about(opened: Opened) -> dict[str, Any]:
    """Which rows these are and which weights gave the predictions, for readers of report.json."""
    if opened.classifier is None:
        return {}
    from hf_calib.export.fingerprint import fingerprint

    rows = opened.sets["data"]
    return {
        **rows.source(),
        "options": rows.options(opened.reading),
        "fingerprint": fingerprint(opened.classifier.model),
    }


def _sections(opened: Opened, found: Predictions, names: Sequence[str]) -> list[OodSection]:
    """How well inputs from elsewhere are separated; of a model with a map in its head, also without the map."""
    outside: Any = {name: opened.logits(f"ood_data {name}") for name in names}
    states: list[tuple[Any, Any]] = [(found.as_logits(), outside)]
    if opened.classifier is None:
        for name in names:
            _check_same_scores(found, opened.predictions(f"ood_data {name}"), opened.source)
    else:
        from hf_calib.export.unfold import can_be_unfolded, unfold
        from hf_calib.scaling.saved_map import recorded_in

        model = opened.classifier.model
        if recorded_in(model.config).get("folded") and can_be_unfolded(model):
            opened.running.stages("predicting without the map")
            unfold(model)
            raw = {name: opened.logits(f"ood_data {name}") for name in names}
            states.insert(0, (opened.logits("data"), raw))
    return [
        ood_section(
            name,
            *((inside, logits[name]) for inside, logits in states),
            probabilities=found.logits is None,
        )
        for name in names
    ]


def _check_same_scores(predictions: Predictions, other: Predictions | None, source: str) -> None:
    """Raise where one file holds logits and the other one probabilities."""
    assert other is not None
    kinds = ["logits" if each.probs is None else "probabilities" for each in (predictions, other)]
    if kinds[0] != kinds[1]:
        requirement, way_out = f"hold {kinds[0]}, as {Path(source).name} does", "use predictions of one kind"
        raise InputValueError(expected("the data from elsewhere", requirement, kinds[1], way_out))
