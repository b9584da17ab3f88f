"""
How many rows does a calibrator need?
=====================================

Four calibrators are fitted to 50 to 800 held-out rows, with eight random draws per size. The NLL is that of the
test rows.
"""

import warnings

import numpy as np
from matplotlib.figure import Figure
from scipy.special import softmax
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from hf_calib.data import docstring_dataset
from hf_calib.metrics import negative_log_likelihood
from hf_calib.scaling import (
    IsotonicScaling,
    StructuredVectorScaling,
    TemperatureScaling,
    VectorScaling,
)

dataset = docstring_dataset(max_per_class=600)
names = dataset["train"].features["label"].names
words = TfidfVectorizer(sublinear_tf=True).fit(dataset["train"]["text"])
model = LogisticRegression(C=300, max_iter=300).fit(
    words.transform(dataset["train"]["text"]), dataset["train"]["label"]
)
logits = {
    part: model.decision_function(words.transform(rows["text"]))
    for part, rows in dataset.items()
}
labels = {part: np.array(rows["label"]) for part, rows in dataset.items()}

# %%
# Calibrators with many free parameters need many rows, a temperature needs few, and structured calibrators are between.

maps = {
    "temperature": TemperatureScaling,
    "structured vector": StructuredVectorScaling,
    "vector": VectorScaling,
    "isotonic": IsotonicScaling,
}
sizes = [50, 100, 200, 400, 800]
rng = np.random.default_rng(0)
figure = Figure(figsize=(6, 3.6), layout="constrained")
axes = figure.subplots()
for name, make in maps.items():
    means = []
    for size in sizes:
        found = []
        for _ in range(8):
            rows = rng.choice(len(labels["calibration"]), size, replace=False)
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # Some calibrators warn that the rows are too few.
                scaler = make().fit(
                    logits["calibration"][rows], labels["calibration"][rows]
                )
            found.append(
                negative_log_likelihood(
                    scaler.predict_proba(logits["test"]), labels["test"]
                )
            )
        means.append(np.mean(found))
    axes.plot(sizes, means, marker="o", label=name)
before = negative_log_likelihood(softmax(logits["test"], axis=1), labels["test"])
axes.axhline(before, color="grey", linestyle=":", label="no calibrator")
axes.set(
    xscale="log",
    xlabel="calibration rows",
    ylabel="NLL of the test rows",
    ylim=(None, before + 0.3),
)
axes.set_xticks(sizes, [str(size) for size in sizes])
axes.minorticks_off()
axes.set_title("NLL by the number of calibration rows")
axes.legend(frameon=False, fontsize=8)
