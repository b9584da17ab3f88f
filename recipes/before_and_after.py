"""Draw docs/_static/before_and_after.png, the reliability diagram of the README and of the site's first page.

    python recipes/before_and_after.py

Reads the saved logits of one run: MiniLM, fine-tuned with cross entropy on 20 Newsgroups for three
epochs. The temperature is fitted to the calibration rows; both panels show the test rows.
"""

from pathlib import Path

from saved_runs import Run

from hf_calib.plots import reliability_diagram

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "recipes" / "results" / "20newsgroups_minilm_3_epochs"


def main() -> None:
    run = Run.load(RUNS / "cross_entropy.safetensors")
    panels = {
        name: (
            run.probs[state].max(axis=1),
            run.probs[state].argmax(axis=1) == run.labels,
        )
        for name, state in {"before": "none", "after one temperature": "nll"}.items()
    }
    figure = reliability_diagram(panels)
    path = ROOT / "docs" / "_static" / "before_and_after.png"
    figure.savefig(path, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
