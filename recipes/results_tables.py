"""Print the tables of RESULTS.md from the studies of run_studies.sh, and draw regimes.png: what the epochs decide.

python recipes/results_tables.py OUTPUT > tables.md
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

MARKERS = "os^Dv<>PX*hd"
METHODS = {"none": "", "temperature": " after T", "auto": " after auto"}
# ECE in %, before and after the temperature, of the CNN on 20 Newsgroups: Table 1 of the dual focal paper,
# Table 4 of FCL's, and Table 1 of AdaFocal's, which has equal-mass bins.
PAPERS = {
    "cross_entropy": ("17.92, 2.39", "17.92, 2.39", "18.57, 4.08"),
    "brier": ("15.48, 6.78", "15.48, 6.78", "13.52, 3.13"),
    "mmce": ("13.58, 3.22", "15.38, 3.22", "15.23, 6.45"),
    "label_smoothing": ("4.79, 2.54", "4.79, 2.54", "4.36, 2.62"),
    "inverse_focal": ("16.72, 2.51", "", ""),
    "flsd": ("6.92, 2.19", "6.92, 2.19", "8.86, 2.13"),
    "dual_focal": ("1.79, 1.79", "18.45, 3.89", ""),
    "focal_calibration_20newsgroups": ("", "15.35, 1.54", ""),
    "adafocal": ("", "", "2.62, 2.46"),
}


def cell(row: dict | None, form: str = ".3f", *, interval: bool = False) -> str:
    if row is None or row["value"] is None:
        return ""
    value = format(row["value"], form)
    return f"{value} [{row['low']:{form}}, {row['high']:{form}}]" if interval else value


def by(report: dict, table: str) -> dict:
    return {(row["loss"], row["method"], row["metric"]): row for row in report[table]}


def p_value(row: dict | None) -> str:
    p = None if row is None else row["p_corrected"]
    return "" if p is None else "< .001" if p < 0.001 else f"{p:.3f}"


def print_study(name: str, report: dict) -> None:
    means, differences = by(report, "means"), by(report, "differences")
    header = ["loss", "accuracy"]
    header += [f"{metric}{words}" for metric in ("ECE", "NLL") for words in METHODS.values()]
    header += ["difference in NLL after T", "corrected p"]
    print(f"## {name}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for loss in report["losses"]:
        if (loss, "none", "nll") not in means:
            continue
        cells = [loss, cell(means[loss, "none", "accuracy"])]
        cells += [
            cell(means.get((loss, method, metric)), interval=metric == "ece" and method != "auto")
            for metric in ("ece", "nll")
            for method in METHODS
        ]
        difference = differences.get((loss, "temperature", "nll"))
        cells += [cell(difference, "+.3f", interval=True), p_value(difference)]
        print(f"| {' | '.join(cells)} |")
    seeds, test, calibration = len(report["seeds"]), report["n_test"], report["n_calibration"]
    print(f"\n{seeds} seed{'s' * (seeds > 1)}, {test:,} test rows, {calibration:,} calibration rows.\n")


def print_beside_the_papers(report: dict) -> None:
    means = by(report, "means")
    header = [
        "loss",
        "ours",
        "dual focal paper",
        "FCL paper",
        "ours, equal-mass",
        "AdaFocal paper, equal-mass",
    ]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for loss in PAPERS:
        if (loss, "none", "ece") not in means:
            continue
        equal_width, equal_mass = (
            ", ".join(
                f"{100 * means[loss, method, metric]['value']:.2f}" for method in ("none", "temperature")
            )
            for metric in ("ece", "adaptive_ece")
        )
        dual_focal, fcl, adafocal = PAPERS[loss]
        print(f"| {' | '.join([loss, equal_width, dual_focal, fcl, equal_mass, adafocal])} |")
    print()


def draw_regimes(reports: dict[str, dict], path: Path) -> None:
    """By the number of epochs, a column for each task: ECE before and after the temperature, and the NLL after it."""
    tasks: dict[str, dict[int, dict]] = {}
    for name, report in reports.items():
        found = re.fullmatch(r"(.+)_(\d+)_epochs", name)
        if found:
            tasks.setdefault(found[1], {})[int(found[2])] = report
    if not tasks:
        return
    panels = (
        ("ECE, as trained", "means", ("none", "ece")),
        ("ECE, after the temperature", "means", ("temperature", "ece")),
        ("NLL after it, less cross entropy's", "differences", ("temperature", "nll")),
    )
    # The same line for the same loss in every panel; FCL's hyperparameters are those of its paper for the task.
    drawn = [studies[min(studies)]["losses"] for studies in tasks.values()]
    losses = list(dict.fromkeys(family(loss) for names in drawn for loss in names))
    figure = Figure(figsize=(5 * len(tasks), 10), layout="constrained")
    grid = figure.subplots(len(panels), len(tasks), squeeze=False)
    for column, (task, studies) in enumerate(sorted(tasks.items())):
        for axes, (title, table, (method, metric)) in zip(grid[:, column], panels, strict=True):
            for number, loss in enumerate(losses):
                points = [
                    (epochs * 1.03 ** (number - len(losses) / 2), row["value"], row["low"], row["high"])
                    for epochs, report in sorted(studies.items())
                    for (name, *key), row in by(report, table).items()
                    if family(name) == loss and key == [method, metric] and row["value"] is not None
                ]
                if points:
                    x, y, low, high = np.array(points).T
                    baseline = loss == "cross_entropy"
                    style = {"color": "black", "lw": 2.5} if baseline else {"color": f"C{number}", "lw": 1}
                    marker = MARKERS[number]
                    axes.errorbar(x, y, [y - low, high - y], marker=marker, label=loss, elinewidth=1, **style)
            axes.set(
                xscale="log", xticks=sorted(studies), xticklabels=sorted(studies), title=f"{task}: {title}"
            )
            axes.minorticks_off()
            if table == "means":
                axes.set_ylim(0, None)
            else:
                axes.axhline(0, color="black", lw=2.5)
        grid[-1][column].set_xlabel("epochs")
    grid[0][-1].legend(fontsize=7)
    figure.savefig(path, dpi=130)


def family(loss: str) -> str:
    """The name of a loss without that of the task that its hyperparameters are for."""
    return loss.removesuffix("_ag_news").removesuffix("_20newsgroups")


output = Path(sys.argv[1])
reports = {path.parent.name: json.loads(path.read_text()) for path in sorted(output.glob("*/report.json"))}
for name, report in reports.items():
    print_study(name, report)
    if name == "20newsgroups_cnn":
        print_beside_the_papers(report)
draw_regimes(reports, output / "regimes.png")
