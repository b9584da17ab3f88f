"""Print the tables of docs/results/{papers_length,cifar10}.md on runs whose logits are saved.

    python recipes/saved_runs.py

Each folder of `recipes/results` that is named here has, for every loss, the logits and labels of the calibration and
test rows of a run with seed 1, in `LOSS.safetensors`, and of other seeds in `LOSS-seed2.safetensors` and so on. The
temperature is chosen on the calibration rows: by NLL, and by the papers' criteria, the lowest ECE on a grid of 0.1
(dual focal, FCL) and the lowest equal-mass ECE on that grid (AdaFocal).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from results_tables import PAPERS
from safetensors.numpy import load_file
from scipy.special import softmax

from hf_calib.metrics import calibration_error_interval, expected_calibration_error
from hf_calib.scaling import TemperatureScaling
from hf_calib.study.statistics import two_level

RESULTS = Path(__file__).parent / "results"
# The criterion of the temperature -> the papers that choose it so -> loss -> what they report.
Columns = dict[str, dict[str, dict[str, str]]]


class Folder(NamedTuple):
    """The page of docs/results that has a folder's tables, and the columns of its second table."""

    page: str
    columns: Columns


dual_focal, fcl, adafocal = (
    {loss: row[paper] for loss, row in PAPERS.items()} for paper in range(3)
)
# AdaFocal's Table 1, BERT-base, with equal-mass bins.
adafocal_bert = {
    "cross_entropy": "8.47, 4.46",
    "brier": "5.91, 4.40",
    "mmce": "8.30, 4.60",
    "label_smoothing": "6.01, 5.69",
    "flsd": "8.63, 3.91",
    "adafocal": "3.96, 3.73",
}
FOLDERS = {
    "20newsgroups_cnn_50_epochs": Folder(
        "papers_length.md",
        {
            "ece": {"dual focal paper": dual_focal, "FCL paper": fcl},
            "adaptive_ece": {"AdaFocal paper, equal-mass": adafocal},
        },
    ),
    "20newsgroups_minilm_3_epochs": Folder(
        "papers_length.md",
        {"adaptive_ece": {"AdaFocal paper, BERT-base": adafocal_bert}},
    ),
    "cifar10_small_vit": Folder("cifar10.md", {}),
}


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
            scaler.fit(
                saved["calibration_logits"].astype(np.float64),
                saved["calibration_labels"],
            )
            probs[criterion] = scaler.predict_proba(logits)
            temperatures[criterion] = scaler.temperature_
        return cls(saved["test_labels"], probs, temperatures)

    def accuracy(self) -> float:
        return float(np.mean(self.probs["none"].argmax(axis=1) == self.labels))

    def nll(self, state: str) -> NDArray[np.float64]:
        """(N,) in nats."""
        return -np.log(self.probs[state][np.arange(len(self.labels)), self.labels])

    def ece(self, state: str) -> str:
        """The ECE with its 95% interval, by test inversion."""
        value, low, high = calibration_error_interval(self.probs[state], self.labels)
        return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def loss_and_seed(name: str) -> tuple[str, int]:
    """Of a run's name, which is `LOSS` with seed 1 and else `LOSS-seedN`."""
    loss, _, seed = name.partition("-seed")
    return loss, int(seed or 1)


def runs(folder: str) -> dict[str, Run]:
    """The runs of a folder by name: cross entropy first, then in the order of the papers' table, and by seed."""
    order = [*PAPERS, "focal"]
    ranks = {loss: rank for rank, loss in enumerate(order)}

    def rank(name: str) -> tuple[int, str, int]:
        loss, seed = loss_and_seed(name)
        return ranks.get(loss, len(order)), loss, seed

    names = [path.stem for path in (RESULTS / folder).glob("*.safetensors")]
    return {
        name: Run.load(RESULTS / folder / f"{name}.safetensors")
        for name in sorted(names, key=rank)
    }


def difference(gaps: list[NDArray[np.float64]]) -> str:
    """The mean of the runs' paired differences (N,), with its 95% interval over the test rows and over the seeds."""
    # The rows divided by sqrt(N) vary as the means of resamples do.
    found = two_level(
        [gap.mean() for gap in gaps], [gap / np.sqrt(len(gap)) for gap in gaps]
    )
    return "{:+.3f} [{:+.3f}, {:+.3f}]".format(found.value, *found.interval())


def run_cells(same_loss: list[Run]) -> list[str]:
    """The metrics of one run, or their means over several, without the intervals and the temperature of one."""

    def mean(of_run: Callable[[Run], Any]) -> str:
        return f"{np.mean([of_run(run) for run in same_loss]):.3f}"

    if len(same_loss) == 1:
        (run,) = same_loss
        errors = [run.ece("none"), run.ece("nll"), f"{run.temperatures['nll']:.2f}"]
    else:
        none, nll = (
            mean(
                lambda run, state=state: expected_calibration_error(
                    run.probs[state], run.labels
                )
            )
            for state in ("none", "nll")
        )
        errors = [none, nll, ""]
    return [
        mean(Run.accuracy),
        *errors,
        mean(lambda run: run.nll("none")),
        mean(lambda run: run.nll("nll")),
    ]


def run_lines(found: dict[str, Run]) -> Iterator[str]:
    """The table of a folder, line by line. A difference is paired with cross entropy's run of the same seed."""
    header = [
        "loss",
        "seed",
        "accuracy",
        "ECE",
        "ECE after T",
        "T",
        "NLL",
        "NLL after T",
    ]
    header.append("difference in NLL after T")
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for loss, group in groupby(found, key=lambda name: loss_and_seed(name)[0]):
        names = list(group)
        for row in [*([name] for name in names), *([names] if len(names) > 1 else [])]:
            seed = (
                str(loss_and_seed(row[0])[1])
                if len(row) == 1
                else f"mean of {len(row)}"
            )
            base = [name.replace(loss, "cross_entropy") for name in row]
            gaps = [
                found[own].nll("nll") - found[of].nll("nll")
                for own, of in zip(row, base, strict=True)
            ]
            gap = "" if loss == "cross_entropy" else difference(gaps)
            yield f"| {' | '.join([loss, seed, *run_cells([found[name] for name in row]), gap])} |"


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
    header = ["loss", "seed"]
    for criterion, papers in columns.items():
        header += [
            "ours, equal-mass" if criterion == "adaptive_ece" else "ours",
            *papers,
        ]
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for name, run in found.items():
        loss, seed = loss_and_seed(name)
        cells = [loss, str(seed)]
        for criterion, papers in columns.items():
            cells += [
                in_percent(run, criterion),
                *(values.get(loss, "") for values in papers.values()),
            ]
        yield f"| {' | '.join(cells)} |"


def printed(name: str, folder: Folder) -> list[str]:
    """The lines of the tables of a folder."""
    found = runs(name)
    return [
        *run_lines(found),
        *(["", *paper_lines(found, folder.columns)] if folder.columns else []),
    ]


def main() -> None:
    for name, folder in FOLDERS.items():
        print(f"## {name}\n")
        print("\n".join([*printed(name, folder), ""]))


if __name__ == "__main__":
    main()
