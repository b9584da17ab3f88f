"""`hf-calib calibrate`: a scaler fitted on held-out rows, and a calibrated model or calibrated predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_calib._errors import InputValueError, expected
from hf_calib._files import check_output, whole_folder
from hf_calib.commands.evaluate import Progress, Stages, in_silence
from hf_calib.commands.fitting import (
    FOLDED,
    METHODS,
    Measured,
    fit_and_measure,
    inputs_in_both,
    make_scaler,
    rows_in_both,
)
from hf_calib.predictions.files import (
    Predictions,
    check_same_classes,
    load_predictions,
    load_unlabelled,
    save_predictions,
)
from hf_calib.report import CalibrationReport, MultiLabelReport
from hf_calib.report.writing import write_report
from hf_calib.scaling import PriorEstimate
from hf_calib.scaling.methods import fitted_numbers

if TYPE_CHECKING:
    from hf_calib.commands.inputs import Labelled

_CALIBRATED = "predictions.npz"
_CORRECTED = "target.npz"


@dataclass(frozen=True)
class Calibration:
    """The outcome of `calibrate_model`, `calibrate_multi_label` or `calibrate_predictions`.

    Args:
        method: a key of `METHODS`.
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
    report: CalibrationReport | MultiLabelReport
    notes: tuple[str, ...]
    served_difference: float | None = None
    prior: PriorEstimate | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        prior = None if self.prior is None else self.prior.to_dict()
        return {**vars(self), "notes": list(self.notes), "report": self.report.to_dict(), "prior": prior}


def calibrate_model(
    source: str,
    rows: Labelled,
    output: Path,
    *,
    test: Labelled | None = None,
    target: Labelled | None = None,
    method: str | None = None,
    criterion: str = "nll",
    n_bins: int = 15,
    seed: int = 0,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    stages: Stages = in_silence,
) -> Calibration:
    """Fit a scaler on a model's logits, fold it into the head, and save the model for a plain pipeline.

    A method that does not fold is saved beside the model, as it was, for `hf_calib.pipeline`.

    A model that has a map in its head already is unfolded first: the new map replaces that one.

    Args:
        source: a classifier of sequences, tokens or images, on the Hub or in a folder.
        rows: labelled texts, tagged sentences or images that it was not trained on; `labelled_rows` chooses by the
            model.
        output: the calibrated model's folder; the report is in its folder `calibration`.
        test: others to report on; without them, the scaler is fitted on half of the rows, and the report is on
            the other half.
        target: others from where the model is to be used, whose labels are not read. The class frequencies there
            are estimated, and where they differ from those of the rows, the model is corrected for them.
        method: a key of `METHODS`, with a target or of tokens of `FOLDED`; None is "auto", or a temperature where the
            head keeps no bias.
        criterion: for a temperature "nll", "ece" or "adaptive_ece".
        n_bins: M, at least 1.
        seed: of the draw of that half.
        trust_remote_code: whether code that comes with the model may run.
        progress: called with the number of rows just predicted and of all rows.
        stages: called with the name of each stage as it begins.

    Raises:
        ValueError: if model, data, method or criterion are wrong, or the scaler cannot be folded.
        TypeError: if columns are of the wrong kind.
        RuntimeError: if a pipeline with the saved model gives other probabilities; the output folder is not
            created then.
    """
    from hf_calib.commands.saving import Original
    from hf_calib.export.heads import head_loses_bias
    from hf_calib.export.saving import check_overwrites_no_original, replace_model

    # A pipeline gives tokens the score of their tag only, which is too little to check another map by.
    known = METHODS if target is None and rows.task != "token-classification" else FOLDED
    scaler = make_scaler(method or "auto", criterion, n_bins, known)
    check_output(output)
    check_overwrites_no_original(output, [source])

    stages(f"reading {rows.data}")
    data = rows.load()
    test_data: Any = None if test is None else test.load("test_data")
    target_data: Any = None if target is None else target.load("target_data")
    stages(f"loading {source}")
    original = Original.load(source, rows, trust_remote_code=trust_remote_code)
    classifier = original.classifier
    if method is None and head_loses_bias(classifier.model, len(classifier.class_names)):
        scaler = make_scaler("temperature", criterion, n_bins, FOLDED)
    stages(rows.encoding.format(len(data)))
    encoded = rows.encode(classifier, data)
    test_encoded = None if test is None else test.encode(classifier, test_data)
    target_inputs = None if target is None else target.encode_inputs(classifier, target_data)
    inputs = [encoded.inputs, None if test_encoded is None else test_encoded.inputs, target_inputs]
    stages(
        f"predicting {sum(len(each) for each in (data, test_data, target_data) if each is not None):,} rows"
    )
    running: dict[str, Any] = {"batch_size": rows.batch_size, "on_progress": progress}
    found = encoded.predict(**running)
    tested = None if test_encoded is None else test_encoded.predict(**running)
    target_logits = None if target is None else target.predict_logits(classifier, target_inputs, progress)

    n_seen = 0
    if test is not None and tested is not None:  # of tokens, there are some that the model does not read
        n_seen = min(inputs_in_both(data, test_data, rows, test), len(tested))
    measured = fit_and_measure(
        scaler,
        found,
        tested,
        target_logits,
        n_seen=n_seen,
        notes=[note for each in inputs if each is not None for note in rows.notes(each)],
        source=source,
        n_bins=n_bins,
        seed=seed,
        stages=stages,
    )

    stages(f"saving to {output}")
    fitting = {"split": "calibration", "n_examples": len(measured.fitted_on)}
    minimised = getattr(scaler, "criterion", None)
    fitting |= {} if minimised is None else {"criterion": minimised}
    measured_on = {**(test or rows).source(), "n": len(measured.reported)}
    with whole_folder(output, replace_model) as folder:
        weights, difference = original.save_calibrated(
            folder,
            measured.served,
            data,
            found.as_logits(),
            fitting=fitting,
            measured_on=measured_on,
            method=None if method is None or method in FOLDED else method,
        )
        # A half of the rows has no name, and probabilities without the prior correction are not those of the model.
        again = {} if test is None or not measured.is_served else {"options": test.options()}
        about = {**measured_on, "seen": n_seen, **again, "fingerprint": weights}
        write_report(replace(measured.report, about=about), folder / "calibration")
    method = method or ("auto" if hasattr(scaler, "choice_") else "temperature")
    return _calibration(method, scaler, measured, original.notes, difference)


