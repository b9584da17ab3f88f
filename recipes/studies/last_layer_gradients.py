"""Which examples does a loss learn from? Gradients of a trained network's last layer against the Brier score.

    python recipes/studies/last_layer_gradients.py --data sklearn/20newsgroups

Figures 4 and 5 of "Uncertainty weighted gradients for model calibration" (BSCE-GRA): the norm of each training
example's gradient in the last layer, against its Brier score, at four points of the run, and the density of
these norms by loss; with the ECE on the test set during the run. The paper trains ResNet-50 on CIFAR-10 for
350 epochs; here it is a global-pooling CNN of one convolution on posts of 20 Newsgroups, at the same
fractions of the run. It takes about 5 minutes on 2 cores.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from newsgroups_tensors import load_posts, outputs, train_by_epoch
from options import check_seeds, count, output_folder
from papers.gradients import last_layer_gradient_norms
from records import in_words, kind_of_intervals, over_seeds, write_record
from scipy.special import softmax
from scipy.stats import gaussian_kde, spearmanr
from sklearn.isotonic import IsotonicRegression

from hf_calib.losses import make_loss
from hf_calib.metrics import accuracy, expected_calibration_error
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
parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
parser.add_argument("--epochs", type=count, default=14)
parser.add_argument("--rows", type=count, default=3000)
parser.add_argument(
    "--full",
    action="store_true",
    help="All posts, 300 words of each, 35 epochs: hours.",
)
args = parser.parse_args()
check_seeds(parser, args.seeds)
max_length = 100  # words of a post
if args.full:
    args.epochs, args.rows, max_length = 35, None, 300

LOSSES = {
    "cross entropy": make_loss("cross_entropy"),
    "focal, gamma 3": make_loss("focal", gamma=3.0),
    "dual focal, gamma 5": make_loss("dual_focal", gamma=5.0),
    "BSCE-GRA, gamma 2": make_loss("bsce_gra", gamma=2.0),
}
LOOKS = {  # of each loss: colour, dash
    "cross entropy": ("#000000", ":"),
    "focal, gamma 3": ("#0072B2", "-"),
    "dual focal, gamma 5": ("#D55E00", (0, (5, 1.5))),
    "BSCE-GRA, gamma 2": ("#009E73", (0, (5, 1.5, 1, 1.5))),
}
# The paper looks at epochs 50, 150, 250 and 350 of 350.
SNAPSHOTS = sorted(
    {max(1, round(args.epochs * share)) for share in (1 / 7, 3 / 7, 5 / 7, 1)}
)

(train, train_labels), (test, test_labels), sizes = load_posts(
    args.data, rows=args.rows, test_rows=2000, max_length=max_length
)


def narrowness(norms, brier):
    """Spearman's correlation with the Brier score, and the spread in decades around the best monotone curve."""
    seen = norms > 0
    logs = np.log10(norms[seen])
    curve = IsotonicRegression().fit_transform(np.log10(brier[seen]), logs)
    return {
        "spearman": float(spearmanr(norms, brier).statistic),
        "spread_in_decades": float((logs - curve).std()),
    }


started = time.perf_counter()
results, clouds = [], {}
for seed in args.seeds:
    for name, loss in LOSSES.items():
        training = train_by_epoch(
            train,
            train_labels,
            sizes,
            loss,
            seed=seed,
            epochs=args.epochs,
            batch_size=64,
        )
        for epoch, model in enumerate(training, start=1):
            probs = softmax(outputs(model, test)[0].double().numpy(), axis=1)
            row = {
                "seed": seed,
                "loss": name,
                "epoch": epoch,
                "test_accuracy": accuracy(probs, test_labels),
                "test_mean_confidence": float(probs.max(axis=1).mean()),
                "test_ece": expected_calibration_error(probs, test_labels),
            }
            if epoch in SNAPSHOTS:
                logits, features = outputs(model, train)
                probs = softmax(logits.double().numpy(), axis=1)
                brier = ((probs - np.eye(probs.shape[1])[train_labels]) ** 2).sum(
                    axis=1
                )
                norms = last_layer_gradient_norms(loss, logits, train_labels, features)
                # Without the features: the gradient of the logits alone, as with a single input of 1.
                of_logits = last_layer_gradient_norms(
                    loss, logits, train_labels, np.ones((len(logits), 1)), bias=False
                )
                row |= {
                    "mean_norm": norms.mean(),
                    "median_norm": np.median(norms),
                    "last_layer": narrowness(norms, brier),
                    "logits": narrowness(of_logits, brier),
                }
                if seed == args.seeds[0]:
                    clouds[name, epoch] = brier, norms
            results.append(row)

