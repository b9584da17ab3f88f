"""Estimates of the class frequencies in unlabelled data, from a calibrated model's probabilities."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax
from scipy.stats import chi2

from hf_calib._errors import InputValueError, expected, few
from hf_calib.metrics.checks import (
    check_choice,
    check_n_resamples,
    check_probs,
    check_probs_and_labels,
    check_seed,
)
from hf_calib.scaling.prior_correction import FloatArray, PriorCorrection, as_prior
from hf_calib.scaling.temperature import TemperatureScaling

Method = Literal["em", "bbse", "bbse_soft"]
METHODS = ("em", "bbse", "bbse_soft")

LEVEL = 0.05  # of the test, and 1 - LEVEL of the intervals
_ALIKE = 1e-6  # probabilities of one text differ by less, however it is padded
_BLOCK = 2**22  # weights of resamples in memory at once
_MOST_CYCLES = 1000
_NATS = 1e-6, 1e-4  # gained by the last EM step, in all: of the estimate, and of a resample
_PSEUDO_ROWS = 2.0 ** np.arange(-1, 8)  # for each class, among which held-out rows choose
_FOLDS = 5
# Times as many of those rows for the correction: labels suffer more by noise than the likelihood of the rows does.
_MORE = 4
# What a temperature gains on the source's rows, in nats a row, from which on the probabilities are not calibrated.
_GAIN = 0.01


@dataclass(frozen=True, eq=False)
class PriorEstimate:
    """The class frequencies in unlabelled data; made by `estimate_prior`.

    Args:
        method: "em", "bbse" or "bbse_soft".
        prior: (C,) the estimated shares, above 0, which sum to 1.
        interval: (C, 2) 95% bootstrap interval of each share, which is not shrunk.
        train_prior: (C,) the shares that the probabilities assume.
        pseudo_rows: rows of the train prior that the shares are shrunk towards it by.
        p_value: of the test that the frequencies are those of the source.
        n_rows: how many unlabelled rows there were.
        corrected_to: (C,) the shares that `correction` takes: with "em" shrunk further than `prior`.
        calibrated: False where the source's labels say that the probabilities are not, and "em" needs them to be.
    """

    method: Method
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
        """Whether `correction` corrects anything."""
        return self.shifted and self.calibrated

    def correction(self, scaler: Any = None) -> PriorCorrection:
        """The correction to these frequencies, after a fitted scaler where one is given.

        Where they do not differ significantly from the source's, or come from probabilities that are not calibrated,
        it corrects nothing, and a warning says so.
        """
        if not self.calibrated:
            warnings.warn(
                "The probabilities are not calibrated, so they are not corrected for other class frequencies: the "
                "correction would do more harm than good. Calibrate them first, or use method='bbse_soft'.",
                UserWarning,
                stacklevel=2,
            )
        elif not self.shifted:
            message = (
                f"The class frequencies of the {self.n_rows:,} target rows do not differ significantly from the "
                f"source's (p = {self.p_value:.2f}), so they are not corrected; use more target "
                "rows, or give the target prior."
            )
            warnings.warn(message, UserWarning, stacklevel=2)
        target = self.corrected_to if self.corrects else self.train_prior
        return PriorCorrection(self.train_prior, target, scaler)

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        names = ("prior", "interval", "train_prior", "corrected_to")
        arrays = {name: getattr(self, name).tolist() for name in names}
        return {**vars(self), **arrays, "shifted": self.shifted}


def estimate_prior(
    probs: ArrayLike,
    *,
    source_probs: ArrayLike | None = None,
    source_labels: ArrayLike | None = None,
    train_prior: ArrayLike | None = None,
    method: Method = "em",
    n_resamples: int = 200,
    seed: int = 0,
) -> PriorEstimate:
    r"""Estimate how often each class occurs in unlabelled data, and whether that differs from the source.

    It assumes label shift: the classes come with other frequencies, and each looks as before. A class that
    the model does not know, or texts of another kind, are not found by this.

    "em" maximises the likelihood of the rows, which needs calibrated probabilities; it is the most precise.
    "bbse" solves for the shares that explain how often each class is predicted, given the confusion matrix on
    the source rows; it needs no calibration, but a confusion matrix that can be inverted. "bbse_soft" uses
    mean probabilities in place of predictions, and so more of what the model says.

    $$\hat\pi = \arg\max_q \sum_i \log \sum_k \frac{q_k}{\pi^{train}_k} p_k(x_i) \quad (EM), \qquad
      \sum_k \hat P(\hat y = j \mid y = k)\, \hat\pi_k = \hat P^{target}(\hat y = j) \quad (BBSE)$$

    Args:
        probs: (N, C) a calibrated model's probabilities on the unlabelled target rows.
        source_probs: (M, C) its probabilities on rows of the source, best ones that it was not calibrated on.
        source_labels: (M,) int: the two BBSE need them; "em" warns by them where the probabilities are not calibrated,
            and `correction` then refuses.
        train_prior: (C,) for "em" without source rows: the shares that the probabilities assume, or class
            counts, taken as exact.
        method: "em", "bbse" or "bbse_soft".
        n_resamples: for the intervals and the test, at least 1.
        seed: of the resamples.

    Returns:
        The shares with their intervals, and the test whether they differ from the source's at all.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if values are not probabilities; if there are fewer than two rows, or all are alike; if a
            class is absent in the source; if the confusion matrix cannot be inverted.

    Notes:
        With source rows, their mean probability is the train prior, so that a bias that is left in the
        calibration is not taken for a shift. The test is a permutation test of source and target rows on the
        mean probabilities (for "bbse" on how often each class is predicted). Without a shift it finds one in
        at most 5% of cases whatever the model, as long as both kinds of rows are new to it: hence source rows
        other than those of the calibration. It finds a change of the texts, too. With a train prior only, the
        test is the likelihood ratio test of EM, with C - 1 degrees of freedom.

        Shares are shrunk towards the train prior as if by more rows of it, so that none is 0: by C / 2, or with "em"
        by as many of C / 2, C, 2 C ... 128 C as give rows that were held out the highest likelihood (five folds of
        the target rows). With many classes and few rows, EM alone takes noise for a shift: on 500 rows of
        CLINC150's 150 intents with about their source's frequencies, correcting by it raises the NLL by .06 to .08
        nats, with the chosen shrinkage by .01, and with a real shift it loses next to nothing by it.

        The intervals are percentiles of the Bayesian bootstrap, of source and target rows and of C / 2 rows that are
        added, with which and a perfect classifier they are Jeffreys' intervals of a multinomial. They do not hold the
        uncertainty of the calibration map: in draws of 77 classes, and of a network with a temperature, they held 86 to
        96% of the shares.

        Which of two classes that are easily confused is the more frequent hardly changes the likelihood of the rows,
        but all the more that of their labels. So with "em" the correction takes shares that are shrunk by four times
        as many rows as the likelihood asks for. Of shifts that were drawn for classifiers of 4 to 150 classes, whole
        corrections raised the NLL in some by up to .29 nats (.046 where the classifier was good), these by half as
        much, and on average they gain more or, with 150 classes, .003 less; the largest gains are up to a quarter
        smaller.

        EM is accelerated by squared extrapolation, and stops when a step gains less than 1e-6 nats in all.

    References:
        Saerens, Latinne and Decaestecker 2002, "Adjusting the outputs of a classifier to new a priori
        probabilities", section 2.3; Lipton, Wang and Smola 2018, "Detecting and correcting for label shift with
        black box predictors", Eq. 3; Alexandari et al. 2020, for the mean probability; Rabanser, Guennemann and
        Lipton 2019, "Failing loudly", for tests of outputs; Varadhan and Roland 2008, for the extrapolation.

    >>> rng = np.random.default_rng(0)
    >>> def draw(n, share):  # two classes, one normal feature
    ...     labels = (rng.random(n) < share).astype(int)
    ...     p = 1 / (1 + np.exp(-2 * rng.normal(2 * labels - 1)))
    ...     return np.stack([1 - p, p], axis=1), labels
    >>> source_probs, source_labels = draw(2000, 0.5)
    >>> found = estimate_prior(draw(2000, 0.2)[0], source_probs=source_probs)
    >>> found.prior.round(2), found.shifted
    (array([0.78, 0.22]), True)
    """
    check_choice("method", method, METHODS)
    check_n_resamples(n_resamples)
    rng = np.random.default_rng(check_seed(seed))
    target = check_probs(probs).astype(np.float64)
    n_classes = target.shape[1]
    if len(target) < 2 or np.ptp(target, axis=0).max() < _ALIKE:
        got = "one row" if len(target) < 2 else f"{len(target)} rows that are all alike"
        way_out = "pass the model's probabilities on many different texts"
        raise InputValueError(expected("probs", "hold rows that differ", got, way_out))
    if (source_probs is None) == (train_prior is None):
        got = "neither" if source_probs is None else "both"
        way_out = "source_probs are the better choice"
        raise InputValueError(expected("source_probs or train_prior", "be given", got, way_out))
    if method != "em" and (source_probs is None or source_labels is None):
        way_out = "or use method='em'"
        requirement = f"be given with method={method!r}"
        raise InputValueError(expected("source_probs and source_labels", requirement, "not both", way_out))

    if source_probs is None:
        assert train_prior is not None
        source, train = None, as_prior("train_prior", train_prior)
        _check_classes("train_prior", len(train), n_classes)
    else:
        source = check_probs(source_probs, argument="source_probs").astype(np.float64)
        _check_classes("source_probs", source.shape[1], n_classes)
        train = source.mean(axis=0)
        if not train.all():
            got = f"0 in all rows for {few([f'class {k}' for k in np.flatnonzero(train == 0)])}"
            way_out = "leave out the columns of classes that the model cannot predict"
            requirement = "give every class some probability"
            raise InputValueError(expected("source_probs", requirement, got, way_out))

    pseudo_rows = n_classes / 2
    pseudo = pseudo_rows * train[:, None]
    ones = np.ones((len(target), 1))
    calibrated = True
    if method == "em":
        if source is not None and source_labels is not None:
            calibrated = _is_calibrated(*check_probs_and_labels(source, source_labels))
        start = train[:, None]
        pseudo_rows = _chosen_pseudo_rows(target, start, np.random.default_rng([seed, 1]))
        prior = _maximum_likelihood(target, start, ones, pseudo_rows * start, start, _NATS[0])
        more = _MORE * pseudo_rows * start
        corrected_to = _maximum_likelihood(target, start, ones, more, start, _NATS[0])
        resampled = [
            _maximum_likelihood(
                target,
                start if source is None else _weighted_means(source, rng, block),
                rng.exponential(size=(len(target), block)),
                _gammas(pseudo, rng, block),
                prior,
                _NATS[1],
            )
            for block in _blocks(n_resamples, len(target))
        ]
    else:
        assert source is not None
        assert source_labels is not None
        _, labels = check_probs_and_labels(source, source_labels)
        one_hot = np.eye(n_classes)[labels]
        if not one_hot.any(axis=0).all():
            got = f"none of {few([f'class {k}' for k in np.flatnonzero(~one_hot.any(axis=0))])}"
            way_out = "use method='em', or more labelled rows"
            raise InputValueError(expected("source_labels", "hold every class", got, way_out))
        said, said_source = (
            np.eye(n_classes)[rows.argmax(axis=1)] if method == "bbse" else rows for rows in (target, source)
        )
        confusion = said_source.T @ (one_hot / one_hot.sum(axis=0))
        rank = np.linalg.matrix_rank(confusion)
        if rank < n_classes:
            never = np.flatnonzero(~said_source.any(axis=0))
            got = f"one of rank {rank} of {n_classes}"
            got += f", as {few([f'class {k}' for k in never])} is never predicted" if len(never) else ""
            way_out = f"use method='em'{' or bbse_soft' * (method == 'bbse')}, or more labelled rows"
            raise InputValueError(expected("the confusion matrix", "be invertible", got, way_out))
        prior = corrected_to = _black_box(said, one_hot, said_source, ones, np.ones((len(source), 1)), pseudo)
        resampled = [
            _black_box(
                said,
                one_hot,
                said_source,
                rng.exponential(size=(len(target), block)),
                rng.exponential(size=(len(source), block)),
                _gammas(pseudo, rng, block),
            )
            for block in _blocks(n_resamples, len(target) + len(source))
        ]
    if source is None:
        ratio = 2 * float(np.log(target @ (prior[:, 0] / train)).sum())
        p_value = float(chi2.sf(ratio, n_classes - 1))
    elif method == "em":
        p_value = _permutation_test(target, source, n_resamples, rng)
    else:
        p_value = _permutation_test(said, said_source, n_resamples, rng)
    ends = np.quantile(np.concatenate(resampled, axis=1), [LEVEL / 2, 1 - LEVEL / 2], axis=1)
    return PriorEstimate(
        method=method,
        prior=prior[:, 0],
        interval=ends.T,
        train_prior=train,
        pseudo_rows=pseudo_rows,
        p_value=p_value,
        n_rows=len(target),
        corrected_to=corrected_to[:, 0],
        calibrated=calibrated,
    )


def _chosen_pseudo_rows(target: FloatArray, train: FloatArray, rng: np.random.Generator) -> float:
    """How many rows of the train prior (C, 1), with EM on the other rows, make held-out rows the most likely."""
    rows = len(train) * _PSEUDO_ROWS
    folds = rng.permutation(np.arange(len(target)) % min(_FOLDS, len(target)))
    likelihood = np.zeros(len(rows))
    for fold in range(folds.max() + 1):
        fitted_on = np.repeat((folds != fold)[:, None].astype(np.float64), len(rows), axis=1)
        found = _maximum_likelihood(target, train, fitted_on, rows * train, train, _NATS[1])
        likelihood += np.log(target[folds == fold] @ (found / train)).sum(axis=0)
    return float(rows[likelihood.argmax()])


def _is_calibrated(probs: FloatArray, labels: NDArray[np.int64]) -> bool:
    """Whether no temperature would make the source's rows clearly more likely; warn if not."""
    logits = np.log(np.maximum(probs, np.finfo(np.float64).tiny))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows that are all right
        scaler = TemperatureScaling().fit(logits, labels)
    rows = np.arange(len(labels))
    gains = log_softmax(scaler.transform(logits), axis=1)[rows, labels] - logits[rows, labels]
    gain = float(gains.mean())
    if gain <= max(_GAIN, 2 * gains.std() / np.sqrt(len(gains))):
        return True
    warnings.warn(
        f"The probabilities are not calibrated on the source's rows: a temperature of {scaler.temperature_:.3g} "
        f"lowers their negative log-likelihood by {gain:.3f} nats. Shares that EM finds with them are off. "
        "Calibrate first, or use method='bbse_soft'.",
        UserWarning,
        stacklevel=3,
    )
    return False


