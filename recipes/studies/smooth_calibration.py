"""The smooth calibration error of the theory: its relation to the post-processing gap, its bias, its time.

    python recipes/studies/smooth_calibration.py --data sklearn/20newsgroups

Definitions 2.2 and 2.3 of "Focal calibration loss" (FCL) are those of Blasiok et al. 2023: smCE is the supremum over
1-Lipschitz witnesses, and the post-processing gap of the Brier score is between smCE^2 and 2 smCE. The left panel shows
both for predictions of 20 Newsgroups by linear classifiers, with several strengths of regularisation and several
temperatures, and for simulated predictions. The middle panel shows the value of each error for calibrated predictions,
which is due to chance. The right panel shows the time against the number of rows, for the O(N log N) algorithm and for
the same linear program in scipy's HiGHS. It takes about 2 minutes on 2 cores.
"""

import argparse
import time
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from options import check_seeds, count, output_folder
from papers.newsgroups import StudyDataArguments, load_study_data
from papers.post_processing import post_processing_gap
from records import write_record
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
from hf_calib.plots import save_figure

parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
)
parser.add_argument(
    "--data", default="sklearn/20newsgroups", help="Of the Hub, or a folder."
)
parser.add_argument("--output", type=output_folder, default="outputs/studies")
parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
parser.add_argument("--rows", type=count, default=3000)
parser.add_argument(
    "--largest", type=count, default=100_000, help="Rows of the largest drawn sample."
)
parser.add_argument(
    "--largest_program",
    type=count,
    default=10_000,
    help="Rows of the largest linear program.",
)
parser.add_argument(
    "--full",
    action="store_true",
    help="Up to 1,000,000 rows, and 100,000 for the program.",
)
args = parser.parse_args()
check_seeds(parser, args.seeds)
if args.largest < 100:
    parser.error(f"argument --largest: expected at least 100 rows, got {args.largest}")
if args.full:
    args.largest, args.largest_program = 1_000_000, 100_000


def drawn(n_rows, seed, power):
    """Two-class predictions and labels; calibrated for power 1, over-confident above it."""
    rng = np.random.default_rng(seed)
    confidences = rng.uniform(0.5, 1, n_rows)
    right = rng.random(n_rows) < confidences**power
    return np.stack([confidences, 1 - confidences], axis=1), 1 - right.astype(int)


def by_linear_program(probs, labels):
    """smCE in scipy's words: witness values at the sorted confidences, neighbours tied to each other."""
    confidences = probs.max(axis=1)
    order = np.argsort(confidences)
    residuals = ((probs.argmax(axis=1) == labels) - confidences)[order] / len(order)
    rises = diags([-1.0, 1.0], [0, 1], shape=(len(order) - 1, len(order)), format="csr")
    steps = np.diff(confidences[order])
    found = linprog(
        -residuals, A_ub=vstack([rises, -rises]), b_ub=np.tile(steps, 2), bounds=(-1, 1)
    )
    return -found.fun


started = time.perf_counter()

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
labels = np.array(data["test"]["label"])
for strength in (0.1, 1, 10, 100):
    classifier = LogisticRegression(C=strength, max_iter=1000).fit(
        train, data["train"]["label"]
    )
    logits = classifier.decision_function(test)
    for temperature in (0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 3, 4):
        add_point(
            f"20 Newsgroups, C={strength:g}, T={temperature:g}",
            softmax(logits / temperature, 1),
            labels,
        )
for seed in args.seeds:
    for n_rows, power in product((100, 1000, 10_000), (1, 1.1, 1.5, 3)):
        if n_rows <= args.largest:
            add_point(
                f"drawn, N={n_rows}, power={power:g}", *drawn(n_rows, seed, power)
            )
smooth = np.array([point["smooth_calibration_error_dual"] for point in points])
gaps = np.array([point["gap_over_updates"] for point in points])
within = int(((smooth**2 <= gaps + 1e-9) & (gaps <= 2 * smooth + 1e-9)).sum())

