"""Prior correction: probabilities of a model for data whose classes come with other frequencies."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import InputTypeError, InputValueError, expected, few
from hf_calib.metrics.checks import ROW_SUM_TOLERANCE, as_array
from hf_calib.scaling._base import FloatArray, LogitScaling, as_fitted_logits
from hf_calib.scaling._inputs import as_matrix
from hf_calib.scaling.affine import AffineMap


class PriorCorrection(LogitScaling):
    r"""Move the biases of a model to other class frequencies than it was trained or calibrated with.

    Use it for a model that was trained with resampling or class weights, or that is used where its classes are
    rarer or more common, while texts of one class look as before (label shift). `estimate_prior` finds the
    frequencies in unlabelled data. Other scalers are fitted to labelled rows, and keep those rows' frequencies.

    $$\hat p_k \propto p_k \frac{\pi^{target}_k}{\pi^{train}_k}, \qquad
      z_k + \log \pi^{target}_k - \log \pi^{train}_k$$

    Args:
        train_prior: (C,) the frequencies that the probabilities assume: floats that sum to 1, or class counts
            as integers. After a map with biases (vector, matrix) these are the shares of its calibration rows;
            otherwise the mean of the probabilities there is the better choice.
        target_prior: (C,) the frequencies where the model is used, given likewise.
        scaler: a fitted scaler that folds, which is applied first; None corrects the logits as they are.

    Raises:
        TypeError: if a prior is not numeric, or the scaler is not an affine map of the logits.
        ValueError: if a prior holds NaN, values that are not above 0, or does not sum to 1; if the two priors
            are of other classes.

    Notes:
        Correct only calibrated probabilities: the order is scaler, then correction. Together they are one affine
        map of the logits, so `hf_calib.fold` writes both into the head at once.

    References:
        Saerens, Latinne and Decaestecker 2002, "Adjusting the outputs of a classifier to new a priori
        probabilities", Eq. 2.4; Alexandari et al. 2020, "Maximum likelihood with bias-corrected calibration is
        hard-to-beat at label shift adaptation", for the mean probability as the prior.

    >>> correction = PriorCorrection(train_prior=[0.5, 0.5], target_prior=[0.9, 0.1])
    >>> correction.predict_proba(np.log([[0.5, 0.5], [0.1, 0.9]]))
    array([[0.9, 0.1],
           [0.5, 0.5]])
    """

    def __init__(self, train_prior: ArrayLike, target_prior: ArrayLike, scaler: Any = None) -> None:
        self.train_prior = train_prior
        self.target_prior = target_prior
        self.scaler = scaler
        self._bias()
        if scaler is not None and not hasattr(scaler, "affine_map"):
            way_out = "fit a scaler that folds, such as TemperatureScaling or VectorScaling"
            got = type(scaler).__name__
            raise InputTypeError(expected("scaler", "be an affine map of the logits", got, way_out))

    def fit(self, logits: ArrayLike, labels: ArrayLike | None = None) -> PriorCorrection:
        """Check the logits; nothing is fitted, and the other methods work without it.

        Args:
            logits: (N, C).
            labels: not read.

        Returns:
            self.
        """
        as_fitted_logits(as_matrix(logits, least_columns=2), len(self._bias()))
        return self

    def transform(self, logits: ArrayLike) -> FloatArray:
        """Return the corrected logits in float64; logits of any shape that ends in C."""
        return self.affine_map()(as_fitted_logits(logits, len(self._bias())))

    def affine_map(self) -> AffineMap:
        """The affine map that `fold` writes into a classification head: the scaler's map, and then the bias."""
        bias = self._bias()
        own = AffineMap(np.ones(len(bias)), bias)
        return own if self.scaler is None else self.scaler.affine_map().then(own)

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def _bias(self) -> FloatArray:
        train, target = as_prior("train_prior", self.train_prior), as_prior("target_prior", self.target_prior)
        if len(train) != len(target):
            requirement = f"have the {len(train)} classes of train_prior"
            way_out = "give each class its share, in the order of the logits"
            raise InputValueError(expected("target_prior", requirement, len(target), way_out))
        return np.log(target) - np.log(train)


def as_prior(argument: str, values: ArrayLike) -> FloatArray:
    """Return the shares (C,) of a prior or of class counts, in float64; raise unless all are above 0."""
    given = as_array(argument, values)
    if given.dtype.kind not in "iuf":
        way_out = "pass shares as floats, or class counts as integers"
        raise InputTypeError(expected(argument, "hold numbers", f"dtype {given.dtype}", way_out))
    if given.ndim != 1 or len(given) < 2:
        way_out = "give one share per class"
        raise InputValueError(expected(argument, "have shape (C,)", f"shape {given.shape}", way_out))
    numbers = given.astype(np.float64)
    if not np.isfinite(numbers).all():
        way_out = "give each class a finite share"
        raise InputValueError(expected(argument, "be finite", "NaN or infinity", way_out))
    if (numbers <= 0).any():
        classes = np.flatnonzero(numbers <= 0)
        got = f"{numbers[classes[0]]:g} for {few([f'class {k}' for k in classes])}"
        way_out = "give a class that may occur a small share (of counts: add 1 to each), and leave out others"
        raise InputValueError(expected(argument, "be above 0 for every class", got, way_out))
    total = float(numbers.sum())
    if given.dtype.kind == "f" and abs(total - 1) > ROW_SUM_TOLERANCE:
        way_out = "divide it by its sum, or pass class counts as integers"
        raise InputValueError(expected(argument, "sum to 1", f"{total:.6g}", way_out))
    return numbers / total
