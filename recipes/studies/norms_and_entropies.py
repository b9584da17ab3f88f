"""Penalties on the norm of the logits and on low entropy: the effect of their weights on calibration.

    python recipes/studies/norms_and_entropies.py --data ylecun/mnist

The comparison study of losses ("how model calibrates when employed with different loss function?") trains with the L1
norm of the logits and with entropy regularisation, and does not state the weights. Here both weights are varied, the
norm also with several orders, on a small network that over-fits: two hidden layers of 256 on 2,000 digits of MNIST.
Measured on 5,000 test images: accuracy, ECE before and after a temperature fitted to 2,000 other images, mean entropy
and mean norms.

17 settings and 5 seeds take about 3 minutes on one core. `--full` varies twice as many weights.
"""

import argparse
import time

import datasets
import numpy as np
import torch
from matplotlib.figure import Figure
from options import check_seeds, count, output_folder
from paired import corrected
from records import in_words, mean_interval, write_record
from scipy.special import entr, softmax
from scipy.stats import ttest_1samp
from torch import nn

from hf_calib.data import choose_columns, load_splits
from hf_calib.losses import make_loss
from hf_calib.metrics import (
    accuracy,
    expected_calibration_error,
    negative_log_likelihood,
)
from hf_calib.plots import save_figure
from hf_calib.scaling import TemperatureScaling

BATCH_SIZE, LEARNING_RATE = 128, 1e-3  # of Adam

parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
)
parser.add_argument("--output", type=output_folder, default="outputs/studies")
parser.add_argument(
    "--data",
    default="ylecun/mnist",
    help="Of the Hub, or a folder; small images of one size.",
)
parser.add_argument(
    "--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="At least two."
)
parser.add_argument(
    "--orders",
    type=float,
    nargs="+",
    default=[1.0, 2.0, 8.0],
    help="p of the norms; at most four.",
)
parser.add_argument(
    "--norm_weights", type=float, nargs="+", default=[0.003, 0.01, 0.03, 0.1]
)
parser.add_argument(
    "--entropy_weights", type=float, nargs="+", default=[0.03, 0.1, 0.3, 1.0]
)
parser.add_argument(
    "--full", action="store_true", help="Twice as many weights, between those."
)
parser.add_argument("--train_rows", type=count, default=2_000)
parser.add_argument("--calibration_rows", type=count, default=2_000)
parser.add_argument("--test_rows", type=count, default=5_000)
parser.add_argument("--epochs", type=count, default=30)
args = parser.parse_args()
check_seeds(parser, args.seeds, at_least=2)
if len(args.orders) > 4:
    parser.error(
        "--orders: at most four lines besides the entropy's are distinguishable"
    )
start = time.perf_counter()


def with_those_between(weights):
    return sorted(
        {*weights, *np.sqrt(np.multiply(weights[1:], weights[:-1])).round(4).tolist()}
    )


if args.full:
    args.norm_weights, args.entropy_weights = map(
        with_those_between, (args.norm_weights, args.entropy_weights)
    )

# Data: the same test images for all seeds; each seed draws its own for training and calibration.
dataset = choose_columns(load_splits(args.data), image_column="image")
n_classes = dataset["train"].features["label"].num_classes


def arrays(rows):
    decode = datasets.Image().decode_example
    images = np.stack(
        [np.asarray(decode(row["image"]), dtype=np.float32) for row in rows]
    )
    return torch.from_numpy(images.reshape(len(rows), -1) / 127.5 - 1), torch.tensor(
        list(rows["label"])
    )


def draw(split, n_rows, seed):
    return split.select(np.random.default_rng(seed).permutation(len(split))[:n_rows])


