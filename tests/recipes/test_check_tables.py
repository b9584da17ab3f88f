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


@pytest.mark.parametrize("check", ["training", "language_models", "statements", "small_claims", "post_hoc"])
def test_the_pages_agree_with_their_files(check_tables: ModuleType, check: str) -> None:
    found = getattr(check_tables, check)()
    assert found.wrong == []
    assert found.agree > 100


def test_a_changed_number_is_found(
    check_tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build", "auto_gallery"))
    monkeypatch.setattr(check_tables, "DOCS", tmp_path / "docs")
    path = tmp_path / "docs" / "results" / "training.md"
    text = path.read_text(encoding="utf-8")
    line = re.findall(r"^\| focal \|.*", text, flags=re.MULTILINE)[0]
    changed = re.sub(r"(?<=\d)\.(\d)", lambda digit: f".{(int(digit[1]) + 5) % 10}", line, count=1)
    path.write_text(text.replace(line, changed, 1), encoding="utf-8")
    assert len(check_tables.training().wrong) == 1
