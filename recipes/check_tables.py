"""Compare the numbers in docs/results with the result files, and list the numbers that have no file.

    python recipes/check_tables.py

The tables of docs/results/language_models.md are computed again from the `report.json` of each study. The pages on runs
are compared with `results.csv` of each study: the means and differences of its table. The tables of the pages on
post-hoc calibrators are computed again from the raw results, and those of papers_length.md and of the small ViT from
saved logits; the H100's tables of speed.md are those of its record. All decimal numbers of studies.md and docs/papers
are compared with the JSON files of the studies; the tables of small_claims are computed again from its JSON file, whose
means are those of its csv file. A sentence that calls something "beyond chance" prints its corrected p.

Numbers without a file in the repository are counted by name: intervals and corrected p-values of runs, and
cross-calibration, whose files were not kept. A page that summarises others may only state numbers of the pages that it
links to.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pandas
from paired import LEVEL
from results_tables import claim_lines, study_lines
from saved_runs import FOLDERS, printed

ROOT = Path(__file__).parents[1]
RESULTS, DOCS, BENCHMARKS = (
    ROOT / "recipes" / "results",
    ROOT / "docs",
    ROOT / "benchmarks",
)
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
# Sources of stated numbers that are in no file of results.
EXPLAINED = {
    (
        "twenty_newsgroups.md",
        "1.42",
    ): "the NLL of the calibration rows at the end of one training",
    **{
        ("training.md", number): "run_studies.sh, on its learning rate"
        for number in ("2.35", "1.13", "5.02")
    },
    **{("adafocal.md", number): "the paper's" for number in (".76", ".82")},
    **{
        ("bsce_gra.md", number): "differences of the paper's Table 2"
        for number in (".38", ".07", ".14", ".34")
    },
    **{
        ("dual_focal.md", number): "differences of the paper's Tables 4, 10 and 13"
        for number in ("1.09", ".66", ".06", "1.70", ".64", ".80", "2.69", ".23")
    },
    **{
        ("adafocal.md", number): "what another seed may change"
        for number in (".01", ".02")
    },
    ("bsce_gra.md", "7.4"): "1 / v^m, by the figure's vertical line",
    **{
        ("focal_calibration.md", number): "proofs.json"
        for number in (".7", ".558", ".0057")
    },
    **{
        ("focal_calibration.md", number): "a theorem and a weight"
        for number in ("4.5", ".5")
    },
    **{
        ("focal_calibration.md", number): "the paper's Table 5"
        for number in ("17.33", "15.13", "1.85", "13.51", "10.95", "14.91")
    },
    ("dual_focal.md", "3.46"): "the authors' log",
    ("bsce_gra.md", "4.3"): "a section",
    **{
        ("studies.md", number): "a theorem or a section"
        for number in ("4.1", "4.3", "4.5")
    },
    ("studies.md", "28.6"): "minutes of one run of all",
}


class Table(NamedTuple):
    header: list[str]
    rows: list[list[str]]


class Checked(NamedTuple):
    """How many numbers agree with their file, what does not, and what has none."""

    agree: int
    wrong: list[str]
    without: dict[str, int]


def tables(text: str) -> Iterator[Table]:
    for found in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        lines = [
            [cell.strip() for cell in line.strip("|\n").split("|")]
            for line in found.splitlines()
        ]
        if len(lines) > 2 and set("".join(lines[1])) <= set("-: "):
            yield Table(lines[0], lines[2:])


def shown(value: float, as_in: str) -> bool:
    """Whether a value, rounded to the digits of a number that is shown, is that number."""
    digits = len(as_in.partition(".")[2])
    return abs(value - float(as_in.replace(",", ""))) <= 0.5000001 * 10**-digits


def result_page(name: str) -> str:
    return (DOCS / "results" / name).read_text(encoding="utf-8")


def first_number(cell: str) -> str | None:
    found = re.match(r"[-+]?\d*\.?\d+", cell)
    return found[0] if found else None


def training() -> Checked:
    """The tables of the studies that compare losses."""
    agree, wrong, without = (
        0,
        [],
        {"intervals": 0, "corrected p-values": 0, "other tables' numbers": 0},
    )
    studies = iter(ALL_STUDIES)
    results = None
    for table in (table for page in STUDIES for table in tables(result_page(page))):
        is_study = table.header[:3] == ["loss", "accuracy", "ECE"]
        is_per_training = table.header[2:] == list(PER_TRAINING)
        if is_study:
            name = next(studies)
            results = pandas.read_csv(RESULTS / name / "results.csv")
            means = results.groupby(["loss", "method", "metric"])["value"].mean()
        elif not is_per_training:
            without["other tables' numbers"] += sum(
                len(DECIMAL.findall(" ".join(row))) for row in table.rows
            )
            continue
        assert results is not None
        for row in table.rows:
            cells = dict(zip(table.header, row, strict=True))
            expected: dict[str, float] = {}
            if is_study:
                without["intervals"] += sum("[" in cell for cell in row)
                without["corrected p-values"] += bool(cells["corrected p"])
                for column, (metric, method) in COLUMNS.items():
                    expected[column] = means[cells["loss"], method, metric]
                if cells["difference in NLL after T"]:
                    own, base = (
                        means[loss, "temperature", "nll"]
                        for loss in (cells["loss"], "cross_entropy")
                    )
                    expected["difference in NLL after T"] = own - base
            else:
                one = results[
                    (results["loss"] == cells["loss"])
                    & (results["seed"] == int(cells["seed"]))
                ]
                values = one[one["metric"] == "classwise_ece"].set_index("method")[
                    "value"
                ]
                expected = {
                    column: values[method] for column, method in PER_TRAINING.items()
                }
            for column, value in expected.items():
                number = first_number(cells[column])
                if number is not None and shown(value, number):
                    agree += 1
                else:
                    wrong.append(
                        f"{name}, {cells['loss']}, {column}: {cells[column]}, not {value:.4f}"
                    )
    wrong += [f"no table of {name}" for name in studies]
    return Checked(agree, wrong, without)


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
    elif (
        isinstance(record, int | float)
        and not isinstance(record, bool)
        and math.isfinite(record)
    ):
        yield float(record)


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


def stated(text: str) -> list[str]:
    """The decimal numbers of a page's tables and prose, without sign."""
    cells = [" ".join(row) for table in tables(text) for row in table.rows]
    return [
        number.lstrip("+-") for number in DECIMAL.findall(" ".join(cells) + prose(text))
    ]


