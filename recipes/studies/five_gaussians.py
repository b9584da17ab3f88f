"""Do the weights of the focal, dual focal and Brier-weighted losses follow the true calibration error?

    python recipes/studies/five_gaussians.py

A small network is trained with cross entropy on 5 x 10,000 points of five Gaussians in the plane, whose class
probabilities are known. On new points, the weight of each loss is correlated with the distance of the prediction from
the true probability. This follows Lin et al. 2025, "Uncertainty weighted gradients for model calibration", section 4.3,
which reports .550 (focal), .638 (dual focal) and .664 (generalised Brier) over 5 runs. A second row uses the error of
the authors' notebook (evaluate1.ipynb): the posterior minus the prediction, with its sign, at the label that was drawn.

40 runs take about a minute on one core. `--seeds 0 1 2 3 4` runs as many as the paper.
"""

import argparse
import time

import numpy as np
import torch
from matplotlib.figure import Figure
from options import check_seeds, count, output_folder
from papers.gradients import uncertainty_weights
from papers.toys import gaussian_posteriors
from records import in_words, mean_interval, write_record
from torch import nn

from hf_calib.losses import make_loss
from hf_calib.plots import save_figure

PAPER = {"focal": 0.550, "dual focal": 0.638, "generalised Brier": 0.664}
GAMMAS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)
NORMS = (1.0, 1.5, 2.0, 3.0, 8.0)
READINGS = ("drawn label", "predicted label", "drawn label, signed error")
CLASSES, HIDDEN = 5, 64
BATCH_SIZE, LEARNING_RATE = 128, 1e-3

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
    default=list(range(40)),
    help="A run each; at least two.",
)
parser.add_argument(
    "--train_points", type=count, default=10_000, help="Of each Gaussian."
)
parser.add_argument(
    "--test_points",
    type=count,
    default=1_000,
    help="Of each Gaussian; twice: to choose and to report.",
)
parser.add_argument("--epochs", type=count, default=5)
args = parser.parse_args()
check_seeds(parser, args.seeds, at_least=2)
start = time.perf_counter()


def draw(means, points, rng):
    labels = np.repeat(np.arange(CLASSES), points)
    return (means[labels] + rng.normal(size=(len(labels), 2))).astype(
        np.float32
    ), labels


