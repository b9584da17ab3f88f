"""
How losses weigh their examples
===============================

The weight of the cross entropy over the probabilities of three classes, the first of which is the label, and
the factor by which each loss scales the gradient at the label.
"""

import numpy as np
from papers.gradients import gradient_factors, simplex_grid, uncertainty_weights  # in the folder recipes
from papers.simplex import simplex_surfaces

from hf_calib.losses import make_loss

# %%
# Focal sees the label alone: its weight is constant along the rows of equal probability. Dual focal and the
# Brier weight see how the rest is spread.

grid = simplex_grid(60)
labels = np.zeros(len(grid), dtype=int)
losses = {
    "focal": make_loss("focal", gamma=2.0),
    "dual focal": make_loss("dual_focal", gamma=2.0),
    "Brier-weighted": make_loss("bsce", gamma=2.0),
}
surfaces = {f"weight: {name}": uncertainty_weights(loss, grid, labels) for name, loss in losses.items()}
surfaces |= {f"gradient: {name}": gradient_factors(loss, grid, labels) for name, loss in losses.items()}
figure = simplex_surfaces(
    grid,
    surfaces,
    class_names=["label", "class 2", "class 3"],
    title="Weights and gradients over three classes",
)
