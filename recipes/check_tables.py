"""Compare the numbers in docs/results with the result files, and list the numbers that have no file.

    python recipes/check_tables.py

The tables of docs/results/language_models.md are computed again from the `report.json` of each
study. The pages on runs are compared with `results.csv` of each study: the means and differences of
its table. The tables of the pages on post-hoc calibrators are computed again from the raw results,
and those of papers_length.md and of the small ViT from saved logits; the H100's tables of speed.md
are those of its record. All decimal numbers of studies.md and docs/papers are compared with the
JSON files of the studies; the tables of small_claims are computed again from its JSON file, whose
means are those of its csv file. A sentence that calls something "beyond chance" prints its
corrected p.

Numbers without a file in the repository are counted by name: intervals and corrected p-values of
runs, and cross-calibration, whose files were not kept. A page that summarises others may only state
numbers of the pages that it links to.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas
from paired import LEVEL
from results_tables import claim_lines, study_lines
from saved_runs import FOLDERS, printed

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "recipes" / "results"
DOCS = ROOT / "docs"
BENCHMARKS = ROOT / "benchmarks"
# The studies of each page, in the order of their tables.
STUDIES = {
    "training.md": (
        "ag_news_3_epochs",
        "ag_news_10_epochs",
        "ag_news_30_epochs",
        "ag_news_noise",
        "clinc150_3_epochs",
        "clinc150_10_epochs",
        "clinc150_30_epochs",
        "clinc150_under_trained",
    ),
    "twenty_newsgroups.md": ("20newsgroups_cnn",),
    "cifar10.md": ("cifar10_resnet20",),
    "tokens_and_labels.md": ("wnut17", "go_emotions"),
}
# Pages whose numbers are those of the pages that they link to.
SUMMARIES = (
    "explanation/where_losses_run.md",
    "explanation/which_loss.md",
    "explanation/how_many_rows.md",
    "explanation/temperature.md",
    "explanation/what_it_costs.md",
    "faq.md",
)
ALL_STUDIES = [name for names in STUDIES.values() for name in names]
POST_HOC = ("post_hoc.md", "post_hoc_choice.md", "post_hoc_decisions.md")
COLUMNS = {
    "accuracy": ("accuracy", "none"),
    "ECE": ("ece", "none"),
    "ECE after T": ("ece", "temperature"),
    "ECE after auto": ("ece", "auto"),
    "NLL": ("nll", "none"),
    "NLL after T": ("nll", "temperature"),
    "NLL after auto": ("nll", "auto"),
}
PER_TRAINING = {"classwise ECE": "none", "classwise ECE, after T": "temperature"}
# A sentence with one of these words denies a difference; one in quotes speaks about the words.
DENIED = re.compile(
    r"\b(no|not|none|nothing|neither|nor|never)\b|\"beyond chance\"", re.I
)
CORRECTED_P = re.compile(r"corrected p (< \.001|0?\.\d+)")
DECIMAL = re.compile(r"(?<![\w.])[-+]?\d*\.\d+(?!\.?\d)(?<!\d{4}\.\d{5})")
# Stated numbers that are in no file of results, by their source, and the pages that state them.
EXPLAINED = {
    "twenty_newsgroups.md": {
        "the NLL of the calibration rows at the end of one training": "1.42",
    },
    "training.md": {"run_studies.sh, on its learning rate": "2.35 1.13 5.02"},
    "adafocal.md": {
        "the paper's": ".76 .82",
        "what another seed may change": ".01 .02",
    },
    "bsce_gra.md": {
        "differences of the paper's Table 2": ".38 .07 .14 .34",
        "1 / v^m, by the figure's vertical line": "7.4",
        "a section": "4.3",
    },
    "dual_focal.md": {
        "differences of the paper's Tables 4, 10 and 13": (
            "1.09 .66 .06 1.70 .64 .80 2.69 .23"
        ),
        "the authors' log": "3.46",
    },
    "focal_calibration.md": {
        "proofs.json": ".7 .558 .0057",
        "a theorem and a weight": "4.5 .5",
        "the paper's Table 5": "17.33 15.13 1.85 13.51 10.95 14.91",
    },
    "studies.md": {
        "a theorem or a section": "4.1 4.3 4.5",
        "minutes of one run of all": "28.6",
    },
}


@dataclass
class Checked:
    """How many numbers agree with their file, what does not, and what has none."""

    agree: int = 0
    wrong: list[str] = field(default_factory=list)
    without: Counter[str] = field(default_factory=Counter)

    def add(self, is_right: bool, message: str, n_numbers: int = 1) -> None:
        if is_right:
            self.agree += n_numbers
        else:
            self.wrong.append(message)


# Reading pages


class Table(NamedTuple):
    header: list[str]
    rows: list[list[str]]


def tables(text: str) -> Iterator[Table]:
    for found in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        lines = [
            [cell.strip() for cell in line.strip("|\n").split("|")]
            for line in found.splitlines()
        ]
        if len(lines) > 2 and set("".join(lines[1])) <= set("-: "):
            yield Table(lines[0], lines[2:])


def sections(text: str) -> list[str]:
    return re.split(r"(?m)^(?=## )", text)


def prose(text: str) -> str:
    """A page without its tables, code, addresses and formulas."""
    for pattern in (
        r"(?ms)^```.*?^```",
        r"(?m)^\|.*\n",
        r"(?m)^    .*\n",
        r"`[^`]*`",
        r"\]\([^)]*\)",
        r"\$[^$]*\$",
    ):
        text = re.sub(pattern, "", text)
    return text


def decimals(text: str) -> list[str]:
    """The decimal numbers of a text, without sign."""
    return [number.lstrip("+-") for number in DECIMAL.findall(text)]


def cells_of(text: str) -> str:
    """The cells of all tables of a text."""
    return " ".join(" ".join(row) for table in tables(text) for row in table.rows)


def stated(text: str) -> list[str]:
    """The decimal numbers of a page's tables and prose."""
    return decimals(cells_of(text) + prose(text))


