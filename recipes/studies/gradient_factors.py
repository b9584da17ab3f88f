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
import time
import warnings

import numpy as np
import torch
from gradient_figures import confidence_region_diagram, gradient_factor_diagram
from options import output_folder
from papers.gradients import (
    confidence_regions,
    gradient_factors,
    reversed_range,
    simplex_grid,
    uncertainty_weights,
)
from papers.inverse_link import InverseLink
from papers.simplex import simplex_surfaces
from records import write_record
from scipy.special import lambertw

from hf_calib.losses import make_loss
from hf_calib.plots import save_figure

GAMMA, RIVAL = 1.0, 0.3  # of the regions, as the paper draws them; RIVAL is its q_j


def resolution(text):
    if int(text) < 12:
        raise argparse.ArgumentTypeError(f"expected at least 12 steps, got {text}")
    return int(text)


parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
)
parser.add_argument("--output", type=output_folder, default="outputs/studies")
parser.add_argument(
    "--resolution",
    type=resolution,
    default=90,
    help="Steps along an edge of the simplex.",
)
args = parser.parse_args()
start = time.perf_counter()
# Gammas that push labels down are what is looked at.
warnings.filterwarnings("ignore", message="The inverse focal gamma is")

# 1. Weights and factors over three classes, the first of which is the label.
grid = simplex_grid(args.resolution)
labels = np.zeros(len(grid), dtype=int)
losses = {
    "focal, gamma 2": make_loss("focal", gamma=2.0),
    "dual focal, gamma 2": make_loss("dual_focal", gamma=2.0),
    "Brier-weighted, gamma 2": make_loss("bsce", gamma=2.0),
}
surfaces = {
    f"u: {name}": uncertainty_weights(loss, grid, labels)
    for name, loss in losses.items()
}
surfaces |= {
    f"g: {name}": gradient_factors(loss, grid, labels) for name, loss in losses.items()
}
# Along the rows of equal p_y only the split between the other two moves.
moves = {
    name: max(
        float(np.ptp(values[np.isclose(grid[:, 0], p)]))
        for p in np.unique(grid[:, 0].round(12))
    )
    for name, values in surfaces.items()
}

# 2. g(p, gamma); with ten classes, how the rest is spread matters to most losses.
p = np.linspace(0.0005, 0.9995, 2000)
one = np.ones(len(p), dtype=int)
two = np.stack([1 - p, p], axis=1)
even = np.concatenate(
    [np.tile((1 - p)[:, None] / 9, 8), two @ [[1 / 9, 0], [0, 1]]], axis=1
)
rival = np.concatenate([np.zeros((len(p), 8)), two], axis=1)
several = {
    "focal 3": make_loss("focal", gamma=3.0),
    "dual focal 5": make_loss("dual_focal", gamma=5.0),
    "bsce 2": make_loss("bsce", gamma=2.0),
    "bsce_gra 2": make_loss("bsce_gra", gamma=2.0),
    "focal calibration": make_loss("focal_calibration"),
    "Brier": make_loss("brier"),
}
curves = {
    "focal": {
        f"gamma {g:g}": gradient_factors(make_loss("focal", gamma=g), two, one)
        for g in (0.5, 1.0, 2.0, 3.0, 5.0)
    },
    "inverse focal": {
        f"gamma {g:g}": gradient_factors(make_loss("inverse_focal", gamma=g), two, one)
        for g in (1.0, 2.0, 3.59, 5.0, 6.0)
    },
}
ten_classes = {
    "the rest even": {
        n: gradient_factors(x, even, one * 9) for n, x in several.items()
    },
    "one rival": {n: gradient_factors(x, rival, one * 9) for n, x in several.items()},
}
figures = {
    "simplex": simplex_surfaces(
        grid, surfaces, class_names=["label", "class 2", "class 3"]
    ),
    "curves": gradient_factor_diagram(p, curves),
    "ten_classes": gradient_factor_diagram(p, ten_classes),
}
worst = float(lambertw(np.exp(-1)).real)
focal_peaks = {
    name: {"p": float(p[g.argmax()]), "g": float(g.max())}
    for name, g in curves["focal"].items()
}
reversed_ranges = {
    f"gamma {g:g}": reversed_range(g) for g in (1.0, 2.0, 3.59, 3.6, 5.0, 6.0)
}

