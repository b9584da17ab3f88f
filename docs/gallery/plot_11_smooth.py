"""
Reliability without bins
========================

Bins hide differences within a bin. A smooth curve with a band shows where a model is miscalibrated beyond chance. The
isotonic regression of a CORP diagram needs no bandwidth, and also decomposes a score.
"""

import numpy as np

from hf_calib.metrics import (
    confidence_errors,
    expected_calibration_error,
    smooth_calibration_error,
)
from hf_calib.plots import corp_diagram, smooth_reliability_diagram

# %%
# The first model is over-confident in the middle and calibrated at the ends; the second is over-confident everywhere.

rng = np.random.default_rng(0)
stated = rng.beta(3, 1.5, 3000) * 0.5 + 0.5
true = stated - 0.35 * (1 - stated) * (stated - 0.5) * 8
correct = rng.random(3000) < true
shifted = rng.random(3000) < stated - 0.05
for name, hits in {"bent": correct, "shifted": shifted}.items():
    probs, labels = np.stack([stated, 1 - stated], axis=1), (~hits).astype(int)
    ece, smooth = (
        expected_calibration_error(probs, labels),
        smooth_calibration_error(probs, labels),
    )
    over, under, _ = confidence_errors(probs, labels)
    print(
        f"{name:8} ECE {ece:.3f}, smooth ECE {smooth:.3f}; at least {over:.3f} over-, {under:.3f} under-confident"
    )

# %%
# The bands are pointwise bootstrap intervals.

panels = {"bent": (stated, correct), "shifted": (stated, shifted)}
figure = smooth_reliability_diagram(panels, title="Smooth reliability with 95% bands")

# %%
# The band of the CORP diagram is that of a calibrated model. It is pointwise: the curve of a calibrated model may leave
# it at some points, but not over whole ranges.

figure = corp_diagram(
    panels, title="CORP diagrams with pointwise 90% consistency bands"
)
