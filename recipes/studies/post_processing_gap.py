"""The post-processing gap after training with focal calibration loss, against gamma and lambda.

    python recipes/studies/post_processing_gap.py --data sklearn/20newsgroups

This follows Figure 6 of "Focal calibration loss" (FCL) and its Theorem 4.5, according to which a
larger weight of the Brier term gives a smaller post-processing gap. The heat maps show the ECE and
the gap of the Brier score on the test set against gamma and lambda; another figure shows the test
NLL by epoch. The gap has two forms: over 1-Lipschitz *updates* of the confidence, as in Blasiok et
al. 2023, and over 1-Lipschitz *maps*, as in Definition 2.3 of FCL. The network is a global-pooling
CNN with one convolution on posts of 20 Newsgroups. It takes about 6 minutes on 2 cores.
"""

from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator
from newsgroups_tensors import load_posts, predict, train_by_epoch
from options import at_least_0, check_different, count, parse, study_parser
from papers.newsgroups import NEWSGROUPS
from papers.post_processing import post_processing_gap
from records import kind_of_intervals, means_over_seeds, print_table, write_study
from scipy.stats import spearmanr

from hf_calib.losses import make_loss
from hf_calib.metrics import (
    accuracy,
    expected_calibration_error,
    negative_log_likelihood,
    smooth_calibration_error_dual,
)
from hf_calib.plots.style import drawing, line_looks, plain_axes

# Words of a post.
MAX_LENGTH = 100
# Name in the record -> title of the heat map.
DRAWN = {
    "ece": "ECE, %",
    "gap_over_updates": "post-processing gap over updates, Brier x 100",
    "gap_over_maps": "post-processing gap over maps, Brier x 100",
}

parser = study_parser(__doc__, seeds=[0], data=NEWSGROUPS)
parser.add_argument("--gammas", type=at_least_0, nargs="+", default=[0, 1, 3, 5])
parser.add_argument("--lambdas", type=at_least_0, nargs="+", default=[0, 0.5, 1.5, 4.5])
parser.add_argument("--epochs", type=count, default=14)
parser.add_argument("--rows", type=count, default=2000)
larger = "A grid of 6 x 7, 3 seeds, 6,000 posts: 2 hours."
parser.add_argument("--full", action="store_true", help=larger)
args = parse(parser)
check_different(parser, "gammas", args.gammas, 1)
check_different(parser, "lambdas", args.lambdas, 2)
if args.full:
    args.gammas = [0, 1, 2, 3, 4, 5]
    args.lambdas = [0, 0.25, 0.5, 1, 1.5, 3, 4.5]
    args.seeds = [0, 1, 2]
    args.rows = 6000

train, test, sizes = load_posts(
    args.data, rows=args.rows, test_rows=3000, max_length=MAX_LENGTH
)


def measured(probs, labels):
    return {
        "accuracy": accuracy(probs, labels),
        "mean_confidence": probs.max(axis=1).mean(),
        "ece": expected_calibration_error(probs, labels),
        "gap_over_updates": post_processing_gap(probs, labels, smooth="update"),
        "gap_over_maps": post_processing_gap(probs, labels, smooth="map"),
        "smooth_calibration_error_dual": smooth_calibration_error_dual(probs, labels),
    }


results = []
at_the_end = []
nll_by_epoch = {}
_, test_labels = test
for seed, gamma, weight in product(args.seeds, args.gammas, args.lambdas):
    loss = make_loss("focal_calibration", gamma=gamma, brier_weight=weight)
    nll = []
    for model in train_by_epoch(
        train, sizes, loss, seed=seed, epochs=args.epochs, batch_size=32
    ):
        probs = predict(model, test)
        nll.append(negative_log_likelihood(probs, test_labels))
    found = measured(probs, test_labels)
    setting = {"seed": seed, "gamma": gamma, "lambda": weight}
    results.append(setting | found | {"nll_by_epoch": nll})
    at_the_end.append({"seed": seed, "cell": (gamma, weight)} | found)
    nll_by_epoch.setdefault((gamma, weight), []).append(nll)
