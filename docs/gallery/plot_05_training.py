"""
A loss in a loop of one's own
=============================

A small network on handwritten digits, 200 of whose training labels are wrong, trained until it has learned them
by heart: which losses keep it from being sure of them?
"""

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

from hf_calib.losses import make_loss
from hf_calib.metrics import expected_calibration_error, negative_log_likelihood

digits = load_digits()
rng = np.random.default_rng(0)
order = rng.permutation(len(digits.target))
images = torch.tensor(digits.data[order] / 16.0, dtype=torch.float32)
labels = torch.tensor(digits.target[order])
train, test = slice(0, 800), slice(800, None)
given = labels[train].clone()
given[:200] = torch.tensor(rng.integers(0, 10, 200))

# %%
# Any loss is a module of logits and labels.

histories = {}
for name in ("cross_entropy", "label_smoothing", "focal", "dual_focal", "brier"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    loss = make_loss(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    history = []
    for epoch in range(120):
        optimizer.zero_grad()
        loss(model(images[train]), given).backward()
        optimizer.step()
        if epoch % 5 == 4:
            with torch.no_grad():
                probs = model(images[test]).softmax(dim=1).numpy()
            y = labels[test].numpy()
            history.append(
                (epoch + 1, expected_calibration_error(probs, y), negative_log_likelihood(probs, y))
            )
    histories[name] = np.array(history)

figure = Figure(figsize=(8, 3.4), layout="constrained")
left, right = figure.subplots(1, 2)
for name, history in histories.items():
    left.plot(history[:, 0], history[:, 1], label=name)
    right.plot(history[:, 0], history[:, 2], label=name)
left.set(xlabel="epoch", ylabel="ECE of test rows", title="Calibration while it learns wrong labels")
right.set(xlabel="epoch", ylabel="NLL of test rows")
left.legend(frameon=False, fontsize=8)
