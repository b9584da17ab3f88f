"""`import hf_calib` is light, its names are a tested list, and imports point downwards only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hf_calib

PACKAGE = Path(hf_calib.__file__).parent
HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "scipy",
    "sklearn",
    "datasets",
    "matplotlib",
    "accelerate",
}

# From the bottom up: a module imports from lower layers, and from its own package.
LAYERS = [
    {"_errors"},
    {"_files", "_hub", "_records", "_text", "_compat"},
    {"losses", "metrics"},
    {"decisions", "scaling", "plots", "evaluate_modules"},
    {"predictions"},
    {"data"},
    {"models"},
    {"report"},
    {"cards", "export"},
    {"language_models"},
    {"trainer"},
    {"experiments", "trl"},
    {"commands"},
    {"cli", "__init__"},
    {"__main__"},
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
# What a package may import from outside; `metrics` numpy only, but for the state that evaluations fill.
OUTSIDE = {
    "losses": {"torch"},
    "metrics": {"numpy", "scipy"},
    "decisions": {"numpy", "scipy"},
    "scaling": {"numpy", "scipy", "sklearn", "safetensors"},
}
# Imported within functions only: by what needs torch, and where Triton is.
NEED_MORE = {
    "metrics/on_device.py",
    "losses/statistics/kernels.py",
}


def python(code: str) -> str:
    """Run code in a new interpreter; return what it prints."""
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_importing_brings_in_nothing_heavy_and_is_fast() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import hf_calib; took = time.perf_counter() - start; "
        f"assert not {HEAVY!r} & set(sys.modules); print(took)"
    )
    assert min(float(python(code)) for _ in range(3)) < 0.1


@pytest.mark.slow
def test_metrics_need_no_torch_and_losses_no_transformers() -> None:
    code = """
import sys
import hf_calib.metrics, hf_calib.decisions
print(sorted({"sklearn", "torch"} & set(sys.modules)))
import hf_calib.scaling
print("torch" in sys.modules)
import hf_calib.losses
print("transformers" in sys.modules)
"""
    assert python(code).split() == ["[]", "False", "False"]


def test_the_public_names() -> None:
    assert hf_calib.__all__ == sorted(hf_calib.__all__)
    assert hf_calib.__all__ == [
        "AdaFocalCallback",
        "CalibrationMapCallback",
        "CalibrationTrainer",
        "CalibrationTrainingArguments",
        "InputError",
        "TemperatureScalingCallback",
        "calibrate",
        "decide",
        "evaluate",
        "fold",
        "fold_temperature",
        "pipeline",
        "unfold",
    ]
    assert [
        getattr(hf_calib, name).__name__ for name in hf_calib.__all__
    ] == hf_calib.__all__
    assert {*hf_calib.__all__, "__version__"} <= set(dir(hf_calib))


def imports_in(tree: ast.AST, in_functions: bool = True) -> Iterator[str]:
    """What code imports, but for type checkers only; with or without what functions import when they are called."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif in_functions or not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef
        ):
            yield from imports_in(node, in_functions)


TREES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}
MODULES = {
    f"hf_calib/{source}".removesuffix(".py")
    .removesuffix("/__init__")
    .replace("/", "."): source
    for source in TREES
}


def module_of(name: str) -> str:
    """The module that an imported name is, or is in."""
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


@pytest.mark.parametrize("source", TREES)
def test_imports_point_downwards(source: str) -> None:
    own = source.split("/")[0].removesuffix(".py")
    assert own in LAYER, "give the new module a layer"
    at_import = set(imports_in(TREES[source], in_functions=False))
    for name in imports_in(TREES[source]):
        top, _, rest = name.partition(".")
        if top == "hf_calib":
            used = rest.split(".")[0]
            assert used == own or LAYER[used] < LAYER[own], name
        elif name in at_import and own in OUTSIDE and source not in NEED_MORE:
            assert top in sys.stdlib_module_names or top in OUTSIDE[own], name


def test_imports_make_no_circle() -> None:
    used = {
        module: {
            module_of(name)
            for name in imports_in(TREES[source])
            if name.split(".")[0] == "hf_calib"
        }
        - {module}
        for module, source in MODULES.items()
    }
    for others in used.values():
        others.discard("hf_calib")  # its names come from below when they are asked for
    TopologicalSorter(used).prepare()