def is_among(number: str, values: list[float]) -> bool:
    """Whether it is one of the values, or one of them in percent."""
    return any(
        shown(abs(value), number) or shown(100 * abs(value), number) for value in values
    )


def of_training() -> list[float]:
    """The numbers of these tables, which other pages and the prose may state."""
    rows = [
        row
        for page in STUDIES
        for table in tables(result_page(page))
        for row in table.rows
    ]
    values = [
        float(number) for row in rows for number in DECIMAL.findall(" ".join(row))
    ]
    for name in ALL_STUDIES:
        results = pandas.read_csv(RESULTS / name / "results.csv")
        values += results.groupby(["loss", "method", "metric"])["value"].mean().tolist()
    lines = chain.from_iterable(of_saved_logits().values())
    return values + [float(number) for number in DECIMAL.findall(" ".join(lines))]


@cache
def of_saved_logits() -> dict[str, list[str]]:
    """The lines of the tables of each folder of saved logits."""
    return {name: printed(name, folder) for name, folder in FOLDERS.items()}


def statements() -> Checked:
    """The decimal numbers of the pages on studies and papers, section by section, and of the prose on runs."""
    agree, wrong, without = 0, [], {"numbers that are explained": 0}
    records = {
        path.stem: list(numbers_in(json.loads(path.read_text())))
        for path in (RESULTS / "studies").glob("*.json")
    }
    trainings = of_training()
    texts = {
        page.name: page.read_text() for page in sorted((DOCS / "papers").glob("*.md"))
    }
    texts["studies.md"] = result_page("studies.md")
    sections = [
        (page, each)
        for page, text in texts.items()
        for each in re.split(r"(?m)^(?=## )", text)
    ]
    sections += [(page, prose(result_page(page))) for page in STUDIES]
    for page, section in sections:
        # The first section of a page sums up the others; those on "the paper's table" are of runs.
        of_all = page not in STUDIES and section.startswith("# ")
        named = [
            name
            for name in records
            if re.search(rf"\b{name}\b", texts[page] if of_all else section)
        ]
        values = [value for name in named for value in records[name]]
        for number in stated(section):
            if (page, number) in EXPLAINED:
                without["numbers that are explained"] += 1
            elif is_among(
                number, values + trainings if of_all else values or trainings
            ):
                agree += 1
            else:
                wrong.append(
                    f"{page}, {section.splitlines()[0][:50]}: {number} is in none of {named or ALL_STUDIES}"
                )
    return Checked(agree, wrong, without)


