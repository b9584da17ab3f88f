"""
Which probabilities minimise a loss
===================================

Cross entropy and the Brier score are proper: their minimum is at the true probability. The focal losses are
not: a network that minimises them perfectly outputs other probabilities.
"""

import torch
from matplotlib.figure import Figure

from hf_calib.losses import make_loss

# %%
# For each true probability of the likelier class, the best of many outputs of a network with two classes is that with
# the lowest expected loss.

truth = torch.linspace(0.5, 0.995, 200, dtype=torch.float64)
predicted = torch.linspace(0.5, 0.9999, 4000, dtype=torch.float64)
logits = torch.stack([predicted, 1 - predicted], dim=1).log()
likelier = torch.zeros(len(predicted), dtype=torch.long)
figure = Figure(figsize=(5, 4), layout="constrained")
axes = figure.subplots()
for name, settings in {
    "cross_entropy": {},
    "label_smoothing": {"smoothing": 0.1},
    "focal": {"gamma": 3.0},
    "focal_calibration": {"gamma": 3.0, "brier_weight": 3.0},
    "inverse_focal": {"gamma": 1.0},
}.items():
    loss = make_loss(name, **settings)
    if_right = loss(logits, likelier, reduction="none")
    if_wrong = loss(logits, 1 - likelier, reduction="none")
    expected = truth[:, None] * if_right + (1 - truth)[:, None] * if_wrong
    best = predicted[expected.argmin(dim=1)]
    axes.plot(
        truth,
        best,
        label=f"{name} {', '.join(f'{k}={v:g}' for k, v in settings.items())}",
    )
axes.set(
    xlabel="true probability of the likelier class",
    ylabel="probability at the minimum of the loss",
)
axes.set_title("Probability that minimises each loss")
axes.legend(frameon=False, fontsize=8)
