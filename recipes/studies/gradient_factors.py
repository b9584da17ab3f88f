"""Weights and gradient factors of the losses over three classes, and regions of over- and under-confidence.

    python recipes/studies/gradient_factors.py

All are closed forms, computed by the losses of the library; nothing is trained:

- the weight u of the cross entropy and the factor of its gradient over the probabilities of three classes (Lin et
  al. 2025, "Uncertainty weighted gradients for model calibration", Fig. 2);
- that factor g(p, gamma) against the probability of the label, with the range in which the inverse focal loss pushes
  the label down (the same paper's Fig. 1; Ghosh et al. 2022, "AdaFocal", on limits of gamma);
- phi and the regions of over- and under-confidence of focal and dual focal loss (Tao et al. 2023, "Dual focal loss for
  calibration", Fig. 1), compared with the minimisers of the losses: p minus the posterior that leads to it.

It takes a few seconds.
"""

import argparse
import warnings

import numpy as np
import torch
from gradient_figures import confidence_region_diagram, gradient_factor_diagram
from options import parse, study_parser
from papers.gradients import (
    confidence_regions,
    gradient_factors,
    reversed_range,
    simplex_grid,
    uncertainty_weights,
)
from papers.inverse_link import InverseLink
from papers.simplex import simplex_surfaces
from records import write_study
from scipy.special import lambertw

from hf_calib.losses import make_loss

# Of the regions, as the paper draws them; RIVAL is its q_j.
GAMMA = 1.0
RIVAL = 0.3


def resolution(text):
    if int(text) < 12:
        raise argparse.ArgumentTypeError(f"expected at least 12 steps, got {text}")
    return int(text)


parser = study_parser(__doc__)
along_an_edge = "Steps along an edge of the simplex."
parser.add_argument("--resolution", type=resolution, default=90, help=along_an_edge)
args = parse(parser)
# Gammas that push labels down are what is looked at.
warnings.filterwarnings("ignore", message="The inverse focal gamma is")

# 1. Weights and factors over three classes, the first of which is the label.
grid = simplex_grid(args.resolution)
labels = np.zeros(len(grid), dtype=int)
weights = {}
factors = {}
for name, loss in {
    "focal, gamma 2": make_loss("focal", gamma=2.0),
    "dual focal, gamma 2": make_loss("dual_focal", gamma=2.0),
    "Brier-weighted, gamma 2": make_loss("bsce", gamma=2.0),
}.items():
    weights[f"u: {name}"] = uncertainty_weights(loss, grid, labels)
    factors[f"g: {name}"] = gradient_factors(loss, grid, labels)
surfaces = weights | factors
# Along the rows of equal p_y only the split between the other two moves.
p_of_label = np.unique(grid[:, 0].round(12))
rows_of_equal_p = [np.isclose(grid[:, 0], p) for p in p_of_label]
moves = {
    name: max(float(np.ptp(values[row])) for row in rows_of_equal_p)
    for name, values in surfaces.items()
}

# 2. g(p, gamma); with ten classes, how the rest is spread matters to most losses.
p = np.linspace(0.0005, 0.9995, 2000)
two_classes = np.stack([1 - p, p], axis=1)


def factors_of_last(loss, probs):
    """Where the last class, which has p, is the label."""
    return gradient_factors(loss, probs, np.full(len(probs), probs.shape[1] - 1))


def by_gamma(loss, *gammas):
    return {
        f"gamma {gamma:g}": factors_of_last(make_loss(loss, gamma=gamma), two_classes)
        for gamma in gammas
    }