def number_lines(text: str) -> list[str]:
    """The lines of tables that have a decimal number."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [line for line in lines if DECIMAL.search(line)]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def result_page(name: str) -> str:
    return read(DOCS / "results" / name)


def paper_pages() -> list[Path]:
    return sorted((DOCS / "papers").glob("*.md"))


def shown(value: float, as_in: str) -> bool:
    """Whether a value, rounded to the digits of a number that is shown, is that number."""
    digits = len(as_in.partition(".")[2])
    return abs(value - float(as_in.replace(",", ""))) <= 0.5000001 * 10**-digits


def is_among(number: str, values: Sequence[float]) -> bool:
    """Whether it is one of the values, or one of them in percent."""
    sizes = [abs(value) for value in values]
    return any(shown(size, number) or shown(100 * size, number) for size in sizes)


# The pages on runs


def study_results(name: str) -> pandas.DataFrame:
    return pandas.read_csv(RESULTS / name / "results.csv")


def means_of(results: pandas.DataFrame) -> pandas.Series:
    return results.groupby(["loss", "method", "metric"])["value"].mean()


def expected_means(
    cells: dict[str, str], results: pandas.DataFrame
) -> dict[str, float]:
    """The means of a loss by column."""
    means = means_of(results)
    loss = cells["loss"]
    expected = {
        column: means[loss, method, metric]
        for column, (metric, method) in COLUMNS.items()
    }
    if cells["difference in NLL after T"]:
        own = means[loss, "temperature", "nll"]
        baseline = means["cross_entropy", "temperature", "nll"]
        expected["difference in NLL after T"] = own - baseline
    return expected


def expected_of_run(
    cells: dict[str, str], results: pandas.DataFrame
) -> dict[str, float]:
    """The numbers of one run by column."""
    is_loss = results["loss"] == cells["loss"]
    is_seed = results["seed"] == int(cells["seed"])
    is_metric = results["metric"] == "classwise_ece"
    values = results[is_loss & is_seed & is_metric].set_index("method")["value"]
    return {column: values[method] for column, method in PER_TRAINING.items()}


def training() -> Checked:
    """The tables of the studies that compare losses."""
    checked = Checked()
    studies = iter(ALL_STUDIES)
    all_tables = [table for page in STUDIES for table in tables(result_page(page))]
    for table in all_tables:
        is_study = table.header[:3] == ["loss", "accuracy", "ECE"]
        if is_study:
            name = next(studies)
            results = study_results(name)
        elif table.header[2:] != list(PER_TRAINING):
            n_others = sum(len(decimals(" ".join(row))) for row in table.rows)
            checked.without["other tables' numbers"] += n_others
            continue
        for row in table.rows:
            cells = dict(zip(table.header, row, strict=True))
            if is_study:
                expected = expected_means(cells, results)
                n_intervals = sum("[" in cell for cell in row)
                checked.without["intervals"] += n_intervals
                checked.without["corrected p-values"] += bool(cells["corrected p"])
            else:
                expected = expected_of_run(cells, results)
            for column, value in expected.items():
                number = re.match(r"[-+]?\d*\.?\d+", cells[column])
                checked.add(
                    number is not None and shown(value, number[0]),
                    f"{name}, {cells['loss']}, {column}: {cells[column]}, not {value:.4f}",
                )
    checked.wrong += [f"no table of {name}" for name in studies]
    return checked


@cache
def of_saved_logits() -> dict[str, list[str]]:
    """The lines of the tables of each folder of saved logits."""
    return {name: printed(name, folder) for name, folder in FOLDERS.items()}


def of_training() -> list[float]:
    """The numbers of these tables, which other pages and the prose may state."""
    texts = [cells_of(result_page(page)) for page in STUDIES]
    for lines in of_saved_logits().values():
        texts += lines
    values = [float(number) for number in DECIMAL.findall(" ".join(texts))]
    for name in ALL_STUDIES:
        values += means_of(study_results(name)).tolist()
    return values


# The pages on studies and papers


def numbers_in(record: Any) -> Iterator[float]:
    """All numbers in a JSON record, those that are keys as well."""
    if isinstance(record, dict):
        for key, value in record.items():
            yield from numbers_in(value)
            if re.fullmatch(r"-?\d+(\.\d+)?", str(key)):
                yield float(key)
    elif isinstance(record, list):
        for value in record:
            yield from numbers_in(value)
    elif isinstance(record, bool):
        # In Python true and false are whole numbers.
        return
    elif isinstance(record, int | float) and math.isfinite(record):
        yield float(record)


def is_explained(page: str, number: str) -> bool:
    numbers = " ".join(EXPLAINED.get(page, {}).values())
    return number in numbers.split()


def statements() -> Checked:
    """The decimal numbers of the pages on studies and papers, section by section, and of the prose on runs."""
    checked = Checked()
    records = {
        path.stem: list(numbers_in(json.loads(read(path))))
        for path in (RESULTS / "studies").glob("*.json")
    }
    trainings = of_training()

    def check(page: str, section: str, named_in: str, sums_up: bool = False) -> None:
        names = [name for name in records if re.search(rf"\b{name}\b", named_in)]
        values = [value for name in names for value in records[name]]
        if sums_up or not values:
            values += trainings
        title = section.splitlines()[0][:50]
        for number in stated(section):
            if is_explained(page, number):
                checked.without["numbers that are explained"] += 1
                continue
            message = f"{page}, {title}: {number} is in none of {names or ALL_STUDIES}"
            checked.add(is_among(number, values), message)

    texts = {page.name: read(page) for page in paper_pages()}
    texts["studies.md"] = result_page("studies.md")
    for page, text in texts.items():
        # The first section of a page sums up the others.
        summary, *others = sections(text)
        check(page, summary, named_in=text, sums_up=True)
        for section in others:
            check(page, section, named_in=section)
    for page in STUDIES:
        section = prose(result_page(page))
        check(page, section, named_in=section)
    return checked


def small_claims() -> Checked:
    """The tables of small_claims on the papers' pages, line by line, and their means against the runs."""
    checked = Checked()
    known = set()
    for path in sorted((RESULTS / "studies").glob("small_claims*.json")):
        means = pandas.read_csv(path.with_suffix(".csv")).groupby("setting").mean()
        pages = json.loads(read(path))["pages"].values()
        for table in [table for page in pages for table in page.values()]:
            known |= {line.strip() for line in claim_lines(table["rows"])}
            for name, row in table["rows"].items():
                for title, column in table["columns"].items():
                    value = means.loc[name, column]
                    is_same = math.isclose(row[title]["value"], value, rel_tol=1e-4)
                    message = f"{path.name}, {name}: {title} is not {value}"
                    checked.add(is_same, message)
    for page in paper_pages():
        for section in sections(read(page)):
            if "small_claims" in section:
                check_lines(checked, page.name, section, known)
    return checked


