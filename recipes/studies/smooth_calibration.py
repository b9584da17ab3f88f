"""The smooth calibration error of the theory: its relation to the post-processing gap, its bias, its time.

    python recipes/studies/smooth_calibration.py --data sklearn/20newsgroups

Definitions 2.2 and 2.3 of "Focal calibration loss" (FCL) are those of Blasiok et al. 2023: smCE is
the supremum over 1-Lipschitz witnesses, and the post-processing gap of the Brier score is between
smCE^2 and 2 smCE. The left panel shows both for predictions of 20 Newsgroups by linear classifiers,
with several strengths of regularisation and several temperatures, and for simulated predictions.
The middle panel shows the value of each error for calibrated predictions, which is due to chance.
The right panel shows the time against the number of rows, for the O(N log N) algorithm and for the
same linear program in scipy's HiGHS. It takes about 2 minutes on 2 cores.
"""

import time
from itertools import product
from pathlib import Path

import numpy as np
from options import count, parse, study_parser
from papers.newsgroups import NEWSGROUPS, StudyDataArguments, load_study_data
from papers.post_processing import post_processing_gap
from records import print_table, write_study
from scipy.optimize import linprog
from scipy.sparse import diags, vstack
from scipy.special import softmax
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from hf_calib.metrics import (
    accuracy,
    expected_calibration_error,
    smooth_calibration_error,
    smooth_calibration_error_dual,
)
from hf_calib.plots.style import BLUE, VERMILION, drawing, line_looks, plain_axes

parser = study_parser(__doc__, seeds=range(5), data=NEWSGROUPS)


def add_count(name, default, help=None):
    parser.add_argument(name, type=count, default=default, help=help)


add_count("--rows", 3000)
add_count("--largest", 100_000, "Rows of the largest drawn sample.")
add_count("--largest_program", 10_000, "Rows of the largest linear program.")
larger = "Up to 1,000,000 rows, and 100,000 for the program."
parser.add_argument("--full", action="store_true", help=larger)
args = parse(parser)
if args.largest < 100:
    parser.error(f"argument --largest: expected at least 100 rows, got {args.largest}")
if args.full:
    args.largest = 1_000_000
    args.largest_program = 100_000


def drawn(n_rows, seed, power):
    """Two-class predictions and labels; calibrated for power 1, over-confident above it."""
    rng = np.random.default_rng(seed)
    confidences = rng.uniform(0.5, 1, n_rows)
    right = rng.random(n_rows) < confidences**power
    return np.stack([confidences, 1 - confidences], axis=1), 1 - right.astype(int)


def by_linear_program(probs, labels):
    """smCE in scipy's words: witness values at the sorted confidences, neighbours tied to each other."""
    n = len(labels)
    confidences = probs.max(axis=1)
    order = np.argsort(confidences)
    right = probs.argmax(axis=1) == labels
    residuals = (right - confidences)[order] / n
    rises = diags([-1.0, 1.0], [0, 1], shape=(n - 1, n), format="csr")
    steps = np.diff(confidences[order])
    most = {"A_ub": vstack([rises, -rises]), "b_ub": np.tile(steps, 2)}
    return -linprog(-residuals, **most, bounds=(-1, 1)).fun


# The relation to the gap.
points = []


def add_point(source, probs, labels):
    points.append(
        {
            "source": source,
            "accuracy": accuracy(probs, labels),
            "smooth_calibration_error_dual": smooth_calibration_error_dual(
                probs, labels
            ),
            "smooth_calibration_error": smooth_calibration_error(probs, labels),
            "expected_calibration_error": expected_calibration_error(probs, labels),
            "gap_over_updates": post_processing_gap(probs, labels, smooth="update"),
            "gap_over_maps": post_processing_gap(probs, labels, smooth="map"),
        }
    )


data = load_study_data(
    StudyDataArguments(
        dataset=args.data,
        strip_headers=True,
        test_size=0.2,
        max_train_samples=args.rows,
        max_calibration_samples=1,
    )
)
words = TfidfVectorizer(sublinear_tf=True, min_df=2)
train = words.fit_transform(data["train"]["text"])
test = words.transform(data["test"]["text"])
test_labels = np.array(data["test"]["label"])
for strength in (0.1, 1, 10, 100):
    classifier = LogisticRegression(C=strength, max_iter=1000)
    classifier.fit(train, data["train"]["label"])
    logits = classifier.decision_function(test)
    for temperature in (0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 3, 4):
        source = f"20 Newsgroups, C={strength:g}, T={temperature:g}"
        add_point(source, softmax(logits / temperature, axis=1), test_labels)
for seed, n_rows, power in product(args.seeds, (100, 1000, 10_000), (1, 1.1, 1.5, 3)):
    if n_rows <= args.largest:
        source = f"drawn, N={n_rows}, power={power:g}"
        add_point(source, *drawn(n_rows, seed, power))
