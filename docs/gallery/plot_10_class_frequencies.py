"""
Other class frequencies in production
=====================================

In production, three classes have become rare. Unlabelled rows are enough to detect the change and to correct the
probabilities.
"""

import numpy as np
from matplotlib.figure import Figure
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from hf_calib.data import docstring_dataset
from hf_calib.metrics import negative_log_likelihood
from hf_calib.scaling import PriorCorrection, TemperatureScaling, estimate_prior

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
# The temperature is fitted to half of the held-out rows; the other half is the reference for the class frequencies.

fitted, reference = slice(0, 450), slice(450, None)
scaler = TemperatureScaling().fit(
    logits["calibration"][fitted], labels["calibration"][fitted]
)
rng = np.random.default_rng(0)
keep = (labels["test"] >= 3) | (
    rng.random(len(labels["test"])) < 0.1
)  # The first three classes become rare.
target, truth = logits["test"][keep], labels["test"][keep]
found = estimate_prior(
    scaler.predict_proba(target),
    source_probs=scaler.predict_proba(logits["calibration"][reference]),
    source_labels=labels["calibration"][reference],
)
print("shifted:", found.shifted)

# %%
# The estimated class frequencies are close to the true ones.

shares = np.bincount(truth, minlength=len(names)) / len(truth)
figure = Figure(figsize=(7, 3.2), layout="constrained")
axes = figure.subplots()
place = np.arange(len(names))
axes.bar(place - 0.2, shares, width=0.4, label="true")
axes.bar(place + 0.2, found.prior, width=0.4, label="estimated, without labels")
axes.set_xticks(place, names)
axes.set(ylabel="class frequency")
axes.set_title("Class frequencies of unlabelled rows")
axes.legend(frameon=False)

# %%
# The correction lowers the NLL.

# The mean probabilities are the class frequencies that the model assumes.
mean = scaler.predict_proba(logits["calibration"][reference]).mean(axis=0)
correction = PriorCorrection(
    train_prior=mean / mean.sum(), target_prior=found.prior, scaler=scaler
)
for name, fitted_map in {"a temperature": scaler, "the correction": correction}.items():
    print(
        f"NLL with {name}: {negative_log_likelihood(fitted_map.predict_proba(target), truth):.4f}"
    )
