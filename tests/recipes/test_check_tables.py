"""The numbers of the result pages are those of the files beside them; a number that is changed is found."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.places import ROOT


@pytest.fixture
def check_tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    return importlib.import_module("check_tables")


CHECKS = ("training", "language_models", "statements", "small_claims", "post_hoc")


@pytest.mark.parametrize("check", CHECKS)
def test_the_pages_agree_with_their_files(check_tables: ModuleType, check: str) -> None:
    found = getattr(check_tables, check)()
    assert found.wrong == []
    assert found.agree > 100


@pytest.mark.parametrize(
    ("check", "page", "line"),
    [
        ("training", "results/training.md", r"^\| focal \|.*"),
        ("language_models", "results/language_models.md", r"^\| focal \|.*"),
        ("statements", "results/studies.md", r"^\| FCL, Theorem 4\.5.*"),
        ("statements", "papers/adafocal.md", r"^\[20 Newsgroups.*"),
        ("small_claims", "papers/bsce_gra.md", r"^\| BSCE-GRA, gamma 4 \|.*"),
    ],
)
def test_a_changed_number_is_found(
    check_tables: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    check: str,
    page: str,
    line: str,
) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build", "auto_gallery"))
    monkeypatch.setattr(check_tables, "DOCS", tmp_path / "docs")
    path = tmp_path / "docs" / page
    text = path.read_text(encoding="utf-8")
    found = re.search(line, text, flags=re.MULTILINE)
    assert found is not None
    changed, n_changed = re.subn(
        r"(?<=\d)\.(\d)", lambda digit: f".{(int(digit[1]) + 5) % 10}", found[0], count=1
    )
    assert n_changed
    path.write_text(text.replace(found[0], changed, 1), encoding="utf-8")
    assert len(getattr(check_tables, check)().wrong) == 1
