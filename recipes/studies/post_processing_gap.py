"""The post-processing gap after training with focal calibration loss, against gamma and lambda.

    python recipes/studies/post_processing_gap.py --data sklearn/20newsgroups

This follows Figure 6 of "Focal calibration loss" (FCL) and its Theorem 4.5, according to which a larger weight of the
Brier term gives a smaller post-processing gap. The heat maps show the ECE and the gap of the Brier score on the test
set against gamma and lambda; another figure shows the test NLL by epoch. The gap has two forms: over 1-Lipschitz
*updates* of the confidence, as in Blasiok et al. 2023, and over 1-Lipschitz *maps*, as in Definition 2.3 of FCL. The
network is a global-pooling CNN with one convolution on posts of 20 Newsgroups. It takes about 6 minutes on 2 cores.
"""

import argparse
import time
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from newsgroups_tensors import load_posts, outputs, train_by_epoch
from options import at_least_0, check_seeds, count, output_folder
from papers.post_processing import post_processing_gap
from records import kind_of_intervals, over_seeds, write_record
from scipy.special import softmax
from scipy.stats import spearmanr

from hf_calib.losses import make_loss
from hf_calib.metrics import (
    accuracy,
    expected_calibration_error,
    negative_log_likelihood,
    smooth_calibration_error_dual,
)
from hf_calib.plots import save_figure

MAX_LENGTH = 100  # words of a post

parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
)
parser.add_argument(
    "--data", default="sklearn/20newsgroups", help="Of the Hub, or a folder."
)
parser.add_argument("--output", type=output_folder, default="outputs/studies")
parser.add_argument("--seeds", type=int, nargs="+", default=[0])
parser.add_argument("--gammas", type=at_least_0, nargs="+", default=[0, 1, 3, 5])
parser.add_argument("--lambdas", type=at_least_0, nargs="+", default=[0, 0.5, 1.5, 4.5])
parser.add_argument("--epochs", type=count, default=14)
parser.add_argument("--rows", type=count, default=2000)
parser.add_argument(
    "--full",
    action="store_true",
    help="A grid of 6 x 7, 3 seeds, 6,000 posts: 2 hours.",
)
args = parser.parse_args()
check_seeds(parser, args.seeds)
for name, values, at_least in (
    ("gammas", args.gammas, 1),
    ("lambdas", args.lambdas, 2),
):
    if len(values) < at_least or len(set(values)) < len(values):
        got = " ".join(f"{value:g}" for value in values)
        parser.error(
            f"argument --{name}: expected at least {at_least}, all different, got {got}"
        )
if args.full:
    args.gammas, args.lambdas = [0, 1, 2, 3, 4, 5], [0, 0.25, 0.5, 1, 1.5, 3, 4.5]
    args.seeds, args.rows = [0, 1, 2], 6000

(train, train_labels), (test, test_labels), sizes = load_posts(
    args.data, rows=args.rows, test_rows=3000, max_length=MAX_LENGTH
)

MEASURES = {  # name in the JSON -> what is drawn
    "ece": "ECE, %",
    "gap_over_updates": "post-processing gap over updates, Brier x 100",
    "gap_over_maps": "post-processing gap over maps, Brier x 100",
}
started = time.perf_counter()
results = []
for seed, gamma, weight in product(args.seeds, args.gammas, args.lambdas):
    loss = make_loss("focal_calibration", gamma=gamma, brier_weight=weight)
    training = train_by_epoch(
        train, train_labels, sizes, loss, seed=seed, epochs=args.epochs, batch_size=32
    )
    nll = []
    for model in training:
        probs = softmax(outputs(model, test)[0].double().numpy(), axis=1)
        nll.append(negative_log_likelihood(probs, test_labels))
    results.append(
        {
            "seed": seed,
            "gamma": gamma,
            "lambda": weight,
            "accuracy": accuracy(probs, test_labels),
            "mean_confidence": probs.max(axis=1).mean(),
            "ece": expected_calibration_error(probs, test_labels),
            "gap_over_updates": post_processing_gap(
                probs, test_labels, smooth="update"
            ),
            "gap_over_maps": post_processing_gap(probs, test_labels, smooth="map"),
            "smooth_calibration_error_dual": smooth_calibration_error_dual(
                probs, test_labels
            ),
            "nll_by_epoch": nll,
        }
    )


# Over the seeds.
measured = ("accuracy", "mean_confidence", *MEASURES, "smooth_calibration_error_dual")
cells, nll_by_epoch = {}, {}
for cell in product(args.gammas, args.lambdas):
    rows = [r for r in results if (r["gamma"], r["lambda"]) == cell]
    cells[cell] = {
        measure: over_seeds([r[measure] for r in rows]) for measure in measured
    }
    nll_by_epoch[cell] = np.mean([r["nll_by_epoch"] for r in rows], axis=0)


