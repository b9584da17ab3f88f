"""The report on predictions: of rows that are held, or of one pass over those that are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hf_calib.predictions.columns import Batch
from hf_calib.predictions.one_pass import (
    OnRows,
    Slicing,
    Tally,
    add_rows,
    choose_slicings,
    edges_of,
    empty_tally,
    ignore_rows,
    measure_in_one_pass,
)
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.table import Table
from hf_calib.report._report import CalibrationReport, calibration_report
from hf_calib.report.any_report import AnyReport
from hf_calib.report.entities import with_entities
from hf_calib.report.measures import Settings
from hf_calib.report.one_pass import OnePassReport, report_on_states
from hf_calib.report.slices import slice_section


def report_on_predictions(
    predictions: Predictions,
    name: str,
    n_bins: int,
    scaler: Any = None,
    *,
    soft_labels: Any = None,
    class_names: Sequence[str] | None = None,
) -> CalibrationReport:
    """The report on predictions, also after a fitted scaler where there is one.

    Args:
        predictions: of N examples; their weights are not looked at, see `weighted_report`.
        name: of the model, for titles.
        n_bins: M, at least 1.
        scaler: fitted on other examples; or None.
        soft_labels: (N, C) of the same examples; or None.
        class_names: the data's names of the C classes; None for those of the predictions.
    """
    report = calibration_report(
        predictions.probabilities(),
        predictions.labels,
        calibrated=None if scaler is None else scaler.predict_proba(predictions.as_logits()),
        soft_labels=soft_labels,
        n_bins=n_bins,
        class_names=class_names or predictions.class_names,
        name=name,
    )
    sections = _sections(_tally(predictions, report.final.probs, n_bins), n_bins) if predictions.by else ()
    return replace(with_entities(report, predictions.sentences), slices=sections)


def weighted_report(
    predictions: Predictions, name: str, n_bins: int, *, class_names: Sequence[str] | None = None
) -> OnePassReport:
    """The report on predictions with weights, which has what sums of weights tell."""
    tally = _tally(predictions, predictions.probabilities(), n_bins)
    return report_of(tally, name, tuple(class_names or predictions.names), n_bins)


def _tally(predictions: Predictions, probs: Any, n_bins: int) -> Tally:
    slicings = [Slicing(column, edges_of(values)) for column, values in predictions.by.items()]
    by = tuple(_coded(values) for values in predictions.by.values())
    tally = empty_tally(probs.shape[1], slicings, n_bins)
    add_rows(tally, Batch(None, probs, predictions.labels, predictions.weights, by), slicings)
    return tally


def report_on_table(
    table: Table, name: str, n_bins: int, *, workers: int | None = None, on_rows: OnRows = ignore_rows
) -> AnyReport:
    """The report on all rows of a table where they can be held, else of one pass over them."""
    if table.fits_into_memory():
        measured = report_on_predictions if table.columns.weight is None else weighted_report
        return measured(table.load(), name, n_bins)
    tally = measure_in_one_pass(table, n_bins, choose_slicings(table), workers=workers, on_rows=on_rows)
    return report_of(tally, name, table.class_names, n_bins, len(table.files))


def report_of(
    tally: Tally, name: str, class_names: tuple[str, ...], n_bins: int, n_files: int | None = None
) -> OnePassReport:
    """The report on what was summed."""
    return report_on_states(
        tally.states["before"],
        after=tally.states.get("after"),
        class_names=class_names,
        name=name,
        slices=_sections(tally, n_bins),
        n_files=n_files,
    )


def _sections(tally: Tally, n_bins: int) -> tuple[Any, ...]:
    settings = Settings(n_bins, 0.95, 1000, 0)
    return tuple(slice_section(sums, settings) for sums in tally.slices.values())


def _coded(values: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The numbers (N,) of values, and the values that they number."""
    numbers = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values], np.intp), list(numbers)
