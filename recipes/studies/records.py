"""Results of studies: a JSON file, means over seeds, smoothed series."""

import json
import os

import numpy as np
import pandas as pd
from scipy.stats import ttest_1samp

from hf_calib._errors import check
from hf_calib.metrics import Interval


def write_record(path, record):
    """Write numbers as JSON, the whole file or none; NaN and infinity are errors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(
        json.dumps(record, indent=1, allow_nan=False, default=float) + "\n"
    )
    os.replace(unfinished, path)


def listed(values):
    """Numbers to four digits, None for NaN."""
    return [None if np.isnan(value) else float(f"{value:.4g}") for value in values]


def quartiles(values):
    return listed(np.quantile(values, [0.25, 0.5, 0.75])) if len(values) else None


def mean_interval(values):
    """Student's 95% interval of a mean over independent runs, as `Interval(value, low, high)`.

    For the difference of two methods, pass the differences of the runs that share a seed: what both have in common
    drops out.
    """
    holds = len(values) >= 2 and np.isfinite(values).all()
    check(
        holds,
        "values to be at least two numbers, all finite",
        values,
        "run more seeds, or look at those runs",
    )
    interval = ttest_1samp(values, 0).confidence_interval(0.95)
    return Interval(float(np.mean(values)), float(interval.low), float(interval.high))


def moving_average(series):
    """s_t = (s_(t-1) + x_t) / 2 from s_0 = x_0, as the dual focal paper smooths its figure 4a."""
    return pd.Series(series).ewm(alpha=0.5, adjust=False).mean().to_numpy()


def over_seeds(values):
    """{value, low, high}: the mean and its interval; of one seed the value alone; None where there is no number."""
    if not np.isfinite(values).all():
        return {"value": None, "low": None, "high": None}
    if len(values) == 1:
        return {"value": float(values[0]), "low": None, "high": None}
    return mean_interval(values)._asdict()


def kind_of_intervals(seeds):
    return "95%, Student's t over the seeds" if len(seeds) > 1 else "none: one seed"


def in_words(interval):
    """The mean with its interval, for a table."""
    value, low, high = interval["value"], interval["low"], interval["high"]
    if value is None:
        return "none"
    return (
        f"{value:.3f} (one seed)"
        if low is None
        else f"{value:.3f} [{low:.3f}, {high:.3f}]"
    )