def _maximum_likelihood(
    probs: FloatArray,
    train: FloatArray,
    weights: FloatArray,
    pseudo: FloatArray,
    start: FloatArray,
    nats: float,
) -> FloatArray:
    """The shares (C, B) of B resamples by EM, extrapolated every other step.

    Args:
        probs: (N, C).
        train: (C, B) or (C, 1), the shares that the probabilities assume.
        weights: (N, B) of the rows.
        pseudo: (C, B) weights of rows whose class is known, above 0.
        start: (C, B) or (C, 1).
        nats: where to stop: what a step of EM gains at least, in all.
    """
    total = weights.sum(axis=0) + pseudo.sum(axis=0)
    shape = pseudo.shape
    train = np.broadcast_to(train, shape)
    found = np.broadcast_to(start, shape).copy()

    def step(shares: FloatArray, chosen: NDArray[Any]) -> tuple[FloatArray, FloatArray]:
        """One step of EM, and the objective before it."""
        ratio = shares / train[:, chosen]
        mixed = probs @ ratio
        expected_rows = ratio * (probs.T @ (weights[:, chosen] / mixed)) + pseudo[:, chosen]
        objective = (weights[:, chosen] * np.log(mixed)).sum(axis=0)
        objective += (pseudo[:, chosen] * np.log(shares)).sum(axis=0)
        return expected_rows / total[chosen], objective

    running = np.arange(shape[1])
    for _ in range(_MOST_CYCLES):
        shares = found[:, running]
        once, objective = step(shares, running)
        twice, _ = step(once, running)
        found[:, running] = twice
        gained = total[running] * (twice * np.log(twice / once)).sum(axis=0)
        # Squared extrapolation of the logarithms, taken where it is no worse than the two steps' start.
        change = np.log(once) - np.log(shares)
        bend = np.log(twice) - np.log(once) - change
        size = np.linalg.norm(change, axis=0) / np.maximum(np.linalg.norm(bend, axis=0), 1e-300)
        size = np.clip(size, 1, 1e6)
        far = np.log(shares) + 2 * size * change + size**2 * bend
        far = np.maximum(np.exp(far - far.max(axis=0)), 1e-300)
        leap, reached = step(far / far.sum(axis=0), running)
        better = (reached >= objective) & (gained >= nats)
        found[:, running[better]] = leap[:, better]
        running = running[gained >= nats]
        if not len(running):
            break
    return found


