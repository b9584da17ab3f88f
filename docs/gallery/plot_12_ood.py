"""
Out-of-distribution inputs
==========================

A classifier of the digits 0 to 7 is given images of 8 and 9. Does its uncertainty detect them?
"""

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import RocCurveDisplay

from hf_calib.metrics import ood_detection

digits = load_digits()
known = digits.target < 8
images, labels = digits.data[known] / 16, digits.target[known]
model = LogisticRegression(C=1.0, max_iter=500).fit(images[:800], labels[:800])
logits_in, logits_out = (
    model.decision_function(images[800:]),
    model.decision_function(digits.data[~known] / 16),
)

# %%
# Scores of the logits separate the known digits from the others. A temperature changes these scores little.

found = ood_detection(logits_in, logits_out)
for score, detection in found.items():
    print(score, f"AUROC {detection.auroc.value:.3f}")

# %%
# The ROC curve of a score, here of the largest logit, is drawn by scikit-learn.

is_unknown = np.repeat([0, 1], [len(logits_in), len(logits_out)])
uncertainty = -np.concatenate([logits_in, logits_out]).max(axis=1)
figure = Figure(figsize=(4, 4), layout="constrained")
RocCurveDisplay.from_predictions(
    is_unknown, uncertainty, name="digits 8 and 9", ax=figure.subplots()
)
