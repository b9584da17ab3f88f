"""
Reliability without bins
========================

Bins hide what happens within them. A smooth curve with a band shows where a model is off beyond chance; an isotonic
regression (CORP) needs no bandwidth either, and takes a score apart.
"""

import numpy as np

from hf_calib.metrics import confidence_errors, expected_calibration_error, smooth_calibration_error
from hf_calib.plots import corp_diagram, smooth_reliability_diagram

# %%
# A model that is over-confident in the middle and right at the ends; and one that is shifted everywhere.

rng = np.random.default_rng(0)
stated = rng.beta(3, 1.5, 3000) * 0.5 + 0.5
true = stated - 0.35 * (1 - stated) * (stated - 0.5) * 8
correct = rng.random(3000) < true
shifted = rng.random(3000) < stated - 0.05
for name, hits in {"bent": correct, "shifted": shifted}.items():
    probs, labels = np.stack([stated, 1 - stated], axis=1), (~hits).astype(int)
    ece, smooth = expected_calibration_error(probs, labels), smooth_calibration_error(probs, labels)
    over, under, _ = confidence_errors(probs, labels)
    print(
        f"{name:8} ECE {ece:.3f}, smooth ECE {smooth:.3f}; at least {over:.3f} over-, {under:.3f} under-confident"
    )

# %%
# Bands are bootstrap intervals, pointwise.

panels = {"bent": (stated, correct), "shifted": (stated, shifted)}
figure = smooth_reliability_diagram(panels, title="Smooth reliability with 95% bands")

# %%
# CORP: the pointwise band is of a calibrated model, whose curve may leave it in places, but not over whole ranges.

figure = corp_diagram(panels, title="CORP diagrams with pointwise 90% consistency bands")
