"""Print the tables of docs/results/papers_length.md on runs whose logits are saved.

    python recipes/saved_runs.py

Each folder of `recipes/results` that is named here has, for every loss, the logits and labels of the calibration and
test rows of one run. The temperature is chosen on the calibration rows: by NLL, and by the papers' criteria, the lowest
ECE on a grid of 0.1 (dual focal, FCL) and the lowest equal-mass ECE on that grid (AdaFocal).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from results_tables import PAPERS
from safetensors.numpy import load_file
from scipy.special import softmax

from hf_calib.metrics import calibration_error_interval, expected_calibration_error
from hf_calib.scaling import TemperatureScaling

RESULTS = Path(__file__).parent / "results"
# The criterion of the temperature -> the papers that choose it so -> loss -> what they report.
Columns = dict[str, dict[str, dict[str, str]]]
dual_focal, fcl, adafocal = ({loss: row[paper] for loss, row in PAPERS.items()} for paper in range(3))
# AdaFocal's Table 1, BERT-base, with equal-mass bins.
adafocal_bert = {
    "cross_entropy": "8.47, 4.46",
    "brier": "5.91, 4.40",
    "mmce": "8.30, 4.60",
    "label_smoothing": "6.01, 5.69",
    "flsd": "8.63, 3.91",
    "adafocal": "3.96, 3.73",
}
FOLDERS: dict[str, Columns] = {
    "20newsgroups_cnn_50_epochs": {
        "ece": {"dual focal paper": dual_focal, "FCL paper": fcl},
        "adaptive_ece": {"AdaFocal paper, equal-mass": adafocal},
    },
    "20newsgroups_minilm_3_epochs": {"adaptive_ece": {"AdaFocal paper, BERT-base": adafocal_bert}},
}
NORMAL = 1.959964  # the 97.5% quantile of a standard normal


class Run(NamedTuple):
    """Test probabilities of one run: unscaled, and after a temperature by each criterion."""

    labels: NDArray[np.int16]
    probs: dict[str, NDArray[np.float64]]
    temperatures: dict[str, float]

    @classmethod
    def load(cls, path: Path) -> Run:
        saved = load_file(path)
        logits = saved["test_logits"].astype(np.float64)
        probs, temperatures = {"none": softmax(logits, axis=1)}, {}
        for criterion in ("nll", "ece", "adaptive_ece"):
            scaler = TemperatureScaling(criterion=criterion)
            scaler.fit(saved["calibration_logits"].astype(np.float64), saved["calibration_labels"])
            probs[criterion] = scaler.predict_proba(logits)
            temperatures[criterion] = scaler.temperature_
        return cls(saved["test_labels"], probs, temperatures)

    def nll(self, state: str) -> NDArray[np.float64]:
        """(N,) in nats."""
        return -np.log(self.probs[state][np.arange(len(self.labels)), self.labels])

    def ece(self, state: str) -> str:
        """The ECE with its 95% interval, by test inversion."""
        value, low, high = calibration_error_interval(self.probs[state], self.labels)
        return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def runs(folder: str) -> dict[str, Run]:
    """The runs of a folder by their losses: cross entropy first, then in the order of the papers' table."""
    order = [*PAPERS, "focal"]
    ranks = {loss: rank for rank, loss in enumerate(order)}
    paths = (RESULTS / folder).glob("*.safetensors")
    ordered = sorted(paths, key=lambda path: (ranks.get(path.stem, len(order)), path.stem))
    return {path.stem: Run.load(path) for path in ordered}


def run_lines(found: dict[str, Run]) -> Iterator[str]:
    """The table of a folder, line by line."""
    header = [
        "loss",
        "accuracy",
        "ECE",
        "ECE after T",
        "T",
        "NLL",
        "NLL after T",
        "difference in NLL after T",
    ]
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    reference = found["cross_entropy"].nll("nll")
    for loss, run in found.items():
        accuracy = np.mean(run.probs["none"].argmax(axis=1) == run.labels)
        cells = [loss, f"{accuracy:.3f}", run.ece("none"), run.ece("nll"), f"{run.temperatures['nll']:.2f}"]
        cells += [f"{run.nll(state).mean():.3f}" for state in ("none", "nll")]
        gap = run.nll("nll") - reference
        half = NORMAL * gap.std(ddof=1) / np.sqrt(len(gap))
        of_gap = f"{gap.mean():+.3f} [{gap.mean() - half:+.3f}, {gap.mean() + half:+.3f}]"
        cells.append("" if loss == "cross_entropy" else of_gap)
        yield f"| {' | '.join(cells)} |"


def in_percent(run: Run, criterion: str, digits: int = 2) -> str:
    """The ECE before and after the temperature of a paper's criterion, by bins of that criterion."""
    binning = "quantile" if criterion == "adaptive_ece" else "uniform"
    found = [
        expected_calibration_error(run.probs[state], run.labels, binning=binning)
        for state in ("none", criterion)
    ]
    return ", ".join(f"{100 * each:.{digits}f}" for each in found)


def paper_lines(found: dict[str, Run], columns: Columns) -> Iterator[str]:
    """ECE in percent next to the papers', whose criterion chooses the temperature, line by line."""
    header = ["loss"]
    for criterion, papers in columns.items():
        header += ["ours, equal-mass" if criterion == "adaptive_ece" else "ours", *papers]
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for loss, run in found.items():
        cells = [loss]
        for criterion, papers in columns.items():
            cells += [in_percent(run, criterion), *(values.get(loss, "") for values in papers.values())]
        yield f"| {' | '.join(cells)} |"


def printed(folder: str, columns: Columns) -> list[str]:
    """The lines of both tables of a folder."""
    found = runs(folder)
    return [*run_lines(found), "", *paper_lines(found, columns)]


def main() -> None:
    for folder, columns in FOLDERS.items():
        print(f"## {folder}\n")
        print("\n".join([*printed(folder, columns), ""]))


if __name__ == "__main__":
    main()
