"""What the README says exists."""

from __future__ import annotations

import ast
import re

from conftest import ROOT

import hf_calib
from hf_calib.losses import LOSSES

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_table_of_losses_is_complete_and_gives_the_defaults() -> None:
    table = README[README.index("| name | loss |") : README.index("m-l: has a multi-label form")]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, flags=re.MULTILINE))
    assert rows.keys() == LOSSES.keys()
    for name, entry in LOSSES.items():
        for hyperparameter, described in entry.hyperparameters.items():
            assert f"`{hyperparameter}={described.default!r}`" in rows[name]
        assert rows[name].endswith("| yes") == entry.multi_label


def test_first_example_uses_real_names() -> None:
    block = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert block is not None
    imported = [node for node in ast.walk(ast.parse(block[1])) if isinstance(node, ast.ImportFrom)]
    assert {alias.name for node in imported for alias in node.names} <= set(hf_calib.__all__)


def test_commands_and_files_exist() -> None:
    targets = set(re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"make (\S+?)[\s`]", README)) <= targets
    for path in re.findall(r"recipes/[\w/.]+\.(?:yaml|py|md)", README):
        assert (ROOT / path).is_file(), path
