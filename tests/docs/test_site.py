"""The site has every public name, command and citation, a text for each image, and links that lead somewhere."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from typing import Any

import pytest

import hf_calib
from hf_calib.cards.card import references
from hf_calib.cli import app
from hf_calib.losses import LOSSES
from tests.docs.pages import DOCS, PAGES, text_of_page
from tests.helpers.places import ROOT

# Not for users: what the command line and the recipes are made of.
# Loaded in an environment of their own.
NEED_AN_EXTRA = {"hf_calib.trl": "reference/trl.md"}
INTERNAL = {"hf_calib.commands", "hf_calib.cli"}


def public_names() -> list[tuple[str, str]]:
    """(package, name) of every `__all__`, the package's own first."""
    found = []
    for info in [None, *pkgutil.walk_packages(hf_calib.__path__, "hf_calib.")]:
        name = "hf_calib" if info is None else info.name
        parts = name.split(".")
        if any(part.startswith("_") for part in parts[1:]) or any(name.startswith(each) for each in INTERNAL):
            continue
        if name in NEED_AN_EXTRA:
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
        for package, body in re.findall(r"```\{api\} (\S+)\n(.*?)```", text, flags=re.DOTALL):
            if package in NEED_AN_EXTRA:
                continue
            module = importlib.import_module(package)
            found += [getattr(module, line.partition(":")[0]) for line in body.splitlines()]
        found += [LOSSES[name].constructor for name in re.findall(r"```\{loss\} (\S+)", text)]
    return found


def test_every_public_name_has_a_page() -> None:
    there = documented()
    missing = [
        f"{package}.{name}"
        for package, name in public_names()
        if not any(getattr(importlib.import_module(package), name) is each for each in there)
    ]
    # An interval is the same class in two packages, a constant the same object.
    assert missing == []


@pytest.mark.parametrize(("package", "page"), NEED_AN_EXTRA.items())
def test_names_of_an_extra_have_a_page(package: str, page: str) -> None:
    (body,) = re.findall(rf"```\{{api\}} {package}\n(.*?)```", text_of_page(page), flags=re.DOTALL)
    assert {line.partition(":")[0] for line in body.splitlines()} == set(
        importlib.import_module(package).__all__
    )


def test_every_public_name_has_a_docstring() -> None:
    for package, name in public_names():
        thing = getattr(importlib.import_module(package), name)
        if callable(thing):
            assert inspect.getdoc(thing), f"{package}.{name}"


def test_nothing_is_documented_twice() -> None:
    there = [id(each) for each in documented()]
    assert len(set(there)) == len(there)


def test_every_command_has_its_section() -> None:
    text = text_of_page("command_line.md")
    commands = [command.callback.__name__ for command in app.registered_commands if command.callback]
    assert sorted(re.findall(r"```\{command\} (\S+)", text)) == sorted(commands)


def test_options_are_terms_with_their_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS / "_ext")
    commands = importlib.import_module("commands")

    def entries(name: str) -> dict[str, str]:
        signature = inspect.signature(commands.COMMANDS[name].callback, eval_str=True)
        return dict(commands.entry(parameter) for parameter in signature.parameters.values())

    calibrate, compare = entries("calibrate"), entries("compare")
    assert all(each.startswith(": ") for each in calibrate.values())
    assert calibrate["`--output PATH`"].endswith(" Required.")
    assert calibrate["`--seed INTEGER`"].endswith(" Default: `0`.")
    assert "`--keep-models, --no-keep-models`" in compare
    assert "`'torchrun --nproc_per_node 2'`" in compare["`--launcher TEXT`"]  # to be copied as it is


def test_every_citation_is_in_the_paper_index() -> None:
    cited = re.findall(r"\{citation\} (\S+)", "".join(map(text_of_page, PAGES)))
    assert set(cited) == {key for _, _, key in references()}


def test_there_are_twelve_examples_and_each_draws() -> None:
    examples = sorted((DOCS / "gallery").glob("plot_*.py"))
    assert len(examples) >= 12
    for example in examples:
        assert "\nfigure = " in example.read_text(), example.name


@pytest.mark.parametrize("page", [*PAGES, "../README.md", "../recipes/README.md", "../CONTRIBUTING.md"])
def test_images_have_texts_and_links_lead_somewhere(page: str) -> None:
    path = (DOCS / page).resolve()
    text = path.read_text(encoding="utf-8")
    for alt, _ in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", text):
        assert len(alt) > 10, f"{page}: {alt!r}"
    for target in re.findall(r"(?<!`)\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page}: {target}"


def test_agents_and_readme_are_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900
    assert len((ROOT / "AGENTS.md").read_text().split()) <= 400
