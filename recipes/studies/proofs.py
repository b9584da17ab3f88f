"""Numerical checks of the papers' theorems and lemmas at random posteriors and predictions.

    python recipes/studies/proofs.py

The statements are Theorems 4.1 and 4.5 and appendices A.3 to A.9 of "Focal calibration loss" (FCL), Theorem 1 and Lemma
1 of "Dual focal loss", the theorem of section 4.3 and Eq. 12 of "Uncertainty weighted gradients" (BSCE-GRA), and
Theorems 1 and 2 of the comparison study. The minimum of an expected loss is found in float64: for two classes on a grid
and then by Brent's method, for three by the simplex method. For BSCE-GRA, which is defined by its gradient, it is where
the mean gradient is 0. The left panel shows how much a recalibration could gain, under either loss, against the
prediction; the right panel shows the distance of the minimum from the posterior. It takes a minute.
"""

import argparse
import time
from itertools import product

import numpy as np
import torch
from matplotlib.figure import Figure
from options import output_folder
from records import write_record
from scipy.optimize import brentq, minimize, minimize_scalar
from scipy.special import expit, softmax

from hf_calib.losses import (
    brier,
    bsce_gra,
    cross_entropy,
    dual_focal,
    focal,
    focal_calibration,
)
from hf_calib.plots import save_figure

parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
)
parser.add_argument("--output", type=output_folder, default="outputs/studies")
parser.add_argument(
    "--draws",
    type=int,
    default=300,
    help="Posteriors, and predictions for each statement.",
)
args = parser.parse_args()
started = time.perf_counter()
rng = np.random.default_rng(0)


def risks(loss, posterior, probs):
    """The expected losses (n,) of predictions (n, K) where the label is drawn from the posterior (K,)."""
    n, k = probs.shape
    logits = torch.from_numpy(np.log(probs)).repeat_interleave(k, dim=0)
    each = (
        loss(logits, torch.arange(k).repeat(n), reduction="none").numpy().reshape(n, k)
    )
    return each @ posterior


def binary(p):
    p = np.atleast_1d(p)
    return np.stack([p, 1 - p], axis=1)


GRID = np.linspace(1e-4, 1 - 1e-4, 4001)


def minimum_of_two(loss, eta):
    """The probability of the first of two classes at the least expected loss, and that loss."""
    posterior = np.array([eta, 1 - eta])
    on_grid = risks(loss, posterior, binary(GRID))
    i = int(np.clip(on_grid.argmin(), 1, len(GRID) - 2))
    found = minimize_scalar(
        lambda p: risks(loss, posterior, binary(p))[0],
        bounds=(GRID[i - 1], GRID[i + 1]),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return float(found.x), float(found.fun)


STEPS = np.arange(1, 100) / 100
SIMPLEX = np.array([(a, b, 1 - a - b) for a in STEPS for b in STEPS if a + b < 0.995])
SIMPLEX = SIMPLEX[np.diff(np.sort(SIMPLEX), axis=1).min(axis=1) > 0.005]


def minimum_of_three(loss, posterior):
    """The probabilities at the least expected loss, but for points where classes tie.

    There a label's rival in dual focal, the next below it, is another: lone points, lower than all around, that no
    training finds.
    """

    def risk(z):
        probs = softmax([*z, 0.0])
        tie = np.diff(np.sort(probs)).min() < 1e-7
        return np.inf if tie else risks(loss, posterior, probs[None])[0]

    start = SIMPLEX[risks(loss, posterior, SIMPLEX).argmin()]
    options = {
        "xatol": 1e-9,
        "fatol": 1e-13,
        "initial_simplex": np.log(start[:2] / start[2]) + SMALL,
    }
    found = minimize(
        risk,
        np.log(start[:2] / start[2]),
        method="Nelder-Mead",
        options=options,
    )
    return softmax([*found.x, 0.0])


SMALL = 0.02 * np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])


def ranked_alike(found, posterior):
    """Whether no two classes are the other way around, beyond what the search cannot tell."""
    order = np.argsort(posterior)
    return bool((np.diff(found[order]) > -1e-4).all())