# What chance shows, and the time.
ERRORS = {
    "smCE (dual)": smooth_calibration_error_dual,
    "smECE (kernel)": smooth_calibration_error,
    "ECE, 15 bins": expected_calibration_error,
}
sizes = [
    size
    for size in (100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
    if size <= args.largest
]
by_chance, times = [], []
for size in sizes:
    values = {
        name: [error(*drawn(size, seed, 1)) for seed in args.seeds]
        for name, error in ERRORS.items()
    }
    by_chance.append(
        {"rows": size} | {name: float(np.mean(value)) for name, value in values.items()}
    )
    probs, labels = drawn(size, 0, 1.5)
    begin = time.process_time()
    value = smooth_calibration_error_dual(probs, labels)
    times.append({"rows": size, "seconds": time.process_time() - begin, "value": value})
    if size <= args.largest_program:
        begin = time.process_time()
        by_program = by_linear_program(probs, labels)
        times[-1] |= {"seconds_of_the_program": time.process_time() - begin}
        times[-1] |= {"difference": abs(by_program - value)}

figure = Figure(figsize=(10, 3.2), layout="constrained")
relation, chance, speed = figure.subplots(1, 3)
grid = np.geomspace(smooth.min() / 1.5, 1, 50)
relation.plot(grid, grid**2, color="#000000", linestyle=":", label="smCE$^2$")
relation.plot(grid, 2 * grid, color="#000000", linestyle="--", label="2 smCE")
for start, marker, colour in (
    ("20 Newsgroups", "o", "#0072B2"),
    ("drawn", "x", "#D55E00"),
):
    mine = np.array([point["source"].startswith(start) for point in points])
    relation.scatter(
        smooth[mine],
        gaps[mine],
        s=12,
        marker=marker,
        color=colour,
        linewidths=0.8,
        label=start,
    )
relation.set(
    xscale="log",
    yscale="log",
    xlabel="smCE (dual)",
    ylabel="post-processing gap (updates, Brier)",
)
looks = (("o", "-", "#0072B2"), ("s", "--", "#D55E00"), ("^", ":", "#009E73"))
for name, (marker, dash, colour) in zip(ERRORS, looks, strict=True):
    chance.plot(
        sizes,
        [row[name] for row in by_chance],
        marker=marker,
        linestyle=dash,
        color=colour,
        ms=4,
        label=name,
    )
chance.set(
    xscale="log", yscale="log", xlabel="rows", ylabel="error of calibrated predictions"
)
speed.plot(
    sizes,
    [row["seconds"] for row in times],
    "o-",
    color="#0072B2",
    ms=4,
    label="O(N log N)",
)
solved = [row for row in times if "difference" in row]
speed.plot(
    [row["rows"] for row in solved],
    [row["seconds_of_the_program"] for row in solved],
    "s--",
    color="#D55E00",
    ms=4,
    label="linear program, HiGHS",
)
speed.set(xscale="log", yscale="log", xlabel="rows", ylabel="seconds")
for panel in (relation, chance, speed):
    panel.tick_params(labelsize=7)
    panel.xaxis.label.set_fontsize(8)
    panel.yaxis.label.set_fontsize(8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=7, frameon=False)
save_figure(figure, args.output / "smooth_calibration.png")

record = {
    "settings": {
        "data": Path(args.data).name,
        "train_rows": len(data["train"]),
        "test_rows": len(data["test"]),
        "largest": args.largest,
        "largest_program": args.largest_program,
    },
    "seeds": args.seeds,
    "seconds": round(time.perf_counter() - started),
    "samples": len(points),
    "samples_within_the_bounds": within,
    "least_ratio_of_gap_to_square": float((gaps / smooth**2).min()),
    "median_ratio_of_gap_to_square": float(np.median(gaps / smooth**2)),
    "largest_ratio_of_gap_to_twice": float((gaps / (2 * smooth)).max()),
    "largest_difference_to_the_program": max(
        (row["difference"] for row in solved), default=None
    ),
    "by_chance": by_chance,
    "times": times,
    "points": points,
}
path = args.output / "smooth_calibration.json"
write_record(path, record)

print(f"smCE^2 <= gap <= 2 smCE in {within} of {len(points)} samples")
print(
    f"gap / smCE^2: at least {record['least_ratio_of_gap_to_square']:.3f}, median "
    f"{record['median_ratio_of_gap_to_square']:.3f}; gap / 2 smCE: at most "
    f"{record['largest_ratio_of_gap_to_twice']:.3f}"
)
print(
    f"{'rows':>9} {'seconds':>8} {'program':>8} {'difference':>10} {'smCE by chance':>14}"
)
for row, chances in zip(times, by_chance, strict=True):
    program = (
        f"{row['seconds_of_the_program']:8.3f} {row['difference']:10.1e}"
        if "difference" in row
        else " " * 19
    )
    print(
        f"{row['rows']:9,} {row['seconds']:8.3f} {program} {chances['smCE (dual)']:14.4f}"
    )
print(f"{record['seconds']} s. Wrote {path}")
