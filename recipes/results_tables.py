"""Print the tables of docs/results that compare losses, from the studies of a run_*.sh script.

python recipes/results_tables.py OUTPUT > tables.md
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

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


def shown_p(p: float) -> str:
    return "< .001" if p < 0.001 else f"{p:.3f}"


def p_value(row: dict | None) -> str:
    """The corrected p of a comparison; nothing for the baseline."""
    if row is None or row["p_corrected"] is None:
        return ""
    return shown_p(row["p_corrected"])


def study_lines(report: dict) -> Iterator[str]:
    """The table of a study, line by line."""
    means, differences = by(report, "means"), by(report, "differences")
    header = ["loss", "accuracy"]
    header += [
        f"{metric}{words}" for metric in ("ECE", "NLL") for words in METHODS.values()
    ]
    header += ["difference in NLL after T", "corrected p"]
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for loss in report["losses"]:
        if (loss, "none", "nll") not in means:
            continue
        cells = [loss, cell(means[loss, "none", "accuracy"])]
        cells += [
            cell(
                means.get((loss, method, metric)),
                interval=metric == "ece" and method != "auto",
            )
            for metric in ("ece", "nll")
            for method in METHODS
        ]
        difference = differences.get((loss, "temperature", "nll"))
        cells += [cell(difference, "+.3f", interval=True), p_value(difference)]
        yield f"| {' | '.join(cells)} |"
    seeds, test, calibration = (
        len(report["seeds"]),
        report["n_test"],
        report["n_calibration"],
    )
    yield ""
    yield f"{seeds} seed{'s' * (seeds > 1)}, {test:,} test rows, {calibration:,} calibration rows."


def claim_lines(rows: dict) -> Iterator[str]:
    """A table of small_claims.json, line by line: settings with the paper's numbers, or differences of two.

    A difference whose interval, taken alone, excludes 0 has its p, and the p that is corrected over all differences of
    the page.
    """
    titles = list(next(iter(rows.values())))
    yield f"| | {' | '.join(titles)} |"
    yield f"|{'---|' * (len(titles) + 1)}"
    for name, row in rows.items():
        cells = [name]
        for title in titles:
            if title == "paper":
                cells.append(", ".join(f"{number:.3g}" for number in row[title]))
                continue
            scale, form = (
                (100, ".1f") if "%" in title else (1, ".2f" if title == "T" else ".3f")
            )
            found = row[title]
            scaled = {part: scale * found[part] for part in ("value", "low", "high")}
            plain = title in ("accuracy", "T", "NLL after T") and "paper" in row
            text = cell(
                scaled, form, interval=not plain and scaled["low"] < scaled["high"]
            )
            if found.get("p", 1.0) < 0.05:
                text += f" (p {shown_p(found['p'])}, {shown_p(found['p_corrected'])})"
            cells.append(text)
        yield f"| {' | '.join(cells)} |"


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
                f"{100 * means[loss, method, metric]['value']:.2f}"
                for method in ("none", "temperature")
            )
            for metric in ("ece", "adaptive_ece")
        )
        dual_focal, fcl, adafocal = PAPERS[loss]
        print(
            f"| {' | '.join([loss, equal_width, dual_focal, fcl, equal_mass, adafocal])} |"
        )
    print()


def main() -> None:
    for path in sorted(Path(sys.argv[1]).glob("*/report.json")):
        report = json.loads(path.read_text())
        print(f"## {path.parent.name}\n")
        print("\n".join(study_lines(report)) + "\n")
        if path.parent.name == "20newsgroups_cnn":
            print_beside_the_papers(report)


if __name__ == "__main__":
    main()
