"""The model card: README.md of a model's folder, with metadata for the Hub and a section on
calibration.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import warnings
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from huggingface_hub import ModelCard
from jinja2 import Environment
from markupsafe import Markup

from hf_calib._errors import printable
from hf_calib._files import whole_file
from hf_calib._hub import CARD, read_card
from hf_calib._text import escape, is_hub_name, safe
from hf_calib.cards.facts import Facts, read_facts
from hf_calib.cards.metadata import update_metadata
from hf_calib.models.classifier import TASKS, Task
from hf_calib.scaling.saved_map import PACKAGES

# Lines of the Trainer's card: metrics with a calibrator, and its temperature.
_OF_A_MAP = re.compile(r"(?m)^- [\w ]+ Calibrated: .*\n")
_TEMPERATURE = re.compile(r"(?m)^- Temperature: .*\n")
#: What begins the section that we write.
START = "<!-- hf_calib: what stands between these two marks is written anew with each card -->"
_END = "<!-- hf_calib: end -->"


def write_card(
    folder: str | os.PathLike[str],
    *,
    repo_id: str | None = None,
    license: str | None = None,
    language: str | Sequence[str] | None = None,
    datasets: str | Sequence[str] | None = None,
    base_model: str | None = None,
) -> None:
    """Write the README.md of a model's folder, from config.json, calibration.json,
    the report and decisions.json.

    An existing card keeps its text and metadata; the section on calibration, which stands between
    two marks, is replaced, or added at the end. Nothing else is removed, and writing the card again
    changes nothing. If one of the marks is missing, there is a warning.

    Args:
        folder: of the model.
        repo_id: the repository's name, for the snippets; None is the folder's.
        license: an identifier of the Hub; None is the card's, or else the base model's.
        language: codes such as "en".
        datasets: names on the Hub.
        base_model: name on the Hub of the model that was fine-tuned.

    Raises:
        ValueError: if there is a README.md whose metadata cannot be read.
        OSError: if README.md cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "config.json").write_text('{"calibration": {"method": "temperature", "folded": true}}')
    ...     write_card(folder, repo_id="me/x", license="mit")
    ...     card = ModelCard.load(Path(folder, "README.md"))
    >>> card.data.tags, card.data.license
    (['calibration', 'hf_calib'], 'mit')
    """
    folder = Path(folder)
    facts = read_facts(folder)
    name = (
        # The Hub allows no other characters in a name.
        repo_id or re.sub(r"[^\w.-]+", "-", folder.resolve().name).strip("-") or "model"
    )
    introduction, section = _written(facts, name)
    new = f"---\nlibrary_name: transformers\n---\n\n{introduction}"
    card = read_card(folder / CARD) if (folder / CARD).is_file() else ModelCard(new)
    given = {
        "license": license,
        "language": language,
        "datasets": datasets,
        "base_model": base_model,
    }
    update_metadata(card.data, facts, name.split("/")[-1], given)
    is_of_us = facts.record or facts.results is not None or facts.prompt is not None
    # A section that is there already may be on weights that were trained since.
    if is_of_us or START in card.text:
        card.text = _with_section(card.text, section)
    with whole_file(folder / CARD) as unfinished:
        card.save(unfinished)


def repair_stock_card(
    path: Path, base_model: str | None, *, is_calibrated: bool, is_measured: bool
) -> None:
    """Correct the Trainer's card: remove a base model that is on this machine only,
    and a dataset "None".

    With a calibrator, the card's results are removed too: they are those before it, under the name
    of any dataset. In the text, those of a calibrator are removed unless it is the model's, with
    which it was measured.
    """
    card = read_card(path)
    if base_model is not None and not is_hub_name(base_model):
        link = f"This model is a fine-tuned version of [{base_model}](https://huggingface.co/{base_model}) on "
        card.text = card.text.replace(link, "This model was trained on ")
    card.text = card.text.replace(" on the None dataset.", " on an unknown dataset.")
    if is_calibrated:
        card.data.eval_results = []
    if not is_measured and _OF_A_MAP.search(card.text):
        card.text = _TEMPERATURE.sub("", _OF_A_MAP.sub("", card.text))
    card.save(path)


def usage_lines(
    name: str,
    task: Task | None,
    *,
    by_hf_calib: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> list[str]:
    """The lines of Python that call a model, by hf_calib's pipeline if the calibrator is not in the
    weights.
    """
    task = task or TASKS["text"]
    options = "" if revision is None else f", revision={json.dumps(revision)}"
    options += ", top_k=None" if task.shows_all_scores else ""
    options += ", trust_remote_code=True" if trust_remote_code else ""
    return [
        f"from {'hf_calib' if by_hf_calib else 'transformers'} import pipeline",
        f"classify = pipeline({json.dumps(task.pipeline)}, model={json.dumps(name)}{options})",
        f"print(classify({json.dumps(task.example)}))",
    ]


def references() -> list[tuple[str, str, str]]:
    """For each paper, the losses and calibrators that are from it,
    its BibTeX entry and its citation key.
    """
    text = files("hf_calib.cards").joinpath("references.bib").read_text("utf-8")
    return re.findall(r"(?ms)^% ([^\n]*)\n(@\w+{(\w+),.*?^})", text)


def citations(*methods: str | None) -> list[str]:
    """The BibTeX entries for losses and calibrators by their names, each once;
    none for names without a source.
    """
    return [
        entry for names, entry, _ in references() if {*methods} & {*names.split(", ")}
    ]


def _written(facts: Facts, name: str) -> tuple[str, str]:
    """The introduction of a new card, and the section on calibration."""
    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        # Names and texts come from data, and may hold markup.
        autoescape=True,
        finalize=_escaped,
    )
    environment.filters.update(
        fenced=_fenced, sentence=lambda text: Markup(safe(printable(text)))
    )
    environment.globals.update(packages=PACKAGES, command=_command)
    template = environment.from_string(
        files("hf_calib.cards").joinpath("card.md.jinja").read_text("utf-8")
    )
    by_hf_calib = bool(facts.record and not facts.folded) or facts.prompt is not None
    own_code = "auto_map" in facts.config
    usage = usage_lines(
        name, facts.task, by_hf_calib=by_hf_calib, trust_remote_code=own_code
    )
    cited = citations(facts.record.get("loss"), facts.record.get("method"))
    text = template.render(
        vars(facts),
        facts=facts,
        name=name,
        usage=usage,
        own_code=own_code,
        citations=cited,
    )
    introduction, _, section = text.partition("\n## Calibration\n")
    return introduction, f"{START}\n## Calibration\n\n{section.strip()}\n{_END}"


def _escaped(value: object) -> Markup:
    """A value from the data as text, unless it is marked as safe."""
    return value if isinstance(value, Markup) else Markup(escape(printable(value)))


def _command(words: Sequence[str]) -> Markup:
    return Markup(shlex.join(map(printable, words)))


def _fenced(text: str) -> Markup:
    """An unchanged text in a fence that nothing in it closes."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return Markup(f"{fence}text\n{text}\n{fence}")


def _with_section(text: str, section: str) -> str:
    """The card's text with the section in the place of an earlier one, or else at its end."""
    # The section is between a start mark and the next end mark,
    # with no other start mark between them.
    sections = re.compile(
        f"{re.escape(START)}(?:(?!{re.escape(START)}).)*?{re.escape(_END)}", re.S
    )
    before, *after = sections.split(text)
    if not after and START in text:
        warnings.warn(
            f"The section on calibration in {CARD} has lost its end mark. It was left unchanged, and a new section was "
            "added below. Remove the old one by hand.",
            stacklevel=3,
        )
    parts = [part.strip("\n") for part in (before, section, "".join(after))]
    return "\n" + "\n\n".join(filter(None, parts)) + "\n"
