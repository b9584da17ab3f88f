"""Draw docs/_static/before_and_after.png, the reliability diagram of the README and of the site's first page.

    python recipes/before_and_after.py

Reads the saved logits of one run: MiniLM, fine-tuned with cross entropy on 20 Newsgroups for three epochs. The
temperature is fitted to the calibration rows; both panels show the test rows.
"""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from scipy.special import softmax

from hf_calib.plots import reliability_diagram
from hf_calib.scaling import TemperatureScaling

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "recipes" / "results" / "20newsgroups_minilm_3_epochs"


def probabilities(loss: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The test probabilities of a run before and after its temperature, and the labels."""
    saved = load_file(RUNS / f"{loss}.safetensors")
    scaler = TemperatureScaling().fit(saved["calibration_logits"], saved["calibration_labels"])
    logits = saved["test_logits"].astype(np.float64)
    return softmax(logits, axis=1), scaler.predict_proba(logits), saved["test_labels"]


def main() -> None:
    before, after, labels = probabilities("cross_entropy")
    panels = {
        name: (probs.max(axis=1), probs.argmax(axis=1) == labels)
        for name, probs in {"before": before, "after one temperature": after}.items()
    }
    figure = reliability_diagram(panels)
    path = ROOT / "docs" / "_static" / "before_and_after.png"
    figure.savefig(path, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