# Tables that scripts print


def check_lines(checked: Checked, page: str, text: str, known: set[str]) -> None:
    """The lines of tables in a text are among those that are known."""
    for line in number_lines(text):
        is_known = line.strip() in known
        message = f"{page}: not as it was printed: {line}"
        checked.add(is_known, message, len(decimals(line)))


def as_printed(
    pages: Sequence[str], lines: list[str], without_a_file: str | None = None
) -> Checked:
    """Whether the pages' lines of tables are among those that were printed; those of one section have no file."""
    checked = Checked()
    known = {line.strip() for line in lines}
    for page in pages:
        for section in sections(result_page(page)):
            if section.startswith(f"## {without_a_file}\n"):
                n_numbers = len(decimals(" ".join(number_lines(section))))
                checked.without[f"numbers of {without_a_file!r}"] = n_numbers
            else:
                check_lines(checked, page, section, known)
    return checked


def language_models() -> Checked:
    """The lines of language_models.md's tables: made again from the studies' reports, or as the script printed them."""
    folder = RESULTS / "language_models"
    lines = read(folder / "further_metrics.md").splitlines()
    for path in sorted(folder.glob("*/report.json")):
        lines += study_lines(json.loads(read(path)))
    return as_printed(["language_models.md"], lines)


def post_hoc() -> Checked:
    """The lines of the tables on post-hoc maps: made again from raw results, or as the scripts printed them."""
    sys.path.insert(0, str(BENCHMARKS))
    import choice_rules
    import posthoc

    raw = BENCHMARKS / "results"
    lines = posthoc.summary(posthoc.read(raw / "posthoc.csv")).splitlines()
    for name in ("choice_rules.csv", "choice_rules_over_fitted.csv"):
        lines += choice_rules.tables(choice_rules.read(raw / name))
    for name in ("prior_shift.md", "decisions.md", "custom_calibrators.md"):
        lines += read(raw / name).splitlines()
    return as_printed(POST_HOC, lines, without_a_file="No rows to spare")


