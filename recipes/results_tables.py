"""Print the tables of docs/results that compare losses, from the studies of a run_*.sh script.

python recipes/results_tables.py OUTPUT > tables.md
"""

import json
import sys
from pathlib import Path

from markdown_tables import shown_p, table_lines, with_interval

METHODS = {"none": "", "temperature": " after T", "auto": " after auto"}
# ECE in %, before and after the temperature, of the CNN on 20 Newsgroups: Table 1 of the dual focal
# paper, Table 4 of FCL's, and Table 1 of AdaFocal's, which has equal-mass bins.
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


def cell(row: dict | None, form: str = ".3f") -> str:
    """The value of a row; nothing where there is none."""
    if row is None or row["value"] is None:
        return ""
    return format(row["value"], form)


def interval_cell(row: dict | None, form: str = ".3f") -> str:
    """The value with the interval."""
    if row is None or row["value"] is None:
        return ""
    return with_interval(row["value"], row["low"], row["high"], form)


def by(report: dict, table: str) -> dict:
    return {(row["loss"], row["method"], row["metric"]): row for row in report[table]}


def corrected_p(row: dict | None) -> str:
    """The corrected p of a comparison; nothing for the baseline."""
    if row is None or row["p_corrected"] is None:
        return ""
    return shown_p(row["p_corrected"])


def study_lines(report: dict) -> list[str]:
    """The table of a study, line by line."""
    means = by(report, "means")
    differences = by(report, "differences")
    header = ["loss", "accuracy"]
    for metric in ("ECE", "NLL"):
        header += [f"{metric}{words}" for words in METHODS.values()]
    header += ["difference in NLL after T", "corrected p"]
    rows = []
    for loss in report["losses"]:
        if (loss, "none", "nll") not in means:
            continue
        errors = {method: means.get((loss, method, "ece")) for method in METHODS}
        nlls = [means.get((loss, method, "nll")) for method in METHODS]
        difference = differences.get((loss, "temperature", "nll"))
        row = [loss, cell(means[loss, "none", "accuracy"])]
        row += [interval_cell(errors["none"]), interval_cell(errors["temperature"])]
        row += [cell(errors["auto"]), *map(cell, nlls)]
        row += [interval_cell(difference, "+.3f"), corrected_p(difference)]
        rows.append(row)
    n_seeds = len(report["seeds"])
    seeds = "1 seed" if n_seeds == 1 else f"{n_seeds} seeds"
    test = f"{report['n_test']:,} test rows"
    calibration = f"{report['n_calibration']:,} calibration rows"
    return [*table_lines(header, rows), "", f"{seeds}, {test}, {calibration}."]


def claim_lines(rows: dict) -> list[str]:
    """A table of small_claims.json, line by line: settings with the paper's numbers, or differences of two."""
    titles = list(next(iter(rows.values())))
    cells = []
    for name, row in rows.items():
        are_settings = "paper" in row
        numbers = [title for title in titles if title != "paper"]
        own = [
            name,
            *(claim_cell(row[title], title, are_settings) for title in numbers),
        ]
        if are_settings:
            own.append(", ".join(f"{number:.3g}" for number in row["paper"]))
        cells.append(own)
    _, *lines = table_lines(["", *titles], cells)
    return [f"| | {' | '.join(titles)} |", *lines]


def claim_cell(found: dict, title: str, is_of_setting: bool) -> str:
    """A mean over the seeds, with its interval if that is looked at.

    A difference whose interval, taken alone, excludes 0 has its p, and the p that is corrected over
    all differences of the page.
    """
    scale = 1
    form = ".3f"
    if "%" in title:
        scale = 100
        form = ".1f"
    elif title == "T":
        form = ".2f"
    value, low, high = (scale * found[part] for part in ("value", "low", "high"))
    is_plain = is_of_setting and title in ("accuracy", "T", "NLL after T")
    text = format(value, form)
    if low < high and not is_plain:
        text = with_interval(value, low, high, form)
    if found.get("p", 1.0) < 0.05:
        text += f" (p {shown_p(found['p'])}, {shown_p(found['p_corrected'])})"
    return text


def lines_beside_the_papers(report: dict) -> list[str]:
    means = by(report, "means")
    header = ["loss", "ours", "dual focal paper", "FCL paper"]
    header += ["ours, equal-mass", "AdaFocal paper, equal-mass"]
    rows = []
    for loss, (dual_focal, fcl, adafocal) in PAPERS.items():
        if (loss, "none", "ece") not in means:
            continue
        ours = {}
        for metric in ("ece", "adaptive_ece"):
            before = means[loss, "none", metric]["value"]
            after = means[loss, "temperature", metric]["value"]
            ours[metric] = f"{100 * before:.2f}, {100 * after:.2f}"
        own_width = [loss, ours["ece"], dual_focal, fcl]
        rows.append([*own_width, ours["adaptive_ece"], adafocal])
    return [*table_lines(header, rows), ""]


def main() -> None:
    for path in sorted(Path(sys.argv[1]).glob("*/report.json")):
        report = json.loads(path.read_text())
        print(f"## {path.parent.name}\n")
        print(*study_lines(report), "", sep="\n")
        if path.parent.name == "20newsgroups_cnn":
            print(*lines_beside_the_papers(report), sep="\n")


if __name__ == "__main__":
    main()