def small_claims() -> Checked:
    """The tables of small_claims on the papers' pages, line by line, and their means against the runs."""
    agree, wrong, known = 0, [], set()
    for path in sorted((RESULTS / "studies").glob("small_claims*.json")):
        pages = json.loads(path.read_text(encoding="utf-8"))["pages"]
        means = pandas.read_csv(path.with_suffix(".csv")).groupby("setting").mean()
        for table in (
            table for of_page in pages.values() for table in of_page.values()
        ):
            known |= {line.strip() for line in claim_lines(table["rows"])}
            for name, row in table["rows"].items():
                for title, column in table["columns"].items():
                    agree += 1
                    if not math.isclose(
                        row[title]["value"], means.loc[name, column], rel_tol=1e-4
                    ):
                        wrong.append(
                            f"{path.name}, {name}: {title} is not {means.loc[name, column]}"
                        )
    for page in sorted((DOCS / "papers").glob("*.md")):
        sections = re.split(r"(?m)^(?=## )", page.read_text(encoding="utf-8"))
        text = "\n".join(section for section in sections if "small_claims" in section)
        lines = [
            line
            for line in text.splitlines()
            if line.startswith("|") and DECIMAL.search(line)
        ]
        agree += sum(line in known for line in lines)
        wrong += [
            f"{page.name}: not as it was printed: {line}"
            for line in lines
            if line not in known
        ]
    return Checked(agree, wrong, {})


def language_models() -> Checked:
    """The lines of language_models.md's tables: made again from the studies' reports, or as the script printed them."""
    folder = RESULTS / "language_models"
    lines = (folder / "further_metrics.md").read_text(encoding="utf-8").splitlines()
    for path in sorted(folder.glob("*/report.json")):
        lines += study_lines(json.loads(path.read_text(encoding="utf-8")))
    return as_printed(["language_models.md"], lines)


def as_printed(
    names: Sequence[str], lines: list[str], without_a_file: str | None = None
) -> Checked:
    """Whether the pages' lines of tables are among those that were printed; those of one section have no file."""
    known = {line.strip() for line in lines}
    agree, wrong, without = 0, [], {}
    sections = [
        (name, each)
        for name in names
        for each in re.split(r"(?m)^(?=## )", result_page(name))
    ]
    for name, section in sections:
        found = [
            line
            for line in section.splitlines()
            if line.startswith("|") and DECIMAL.search(line)
        ]
        n_numbers = sum(len(DECIMAL.findall(line)) for line in found)
        if without_a_file is not None and section.startswith(f"## {without_a_file}\n"):
            without[f"numbers of {without_a_file!r}"] = n_numbers
            continue
        agree += n_numbers
        wrong += [
            f"{name}: not as it was printed: {line}"
            for line in found
            if line.strip() not in known
        ]
    return Checked(agree, wrong, without)


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
        lines += (raw / name).read_text(encoding="utf-8").splitlines()
    return as_printed(POST_HOC, lines, without_a_file="No rows to spare")


