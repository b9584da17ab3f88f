"""Scalers of the commands: chosen by name, fitted on some rows, measured on others."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from hf_calib._errors import InputValueError, did_you_mean, expected
from hf_calib.commands.opening import Opened, name_of
from hf_calib.metrics.checks import FloatArray
from hf_calib.predictions.kinds import SINGLE_LABEL
from hf_calib.predictions.predictions import Predictions, check_same_classes
from hf_calib.report import CalibrationReport, report_on_predictions
from hf_calib.scaling import FOLDABLE_SCALERS, SCALERS, PriorEstimate, estimate_prior

METHODS = SINGLE_LABEL.maps
FOLDED = tuple(
    method for method in METHODS if method in FOLDABLE_SCALERS
)  # those that a model's head can hold

_BEFORE_CORRECTION = "before the correction of the class frequencies, as these rows have the source's"


class Measured(NamedTuple):
    """Result of `fit_and_measure`.

    Args:
        served: the fitted scaler, or its correction to other class frequencies.
        prior: those frequencies; None without target data.
        fitted_on: the rows that the scaler was fitted on.
        reported: the rows that the report is on.
        held_out: which these are, in words.
        report: before and after the scaler.
        is_served: whether "after" is as served; not so of rows that have the source's class frequencies.
        warned: warnings of the fit and of the correction.
        n_seen: how many of the reported rows the scaler was fitted on.
    """

    served: Any
    prior: PriorEstimate | None
    fitted_on: Predictions
    reported: Predictions
    held_out: str
    report: CalibrationReport
    is_served: bool
    warned: tuple[str, ...]
    n_seen: int

    @property
    def calibrated(self) -> NDArray[Any]:
        """(N, C) probabilities of the reported rows, as "after" has them."""
        assert self.report.after is not None
        return self.report.after.probs


def fit_and_measure(scaler: Any, opened: Opened, *, n_bins: int, seed: int) -> Measured:
    """Fit a scaler in place, correct it to the target's class frequencies, and report on rows that it has not seen.

    Args:
        scaler: unfitted.
        opened: with "data" to fit on, half of them without "test_data" to report on; and perhaps "target_data", rows as
            they come where the model is used.
        n_bins: M.
        seed: of the draw of the half, and of the estimate of the frequencies.
    """
    found, tested = opened.predictions("data"), opened.predictions("test_data")
    target_logits = opened.logits("target_data")
    assert found is not None
    fitted_on, reported, held_out = split_roles(found, tested, seed)
    opened.running.stages(f"fitting on {len(fitted_on):,} rows, measuring {len(reported):,}")
    warned = fit(scaler, fitted_on)
    served, prior = scaler, None
    if target_logits is not None:
        source_rows = reported if tested is None else fitted_on
        served, prior, not_corrected = corrected(scaler, source_rows, target_logits, seed)
        warned += not_corrected
    is_served = tested is not None or served is scaler
    if not is_served:
        held_out = f"{held_out}, {_BEFORE_CORRECTION}"
    report = report_on_predictions(
        reported,
        name_of(opened.source),
        n_bins,
        served if is_served else scaler,
        class_names=opened.reading.class_names,
    )
    n_seen = opened.n_shared()
    notes = (*report.notes, *_note_in_sample(n_seen, len(reported)), *opened.notes())
    report = replace(report, notes=notes)
    return Measured(served, prior, fitted_on, reported, held_out, report, is_served, warned, n_seen)


def make_scaler(method: str, criterion: str, n_bins: int, known: Sequence[str]) -> Any:
    """The unfitted scaler; an option that does not go with it is refused.

    Args:
        method: a key of `SCALERS`.
        criterion: of a temperature.
        n_bins: of its criterion.
        known: the methods that go with the rows and what is done with them.
    """
    if method not in known:
        requirement = f"be one of {', '.join(known)}"
        way_out = did_you_mean(method, known)
        if method in METHODS:
            way_out = (
                f"{method} cannot be folded into a model's head: calibrate a file of predictions with it, "
                "without target data"
            )
        if "per_label_temperature" in known:
            requirement, way_out = f"{requirement} for several labels a row", "auto is the default"
        raise InputValueError(expected("method", requirement, repr(method), way_out))
    scaler = SCALERS[method].load()
    if method == "temperature":
        return scaler(criterion, n_bins=n_bins)
    if criterion != "nll":
        way_out = f"leave it out: {method} minimises a criterion of its own"
        raise InputValueError(
            expected("criterion", "be given for a temperature only", repr(criterion), way_out)
        )
    return scaler()


def split_roles(
    found: Predictions, tested: Predictions | None, seed: int
) -> tuple[Predictions, Predictions, str]:
    """The rows to fit on, the rows to report on, and which the latter are, in words."""
    if tested is not None:
        check_same_classes("the test data", found, tested)
        return found, tested, f"all {len(tested):,} rows of the test data"
    chosen, rest, held_out = halves(found, seed)
    return found.select(chosen), found.select(rest), held_out


def halves(found: Predictions, seed: int) -> tuple[NDArray[Any], NDArray[Any], str]:
    """The row numbers to fit on, those to report on, and which the latter are, in words."""
    # Whole sentences: the tokens of one are not independent, and entities must not be cut.
    sentences = found.sentences
    units = np.arange(len(found)) if sentences is None else np.unique(sentences)
    if len(units) < 2:
        what = "the rows" if sentences is None else "the sentences"
        way_out = "pass more rows, or test data"
        raise InputValueError(expected(what, "be at least 2, to be split in half", len(units), way_out))
    if found.labels.ndim == 1 and sentences is None:
        chosen = half_of(found.labels, seed)
    else:
        half = units[half_of(np.zeros(len(units), np.int64), seed)]
        chosen = half if sentences is None else np.flatnonzero(np.isin(sentences, half))
    rest = np.setdiff1d(np.arange(len(found)), chosen)
    return chosen, rest, f"the other {len(rest):,} of {len(found):,} rows, drawn with seed {seed}"


def corrected(
    scaler: Any, source_rows: Predictions, target_logits: NDArray[Any], seed: int
) -> tuple[Any, PriorEstimate, tuple[str, ...]]:
    """The fitted scaler with a correction to the target's class frequencies, their estimate, and its warnings.

    Where the estimate corrects nothing, it is the scaler itself that is returned.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = estimate_prior(
            scaler.predict_proba(target_logits),
            source_probs=scaler.predict_proba(source_rows.as_logits()),
            source_labels=source_rows.labels,
            seed=seed,
        )
        correction = found.correction(scaler)
    return correction if found.corrects else scaler, found, tuple(str(each.message) for each in caught)


