"""Which examples does a loss learn from? Gradients of a trained network's last layer against the Brier score.

    python recipes/studies/last_layer_gradients.py --data sklearn/20newsgroups

Figures 4 and 5 of "Uncertainty weighted gradients for model calibration" (BSCE-GRA): the norm of
each training example's gradient in the last layer, against its Brier score, at four points of the
run, and the density of these norms by loss; with the ECE on the test set during the run. The paper
trains ResNet-50 on CIFAR-10 for 350 epochs; here it is a global-pooling CNN of one convolution on
posts of 20 Newsgroups, at the same fractions of the run. It takes about 5 minutes on 2 cores.
"""

from pathlib import Path

import numpy as np
from newsgroups_tensors import load_posts, outputs, predict, train_by_epoch
from options import count, parse, study_parser
from papers.gradients import last_layer_gradient_norms
from papers.newsgroups import NEWSGROUPS
from records import (
    in_words,
    kind_of_intervals,
    means_over_seeds,
    print_table,
    write_study,
)
from scipy.stats import gaussian_kde, spearmanr
from sklearn.isotonic import IsotonicRegression

from hf_calib.losses import make_loss
from hf_calib.metrics import accuracy, expected_calibration_error
from hf_calib.plots.style import drawing, line_looks, plain_axes

parser = study_parser(__doc__, seeds=range(3), data=NEWSGROUPS)
parser.add_argument("--epochs", type=count, default=14)
parser.add_argument("--rows", type=count, default=3000)
larger = "All posts, 300 words of each, 35 epochs: hours."
parser.add_argument("--full", action="store_true", help=larger)
args = parse(parser)
# Words of a post.
max_length = 100
if args.full:
    args.epochs = 35
    args.rows = None
    max_length = 300

LOSSES = {
    "cross entropy": make_loss("cross_entropy"),
    "focal, gamma 3": make_loss("focal", gamma=3.0),
    "dual focal, gamma 5": make_loss("dual_focal", gamma=5.0),
    "BSCE-GRA, gamma 2": make_loss("bsce_gra", gamma=2.0),
}
LOOKS = dict(zip(LOSSES, line_looks(), strict=False))
# The paper looks at epochs 50, 150, 250 and 350 of 350.
looked_at = {round(args.epochs * share) for share in (1 / 7, 3 / 7, 5 / 7, 1)}
SNAPSHOTS = sorted({max(1, epoch) for epoch in looked_at})

train, test, sizes = load_posts(
    args.data, rows=args.rows, test_rows=2000, max_length=max_length
)
_, train_labels = train
_, test_labels = test


def brier_scores(probs, labels):
    """(N,), one for each row."""
    return ((probs - np.eye(probs.shape[1])[labels]) ** 2).sum(axis=1)


def narrowness(norms, brier):
    """Spearman's correlation with the Brier score, and the spread in decades around the best monotone curve."""
    seen = norms > 0
    logs = np.log10(norms[seen])
    curve = IsotonicRegression().fit_transform(np.log10(brier[seen]), logs)
    return {
        "spearman": float(spearmanr(norms, brier).statistic),
        "spread_in_decades": float((logs - curve).std()),
    }


def on_test_rows(model):
    probs = predict(model, test)
    return {
        "test_accuracy": accuracy(probs, test_labels),
        "test_mean_confidence": float(probs.max(axis=1).mean()),
        "test_ece": expected_calibration_error(probs, test_labels),
    }


def of_gradients(loss, model):
    """The Brier scores and the gradient norms of the training rows, and the norms of the logits' gradients alone."""
    logits, features = outputs(model, train)
    probs = logits.double().softmax(dim=1).numpy()
    brier = brier_scores(probs, train_labels)
    norms = last_layer_gradient_norms(loss, logits, train_labels, features)
    # Without the features: as with a single input of 1.
    ones = np.ones((len(logits), 1))
    of_logits = last_layer_gradient_norms(loss, logits, train_labels, ones, bias=False)
    return brier, norms, of_logits


