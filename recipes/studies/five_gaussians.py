"""Do the weights of the focal, dual focal and Brier-weighted losses follow the true calibration error?

    python recipes/studies/five_gaussians.py

A small network is trained with cross entropy on 5 x 10,000 points of five Gaussians in the plane,
whose class probabilities are known. On new points, the weight of each loss is correlated with the
distance of the prediction from the true probability. This follows Lin et al. 2025, "Uncertainty
weighted gradients for model calibration", section 4.3, which reports .550 (focal), .638 (dual
focal) and .664 (generalised Brier) over 5 runs. A second row uses the error of the authors'
notebook (evaluate1.ipynb): the posterior minus the prediction, with its sign, at the label that was
drawn.

40 runs take about a minute on one core. `--seeds 0 1 2 3 4` runs as many as the paper.
"""

import numpy as np
import torch
from matplotlib.lines import Line2D
from options import count, parse, study_parser
from papers.gradients import uncertainty_weights
from papers.toys import gaussian_posteriors, perceptron, train_with_adam
from records import in_words, mean_interval, print_table, write_study

from hf_calib.losses import make_loss
from hf_calib.plots.style import BLUE, VERMILION, drawing, plain_axes

PAPER = {"focal": 0.550, "dual focal": 0.638, "generalised Brier": 0.664}
GAMMAS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)
NORMS = (1.0, 1.5, 2.0, 3.0, 8.0)
READINGS = ("drawn label", "predicted label", "drawn label, signed error")
CLASSES = 5
NETWORK = {"hidden": 64, "batch_size": 128, "learning_rate": 1e-3}

parser = study_parser(__doc__, seeds=range(40))
of_each = "Of each Gaussian."
parser.add_argument("--train_points", type=count, default=10_000, help=of_each)
of_each += " Twice: to choose and to report."
parser.add_argument("--test_points", type=count, default=1_000, help=of_each)
parser.add_argument("--epochs", type=count, default=5)
args = parse(parser, fewest_seeds=2)


def draw(means, points, rng):
    labels = np.repeat(np.arange(CLASSES), points)
    noise = rng.normal(size=(len(labels), 2))
    return (means[labels] + noise).astype(np.float32), labels


def train(points, labels):
    """The paper's "two layer CNN" is two linear layers on points of the plane."""
    network = perceptron(2, NETWORK["hidden"], CLASSES)
    train_with_adam(
        network,
        make_loss("cross_entropy"),
        torch.from_numpy(points),
        torch.from_numpy(labels),
        epochs=args.epochs,
        batch_size=NETWORK["batch_size"],
        learning_rate=NETWORK["learning_rate"],
    )
    return network