# Figure 4: one row of panels a loss, one column a snapshot.
losses_drawn = [name for name in LOSSES if name != "cross entropy"]
figure = Figure(figsize=(2.1 * len(SNAPSHOTS) + 0.6, 6), layout="constrained")
axes = figure.subplots(
    len(losses_drawn), len(SNAPSHOTS), sharex=True, sharey="row", squeeze=False
)
for across, name in zip(axes, losses_drawn, strict=True):
    for panel, epoch in zip(across, SNAPSHOTS, strict=True):
        brier, norms = clouds[name, epoch]
        panel.scatter(brier, norms, s=3, alpha=0.35, linewidths=0, color=LOOKS[name][0])
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    across[0].set_ylabel(f"{name}\ngradient norm", fontsize=8)
for panel, epoch in zip(axes[0], SNAPSHOTS, strict=True):
    panel.set_title(f"epoch {epoch}", fontsize=9)
for panel in axes[-1]:
    panel.set_xlabel("Brier score", fontsize=8)
save_figure(figure, args.output / "last_layer_gradients.png")

# Figure 5: the ECE over the training, and the density of the norms at the second and third snapshot.
figure = Figure(figsize=(9, 3), layout="constrained")
by_epoch, *densities = figure.subplots(1, 3)
for name, (colour, dash) in LOOKS.items():
    errors = [
        [100 * r["test_ece"] for r in results if (r["seed"], r["loss"]) == (seed, name)]
        for seed in args.seeds
    ]
    epochs = np.arange(1, args.epochs + 1)
    by_epoch.plot(
        epochs, np.mean(errors, axis=0), color=colour, linestyle=dash, label=name
    )
by_epoch.set(xlabel="epoch", ylabel="ECE on the test set, %")
for panel, epoch in zip(densities, SNAPSHOTS[1:3], strict=False):
    for name, (colour, dash) in LOOKS.items():
        logs = np.log10(np.maximum(clouds[name, epoch][1], 1e-6))
        at = np.linspace(-5, 2, 400)
        panel.plot(at, gaussian_kde(logs)(at), color=colour, linestyle=dash, label=name)
    panel.set(
        xlabel="gradient norm, power of ten", ylabel="density", title=f"epoch {epoch}"
    )
    panel.title.set_fontsize(9)
for panel in (by_epoch, *densities):
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
densities[0].legend(fontsize=7, frameon=False, loc="upper left")
save_figure(figure, args.output / "last_layer_gradients_density.png")


def summary(name, epoch):
    """Over the seeds at one snapshot."""
    rows = [r for r in results if r["loss"] == name and r["epoch"] == epoch]
    keys = (
        "test_accuracy",
        "test_mean_confidence",
        "test_ece",
        "mean_norm",
        "median_norm",
    )
    found = {key: over_seeds([r[key] for r in rows]) for key in keys}
    for part in ("last_layer", "logits"):
        for key in ("spearman", "spread_in_decades"):
            found[f"{part}_{key}"] = over_seeds([r[part][key] for r in rows])
    return {"loss": name, "epoch": epoch} | found


summaries = [summary(name, epoch) for epoch in SNAPSHOTS for name in LOSSES]
record = {
    "settings": {
        "data": Path(args.data).name,
        "epochs": args.epochs,
        "train_rows": len(train),
        "test_rows": len(test),
        "max_length": max_length,
    },
    "seeds": args.seeds,
    "intervals": kind_of_intervals(args.seeds),
    "seconds": round(time.perf_counter() - started),
    "summaries": summaries,
    "results": results,
}
path = args.output / "last_layer_gradients.json"
write_record(path, record)

columns = {
    "mean norm": "mean_norm",
    "rank correlation with B": "last_layer_spearman",
    "spread": "last_layer_spread_in_decades",
    "spread, logits only": "logits_spread_in_decades",
    "mean confidence": "test_mean_confidence",
    "test accuracy": "test_accuracy",
    "test ECE": "test_ece",
}
print("| epoch | loss |", " | ".join(columns), "|")
print("|---" * (len(columns) + 2) + "|")
for row in summaries:
    cells = (in_words(row[key]) for key in columns.values())
    print(f"| {row['epoch']} | {row['loss']} |", " | ".join(cells), "|")
print(
    f"The spread is in powers of ten, around the best monotone curve. {record['seconds']} s. Wrote {path}"
)