def train(loss, images, labels):
    network = nn.Sequential(
        nn.Linear(images.shape[1], 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, n_classes),
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    for _ in range(args.epochs):
        for batch in torch.randperm(len(labels)).split(BATCH_SIZE):
            optimizer.zero_grad()
            loss(network(images[batch]), labels[batch]).backward()
            optimizer.step()
    return network


def measured(network, calibration, test):
    with torch.no_grad():
        (logits, labels), (held_out, held_out_labels) = (
            (network(images).double().numpy(), labels.numpy())
            for images, labels in (test, calibration)
        )
    probs = softmax(logits, axis=1)
    temperature = TemperatureScaling().fit(held_out, held_out_labels)
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
families = {
    "entropy": {
        w: make_loss("entropy_regularized", entropy_weight=w)
        for w in args.entropy_weights
    }
}
families |= {
    f"L{p:g} norm": {
        w: make_loss("logit_norm", norm_weight=w, p=p) for w in args.norm_weights
    }
    for p in args.orders
}
settings = {("cross entropy", 0.0): make_loss("cross_entropy")}
settings |= {
    (family, weight): loss
    for family, losses in families.items()
    for weight, loss in losses.items()
}
runs = {setting: [] for setting in settings}
for seed in args.seeds:
    rows = draw(dataset["train"], args.train_rows + args.calibration_rows, seed)
    images, labels = arrays(rows)
    fitted = images[: args.train_rows], labels[: args.train_rows]
    calibration = images[args.train_rows :], labels[args.train_rows :]
    for setting, loss in settings.items():
        torch.manual_seed(seed)  # the same first weights and batches for all
        runs[setting].append(measured(train(loss, *fitted), calibration, test))
    print(f"seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)

# Means over the seeds, and differences to cross entropy of the same seed.
COMPARED = ("accuracy", "ECE", "ECE after temperature", "NLL after temperature")
baseline = runs["cross entropy", 0.0]
results = []
for (family, weight), rows in runs.items():
    row = {"penalty": family, "weight": weight}
    row |= {key: mean_interval([run[key] for run in rows])._asdict() for key in rows[0]}
    if family != "cross entropy":
        for key in COMPARED:
            change = [
                run[key] - base[key] for run, base in zip(rows, baseline, strict=True)
            ]
            p = float(ttest_1samp(change, 0).pvalue)
            interval = mean_interval(change)._asdict()
            row[f"{key} minus cross entropy's"] = interval | {"p": p}
    results.append(row)
# Holm's correction over all settings of the sweep, for each metric alone.
for key in COMPARED:
    changes = [row[f"{key} minus cross entropy's"] for row in results[1:]]
    p_values = corrected([change["p"] for change in changes])
    for change, p in zip(changes, p_values.tolist(), strict=True):
        change["p_corrected"] = p

# Figure: each number against the weight, a line a penalty.
figure = Figure(figsize=(6.8, 5.2), layout="constrained")
looks = zip(
    ("#000000", "#0072B2", "#D55E00", "#CC79A7", "#009E73"),
    ("-", "--", ":", "-.", "-"),
    "osD^v",
    strict=True,
)
looks = dict(zip(families, looks, strict=False))
for axes, key in zip(
    figure.subplots(2, 2).flat,
    ("ECE", "ECE after temperature", "mean entropy", "mean L1 norm"),
    strict=True,
):
    base = results[0][key]
    axes.axhspan(base["low"], base["high"], color="#DDDDDD", linewidth=0)
    axes.axhline(base["value"], color="#666666", linewidth=1, label="cross entropy")
    for family, (colour, dash, marker) in looks.items():
        rows = [row for row in results if row["penalty"] == family]
        values, low, high = (
            np.array([row[key][part] for row in rows])
            for part in ("value", "low", "high")
        )
        weights = [row["weight"] for row in rows]
        reach = [values - low, high - values]
        look = {
            "color": colour,
            "linestyle": dash,
            "marker": marker,
            "markersize": 4,
            "linewidth": 1.3,
        }
        axes.errorbar(
            weights, values, reach, label=family, capsize=2.5, elinewidth=0.8, **look
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    if key in ("ECE", "mean L1 norm"):  # over more than a decade
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(
            lambda y, _: f"{y:g}" if f"{y:e}"[0] in "25" else ""
        )
        axes.tick_params(axis="y", which="minor", labelsize=7)
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("weight of the penalty", fontsize=8)
    axes.set_title(key, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
handles, names = figure.axes[0].get_legend_handles_labels()
figure.legend(
    handles, names, loc="outside lower center", ncols=5, fontsize=8, frameon=False
)

record = {
    "settings": {
        name: value
        for name, value in vars(args).items()
        if name not in ("output", "seeds", "data")
    }
    | {"batch_size": BATCH_SIZE, "learning_rate": LEARNING_RATE},
    "seeds": args.seeds,
    "intervals": "95%, Student's t over the seeds",
    "results": results,
    "seconds": round(time.perf_counter() - start, 1),
}
write_record(args.output / "norms_and_entropies.json", record)
save_figure(figure, args.output / "norms_and_entropies.png")

shown = ("accuracy", "ECE", "ECE after temperature", "mean entropy", "mean L1 norm")
print("\n| penalty | weight |", " | ".join(shown), "|")
print("|---" * (len(shown) + 2) + "|")
for row in results:
    cells = [in_words(row[key]) for key in shown]
    print(f"| {row['penalty']} | {row['weight']:g} |", " | ".join(cells), "|")
print(f"\nWritten to {args.output}/norms_and_entropies.*")
