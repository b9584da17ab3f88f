"""
How losses weight their examples
================================

The figure shows, for all probabilities of three classes, the weight that a loss gives to the cross entropy and the
factor by which it scales the gradient at the label. The first class is the label.
"""

import numpy as np
from papers.gradients import (
    gradient_factors,
    simplex_grid,
    uncertainty_weights,
)  # in the folder recipes
from papers.simplex import simplex_surfaces

from hf_calib.losses import make_loss

# %%
# The weight of focal depends only on the label's probability. The weights of dual focal and of the Brier-weighted loss
# also depend on how the other classes share the rest.

grid = simplex_grid(60)
labels = np.zeros(len(grid), dtype=int)
losses = {
    "focal": make_loss("focal", gamma=2.0),
    "dual focal": make_loss("dual_focal", gamma=2.0),
    "Brier-weighted": make_loss("bsce", gamma=2.0),
}
surfaces = {
    f"weight: {name}": uncertainty_weights(loss, grid, labels)
    for name, loss in losses.items()
}
surfaces |= {
    f"gradient: {name}": gradient_factors(loss, grid, labels)
    for name, loss in losses.items()
}
figure = simplex_surfaces(
    grid,
    surfaces,
    class_names=["label", "class 2", "class 3"],
    title="Weights and gradients over three classes",
)