curves = {
    "focal": by_gamma("focal", 0.5, 1.0, 2.0, 3.0, 5.0),
    "inverse focal": by_gamma("inverse_focal", 1.0, 2.0, 3.59, 5.0, 6.0),
}
of_ten_classes = {
    "the rest even": np.column_stack([*[(1 - p) / 9] * 9, p]),
    "one rival": np.column_stack([np.zeros((len(p), 8)), two_classes]),
}
several = {
    "focal 3": make_loss("focal", gamma=3.0),
    "dual focal 5": make_loss("dual_focal", gamma=5.0),
    "bsce 2": make_loss("bsce", gamma=2.0),
    "bsce_gra 2": make_loss("bsce_gra", gamma=2.0),
    "focal calibration": make_loss("focal_calibration"),
    "Brier": make_loss("brier"),
}
ten_classes = {
    spread: {name: factors_of_last(loss, probs) for name, loss in several.items()}
    for spread, probs in of_ten_classes.items()
}
focal_peaks = {
    name: {"p": float(p[g.argmax()]), "g": float(g.max())}
    for name, g in curves["focal"].items()
}
worst = float(lambertw(np.exp(-1)).real)
reversed_ranges = {
    f"gamma {gamma:g}": reversed_range(gamma)
    for gamma in (1.0, 2.0, 3.59, 3.6, 5.0, 6.0)
}

# 3. phi with a constant rival, and the paper's regions.
phi = {}
regions = {}
for name, rival in {
    f"focal, gamma {GAMMA:g}": 0.0,
    f"dual focal, gamma {GAMMA:g}, q {RIVAL:g}": RIVAL,
}.items():
    loss = make_loss("dual_focal", gamma=GAMMA, rival=rival)
    phi[name] = factors_of_last(loss, two_classes)
    regions[name] = confidence_regions(GAMMA, rival=rival)

# The minimisers themselves: how much more confident the prediction is than the posterior that leads
# to it. The same is found directly: of all p on a fine grid the one of least risk, for each
# posterior of a coarse one. Ties are left out (dual focal is lower there than all around, to the
# last bit, where no training arrives), and so are differences up to 0.006, within the grid's steps.
fine = simplex_grid(451)
fine = fine[(np.diff(np.sort(fine, axis=1), axis=1) > 1e-9).all(axis=1)]
log_fine = torch.from_numpy(np.log(fine))
posteriors = simplex_grid(30)


def least_risk(loss):
    """The points of the fine grid that minimise the loss under each of the posteriors."""
    of_labels = []
    for label in range(3):
        labels = torch.full((len(fine),), label)
        of_labels.append(loss(log_fine, labels, reduction="none").numpy())
    return np.array(
        [fine[(posterior @ of_labels).argmin()] for posterior in posteriors]
    )


gaps = {}
direct = {}
for name in ("focal", "dual_focal"):
    title = f"{name.replace('_', ' ')}, gamma {GAMMA:g}"
    loss = make_loss(name, gamma=GAMMA)
    inverted = InverseLink(loss).predict_proba(np.log(grid))
    gaps[title] = grid.max(axis=1) - inverted.max(axis=1)
    direct[title] = least_risk(loss).max(axis=1) - posteriors.max(axis=1)


def confidence(gap, rounding):
    return {
        "share over-confident": float((gap > rounding).mean()),
        "share under-confident": float((gap < -rounding).mean()),
        "most over-confident": float(gap.max()),
        "most under-confident": float(gap.min()),
    }


corners = ["label", "class 2", "class 3"]
figures = {
    "simplex": simplex_surfaces(grid, surfaces, class_names=corners),
    "curves": gradient_factor_diagram(p, curves),
    "ten_classes": gradient_factor_diagram(p, ten_classes),
    "regions": confidence_region_diagram(p, phi, regions),
    "minimisers": simplex_surfaces(grid, gaps),
}
results = {}
results["largest change of u and g while p_y stays"] = moves
results["focal factor is largest at"] = focal_peaks
results["inverse focal pushes the label down"] = {
    "first at p": worst,
    "from gamma": 1 / worst,
    "ranges": reversed_ranges,
}
results["regions"] = {name: region._asdict() for name, region in regions.items()}
results["minimisers over the simplex of three classes"] = {
    name: confidence(gap, 1e-9) for name, gap in gaps.items()
}
results["found on a grid, over the posteriors"] = {
    name: confidence(gap, 0.006) for name, gap in direct.items()
}
for title, numbers in results.items():
    print(f"{title}: {numbers}")
settings = {"resolution": args.resolution, "gamma": GAMMA, "rival": RIVAL}
write_study("gradient_factors", args, {"settings": settings} | results, figures)
