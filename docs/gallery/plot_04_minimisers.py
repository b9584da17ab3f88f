"""
Which probabilities minimise a loss
===================================

Cross entropy and the Brier score are proper: their minimum is at the true probability. The focal losses are
not: a network that minimises them perfectly outputs other probabilities. `InverseLink` recovers the true ones.
"""

import numpy as np
from matplotlib.figure import Figure

from hf_calib.losses import make_loss
from hf_calib.scaling import InverseLink

# %%
# For each probability that a network with two classes outputs, `InverseLink` gives the posterior at which this output
# is optimal.

predicted = np.linspace(0.5, 0.995, 200)
logits = np.log(np.stack([predicted, 1 - predicted], axis=1))
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
    axes.plot(
        posterior,
        predicted,
        label=f"{name} {', '.join(f'{k}={v:g}' for k, v in settings.items())}",
    )
axes.set(
    xlabel="true probability of the likelier class",
    ylabel="probability at the minimum of the loss",
)
axes.set_title("Probability that minimises each loss")
axes.legend(frameon=False, fontsize=8)
