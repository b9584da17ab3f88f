"""
A report in words
=================

`calibration_report` computes all metrics and explains what the numbers mean. In a notebook, it is displayed
as the HTML page that `hf-calib evaluate` writes.
"""

import numpy as np
from scipy.special import softmax
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from hf_calib.data import docstring_dataset
from hf_calib.plots import class_reliability_grid
from hf_calib.report import calibration_report
from hf_calib.scaling import AutoScaling

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
# The report compares the model before and after the calibrator that cross-validation selects.

scaler = AutoScaling().fit(logits["calibration"], labels["calibration"])
probs, after = softmax(logits["test"], axis=1), scaler.predict_proba(logits["test"])
report = calibration_report(
    probs,
    labels["test"],
    calibrated=after,
    class_names=names,
    n_resamples=200,
    name="linear model",
)
print(scaler.choice_)
print(*report.diagnosis, sep="\n")

# %%
# The diagrams of single classes show errors that cancel in the diagram of the predicted class.

figure = class_reliability_grid(
    after, labels["test"], class_names=names, title="Each class after calibration"
)
