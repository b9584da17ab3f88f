"""`import hf_calib` is light, its names are a tested list, and imports point downwards only."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_calib

PACKAGE = Path(hf_calib.__file__).parent
HEAVY = {"torch", "transformers", "numpy", "scipy", "sklearn", "datasets", "matplotlib", "accelerate"}

# From the bottom up: a module imports from lower layers, and from its own package.
LAYERS = [
    {"_errors"},
    {"_files", "_hub", "_markdown", "_names", "_compat"},
    {"losses", "metrics"},
    {"decisions", "scaling", "plots", "evaluate_modules", "data"},
    {"tasks"},
    {"predictions"},
    {"report"},
    {"cards", "export"},
    {"trainer"},
    {"experiments"},
    {"papers", "study"},
    {"commands"},
    {"cli", "__init__"},
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
# What a package may import from outside; `metrics` numpy only, but for the state that evaluations fill.
OUTSIDE = {
    "losses": {"torch"},
    "metrics": {"numpy", "scipy"},
    "decisions": {"numpy", "scipy"},
    "scaling": {"numpy", "scipy", "sklearn", "safetensors"},
}
WITH_TORCH = {"metrics/streaming.py", "metrics/_batch_scores.py"}


def python(code: str) -> str:
    """Run code in a new interpreter; return what it prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_brings_in_nothing_heavy_and_is_fast() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import hf_calib; took = time.perf_counter() - start; "
        f"import json; print(json.dumps([took, sorted({HEAVY!r} & set(sys.modules))]))"
    )
    runs = [json.loads(python(code)) for _ in range(3)]
    assert [heavy for _, heavy in runs] == [[], [], []]
    assert min(took for took, _ in runs) < 0.1


def test_metrics_need_no_torch_and_losses_no_transformers() -> None:
    for package, absent in (
        ("metrics", "torch"),
        ("losses", "transformers"),
        ("scaling", "torch"),
        ("decisions", "sklearn"),
    ):
        code = f"import sys, hf_calib.{package}; print({absent!r} in sys.modules)"
        assert python(code).strip() == "False", package


def test_the_public_names() -> None:
    assert hf_calib.__all__ == sorted(hf_calib.__all__)
    assert hf_calib.__all__ == [
        "AdaFocalCallback",
        "CalibrationMapCallback",
        "CalibrationTrainer",
        "CalibrationTrainingArguments",
        "InputError",
        "TemperatureScalingCallback",
        "TrainingTrace",
        "compare",
        "cross_calibrate",
        "fold",
        "fold_temperature",
        "pipeline",
        "unfold",
    ]
    for name in hf_calib.__all__:
        assert getattr(hf_calib, name).__name__ == name
        assert name in dir(hf_calib)
    assert dir(hf_calib) == sorted(set(dir(hf_calib)))
    assert "__version__" in dir(hf_calib)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'hf_calib' has no attribute 'CalibratedTrainer'"):
        hf_calib.CalibratedTrainer  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from hf_calib import nothing  # noqa: F401


def imports_at_import(body: list[ast.stmt]) -> Iterator[str]:
    """Modules that are imported when the code is: not in functions, and not for type checkers only."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield from imports_at_import(node.body + node.orelse)
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            yield from imports_at_import(node.body)


SOURCES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("source", SOURCES)
def test_imports_point_downwards(source: str) -> None:
    own = source.split("/")[0].removesuffix(".py")
    assert own in LAYER, "give the new module a layer"
    for name in imports_at_import(ast.parse((PACKAGE / source).read_text()).body):
        top, _, rest = name.partition(".")
        if top == "hf_calib":
            used = rest.split(".")[0]
            assert used == own or LAYER[used] < LAYER[own], name
        elif own in OUTSIDE and source not in WITH_TORCH and top not in sys.stdlib_module_names:
            assert top in OUTSIDE[own], name
