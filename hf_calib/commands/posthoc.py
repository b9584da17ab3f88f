"""What `hf-calib evaluate` and `hf-calib calibrate` do with predictions: reports, and calibrated probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_calib._errors import InputValueError, expected
from hf_calib._files import check_output, whole_folder
from hf_calib.commands.fitting import METHODS, fit, fitted_numbers, make_scaler, split_roles
from hf_calib.predictions.files import FORMATS, Predictions, load_predictions, save_predictions
from hf_calib.report import CalibrationReport, calibration_report
from hf_calib.report.writing import write_report, write_to

_CALIBRATED = "predictions.npz"


@dataclass(frozen=True)
class Calibration:
    """What `calibrate_model` or `calibrate_predictions` did.

    Args:
        method: a key of `METHODS`.
        criterion: what a temperature minimised; None for another method.
        numbers: what was fitted, where that is a few numbers.
        n_fitted: rows the scaler was fitted on.
        held_out: where the rows of the report come from, in words.
        report: before and after, on rows that the scaler has not seen.
        notes: what the fit warned of.
        served_difference: how far a pipeline with the saved model was off, at most; None without a model.
    """

    method: str
    criterion: str | None
    numbers: Mapping[str, Any]
    n_fitted: int
    held_out: str
    report: CalibrationReport
    notes: tuple[str, ...]
    served_difference: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        return {**vars(self), "notes": list(self.notes), "report": self.report.to_dict()}


def is_predictions_file(source: str) -> bool:
    """Whether a name means a file of predictions, rather than a model.

    >>> is_predictions_file("logits.csv.gz"), is_predictions_file("distilbert/distilbert-base")
    (True, False)
    """
    return Path(source).is_file() or Path(source.removesuffix(".gz")).suffix.lower() in FORMATS


def name_of(source: str) -> str:
    """A name for titles: the file's without its ending, or the model's.

    >>> name_of("runs/logits.csv.gz"), name_of("someone/some-bert-2.1")
    ('logits', 'someone/some-bert-2.1')
    """
    if is_predictions_file(source):
        return Path(source).name.split(".")[0]
    return Path(source).name if Path(source).is_dir() else source


def evaluate_predictions(
    source: str, *, label_column: str = "label", n_bins: int = 15, output: Path | None = None
) -> CalibrationReport:
    """Report the calibration of a file of predictions.

    Args:
        source: see `load_predictions`, also for label_column.
        label_column: of labels, in a table.
        n_bins: M, at least 1.
        output: a folder for the report, see `write_report`.

    Raises:
        ValueError: if the file is missing, unreadable or wrong.
        TypeError: if columns or arrays are of the wrong kind.
    """
    check_output(output)
    report = report_on(load_predictions(source, label_column=label_column), source, n_bins)
    write_to(output, report)
    return report


def check_data(source: str, data: str | None) -> None:
    """Refuse data beside a file of predictions, which holds the labels itself, and a model without data."""
    if is_predictions_file(source) and data is not None:
        way_out = "the file of predictions holds the labels: leave data out, or name a model"
        raise InputValueError(expected("data", "be given with a model only", data, way_out))
    if data is None and not is_predictions_file(source):
        way_out = "name labelled texts: a file, a folder or a data set on the Hub"
        raise InputValueError(expected("data", "be given with a model", None, way_out))


def calibrate_predictions(
    source: str,
    output: Path,
    *,
    test: str | None = None,
    label_column: str = "label",
    method: str = "temperature",
    criterion: str = "nll",
    n_bins: int = 15,
    seed: int = 0,
) -> Calibration:
    """Fit a scaler on predictions, and write calibrated probabilities of rows that it has not seen.

    Args:
        source: a file of predictions.
        output: a folder for the report and predictions.npz.
        test: another file of predictions, whose rows are calibrated and reported; without one, the scaler is
            fitted on half of the rows, and the other half are.
        label_column: of both files, where they are tables.
        method: a key of `METHODS`.
        criterion: for a temperature "nll", "ece" or "adaptive_ece".
        n_bins: M, at least 1.
        seed: of the draw of that half.

    Raises:
        ValueError: if a file, the method or the criterion is wrong.
        TypeError: if columns or arrays are of the wrong kind.
    """
    scaler = make_scaler(method, criterion, n_bins, METHODS)
    check_output(output)
    written = output / _CALIBRATED
    if written.resolve() in {Path(name).resolve() for name in (source, test) if name is not None}:
        way_out = "name another folder: the calibrated ones are written there under the same name"
        raise InputValueError(expected("output", "be another folder than the predictions'", output, way_out))
    found = load_predictions(source, label_column=label_column)
    tested = None if test is None else load_predictions(test, label_column=label_column)
    fitted_on, reported, held_out = split_roles(found, tested, seed)
    notes = fit(scaler, fitted_on)
    report = report_on(reported, source, n_bins, scaler)
    assert report.after is not None
    kept = Predictions(reported.labels, probs=report.after.probs, class_names=reported.class_names)
    with whole_folder(output) as folder:
        save_predictions(kept, folder / _CALIBRATED)
        write_report(report, folder)
    numbers, minimised = fitted_numbers(scaler), getattr(scaler, "criterion", None)
    return Calibration(method, minimised, numbers, len(fitted_on), held_out, report, notes)


def report_on(predictions: Predictions, source: str, n_bins: int, scaler: Any = None) -> CalibrationReport:
    return calibration_report(
        predictions.probabilities(),
        predictions.labels,
        calibrated=None if scaler is None else scaler.predict_proba(predictions.as_logits()),
        n_bins=n_bins,
        class_names=predictions.class_names,
        name=name_of(source),
    )
