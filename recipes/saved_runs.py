"""Print the tables of docs/results/{papers_length,cifar10}.md on runs whose logits are saved.

    python recipes/saved_runs.py

Each folder of `recipes/results` that is named here has, for every loss, the logits and labels of
the calibration and test rows of a run with seed 1, in `LOSS.safetensors`, and of other seeds in
`LOSS-seed2.safetensors` and so on. The temperature is chosen on the calibration rows: by NLL, and
by the papers' criteria, the lowest ECE on a grid of 0.1 (dual focal, FCL) and the lowest equal-mass
ECE on that grid (AdaFocal).

A loss is compared with cross entropy over the test rows and the seeds. Its p is corrected over all
losses of the table, or over a family of claims that was declared before its runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markdown_tables import shown_p, table_lines, with_interval
from numpy.typing import NDArray
from paired import TwoLevel, corrected, two_level
from papers.post_processing import post_processing_gap
from results_tables import PAPERS
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

    `columns` are the papers' numbers in the table of ECEs, `declared` the family of claims, and
    `further` the columns of a table of other calibration errors.
    """

    page: str
    columns: Columns
    declared: Family | None = None
    further: tuple[str, ...] = ()


dual_focal = {loss: row[0] for loss, row in PAPERS.items()}
fcl = {loss: row[1] for loss, row in PAPERS.items()}
adafocal = {loss: row[2] for loss, row in PAPERS.items()}
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


Probs = NDArray[np.float64]
Labels = NDArray[np.int16]


def equal_counts_ece(probs: Probs, labels: Labels, n_bins: int = 15) -> float:
    """The ECE of bins with equal numbers of rows.

    The papers' code interpolates the edges of equal-mass bins between confidences instead, and
    drops the least one.
    """
    confidences = probs.max(axis=1)
    gaps = confidences - (probs.argmax(axis=1) == labels)
    order = np.argsort(confidences, kind="stable")
    sums = [abs(gaps[rows].sum()) for rows in np.array_split(order, n_bins)]
    return float(sum(sums) / len(labels))


def temperature_of_equal_counts(logits: Probs, labels: Labels) -> float:
    """The temperature with the lowest `equal_counts_ece` on the papers' grid."""

    def error(temperature: float) -> float:
        return equal_counts_ece(softmax(logits / temperature, axis=1), labels)

    return min([tenths / 10 for tenths in range(1, 101)], key=error)


class Run(NamedTuple):
    """Test probabilities of one run: unscaled, and after a temperature by each criterion.

    `ece_of_equal_counts` is before and after the temperature that makes it lowest on the
    calibration rows.
    """

    labels: Labels
    probs: dict[str, Probs]
    temperatures: dict[str, float]
    ece_of_equal_counts: tuple[float, float]

    @classmethod
    def load(cls, path: Path) -> Run:
        saved = load_file(path)
        logits = saved["test_logits"].astype(np.float64)
        labels = saved["test_labels"]
        held_out = saved["calibration_logits"].astype(np.float64)
        held_out_labels = saved["calibration_labels"]
        probs = {"none": softmax(logits, axis=1)}
        temperatures = {}
        for criterion in ("nll", "ece", "adaptive_ece"):
            scaler = TemperatureScaling(criterion=criterion)
            scaler.fit(held_out, held_out_labels)
            probs[criterion] = scaler.predict_proba(logits)
            temperatures[criterion] = scaler.temperature_
        temperature = temperature_of_equal_counts(held_out, held_out_labels)
        scaled = softmax(logits / temperature, axis=1)
        before = equal_counts_ece(probs["none"], labels)
        after = equal_counts_ece(scaled, labels)
        return cls(labels, probs, temperatures, (before, after))

    def correct(self) -> Probs:
        """(N,) 1 for a correct prediction, 0 for a wrong one; a temperature changes none."""
        predicted = self.probs["none"].argmax(axis=1)
        return (predicted == self.labels).astype(np.float64)

    def accuracy(self) -> float:
        return float(self.correct().mean())

    def nll(self, state: str) -> Probs:
        """(N,) in nats."""
        return -np.log(self.probs[state][np.arange(len(self.labels)), self.labels])

    def ece(self, state: str, binning: str = "uniform") -> float:
        probs = self.probs[state]
        return expected_calibration_error(probs, self.labels, binning=binning)

    def ece_cell(self, state: str) -> str:
        """The ECE with its 95% interval, by test inversion."""
        found = calibration_error_interval(self.probs[state], self.labels)
        return with_interval(*found)