def saved_logits() -> Checked:
    """The tables of runs, made again from saved logits, and the sentences of papers_length.md, which quote them."""
    page = "papers_length.md"
    lines = []
    lacking = []
    for name, own in of_saved_logits().items():
        own_page = FOLDERS[name].page
        there = result_page(own_page).splitlines()
        lacking += [f"{own_page} lacks: {line}" for line in own if line not in there]
        if own_page == page:
            lines += own
    checked = Checked(wrong=lacking)
    numbers = decimals(" ".join(lines))
    for section in sections(result_page(page)):
        if section.startswith("## In one table\n"):
            # Its numbers are those of the tables below it, rounded once more.
            values = [float(number) for number in numbers]
            for number in decimals(cells_of(section)):
                message = f"{page}: {number} is not rounded from a table"
                checked.add(is_among(number, values), message)
        else:
            check_lines(checked, page, section, {line.strip() for line in lines})
        for number in decimals(prose(section)):
            checked.add(number in numbers, f"{page}: {number} is in no table")
    return checked


def speed() -> Checked:
    """The lines of speed.md on the H100, made again from the measured times."""
    sys.path.insert(0, str(BENCHMARKS))
    import gpu_tables

    checked = Checked()
    text = result_page("speed.md")
    there = text.splitlines()
    lines = gpu_tables.tables()
    for line in lines:
        checked.add(line in there, f"speed.md lacks: {line}", len(decimals(line)))
    section = text.split("### On an H100")[1].split("\n## ")[0]
    for row in section.splitlines():
        if row.startswith("|") and row not in lines:
            checked.wrong.append(f"speed.md: not as it was printed: {row}")
    return checked


# Sentences


def claims() -> Checked:
    """Sentences that call a difference "beyond chance": each prints a corrected p below the level."""
    checked = Checked()
    pages = [ROOT / "README.md", DOCS / "losses" / "index.md", DOCS / "faq.md"]
    for folder in ("results", "papers", "explanation", "guides"):
        pages += sorted((DOCS / folder).glob("*.md"))
    for page in pages:
        text = re.sub(r"\]\([^)]*\)", "]", read(page))
        for sentence in re.split(r"(?<=[.!?|])\s", text):
            words = " ".join(sentence.split())
            if "beyond chance" not in words or DENIED.search(words):
                continue
            found = CORRECTED_P.search(words)
            is_below = found is not None and float(found[1].removeprefix("< ")) < LEVEL
            message = f"{page.name}: a claim without its corrected p: {words}"
            checked.add(is_below, message)
    return checked


def linked() -> Checked:
    """The decimal numbers of pages that sum up others: each is printed there, or is on a page that is linked to."""
    checked = Checked()
    for name in SUMMARIES:
        page = DOCS / name
        text = read(page)
        targets = {*re.findall(r"\]\(([^)#]+\.md)", text)} - {name}
        sources = [read(page.parent / target) for target in targets]
        sources += re.findall(r"(?ms)^```text$.*?^```", text)
        values = [float(number) for number in decimals(" ".join(sources))]
        for number in stated(text):
            message = f"{name}: {number} is on no page that it links to"
            checked.add(is_among(number, values), message)
    return checked


CHECKS = (
    training,
    saved_logits,
    speed,
    claims,
    language_models,
    statements,
    small_claims,
    post_hoc,
    linked,
)


def main() -> int:
    n_wrong = 0
    for check in CHECKS:
        found = check()
        n_wrong += len(found.wrong)
        numbers = f"{found.agree:,} numbers agree with their file"
        print(f"{check.__name__}: {numbers}, {len(found.wrong)} do not")
        for message in found.wrong:
            print(f"  {message}")
        for what, n in found.without.items():
            if n:
                print(f"  without a file: {n:,} {what}")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
