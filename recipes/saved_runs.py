"""Print the tables of docs/results/{papers_length,cifar10}.md on runs whose logits are saved.

    python recipes/saved_runs.py

Each folder of `recipes/results` that is named here has, for every loss, the logits and labels of the calibration and
test rows of a run with seed 1, in `LOSS.safetensors`, and of other seeds in `LOSS-seed2.safetensors` and so on. The
temperature is chosen on the calibration rows: by NLL, and by the papers' criteria, the lowest ECE on a grid of 0.1
(dual focal, FCL) and the lowest equal-mass ECE on that grid (AdaFocal).

A loss is compared with cross entropy over the test rows and the seeds. Its p is corrected over all losses of the
table, or over a family of claims that was declared before its runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from paired import TwoLevel, corrected, two_level
from papers.post_processing import post_processing_gap
from results_tables import PAPERS, shown_p
from safetensors.numpy import load_file
from scipy.special import softmax

from hf_calib.metrics import (
    calibration_error_interval,
    expected_calibration_error,
    kde_calibration_error,
    smooth_calibration_error_dual,
)
from hf_calib.scaling import TemperatureScaling

RESULTS = Path(__file__).parent / "results"
# The criterion of the temperature -> the papers that choose it so -> loss -> what they report.
Columns = dict[str, dict[str, dict[str, str]]]


class Family(NamedTuple):
    """Claims that were declared before their runs: losses to compare with cross entropy, over these seeds alone."""

    losses: tuple[str, ...]
    seeds: tuple[int, ...]


class Folder(NamedTuple):
    """The page of docs/results that has a folder's tables, and what they show.

    `columns` are the papers' numbers in the table of ECEs, `declared` the family of claims, and `further` the columns
    of a table of other calibration errors.
    """

    page: str
    columns: Columns
    declared: Family | None = None
    further: tuple[str, ...] = ()


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
        # docs/results/papers_length.md, "Declared before the runs".
        declared=Family(
            losses=("focal_calibration_20newsgroups", "dual_focal"), seeds=(3, 4, 5)
        ),
        further=(
            "post-processing gap",
            "smCE",
            "canonical error, bandwidth .1",
            "bandwidth .001",
        ),
    ),
    "20newsgroups_minilm_10_epochs": Folder(
        "papers_length.md",
        {
            "ece": {},
            "adaptive_ece": {"AdaFocal paper, BERT-base": adafocal_bert},
        },
        further=("post-processing gap", "smCE"),
    ),
    "20newsgroups_minilm_3_epochs": Folder(
        "papers_length.md",
        {"adaptive_ece": {"AdaFocal paper, BERT-base": adafocal_bert}},
    ),
    "cifar10_small_vit": Folder("cifar10.md", {}),
}


def equal_counts_ece(
    probs: NDArray[np.float64], labels: NDArray[np.int16], n_bins: int = 15
) -> float:
    """The ECE of bins with equal numbers of rows.

    The papers' code interpolates the edges of equal-mass bins between confidences instead, and drops the least one.
    """
    confidences = probs.max(axis=1)
    gaps = confidences - (probs.argmax(axis=1) == labels)
    order = np.argsort(confidences, kind="stable")
    sums = [abs(gaps[rows].sum()) for rows in np.array_split(order, n_bins)]
    return float(sum(sums) / len(labels))


def temperature_of_equal_counts(
    logits: NDArray[np.float64], labels: NDArray[np.int16]
) -> float:
    """The temperature with the lowest `equal_counts_ece` on the papers' grid."""
    grid = [tenths / 10 for tenths in range(1, 101)]
    errors = [
        equal_counts_ece(softmax(logits / temperature, axis=1), labels)
        for temperature in grid
    ]
    return grid[int(np.argmin(errors))]


class Run(NamedTuple):
    """Test probabilities of one run: unscaled, and after a temperature by each criterion.

    `ece_of_equal_counts` is before and after the temperature that makes it lowest on the calibration rows.
    """

    labels: NDArray[np.int16]
    probs: dict[str, NDArray[np.float64]]
    temperatures: dict[str, float]
    ece_of_equal_counts: tuple[float, float]

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
        temperature = temperature_of_equal_counts(
            saved["calibration_logits"].astype(np.float64), saved["calibration_labels"]
        )
        errors = (
            equal_counts_ece(probs["none"], saved["test_labels"]),
            equal_counts_ece(
                softmax(logits / temperature, axis=1), saved["test_labels"]
            ),
        )
        return cls(saved["test_labels"], probs, temperatures, errors)

    def correct(self) -> NDArray[np.float64]:
        """(N,) 1 for a correct prediction, 0 for a wrong one; a temperature changes none."""
        predicted = self.probs["none"].argmax(axis=1)
        return (predicted == self.labels).astype(np.float64)

    def accuracy(self) -> float:
        return float(self.correct().mean())

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


def difference(gaps: list[NDArray[np.float64]]) -> TwoLevel:
    """The mean of the runs' paired differences (N,), whose interval is over the test rows and over the seeds."""
    # The rows divided by sqrt(N) vary as the means of resamples do.
    return two_level(
        [gap.mean() for gap in gaps], [gap / np.sqrt(len(gap)) for gap in gaps]
    )


def with_interval(found: TwoLevel) -> str:
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


def groups_of_seeds(
    names: list[str], declared: Family | None
) -> Iterator[tuple[list[str], bool]]:
    """The runs of a loss whose mean is taken, and whether they are those of the declared family.

    Seeds of the family are a group of their own, once all of them are there.
    """
    of_family = set(declared.seeds) if declared else set()
    inside = [name for name in names if loss_and_seed(name)[1] in of_family]
    outside = [name for name in names if name not in inside]
    if outside:
        yield outside, False
    if declared and len(inside) == len(declared.seeds):
        yield inside, True


