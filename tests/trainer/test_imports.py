"""Imports in the trainer's room go one way, those for type checkers too."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import hf_calib.trainer

ROOM = Path(hf_calib.trainer.__file__).parent
PREFIX = "hf_calib.trainer."


def test_no_module_is_imported_by_one_that_it_imports() -> None:
    graph: dict[str, set[str]] = {}
    for path in ROOM.glob("*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        found = {node.module.removeprefix(PREFIX) for node in nodes if (node.module or "").startswith(PREFIX)}
        within = [node for node in nodes if node.module == "hf_calib.trainer"]
        graph[path.stem] = found | {alias.name for node in within for alias in node.names}
    order = list(TopologicalSorter(graph).static_order())  # raises for a circle
    assert order.index("callbacks") < order.index("checks") < order.index("trainer")
    assert {"callbacks", "checks"} <= graph["trainer"]
