"""The site has every public name, command and citation, a text for each image, and links that lead somewhere."""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import Any

import pytest

import hf_calib
from hf_calib.cards.card import references
from hf_calib.cli import app
from hf_calib.losses import LOSSES
from tests.docs.pages import DOCS, PAGES, text_of_page

# Not for users; hf_calib.trl is loaded in an environment of its own.
INTERNAL = ("hf_calib.commands", "hf_calib.cli", "hf_calib.trl")


def public_names() -> list[tuple[str, str]]:
    """(package, name) of every `__all__`, the package's own first."""
    found = []
    for info in [None, *pkgutil.walk_packages(hf_calib.__path__, "hf_calib.")]:
        name = "hf_calib" if info is None else info.name
        parts = name.split(".")
        if any(part.startswith("_") for part in parts[1:]) or name.startswith(INTERNAL):
            continue
        if info is None or info.ispkg:
            module = importlib.import_module(name)
            found += [(name, each) for each in getattr(module, "__all__", ())]
    return found


def documented() -> list[Any]:
    """The objects that have an entry in the reference or on the pages of the losses."""
    found = []
    for page in PAGES:
        text = text_of_page(page)
        for package, body in re.findall(
            r"```\{api\} (\S+)\n(.*?)```", text, flags=re.DOTALL
        ):
            if package in INTERNAL:
                continue
            module = importlib.import_module(package)
            found += [
                getattr(module, line.partition(":")[0]) for line in body.splitlines()
            ]
        found += [
            LOSSES[name].constructor for name in re.findall(r"```\{loss\} (\S+)", text)
        ]
    return found


def test_every_public_name_has_a_page() -> None:
    there = documented()
    missing = [
        f"{package}.{name}"
        for package, name in public_names()
        if not any(
            getattr(importlib.import_module(package), name) is each for each in there
        )
    ]
    # An interval is the same class in two packages, a constant the same object.
    assert missing == []


def test_every_command_has_its_section() -> None:
    text = text_of_page("command_line.md")
    assert set(re.findall(r"```\{command\} (\S+)", text)) == {
        command.name for command in app.registered_commands
    }


def test_every_citation_is_in_the_paper_index() -> None:
    cited = re.findall(r"\{citation\} (\S+)", "".join(map(text_of_page, PAGES)))
    assert set(cited) == {key for _, _, key in references()}


@pytest.mark.parametrize(
    "page", [*PAGES, "../README.md", "../recipes/README.md", "../CONTRIBUTING.md"]
)
def test_images_have_texts_and_links_lead_somewhere(page: str) -> None:
    path = (DOCS / page).resolve()
    text = path.read_text(encoding="utf-8")
    for alt, _ in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text):
        assert len(alt) > 10, f"{page}: {alt!r}"
    for target in re.findall(r"(?<!`)\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page}: {target}"
