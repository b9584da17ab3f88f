"""`hf-calib calibrate`: a scaler fitted on held-out rows, and a calibrated model or calibrated predictions."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hf_calib._errors import check
from hf_calib._files import check_output, whole_folder
from hf_calib.commands import console
from hf_calib.commands.fitting import FOLDED, METHODS, fit, make_scaler, split_roles
from hf_calib.commands.source import FileSource, ModelSource, Running, check_kind, open_source
from hf_calib.models.reading import RowSet
from hf_calib.predictions import save_predictions
from hf_calib.predictions.labels import SINGLE_LABEL, LabelKind
from hf_calib.predictions.predictions import Predictions
from hf_calib.report import CalibrationReport, report_on_predictions
from hf_calib.report.rows import with_interval
from hf_calib.scaling import SCALERS, PriorEstimate, estimate_prior
from hf_calib.scaling.saved_map import fitted_numbers

if TYPE_CHECKING:
    from hf_calib.commands.options import Calibrate

_CALIBRATED = "predictions.npz"
_CORRECTED = "target.npz"
_MOST_MOVED = 10  # classes in the table of class frequencies


@dataclass(frozen=True)
class Calibration:
    """The outcome of `calibrate`."""

    method: str  # a key of `SCALERS`
    criterion: str | None  # what a temperature minimised
    choice: str | None  # what "auto" has chosen
    numbers: Mapping[str, Any]  # the fitted parameters, where these are at most a number per class
    n_fitted: int  # rows
    held_out: str  # which rows the report is on, in words
    # Before and after, on rows that the scaler has not seen. "After" has the prior correction where these are test
    # rows; other rows have the source's class frequencies.
    report: CalibrationReport
    notes: tuple[str, ...]
    output: str
    prior: PriorEstimate | None = None  # the class frequencies of the target data
    served_difference: float | None = (
        None  # the largest from the probabilities of a pipeline with the saved model
    )
    folded: bool = False

    @classmethod
    def of(cls, options: Calibrate, method: str, scaler: Any, **found: Any) -> Calibration:
        """What a fitted scaler says of itself, and the rest."""
        criterion, choice = (getattr(scaler, name, None) for name in ("criterion", "choice_"))
        return cls(method, criterion, choice, fitted_numbers(scaler), output=str(options.output), **found)

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        prior = None if self.prior is None else self.prior.to_dict()
        return {**vars(self), "notes": list(self.notes), "report": self.report.to_dict(), "prior": prior}


def run(options: Calibrate, running: Running) -> Calibration:
    """Fit a scaler on held-out rows; fold it into the model's head for a plain pipeline, or calibrate predictions.

    A map that does not fold, or whose bias the head would lose, is saved beside the model, as it was, for
    `hf_calib.pipeline`. A model that has a map in its head already is unfolded first.
    """
    check_output(options.output)
    rows, criterion, n_bins = options.rows(), options.criterion, options.n_bins
    method = options.method or ("temperature" if criterion else None)
    way_out = "leave it out"
    requirement = "--weight-column to go with predictions"
    check(rows is None or options.weight_column is None, requirement, options.source, way_out)

    def known(kind: LabelKind) -> tuple[str, ...]:
        if kind.sigmoid:
            return kind.maps
        # A pipeline gives tokens the score of their tag only, which is too little to check another map by.
        folds_only = options.target_data or (rows is not None and kind is not SINGLE_LABEL)
        return FOLDED if folds_only else METHODS

    def check_labels(kind: LabelKind) -> None:
        single_only = {"--target-data": options.target_data, "--criterion": criterion}
        check_kind(kind, options, single_only)
        make_scaler(method or "auto", criterion, n_bins, known(kind))

    sets = {
        "data": rows,
        "test_data": options.rows("test_data", "test_split"),
        "target_data": options.rows("target_data", "target_split", labelled=False),
    }
    source = open_source(options.source, sets, options, running, check_labels=check_labels)
    if isinstance(source, FileSource):
        _check_not_over_a_source(options.output, source.sets.values())
        if not source.is_held or options.weight_column is not None:
            from hf_calib.commands.calibrate_shards import calibrate_shards

            method, scaler, found = calibrate_shards(source, options, method, running)
            return Calibration.of(options, method, scaler, **found)
        method = method or "auto"
        scaler = make_scaler(method, criterion, n_bins, known(source.kind))
        measured = fit_and_measure(scaler, source, options)
        _save_predictions(options.output, source, measured)
        return Calibration.of(options, method, scaler, **measured.told())

    from hf_calib.commands.saving import save_calibrated, undo_map
    from hf_calib.export.heads import head_loses_bias
    from hf_calib.export.saving import check_overwrites_no_original

    check_overwrites_no_original(options.output, [options.source])
    training, undone = undo_map(source)
    if method is None:
        loses_bias = head_loses_bias(source.classifier.model, len(source.class_names))
        method = "temperature" if loses_bias else "auto"
    scaler = make_scaler(method, criterion, n_bins, known(source.kind))
    measured = fit_and_measure(scaler, source, options)
    running.stages(f"saving to {options.output}")
    saved = save_calibrated(options.output, training, source, method, measured)
    told = measured.told()
    told["notes"] = (*undone, *told["notes"])
    return Calibration.of(options, method, scaler, **told, **saved)


class Measured(NamedTuple):
    """A fitted scaler, measured on rows that it has not seen."""

    scaler: Any
    served: Any  # the scaler, or its correction to other class frequencies
    prior: PriorEstimate | None
    fitted_on: Predictions
    reported: Predictions
    held_out: str
    report: CalibrationReport
    is_served: bool  # whether the report is on it; not so of rows that have the source's class frequencies
    warned: tuple[str, ...]
    n_seen: int  # of the reported rows

    def told(self) -> dict[str, Any]:
        """The fields of a `Calibration`."""
        notes = (*self.report.notes, *self.warned)
        found = {"held_out": self.held_out, "report": self.report, "prior": self.prior}
        return {"n_fitted": len(self.fitted_on), "notes": notes, **found}


def fit_and_measure(scaler: Any, source: FileSource | ModelSource, options: Calibrate) -> Measured:
    """Fit a scaler in place, correct it to the target's class frequencies, and report on rows that it has not seen."""
    tested = source.tested()
    fitted_on, reported, held_out = split_roles(source.predictions(), tested, options.seed)
    source.running.stages(f"fitting on {len(fitted_on):,} rows, measuring {len(reported):,}")
    warned = fit(scaler, fitted_on)
    served, prior = scaler, None
    if "target_data" in source.sets:
        corrected_on = reported if tested is None else fitted_on
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prior = estimate_prior(
                scaler.predict_proba(source.logits("target_data")),
                source_probs=scaler.predict_proba(corrected_on.as_logits()),
                source_labels=corrected_on.labels,
                seed=options.seed,
            )
            correction = prior.correction(scaler)
        served = correction if prior.corrects else scaler
        warned += tuple(str(each.message) for each in caught)
    is_served = tested is not None or served is scaler
    if not is_served:
        held_out += ", before the correction of the class frequencies, as these rows have the source's"
    names = {"class_names": options.class_names}
    measured = served if is_served else scaler
    report = report_on_predictions(reported, source.name, options.n_bins, measured, **names)
    n_seen = source.n_shared()
    notes = (*report.notes, *_in_sample(n_seen, len(reported)), *source.notes)
    report = replace(report, notes=notes)
    return Measured(scaler, served, prior, fitted_on, reported, held_out, report, is_served, warned, n_seen)


