"""Class frequencies: their estimation from unlabelled data, and the correction of a model's probabilities."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import chdtrc, softmax

from hf_calib._errors import check, few
from hf_calib.metrics import checks
from hf_calib.metrics.checks import FloatArray
from hf_calib.scaling._base import as_fitted_logits, as_matrix
from hf_calib.scaling.affine import AffineMap, AffineScaling
from hf_calib.scaling.newton import Rows, ScaledLoss

LEVEL = 0.05  # The level of the test; intervals have 1 - LEVEL.
_BLOCK = 2**22  # The weights of resamples in memory at the same time.
_ALIKE = 1e-6  # Padding changes the probabilities of a text by less.
_MOST_LEAPS, _MOST_CYCLES = (
    200,
    2000,
)  # After the leaps plain EM continues, which never gets worse.
_NATS, _NATS_OF_RESAMPLE = 1e-9, 1e-4  # The total gain of the last EM step.
_PSEUDO_ROWS = 2.0 ** np.arange(-1, 8)  # Per class; held-out rows select one.
_FOLDS = 5
_MORE = 4  # The correction uses so many times more rows, because it is more sensitive to noise.
_GAIN = 0.01  # The gain in nats per row from which source rows count as not calibrated.


class PriorCorrection(AffineScaling):
    r"""Correct a model for class frequencies that differ from those of its training or calibration data.

    Use it after training on resampled data, or for label shift (Saerens et al. 2002, Eq. 2.4). It needs no `fit`.

    $$\hat p_k \propto p_k\, \pi^{target}_k / \pi^{train}_k, \qquad z_k + \log \pi^{target}_k - \log \pi^{train}_k$$

    Args:
        train_prior: (C,) the frequencies that the probabilities assume, such as the mean probability of held-out rows:
            floats above 0 that sum to 1, or class counts as integers.
        target_prior: (C,) the frequencies in the model's application, in the same form.
        scaler: a fitted calibrator that can be folded and is applied first, or None.

    >>> correction = PriorCorrection(train_prior=[0.5, 0.5], target_prior=[0.9, 0.1])
    >>> correction.predict_proba(np.log([[0.5, 0.5], [0.1, 0.9]]))
    array([[0.9, 0.1],
           [0.5, 0.5]])
    """

    def __init__(
        self, train_prior: ArrayLike, target_prior: ArrayLike, scaler: Any = None
    ) -> None:
        self.train_prior = train_prior
        self.target_prior = target_prior
        self.scaler = scaler
        self.priors()
        folds, got = (
            scaler is None or hasattr(scaler, "affine_map"),
            type(scaler).__name__,
        )
        way_out = "fit a scaler that folds, such as TemperatureScaling or VectorScaling"
        checks.check_type(
            folds, "scaler to be an affine map of the logits", got, way_out
        )

    def fit(
        self, logits: ArrayLike, labels: ArrayLike | None = None
    ) -> PriorCorrection:
        """Check the logits; the labels are not used."""
        as_fitted_logits(as_matrix(logits, least_columns=2), self.n_classes_)
        return self

    def affine_map(self) -> AffineMap:
        """The affine map that `fold` writes into a head: that of the scaler, then the bias."""
        train, target = self.priors().values()
        own = AffineMap(np.ones(len(train)), np.log(target) - np.log(train))
        return own if self.scaler is None else self.scaler.affine_map().then(own)

    @property
    def n_classes_(self) -> int:
        return len(self.priors()["train_prior"])

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def priors(self) -> dict[str, FloatArray]:
        """Both priors by the names of the arguments."""
        both = {
            name: _as_prior(name, getattr(self, name))
            for name in ("train_prior", "target_prior")
        }
        train, target = map(len, both.values())
        way_out = "give each class its share, in the order of the logits"
        check(
            train == target,
            f"target_prior to have the {train} classes of train_prior",
            target,
            way_out,
        )
        return both


def _as_prior(argument: str, values: Any) -> FloatArray:
    """The shares (C,), float64, of a prior or of class counts; all must be above 0."""
    given = checks.as_array(argument, values)
    way_out = "pass shares as floats, or class counts as integers"
    checks.check_kind(given, "fiu", f"{argument} to hold numbers", way_out)
    numbers = given.astype(np.float64)
    got, way_out = f"shape {given.shape}", "give one share per class"
    check(
        given.ndim == 1 and len(given) >= 2,
        f"{argument} to have shape (C,)",
        got,
        way_out,
    )
    absent = ~(numbers > 0)
    got = f"{numbers[absent.argmax()]:g} for {_classes(absent)}"
    way_out = "give a class that may occur a small share (of counts: add 1 to each), and leave out others"
    check(not absent.any(), f"{argument} to be above 0 for every class", got, way_out)
    total = float(numbers.sum())
    tolerance = checks.row_sum_tolerance(len(given))
    sums_to_1 = given.dtype.kind != "f" or abs(total - 1) <= tolerance
    way_out = "divide it by its sum, or pass class counts as integers"
    check(sums_to_1, f"{argument} to sum to 1", f"{total:.6g}", way_out)
    return numbers / total


@dataclass(frozen=True, eq=False)
class PriorEstimate:
    """Class frequencies of unlabelled data, returned by `estimate_prior`.

    Attributes:
        prior: (C,) the estimated shares, above 0, and their 95% `interval` (C, 2), which is not shrunk.
        train_prior: (C,) the shares that the probabilities assume; `pseudo_rows` rows of it shrink the estimate.
        p_value: p-value of the test that the frequencies are those of the source.
        corrected_to: (C,) the shares that `correction` uses, shrunk further than `prior`.
        calibrated: False if the source's labels show that the probabilities are not calibrated.
    """

    prior: FloatArray
    interval: FloatArray
    train_prior: FloatArray
    pseudo_rows: float
    p_value: float
    n_rows: int
    corrected_to: FloatArray
    calibrated: bool = True

    @property
    def shifted(self) -> bool:
        """Whether the frequencies differ from the source's at level 0.05."""
        return self.p_value <= LEVEL

    @property
    def corrects(self) -> bool:
        """Whether the frequencies differ, and the probabilities are calibrated."""
        return self.shifted and self.calibrated

    def correction(self, scaler: Any = None) -> PriorCorrection:
        """Return the correction to these frequencies, after a fitted scaler if given; warn if nothing is corrected."""
        if self.corrects:
            return PriorCorrection(self.train_prior, self.corrected_to, scaler)
        problem, way_out = "probabilities are not calibrated", "calibrate them"
        if self.calibrated:
            found = f"do not differ significantly from the source's (p = {self.p_value:.2f})"
            problem = f"class frequencies of the {self.n_rows:,} target rows {found}"
            way_out = "use more, or give the prior"
        warnings.warn(
            f"The {problem}, so they are not corrected; {way_out}.",
            UserWarning,
            stacklevel=2,
        )
        return PriorCorrection(self.train_prior, self.train_prior, scaler)

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes in JSON types."""
        everything = vars(self) | {"shifted": self.shifted}
        return {name: np.asarray(value).tolist() for name, value in everything.items()}


def estimate_prior(
    probs: ArrayLike,
    *,
    source_probs: ArrayLike | None = None,
    source_labels: ArrayLike | None = None,
    train_prior: ArrayLike | None = None,
    n_resamples: int = 200,
    seed: int = 0,
) -> PriorEstimate:
    r"""Estimate the frequency of each class in unlabelled data, and test whether it differs from the source.

    It uses EM (Saerens et al. 2002, 2.3), and assumes label shift (inputs of each class are unchanged) and calibration.

    $$\hat\pi = \arg\max_q \sum_i \log \sum_k \frac{q_k}{\pi^{train}_k} p_k(x_i)$$

    Args:
        probs: (N, C) probabilities of the unlabelled target rows, at least two of which differ.
        source_probs: (M, C) probabilities of source rows, ideally rows to which the calibrator was not fitted. Their
            mean is the train prior, so that a remaining bias of the calibration does not count as a shift.
        source_labels: (M,) int, used to warn if the probabilities are not calibrated.
        train_prior: (C,) the shares that the probabilities assume, if there are no source rows; they count as exact.
        n_resamples, seed: of the intervals (Bayesian bootstrap) and of the test, which permutes source and target rows
            or, without source rows, is a likelihood-ratio test.

    Returns:
        The shares, shrunk towards the train prior by additional rows of it: the number among C / 2, C, ..., 128 C for
        which held-out rows have the highest likelihood.

    >>> probs = np.repeat([[0.9, 0.1], [0.1, 0.9]], [800, 200], axis=0)
    >>> found = estimate_prior(probs, train_prior=[0.5, 0.5])
    >>> found.prior.round(2), found.shifted
    (array([0.87, 0.13]), True)
    """
    rng = checks.check_draws(n_resamples, seed)
    target = checks.check_probs(probs).astype(np.float64)
    n_rows, n_classes = target.shape
    got = "one row" if n_rows < 2 else f"{n_rows} rows that are all alike"
    way_out = "pass the probabilities on many different texts"
    check(
        np.ptp(target, axis=0).max() >= _ALIKE,
        "probs to hold rows that differ",
        got,
        way_out,
    )
    given, got = (
        ("train_prior", "neither") if source_probs is None else ("source_probs", "both")
    )
    one_of_them = (source_probs is None) != (train_prior is None)
    check(
        one_of_them,
        "source_probs or train_prior to be given",
        got,
        "source_probs are the better choice",
    )
    source = np.zeros((0, n_classes))
    if source_probs is None:
        train = _as_prior(given, train_prior)
    else:
        source = checks.check_probs(source_probs, argument=given).astype(np.float64)
        train = source.mean(axis=0)
    way_out = "leave out classes that the model cannot predict"
    got = f"0 in all rows for {_classes(train == 0)}"
    check(
        bool(train.all()),
        "source_probs to give every class some probability",
        got,
        way_out,
    )
    requirement = f"{given} to have the {n_classes} classes of probs"
    check(len(train) == n_classes, requirement, len(train), "take both from one model")
    calibrated = (
        source_probs is None
        or source_labels is None
        or _is_calibrated(source, source_labels)
    )
    start = train[:, None]
    pseudo_rows = _chosen_pseudo_rows(target, start, np.random.default_rng([seed, 1]))
    added = pseudo_rows * np.array([1, _MORE]) * start
    shares = _maximum_likelihood(
        target, start, np.ones((n_rows, 2)), added, start, _NATS
    )
    drawn = []
    for part in checks.row_chunks(n_resamples, n_rows + len(source), elements=_BLOCK):
        size = part.stop - part.start
        of_source, weights = (
            rng.exponential(size=(len(rows), size)) for rows in (source, target)
        )
        added = np.maximum(
            rng.gamma(np.broadcast_to(n_classes / 2 * start, (n_classes, size))), 1e-12
        )
        trains = (
            source.T @ (of_source / of_source.sum(axis=0)) if len(source) else start
        )
        drawn += [
            _maximum_likelihood(
                target, trains, weights, added, shares[:, :1], _NATS_OF_RESAMPLE
            )
        ]
    interval = np.quantile(
        np.concatenate(drawn, axis=1), [LEVEL / 2, 1 - LEVEL / 2], axis=1
    ).T
    if len(source):
        p_value = _permutation_test(target, source, n_resamples, rng)
    else:
        ratio = 2 * np.log(target @ (shares[:, 0] / train)).sum()
        p_value = float(chdtrc(n_classes - 1, max(ratio, 0.0)))
    prior, further = shares.T
    return PriorEstimate(
        prior, interval, train, pseudo_rows, p_value, n_rows, further, calibrated
    )


def _chosen_pseudo_rows(
    target: FloatArray, train: FloatArray, rng: np.random.Generator
) -> float:
    """The number of rows of the train prior (C, 1) for which held-out rows are most likely after EM on the others."""
    rows = len(train) * _PSEUDO_ROWS
    folds = rng.permutation(np.arange(len(target)) % min(_FOLDS, len(target)))
    likelihood = np.zeros(len(rows))
    for fold in range(folds.max() + 1):
        fitted_on = np.repeat(
            (folds != fold)[:, None].astype(np.float64), len(rows), axis=1
        )
        found = _maximum_likelihood(
            target, train, fitted_on, rows * train, train, _NATS_OF_RESAMPLE
        )
        likelihood += np.log(target[folds == fold] @ (found / train)).sum(axis=0)
    return float(rows[likelihood.argmax()])


def _is_calibrated(probs: FloatArray, source_labels: ArrayLike) -> bool:
    """Whether no temperature makes the source's rows clearly more likely; warn otherwise."""
    labels = checks.check_labels(
        checks.as_array("source_labels", source_labels), *probs.shape
    )
    rows = Rows(np.log(np.maximum(probs, np.finfo(np.float64).tiny)), labels)
    temperature = ScaledLoss(rows).best_temperature()
    gains = rows.losses(rows.logits) - rows.losses(rows.logits / temperature)
    calibrated = bool(gains.mean() <= max(_GAIN, 2 * gains.std() / np.sqrt(len(gains))))
    if not calibrated:
        gain = f"a temperature of {temperature:.3g} lowers their NLL by {gains.mean():.3f} nats"
        problem = f"The probabilities are not calibrated on the source's rows: {gain}, so the shares are off."
        warnings.warn(f"{problem} Calibrate first.", UserWarning, stacklevel=3)
    return calibrated


