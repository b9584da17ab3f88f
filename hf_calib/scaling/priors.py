"""Correction of a model's probabilities for known class frequencies."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import check, few
from hf_calib.metrics import checks
from hf_calib.metrics.checks import FloatArray
from hf_calib.scaling._base import as_fitted_logits
from hf_calib.scaling.affine import AffineMap, AffineScaling
from hf_calib.scaling.rows import as_matrix


class PriorCorrection(AffineScaling):
    r"""Correct a model for known class frequencies that differ from those of its training data.

    Use it after training on resampled data, or for label shift (Saerens et al. 2002, Eq. 2.4). It
    needs no `fit`. The guide on other class frequencies estimates unknown ones.

    $$\hat p_k \propto p_k\, \pi^{target}_k / \pi^{train}_k, \qquad
      z_k + \log \pi^{target}_k - \log \pi^{train}_k$$

    Args:
        train_prior: (C,) the frequencies that the probabilities assume, such as the mean
            probability of held-out rows: floats above 0 that sum to 1, or class counts as integers.
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
        # There may be no `fit` that would check them.
        self.priors()
        checks.check_type(
            scaler is None or hasattr(scaler, "affine_map"),
            "scaler to be an affine map of the logits",
            type(scaler).__name__,
            "fit a scaler that folds, such as TemperatureScaling or VectorScaling",
        )

    def fit(
        self, logits: ArrayLike, labels: ArrayLike | None = None
    ) -> PriorCorrection:
        """Check the logits; the labels are not used."""
        as_fitted_logits(as_matrix(logits, least_columns=2), self.n_classes_)
        return self

    def affine_map(self) -> AffineMap:
        """The affine map that `fold` writes into a head: that of the scaler, then the bias."""
        priors = self.priors()
        bias = np.log(priors["target_prior"]) - np.log(priors["train_prior"])
        # A weight of ones for each class, so that the map says how many classes it has.
        correction = AffineMap(np.ones(len(bias)), bias)
        if self.scaler is None:
            return correction
        return self.scaler.affine_map().then(correction)

    @property
    def n_classes_(self) -> int:
        return len(self.priors()["train_prior"])

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def priors(self) -> dict[str, FloatArray]:
        """Both priors by the names of the arguments."""
        train = _as_prior("train_prior", self.train_prior)
        target = _as_prior("target_prior", self.target_prior)
        check(
            len(train) == len(target),
            f"target_prior to have the {len(train)} classes of train_prior",
            len(target),
            "give each class its share, in the order of the logits",
        )
        return {"train_prior": train, "target_prior": target}


def _as_prior(argument: str, values: Any) -> FloatArray:
    """The shares (C,), float64, of a prior or of class counts; all must be above 0."""
    given = checks.as_array(argument, values)
    checks.check_kind(
        given,
        "fiu",
        f"{argument} to hold numbers",
        "pass shares as floats, or class counts as integers",
    )
    numbers = given.astype(np.float64)
    check(
        given.ndim == 1 and len(given) >= 2,
        f"{argument} to have shape (C,)",
        f"shape {given.shape}",
        "give one share per class",
    )

    # NaN is not above 0 either.
    absent = np.flatnonzero(~(numbers > 0))
    if len(absent):
        names = few([f"class {number}" for number in absent])
        check(
            False,
            f"{argument} to be above 0 for every class",
            f"{numbers[absent[0]]:g} for {names}",
            "give a class that may occur a small share (of counts: add 1 to each), "
            "and leave out others",
        )

    total = float(numbers.sum())
    # Integers are counts, which may have any sum.
    if given.dtype.kind == "f":
        is_one = abs(total - 1) <= checks.row_sum_tolerance(len(given))
        way_out = "divide it by its sum, or pass class counts as integers"
        check(is_one, f"{argument} to sum to 1", f"{total:.6g}", way_out)
    return numbers / total