cells = means_over_seeds(at_the_end, by="cell")


def mean(measure, gamma, weight):
    return cells[gamma, weight][measure]["value"]


# Heat maps: lighter is larger, in colour and in grey.
with drawing(3 * len(DRAWN), 3.1) as heat_maps:
    panels = heat_maps.subplots(1, len(DRAWN))
    for panel, (measure, title) in zip(panels, DRAWN.items(), strict=True):
        rows = [[mean(measure, g, w) for w in args.lambdas] for g in args.gammas]
        grid = 100 * np.array(rows)
        middle = (grid.min() + grid.max()) / 2
        panel.imshow(grid, origin="lower", cmap="cividis", aspect="auto")
        for (down, across), value in np.ndenumerate(grid):
            ink = "black" if value > middle else "white"
            centred = {"ha": "center", "va": "center", "fontsize": 8}
            panel.text(across, down, f"{value:.2f}", color=ink, **centred)
        panel.set_xticks(range(len(args.lambdas)), [f"{w:g}" for w in args.lambdas])
        panel.set_yticks(range(len(args.gammas)), [f"{g:g}" for g in args.gammas])
        panel.set(xlabel="lambda, weight of the Brier term", ylabel="gamma")
        panel.set_title(title, fontsize=8)
        panel.tick_params(labelsize=8)

# Test NLL by epoch: a panel each gamma, a line each lambda.
n_panels = len(args.gammas)
with drawing(2.3 * n_panels, 2.7) as nll_figure:
    (panels,) = nll_figure.subplots(
        1, n_panels, sharex=True, sharey=True, squeeze=False
    )
    epochs = range(1, args.epochs + 1)
    for panel, gamma in zip(panels, args.gammas, strict=True):
        for weight, look in zip(args.lambdas, line_looks(), strict=False):
            nll = np.mean(nll_by_epoch[gamma, weight], axis=0)
            panel.plot(epochs, nll, label=f"lambda {weight:g}", **look)
        panel.set(title=f"gamma {gamma:g}", xlabel="epoch")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    plain_axes(*panels)
    panels[0].set_ylabel("test NLL, nats")
    panels[0].legend()

# Theorem 4.5 says that the gap does not grow with lambda: the rank correlation would be -1 for each
# gamma.
order = []
for gamma in args.gammas:
    gaps = [mean("gap_over_updates", gamma, weight) for weight in args.lambdas]
    errors = [mean("ece", gamma, weight) for weight in args.lambdas]
    rank_correlation = float(spearmanr(args.lambdas, gaps).statistic)
    order.append(
        {
            "gamma": gamma,
            "spearman_of_lambda_and_gap_over_updates": rank_correlation,
            "least_gap_at_lambda": args.lambdas[np.argmin(gaps)],
            "least_ece_at_lambda": args.lambdas[np.argmin(errors)],
        }
    )

header = ["gamma", "lambda", "accuracy", "ECE %", "gap: updates", "maps", "smCE"]
rows = []
for cell in cells:
    row = [f"{number:g}" for number in cell]
    row += [f"{mean('accuracy', *cell):.3f}", f"{100 * mean('ece', *cell):.2f}"]
    for measure in ("gap_over_updates", "gap_over_maps"):
        row.append(f"{mean(measure, *cell):.5f}")
    row.append(f"{mean('smooth_calibration_error_dual', *cell):.4f}")
    rows.append(row)
print_table(header, rows)
settings = {
    "data": Path(args.data).name,
    "gammas": args.gammas,
    "lambdas": args.lambdas,
    "epochs": args.epochs,
    "train_rows": len(train[1]),
    "test_rows": len(test_labels),
    "max_length": MAX_LENGTH,
}
summary = [
    {"gamma": gamma, "lambda": weight} | cell for (gamma, weight), cell in cells.items()
]
record = {
    "settings": settings,
    "intervals": kind_of_intervals(args.seeds),
    "order": order,
    "summary": summary,
    "results": results,
}
write_study("post_processing_gap", args, record, {"": heat_maps, "nll": nll_figure})
