"""Numerical checks of the papers' theorems and lemmas at random posteriors and predictions.

    python recipes/studies/proofs.py

The statements are Theorems 4.1 and 4.5 and appendices A.3 to A.9 of "Focal calibration loss" (FCL),
Theorem 1 and Lemma 1 of "Dual focal loss", the theorem of section 4.3 and Eq. 12 of "Uncertainty
weighted gradients" (BSCE-GRA), and Theorems 1 and 2 of the comparison study. The minimum of an
expected loss is found in float64: for two classes on a grid and then by Brent's method, for three
by the simplex method. For BSCE-GRA, which is defined by its gradient, it is where the mean gradient
is 0. The left panel shows how much a recalibration could gain, under either loss, against the
prediction; the right panel shows the distance of the minimum from the posterior. It takes a minute.
"""

from itertools import product

import numpy as np
import torch
from options import count, parse, study_parser
from records import write_study
from scipy.optimize import brentq, minimize, minimize_scalar
from scipy.special import entr, expit, softmax

from hf_calib.losses import (
    brier,
    bsce_gra,
    cross_entropy,
    dual_focal,
    focal,
    focal_calibration,
)
from hf_calib.plots.style import BLUE, VERMILION, drawing, plain_axes

parser = study_parser(__doc__)
parser.add_argument(
    "--draws",
    type=count,
    default=300,
    help="Posteriors, and predictions for each statement.",
)
args = parse(parser)
rng = np.random.default_rng(0)
record = {"settings": {"draws": args.draws}, "seeds": [0]}

# Expected losses and their minima


def row_losses(loss, probs, labels):
    """The losses (n,) of predictions (n, K)."""
    logits = torch.from_numpy(np.log(probs))
    return loss(logits, torch.from_numpy(labels), reduction="none").numpy()


def risks(loss, posterior, probs):
    """The expected losses (n,) of predictions (n, K) where the label is drawn from the posterior (K,)."""
    n, k = probs.shape
    each = row_losses(loss, probs.repeat(k, axis=0), np.tile(np.arange(k), n))
    return each.reshape(n, k) @ posterior


def two_classes(p):
    """Probabilities (n, 2) of two classes, the first of which has p."""
    p = np.atleast_1d(p)
    return np.stack([p, 1 - p], axis=1)


def risks_of_two(loss, eta, p):
    """The expected losses (n,) of predictions p of the first of two classes, which has posterior eta."""
    return risks(loss, two_classes(eta)[0], two_classes(p))


GRID = np.linspace(1e-4, 1 - 1e-4, 4001)


def minimum_of_two(loss, eta):
    """The probability of the first of two classes at the least expected loss, and that loss."""
    on_grid = risks_of_two(loss, eta, GRID)
    i = np.clip(on_grid.argmin(), 1, len(GRID) - 2)
    found = minimize_scalar(
        lambda p: risks_of_two(loss, eta, p)[0],
        bounds=(GRID[i - 1], GRID[i + 1]),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return float(found.x), float(found.fun)


def distance_of_two(loss, eta):
    """The minimum less the posterior, with a sign."""
    at, _ = minimum_of_two(loss, eta)
    return at - eta


def gaps(loss, eta, p):
    """What a recalibration of predictions p could gain."""
    _, least = minimum_of_two(loss, eta)
    return risks_of_two(loss, eta, p) - least


STEPS = np.arange(1, 100) / 100
SIMPLEX = np.array([(a, b, 1 - a - b) for a in STEPS for b in STEPS if a + b < 0.995])
SIMPLEX = SIMPLEX[np.diff(np.sort(SIMPLEX), axis=1).min(axis=1) > 0.005]
START = 0.02 * np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])


