"""
What a loss makes a model say
=============================

Cross entropy and the Brier score are proper: their minimum is at the true probability. The focal losses are
not. A network that minimises them perfectly says something else, and `InverseLink` undoes it.
"""

import numpy as np
from matplotlib.figure import Figure

from hf_calib.losses import make_loss
from hf_calib.scaling import InverseLink

# %%
# For each probability that a network of two classes says, the posterior that makes it say so.

said = np.linspace(0.5, 0.995, 200)
logits = np.log(np.stack([said, 1 - said], axis=1))
figure = Figure(figsize=(5, 4), layout="constrained")
axes = figure.subplots()
for name, settings in {
    "cross_entropy": {},
    "label_smoothing": {"smoothing": 0.1},
    "focal": {"gamma": 3.0},
    "focal_calibration": {"gamma": 3.0, "brier_weight": 3.0},
    "inverse_focal": {"gamma": 1.0},
}.items():
    posterior = InverseLink(make_loss(name, **settings)).predict_proba(logits)[:, 0]
    axes.plot(posterior, said, label=f"{name} {', '.join(f'{k}={v:g}' for k, v in settings.items())}")
axes.set(xlabel="true probability of the likelier class", ylabel="probability at the minimum of the loss")
axes.set_title("What the minimiser of a loss says")
axes.legend(frameon=False, fontsize=8)