def _in_sample(n_seen: int, n_reported: int) -> tuple[str, ...]:
    """The warning that the report is on rows that the scaler was fitted on."""
    if n_seen == 0:
        return ()
    of, part = ("all", "") if n_seen == n_reported else (f"{n_seen:,} of the", "in part ")
    return (
        f"The scaler was fitted on {of} {n_reported:,} rows of this report. The errors after calibration are "
        f"{part}in-sample, and lower than on new rows. Report on other test data, or leave them out: half of the "
        "rows is then held out.",
    )


def _check_not_over_a_source(output: Path, sets: Iterable[RowSet]) -> None:
    given = {Path(each.data).resolve() for each in sets if isinstance(each.data, str)}
    kept = not given & {(output / name).resolve() for name in (_CALIBRATED, _CORRECTED)}
    way_out = "name another folder: the calibrated ones are written there under the same name"
    check(kept, "output to be another folder than the predictions'", output, way_out)


def _save_predictions(output: Path, source: FileSource, measured: Measured) -> None:
    reported, report = measured.reported, measured.report
    assert report.after is not None
    probs, names = report.after.probs, reported.class_names
    with whole_folder(output) as folder:
        save_predictions(Predictions(reported.labels, probs=probs, class_names=names), folder / _CALIBRATED)
        if measured.prior is not None:
            probs = measured.served.predict_proba(source.logits("target_data"))
            np.savez(
                folder / _CORRECTED, probs=probs, class_names=np.array(report.class_names, dtype=np.str_)
            )
        report.save(folder)


def show(done: Calibration) -> None:
    """The report before and after, the fitted parameters, and the rows that they were fitted on."""
    console.print_document(done.report.document())
    numbers = {name: value for name, value in done.numbers.items() if isinstance(value, float)}
    if "weight" in numbers:  # one number for all logits: people know it as a temperature
        numbers = {"T": 1 / numbers["weight"]}
    details = [each for each in (done.criterion, done.choice) if each]
    details += [f"{name} {value:.4g}" for name, value in numbers.items()]
    of = f" ({', '.join(details)})" if details else ""
    lines = [
        "",
        f"Method {done.method}, fitted on {done.n_fitted:,} rows{of}.",
        f"Reported on {done.held_out}.",
    ]
    lines += [f"Note: {note}" for note in done.notes if note not in done.report.warnings]
    if done.prior is not None:
        _show_moved(done.prior, done.report.class_names)
    if done.served_difference is not None:
        gives = f"gives the calibrated probabilities (largest difference {done.served_difference:.1g})."
        no_bias = "its head keeps no bias, which the map has"
        why = no_bias if SCALERS[done.method].foldable else f"{done.method} does not fold"
        lines.append(
            f"Folded into the model's head: a plain pipeline with the saved model {gives}"
            if done.folded
            else f"Saved beside the model, as {why}: hf_calib.pipeline with the saved model {gives} A plain "
            "pipeline is not calibrated by it."
        )
    console.print_lines(lines)


def _show_moved(prior: PriorEstimate, class_names: tuple[str, ...]) -> None:
    """The classes whose shares differ most from those that the calibrated probabilities assume."""
    order = sorted(range(len(prior.prior)), key=lambda k: -abs(prior.prior[k] - prior.train_prior[k]))
    found = "corrected for" if prior.corrects else "not corrected for"
    title = f"Class frequencies of {prior.n_rows:,} target rows, {found} (p = {prior.p_value:.3f})"
    rows = [
        [
            class_names[k],
            f"{prior.train_prior[k]:.4f}",
            with_interval(prior.prior[k], *prior.interval[k]),
        ]
        for k in order[:_MOST_MOVED]
    ]
    console.print_table(title, ["class", "source", "target"], rows)