def minimum_of_three(loss, posterior):
    """The probabilities at the least expected loss, but for points where classes tie.

    There a label's rival in dual focal, the next below it, is another: lone points, lower than all
    around, that no training finds.
    """

    def risk(z):
        probs = softmax([*z, 0.0])
        if np.diff(np.sort(probs)).min() < 1e-7:
            return np.inf
        return risks(loss, posterior, probs[None])[0]

    on_grid = SIMPLEX[risks(loss, posterior, SIMPLEX).argmin()]
    start = np.log(on_grid[:2] / on_grid[2])
    options = {"xatol": 1e-9, "fatol": 1e-13, "initial_simplex": start + START}
    found = minimize(risk, start, method="Nelder-Mead", options=options)
    return softmax([*found.x, 0.0])


def ranked_alike(found, posterior):
    """Whether no two classes are the other way around, beyond what the search cannot tell."""
    order = np.argsort(posterior)
    return bool((np.diff(found[order]) > -1e-4).all())


def turns(values):
    """How often a curve on a grid goes from up to down or from down to up."""
    direction = np.sign(np.diff(values))
    return int((np.diff(direction) != 0).sum())


def share(holds):
    return {"holds": int(np.sum(holds)), "of": len(holds)}


# FCL, Theorem 4.1: the minimum is nearer to the posterior than focal's.
nearer = []
etas = rng.uniform(0.02, 0.98, args.draws)
gammas = rng.choice([1.0, 2.0, 3.0, 5.0], args.draws)
weights = rng.choice([0.1, 0.5, 1.0, 3.0], args.draws)
for eta, gamma, weight in zip(etas, gammas, weights, strict=True):
    fcl = focal_calibration(gamma=gamma, brier_weight=weight)
    of_focal = distance_of_two(focal(gamma=gamma), eta)
    nearer.append(abs(distance_of_two(fcl, eta)) <= abs(of_focal) + 1e-7)
record["fcl_4.1_two_classes"] = share(nearer)

