"""
Other class frequencies in production
=====================================

In production, three classes have become rare. If the new frequencies are known, the probabilities can be corrected.
"""

import numpy as np
from matplotlib.figure import Figure
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from hf_calib.data import docstring_dataset
from hf_calib.metrics import negative_log_likelihood
from hf_calib.scaling import PriorCorrection, TemperatureScaling

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
# The temperature is fitted to half of the held-out rows; the mean probabilities of the other half are the class
# frequencies that the model assumes.

fitted = slice(0, 450)
reference = slice(450, None)
scaler = TemperatureScaling().fit(
    logits["calibration"][fitted], labels["calibration"][fitted]
)
assumed = scaler.predict_proba(logits["calibration"][reference]).mean(axis=0)
assumed /= assumed.sum()

# %%
# The first three classes become rare. The correction needs the new frequencies, and nothing else.

rng = np.random.default_rng(0)
is_frequent = labels["test"] >= 3
keep = is_frequent | (rng.random(len(is_frequent)) < 0.1)
target = logits["test"][keep]
truth = labels["test"][keep]
shares = np.bincount(truth, minlength=len(names)) / len(truth)
correction = PriorCorrection(train_prior=assumed, target_prior=shares, scaler=scaler)

# %%
# The mean probabilities are then close to the frequencies.

figure = Figure(figsize=(7, 3.2), layout="constrained")
axes = figure.subplots()
place = np.arange(len(names))
axes.bar(place - 0.25, shares, width=0.25, label="frequency")
means = {
    "mean probability": scaler.predict_proba(target).mean(axis=0),
    "corrected": correction.predict_proba(target).mean(axis=0),
}
axes.bar(place, means["mean probability"], width=0.25, label="mean probability")
axes.bar(place + 0.25, means["corrected"], width=0.25, label="corrected")
axes.set_xticks(place, names)
axes.set(ylabel="share of rows")
axes.set_title("Class frequencies and mean probabilities")
axes.legend(frameon=False)

# %%
# The correction lowers the NLL.

for name, fitted_map in {"a temperature": scaler, "the correction": correction}.items():
    print(
        f"NLL with {name}: {negative_log_likelihood(fitted_map.predict_proba(target), truth):.4f}"
    )
