"""
Abstain from uncertain predictions
==================================

How many inputs can a model answer if at least 75, 80, 85 or 90% of the answers must be correct? `AbstainRule` finds
the threshold on held-out rows and guarantees the accuracy with a stated probability.
"""

import numpy as np
from scipy.special import softmax
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from hf_calib.data import docstring_dataset
from hf_calib.decisions import AbstainRule
from hf_calib.plots import risk_coverage_diagram

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
# The risk-coverage diagram shows the error rate among the most confident predictions.

probs = {part: softmax(z, axis=1) for part, z in logits.items()}
confidence, correct = (
    probs["test"].max(axis=1),
    probs["test"].argmax(axis=1) == labels["test"],
)
figure = risk_coverage_diagram(
    {"linear model": (confidence, correct)}, title="Risk by coverage"
)

# %%
# The rule is fitted to rows that nothing else was fitted to, and then applied to the test rows.

rule = AbstainRule(accuracy=0.85).fit(probs["calibration"], labels["calibration"])
print(rule.promise())
answers = rule.predict(probs["test"])
answered = answers >= 0
print(
    f"answered {answered.mean():.1%}, correct {(answers == labels['test'])[answered].mean():.1%}"
)

# %%
# The table has the coverage and the accuracy on the test rows for several guaranteed accuracies.

for promised in (0.75, 0.8, 0.85, 0.9):
    rule = AbstainRule(accuracy=promised).fit(
        probs["calibration"], labels["calibration"]
    )
    found = rule.measure(probs["test"], labels["test"])
    kept = found.get("accuracy")
    accuracy = "nothing" if kept is None else f"{kept.value:.1%} correct"
    print(
        f"at least {promised:.0%}: answered {found['answered'].value:.1%}, {accuracy}"
    )