def loss_and_seed(name: str) -> tuple[str, int]:
    """Of a run's name, which is `LOSS` with seed 1 and else `LOSS-seedN`."""
    loss, _, seed = name.partition("-seed")
    return loss, int(seed or 1)


def runs(folder: str) -> dict[str, Run]:
    """The runs of a folder by name: cross entropy first, then in the order of the papers' table, and by seed."""
    order = [*PAPERS, "focal"]

    def rank(path: Path) -> tuple[int, str, int]:
        loss, seed = loss_and_seed(path.stem)
        place = order.index(loss) if loss in order else len(order)
        return place, loss, seed

    paths = sorted((RESULTS / folder).glob("*.safetensors"), key=rank)
    return {path.stem: Run.load(path) for path in paths}


def by_loss(found: dict[str, Run]) -> Iterator[tuple[str, list[str]]]:
    """The losses, and the names of the runs of each."""
    for loss, names in groupby(found, key=lambda name: loss_and_seed(name)[0]):
        yield loss, list(names)


def difference(
    found: dict[str, Run], names: list[str], measure: Callable[[Run], Probs]
) -> TwoLevel:
    """The mean of the runs' differences to cross entropy with the same seed, row by row.

    Its interval is over the test rows and over the seeds.
    """
    gaps = []
    for name in names:
        loss, _ = loss_and_seed(name)
        baseline = found[name.replace(loss, "cross_entropy")]
        gaps.append(measure(found[name]) - measure(baseline))
    # The rows divided by sqrt(N) vary as the means of resamples do.
    return two_level(
        [gap.mean() for gap in gaps], [gap / np.sqrt(len(gap)) for gap in gaps]
    )


def difference_cell(difference: TwoLevel) -> str:
    return with_interval(difference.value, *difference.interval(), "+.3f")


def nll_after_temperature(run: Run) -> Probs:
    return run.nll("nll")


def run_cells(same_loss: list[Run]) -> list[str]:
    """The metrics of one run, or their means over several, without the intervals and the temperature of one."""

    def mean(of_run: Callable[[Run], Any]) -> str:
        return f"{np.mean([of_run(run) for run in same_loss]):.3f}"

    if len(same_loss) == 1:
        (run,) = same_loss
        temperature = f"{run.temperatures['nll']:.2f}"
        errors = [run.ece_cell("none"), run.ece_cell("nll"), temperature]
    else:
        before = mean(lambda run: run.ece("none"))
        after = mean(lambda run: run.ece("nll"))
        errors = [before, after, ""]
    nlls = [mean(lambda run: run.nll("none")), mean(nll_after_temperature)]
    return [mean(Run.accuracy), *errors, *nlls]


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


def run_lines(found: dict[str, Run], declared: Family | None) -> list[str]:
    """The table of a folder, line by line. A difference is paired with cross entropy's run of the same seed."""
    header = ["loss", "seed", "accuracy", "ECE", "ECE after T", "T", "NLL"]
    header += ["NLL after T", "difference in NLL after T"]
    rows = []
    for loss, names in by_loss(found):
        groups = {seeds_of([name]): [name] for name in names}
        for several, _ in groups_of_seeds(names, declared):
            if len(several) > 1:
                groups[f"mean of {seeds_of(several)}"] = several
        for seeds, group in groups.items():
            gap = ""
            if loss != "cross_entropy":
                gap = difference_cell(difference(found, group, nll_after_temperature))
            cells = run_cells([found[name] for name in group])
            rows.append([loss, seeds, *cells, gap])
    return table_lines(header, rows)


class Compared(NamedTuple):
    """Runs of one loss that are compared with cross entropy, of the declared family or of the table."""

    loss: str
    names: list[str]
    of_family: bool


def comparisons(found: dict[str, Run], declared: Family | None) -> Iterator[Compared]:
    """The losses of the table; of the family's seeds, only the losses that were declared."""
    claimed = declared.losses if declared else ()
    for loss, all_names in by_loss(found):
        if loss == "cross_entropy":
            continue
        for names, of_family in groups_of_seeds(all_names, declared):
            if loss in claimed or not of_family:
                yield Compared(loss, names, of_family)


def corrected_by_family(
    p_values: NDArray[np.float64], of_family: NDArray[np.bool_], declared: Family | None
) -> NDArray[np.float64]:
    """Holm's correction over the losses of the table, and over the family, whose claims without runs count with 1."""
    found = np.ones(len(p_values))
    found[~of_family] = corrected(p_values[~of_family])
    if declared and of_family.any():
        n_claims = len(declared.losses)
        found[of_family] = corrected(p_values[of_family], n_claims)
    return found