def seeds_of(names: list[str]) -> str:
    return ", ".join(str(loss_and_seed(name)[1]) for name in names)


def of_cross_entropy(name: str) -> str:
    """The name of cross entropy's run with the same seed."""
    return name.replace(loss_and_seed(name)[0], "cross_entropy")


def run_lines(found: dict[str, Run], declared: Family | None) -> Iterator[str]:
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
        "difference in NLL after T",
    ]
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for loss, group in groupby(found, key=lambda name: loss_and_seed(name)[0]):
        names = list(group)
        rows = [([name], seeds_of([name])) for name in names]
        for several, _ in groups_of_seeds(names, declared):
            if len(several) > 1:
                rows.append((several, f"mean of {seeds_of(several)}"))
        for row, seeds in rows:
            gaps = [
                found[name].nll("nll") - found[of_cross_entropy(name)].nll("nll")
                for name in row
            ]
            gap = "" if loss == "cross_entropy" else with_interval(difference(gaps))
            cells = run_cells([found[name] for name in row])
            yield f"| {' | '.join([loss, seeds, *cells, gap])} |"


def comparison_lines(found: dict[str, Run], declared: Family | None) -> Iterator[str]:
    """The losses compared with cross entropy in NLL after T and in accuracy, line by line.

    Each p is corrected by Holm's method, for each metric alone: over the losses of the table, or over the family that
    was declared, whose comparisons without runs count with a p of 1.
    """
    losses = groupby(found, key=lambda name: loss_and_seed(name)[0])
    compared: list[tuple[str, list[str], bool]] = []
    for loss, group in losses:
        if loss == "cross_entropy":
            continue
        for names, of_family in groups_of_seeds(list(group), declared):
            claimed = declared is not None and loss in declared.losses
            if claimed or not of_family:
                compared.append((loss, names, of_family))
    measures: dict[str, Callable[[Run], NDArray[np.float64]]] = {
        "NLL after T": lambda run: run.nll("nll"),
        "accuracy": Run.correct,
    }
    cells = [[loss, seeds_of(names)] for loss, names, _ in compared]
    for measure in measures.values():
        differences = [
            difference(
                [
                    measure(found[name]) - measure(found[of_cross_entropy(name)])
                    for name in names
                ]
            )
            for _, names, _ in compared
        ]
        p_values = np.array([each.p_value() for each in differences])
        of_families = np.array([of_family for _, _, of_family in compared])
        p_corrected = np.ones(len(compared))
        p_corrected[~of_families] = corrected(p_values[~of_families])
        if declared and of_families.any():
            n_claims = len(declared.losses)
            p_corrected[of_families] = corrected(p_values[of_families], n_claims)
        for row, each, p, own_corrected in zip(
            cells, differences, p_values, p_corrected, strict=True
        ):
            row += [with_interval(each), shown_p(p), shown_p(own_corrected)]
    header = ["loss", "seeds"]
    for title in measures:
        header += [f"difference in {title}", "p", "corrected p"]
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in cells:
        yield f"| {' | '.join(row)} |"


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
        of_equal_mass = ["ours, equal-mass", "ours, equal counts"]
        header += of_equal_mass if criterion == "adaptive_ece" else ["ours"]
        header += papers
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for name, run in found.items():
        loss, seed = loss_and_seed(name)
        cells = [loss, str(seed)]
        for criterion, papers in columns.items():
            cells.append(in_percent(run, criterion))
            if criterion == "adaptive_ece":
                errors = [f"{100 * error:.2f}" for error in run.ece_of_equal_counts]
                cells.append(", ".join(errors))
            cells += [values.get(loss, "") for values in papers.values()]
        yield f"| {' | '.join(cells)} |"


def canonical_error(
    bandwidth: float, probs: NDArray[np.float64], labels: NDArray[np.int64]
) -> str:
    """Of all classes together, by kernel densities."""
    error = kde_calibration_error(probs, labels, kind="canonical", bandwidth=bandwidth)
    return f"{error:.3f}"


FURTHER: dict[str, Callable[[NDArray[np.float64], NDArray[np.int64]], str]] = {
    "post-processing gap": lambda probs, labels: (
        f"{post_processing_gap(probs, labels):.4f}"
    ),
    "smCE": lambda probs, labels: f"{smooth_calibration_error_dual(probs, labels):.3f}",
    "canonical error, bandwidth .1": partial(canonical_error, 0.1),
    # That of the evaluation in the dual focal authors' code.
    "bandwidth .001": partial(canonical_error, 0.001),
}


def further_lines(found: dict[str, Run], columns: tuple[str, ...]) -> Iterator[str]:
    """Other calibration errors of the unscaled probabilities, line by line."""
    header = ["loss", "seed", *columns]
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for name, run in found.items():
        loss, seed = loss_and_seed(name)
        labels = run.labels.astype(np.int64)
        cells = [FURTHER[title](run.probs["none"], labels) for title in columns]
        yield f"| {' | '.join([loss, str(seed), *cells])} |"


def printed(name: str, folder: Folder) -> list[str]:
    """The lines of the tables of a folder."""
    found = runs(name)
    lines = [*run_lines(found, folder.declared), ""]
    lines += comparison_lines(found, folder.declared)
    if folder.columns:
        lines += ["", *paper_lines(found, folder.columns)]
    if folder.further:
        lines += ["", *further_lines(found, folder.further)]
    return lines


def main() -> None:
    for name, folder in FOLDERS.items():
        print(f"## {name}\n")
        print("\n".join([*printed(name, folder), ""]))


if __name__ == "__main__":
    main()
