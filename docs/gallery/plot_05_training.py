"""
A loss in your own training loop
================================

A small network is trained on 300 noisy handwritten digits until it over-fits. Before a temperature the losses differ
in calibration; after it they hardly do.
"""

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

from hf_calib.losses import make_loss
from hf_calib.metrics import expected_calibration_error
from hf_calib.scaling import TemperatureScaling

digits = load_digits()
rng = np.random.default_rng(0)
order = rng.permutation(len(digits.target))
noisy = digits.data[order] / 16 + rng.normal(scale=0.5, size=digits.data.shape)
images, labels = (
    torch.tensor(noisy, dtype=torch.float32),
    torch.tensor(digits.target[order]),
)
train, held_out, test = slice(0, 300), slice(300, 700), slice(700, None)

# %%
# Every loss is a module that is called with logits and labels.

histories = {}
for name in ("cross_entropy", "label_smoothing", "focal", "dual_focal", "brier"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    loss = make_loss(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    history = []
    for epoch in range(1, 301):
        optimizer.zero_grad()
        loss(model(images[train]), labels[train]).backward()
        optimizer.step()
        if epoch % 20 == 0:
            with torch.no_grad():
                logits = model(images).double()
            y = labels.numpy()
            scaler = TemperatureScaling().fit(logits[held_out].numpy(), y[held_out])
            before = expected_calibration_error(
                logits[test].softmax(dim=1).numpy(), y[test]
            )
            after = expected_calibration_error(
                scaler.predict_proba(logits[test].numpy()), y[test]
            )
            history.append((epoch, before, after))
    histories[name] = np.array(history)

# %%
# Early in training the focal losses are under-confident, later cross entropy is over-confident. With a temperature all
# losses have a similar ECE.

figure = Figure(figsize=(8, 3.4), layout="constrained")
left, right = figure.subplots(1, 2, sharey=True)
for name, history in histories.items():
    left.plot(history[:, 0], history[:, 1], label=name)
    right.plot(history[:, 0], history[:, 2], label=name)
left.set(xlabel="epoch", ylabel="ECE of the test rows", title="Without a temperature")
right.set(xlabel="epoch", title="With a temperature fitted to 400 rows")
left.legend(frameon=False, fontsize=8)
