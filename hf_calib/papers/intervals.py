"""The interval of a mean over runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics import Interval
from hf_calib.metrics.checks import as_floats, check_confidence_level


def mean_interval(values: ArrayLike, *, confidence_level: float = 0.95) -> Interval:
    r"""Student's interval of a mean over independent runs, such as seeds.

    For the differences of two methods, pass the differences of the runs that share a seed: what both have in
    common drops out. `bootstrap_interval` instead is about the examples of one run.

    $$\bar v \pm t_{R - 1} \, s / \sqrt{R}$$

    Args:
        values: (R,) finite numbers, one a run, at least two.
        confidence_level: of the interval, in (0, 1).

    Returns:
        The mean, and the ends of its interval.

    Raises:
        TypeError: if the values are not numbers.
        ValueError: for fewer than two values, or one that is not finite.

    >>> mean_interval([1.0, 2.0, 3.0])
    Interval(value=2.0, low=-0.484137..., high=4.484137...)
    """
    check_confidence_level(confidence_level)
    runs = as_floats("values", values)
    if runs.ndim != 1 or len(runs) < 2:
        way_out = "one run has no interval: run more seeds"
        raise InputValueError(
            expected("values", "be at least two numbers (R,)", f"shape {runs.shape}", way_out)
        )
    if not np.isfinite(runs).all():
        got = f"{(~np.isfinite(runs)).sum()} NaN or infinite of {len(runs)}"
        raise InputValueError(expected("values", "be finite", got, "look at those runs"))
    mean = float(runs.mean())
    reach = float(stdtrit(len(runs) - 1, (1 + confidence_level) / 2) * runs.std(ddof=1) / np.sqrt(len(runs)))
    return Interval(mean, mean - reach, mean + reach)