results = []
snapshots = []
clouds = {}
for seed in args.seeds:
    for name, loss in LOSSES.items():
        models = train_by_epoch(
            train, sizes, loss, seed=seed, epochs=args.epochs, batch_size=64
        )
        for epoch, model in enumerate(models, start=1):
            on_test = on_test_rows(model)
            run = {"seed": seed, "loss": name, "epoch": epoch} | on_test
            results.append(run)
            if epoch not in SNAPSHOTS:
                continue
            brier, norms, of_logits = of_gradients(loss, model)
            run["mean_norm"] = norms.mean()
            run["median_norm"] = np.median(norms)
            flat = {"seed": seed, "snapshot": (epoch, name)} | on_test
            flat |= {name: run[name] for name in ("mean_norm", "median_norm")}
            for layer, each in (("last_layer", norms), ("logits", of_logits)):
                run[layer] = narrowness(each, brier)
                flat |= {f"{layer}_{key}": run[layer][key] for key in run[layer]}
            snapshots.append(flat)
            if seed == args.seeds[0]:
                clouds[name, epoch] = brier, norms
summaries = means_over_seeds(snapshots, by="snapshot")

# Figure 4: one row of panels a loss, one column a snapshot.
drawn = [name for name in LOSSES if name != "cross entropy"]
with drawing(2.1 * len(SNAPSHOTS) + 0.6, 6) as scatter:
    shape = len(drawn), len(SNAPSHOTS)
    grid = scatter.subplots(*shape, sharex=True, sharey="row", squeeze=False)
    plain_axes(*grid.flat)
    for panels, name in zip(grid, drawn, strict=True):
        look = {"s": 3, "alpha": 0.35, "linewidths": 0, "color": LOOKS[name]["color"]}
        for panel, epoch in zip(panels, SNAPSHOTS, strict=True):
            panel.scatter(*clouds[name, epoch], **look)
        panels[0].set_ylabel(f"{name}\ngradient norm")
    for panel, epoch in zip(grid[0], SNAPSHOTS, strict=True):
        panel.set_title(f"epoch {epoch}")
    for panel in grid[-1]:
        panel.set_xlabel("Brier score")

# Figure 5: the ECE over the training, and the density of the norms at the second and third
# snapshot.
with drawing(9, 3) as density:
    by_epoch, *densities = density.subplots(1, 3)
    epochs = np.arange(1, args.epochs + 1)
    for name, look in LOOKS.items():
        errors = [run["test_ece"] for run in results if run["loss"] == name]
        of_seeds = np.reshape(errors, (len(args.seeds), args.epochs))
        by_epoch.plot(epochs, 100 * of_seeds.mean(axis=0), **look)
    by_epoch.set(xlabel="epoch", ylabel="ECE on the test set, %")
    at = np.linspace(-5, 2, 400)
    for panel, epoch in zip(densities, SNAPSHOTS[1:3], strict=False):
        for name, look in LOOKS.items():
            _, norms = clouds[name, epoch]
            logs = np.log10(np.maximum(norms, 1e-6))
            panel.plot(at, gaussian_kde(logs)(at), label=name, **look)
        panel.set(xlabel="gradient norm, power of ten", ylabel="density")
        panel.set_title(f"epoch {epoch}")
    plain_axes(by_epoch, *densities)
    densities[0].legend(loc="upper left")

columns = {
    "mean norm": "mean_norm",
    "rank correlation with B": "last_layer_spearman",
    "spread": "last_layer_spread_in_decades",
    "spread, logits only": "logits_spread_in_decades",
    "mean confidence": "test_mean_confidence",
    "test accuracy": "test_accuracy",
    "test ECE": "test_ece",
}
order = [(epoch, name) for epoch in SNAPSHOTS for name in LOSSES]
rows = []
for epoch, name in order:
    means = summaries[epoch, name]
    rows.append([str(epoch), name, *(in_words(means[key]) for key in columns.values())])
print_table(["epoch", "loss", *columns], rows)
print("The spread is in powers of ten, around the best monotone curve.")
settings = {
    "data": Path(args.data).name,
    "epochs": args.epochs,
    "train_rows": len(train_labels),
    "test_rows": len(test_labels),
    "max_length": max_length,
}
record = {
    "settings": settings,
    "intervals": kind_of_intervals(args.seeds),
    "summaries": [
        {"loss": name, "epoch": epoch} | summaries[epoch, name] for epoch, name in order
    ],
    "results": results,
}
write_study("last_layer_gradients", args, record, {"": scatter, "density": density})
