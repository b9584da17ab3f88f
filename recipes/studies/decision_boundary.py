"""Decision boundary and confidence of focal loss and focal calibration loss on two noisy moons.

    python recipes/studies/decision_boundary.py

The setting is that of "Focal calibration loss" (FCL), appendix A.11 and Fig. 7: noise 0.2, two hidden layers of 10
units, Adam, 500 epochs, gamma 10, and weight 1.5 of the Brier term. Cross entropy and the true posterior of the moons,
which is known, are added. Measured on new points: accuracy, ECE, NLL and the distance from the true posterior. Measured
on a grid of the plane: the length of the boundary, and the slope of the probability on it.

10 seeds take about half a minute on one core.
"""

import argparse
import time

import numpy as np
import torch
from matplotlib.figure import Figure
from options import check_seeds, count, output_folder
from papers.toys import two_moons_posteriors
from records import in_words, mean_interval, write_record
from sklearn.datasets import make_moons
from torch import nn

from hf_calib.losses import make_loss
from hf_calib.metrics import (
    accuracy,
    expected_calibration_error,
    negative_log_likelihood,
    true_calibration_error,
)
from hf_calib.plots import save_figure

NOISE, SIDE = 0.2, 161
GAMMA, BRIER_WEIGHT = 10.0, 1.5
BATCH_SIZE, LEARNING_RATE = (
    1_000,
    0.01,
)  # all points at once, Adam's rate: the paper says neither
BOX = (-1.7, 2.7, -1.2, 1.7)

parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
)
parser.add_argument("--output", type=output_folder, default="outputs/studies")
parser.add_argument(
    "--seeds",
    type=int,
    nargs="+",
    default=list(range(10)),
    help="At least two; the first is drawn.",
)
parser.add_argument(
    "--train_points", type=count, default=1_000, help="The paper does not say."
)
parser.add_argument("--test_points", type=count, default=10_000)
parser.add_argument("--epochs", type=count, default=500)
args = parser.parse_args()
check_seeds(parser, args.seeds, at_least=2)
start = time.perf_counter()

losses = {
    "cross entropy": make_loss("cross_entropy"),
    f"focal, gamma {GAMMA:g}": make_loss("focal", gamma=GAMMA),
    f"FCL, gamma {GAMMA:g}, lambda {BRIER_WEIGHT:g}": make_loss(
        "focal_calibration", gamma=GAMMA, brier_weight=BRIER_WEIGHT
    ),
}


def train(loss, points, labels):
    network = nn.Sequential(
        nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 2)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    points, labels = torch.tensor(points, dtype=torch.float32), torch.tensor(labels)
    for _ in range(args.epochs):
        for batch in torch.randperm(len(labels)).split(BATCH_SIZE):
            optimizer.zero_grad()
            loss(network(points[batch]), labels[batch]).backward()
            optimizer.step()
    return network


def predict(network, points):
    with torch.no_grad():
        return torch.softmax(
            network(torch.tensor(points, dtype=torch.float32)).double(), dim=1
        ).numpy()


def boundary(upper):
    """Length of the line p = 1/2 in the box, and the mean slope of p along it, weighted by length.

    By the coarea formula: the area where |p - 1/2| < w, weighted by the slope, is 2 w times the length.
    """
    up, across = np.gradient(upper, ys, xs)
    slope, half_width = np.hypot(across, up), 0.05
    near = np.abs(upper - 0.5) < half_width
    cell = (xs[1] - xs[0]) * (ys[1] - ys[0])
    length = (slope * near).sum() * cell / (2 * half_width)
    return float(length), float((slope**2 * near).sum() / (slope * near).sum())


# The map, and the truth on it.
xs, ys = np.linspace(*BOX[:2], SIDE), np.linspace(*BOX[2:], SIDE)
places = np.stack(np.meshgrid(xs, ys), axis=-1).reshape(-1, 2)
truth_map = two_moons_posteriors(places, noise=NOISE)[:, 0].reshape(SIDE, SIDE)
maps = {"truth": truth_map}
test_points, test_labels = make_moons(
    args.test_points, noise=NOISE, random_state=2**32 - 1
)
truth = two_moons_posteriors(test_points, noise=NOISE)