def train(points, labels):
    """The paper's "two layer CNN" is two linear layers on points of the plane."""
    network = nn.Sequential(nn.Linear(2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    loss, points, labels = (
        make_loss("cross_entropy"),
        torch.from_numpy(points),
        torch.from_numpy(labels),
    )
    for _ in range(args.epochs):
        for batch in torch.randperm(len(labels)).split(BATCH_SIZE):
            optimizer.zero_grad()
            loss(network(points[batch]), labels[batch]).backward()
            optimizer.step()
    return network


def correlations(probs, labels, error):
    """{weight: {hyperparameters: Pearson's correlation with the true error}}."""

    def of(loss, **hyperparameters):  # all weights are a base to the power of gamma
        base = uncertainty_weights(
            make_loss(loss, gamma=1.0, **hyperparameters), probs, labels
        )
        return {gamma: np.corrcoef(base**gamma, error)[0, 1] for gamma in GAMMAS}

    brier = {norm: of("bsce", norm=norm) for norm in NORMS}
    distance = np.abs(probs - np.eye(CLASSES)[labels])
    printed = {
        gamma: np.corrcoef((distance**gamma).sum(axis=1), error)[0, 1]
        for gamma in GAMMAS
    }
    lead = distance[np.arange(len(labels)), labels] + np.sort(probs, axis=1)[:, -2]
    second = {gamma: np.corrcoef(lead**gamma, error)[0, 1] for gamma in GAMMAS}
    return {
        "focal": {f"gamma {g:g}": r for g, r in of("focal").items()},
        "dual focal": {f"gamma {g:g}": r for g, r in of("dual_focal").items()},
        "generalised Brier": {
            f"gamma {g:g}, norm {norm:g}": r
            for norm in NORMS
            for g, r in brier[norm].items()
        },
        "generalised Brier, norm 2": {f"gamma {g:g}": r for g, r in brier[2.0].items()},
        "generalised Brier, Eq. 11 as printed": {
            f"gamma {g:g}": r for g, r in printed.items()
        },
        "dual focal by the second largest probability": {
            f"gamma {g:g}": r for g, r in second.items()
        },
    }


# The runs: other means, other points and another network each.
runs = []
for seed in args.seeds:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    means = rng.uniform(-10, 10, (CLASSES, 2))
    network = train(*draw(means, args.train_points, rng))
    run = {"seed": seed}
    for role in ("chosen on", "reported on"):
        points, labels = draw(means, args.test_points, rng)
        with torch.no_grad():
            probs = torch.softmax(
                network(torch.from_numpy(points)).double(), dim=1
            ).numpy()
        truth = gaussian_posteriors(points, means)
        error = np.linalg.norm(probs - truth, axis=1)
        signed = (truth - probs)[np.arange(len(labels)), labels]
        run[role] = {
            "drawn label": correlations(probs, labels, error),
            "predicted label": correlations(probs, probs.argmax(axis=1), error),
            "drawn label, signed error": correlations(probs, labels, signed),
        }
    run |= {
        "accuracy": (probs.argmax(axis=1) == labels).mean(),
        "best accuracy": truth.max(axis=1).mean(),
    }
    run |= {"true calibration error": error.mean()}
    runs.append(run)
    print(
        f"seed {seed}: accuracy {run['accuracy']:.3f}, true calibration error {error.mean():.4f}",
        flush=True,
    )


def at_most_1(interval):
    """Of few runs Student's interval can reach beyond what a correlation can be."""
    return interval._replace(high=min(interval.high, 1.0))


# One setting for all runs, of the highest mean correlation on the points to choose on; then other points.
def summary(runs, reading):
    columns, chosen = {}, {}
    for weight, grid in runs[0]["chosen on"][reading].items():
        mean = {
            setting: np.mean(
                [run["chosen on"][reading][weight][setting] for run in runs]
            )
            for setting in grid
        }
        chosen[weight] = max(mean, key=mean.get)
        columns[weight] = np.array(
            [run["reported on"][reading][weight][chosen[weight]] for run in runs]
        )
    brier = columns["generalised Brier"]
    return {
        weight: {
            "chosen": chosen[weight],
            "correlation": at_most_1(mean_interval(column))._asdict(),
            "generalised Brier minus this": mean_interval(brier - column)._asdict(),
            "by run": column.tolist(),
            "paper": PAPER.get(weight),
        }
        for weight, column in columns.items()
    }


found = {
    f"{reading}, {'all' if len(part) == len(runs) else 'first 5'} runs": summary(
        part, reading
    )
    for reading in READINGS
    for part in ([runs, runs[:5]] if len(runs) > 5 else [runs])
}
main = found["drawn label, all runs"]
order = sorted(PAPER, key=lambda weight: main[weight]["correlation"]["value"])

# Figure: the runs, their mean with its interval, and the paper's numbers.
figure = Figure(figsize=(9, 3.2), layout="constrained")
panels = figure.subplots(1, len(READINGS), sharey=True)
for axes, reading in zip(panels, READINGS, strict=True):
    rows = found[f"{reading}, all runs"]
    for place, weight in enumerate(PAPER):
        values = np.array(rows[weight]["by run"])
        spread = np.linspace(-0.22, 0.22, len(values))
        axes.plot(
            place + spread, values, "o", markersize=2.5, color="#A6A6A6", label="runs"
        )
        mean, low, high = rows[weight]["correlation"].values()
        reach = [[mean - low], [high - mean]]
        axes.errorbar(
            place,
            mean,
            reach,
            fmt="s",
            markersize=5,
            color="#0072B2",
            capsize=5,
            label="mean, 95% interval",
        )
        axes.plot(
            place,
            PAPER[weight],
            "D",
            markersize=6,
            mfc="white",
            mec="#D55E00",
            mew=1.6,
            label="paper",
        )
    axes.set_xticks(range(3), ["focal", "dual focal", "generalised\nBrier"], fontsize=8)
    axes.set(xlim=(-0.5, 2.5), ylim=(0, 1))
    axes.set_title(f"weight at the {reading}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
panels[0].set_ylabel("correlation with the true error", fontsize=8)
handles, names = panels[0].get_legend_handles_labels()
legend = dict(zip(names, handles, strict=True))  # of the three columns of a panel
figure.legend(
    legend.values(),
    legend,
    loc="outside lower center",
    ncols=3,
    fontsize=8,
    frameon=False,
)

record = {
    "settings": {
        "train_points": args.train_points,
        "test_points": args.test_points,
        "epochs": args.epochs,
        "hidden": HIDDEN,
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "gammas": GAMMAS,
        "norms": NORMS,
    },
    "seeds": args.seeds,
    "intervals": "95%, Student's t over the runs, cut at 1",
    "accuracy": mean_interval([run["accuracy"] for run in runs])._asdict(),
    "best accuracy": mean_interval([run["best accuracy"] for run in runs])._asdict(),
    "true calibration error": mean_interval(
        [run["true calibration error"] for run in runs]
    )._asdict(),
    "results": found,
    "order": order,
    "the paper's order": order == list(PAPER),
    "seconds": round(time.perf_counter() - start, 1),
}
write_record(args.output / "five_gaussians.json", record)
save_figure(figure, args.output / "five_gaussians.png")

print(
    "\n| reading, runs | weight | chosen | correlation | generalised Brier minus this | paper |"
)
print("|---|---|---|---|---|---|")
for title, rows in found.items():
    for weight, row in rows.items():
        r, d = (
            in_words(row[k]) for k in ("correlation", "generalised Brier minus this")
        )
        paper = "" if row["paper"] is None else f"{row['paper']:.3f}"
        print(f"| {title} | {weight} | {row['chosen']} | {r} | {d} | {paper} |")
print(
    f"\nOrder: {' < '.join(order)}; the paper's: {' < '.join(PAPER)}. Written to {args.output}/five_gaussians.*"
)