def _black_box(
    said: FloatArray,
    one_hot: FloatArray,
    said_source: FloatArray,
    weights: FloatArray,
    source_weights: FloatArray,
    pseudo: FloatArray,
) -> FloatArray:
    """The shares (C, B) of B resamples by BBSE: what is below 0 is 0, and `pseudo` rows (C, B) are added."""
    frequencies = said.T @ (weights / weights.sum(axis=0))
    solved = np.empty_like(pseudo)
    for b, row_weights in enumerate(source_weights.T):
        labelled = one_hot * row_weights[:, None]
        confusion = said_source.T @ (labelled / labelled.sum(axis=0))
        solved[:, b] = np.linalg.solve(confusion, frequencies[:, b])
    solved = np.maximum(solved, 0)
    rows = solved / solved.sum(axis=0) * weights.sum(axis=0) + pseudo
    return rows / rows.sum(axis=0)


def _permutation_test(
    target: FloatArray, source: FloatArray, n_resamples: int, rng: np.random.Generator
) -> float:
    """The p-value of the sum of the fourth powers of all classes' z-scores, among random splits of all rows.

    Squares would drown one class that moves among many; the largest alone misses many that move a little.
    """
    rows = np.concatenate([target, source])
    spread = rows.std(axis=0)
    varied = spread > 1e-12
    scores = (rows[:, varied] - rows[:, varied].mean(axis=0)) / spread[varied]
    found = (scores[: len(target)].sum(axis=0) ** 4).sum()
    as_far = 0
    for block in _blocks(n_resamples, len(rows)):
        order = rng.random((block, len(rows))).argpartition(len(target) - 1, axis=1)
        chosen = np.zeros((block, len(rows)))
        np.put_along_axis(chosen, order[:, : len(target)], 1.0, axis=1)
        distances = ((chosen @ scores) ** 4).sum(axis=1)
        as_far += int(np.count_nonzero(distances >= found * (1 - 1e-9)))
    return (1 + as_far) / (1 + n_resamples)


def _blocks(n_resamples: int, n_rows: int) -> Iterator[int]:
    """Numbers of resamples that add up, whose weights fit in memory."""
    size = max(1, _BLOCK // n_rows)
    while n_resamples > 0:
        yield min(size, n_resamples)
        n_resamples -= size


def _weighted_means(rows: FloatArray, rng: np.random.Generator, n_resamples: int) -> FloatArray:
    """(C, B) means of rows (M, C), each with the weights of a Bayesian bootstrap."""
    weights = rng.exponential(size=(len(rows), n_resamples))
    return rows.T @ (weights / weights.sum(axis=0))


def _gammas(pseudo: FloatArray, rng: np.random.Generator, n_resamples: int) -> FloatArray:
    """(C, B) the weights of that many rows; above 0."""
    drawn = rng.gamma(np.broadcast_to(pseudo, (len(pseudo), n_resamples)))
    return np.maximum(drawn, 1e-12)


def _check_classes(argument: str, n_found: int, n_classes: int) -> None:
    if n_found != n_classes:
        way_out = "take both from one model"
        raise InputValueError(expected(argument, f"have the {n_classes} classes of probs", n_found, way_out))
