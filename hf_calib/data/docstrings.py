"""The built-in text dataset: first paragraphs of docstrings, labelled by their library."""

from __future__ import annotations

import ast
import gc
import importlib.util
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
from hf_calib.metrics.checks import check_integer

LIBRARIES = ("numpy", "scipy", "sklearn", "pandas", "torch", "transformers")
MASK = "library"

_MIN_CHARACTERS, _MAX_CHARACTERS = 40, 400
# Large parts are held out: a perfectly calibrated model has an ECE of about 0.02 on 3,000 rows and 0.04 on 1,000.
_CALIBRATION_SHARE = 0.25
_TEST_SHARE = 0.4
# Test code is hardly specific to its library, and vendored code belongs to another one.
_SKIPPED_PARTS = {"tests", "test", "testing", "conftest.py", "externals", "_vendor"}
# Long names are also masked inside identifiers ("TorchScript"), the two abbreviations only as words.
_LIBRARY_NAMES = re.compile(
    r"(?:numpy|scipy|scikit[- ]?learn|sklearn|pandas|(?:py)?torch|transformers|hugging ?face)|\b(?:np|pd)\b",
    re.IGNORECASE,
)


def docstring_dataset(
    *, max_per_class: int = 1100, seed: int = 0, libraries: Sequence[str] = LIBRARIES
) -> DatasetDict:
    """Build a difficult text classification dataset of real text, the docstrings of installed libraries.

    Use it to try things out without a network. A text is the first paragraph of a public docstring, with 40 to 400
    characters and masked names of libraries; its label is the library. Many paragraphs fit several libraries. The rows
    depend on the installed versions, so results cannot be reproduced elsewhere.

    Args:
        max_per_class: number of paragraphs per library, int >= 10; a library may have fewer.
        seed: seed of the three splits and of the order of the rows.
        libraries: import names of the classes, at least two; libraries that are not installed are left out.

    Returns:
        A DatasetDict in memory with `train` (35%), `calibration` (25%) and `test` (40%), which have equal class
        frequencies and the columns `text` (str) and `label` (ClassLabel).

    >>> dataset = docstring_dataset(max_per_class=20, libraries=("numpy", "scipy"))
    >>> {split: len(rows) for split, rows in dataset.items()}, dataset["train"].features["label"].names
    ({'train': 14, 'calibration': 10, 'test': 16}, ['numpy', 'scipy'])
    """
    check_integer("seed", seed, 0, "the default is 0")
    check(
        max_per_class >= 10,
        "max_per_class to be at least 10",
        max_per_class,
        "the default is 1100",
    )
    texts: dict[str, dict[str, None]] = {}
    was_enabled = gc.isenabled()
    gc.disable()  # Collection would take half of the time for syntax trees, which have no cycles.
    try:
        for library in libraries:
            new = (
                text
                for text in _paragraphs(library)
                if not any(text in own for own in texts.values())
            )
            texts[library] = {}
            while (
                len(texts[library]) < max_per_class
                and (text := next(new, None)) is not None
            ):
                texts[library][text] = None
    finally:
        if was_enabled:
            gc.enable()
    names = [library for library, own in texts.items() if own]
    requirement = "libraries to name at least two installed packages with docstrings"
    got = f"{names} of {[*libraries]}"
    check(
        len(names) >= 2,
        requirement,
        got,
        "install another one, or load a dataset with load_splits",
    )
    rows = [text for own in texts.values() for text in own]
    labels = np.repeat(np.arange(len(names)), [len(texts[name]) for name in names])
    rng = np.random.default_rng(seed)
    test = draw_rows(labels, round(_TEST_SHARE * len(rows)), rng)
    rest = np.setdiff1d(np.arange(len(rows)), test)
    calibration = rest[
        draw_rows(labels[rest], round(_CALIBRATION_SHARE * len(rows)), rng)
    ]
    drawn = {
        "train": np.setdiff1d(rest, calibration),
        "calibration": calibration,
        "test": test,
    }
    orders = {name: rng.permutation(numbers) for name, numbers in drawn.items()}
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    columns = {
        name: {"text": [rows[i] for i in order], "label": labels[order]}
        for name, order in orders.items()
    }
    return DatasetDict(
        {
            name: Dataset.from_dict(each, features=features)
            for name, each in columns.items()
        }
    )


def _paragraphs(library: str) -> Iterator[str]:
    """The paragraphs of a library's files, which are not imported, in a fixed order that is spread over the library."""
    spec = importlib.util.find_spec(library)
    root = Path(next(iter((spec and spec.submodule_search_locations) or ["nowhere"])))
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in files if _SKIPPED_PARTS.isdisjoint(path.parts)]
    for path in sorted(
        kept, key=lambda path: (zlib.crc32(path.as_posix().encode()), path.as_posix())
    ):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # Their code may have invalid escape sequences.
                tree = ast.parse((root / path).read_bytes())
        except (
            OSError,
            SyntaxError,
            ValueError,
        ):  # It may be unreadable, a template, or for another Python.
            continue
        for docstring in _public_docstrings(tree):
            first = re.split(r"\n\s*\n", docstring, maxsplit=1)[0]
            text = _LIBRARY_NAMES.sub(MASK, " ".join(first.split()))
            if _MIN_CHARACTERS <= len(text) <= _MAX_CHARACTERS:
                yield text


def _public_docstrings(node: Any) -> Iterator[str]:
    yield ast.get_docstring(node) or ""
    for child in node.body if isinstance(node, (ast.Module, ast.ClassDef)) else ():
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(child, kinds) and not child.name.startswith("_"):
            yield from _public_docstrings(child)