# 3. phi with a constant rival, the paper's regions, and the minimisers themselves.
names = {
    f"focal, gamma {GAMMA:g}": 0.0,
    f"dual focal, gamma {GAMMA:g}, q {RIVAL:g}": RIVAL,
}
phi = {
    name: gradient_factors(make_loss("dual_focal", gamma=GAMMA, rival=q), two, one)
    for name, q in names.items()
}
regions = {name: confidence_regions(GAMMA, rival=q) for name, q in names.items()}
gaps = {}
for name in ("focal", "dual_focal"):
    posterior = InverseLink(make_loss(name, gamma=GAMMA)).predict_proba(np.log(grid))
    gaps[f"{name.replace('_', ' ')}, gamma {GAMMA:g}"] = grid.max(
        axis=1
    ) - posterior.max(axis=1)

# The same found directly: of all p on a fine grid the one of least risk, for each posterior of a coarse one. Ties
# are left out (dual focal is lower there than all around, to the last bit, where no training arrives), and so are
# differences up to 0.006, within the grid's steps.
fine, posteriors = simplex_grid(451), simplex_grid(30)
fine = fine[(np.diff(np.sort(fine, axis=1), axis=1) > 1e-9).all(axis=1)]
direct = {}
for name in ("focal", "dual_focal"):
    loss, logits = make_loss(name, gamma=GAMMA), torch.from_numpy(np.log(fine))
    values = [
        loss(logits, torch.full((len(fine),), label), reduction="none").numpy()
        for label in range(3)
    ]
    minima = np.array([fine[(posterior @ values).argmin()] for posterior in posteriors])
    direct[f"{name.replace('_', ' ')}, gamma {GAMMA:g}"] = minima.max(
        axis=1
    ) - posteriors.max(axis=1)
figures |= {
    "regions": confidence_region_diagram(p, phi, regions),
    "minimisers": simplex_surfaces(grid, gaps),
}


def confidence(gap, rounding):
    return {
        "share over-confident": float((gap > rounding).mean()),
        "share under-confident": float((gap < -rounding).mean()),
        "most over-confident": float(gap.max()),
        "most under-confident": float(gap.min()),
    }


record = {
    "settings": {"resolution": args.resolution, "gamma": GAMMA, "rival": RIVAL},
    "seeds": [],
    "largest change of u and g while p_y stays": moves,
    "focal factor is largest at": focal_peaks,
    "inverse focal pushes the label down": {
        "first at p": worst,
        "from gamma": 1 / worst,
        "ranges": reversed_ranges,
    },
    "regions": {name: region._asdict() for name, region in regions.items()},
    "minimisers over the simplex of three classes": {
        name: confidence(gap, 1e-9) for name, gap in gaps.items()
    },
    "found on a grid, over the posteriors": {
        name: confidence(gap, 0.006) for name, gap in direct.items()
    },
    "seconds": round(time.perf_counter() - start, 1),
}
write_record(args.output / "gradient_factors.json", record)
for part, figure in figures.items():
    save_figure(figure, args.output / f"gradient_factors_{part}.png")

print(
    "Regions:",
    {name: [round(end, 3) for end in region] for name, region in regions.items()},
)
print(
    f"Inverse focal pushes labels down from gamma {1 / worst:.4f} on, first at p = {worst:.4f}:",
    reversed_ranges,
)
print("Focal factor is largest at:", focal_peaks)
print("Change at equal p_y:", {name: round(value, 3) for name, value in moves.items()})
print("Minimisers:", record["minimisers over the simplex of three classes"])
print("Found on a grid:", record["found on a grid, over the posteriors"])
print(f"Written to {args.output}/gradient_factors*")
