"""Penalties on the norm of the logits and on low entropy: the effect of their weights on calibration.

    python recipes/studies/norms_and_entropies.py --data ylecun/mnist

The comparison study of losses ("how model calibrates when employed with different loss function?")
trains with the L1 norm of the logits and with entropy regularisation, and does not state the
weights. Here both weights are varied, the norm also with several orders, on a small network that
over-fits: two hidden layers of 256 on 2,000 digits of MNIST. Measured on 5,000 test images:
accuracy, ECE before and after a temperature fitted to 2,000 other images, mean entropy and mean
norms.

17 settings and 5 seeds take about 3 minutes on one core. `--full` varies twice as many weights.
"""

import time

import datasets
import numpy as np
import torch
from options import count, parse, study_parser
from paired import corrected
from papers.toys import perceptron, train_with_adam
from records import (
    in_words,
    kind_of_intervals,
    mean_interval,
    print_table,
    write_study,
)
from scipy.special import entr, softmax
from scipy.stats import ttest_1samp

from hf_calib.data import choose_columns, load_splits
from hf_calib.losses import make_loss
from hf_calib.metrics import (
    accuracy,
    expected_calibration_error,
    negative_log_likelihood,
)
from hf_calib.plots.style import GREY, add_legend, drawing, line_looks, plain_axes
from hf_calib.scaling import TemperatureScaling

# Of Adam.
TRAINING = {"batch_size": 128, "learning_rate": 1e-3}
BASELINE = ("cross entropy", 0.0)

parser = study_parser(__doc__, seeds=range(5), data="ylecun/mnist")


def add_numbers(name, numbers, **options):
    parser.add_argument(name, type=float, nargs="+", default=numbers, **options)


add_numbers("--orders", [1.0, 2.0, 8.0], help="p of the norms; at most four.")
add_numbers("--norm_weights", [0.003, 0.01, 0.03, 0.1])
add_numbers("--entropy_weights", [0.03, 0.1, 0.3, 1.0])
twice = "Twice as many weights, between those."
parser.add_argument("--full", action="store_true", help=twice)
parser.add_argument("--train_rows", type=count, default=2_000)
parser.add_argument("--calibration_rows", type=count, default=2_000)
parser.add_argument("--test_rows", type=count, default=5_000)
parser.add_argument("--epochs", type=count, default=30)
args = parse(parser, fewest_seeds=2)
if len(args.orders) > 4:
    parser.error(
        "--orders: at most four lines besides the entropy's are distinguishable"
    )


def with_those_between(weights):
    between = np.sqrt(np.multiply(weights[1:], weights[:-1])).round(4)
    return sorted({*weights, *between.tolist()})


if args.full:
    args.norm_weights = with_those_between(args.norm_weights)
    args.entropy_weights = with_those_between(args.entropy_weights)

# Data: the same test images for all seeds; each seed draws its own for training and calibration.
dataset = choose_columns(load_splits(args.data), image_column="image")
n_classes = dataset["train"].features["label"].num_classes


def arrays(rows):
    decode = datasets.Image().decode_example
    decoded = [np.asarray(decode(row["image"]), dtype=np.float32) for row in rows]
    pixels = torch.from_numpy(np.stack(decoded).reshape(len(rows), -1))
    return pixels / 127.5 - 1, torch.tensor(list(rows["label"]))


def draw(split, n_rows, seed):
    return split.select(np.random.default_rng(seed).permutation(len(split))[:n_rows])


def train(loss, images, labels):
    network = perceptron(images.shape[1], 256, 256, n_classes)
    train_with_adam(network, loss, images, labels, epochs=args.epochs, **TRAINING)
    return network


@torch.no_grad()
def predict(network, images):
    return network(images).double().numpy()


def measured(network, calibration, test):
    images, labels = test
    logits = predict(network, images)
    labels = labels.numpy()
    probs = softmax(logits, axis=1)
    images, held_out_labels = calibration
    held_out = predict(network, images)
    temperature = TemperatureScaling().fit(held_out, held_out_labels.numpy())
    scaled = temperature.predict_proba(logits)
    return {
        "accuracy": accuracy(probs, labels),
        "ECE": expected_calibration_error(probs, labels),
        "ECE after temperature": expected_calibration_error(scaled, labels),
        "NLL after temperature": negative_log_likelihood(scaled, labels),
        "temperature": float(temperature.temperature_),
        "mean confidence": float(probs.max(axis=1).mean()),
        "mean entropy": float(entr(probs).sum(axis=1).mean()),
        "mean L1 norm": float(np.abs(logits).sum(axis=1).mean()),
        "mean L2 norm": float(np.linalg.norm(logits, axis=1).mean()),
    }


