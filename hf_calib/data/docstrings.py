"""The built-in text dataset: which library does the first paragraph of this docstring come from?"""

from __future__ import annotations

import ast
import gc
import importlib.util
import inspect
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from hf_calib._errors import check
from hf_calib.data.splits import draw_rows

LIBRARIES = ("numpy", "scipy", "sklearn", "pandas", "torch", "transformers")
MASK = "library"

_MIN_CHARACTERS, _MAX_CHARACTERS = 40, 400
# Much is held out: the ECE of a perfectly calibrated model is about 0.02 on 3,000 rows and 0.04 on 1,000.
_CALIBRATION_SHARE = 0.25
_TEST_SHARE = 0.4
# Test code says little about its library, and vendored code belongs to another one.
_SKIPPED_PARTS = {"tests", "test", "testing", "conftest.py", "externals", "_vendor"}
# Long names are masked inside identifiers too ("TorchScript"), the two abbreviations only as words.
_LIBRARY_NAMES = re.compile(
    r"(?:numpy|scipy|scikit[- ]?learn|sklearn|pandas|(?:py)?torch|transformers|hugging ?face)|\b(?:np|pd)\b",
    re.IGNORECASE,
)


def docstring_dataset(
    *, max_per_class: int = 1100, seed: int = 0, libraries: Sequence[str] = LIBRARIES
) -> DatasetDict:
    """Build a hard text classification dataset of real text, the docstrings of installed libraries.

    For trying things out without a network. The text is the first paragraph of a public docstring, of 40 to 400
    characters, with the names of the libraries masked; the label is the library. Many paragraphs fit several libraries.
    The rows depend on the installed versions: results are not for others to reproduce.

    Args:
        max_per_class: int >= 10; a library is scanned until it has given this many paragraphs.
        seed: draws the three splits and the order of the rows.
        libraries: import names of the classes, at least two; one that is not installed is left out.

    Returns:
        DatasetDict of `train` (35%), `calibration` (25%) and `test` (40%), each with the same shares of the classes and
        the columns `text` (str) and `label` (ClassLabel), held in memory.

    >>> dataset = docstring_dataset(max_per_class=20, libraries=("numpy", "scipy"))
    >>> {split: len(rows) for split, rows in dataset.items()}, dataset["train"].features["label"].names
    ({'train': 14, 'calibration': 10, 'test': 16}, ['numpy', 'scipy'])
    """
    check(max_per_class >= 10, "max_per_class to be at least 10", max_per_class, "the default is 1100")
    seen: set[str] = set()
    was_enabled = gc.isenabled()
    gc.disable()  # syntax trees are millions of small objects without cycles: half of the time went to the collector
    try:
        found = {library: _paragraphs(library, max_per_class, seen) for library in libraries}
    finally:
        if was_enabled:
            gc.enable()
    texts = {library: paragraphs for library, paragraphs in found.items() if paragraphs}
    requirement = "libraries to name at least two installed packages with docstrings"
    got, way_out = (
        f"{list(texts)} of {list(libraries)}",
        "install another one, or load a dataset with load_splits",
    )
    check(len(texts) >= 2, requirement, got, way_out)
    return _three_splits(texts, seed)


def _three_splits(texts: dict[str, list[str]], seed: int) -> DatasetDict:
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(texts))})
    rows = [text for found in texts.values() for text in found]
    labels = np.repeat(np.arange(len(texts)), [len(found) for found in texts.values()])
    rng = np.random.default_rng(seed)
    test = draw_rows(labels, round(_TEST_SHARE * len(rows)), rng)
    rest = np.setdiff1d(np.arange(len(rows)), test)
    calibration = rest[draw_rows(labels[rest], round(_CALIBRATION_SHARE * len(rows)), rng)]
    train = np.setdiff1d(rest, calibration)

    def build(indices: np.ndarray) -> Dataset:
        order = rng.permutation(indices)
        columns = {"text": [rows[i] for i in order], "label": labels[order]}
        return Dataset.from_dict(columns, features=features)

    return DatasetDict({"train": build(train), "calibration": build(calibration), "test": build(test)})


def _paragraphs(library: str, limit: int, seen: set[str]) -> list[str]:
    """The first `limit` paragraphs of one library that are not in `seen`, which they join."""
    found: list[str] = []
    for path in _source_files(library):
        for text in map(_first_paragraph, _public_docstrings(path)):
            if _MIN_CHARACTERS <= len(text) <= _MAX_CHARACTERS and text not in seen and len(found) < limit:
                seen.add(text)
                found.append(text)
        if len(found) == limit:
            break
    return found


def _source_files(library: str) -> list[Path]:
    """In an order that is fixed but scattered over the library; none is imported."""
    spec = importlib.util.find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(next(iter(spec.submodule_search_locations)))
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in files if _SKIPPED_PARTS.isdisjoint(path.parts)]
    scattered = sorted(kept, key=lambda path: (zlib.crc32(path.as_posix().encode()), path.as_posix()))
    return [root / path for path in scattered]


def _public_docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escape sequences
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # unreadable, a template, or written for another Python
        return
    yield from filter(None, (ast.get_docstring(node, clean=False) for node in _public_nodes(tree)))


def _public_nodes(node: Any) -> Iterator[Any]:
    yield node
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for child in node.body:
        if isinstance(child, kinds) and not child.name.startswith("_"):
            yield from _public_nodes(child) if isinstance(child, ast.ClassDef) else (child,)


def _first_paragraph(docstring: str) -> str:
    paragraph = re.split(r"\n\s*\n", inspect.cleandoc(docstring), maxsplit=1)[0]
    return _LIBRARY_NAMES.sub(MASK, " ".join(paragraph.split()))
