"""Files and folders of results: written completely or not at all; other files are not touched."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import (
    EACCES,
    EDQUOT,
    EEXIST,
    EFBIG,
    EISDIR,
    ENAMETOOLONG,
    ENOSPC,
    ENOTDIR,
    EPERM,
    EROFS,
)
from pathlib import Path

from hf_calib._errors import InputOSError, check, expected

# A report in a folder: its record, by which it is known to be one, and its documents.
REPORT = "report.json"
REPORT_FORMS = (REPORT, "report.md", "report.html")

_FULL_DISK = {EDQUOT, EFBIG, ENOSPC}
# A link to a figure in a Markdown document, on a line of its own.
_FIGURE = re.compile(r"^!\[.*\]\((figures/[\w-]+\.png)\)$", re.MULTILINE)
_FOR_THE_USER = _FULL_DISK | {
    EACCES,
    EEXIST,
    EISDIR,
    ENAMETOOLONG,
    ENOTDIR,
    EPERM,
    EROFS,
}


def check_output(output: Path | None) -> None:
    """Raise unless a folder can be written, before any work is done."""
    if output is None:
        return
    check(
        "\0" not in str(output),
        "output to name a folder",
        "a name with a NUL",
        "name another one",
    )
    try:
        there = next(
            path
            for path in (output, *output.absolute().parents)
            if os.path.lexists(path)
        )
        got = f"the file {there}" if there.exists() else f"{there}, a link to nothing"
        check(there.is_dir(), "output to be a folder", got, "name another one")
        # A name that is too long raises here. Those below a missing folder are tried in the folder
        # that is there.
        missing = output.absolute().parts[len(there.absolute().parts) :]
        for path in (output, *(there / name for name in missing)):
            with suppress(FileNotFoundError, NotADirectoryError):
                path.lstat()
        # Permissions, quotas and read-only file systems show only when a file is made.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _not_writable(output, error.strerror) from error


def move_files(
    made: Path, target: Path, *, order: Callable[[Path], int] = lambda path: 0
) -> None:
    """Move the files of a folder into another and replace files of the same names;
    sorted by `order`, then by name.

    Where a document is replaced, its figures that the new one does not have are removed.
    """
    for path in made.rglob("*.md"):
        replaced = target / path.relative_to(made)
        # Other Markdown files may show a user's own figures.
        if path.with_suffix(".html").is_file():
            for figure in figures_of(replaced):
                if not (made / figure.relative_to(target)).exists():
                    figure.unlink()
    for path in sorted(
        filter(Path.is_file, made.rglob("*")), key=lambda path: (order(path), path)
    ):
        new = target / path.relative_to(made)
        new.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, new)


def identity(path: str | os.PathLike[str]) -> tuple[int, int] | str:
    """What tells a file or folder from others, through links too;
    a name that is none on this machine as it is.
    """
    if not os.path.exists(path):
        return os.fspath(path)
    found = os.stat(path)
    return found.st_dev, found.st_ino


def figures_of(document: Path) -> list[Path]:
    """The figures that a Markdown document shows, which were written next to it;
    none through a link.
    """
    if not document.is_file() or (document.parent / "figures").is_symlink():
        return []
    text = document.read_text("utf-8", errors="replace")
    found = [document.parent / name for name in _FIGURE.findall(text)]
    return [path for path in found if path.is_file()]


def report_files(folder: Path) -> list[Path]:
    """The files of a report that was saved to a folder; none through a link."""
    if folder.is_symlink() or not (folder / REPORT).is_file():
        return []
    forms = [folder / name for name in REPORT_FORMS]
    return [*figures_of(folder / "report.md"), *filter(Path.is_file, forms)]


def remove_files(home: Path, paths: Sequence[Path]) -> None:
    """Remove files below a folder, and the folders within it that are then empty."""
    for path in paths:
        path.unlink()
    above = {folder for path in paths for folder in path.parents}
    # Those within others come first.
    for folder in sorted(above - {home, *home.parents}, reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def whole_folder(
    target: Path, merge: Callable[[Path, Path], None] = move_files
) -> Iterator[Path]:
    """Yield an empty folder, and move it to `target` if the with block raises no error.

    A new folder appears completely. In an existing one, `merge` replaces files of the same names,
    also in subfolders; all other files stay. Nothing is moved if a folder stands where a file
    belongs, or the reverse.
    """
    check_output(target)
    with _clear_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        # The scratch folder is next to the target, or in it if it exists, as it may be a mount:
        # on one file system.
        with scratch_folder(target if target.exists() else target.parent) as scratch:
            made = scratch / "made"
            made.mkdir()
            yield made
            if target.exists():
                _check_nothing_in_the_way(made, target)
                merge(made, target)
            else:
                made.rename(target)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yield the path of a scratch file, and move it to `target`, over an earlier file,
    if the block raises no error.
    """
    with _clear_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(target.parent) as scratch:
            unfinished = scratch / target.name
            yield unfinished
            _replace(unfinished, target)


