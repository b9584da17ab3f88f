"""The calibration section of a model card, in Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hf_calib._errors import few, printable
from hf_calib._text import escape, markdown_table
from hf_calib.cards.citations import citations
from hf_calib.cards.facts import (
    REPORT_FOLDER,
    Consistency,
    Facts,
    Results,
    Split,
    count,
    number,
    text,
    title_of_metric,
)
from hf_calib.losses import LOSSES
from hf_calib.metrics.sums import Interval
from hf_calib.predictions.prompts import PromptTemplate
from hf_calib.report.tables import p_in_words
from hf_calib.scaling.methods import SCALERS
from hf_calib.scaling.saved_map import MAP_NAME, PACKAGES, POOLER_CONFIG, map_title
from hf_calib.tasks import TASKS, Task

HEADING = "## Calibration"
_FEW = 6  # numbers of a parameter that a reader can take in
# Narrow enough for two columns of numbers beside them on a phone.
_SHORT = {
    "nll": "NLL (nats)",
    "brier": "Brier score",
    "ece": "ECE",
    "mce": "Maximum CE",
}


def calibration_section(facts: Facts, name: str, decisions: Sequence[str] = ()) -> str:
    """The section's Markdown.

    Args:
        facts: of a folder with a map, or with results.
        name: of the repository or the folder, for the snippets.
        decisions: lines on the rule beside the model.
    """
    lines = [HEADING, ""]
    if facts.results is not None:
        lines += _results(facts, facts.results)
    elif facts.record is not None:
        lines += ["No results are shown: what was measured is not known, or not about these weights.", ""]
    lines += ["### How to use it", "", *_usage(facts, name), ""]
    if decisions:
        lines += ["### Decisions", "", *(line for line in decisions if line), ""]
    if facts.record is not None:
        lines += ["### How it was calibrated", "", *_history(facts, facts.record), ""]
        lines += ["### What it is calibrated for, and what breaks it", "", *_limits(facts), ""]
    lines += _again(facts, name)
    lines += _citations(facts)
    return "\n".join(lines).rstrip()


def title(record: Mapping[str, Any]) -> str:
    """The map's name in a sentence."""
    fitted = record.get("parameters")
    choice = text(fitted if isinstance(fitted, Mapping) else record, "choice")
    return map_title(text(record, "method") or "temperature", choice)


def rows_in_words(rows: Split) -> str:
    """The rows of a split, escaped.

    >>> rows_in_words(Split("ag_news", "test", 7600)), rows_in_words(Split(None, "evaluation", None))
    ('7,600 rows of the test split of ag\\\\_news', 'rows of the evaluation split')
    """
    number = "rows" if rows.n is None else f"{rows.n:,} row{'' if rows.n == 1 else 's'}"
    part = f" ({escape(rows.part)})" if rows.part else ""
    split = f" of the {escape(rows.split)} split" if rows.split else ""
    return number + part + split + (f" of {escape(rows.name)}" if rows.name else "")


# ---- Results ----


def _results(facts: Facts, results: Results) -> list[str]:
    after = "" if facts.record is None else f" after {title(facts.record)}"
    lines = []
    if results.figures:
        shown = f"Reliability diagram{' before and' + escape(after) if 'after' in results.metrics else ''}"
        lines += [f"![{shown}]({results.figures[0]})", ""]
    lines += [_headline(results, after), ""]
    lines += [*_table(results), "", *_how_to_read(results, facts.multi_label), ""]
    if results.tests:
        lines += [*_tests(results, after), ""]
    if len(results.figures) > 1:
        lines += ["<details>", "<summary>More figures</summary>", ""]
        for path in results.figures[1:]:
            lines += [f"![{path.split('/')[-1].split('.')[0].replace('_', ' ').capitalize()}]({path})", ""]
        lines += ["</details>", ""]
    return lines


def _headline(results: Results, after: str) -> str:
    key = next(
        (key for key in ("ece", "macro_ece") if key in next(iter(results.metrics.values()), {})), "ece"
    )
    ece = {column: values[key].value for column, values in results.metrics.items() if key in values}
    said = ", ".join(
        f"**{value:.4f}**{'' if column == 'value' else f' {column}' if column == 'before' else escape(after)}"
        for column, value in ece.items()
    )
    of_labels = ", the mean over the labels" if key == "macro_ece" else ""
    sentence = f"Expected calibration error (ECE){of_labels}: {said}, on {rows_in_words(results.rows)}."
    if not results.seen:
        return sentence
    every = results.rows.n is not None and results.seen >= results.rows.n
    which = "these same rows" if every else f"{results.seen:,} of these rows"
    return f"{sentence} **The map was fitted on {which}, so the metrics after it are optimistic.**"


