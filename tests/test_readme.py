"""Everything the README names exists."""

from __future__ import annotations

import ast
import re
from importlib.metadata import metadata

import hf_calib
from hf_calib.losses import LOSSES
from tests.helpers.places import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_uses_real_names() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    imported = [node for node in ast.walk(ast.parse(example)) if isinstance(node, ast.ImportFrom)]
    assert {alias.name for node in imported for alias in node.names} <= set(hf_calib.__all__)
    assert example in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_the_number_of_losses() -> None:
    assert f"**{len(LOSSES)} losses**" in README


def test_commands_and_extras_exist() -> None:
    targets = set(re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"make (\S+?)[\s`]", README)) <= targets
    extras = metadata("hf_calib").get_all("Provides-Extra")
    named = re.search(r"Extras: (.*?)\.", README)
    assert named is not None
    assert set(re.findall(r"`(\w+)`", named[1])) <= set(extras or ())


def test_its_table_is_that_of_the_site() -> None:
    """Rows of the measured table are the same numbers."""
    site = (ROOT / "docs" / "explanation" / "which_loss.md").read_text(encoding="utf-8")
    rows = [line for line in README.splitlines() if line.startswith("| `")]
    assert len(rows) == 5
    for row in rows:
        name, *numbers = [cell.strip() for cell in row.strip("|").split("|")]
        (line,) = [each for each in site.splitlines() if each.startswith(f"| {name} |")]
        assert numbers == [cell.strip() for cell in line.strip("|").split("|")][2:]