def comparison_lines(found: dict[str, Run], declared: Family | None) -> list[str]:
    """The losses compared with cross entropy in NLL after T and in accuracy, line by line.

    Each p is corrected by Holm's method, for each metric alone: over the losses of the table, or
    over the family that was declared.
    """
    compared = list(comparisons(found, declared))
    of_family = np.array([each.of_family for each in compared], dtype=bool)
    header = ["loss", "seeds"]
    rows = [[each.loss, seeds_of(each.names)] for each in compared]
    measures: dict[str, Callable[[Run], Probs]] = {
        "NLL after T": nll_after_temperature,
        "accuracy": Run.correct,
    }
    for title, measure in measures.items():
        header += [f"difference in {title}", "p", "corrected p"]
        gaps = [difference(found, each.names, measure) for each in compared]
        p_values = np.array([gap.p_value() for gap in gaps])
        p_corrected = corrected_by_family(p_values, of_family, declared)
        for row, gap, *both in zip(rows, gaps, p_values, p_corrected, strict=True):
            row += [difference_cell(gap), *map(shown_p, both)]
    return table_lines(header, rows)


def in_percent(run: Run, criterion: str, digits: int = 2) -> str:
    """The ECE before and after the temperature of a paper's criterion, by bins of that criterion."""
    binning = "quantile" if criterion == "adaptive_ece" else "uniform"
    errors = [run.ece(state, binning) for state in ("none", criterion)]
    return percents(errors, digits)


def percents(errors: Iterable[float], digits: int = 2) -> str:
    return ", ".join(f"{100 * error:.{digits}f}" for error in errors)


def paper_lines(found: dict[str, Run], columns: Columns) -> list[str]:
    """ECE in percent next to the papers', whose criterion chooses the temperature, line by line."""
    header = ["loss", "seed"]
    for criterion, papers in columns.items():
        ours = ["ours"]
        if criterion == "adaptive_ece":
            ours = ["ours, equal-mass", "ours, equal counts"]
        header += [*ours, *papers]
    rows = []
    for name, run in found.items():
        loss, seed = loss_and_seed(name)
        row = [loss, str(seed)]
        for criterion, papers in columns.items():
            row.append(in_percent(run, criterion))
            if criterion == "adaptive_ece":
                row.append(percents(run.ece_of_equal_counts))
            row += [values.get(loss, "") for values in papers.values()]
        rows.append(row)
    return table_lines(header, rows)


def canonical_error(probs: Probs, labels: NDArray[np.int64], bandwidth: float) -> float:
    """Of all classes together, by kernel densities."""
    return kde_calibration_error(probs, labels, kind="canonical", bandwidth=bandwidth)


# Title -> the error and the digits that it is shown with.
FURTHER: dict[str, tuple[Callable[[Probs, NDArray[np.int64]], float], int]] = {
    "post-processing gap": (post_processing_gap, 4),
    "smCE": (smooth_calibration_error_dual, 3),
    "canonical error, bandwidth .1": (partial(canonical_error, bandwidth=0.1), 3),
    # That of the evaluation in the dual focal authors' code.
    "bandwidth .001": (partial(canonical_error, bandwidth=0.001), 3),
}


def further_lines(found: dict[str, Run], columns: tuple[str, ...]) -> list[str]:
    """Other calibration errors of the unscaled probabilities, line by line."""
    rows = []
    for name, run in found.items():
        loss, seed = loss_and_seed(name)
        labels = run.labels.astype(np.int64)
        row = [loss, str(seed)]
        for title in columns:
            error, digits = FURTHER[title]
            row.append(f"{error(run.probs['none'], labels):.{digits}f}")
        rows.append(row)
    return table_lines(["loss", "seed", *columns], rows)


def printed(name: str, folder: Folder) -> list[str]:
    """The lines of the tables of a folder."""
    found = runs(name)
    lines = run_lines(found, folder.declared)
    lines += ["", *comparison_lines(found, folder.declared)]
    if folder.columns:
        lines += ["", *paper_lines(found, folder.columns)]
    if folder.further:
        lines += ["", *further_lines(found, folder.further)]
    return lines


def main() -> None:
    for name, folder in FOLDERS.items():
        print(f"## {name}\n")
        print(*printed(name, folder), "", sep="\n")


if __name__ == "__main__":
    main()
