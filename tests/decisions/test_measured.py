"""Results of rules on other rows: the mean and its interval."""

from __future__ import annotations

import numpy as np
from scipy.stats import binomtest

from hf_calib.decisions.measured import mean, share


def test_the_interval_of_a_share_is_exact_at_its_level() -> None:
    found = share(np.arange(40) < 31, confidence_level=0.9)
    wanted = binomtest(31, 40).proportion_ci(confidence_level=0.9, method="exact")
    np.testing.assert_allclose(found, (31 / 40, wanted.low, wanted.high), rtol=1e-9)


def test_the_interval_of_a_mean_is_the_quantiles_of_its_resamples() -> None:
    """Of so many rows that the resamples are drawn in several blocks."""
    values = np.random.default_rng(0).exponential(size=2_000)
    drawn = np.random.default_rng(3).integers(0, 2_000, (1_000, 2_000))
    low, high = np.quantile(values[drawn].mean(axis=1), [0.05, 0.95])
    found = mean(values, confidence_level=0.9, seed=3)
    np.testing.assert_allclose(found, (values.mean(), low, high), rtol=1e-12)
