"""
Evaluate and calibrate a text classifier
========================================

Which library does a paragraph of documentation come from? A linear model of the words, trained with little
regularisation, is over-confident. A temperature corrects most of the error.
"""

import numpy as np
from scipy.special import softmax
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from hf_calib.data import docstring_dataset
from hf_calib.metrics import calibration_error_interval, consistency_test
from hf_calib.plots import reliability_diagram
from hf_calib.scaling import TemperatureScaling

# %%
# The model is trained on the first part; the second part is for the calibrator, and the third for the evaluation.

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
# The ECE has an interval. The p-value tells whether a calibrated model could have this ECE by chance.

probs = softmax(logits["test"], axis=1)
value, low, high = calibration_error_interval(probs, labels["test"])
print(
    f"ECE {value:.3f} [{low:.3f}, {high:.3f}], p = {consistency_test(probs, labels['test']).p_value:.3f}"
)

# %%
# One temperature, fitted to the calibration rows, removes most of the error and changes no predicted class.

scaler = TemperatureScaling().fit(logits["calibration"], labels["calibration"])
after = scaler.predict_proba(logits["test"])
panels = {
    "before": (probs.max(axis=1), probs.argmax(axis=1) == labels["test"]),
    f"after T = {scaler.temperature_:.2f}": (
        after.max(axis=1),
        after.argmax(axis=1) == labels["test"],
    ),
}
figure = reliability_diagram(
    panels, title="A linear model of words, before and after a temperature"
)