test = arrays(draw(dataset["test"], args.test_rows, 0))
settings = {BASELINE: make_loss("cross_entropy")}
for weight in args.entropy_weights:
    loss = make_loss("entropy_regularized", entropy_weight=weight)
    settings["entropy", weight] = loss
for order in args.orders:
    for weight in args.norm_weights:
        loss = make_loss("logit_norm", norm_weight=weight, p=order)
        settings[f"L{order:g} norm", weight] = loss
runs = {setting: [] for setting in settings}
for seed in args.seeds:
    rows = draw(dataset["train"], args.train_rows + args.calibration_rows, seed)
    images, labels = arrays(rows)
    fitted = images[: args.train_rows], labels[: args.train_rows]
    calibration = images[args.train_rows :], labels[args.train_rows :]
    for setting, loss in settings.items():
        # The same first weights and batches for all.
        torch.manual_seed(seed)
        network = train(loss, *fitted)
        runs[setting].append(measured(network, calibration, test))
    print(f"seed {seed}: {time.perf_counter() - args.started:.0f} s", flush=True)

# Means over the seeds, and differences to cross entropy of the same seed.
COMPARED = ("accuracy", "ECE", "ECE after temperature", "NLL after temperature")
results = []
for setting, rows in runs.items():
    penalty, weight = setting
    row = {"penalty": penalty, "weight": weight}
    numbers = {key: np.array([run[key] for run in rows]) for key in rows[0]}
    for key, values in numbers.items():
        row[key] = mean_interval(values)._asdict()
    if setting == BASELINE:
        of_baseline = numbers
        results.append(row)
        continue
    for key in COMPARED:
        change = numbers[key] - of_baseline[key]
        found = mean_interval(change)._asdict()
        found["p"] = float(ttest_1samp(change, 0).pvalue)
        row[f"{key} minus cross entropy's"] = found
    results.append(row)
# Holm's correction over all settings of the sweep, for each metric alone.
baseline, *penalised = results
for key in COMPARED:
    changes = [row[f"{key} minus cross entropy's"] for row in penalised]
    p_values = corrected([change["p"] for change in changes])
    for change, p in zip(changes, p_values.tolist(), strict=True):
        change["p_corrected"] = p


def draw_means(axes, key):
    """One number against the weight, a line a penalty."""
    axes.axhspan(baseline[key]["low"], baseline[key]["high"], color="#DDDDDD")
    axes.axhline(baseline[key]["value"], color=GREY, label="cross entropy")
    penalties = dict.fromkeys(row["penalty"] for row in penalised)
    for penalty, look, marker in zip(penalties, line_looks(), "osD^v", strict=False):
        rows = [row for row in penalised if row["penalty"] == penalty]
        weights = [row["weight"] for row in rows]
        ends = np.array([list(row[key].values()) for row in rows])
        values, low, high = ends.T
        look |= {"label": penalty, "marker": marker, "markersize": 4}
        look |= {"linewidth": 1.3, "elinewidth": 0.8, "capsize": 2.5}
        axes.errorbar(weights, values, [values - low, high - values], **look)
    axes.set(xscale="log", xlabel="weight of the penalty", title=key)
    axes.xaxis.set_major_formatter("{x:g}")
    if key not in ("ECE", "mean L1 norm"):
        axes.set_ylim(bottom=0)
        return
    # These are over more than a decade, whose ticks at 2 and 5 have numbers too.
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in "25" else "")
    axes.tick_params(axis="y", which="minor", labelsize=7)


with drawing(6.8, 5.2) as figure:
    panels = figure.subplots(2, 2).flat
    drawn = ("ECE", "ECE after temperature", "mean entropy", "mean L1 norm")
    for axes, key in zip(panels, drawn, strict=True):
        draw_means(axes, key)
        plain_axes(axes)
    add_legend(figure, axes, columns=5)

shown = ("accuracy", "ECE", "ECE after temperature", "mean entropy", "mean L1 norm")
rows = [
    [row["penalty"], f"{row['weight']:g}", *(in_words(row[key]) for key in shown)]
    for row in results
]
print_table(["penalty", "weight", *shown], rows)
sizes = ("train_rows", "calibration_rows", "test_rows", "epochs")
varied = ("orders", "norm_weights", "entropy_weights", "full")
record = {
    "settings": {name: getattr(args, name) for name in varied + sizes} | TRAINING,
    "intervals": kind_of_intervals(args.seeds),
    "results": results,
}
write_study("norms_and_entropies", args, record, {"": figure})