def _table(results: Results) -> list[str]:
    columns = results.metrics
    keys = dict.fromkeys(key for values in columns.values() for key in values)
    rows = [
        [_SHORT.get(key, title_of_metric(key)), *(_cell(values.get(key)) for values in columns.values())]
        for key in keys
    ]
    return markdown_table(["Metric", *(column.capitalize() for column in columns)], rows)


def _cell(value: Interval | None) -> str:
    """A number with its interval below it: side by side they are too wide for a phone."""
    if value is None:
        return ""
    # No line breaks at a dash between word joiners.
    interval = (
        ""
        if value.low is None
        else f"<br><sub>{value.low:.4f}&NoBreak;&ndash;&NoBreak;{value.high:.4f}</sub>"
    )
    return f"{value.value:.4f}{interval}"


def _how_to_read(results: Results, multi_label: bool) -> list[str]:
    bins = "" if results.n_bins is None else f" {results.n_bins} bins."
    autocast = ""
    if results.autocast is not None:
        autocast = (
            f" Measured under {results.autocast} autocast, as in the training; the saved model is in float32, whose "
            "numbers differ a little."
        )
    if not results.has_report:
        tests = "confidence intervals" if multi_label else "both"
        again = f" `hf-calib evaluate` gives {tests}."
        return [
            f"All but accuracy: lower is better.{bins}{autocast} There is no report on this evaluation, and so no "
            f"confidence intervals and no consistency test.{again}"
        ]
    level = f"{100 * (results.level or 0):g}%"
    higher = "AUROC and average precision" if multi_label else "accuracy"
    return [
        f"All but {higher}: lower is better. Below each number its {level} interval over the rows.{bins}"
        f"{autocast} Noise makes calibration errors larger: the intervals of ECEs are of the error without it, by test "
        "inversion, and the others have none. "
        f"All metrics, bins and classes: [report]({REPORT_FOLDER}/report.md)."
    ]


def _tests(results: Results, after: str) -> list[str]:
    found = [_test(column, test, results.level or 0.95, after) for column, test in results.tests.items()]
    return [f"**Consistency test.** {' '.join(found)}"]


def _test(column: str, test: Consistency, level: float, after: str) -> str:
    when = {"before": "Before", "after": escape(after.strip().capitalize() or "After"), "value": ""}[column]
    subject = "the" if when else "The"
    chance = f"{test.expected:.4f} on average, {p_in_words(test.p_value)}"
    start = f"{when}{', ' if when else ''}{subject} ECE of {test.value:.4f}"
    if test.p_value <= 1 - level:
        return (
            f"{start} is beyond the chance of a perfectly calibrated model with these confidences ({chance})."
        )
    return f"{start} is within chance of a perfectly calibrated model with these confidences ({chance})."


# ---- Use ----


