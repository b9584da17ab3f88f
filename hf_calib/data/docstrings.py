"""The built-in text dataset: first paragraphs of docstrings, labelled by their library."""

from __future__ import annotations

import ast
import gc
import importlib.util
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from hf_calib._errors import check
from hf_calib.data.splits import draw_rows
from hf_calib.metrics.checks import check_integer

LIBRARIES = ("numpy", "scipy", "sklearn", "pandas", "torch", "transformers")
MASK = "library"

_MIN_CHARACTERS = 40
_MAX_CHARACTERS = 400
# Large parts are held out: a perfectly calibrated model has an ECE of about 0.02 on 3,000 rows and
# 0.04 on 1,000.
_CALIBRATION_SHARE = 0.25
_TEST_SHARE = 0.4
# Test code is hardly specific to its library, and vendored code belongs to another one.
_SKIPPED_PARTS = {"tests", "test", "testing", "conftest.py", "externals", "_vendor"}
# Long names are also masked inside identifiers ("TorchScript"), abbreviations only as words.
_LIBRARY_NAMES = re.compile(
    r"(?:numpy|scipy|scikit[- ]?learn|sklearn|pandas|(?:py)?torch|transformers|hugging ?face)"
    r"|\b(?:np|pd)\b",
    re.IGNORECASE,
)


def docstring_dataset(
    *, max_per_class: int = 1100, seed: int = 0, libraries: Sequence[str] = LIBRARIES
) -> DatasetDict:
    """Build a difficult dataset of real texts, the docstrings of installed libraries.

    Use it to try things out without a network. A text is the first paragraph of a public docstring,
    with 40 to 400 characters and masked names of libraries; its label is the library. Many
    paragraphs fit several libraries. The rows depend on the installed versions, so results cannot
    be reproduced elsewhere.

    Args:
        max_per_class: number of paragraphs per library, int >= 10; a library may have fewer.
        seed: seed of the three splits and of the order of the rows.
        libraries: import names of the classes, at least two; libraries that are not installed are
            left out.

    Returns:
        A DatasetDict in memory with `train` (35%), `calibration` (25%) and `test` (40%), which have
        equal class frequencies and the columns `text` (str) and `label` (ClassLabel).

    >>> dataset = docstring_dataset(max_per_class=20, libraries=("numpy", "scipy"))
    >>> {split: len(rows) for split, rows in dataset.items()}
    {'train': 14, 'calibration': 10, 'test': 16}
    >>> dataset["train"].features["label"].names
    ['numpy', 'scipy']
    """
    check_integer("seed", seed, 0, "the default is 0")
    requirement = "max_per_class to be at least 10"
    check(max_per_class >= 10, requirement, max_per_class, "the default is 1100")
    # A text of several libraries is one of the first that has it.
    library_of: dict[str, str] = {}
    with _without_collection():
        for library in libraries:
            paragraphs = _paragraphs(library)
            new = (text for text in paragraphs if text not in library_of)
            library_of.update(dict.fromkeys(_different(new, max_per_class), library))
    known = set(library_of.values())
    names = [library for library in libraries if library in known]
    requirement = "libraries to name at least two installed packages with docstrings"
    got = f"{names} of {[*libraries]}"
    way_out = "install another one, or load a dataset with load_splits"
    check(len(names) >= 2, requirement, got, way_out)
    texts = list(library_of)
    labels = np.array([names.index(library) for library in library_of.values()])
    rng = np.random.default_rng(seed)
    test = draw_rows(labels, round(_TEST_SHARE * len(texts)), rng)
    rest = np.setdiff1d(np.arange(len(texts)), test)
    n_calibration = round(_CALIBRATION_SHARE * len(texts))
    calibration = rest[draw_rows(labels[rest], n_calibration, rng)]
    train = np.setdiff1d(rest, calibration)
    drawn = {"train": train, "calibration": calibration, "test": test}
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    dataset = DatasetDict()
    for name, rows in drawn.items():
        # Until here, the texts are in the order of their libraries.
        order = rng.permutation(rows)
        columns = {"text": [texts[i] for i in order], "label": labels[order]}
        dataset[name] = Dataset.from_dict(columns, features=features)
    return dataset


@contextmanager
def _without_collection() -> Iterator[None]:
    """A context without garbage collection, for syntax trees, which have no cycles.

    It would take half of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _different(texts: Iterable[str], most: int) -> list[str]:
    """The first different texts."""
    found: dict[str, None] = {}
    for text in texts:
        found[text] = None
        if len(found) == most:
            break
    return list(found)


def _paragraphs(library: str) -> Iterator[str]:
    """The paragraphs of a library's files, which are not imported, spread over the library."""
    spec = importlib.util.find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        return
    root = Path(next(iter(spec.submodule_search_locations)))
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = [path.as_posix() for path in files if _SKIPPED_PARTS.isdisjoint(path.parts)]
    # Sorted by a hash, the first files are of all parts of a library, and the same everywhere.
    for name in sorted(kept, key=lambda name: (zlib.crc32(name.encode()), name)):
        try:
            with warnings.catch_warnings():
                # The code may have invalid escape sequences.
                warnings.simplefilter("ignore")
                tree = ast.parse((root / name).read_bytes())
        except (OSError, SyntaxError, ValueError):
            # The file may be unreadable, a template, or for another Python.
            continue
        for docstring in _public_docstrings(tree):
            first = re.split(r"\n\s*\n", docstring, maxsplit=1)[0]
            text = _LIBRARY_NAMES.sub(MASK, " ".join(first.split()))
            if _MIN_CHARACTERS <= len(text) <= _MAX_CHARACTERS:
                yield text


def _public_docstrings(node: Any) -> Iterator[str]:
    """The docstrings of a module or class, and of its public functions and classes."""
    # An empty text is too short, and left out with other short ones.
    yield ast.get_docstring(node) or ""
    # What is defined within a function is not public.
    if not isinstance(node, ast.Module | ast.ClassDef):
        return
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for child in node.body:
        if isinstance(child, kinds) and not child.name.startswith("_"):
            yield from _public_docstrings(child)
