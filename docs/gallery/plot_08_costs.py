"""
Calibration lowers the cost of decisions
========================================

A missed tumour costs more than a false alarm. The decision with the lowest expected cost needs calibrated
probabilities: the same model costs less with a temperature.
"""

import numpy as np
from matplotlib.figure import Figure
from scipy.special import softmax
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

from hf_calib.decisions import CostRule
from hf_calib.scaling import TemperatureScaling

# %%
# The scores of a linear model are multiplied by 6, so that they are too large, like those of an over-fitted network.

data = load_breast_cancer()
features = StandardScaler().fit_transform(data.data)[:, :3]
malignant = (data.target == 0).astype(int)
rng = np.random.default_rng(0)
before, after = [], []
ratios = np.array([1.0, 2.0, 5.0, 10.0, 20.0])
for _ in range(40):
    order = rng.permutation(len(malignant))
    train, held_out, test = order[:150], order[150:300], order[300:]
    score = 6 * LinearSVC(C=10, max_iter=5000).fit(
        features[train], malignant[train]
    ).decision_function(features)
    logits = np.stack([np.zeros_like(score), score], axis=1)
    scaler = TemperatureScaling().fit(logits[held_out], malignant[held_out])
    costs = {"before": [], "after": []}
    for ratio in ratios:
        table = np.array(
            [[0.0, 1.0], [ratio, 0.0]]
        )  # Rows are labels, columns are decisions.
        for name, probs in {
            "before": softmax(logits, axis=1),
            "after": scaler.predict_proba(logits),
        }.items():
            decided = CostRule(table).predict(probs[test])
            costs[name].append(table[malignant[test], decided].mean())
    before.append(costs["before"])
    after.append(costs["after"])

figure = Figure(figsize=(5, 3.4), layout="constrained")
axes = figure.subplots()
axes.plot(ratios, np.mean(before, axis=0), marker="o", label="without a temperature")
axes.plot(ratios, np.mean(after, axis=0), marker="s", label="with a temperature")
axes.set(
    xscale="log",
    xlabel="cost of a miss / cost of a false alarm",
    ylabel="mean cost per row",
    ylim=(0, None),
)
axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
axes.set_title("Mean cost of decisions, 40 splits")
axes.legend(frameon=False)