def usage_lines(
    name: str,
    task: Task | None,
    *,
    by_hf_calib: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> list[str]:
    """The lines of Python that call a model.

    Args:
        name: of the repository or the folder.
        task: its row; None is that of texts.
        by_hf_calib: whether hf_calib's pipeline is needed, for a map that is not in the weights.
        revision: a branch.
        trust_remote_code: whether its network's code comes with it, and has to be run.

    >>> print(*usage_lines("me/x", TASKS["image"], revision="v2"), sep="\\n")
    from transformers import pipeline
    classify = pipeline("image-classification", model="me/x", revision="v2", top_k=None)
    print(classify("an_image.png"))
    """
    task = task or TASKS["text"]
    options = "" if revision is None else f", revision={json.dumps(revision)}"
    if task.shows_all_scores:
        options += ", top_k=None"
    if trust_remote_code:
        options += ", trust_remote_code=True"
    return [
        f"from {'hf_calib' if by_hf_calib else 'transformers'} import pipeline",
        f"classify = pipeline({json.dumps(task.pipeline)}, model={json.dumps(name)}{options})",
        f"print(classify({json.dumps(task.example)}))",
    ]


def _lines_of(facts: Facts, name: str, beside: bool) -> list[str]:
    return usage_lines(name, facts.task, by_hf_calib=beside, trust_remote_code=facts.has_own_code)


def _usage(facts: Facts, name: str) -> list[str]:
    beside = facts.record is not None and not facts.folded
    lines = ["```python", *_lines_of(facts, name, beside or facts.prompt is not None), "```"]
    if facts.prompt is not None:
        lines += ["", *_prompt(facts.prompt)]
    if facts.record is None:
        return lines
    kind = "sigmoid" if facts.multi_label else "softmax"
    if facts.folded:
        said = (
            f"The map is folded into the classification head: the {kind} that the pipeline applies gives the "
            "calibrated probabilities, with no code of hf_calib."
        )
    else:
        said = (
            f"The map is not in the weights: {MAP_NAME} holds it, and `hf_calib.pipeline` applies it. "
            "`transformers.pipeline` gives the probabilities from before the calibration."
        )
        groups = _groups(facts.record)
        if groups:
            said += (
                f" It has a map for each of {len(groups)} groups ({escape(few(groups))}), which a call names: "
                "`classify(texts, group=...)`; others get the common map."
            )
        given = facts.record.get(POOLER_CONFIG)
        vllm = given if isinstance(given, Mapping) else {}
        told = {key: number(vllm, key) for key in ("logit_mean", "logit_sigma")}
        if None not in told.values():
            said += f" vLLM applies it, too: `vllm serve ... --pooler-config '{json.dumps(told)}'`."
    return [*lines, "", said]


def _groups(record: Mapping[str, Any]) -> list[str]:
    """The names of the groups that a map is for; none of other maps."""
    parameters = record.get("parameters")
    found = parameters.get("groups") if isinstance(parameters, Mapping) else None
    return [printable(name) for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _prompt(prompt: PromptTemplate) -> list[str]:
    """The prompt as it is, in a fence that nothing in it closes."""
    parts = {
        "The system's message": prompt.system,
        "The prompt": prompt.template,
        "Its end": prompt.ends_with,
    }
    lines = []
    for name, written in parts.items():
        if written:
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", written)), default=0))
            lines += [f"{name}:", "", f"{fence}text", written, fence, ""]
    where = "in the tokenizer's chat template" if prompt.chat else "as it stands"
    lines.append(
        f"The model answers with one token after its prompt, {where}. `hf_calib.pipeline` and `hf-calib` make the "
        "prompt of a text; other pipelines and servers have to be given it."
    )
    return lines


# ---- History ----


def _history(facts: Facts, record: Mapping[str, Any]) -> list[str]:
    name = title(record)
    fitted_on = Split(None, text(record, "split"), count(record, "n_examples"))
    calibration = facts.splits.get("calibration", fitted_on)
    if calibration.n is None:
        calibration = calibration._replace(n=fitted_on.n)
    lines = []
    base = text(record, "base_model")
    loss = _loss(record)
    if loss:
        lines += [f"Trained with the loss {loss}{f', from {escape(base)}' if base else ''}.", ""]
    lines += [
        f"{escape(name[0].upper() + name[1:])}{_parameters(record)} was fitted on {rows_in_words(calibration)}; "
        f"{MAP_NAME} has it as numbers.",
        "",
    ]
    uses = {"train": "the weights", "calibration": "the map", "test": "the numbers above"}
    found = {**facts.splits, "calibration": calibration}
    if "gammas" in found and found["gammas"] == calibration:
        uses["calibration"] += " and the loss's gammas"
    elif "gammas" in found:
        uses = {"train": uses.pop("train"), "gammas": "the loss's gammas", **uses}
    if facts.results is not None:
        known, rest = facts.splits.get("test", Split()), facts.results.rows
        found["test"] = Split(
            rest.name or known.name, rest.split or known.split, rest.n or known.n, rest.part or known.part
        )
    lines += ["| Split | Rows | Used for |", "| --- | ---: | --- |"]
    lines += [_row_of_splits(found[role], role, use) for role, use in uses.items() if role in found]
    lines.append("")
    if facts.task is not None and not facts.task.labels.independent:
        lines += [
            "Rows of the training are texts, all others are tokens. The intervals take tokens for independent of each "
            "other, and are too narrow for that.",
            "",
        ]
    versions = [
        f"{package} {escape(facts.versions[package])}" for package in PACKAGES if facts.versions.get(package)
    ]
    when = text(record, "date")
    if versions or when:
        made = (
            f"Made{f' on {escape(when)}' if when else ''}{' with ' if versions else ''}{', '.join(versions)}."
        )
        lines.append(made)
    return lines


def _row_of_splits(rows: Split, role: str, use: str) -> str:
    name = escape(" ".join(part for part in (rows.name, rows.split) if part) or role)
    name += f", {escape(rows.part)}" if rows.part else ""
    return f"| {name} | {'not known' if rows.n is None else f'{rows.n:,}'} | {use} |"


def _loss(record: Mapping[str, Any]) -> str:
    """The loss and its hyperparameters, escaped; empty where it is not known."""
    name = text(record, "loss")
    if name is None:
        return ""
    settings = record.get("loss_kwargs")
    given = settings.items() if isinstance(settings, Mapping) else ()
    said = ", ".join(f"{key}={_short(value)}" for key, value in given)
    return escape(f"{name} ({said})" if said else name)


def _short(value: object) -> str:
    shown = " ".join(str(value).split())
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _parameters(record: Mapping[str, Any]) -> str:
    """The map's parameters in brackets, where they are few, and what it minimised."""
    fitted = record.get("parameters")
    known = {**record, **(fitted if isinstance(fitted, Mapping) else {})}
    scale, bias = _numbers(record.get("weight")), _numbers(record.get("bias") or 0)
    if scale is not None and scale.ndim == 0 and scale > 0 and bias is not None and not bias.any():
        known["temperature"] = float(1 / scale)
    said = []
    for name in ("temperature", "temperatures"):
        numbers = _numbers(known.get(name))
        if numbers is not None and numbers.ndim <= 1 and numbers.size <= _FEW:
            said.append(f"{name} {', '.join(f'{value:.4f}' for value in numbers.reshape(-1))}")
    criterion = text(record, "criterion")
    if criterion is not None:
        said.append(f"criterion: {escape(criterion)}")
    return f" ({'; '.join(said)})" if said else ""


def _numbers(value: object) -> np.ndarray[Any, Any] | None:
    try:
        found = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found.size and np.isfinite(found).all() else None


# ---- Limits ----


def _limits(facts: Facts) -> list[str]:
    corrects = ""
    if facts.is_read_unlabelled and not facts.multi_label:
        corrects = ": `hf-calib calibrate --target-data` corrects for them from unlabelled inputs"
    lines = [
        "A probability of 0.8 from this model is meant to be right 8 times in 10 **on inputs drawn as the calibration "
        "split was**. It is no promise for:",
        "",
        "- other inputs (another domain, language or time), on which probabilities are mostly too high;",
        f"- other class frequencies{corrects};",
        "- single classes or groups of inputs: the numbers above are averages;",
        "- weights in 8 or 4 bits: measure the quantised model, and calibrate it again if need be;",
    ]
    if facts.multi_label:
        lines.append(
            "- servers that apply a softmax to multi-label models, as Text Embeddings Inference does: ask for raw "
            "scores there, and apply a sigmoid;"
        )
    if not facts.folded:
        lines.append("- servers and exports, which do not know the map: they serve the model from before it;")
    lines[-1] = f"{lines[-1][:-1]}."
    return lines


# ---- Again ----


def _again(facts: Facts, name: str) -> list[str]:
    results = facts.results
    commands = []
    said = []
    trusted = ["--trust-remote-code"] if facts.has_own_code else []
    if facts.is_read_by_commands and results is not None and results.options:
        bins = [] if results.n_bins in (None, 15) else ["--n-bins", str(results.n_bins)]
        commands.append(" ".join(["hf-calib evaluate", name, *results.options, *bins, *trusted]))
        served = "before" if facts.record is not None and not facts.folded else list(results.metrics)[-1]
        said.append(f'`evaluate` gives the column "{served.capitalize()}" above, of the same rows.')
    elif facts.is_read_by_commands:
        commands.append(" ".join(["hf-calib evaluate", name, "--data", _file("test", facts), *trusted]))
        said.append("`evaluate` measures the model on labelled rows of yours.")
    elif not facts.multi_label:
        commands.append("hf-calib evaluate predictions.npz")
        said.append("`evaluate` measures a file with the model's `logits` and the `labels` of rows of yours.")
    if facts.is_read_by_commands:
        options = ["--data", _file("yours", facts), *trusted, "--output recalibrated"]
        commands.append(" ".join(["hf-calib calibrate", name, *options]))
        said.append("`calibrate` fits a new map on rows of yours.")
    if facts.folded:
        commands.append(" ".join(["hf-calib unfold", name, "unfolded", *trusted]))
        said.append("`unfold` takes the map out again.")
    if not commands:
        return []
    lines = ["### Measure again, calibrate again", "", "Where hf_calib is installed:", ""]
    return [*lines, "```bash", *commands, "```", "", " ".join(said), ""]


def _file(name: str, facts: Facts) -> str:
    """A file that holds what the model reads: texts go into tables of text."""
    return f"{name}.csv" if facts.task is None or facts.task.inputs == "texts" else f"{name}.parquet"


def _citations(facts: Facts) -> list[str]:
    record = facts.record or {}
    loss, method = text(record, "loss"), text(record, "method")
    entries = citations(loss if loss in LOSSES else None, method if method in SCALERS else None)
    if not entries:
        return []
    lines = ["<details>", "<summary>BibTeX of the loss and the map</summary>", "", "```bibtex"]
    return [*lines, *"\n\n".join(entries).splitlines(), "```", "", "</details>"]
