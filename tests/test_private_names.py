"""The page on private names of other libraries: it has those that the code uses, and they exist."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "private_names.md"
LIBRARIES = {"accelerate", "tokenizers", "torch", "transformers", "trl"}
# Documented modules below the first one.
PUBLIC = re.compile(
    r"torch(\.(nn|utils)\b.*)?|accelerate(\.utils)?|transformers|trl|tokenizers"
)
# Methods of named tuples.
OF_PYTHON = {"_asdict", "_fields", "_replace"}


def rows() -> list[list[str]]:
    """The cells of the page's table."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("| `")]
    return [[cell.strip().replace("`", "") for cell in row] for row in cells]


TREES = {
    path.relative_to(ROOT / "hf_calib").as_posix(): ast.parse(path.read_text())
    for path in (ROOT / "hf_calib").rglob("*.py")
}


def names_of_ours() -> set[str]:
    """The names that the package itself defines or stores."""
    found = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute):
                if isinstance(node.ctx, ast.Store):
                    found.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
    return found


def imported(tree: ast.AST) -> set[str]:
    """The names from modules of the libraries that are not documented."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            is_of_theirs = node.module.split(".")[0] in LIBRARIES
            if is_of_theirs and not PUBLIC.fullmatch(node.module):
                found |= {each.name for each in node.names}
    return found


def underscored(tree: ast.AST, ours: set[str]) -> set[str]:
    """The attributes that begin with an underscore, and are none of the package's own."""
    attributes = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }
    private = {name for name in attributes if re.match("_[^_]", name)}
    # Modules on the way to a name.
    return private - ours - OF_PYTHON - {"_C", "_functorch"}


def test_the_page_has_the_names_that_the_code_uses() -> None:
    ours = names_of_ours()
    listed = {
        (name, place) for name, _, used, *_ in rows() for place in used.split(", ")
    }
    for place, tree in TREES.items():
        for name in imported(tree) | underscored(tree, ours):
            assert (name, place) in listed, f"{name} in {place} is not on the page"


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_name_of_the_page_is_used_and_exists(row: list[str]) -> None:
    name, module, used, *_ = row
    for place in used.split(", "):
        text = (ROOT / "hf_calib" / place).read_text(encoding="utf-8")
        assert name in text, f"{name} is not used in {place}"
    library, *path = module.split(".")
    found = find_spec(library)
    if found is None:
        pytest.skip(f"{library} is not installed")
    if path in ([], ["_C"]):
        # These are made of C++.
        places = [torch, torch._C, torch._C._functorch, torch.Tensor]
        assert any(hasattr(each, name) for each in places)
        return
    # Importing these modules would take seconds.
    folder = Path(str(found.origin)).parent.joinpath(*path)
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    assert name in file.read_text("utf-8"), f"{module} has no {name} any longer"
