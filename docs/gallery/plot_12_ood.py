"""
Out-of-distribution inputs
==========================

A classifier of the digits 0 to 7 is given images of 8 and 9. Does its uncertainty detect them?
"""

from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from hf_calib.metrics import ood_detection
from hf_calib.plots import roc_diagram

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
figure = roc_diagram({"digits 8 and 9": found}, title="Detection of the digits 8 and 9")