smooth = np.array([point["smooth_calibration_error_dual"] for point in points])
gaps = np.array([point["gap_over_updates"] for point in points])
within = (smooth**2 <= gaps + 1e-9) & (gaps <= 2 * smooth + 1e-9)

# What chance shows, and the time.
ERRORS = {
    "smCE (dual)": smooth_calibration_error_dual,
    "smECE (kernel)": smooth_calibration_error,
    "ECE, 15 bins": expected_calibration_error,
}
SIZES = (100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)


def timed(function, *arguments):
    begin = time.process_time()
    value = function(*arguments)
    return value, time.process_time() - begin


by_chance = []
times = []
for size in [size for size in SIZES if size <= args.largest]:
    row = {"rows": size}
    for name, error in ERRORS.items():
        values = [error(*drawn(size, seed, 1)) for seed in args.seeds]
        row[name] = float(np.mean(values))
    by_chance.append(row)
    sample = drawn(size, 0, 1.5)
    value, seconds = timed(smooth_calibration_error_dual, *sample)
    row = {"rows": size, "seconds": seconds, "value": value}
    if size <= args.largest_program:
        of_program, seconds = timed(by_linear_program, *sample)
        row["seconds_of_the_program"] = seconds
        row["difference"] = abs(of_program - value)
    times.append(row)
solved = [row for row in times if "difference" in row]


def column(rows, name):
    return [row[name] for row in rows]


with drawing(10, 3.2) as figure:
    relation, chance, speed = figure.subplots(1, 3)
    grid = np.geomspace(smooth.min() / 1.5, 1, 50)
    relation.plot(grid, grid**2, color="black", linestyle=":", label="smCE²")
    relation.plot(grid, 2 * grid, color="black", linestyle="--", label="2 smCE")
    for source, marker, colour in (
        ("20 Newsgroups", "o", BLUE),
        ("drawn", "x", VERMILION),
    ):
        own = [point["source"].startswith(source) for point in points]
        look = {"s": 12, "marker": marker, "color": colour, "linewidths": 0.8}
        relation.scatter(smooth[own], gaps[own], label=source, **look)
    relation.set_xlabel("smCE (dual)")
    relation.set_ylabel("post-processing gap (updates, Brier)")
    sizes = column(times, "rows")
    for name, look, marker in zip(ERRORS, line_looks(), "os^", strict=False):
        errors = column(by_chance, name)
        chance.plot(sizes, errors, marker=marker, ms=4, label=name, **look)
    chance.set(xlabel="rows", ylabel="error of calibrated predictions")
    look = {"color": BLUE, "ms": 4, "label": "O(N log N)"}
    speed.plot(sizes, column(times, "seconds"), "o-", **look)
    look = {"color": VERMILION, "ms": 4, "label": "linear program, HiGHS"}
    seconds = column(solved, "seconds_of_the_program")
    speed.plot(column(solved, "rows"), seconds, "s--", **look)
    speed.set(xlabel="rows", ylabel="seconds")
    plain_axes(*figure.axes)
    for axes in figure.axes:
        axes.set(xscale="log", yscale="log")
        axes.minorticks_off()
        # Powers of ten would be formulas, which figures in this style do not parse.
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend()

settings = {
    "data": Path(args.data).name,
    "train_rows": len(data["train"]),
    "test_rows": len(data["test"]),
    "largest": args.largest,
    "largest_program": args.largest_program,
}
numbers = {
    "samples": len(points),
    "samples_within_the_bounds": int(within.sum()),
    "least_ratio_of_gap_to_square": float((gaps / smooth**2).min()),
    "median_ratio_of_gap_to_square": float(np.median(gaps / smooth**2)),
    "largest_ratio_of_gap_to_twice": float((gaps / (2 * smooth)).max()),
    "largest_difference_to_the_program": max(
        column(solved, "difference"), default=None
    ),
}
print("smCE^2 <= gap <= 2 smCE:")
for name, number in numbers.items():
    print(f"{name}: {number}")
rows = []
for row, chances in zip(times, by_chance, strict=True):
    program = ["", ""]
    if "difference" in row:
        difference = f"{row['difference']:.1e}"
        program = [f"{row['seconds_of_the_program']:.3f}", difference]
    seconds = f"{row['seconds']:.3f}"
    rows.append(
        [f"{row['rows']:,}", seconds, *program, f"{chances['smCE (dual)']:.4f}"]
    )
print_table(["rows", "seconds", "program", "difference", "smCE by chance"], rows)
of_sizes = {"by_chance": by_chance, "times": times, "points": points}
record = {"settings": settings} | numbers | of_sizes
write_study("smooth_calibration", args, record, {"": figure})
