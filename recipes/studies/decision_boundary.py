"""Decision boundary and confidence of focal loss and focal calibration loss on two noisy moons.

    python recipes/studies/decision_boundary.py

The setting is that of "Focal calibration loss" (FCL), appendix A.11 and Fig. 7: noise 0.2, two
hidden layers of 10 units, Adam, 500 epochs, gamma 10, and weight 1.5 of the Brier term. Cross
entropy and the true posterior of the moons, which is known, are added. Measured on new points:
accuracy, ECE, NLL and the distance from the true posterior. Measured on a grid of the plane: the
length of the boundary, and the slope of the probability on it.

10 seeds take about half a minute on one core.
"""

import numpy as np
import torch
from options import count, parse, study_parser
from papers.toys import perceptron, train_with_adam, two_moons_posteriors
from records import (
    in_words,
    kind_of_intervals,
    mean_interval,
    print_table,
    write_study,
)
from sklearn.datasets import make_moons

from hf_calib.losses import make_loss
from hf_calib.metrics import (
    accuracy,
    expected_calibration_error,
    negative_log_likelihood,
    true_calibration_error,
)
from hf_calib.plots.style import drawing, plain_axes

NOISE = 0.2
GAMMA = 10.0
BRIER_WEIGHT = 1.5
# All points at once, and Adam's rate: the paper says neither.
TRAINING = {"batch_size": 1_000, "learning_rate": 0.01}

parser = study_parser(__doc__, seeds=range(10))
not_said = "The paper does not say."
parser.add_argument("--train_points", type=count, default=1_000, help=not_said)
parser.add_argument("--test_points", type=count, default=10_000)
parser.add_argument("--epochs", type=count, default=500)
args = parse(parser, fewest_seeds=2)

fcl = make_loss("focal_calibration", gamma=GAMMA, brier_weight=BRIER_WEIGHT)
losses = {
    "cross entropy": make_loss("cross_entropy"),
    f"focal, gamma {GAMMA:g}": make_loss("focal", gamma=GAMMA),
    f"FCL, gamma {GAMMA:g}, lambda {BRIER_WEIGHT:g}": fcl,
}

# The part of the plane that is drawn, as a grid.
SIDE = 161
XLIM = (-1.7, 2.7)
YLIM = (-1.2, 1.7)
xs = np.linspace(*XLIM, SIDE)
ys = np.linspace(*YLIM, SIDE)
places = np.stack(np.meshgrid(xs, ys), axis=-1).reshape(-1, 2)


def train(loss, points, labels):
    network = perceptron(2, 10, 10, 2)
    inputs = torch.tensor(points, dtype=torch.float32)
    targets = torch.tensor(labels)
    train_with_adam(network, loss, inputs, targets, epochs=args.epochs, **TRAINING)
    return network


@torch.no_grad()
def predict(network, points):
    logits = network(torch.tensor(points, dtype=torch.float32))
    return logits.double().softmax(dim=1).numpy()


def boundary(upper):
    """Length of the line p = 1/2 in the box, and the mean slope of p along it, weighted by length.

    By the coarea formula: the area where |p - 1/2| < w, weighted by the slope, is 2 w times the
    length.
    """
    half_width = 0.05
    slope = np.hypot(*np.gradient(upper, ys, xs))
    near = np.abs(upper - 0.5) < half_width
    cell = (xs[1] - xs[0]) * (ys[1] - ys[0])
    area = (slope * near).sum() * cell
    mean_slope = (slope**2 * near).sum() / (slope * near).sum()
    return float(area / (2 * half_width)), float(mean_slope)


def measured(probs, upper):
    """The numbers of predictions on the new points, and of a map of the upper moon's probability."""
    length, slope = boundary(upper)
    return {
        "ECE": expected_calibration_error(probs, test_labels),
        "NLL": negative_log_likelihood(probs, test_labels),
        "true calibration error": true_calibration_error(probs, truth),
        "mean confidence": float(probs.max(axis=1).mean()),
        "boundary length": length,
        "slope on the boundary": slope,
        "map less sure than 0.9": float((np.abs(upper - 0.5) < 0.4).mean()),
    }


def on_map(probs):
    return probs[:, 0].reshape(SIDE, SIDE)


# A seed that no run has.
moons = {"noise": NOISE, "random_state": 2**32 - 1}
test_points, test_labels = make_moons(args.test_points, **moons)
truth = two_moons_posteriors(test_points, noise=NOISE)
maps = {"truth": on_map(two_moons_posteriors(places, noise=NOISE))}

runs = {name: [] for name in losses}
for seed in args.seeds:
    points, labels = make_moons(args.train_points, noise=NOISE, random_state=seed)
    if seed == args.seeds[0]:
        drawn = points, labels
    for name, loss in losses.items():
        torch.manual_seed(seed)
        network = train(loss, points, labels)
        probs = predict(network, test_points)
        upper = on_map(predict(network, places))
        if seed == args.seeds[0]:
            maps[name] = upper
        right = {"accuracy": accuracy(probs, test_labels)}
        runs[name].append(right | measured(probs, upper))
    errors = [f"{name} {rows[-1]['ECE']:.3f}" for name, rows in runs.items()]
    print(f"seed {seed}: ECE of {', '.join(errors)}", flush=True)

# Of the truth, the accuracy and the distance from itself are known without a sample.
of_truth = {"accuracy": float(truth.max(axis=1).mean())}
of_truth |= measured(truth, maps["truth"]) | {"true calibration error": 0.0}
means = {
    name: {key: mean_interval([row[key] for row in rows])._asdict() for key in of_truth}
    for name, rows in runs.items()
}

with drawing(6.6, 4.2, "The first seed of those in the table") as figure:
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    plain_axes(*panels.flat)
    points, labels = drawn
    for axes, (name, upper) in zip(panels.flat, maps.items(), strict=True):
        at = xs, ys, upper
        surface = axes.contourf(*at, levels=np.linspace(0, 1, 11), cmap="cividis")
        dashed = {"colors": "white", "linewidths": 1, "linestyles": "--"}
        axes.contour(*at, levels=[0.1, 0.9], **dashed)
        axes.contour(*at, levels=[0.5], colors="black", linewidths=1.6)
        for label, marker in ((0, "^"), (1, "v")):
            members = points[labels == label][:60]
            look = {"markersize": 3, "mfc": "white", "mec": "black", "mew": 0.4}
            axes.plot(*members.T, marker, **look)
        axes.set(title=name, xlim=XLIM, ylim=YLIM, aspect="equal")
    for axes in panels[-1]:
        axes.set_xlabel("first feature")
    for axes in panels[:, 0]:
        axes.set_ylabel("second feature")
    scale = figure.colorbar(surface, ax=panels, shrink=0.8, ticks=[0, 0.5, 1])
    scale.set_label("probability of the upper moon")
    plain_axes(scale.ax)

header = ["loss", *of_truth]
rows = [[name, *map(in_words, row.values())] for name, row in means.items()]
rows.append(["truth", *(f"{value:.3f}" for value in of_truth.values())])
print_table(header, rows)
settings = {
    "train_points": args.train_points,
    "test_points": args.test_points,
    "epochs": args.epochs,
    **TRAINING,
    "gamma": GAMMA,
    "brier_weight": BRIER_WEIGHT,
}
record = {
    "settings": settings,
    "noise": NOISE,
    "intervals": kind_of_intervals(args.seeds),
    "results": means,
    "truth": of_truth,
}
write_study("decision_boundary", args, record, {"": figure})
