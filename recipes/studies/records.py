"""Results of studies: their files, means over seeds, smoothed series."""

import json
import time

import numpy as np
import pandas as pd
from markdown_tables import table_lines, with_interval
from scipy.stats import ttest_1samp

from hf_calib._errors import check
from hf_calib._files import whole_file
from hf_calib.metrics import Interval
from hf_calib.plots import save_figure


def write_study(name, args, record, figures):
    """Write the record and the figures, part -> figure; the part "" is of a study that has one figure.

    Each file is written whole or not at all. NaN and infinity are errors: JSON has neither.
    """
    seconds = round(time.perf_counter() - args.started, 1)
    common = {"seeds": getattr(args, "seeds", []), "seconds": seconds}
    text = json.dumps(common | record, indent=1, allow_nan=False, default=float)
    with whole_file(args.output / f"{name}.json") as unfinished:
        unfinished.write_text(text + "\n")
    for part, figure in figures.items():
        stem = f"{name}_{part}" if part else name
        save_figure(figure, args.output / f"{stem}.png")
    print(f"\nWritten to {args.output}/{name}*, {seconds:.0f} s")


def listed(values):
    """Numbers to four digits, None for NaN."""
    return [None if np.isnan(value) else float(f"{value:.4g}") for value in values]


def quartiles(values):
    return listed(np.quantile(values, [0.25, 0.5, 0.75])) if len(values) else None


def mean_interval(values):
    """Student's 95% interval of a mean over independent runs, as `Interval(value, low, high)`.

    For the difference of two methods, pass the differences of the runs that share a seed: what both
    have in common drops out.
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


def means_over_seeds(runs, by):
    """Group -> number -> its mean over the seeds, of runs with a group, a seed and any numbers each."""
    groups = {}
    for run in runs:
        groups.setdefault(run[by], []).append(run)
    numbers = [name for name in runs[0] if name not in (by, "seed")]
    return {
        group: {name: over_seeds([run[name] for run in of_group]) for name in numbers}
        for group, of_group in groups.items()
    }


def kind_of_intervals(seeds):
    return "95%, Student's t over the seeds" if len(seeds) > 1 else "none: one seed"


def in_words(mean):
    """A mean with its interval, for a table."""
    if mean["value"] is None:
        return "none"
    if mean["low"] is None:
        return f"{mean['value']:.3f} (one seed)"
    return with_interval(mean["value"], mean["low"], mean["high"])


def print_table(header, rows):
    print("", *table_lines(header, rows), sep="\n")


def print_means(header, means):
    """A row for each group of means."""
    rows = [[name, *map(in_words, row.values())] for name, row in means.items()]
    print_table(header, rows)
