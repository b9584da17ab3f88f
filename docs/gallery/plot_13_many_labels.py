"""
Several labels per row
======================

A model answers several questions about an image of a digit. Each label has its own probability and its own
temperature.
"""

import numpy as np
from scipy.special import expit
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from hf_calib.report import calibration_report
from hf_calib.scaling import PerLabelTemperatureScaling

digits = load_digits()
rng = np.random.default_rng(0)
order = rng.permutation(len(digits.target))
images, y = (
    digits.data[order][:, ::6] / 16,
    digits.target[order],
)  # Few pixels make the task hard.
names = ["odd", "above 4", "has a hole", "prime"]
labels = np.stack(
    [y % 2, y > 4, np.isin(y, [0, 6, 8, 9]), np.isin(y, [2, 3, 5, 7])], axis=1
).astype(int)
train, held_out, test = slice(0, 300), slice(300, 900), slice(900, None)
scale = np.array(
    [1.0, 3.0, 0.4, 1.5]
)  # Some labels become over-confident, some under-confident.
logits = np.stack(
    [
        LogisticRegression(C=100, max_iter=2000)
        .fit(images[train], column[train])
        .decision_function(images)
        for column in labels.T
    ],
    axis=1,
)
logits *= scale

# %%
# Before calibration: the frequency of each label against its probability, from the report.

before = calibration_report(expit(logits[test]), labels[test], class_names=names)
figure = before.figures()["classwise"]

# %%
# After calibration: a temperature for each label, fitted to held-out rows.

scaler = PerLabelTemperatureScaling().fit(logits[held_out], labels[held_out])
print(dict(zip(names, scaler.temperatures_.round(2).tolist(), strict=True)))
after = calibration_report(
    scaler.predict_proba(logits[test]), labels[test], class_names=names
)
figure = after.figures()["classwise"]