def calibrate_predictions(
    source: str,
    output: Path,
    *,
    test: str | None = None,
    target: str | None = None,
    label_column: str = "label",
    method: str | None = None,
    criterion: str = "nll",
    n_bins: int = 15,
    seed: int = 0,
    stages: Stages = in_silence,
) -> Calibration:
    """Fit a scaler on predictions, and write calibrated probabilities of rows that it has not seen.

    Args:
        source: a file of predictions.
        output: a folder for the report and predictions.npz.
        test: another file of predictions, whose rows are calibrated and reported; without one, the scaler is
            fitted on half of the rows, and the other half are.
        target: a file of predictions where the model is to be used, whose labels are not read. The class
            frequencies there are estimated; where they differ from those of the source, probabilities are
            corrected for them, and target.npz holds those of the target.
        label_column: of the files, where they are tables.
        method: a key of `METHODS`, with a target of `FOLDED`; None is "auto".
        criterion: for a temperature "nll", "ece" or "adaptive_ece".
        n_bins: M, at least 1.
        seed: of the draw of that half.
        stages: called with the name of each stage as it begins.

    Raises:
        ValueError: if a file, the method or the criterion is wrong.
        TypeError: if columns or arrays are of the wrong kind.
    """
    scaler = make_scaler(method or "auto", criterion, n_bins, METHODS if target is None else FOLDED)
    check_output(output)
    given = {Path(name).resolve() for name in (source, test, target) if name is not None}
    if given & {(output / name).resolve() for name in (_CALIBRATED, _CORRECTED)}:
        way_out = "name another folder: the calibrated ones are written there under the same name"
        raise InputValueError(expected("output", "be another folder than the predictions'", output, way_out))

    stages(f"reading {source}")
    found = load_predictions(source, label_column=label_column)
    tested = None if test is None else load_predictions(test, label_column=label_column)
    target_logits = None
    if target is not None:
        target_rows = load_unlabelled(target, label_column=label_column)
        check_same_classes("the target data", found, target_rows)
        target_logits = target_rows.as_logits()
    n_seen = 0 if tested is None else rows_in_both(found, tested)
    measured = fit_and_measure(
        scaler,
        found,
        tested,
        target_logits,
        n_seen=n_seen,
        source=source,
        n_bins=n_bins,
        seed=seed,
        stages=stages,
    )
    reported, report = measured.reported, measured.report
    assert report.after is not None
    calibrated = Predictions(reported.labels, probs=report.after.probs, class_names=reported.class_names)
    with whole_folder(output) as folder:
        save_predictions(calibrated, folder / _CALIBRATED)
        if target_logits is not None:
            names = np.array(report.class_names, dtype=np.str_)
            np.savez(
                folder / _CORRECTED, probs=measured.served.predict_proba(target_logits), class_names=names
            )
        write_report(report, folder)
    return _calibration(method or "auto", scaler, measured)


def _calibration(
    method: str, scaler: Any, measured: Measured, notes: tuple[str, ...] = (), difference: float | None = None
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
    )
