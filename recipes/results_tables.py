"""Print the tables of RESULTS.md from the studies of run_studies.sh, and draw regimes.png: what the epochs decide.

python recipes/results_tables.py OUTPUT > tables.md
"""

import json
import re
import sys
from pathlib import Path

from matplotlib.figure import Figure

METHODS = {"none": "", "temperature": " after T", "auto": " after auto"}


def cell(row: dict | None, form: str = ".3f") -> str:
    if row is None or row["value"] is None:
        return ""
    value = format(row["value"], form)
    return value if row["low"] is None else f"{value} [{row['low']:.3f}, {row['high']:.3f}]"


def by(report: dict, table: str) -> dict:
    return {(row["loss"], row["method"], row["metric"]): row for row in report[table]}


def p_value(row: dict | None) -> str:
    p = None if row is None else row["p_corrected"]
    return "" if p is None else "< .001" if p < 0.001 else f"{p:.3f}"


def print_study(name: str, report: dict) -> None:
    means, differences = by(report, "means"), by(report, "differences")
    times = {row["loss"]: row for row in report["training_time"]}
    header = ["loss", "seeds", "accuracy"]
    header += [f"{metric}{words}" for metric in ("NLL", "ECE") for words in METHODS.values()]
    header += ["difference in NLL after T", "corrected p", "time per step"]
    print(f"## {name}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for loss in report["losses"]:
        if (loss, "none", "nll") not in means:
            continue
        cells = [loss, str(means[loss, "none", "nll"]["n_seeds"]), cell(means[loss, "none", "accuracy"])]
        cells += [cell(means.get((loss, method, metric))) for metric in ("nll", "ece") for method in METHODS]
        difference = differences.get((loss, "temperature", "nll"))
        cells += [cell(difference, "+.3f"), p_value(difference), cell(times.get(loss), ".2f")[:4]]
        print(f"| {' | '.join(cells)} |")
    print(f"\n{report['n_test']:,} test rows, {report['n_calibration']:,} calibration rows.\n")


def draw_regimes(reports: dict[str, dict], path: Path) -> None:
    """ECE by the number of epochs, a panel for each task and map, a line for each loss."""
    tasks: dict[str, dict[int, dict]] = {}
    for name, report in reports.items():
        found = re.fullmatch(r"(.+)_(\d+)_epochs", name)
        if found:
            tasks.setdefault(found[1], {})[int(found[2])] = report
    if not tasks:
        return
    figure = Figure(figsize=(5 * len(tasks), 7), layout="constrained")
    grid = figure.subplots(2, len(tasks), sharex=True, squeeze=False)
    markers = "os^Dv<>PX*hd"
    for column, (task, studies) in enumerate(sorted(tasks.items())):
        for row, method in enumerate(("none", "temperature")):
            axes = grid[row][column]
            losses = list(dict.fromkeys(loss for report in studies.values() for loss in report["losses"]))
            for number, loss in enumerate(losses):
                points = [
                    (epochs, means[loss, method, "ece"]["value"])
                    for epochs, report in sorted(studies.items())
                    if (loss, method, "ece") in (means := by(report, "means"))
                ]
                if points:
                    axes.plot(*zip(*points, strict=True), marker=markers[number % 12], label=loss)
            axes.set(xscale="log", xticks=sorted(studies), xticklabels=sorted(studies), ylim=(0, None))
            axes.minorticks_off()
            axes.set_title(f"{task}, {'as trained' if method == 'none' else 'after the temperature'}")
            axes.set_ylabel("ECE")
        grid[1][column].set_xlabel("epochs")
    grid[0][-1].legend(fontsize=7)
    figure.savefig(path, dpi=130)


output = Path(sys.argv[1])
reports = {path.parent.name: json.loads(path.read_text()) for path in sorted(output.glob("*/report.json"))}
for name, report in reports.items():
    print_study(name, report)
draw_regimes(reports, output / "regimes.png")