runs = {name: [] for name in losses}
for seed in args.seeds:
    points, labels = make_moons(args.train_points, noise=NOISE, random_state=seed)
    for name, loss in losses.items():
        torch.manual_seed(seed)
        network = train(loss, points, labels)
        probs = predict(network, test_points)
        upper = predict(network, places)[:, 0].reshape(SIDE, SIDE)
        if seed == args.seeds[0]:
            maps[name], drawn = upper, (points, labels)
        length, slope = boundary(upper)
        runs[name].append(
            {
                "accuracy": accuracy(probs, test_labels),
                "ECE": expected_calibration_error(probs, test_labels),
                "NLL": negative_log_likelihood(probs, test_labels),
                "true calibration error": true_calibration_error(probs, truth),
                "mean confidence": float(probs.max(axis=1).mean()),
                "boundary length": length,
                "slope on the boundary": slope,
                "map less sure than 0.9": float((np.abs(upper - 0.5) < 0.4).mean()),
            }
        )
    errors = [f"{name} {rows[-1]['ECE']:.3f}" for name, rows in runs.items()]
    print(f"seed {seed}: ECE of {', '.join(errors)}", flush=True)

means = {
    name: {key: mean_interval([row[key] for row in rows])._asdict() for key in rows[0]}
    for name, rows in runs.items()
}
length, slope = boundary(truth_map)
of_truth = {
    "accuracy": float(truth.max(axis=1).mean()),
    "ECE": expected_calibration_error(truth, test_labels),
    "NLL": negative_log_likelihood(truth, test_labels),
    "true calibration error": 0.0,
    "mean confidence": float(truth.max(axis=1).mean()),
    "boundary length": length,
    "slope on the boundary": slope,
    "map less sure than 0.9": float((np.abs(truth_map - 0.5) < 0.4).mean()),
}

figure = Figure(figsize=(6.6, 4.2), layout="constrained")
panels = figure.subplots(2, 2, sharex=True, sharey=True)
for axes, (name, upper) in zip(panels.flat, maps.items(), strict=True):
    surface = axes.contourf(xs, ys, upper, levels=np.linspace(0, 1, 11), cmap="cividis")
    axes.contour(
        xs, ys, upper, levels=[0.1, 0.9], colors="white", linewidths=1, linestyles="--"
    )
    axes.contour(xs, ys, upper, levels=[0.5], colors="black", linewidths=1.6)
    for label, marker in ((0, "^"), (1, "v")):
        members = drawn[0][drawn[1] == label][:60]
        axes.plot(*members.T, marker, markersize=3, mfc="white", mec="black", mew=0.4)
    axes.set_title(name, fontsize=9)
    axes.set(xlim=BOX[:2], ylim=BOX[2:], aspect="equal")
    axes.tick_params(labelsize=6)
for axes in panels[-1]:
    axes.set_xlabel("first feature", fontsize=7)
for axes in panels[:, 0]:
    axes.set_ylabel("second feature", fontsize=7)
figure.suptitle("The first seed of those in the table", fontsize=8)
scale = figure.colorbar(surface, ax=panels, shrink=0.8, ticks=[0, 0.5, 1])
scale.set_label("probability of the upper moon", fontsize=7)
scale.ax.tick_params(labelsize=7)

record = {
    "settings": {
        "train_points": args.train_points,
        "test_points": args.test_points,
        "epochs": args.epochs,
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "gamma": GAMMA,
        "brier_weight": BRIER_WEIGHT,
    },
    "noise": NOISE,
    "seeds": args.seeds,
    "intervals": "95%, Student's t over the seeds",
    "results": means,
    "truth": of_truth,
    "seconds": round(time.perf_counter() - start, 1),
}
write_record(args.output / "decision_boundary.json", record)
save_figure(figure, args.output / "decision_boundary.png")

print("\n| loss |", " | ".join(of_truth), "|")
print("|---" * (len(of_truth) + 1) + "|")
for name, row in means.items():
    print(
        f"| {name} |",
        " | ".join(in_words(row[key]) for key in of_truth),
        "|",
    )
print("| truth |", " | ".join(f"{value:.3f}" for value in of_truth.values()), "|")
print(f"\nWritten to {args.output}/decision_boundary.*")