def _maximum_likelihood(
    probs: FloatArray,
    train: FloatArray,
    weights: Any,
    added: FloatArray,
    start: FloatArray,
    nats: float,
) -> FloatArray:
    """The shares (C, B) by EM for the train priors (C, B or 1), until a step gains less than `nats` in total."""
    total = weights.sum(axis=0) + added.sum(axis=0)
    found, train = (
        np.broadcast_to(start, added.shape).copy(),
        np.broadcast_to(train, added.shape),
    )
    running = np.arange(added.shape[1])

    def stepped(shares: FloatArray) -> FloatArray:
        ratio = shares / train
        return (ratio * (probs.T @ (weights / (probs @ ratio))) + added) / total

    for cycle in range(_MOST_CYCLES):
        shares = found[:, running]
        once = stepped(shares)
        found[:, running] = twice = stepped(once)
        goes_on = total * (twice * np.log(twice / once)).sum(axis=0) >= nats
        running, total = running[goes_on], total[goes_on]
        if not len(running):
            break
        if not goes_on.all():
            kept = (
                each[:, goes_on]
                for each in (train, weights, added, shares, once, twice)
            )
            train, weights, added, shares, once, twice = kept
        if (
            cycle < _MOST_LEAPS
        ):  # Squared extrapolation of logarithms (Varadhan and Roland 2008).
            change = np.log(once / shares)
            bend = np.log(twice / once) - change
            ratio = (change**2).sum(axis=0) / np.maximum((bend**2).sum(axis=0), 1e-300)
            size = np.sqrt(ratio).clip(1, 1e6)
            far = np.log(shares) + 2 * size * change + size**2 * bend
            found[:, running] = stepped(np.maximum(softmax(far, axis=0), 1e-100))
    return found


def _permutation_test(
    target: FloatArray, source: FloatArray, n_resamples: int, rng: Any
) -> float:
    """The p-value of the sum of the fourth powers of all classes' z-scores, among random splits of all rows."""
    # Squares would hide one changed class among many; the largest score would miss many small changes.
    n, rows = len(target), np.concatenate([target, source])
    rows = rows[:, rows.std(axis=0) > 1e-12]
    scores = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    found = (scores[:n].sum(axis=0) ** 4).sum()
    as_far = 0
    for part in checks.row_chunks(n_resamples, len(rows), elements=_BLOCK):
        draws = rng.random((part.stop - part.start, len(rows)))
        chosen = draws <= np.partition(draws, n - 1, axis=1)[:, n - 1 : n]
        distances = ((chosen @ scores) ** 4).sum(axis=1)
        as_far += int(np.count_nonzero(distances >= found * (1 - 1e-9)))
    return (1 + as_far) / (1 + n_resamples)


def _classes(chosen: Any) -> str:
    return few([f"class {number}" for number in np.flatnonzero(chosen)])