def correlations(probs, labels, error):
    """{weight: {hyperparameters: Pearson's correlation with the true error}}."""

    def of_powers(base, further=""):
        """All weights are a base to the power of gamma."""
        powers = {f"gamma {gamma:g}{further}": base**gamma for gamma in GAMMAS}
        return {name: np.corrcoef(u, error)[0, 1] for name, u in powers.items()}

    def base(loss, **hyperparameters):
        of_gamma_1 = make_loss(loss, gamma=1.0, **hyperparameters)
        return uncertainty_weights(of_gamma_1, probs, labels)

    all_norms = {}
    for norm in NORMS:
        all_norms |= of_powers(base("bsce", norm=norm), f", norm {norm:g}")
    # Eq. 11 sums the powers over the classes.
    distance = np.abs(probs - np.eye(CLASSES)[labels])
    printed = {
        f"gamma {gamma:g}": np.corrcoef((distance**gamma).sum(axis=1), error)[0, 1]
        for gamma in GAMMAS
    }
    of_label = distance[np.arange(len(labels)), labels]
    second_largest = np.sort(probs, axis=1)[:, -2]
    return {
        "focal": of_powers(base("focal")),
        "dual focal": of_powers(base("dual_focal")),
        "generalised Brier": all_norms,
        "generalised Brier, norm 2": of_powers(base("bsce", norm=2.0)),
        "generalised Brier, Eq. 11 as printed": printed,
        "dual focal by the second largest probability": of_powers(
            of_label + second_largest
        ),
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
            logits = network(torch.from_numpy(points)).double()
        probs = logits.softmax(dim=1).numpy()
        predicted = probs.argmax(axis=1)
        truth = gaussian_posteriors(points, means)
        error = np.linalg.norm(probs - truth, axis=1)
        signed = (truth - probs)[np.arange(len(labels)), labels]
        run[role] = {
            "drawn label": correlations(probs, labels, error),
            "predicted label": correlations(probs, predicted, error),
            "drawn label, signed error": correlations(probs, labels, signed),
        }
    run["accuracy"] = (predicted == labels).mean()
    run["best accuracy"] = truth.max(axis=1).mean()
    run["true calibration error"] = error.mean()
    runs.append(run)
    print(
        f"seed {seed}: accuracy {run['accuracy']:.3f}, true calibration error {error.mean():.4f}",
        flush=True,
    )


def at_most_1(interval):
    """Of few runs Student's interval can reach beyond what a correlation can be."""
    return interval._replace(high=min(interval.high, 1.0))


def summary(runs, reading):
    """One setting for all runs, of the highest mean correlation on the points to choose on; then other points."""
    chosen = {}
    columns = {}
    for weight, grid in runs[0]["chosen on"][reading].items():

        def of_runs(role, setting, weight=weight):
            return np.array([run[role][reading][weight][setting] for run in runs])

        mean = {setting: of_runs("chosen on", setting).mean() for setting in grid}
        chosen[weight] = max(mean, key=mean.get)
        columns[weight] = of_runs("reported on", chosen[weight])
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


parts = {"all": runs}
if len(runs) > 5:
    parts["first 5"] = runs[:5]
found = {}
for reading in READINGS:
    for part, some_runs in parts.items():
        found[f"{reading}, {part} runs"] = summary(some_runs, reading)
main = found["drawn label, all runs"]
order = sorted(PAPER, key=lambda weight: main[weight]["correlation"]["value"])

# Figure: the runs, their mean with its interval, and the paper's numbers.
LOOKS = {
    "runs": {"marker": "o", "markersize": 2.5, "color": "#A6A6A6"},
    "mean, 95% interval": {"marker": "s", "markersize": 5, "color": BLUE},
    "paper": {"marker": "D", "markersize": 6, "mfc": "white", "color": VERMILION},
}
for look in LOOKS.values():
    look["linestyle"] = ""
with drawing(9, 3.2) as figure:
    panels = figure.subplots(1, len(READINGS), sharey=True)
    for axes, reading in zip(panels, READINGS, strict=True):
        for place, weight in enumerate(PAPER):
            row = found[f"{reading}, all runs"][weight]
            spread = np.linspace(-0.22, 0.22, len(runs))
            axes.plot(place + spread, row["by run"], **LOOKS["runs"])
            mean, low, high = row["correlation"].values()
            reach = [[mean - low], [high - mean]]
            axes.errorbar(place, mean, reach, capsize=5, **LOOKS["mean, 95% interval"])
            axes.plot(place, PAPER[weight], **LOOKS["paper"])
        axes.set_xticks(range(3), ["focal", "dual focal", "generalised\nBrier"])
        axes.set(xlim=(-0.5, 2.5), ylim=(0, 1), title=f"weight at the {reading}")
    plain_axes(*panels)
    panels[0].set_ylabel("correlation with the true error")
    handles = [Line2D([], [], label=name, **look) for name, look in LOOKS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)

record = {
    "settings": {
        "train_points": args.train_points,
        "test_points": args.test_points,
        "epochs": args.epochs,
        **NETWORK,
        "gammas": GAMMAS,
        "norms": NORMS,
    },
    "intervals": "95%, Student's t over the runs, cut at 1",
    "results": found,
    "order": order,
    "the paper's order": order == list(PAPER),
}
for name in ("accuracy", "best accuracy", "true calibration error"):
    record[name] = mean_interval([run[name] for run in runs])._asdict()

columns = ("correlation", "generalised Brier minus this")
header = ["reading, runs", "weight", "chosen", *columns, "paper"]
rows = []
for title, of_reading in found.items():
    for weight, row in of_reading.items():
        paper = "" if row["paper"] is None else f"{row['paper']:.3f}"
        means = [in_words(row[column]) for column in columns]
        rows.append([title, weight, row["chosen"], *means, paper])
print_table(header, rows)
print(f"\nOrder: {' < '.join(order)}; the paper's: {' < '.join(PAPER)}.")
write_study("five_gaussians", args, record, {"": figure})
