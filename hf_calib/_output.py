"""Folders of results: written whole, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_calib._checks import expected


def check_output(output: Path | None) -> None:
    """Refuse a folder that cannot be written, before any work is done."""
    if output is not None and output.exists() and not output.is_dir():
        raise ValueError(expected("output", "be a folder", f"the file {output}", "name another one"))


def replace_files(made: Path, target: Path) -> None:
    """Put a finished folder in its place; in one that exists, its entries one by one, beside what is there."""
    if not target.exists():
        made.rename(target)
        return
    for path in sorted(made.iterdir()):
        if path.is_dir() and (target / path.name).is_dir():
            shutil.rmtree(target / path.name)
        os.replace(path, target / path.name)


@contextmanager
def whole_folder(target: Path, put: Callable[[Path, Path], None] = replace_files) -> Iterator[Path]:
    """Yield an empty folder, and put it in its place if the with block ends well.

    Args:
        target: a new folder appears whole; one that exists is added to.
        put: moves the finished folder to the target.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, or in it where it exists (it may be a mount): on the same file system.
    home = target if target.exists() else target.parent
    with tempfile.TemporaryDirectory(prefix="_saving-", dir=home) as scratch:
        made = Path(scratch, "made")
        made.mkdir()
        yield made
        put(made, target)
