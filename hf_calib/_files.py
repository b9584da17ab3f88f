"""Files and folders of results: written whole, or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_calib._errors import InputValueError, expected


def check_output(output: Path | None) -> None:
    """Refuse a folder that cannot be written, before any work is done."""
    if output is None:
        return
    there = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not there.is_dir():
        raise InputValueError(expected("output", "be a folder", f"the file {there}", "name another one"))
    try:
        with tempfile.TemporaryDirectory(prefix="_saving-", dir=there):
            pass
    except OSError as error:
        got = f"{output} ({error.strerror})"
        raise InputValueError(expected("output", "be writable", got, "name another folder")) from error


def replace_files(made: Path, target: Path) -> None:
    """Put a finished folder in its place; in one that exists, its entries one by one, beside what is there.

    A model's config.json comes last: without it nothing takes the folder for a model.

    Raises:
        ValueError: if a folder is in a file's place, or the other way round; nothing is moved then.
    """
    if not target.exists():
        made.rename(target)
        return
    entries = sorted(made.iterdir(), key=lambda path: (path.name == "config.json", path.name))
    for path in entries:
        old = target / path.name
        if old.exists() and old.is_dir() != path.is_dir():
            kind = "a folder" if path.is_dir() else "a file"
            raise InputValueError(expected(str(old), f"be {kind}", "the other", "name another output folder"))
    for path in entries:
        old = target / path.name
        if old.is_dir():
            old.rename(made.parent / f"old-{path.name}")  # goes with the scratch folder
        os.replace(path, old)


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


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yield where to write a file, and put it in its place, over whatever was there, if the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        yield unfinished
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