def half_of(labels: NDArray[np.int64], seed: int) -> NDArray[Any]:
    """Row numbers (N // 2,) of a random half; stratified by class where each class has enough rows.

    >>> labels = np.array([0, 0, 1, 1, 1, 1])
    >>> np.bincount(labels[half_of(labels, seed=0)])
    array([1, 2])
    """
    n_rows = len(labels) // 2
    counts = np.unique(labels, return_counts=True)[1]
    enough = counts.min() >= 2 and len(counts) <= n_rows
    chosen, _ = train_test_split(
        np.arange(len(labels)), train_size=n_rows, stratify=labels if enough else None, random_state=seed
    )
    return np.sort(chosen)


def takes_weights(scaler: Any) -> bool:
    """Whether a scaler is fitted to rows with weights."""
    return "sample_weight" in signature(scaler.fit).parameters


def fit(scaler: Any, rows: Predictions, weights: FloatArray | None = None) -> tuple[str, ...]:
    """Fit in place; return its warnings."""
    if rows.kind.sigmoid and "multi_label" in scaler.get_params():
        scaler.set_params(multi_label=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.fit(rows.as_logits(), rows.labels, **({} if weights is None else {"sample_weight": weights}))
    return tuple(str(warning.message) for warning in caught)


def _note_in_sample(n_seen: int, n_reported: int) -> tuple[str, ...]:
    """The warning that the report is on rows that the scaler was fitted on."""
    if n_seen == 0:
        return ()
    way_out = "Report on other test data, or leave them out: half of the rows is then held out."
    if n_seen == n_reported:
        consequence = "The errors after calibration are in-sample, and lower than on new rows."
        return (f"The scaler was fitted on all {n_reported:,} rows of this report. {consequence} {way_out}",)
    consequence = "The errors after calibration are in part in-sample, and lower than on new rows."
    return (
        f"The scaler was fitted on {n_seen:,} of the {n_reported:,} rows of this report. {consequence} {way_out}",
    )
