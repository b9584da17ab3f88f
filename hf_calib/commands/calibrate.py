"""`hf-calib calibrate`: a scaler fitted on held-out rows, and a calibrated model or calibrated predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_calib._errors import InputValueError, expected
from hf_calib._files import check_output, whole_folder
from hf_calib.commands.fitting import FOLDED, METHODS, Measured, fit_and_measure, make_scaler
from hf_calib.commands.opening import (
    Opened,
    Running,
    check_kind,
    is_predictions_file,
    open_source,
    task_of_source,
)
from hf_calib.models.reading import RowSet
from hf_calib.predictions.kinds import MULTI_LABEL, SINGLE_LABEL, LabelKind
from hf_calib.predictions.logs import is_log
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.table import open_predictions, save_predictions
from hf_calib.report.any_report import AnyReport
from hf_calib.report.writing import write_report
from hf_calib.scaling import PriorEstimate
from hf_calib.scaling.saved_map import fitted_numbers

if TYPE_CHECKING:
    from hf_calib.commands.options import Calibrate
    from hf_calib.models.classifier import Classifier

_CALIBRATED = "predictions.npz"
_CORRECTED = "target.npz"


@dataclass(frozen=True)
class Calibration:
    """The outcome of `calibrate`.

    Args:
        method: a key of `SCALERS`.
        criterion: what a temperature minimised; None for another method.
        choice: what "auto" has chosen; None for another method.
        numbers: the fitted parameters, where these are at most a number per class.
        n_fitted: rows the scaler was fitted on.
        held_out: which rows the report is on, in words.
        report: before and after calibration, on rows that the scaler has not seen. "After" has the prior
            correction where these are test rows; other rows have the source's class frequencies.
        notes: warnings: of rows that it has seen, and of the fit.
        served_difference: largest difference between the probabilities of a pipeline with the saved model and
            the scaler's; None without a model.
        prior: the class frequencies of the unlabelled target data; None without any.
    """

    method: str
    criterion: str | None
    choice: str | None
    numbers: Mapping[str, Any]
    n_fitted: int
    held_out: str
    report: AnyReport
    notes: tuple[str, ...]
    served_difference: float | None = None
    prior: PriorEstimate | None = None
    folded: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        prior = None if self.prior is None else self.prior.to_dict()
        return {**vars(self), "notes": list(self.notes), "report": self.report.to_dict(), "prior": prior}


def calibrate(options: Calibrate, running: Running) -> Calibration:
    """Fit a scaler on held-out rows; fold it into the model's head for a plain pipeline, or calibrate predictions.

    A map that does not fold, or whose bias the head would lose, is saved beside the model, as it was, for
    `hf_calib.pipeline`. A model that has a map in its head already is unfolded first.

    Raises:
        ValueError: if model, data, method or criterion are wrong, or the scaler cannot be folded.
        TypeError: if columns or arrays are of the wrong kind.
        RuntimeError: if a pipeline with the saved model gives other probabilities; the output folder is not created.
    """
    source, output, reading = options.source, options.output, options.reading
    n_bins, seed = options.n_bins, options.seed
    method = options.method or ("temperature" if options.criterion else None)
    rows = options.rows(options.data, options.split)
    test = options.rows(options.test_data, options.test_split, "test_data")
    target = options.rows(options.target_data, options.target_split, "target_data", labelled=False)
    if rows is None and is_predictions_file(source):
        done = _calibrate_in_shards(options, method, running)
        if done is not None:
            return done
    if options.weight_column is not None:
        raise InputValueError(expected("--weight-column", "go with predictions", source, "leave it out"))
    task = task_of_source(source, rows, trust_remote_code=running.trust_remote_code)
    is_model = rows is not None
    kind = None if task is None else task.labels
    single_only = {"--target-data": target, "--criterion": options.criterion}
    criterion = options.criterion or "nll"
    check_kind(kind, reading, single_only)
    known = _methods(kind, is_model=is_model, has_target=target is not None)
    # Of a file it is not known yet how its labels are given.
    if is_model or method not in MULTI_LABEL.maps:
        make_scaler(method or "auto", criterion, n_bins, known)
    check_output(output)
    sets = {"data": rows or RowSet(source), "test_data": test, "target_data": target}
    if not is_model:
        _check_not_over_a_source(output, sets)
        opened = open_source(source, task, sets, reading, running)
        check_kind(opened.kind, reading, single_only)
        known = _methods(opened.kind, is_model=False, has_target=target is not None)
        scaler = make_scaler(method or "auto", criterion, n_bins, known)
        measured = fit_and_measure(scaler, opened, n_bins=n_bins, seed=seed)
        _save_predictions(output, opened, measured)
        return _calibration(method or "auto", scaler, measured)

    from hf_calib.commands.saving import Original, save_calibrated
    from hf_calib.export.heads import head_loses_bias
    from hf_calib.export.saving import check_overwrites_no_original

    check_overwrites_no_original(output, [source])
    originals: list[Original] = []

    def undo_map(classifier: Classifier) -> None:
        originals.append(Original.of(source, classifier))

    opened = open_source(source, task, sets, reading, running, prepare=undo_map)
    assert opened.classifier is not None
    if method is None:
        n_classes = len(opened.class_names)
        method = "temperature" if head_loses_bias(opened.classifier.model, n_classes) else "auto"
    scaler = make_scaler(method, criterion, n_bins, known)
    measured = fit_and_measure(scaler, opened, n_bins=n_bins, seed=seed)
    running.stages(f"saving to {output}")
    difference, folded = save_calibrated(output, originals[0], opened, scaler, measured, method)
    return _calibration(method, scaler, measured, originals[0].notes, difference, folded=folded)


def _calibrate_in_shards(options: Calibrate, method: str | None, running: Running) -> Calibration | None:
    """Predictions with weights, or that are not held at once; None for others."""
    source, test = options.source, options.test_data
    if is_log(source):
        return None
    columns = options.reading.of_tables
    table = open_predictions(source, **columns)
    tested = None if test is None or is_log(test) else open_predictions(test, **columns)
    tables = [each for each in (table, tested) if each is not None]
    if options.weight_column is None and all(each.fits_into_memory() for each in tables):
        return None
    if options.target_data is not None:
        got, way_out = "predictions with weights, or of more rows than are held at once", "leave it out"
        raise InputValueError(expected("--target-data", "go with rows that are held", got, way_out))
    check_output(options.output)
    from hf_calib.commands.calibrate_shards import calibrate_shards

    done = calibrate_shards(table, tested, options, method, running)
    return Calibration(
        done.method,
        getattr(done.scaler, "criterion", None),
        getattr(done.scaler, "choice_", None),
        fitted_numbers(done.scaler),
        done.n_fitted,
        done.held_out,
        done.report,
        done.warned,
    )


def _methods(kind: LabelKind | None, *, is_model: bool, has_target: bool) -> tuple[str, ...]:
    """The methods that go with the labels and with what is done with the scaler."""
    if kind is not None and kind.sigmoid:
        return kind.maps
    # A pipeline gives tokens the score of their tag only, which is too little to check another map by.
    folds_only = has_target or (is_model and kind is not None and kind is not SINGLE_LABEL)
    return FOLDED if folds_only else METHODS


def _check_not_over_a_source(output: Path, sets: Mapping[str, RowSet | None]) -> None:
    given = {Path(each.data).resolve() for each in sets.values() if each is not None}
    if given & {(output / name).resolve() for name in (_CALIBRATED, _CORRECTED)}:
        way_out = "name another folder: the calibrated ones are written there under the same name"
        raise InputValueError(expected("output", "be another folder than the predictions'", output, way_out))


def _save_predictions(output: Path, opened: Opened, measured: Measured) -> None:
    reported, report = measured.reported, measured.report
    assert report.after is not None
    calibrated = Predictions(
        reported.labels,
        probs=measured.calibrated,
        class_names=reported.class_names,
    )
    target_logits = opened.logits("target_data")
    with whole_folder(output) as folder:
        save_predictions(calibrated, folder / _CALIBRATED)
        if target_logits is not None:
            names = np.array(report.class_names, dtype=np.str_)
            probs = measured.served.predict_proba(target_logits)
            np.savez(folder / _CORRECTED, probs=probs, class_names=names)
        write_report(report, folder)


def _calibration(
    method: str,
    scaler: Any,
    measured: Measured,
    notes: tuple[str, ...] = (),
    difference: float | None = None,
    *,
    folded: bool = False,
) -> Calibration:
    return Calibration(
        method,
        getattr(scaler, "criterion", None),
        getattr(scaler, "choice_", None),
        fitted_numbers(scaler),
        len(measured.fitted_on),
        measured.held_out,
        measured.report,
        (*notes, *measured.report.notes, *measured.warned),
        difference,
        measured.prior,
        folded,
    )
