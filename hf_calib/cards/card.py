"""The model card: README.md of a model's folder, with metadata for the Hub and a section on calibration."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCard

from hf_calib._errors import InputValueError, expected
from hf_calib._files import whole_file
from hf_calib._hub import CARD
from hf_calib._text import escape, is_hub_name
from hf_calib.cards.decisions import decision_lines
from hf_calib.cards.facts import Facts, read_facts
from hf_calib.cards.metadata import update_metadata
from hf_calib.cards.section import HEADING, calibration_section, title

_START = "<!-- hf_calib: what stands between these two marks is written anew with each card -->"
_END = "<!-- hf_calib: end -->"
_CLASSES_NAMED = 20


def write_card(
    folder: str | os.PathLike[str],
    *,
    repo_id: str | None = None,
    license: str | None = None,
    language: str | Sequence[str] | None = None,
    datasets: str | Sequence[str] | None = None,
    base_model: str | None = None,
) -> None:
    """Write the README.md of a model's folder, from config.json, calibration.json, the report and decisions.json.

    An existing card keeps its text and metadata; the section on calibration, which stands between two marks, is
    replaced, or added at the end. Nothing else is removed: where a mark has lost its other one, a warning says so.
    Writing it again changes nothing.

    Args:
        folder: of the model.
        repo_id: the repository's name, for the snippets; None is the folder's.
        license: an identifier of the Hub; None takes the card's, or else the base model's.
        language: codes such as "en".
        datasets: names on the Hub.
        base_model: name on the Hub of the model that was fine-tuned.

    Raises:
        ValueError: if there is a README.md whose metadata cannot be read.
        OSError: if it cannot be written.

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
    name = repo_id or re.sub(r"[^\w.-]+", "-", folder.resolve().name).strip("-") or "model"
    card = _card(folder / CARD, facts, name)
    update_metadata(
        card.data,
        facts,
        model_name=name.split("/")[-1],
        license=license,
        language=language,
        datasets=datasets,
        base_model=base_model,
    )
    if facts.record is not None or facts.results is not None or facts.prompt is not None:
        section = calibration_section(facts, name, decision_lines(folder))
        card.text = _with_section(card.text, f"{_START}\n{section}\n{_END}")
    with whole_file(folder / CARD) as unfinished:
        card.save(unfinished)


def repair_stock_card(path: Path, base_model: str | None, *, is_calibrated: bool) -> None:
    """Take out of the Trainer's card what is not so: a base model that is on this machine only, a dataset "None".

    Where there is a map, its results go too: they are those before the map, under the name of any dataset.
    """
    card = ModelCard.load(path)
    if base_model is not None and not is_hub_name(base_model):
        link = (
            f"This model is a fine-tuned version of [{base_model}](https://huggingface.co/{base_model}) on "
        )
        card.text = card.text.replace(link, "This model was trained on ")
    card.text = card.text.replace(" on the None dataset.", " on an unknown dataset.")
    if is_calibrated:
        card.data.eval_results = []
    card.save(path)


def _card(path: Path, facts: Facts, name: str) -> ModelCard:
    """The card that is there, or the beginning of a new one."""
    if not path.is_file():
        return ModelCard(f"---\nlibrary_name: transformers\n---\n\n{_introduction(facts, name)}\n")
    try:
        card = ModelCard(path.read_text(encoding="utf-8-sig"))  # Notepad begins files with a mark
    except Exception as error:  # of YAML, of the metadata's checks, of the encoding
        got = f"{path} ({' '.join(str(error).split())[:300]})"
        way_out = "correct the lines between the two ---, or move the file away for a new card"
        raise InputValueError(expected(CARD, "have metadata that can be read", got, way_out)) from error
    return card


def _introduction(facts: Facts, name: str) -> str:
    kind = "classification" if facts.task is None else facts.task.pipeline.replace("-", " ")
    classes = ""
    if facts.class_names:
        named = ", ".join(map(escape, facts.class_names[:_CLASSES_NAMED]))
        more = len(facts.class_names) - _CLASSES_NAMED
        noun = "labels, of which an input may have several" if facts.multi_label else "classes"
        classes = f" for {len(facts.class_names)} {noun}: {named}{f' and {more} more' if more > 0 else ''}"
    lines = [f"# {escape(name.split('/')[-1])}", "", f"A model for {kind}{classes}."]
    if facts.record is not None:
        lines += ["", f"Its probabilities were calibrated with {escape(title(facts.record))}: see below."]
    return "\n".join(lines)


def _with_section(text: str, section: str) -> str:
    """The card's text with the section in the place of an earlier one, or else at its end."""
    # A start and the end that follows it, with no other start between: what lies between such marks is ours.
    sections = re.compile(f"{re.escape(_START)}(?:(?!{re.escape(_START)}).)*?{re.escape(_END)}", re.S)
    first = sections.search(text)
    if first is not None:
        before, after = text[: first.start()], sections.sub("", text[first.end() :])
    elif _START in text:
        warnings.warn(
            f"The section on calibration in {CARD} has lost the mark of its end. It stays as it is, and a new one was "
            "added below. Remove the old one by hand.",
            stacklevel=4,
        )
        before, after = text, ""
    else:
        before, after = _around_old_section(text)
    parts = [part.strip("\n") for part in (before, section, after)]
    return "\n" + "\n\n".join(part for part in parts if part) + "\n"


def _around_old_section(text: str) -> tuple[str, str]:
    """The text before and after the section that version 0.1 wrote, which had no marks."""
    found = re.search(
        rf"^{re.escape(HEADING)}\n\nTrained with the loss .*?(?=^#{{1,2}} |\Z)", text, re.S | re.M
    )
    return (text, "") if found is None else (text[: found.start()], text[found.end() :])