def saved_logits() -> Checked:
    """The tables of runs, made again from saved logits, and the sentences of papers_length.md, which quote them."""
    page, wrong, lines = "papers_length.md", [], []
    for name, own in of_saved_logits().items():
        there = result_page(FOLDERS[name].page).splitlines()
        wrong += [
            f"{FOLDERS[name].page} lacks: {line}" for line in own if line not in there
        ]
        lines += own if FOLDERS[name].page == page else []
    found = as_printed([page], lines)
    known = {number.lstrip("+-") for number in DECIMAL.findall(" ".join(lines))}
    stated_here = [
        number.lstrip("+-") for number in DECIMAL.findall(prose(result_page(page)))
    ]
    unknown = [
        f"{page}: {number} is in no table"
        for number in stated_here
        if number not in known
    ]
    return Checked(
        found.agree + len(stated_here) - len(unknown),
        [*wrong, *found.wrong, *unknown],
        {},
    )


def speed() -> Checked:
    """The lines of speed.md on the H100, made again from the measured times."""
    sys.path.insert(0, str(BENCHMARKS))
    import gpu_tables

    lines = gpu_tables.tables()
    there = result_page("speed.md").splitlines()
    section = result_page("speed.md").split("### On an H100")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    wrong = [f"speed.md lacks: {line}" for line in lines if line not in there]
    wrong += [
        f"speed.md: not as it was printed: {row}" for row in rows if row not in lines
    ]
    return Checked(len(DECIMAL.findall("\n".join(lines))), wrong, {})


def claims() -> Checked:
    """Sentences that call a difference "beyond chance": each prints a corrected p below the level."""
    pages = [ROOT / "README.md", DOCS / "losses" / "index.md", DOCS / "faq.md"]
    for folder in ("results", "papers", "explanation", "guides"):
        pages += sorted((DOCS / folder).glob("*.md"))
    agree, wrong = 0, []
    for page in pages:
        text = re.sub(r"\]\([^)]*\)", "]", page.read_text(encoding="utf-8"))
        for sentence in re.split(r"(?<=[.!?|])\s", text):
            words = " ".join(sentence.split())
            if "beyond chance" not in words or DENIED.search(words):
                continue
            found = CORRECTED_P.search(words)
            p = found[1].removeprefix("< ") if found else "1"
            if float(p) < LEVEL:
                agree += 1
            else:
                wrong.append(f"{page.name}: a claim without its corrected p: {words}")
    return Checked(agree, wrong, {})


def linked() -> Checked:
    """The decimal numbers of pages that sum up others: each is printed there, or is on a page that is linked to."""
    agree, wrong = 0, []
    for name in SUMMARIES:
        page = DOCS / name
        text = page.read_text(encoding="utf-8")
        targets = {
            target for target in re.findall(r"\]\(([^)#]+\.md)", text) if target != name
        }
        sources = [
            (page.parent / target).read_text(encoding="utf-8")
            for target in sorted(targets)
        ]
        sources += re.findall(r"(?ms)^```text$.*?^```", text)
        values = [abs(float(number)) for number in DECIMAL.findall(" ".join(sources))]
        missing = [number for number in stated(text) if not is_among(number, values)]
        agree += len(stated(text)) - len(missing)
        wrong += [
            f"{name}: {number} is on no page that it links to" for number in missing
        ]
    return Checked(agree, wrong, {})


def main() -> int:
    failed = 0
    for check in (
        training,
        saved_logits,
        speed,
        claims,
        language_models,
        statements,
        small_claims,
        post_hoc,
        linked,
    ):
        found = check()
        print(
            f"{check.__name__}: {found.agree:,} numbers agree with their file, {len(found.wrong)} do not"
        )
        print("".join(f"  {each}\n" for each in found.wrong), end="")
        print(
            "".join(
                f"  without a file: {n:,} {what}\n"
                for what, n in found.without.items()
                if n
            ),
            end="",
        )
        failed += len(found.wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