@contextmanager
def scratch_folder(home: Path) -> Iterator[Path]:
    """Yield an empty folder that is removed afterwards; a killed process leaves it,
    and it can be deleted.
    """
    # Pushes to the Hub leave out files and folders whose names start with "_".
    named = tempfile.TemporaryDirectory(
        prefix="_saving-hf_calib-",
        dir=home,
        # An error while the folder is removed would replace the one that is being
        # raised.
        ignore_cleanup_errors=True,
    )
    with named as scratch:
        yield Path(scratch)


def _replace(made: Path, target: Path) -> None:
    """Move a file to a target; if it replaces a file, it gets the permissions of that file."""
    if target.is_file() and not target.is_symlink():
        shutil.copymode(target, made)
    os.replace(made, target)


def _check_nothing_in_the_way(made: Path, target: Path) -> None:
    for path in sorted(made.rglob("*")):
        old = target / path.relative_to(made)
        # Through a link, files outside of the output folder would be replaced.
        got = (
            f"a link to {os.readlink(old)}"
            if path.is_dir() and old.is_symlink()
            else ""
        )
        way_out = "remove the link, or name another output folder"
        check(not got, f"{old} to be a folder of its own", got, way_out)
        if os.path.lexists(old):
            kind, got = (
                ("a folder", "a file") if path.is_dir() else ("a file", "a folder")
            )
            check(
                old.is_dir() == path.is_dir(),
                f"{old} to be {kind}",
                got,
                "name another output folder",
            )
        # os.replace does not move a file across file systems.
        same = not old.is_dir() or old.stat().st_dev == path.stat().st_dev
        check(
            same,
            f"{old} to be on its parent's file system",
            "a mount",
            "name another output folder",
        )


@contextmanager
def _clear_errors(output: Path) -> Iterator[None]:
    """Turn the system's errors about a full disk and the like into errors for the user."""
    try:
        yield
    except Exception as error:
        number = _system_error_number(error)
        if number not in _FOR_THE_USER:
            # The PDF writer of matplotlib fails once more while it tidies up after a full disk.
            number = _system_error_number(error.__context__)
            if number not in _FULL_DISK:
                raise
        raise _not_writable(output, os.strerror(number)) from error


def _not_writable(output: Path, reason: str | None) -> InputOSError:
    way_out = "make room there, or name another place"
    return InputOSError(
        expected("output", "be writable", f"{output} ({reason})", way_out)
    )


def _system_error_number(error: BaseException | None) -> int:
    """The system's number of an error, 0 if it has none."""
    # The Rust code of safetensors and tokenizers gives the number in its message only.
    in_words = re.search(r"\(os error (\d+)\)", str(error))
    return int(in_words[1]) if in_words else getattr(error, "errno", None) or 0
