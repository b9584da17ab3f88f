"""Rows that two sets of predictions share: those that a scaler was fitted on among those that are reported."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_expit, log_softmax

from hf_calib.predictions.predictions import Predictions

_BEYOND_CHANCE = 2  # times as many rows in both files as coincide within them, for these to be the same
_SHARE_OF_DISTINCT_ROWS = 0.9  # below, rows of different examples coincide: scores were rounded


def rows_in_both(found: Predictions, tested: Predictions) -> int:
    """How many of the tested rows are also among those to fit on: the same labels and the same probabilities.

    Where scores were rounded, different examples coincide. Of 16-bit logits some do: no more in both files than
    within them. Where it is many, only the very same rows count.
    """
    keys = [_row_keys(predictions) for predictions in (found, tested)]
    (fitted, n_fitted), (reported, n_reported) = (np.unique(key, return_counts=True) for key in keys)
    _, i, j = np.intersect1d(fitted, reported, assume_unique=True, return_indices=True)
    shared = int(np.minimum(n_fitted[i], n_reported[j]).sum())
    if shared == len(found) == len(tested):
        return shared
    distinct = len(reported) >= _SHARE_OF_DISTINCT_ROWS * len(tested)
    twins_of_fitted, twins_of_reported = (n[n > 1].sum() for n in (n_fitted, n_reported))
    by_chance = max(twins_of_fitted * len(tested) / len(found), twins_of_reported * len(found) / len(tested))
    return shared if distinct and shared > _BEYOND_CHANCE * by_chance else 0


def _row_keys(predictions: Predictions) -> NDArray[np.uint64]:
    """(N,) a hash of each row's labels and log-probabilities, to four decimals: logits and probabilities agree."""
    logits = predictions.as_logits().astype(np.float64)
    log_probs = log_expit(logits) if predictions.kind.sigmoid else log_softmax(logits, axis=1)
    # Below, a probability read from float32 is not that of the logits.
    digits = np.rint(np.maximum(log_probs, -15.0) * 1e4).astype(np.int64)
    labels = predictions.labels.reshape(len(predictions), -1).astype(np.int64)
    columns = np.concatenate([labels, digits], axis=1).view(np.uint64)
    factors = np.random.default_rng(0).integers(2**63, size=columns.shape[1], dtype=np.uint64) | np.uint64(1)
    return columns @ factors