def share(holds):
    return {"holds": int(np.sum(holds)), "of": len(holds)}


record = {}

# FCL, Theorem 4.1: the minimum is nearer to the posterior than focal's.
nearer_two, nearer_three = [], []
for eta, gamma, weight in zip(
    rng.uniform(0.02, 0.98, args.draws),
    rng.choice([1.0, 2.0, 3.0, 5.0], args.draws),
    rng.choice([0.1, 0.5, 1.0, 3.0], args.draws),
    strict=True,
):
    of_focal, _ = minimum_of_two(focal(gamma=gamma), eta)
    of_fcl, _ = minimum_of_two(focal_calibration(gamma=gamma, brier_weight=weight), eta)
    nearer_two.append(abs(of_fcl - eta) <= abs(of_focal - eta) + 1e-7)
in_order, same_first = [], []
for posterior in rng.dirichlet([1.0, 1.0, 1.0], args.draws // 3):
    losses = (
        focal(gamma=3.0),
        focal_calibration(gamma=3.0, brier_weight=0.5),
        dual_focal(gamma=3.0),
    )
    minima = [minimum_of_three(loss, posterior) for loss in losses]
    distances = [np.linalg.norm(found - posterior) for found in minima]
    nearer_three.append(distances[1] <= distances[0] + 1e-6)
    in_order.append([ranked_alike(found, posterior) for found in minima[1:]])
    same_first.append(minima[2].argmax() == posterior.argmax())
record["fcl_4.1_two_classes"] = share(nearer_two)
record["fcl_4.1_three_classes"] = share(nearer_three)

# FCL, Theorem 4.5, as printed: for any prediction, FCL leaves no more to a recalibration than focal.
ETA, GAMMA, WEIGHT = 0.7, 3.0, 0.5
two = {
    "focal": focal(gamma=GAMMA),
    "FCL": focal_calibration(gamma=GAMMA, brier_weight=WEIGHT),
}
least = {name: minimum_of_two(loss, ETA) for name, loss in two.items()}


def gap(name, p):
    return float(
        risks(two[name], np.array([ETA, 1 - ETA]), binary(p))[0] - least[name][1]
    )


at = least["focal"][0]
record["fcl_4.5_counterexample"] = {
    "posterior": ETA,
    "gamma": GAMMA,
    "brier_weight": WEIGHT,
    "prediction": at,
    "gap_of_focal": gap("focal", at),
    "gap_of_fcl": gap("FCL", at),
}
drawn = []
for eta, p in rng.uniform(0.02, 0.98, (args.draws, 2)):
    posterior = np.array([eta, 1 - eta])
    gaps = [
        risks(loss, posterior, binary(p))[0] - minimum_of_two(loss, eta)[1]
        for loss in two.values()
    ]
    drawn.append(gaps[1] <= gaps[0] + 1e-9)
record["fcl_4.5_any_prediction"] = share(drawn)

# Appendix A.5 and DFL's Theorem 1: the minimum ranks the classes as the posterior does.
record["fcl_a.5"] = share([fcl for fcl, _ in in_order])
record["dfl_theorem_1"] = share([dual for _, dual in in_order])
record["dfl_theorem_1_first_class"] = share(same_first)
posterior = np.array([0.08, 0.064, 0.856])
fine = np.arange(1, 400) / 1000
fine = np.array([(a, b, 1 - a - b) for a in fine for b in fine if a != b])
values = risks(dual_focal(gamma=3.0), posterior, fine)
alike = fine[:, 0] > fine[:, 1]
record["dfl_theorem_1_counterexample"] = {
    "posterior": posterior.tolist(),
    "gamma": 3.0,
    "least": values.min(),
    "at": fine[values.argmin()].tolist(),
    "least_in_the_posterior's_order": values[alike].min(),
}

# Appendix A.6: the slope of the expected loss has one root.
roots = []
for eta in np.linspace(0.02, 0.98, 49):
    values = risks(two["FCL"], np.array([eta, 1 - eta]), binary(GRID))
    roots.append(int((np.diff(np.sign(np.diff(values))) != 0).sum()) == 1)
record["fcl_a.6"] = share(roots)

# Appendix A.7: the Brier term alone is proper. A.8: so is FCL, with any weight above 0.
etas = np.linspace(0.05, 0.95, 19)
record["fcl_a.7"] = share(
    [abs(minimum_of_two(brier(), eta)[0] - eta) < 1e-6 for eta in etas]
)
by_weight = {}
for weight in (0.0, 0.1, 0.5, 1.0, 3.0, 10.0, 100.0):
    loss = focal_calibration(gamma=GAMMA, brier_weight=weight)
    by_weight[weight] = [minimum_of_two(loss, eta)[0] - eta for eta in etas]
record["fcl_a.8"] = [
    {
        "brier_weight": weight,
        "minimum_at_posterior_0.7": minimum_of_two(
            focal_calibration(gamma=GAMMA, brier_weight=weight), ETA
        )[0],
        "largest_distance": float(np.abs(away).max()),
    }
    for weight, away in by_weight.items()
]

# DFL, Lemma 1: phi starts at (1 + C)^gamma, ends at C^gamma, and has one maximum between.
lemma = []
for gamma, rival in product((0.5, 1.0, 2.0, 3.0, 5.0), (0.0, 0.05, 0.2, 0.4)):
    v = np.concatenate([np.geomspace(1e-9, 1e-3, 2000), GRID[GRID > 1e-3]])
    margin = 1 - v + rival
    phi = margin**gamma - gamma * margin ** (gamma - 1) * v * np.log(v)
    turns = int((np.diff(np.sign(np.diff(phi))) != 0).sum())
    ends = (
        abs(phi[0] - (1 + rival) ** gamma) < 1e-5 and abs(phi[-1] - rival**gamma) < 0.05
    )
    lemma.append({"gamma": gamma, "rival": rival, "maxima": turns, "ends": bool(ends)})
record["dfl_lemma_1"] = share([row["maxima"] == 1 and row["ends"] for row in lemma])
record["dfl_lemma_1_fails_at"] = [
    row for row in lemma if not (row["maxima"] == 1 and row["ends"])
]

# The comparison study. Theorem 1: logits times t > 1 are more confident. Theorem 2: focal >= CE - gamma H.
logits = rng.normal(scale=2, size=(args.draws, 5))
scales = rng.uniform(1, 5, (args.draws, 1))
record["study_theorem_1"] = share(
    softmax(scales * logits, axis=1).max(1) >= softmax(logits, axis=1).max(1) - 1e-12
)
probs = softmax(logits, axis=1)
entropies = -(probs * np.log(probs)).sum(axis=1)
labels = torch.from_numpy(rng.integers(5, size=args.draws))
rows = torch.from_numpy(np.log(probs))
for gamma in (0.5, 1.0, 3.0):
    bound = cross_entropy()(rows, labels, reduction="none").numpy() - gamma * entropies
    above = focal(gamma=gamma)(rows, labels, reduction="none").numpy() >= bound - 1e-12
    record[f"study_theorem_2_gamma_{gamma:g}"] = share(above)
# Where the bound is tightest: all that is not the label's in one class.
p = GRID
two_class_entropy = -(p * np.log(p) + (1 - p) * np.log1p(-p))
record["study_theorem_2_least_slack"] = {
    f"{gamma:g}": float(
        (-((1 - p) ** gamma) * np.log(p) + np.log(p) + gamma * two_class_entropy).min()
    )
    for gamma in (0.1, 0.5, 0.9, 1.0, 3.0)
}

# BSCE-GRA, 4.3: "the K-class predicted probability q would equal the actual class-posterior probability".
rng = np.random.default_rng(1)


def rest_of_bsce_gra(gamma, eta):
    """The first of two probabilities at which the expected gradient is 0."""
    loss = bsce_gra(gamma=gamma, norm=2.0)

    def slope(z):
        logits = torch.tensor([[z, 0.0]] * 2, dtype=torch.float64, requires_grad=True)
        each = loss(logits, torch.tensor([0, 1]), reduction="none")
        return torch.autograd.grad(
            each @ torch.tensor([eta, 1 - eta], dtype=torch.float64), logits
        )[0][:, 0].sum()

    return float(expit(brentq(slope, -20, 20, xtol=1e-12)))


record["bsce_gra_theorem"] = share(
    [abs(rest_of_bsce_gra(2.0, eta) - eta) < 1e-6 for eta in etas]
)
record["bsce_gra_theorem_at_posterior_0.7"] = {
    f"gamma {gamma:g}": rest_of_bsce_gra(gamma, ETA) for gamma in (0.0, 2.0, 4.0)
}
# Eq. 12: the expected Brier score exceeds the squared distance to the posterior by what the prediction cannot change.
equal = []
for posterior, probs in rng.dirichlet([1.0] * 5, (args.draws, 2)):
    brier_scores = ((probs - np.eye(5)) ** 2).sum(axis=1)
    left = ((probs - posterior) ** 2).sum() - posterior @ brier_scores
    equal.append(abs(left - (posterior * (posterior - 1)).sum()) < 1e-12)
record["bsce_gra_eq_12"] = share(equal)

# FCL, A.3: its minimum is the posterior. A.4, for which A.3 needs it: the expected loss is strictly convex.
record["fcl_a.3"] = share([abs(away) < 1e-6 for away in by_weight[WEIGHT]])
convex = []
for posterior, *ends in rng.dirichlet([1.0] * 3, (args.draws, 3)):
    first, second, middle = risks(
        two["FCL"], posterior, np.array([*ends, np.mean(ends, axis=0)])
    )
    convex.append(middle < (first + second) / 2)
record["fcl_a.4"] = share(convex)
# A.9: focal >= KL + H(q) - gamma H(p), that is CE - gamma H(p); for any posterior, as its proof says.
for gamma in (0.5, 1.0, 3.0):
    above = []
    for posterior, probs in rng.dirichlet([1.0] * 5, (args.draws, 2)):
        values = {
            loss: risks(loss, posterior, probs[None])[0]
            for loss in (focal(gamma=gamma), cross_entropy())
        }
        of_focal, of_cross_entropy = values.values()
        above.append(
            of_focal >= of_cross_entropy + gamma * (probs @ np.log(probs)) - 1e-12
        )
    record[f"fcl_a.9_gamma_{gamma:g}"] = share(above)

figure = Figure(figsize=(7.5, 3), layout="constrained")
gaps, minima = figure.subplots(1, 2)
shown = np.linspace(0.3, 0.95, 200)
for (name, loss), (dash, colour) in zip(
    two.items(), (("-", "#0072B2"), ("--", "#D55E00")), strict=True
):
    values = risks(loss, np.array([ETA, 1 - ETA]), binary(shown)) - least[name][1]
    gaps.plot(shown, values, dash, color=colour, label=name)
gaps.axvline(at, color="#000000", linestyle=":", linewidth=0.8)
gaps.set(
    xlabel="prediction, where the posterior is 0.7",
    ylabel="to gain by a recalibration, nats",
    ylim=(0, 0.1),
)
for (weight, away), dash in zip(
    list(by_weight.items())[::2], ("-", "--", "-.", ":"), strict=True
):
    minima.plot(etas, away, dash, label=f"weight {weight:g}")
minima.axhline(0, color="#000000", linewidth=0.5)
minima.set(xlabel="posterior", ylabel="minimum of FCL less the posterior")
for panel in (gaps, minima):
    panel.tick_params(labelsize=7)
    panel.xaxis.label.set_fontsize(8)
    panel.yaxis.label.set_fontsize(8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=7, frameon=False)
save_figure(figure, args.output / "proofs.png")

path = args.output / "proofs.json"
seconds = round(time.perf_counter() - started)
write_record(
    path,
    {"settings": {"draws": args.draws}, "seeds": [0], "seconds": seconds, **record},
)
for name, found in record.items():
    if isinstance(found, dict) and set(found) == {"holds", "of"}:
        print(f"{name}: holds in {found['holds']} of {found['of']}")
    else:
        print(f"{name}: {found}")
print(f"{seconds} s. Wrote {path}")