nearer = []
in_order_of_fcl = []
in_order_of_dual = []
same_first = []
of_three = {
    "focal": focal(gamma=3.0),
    "FCL": focal_calibration(gamma=3.0, brier_weight=0.5),
    "dual focal": dual_focal(gamma=3.0),
}
for posterior in rng.dirichlet([1.0, 1.0, 1.0], args.draws // 3):
    minima = {
        name: minimum_of_three(loss, posterior) for name, loss in of_three.items()
    }
    away = {name: np.linalg.norm(at - posterior) for name, at in minima.items()}
    nearer.append(away["FCL"] <= away["focal"] + 1e-6)
    in_order_of_fcl.append(ranked_alike(minima["FCL"], posterior))
    in_order_of_dual.append(ranked_alike(minima["dual focal"], posterior))
    same_first.append(minima["dual focal"].argmax() == posterior.argmax())
record["fcl_4.1_three_classes"] = share(nearer)

# FCL, Theorem 4.5, as printed: for any prediction, FCL leaves no more to a recalibration than
# focal.
ETA = 0.7
GAMMA = 3.0
WEIGHT = 0.5
FOCAL = focal(gamma=GAMMA)
FCL = focal_calibration(gamma=GAMMA, brier_weight=WEIGHT)
minimum_of_focal, _ = minimum_of_two(FOCAL, ETA)
record["fcl_4.5_counterexample"] = {
    "posterior": ETA,
    "gamma": GAMMA,
    "brier_weight": WEIGHT,
    "prediction": minimum_of_focal,
    "gap_of_focal": gaps(FOCAL, ETA, minimum_of_focal)[0],
    "gap_of_fcl": gaps(FCL, ETA, minimum_of_focal)[0],
}
drawn = rng.uniform(0.02, 0.98, (args.draws, 2))
record["fcl_4.5_any_prediction"] = share(
    [gaps(FCL, *pair)[0] <= gaps(FOCAL, *pair)[0] + 1e-9 for pair in drawn]
)

# Appendix A.5 and DFL's Theorem 1: the minimum ranks the classes as the posterior does.
record["fcl_a.5"] = share(in_order_of_fcl)
record["dfl_theorem_1"] = share(in_order_of_dual)
record["dfl_theorem_1_first_class"] = share(same_first)
posterior = np.array([0.08, 0.064, 0.856])
steps = np.arange(1, 400) / 1000
fine = np.array([(a, b, 1 - a - b) for a, b in product(steps, steps) if a != b])
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
etas = np.linspace(0.02, 0.98, 49)
record["fcl_a.6"] = share([turns(risks_of_two(FCL, eta, GRID)) == 1 for eta in etas])

# Appendix A.7: the Brier term alone is proper. A.8: so is FCL, with any weight above 0.
etas = np.linspace(0.05, 0.95, 19)
away = np.array([distance_of_two(brier(), eta) for eta in etas])
record["fcl_a.7"] = share(np.abs(away) < 1e-6)
by_weight = {}
record["fcl_a.8"] = []
for weight in (0.0, 0.1, 0.5, 1.0, 3.0, 10.0, 100.0):
    loss = focal_calibration(gamma=GAMMA, brier_weight=weight)
    by_weight[weight] = np.array([distance_of_two(loss, eta) for eta in etas])
    found = {
        "brier_weight": weight,
        "minimum_at_posterior_0.7": minimum_of_two(loss, ETA)[0],
        "largest_distance": np.abs(by_weight[weight]).max(),
    }
    record["fcl_a.8"].append(found)

# DFL, Lemma 1: phi starts at (1 + C)^gamma, ends at C^gamma, and has one maximum between.
holds = []
record["dfl_lemma_1_fails_at"] = []
v = np.concatenate([np.geomspace(1e-9, 1e-3, 2000), GRID[GRID > 1e-3]])
for gamma, rival in product((0.5, 1.0, 2.0, 3.0, 5.0), (0.0, 0.05, 0.2, 0.4)):
    margin = 1 - v + rival
    phi = margin**gamma - gamma * margin ** (gamma - 1) * v * np.log(v)
    starts_there = abs(phi[0] - (1 + rival) ** gamma) < 1e-5
    ends_there = abs(phi[-1] - rival**gamma) < 0.05
    ends = bool(starts_there and ends_there)
    maxima = turns(phi)
    holds.append(maxima == 1 and ends)
    if not holds[-1]:
        failed = {"gamma": gamma, "rival": rival, "maxima": maxima, "ends": ends}
        record["dfl_lemma_1_fails_at"].append(failed)
record["dfl_lemma_1"] = share(holds)

# The comparison study. Theorem 1: logits times t > 1 are more confident. Theorem 2: focal >= CE -
# gamma H.
logits = rng.normal(scale=2, size=(args.draws, 5))
scales = rng.uniform(1, 5, (args.draws, 1))
probs = softmax(logits, axis=1)
scaled = softmax(scales * logits, axis=1)
record["study_theorem_1"] = share(scaled.max(axis=1) >= probs.max(axis=1) - 1e-12)
entropies = -(probs * np.log(probs)).sum(axis=1)
labels = rng.integers(5, size=args.draws)
for gamma in (0.5, 1.0, 3.0):
    bound = row_losses(cross_entropy(), probs, labels) - gamma * entropies
    above = row_losses(focal(gamma=gamma), probs, labels) >= bound - 1e-12
    record[f"study_theorem_2_gamma_{gamma:g}"] = share(above)
# Where the bound is tightest: all that is not the label's in one class.
log_p = np.log(GRID)
two_class_entropy = -(GRID * log_p + (1 - GRID) * np.log1p(-GRID))
record["study_theorem_2_least_slack"] = {}
for gamma in (0.1, 0.5, 0.9, 1.0, 3.0):
    slack = -((1 - GRID) ** gamma) * log_p + log_p + gamma * two_class_entropy
    record["study_theorem_2_least_slack"][f"{gamma:g}"] = slack.min()

# BSCE-GRA, 4.3: "the K-class predicted probability q would equal the actual class-posterior
# probability".
rng = np.random.default_rng(1)


def rest_of_bsce_gra(gamma, eta):
    """The first of two probabilities at which the expected gradient is 0."""
    loss = bsce_gra(gamma=gamma, norm=2.0)
    posterior = torch.tensor([eta, 1 - eta], dtype=torch.float64)

    def slope(z):
        logits = torch.tensor([[z, 0.0]] * 2, dtype=torch.float64, requires_grad=True)
        each = loss(logits, torch.tensor([0, 1]), reduction="none")
        (gradient,) = torch.autograd.grad(each @ posterior, logits)
        return gradient[:, 0].sum()

    return float(expit(brentq(slope, -20, 20, xtol=1e-12)))


at_rest = np.array([rest_of_bsce_gra(2.0, eta) for eta in etas])
record["bsce_gra_theorem"] = share(np.abs(at_rest - etas) < 1e-6)
record["bsce_gra_theorem_at_posterior_0.7"] = {
    f"gamma {gamma:g}": rest_of_bsce_gra(gamma, ETA) for gamma in (0.0, 2.0, 4.0)
}
# Eq. 12: the expected Brier score exceeds the squared distance to the posterior by what the
# prediction cannot change.
equal = []
for posterior, probs in rng.dirichlet([1.0] * 5, (args.draws, 2)):
    brier_scores = ((probs - np.eye(5)) ** 2).sum(axis=1)
    left = ((probs - posterior) ** 2).sum() - posterior @ brier_scores
    right = (posterior * (posterior - 1)).sum()
    equal.append(abs(left - right) < 1e-12)
record["bsce_gra_eq_12"] = share(equal)

# FCL, A.3: its minimum is the posterior. A.4, for which A.3 needs it: the expected loss is strictly
# convex.
record["fcl_a.3"] = share(np.abs(by_weight[WEIGHT]) < 1e-6)
convex = []
for posterior, *ends in rng.dirichlet([1.0] * 3, (args.draws, 3)):
    points = np.array([*ends, np.mean(ends, axis=0)])
    first, second, middle = risks(FCL, posterior, points)
    convex.append(middle < (first + second) / 2)
record["fcl_a.4"] = share(convex)
# A.9: focal >= KL + H(q) - gamma H(p), that is CE - gamma H(p); for any posterior, as its proof
# says.
for gamma in (0.5, 1.0, 3.0):
    above = []
    for posterior, probs in rng.dirichlet([1.0] * 5, (args.draws, 2)):
        (of_focal,) = risks(focal(gamma=gamma), posterior, probs[None])
        (of_cross_entropy,) = risks(cross_entropy(), posterior, probs[None])
        bound = of_cross_entropy - gamma * entr(probs).sum()
        above.append(of_focal >= bound - 1e-12)
    record[f"fcl_a.9_gamma_{gamma:g}"] = share(above)

for name, found in record.items():
    print(f"{name}: {found}")
with drawing(7.5, 3) as figure:
    left, right = figure.subplots(1, 2)
    shown = np.linspace(0.3, 0.95, 200)
    left.plot(shown, gaps(FOCAL, ETA, shown), "-", color=BLUE, label="focal")
    left.plot(shown, gaps(FCL, ETA, shown), "--", color=VERMILION, label="FCL")
    left.axvline(minimum_of_focal, color="black", linestyle=":", linewidth=0.8)
    left.set(xlabel="prediction, where the posterior is 0.7", ylim=(0, 0.1))
    left.set_ylabel("to gain by a recalibration, nats")
    for weight, dash in ((0.0, "-"), (0.5, "--"), (3.0, "-."), (100.0, ":")):
        right.plot(etas, by_weight[weight], dash, label=f"weight {weight:g}")
    right.axhline(0, color="black", linewidth=0.5)
    right.set(xlabel="posterior", ylabel="minimum of FCL less the posterior")
    plain_axes(left, right)
    left.legend()
    right.legend()
write_study("proofs", args, record, {"": figure})