def mean(measure, gamma, weight):
    return cells[gamma, weight][measure]["value"]


# Heat maps: lighter is larger, in colour and in grey.
figure = Figure(figsize=(3 * len(MEASURES), 3.1), layout="constrained")
for panel, (measure, title) in zip(
    figure.subplots(1, len(MEASURES)), MEASURES.items(), strict=True
):
    grid = 100 * np.array(
        [[mean(measure, g, w) for w in args.lambdas] for g in args.gammas]
    )
    panel.imshow(grid, origin="lower", cmap="cividis", aspect="auto")
    bright = grid > (grid.min() + grid.max()) / 2
    for (down, across), value in np.ndenumerate(grid):
        ink = "black" if bright[down, across] else "white"
        panel.text(
            across,
            down,
            f"{value:.2f}",
            ha="center",
            va="center",
            fontsize=8,
            color=ink,
        )
    panel.set_xticks(range(len(args.lambdas)), [f"{w:g}" for w in args.lambdas])
    panel.set_yticks(range(len(args.gammas)), [f"{g:g}" for g in args.gammas])
    panel.set_xlabel("lambda, weight of the Brier term", fontsize=8)
    panel.set_ylabel("gamma", fontsize=8)
    panel.set_title(title, fontsize=8)
    panel.tick_params(labelsize=8)
save_figure(figure, args.output / "post_processing_gap.png")

# Test NLL by epoch: a panel each gamma, a line each lambda.
figure = Figure(figsize=(2.3 * len(args.gammas), 2.7), layout="constrained")
panels = figure.subplots(1, len(args.gammas), sharex=True, sharey=True, squeeze=False)[
    0
]
colours = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
dashes = (
    ":",
    "-",
    (0, (5, 1.5)),
    (0, (5, 1.5, 1, 1.5)),
    (0, (8, 2)),
    (0, (1, 1)),
    (0, (3, 1, 1, 1)),
)
for panel, gamma in zip(panels, args.gammas, strict=True):
    for weight, colour, dash in zip(args.lambdas, colours, dashes, strict=False):
        panel.plot(
            range(1, args.epochs + 1),
            nll_by_epoch[gamma, weight],
            color=colour,
            linestyle=dash,
            label=f"lambda {weight:g}",
        )
    panel.set_title(f"gamma {gamma:g}", fontsize=9)
    panel.set_xlabel("epoch", fontsize=8)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
panels[0].set_ylabel("test NLL, nats", fontsize=8)
panels[0].legend(fontsize=7, frameon=False)
save_figure(figure, args.output / "post_processing_gap_nll.png")

# Theorem 4.5 says that the gap does not grow with lambda: the rank correlation would be -1 for each gamma.
order = [
    {
        "gamma": gamma,
        "spearman_of_lambda_and_gap_over_updates": float(
            spearmanr(
                args.lambdas, [mean("gap_over_updates", gamma, w) for w in args.lambdas]
            ).statistic
        ),
        "least_gap_at_lambda": min(
            args.lambdas, key=lambda w: mean("gap_over_updates", gamma, w)
        ),
        "least_ece_at_lambda": min(args.lambdas, key=lambda w: mean("ece", gamma, w)),
    }
    for gamma in args.gammas
]
record = {
    "settings": {
        "data": Path(args.data).name,
        "gammas": args.gammas,
        "lambdas": args.lambdas,
        "epochs": args.epochs,
        "train_rows": len(train),
        "test_rows": len(test),
        "max_length": MAX_LENGTH,
    },
    "seeds": args.seeds,
    "intervals": kind_of_intervals(args.seeds),
    "seconds": round(time.perf_counter() - started),
    "order": order,
    "summary": [
        {"gamma": gamma, "lambda": weight} | cell
        for (gamma, weight), cell in cells.items()
    ],
    "results": results,
}
path = args.output / "post_processing_gap.json"
write_record(path, record)

print(
    f"{'gamma':>5} {'lambda':>6} {'accuracy':>8} {'ECE %':>6} {'gap: updates':>12} {'maps':>7} {'smCE':>7}"
)
for gamma, weight in product(args.gammas, args.lambdas):
    keys = ("accuracy", *MEASURES, "smooth_calibration_error_dual")
    right, ece, updates, maps, smooth = (mean(key, gamma, weight) for key in keys)
    print(
        f"{gamma:5g} {weight:6g} {right:8.3f} {100 * ece:6.2f} {updates:12.5f} {maps:7.5f} {smooth:7.4f}"
    )
print(
    f"Intervals over the seeds: {record['intervals']}. {record['seconds']} s. Wrote {path}"
)
