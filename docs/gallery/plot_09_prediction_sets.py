"""
Prediction sets
===============

Prediction sets contain the true class in nine of ten cases, whatever the model. How large are they?
"""

import numpy as np
from matplotlib.figure import Figure
from scipy.special import softmax
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from hf_calib.data import docstring_dataset
from hf_calib.decisions import PredictionSets

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
# There are two methods: `lac` gives the smallest sets if the probabilities are correct, and `aps` gives sets that grow
# with the uncertainty of the model.

probs = {part: softmax(z, axis=1) for part, z in logits.items()}
figure = Figure(figsize=(6, 3.2), layout="constrained")
axes = figure.subplots()
for shift, method in ((-0.2, "lac"), (0.2, "aps")):
    sets = PredictionSets(alpha=0.1, method=method).fit(
        probs["calibration"], labels["calibration"]
    )
    found = sets.predict(probs["test"])
    covered = found[np.arange(len(found)), labels["test"]].mean()
    sizes = np.bincount(found.sum(axis=1), minlength=len(names) + 1) / len(found)
    axes.bar(
        np.arange(len(sizes)) + shift,
        sizes,
        width=0.4,
        label=f"{method}, contains the true class in {covered:.1%}",
    )
axes.set(xlabel="classes in the set", ylabel="fraction of the rows")
axes.set_title("Sizes of prediction sets, alpha = 0.1")
axes.legend(frameon=False)
