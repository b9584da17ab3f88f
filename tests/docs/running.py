"""Running the pages: see test_guides.py and test_pages.py."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, PAGES, READMES, Block, blocks
from tests.docs.worlds import DEEP, FEWER, QUICK, RESTS, prepare
from tests.helpers.commands import call
from tests.helpers.hub_server import TOKEN, Hub
from tests.helpers.places import ROOT

RUN = {page: blocks(page) for page in PAGES + READMES if blocks(page)}
SAME = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def parameters(*, guides: bool) -> list[Any]:
    """The guides, or the other pages; those that train are slow."""
    chosen = [page for page in RUN if page.startswith("guides/") == guides]
    marks = {**dict.fromkeys(QUICK, ()), **dict.fromkeys(DEEP, pytest.mark.deep)}
    return [
        pytest.param(page, marks=marks.get(page, pytest.mark.slow)) for page in chosen
    ]


def run_page(
    page: str,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    runs_too: str = "",
) -> None:
    """Every block in order, in a folder that has what the page says it has."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    caches(monkeypatch, tmp_path / "home", hub)
    prepare(page, folder, hub)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page, runs_too=runs_too):
        printed = run(block, names, folder, page)
        assert TOKEN not in printed
        if block.printed is not None:
            for mine, theirs in {
                shlex.quote(sys.executable): "python",
                sys.executable: "python",
                f"{folder}/": "",
                f"{ROOT}/": "",
                hub.address: "https://huggingface.co",
            }.items():
                printed = printed.replace(mine, theirs)
            compare(page, block, printed)


def caches(monkeypatch: pytest.MonkeyPatch, home: Path, hub: Hub) -> None:
    """Nothing of another page's, here and in processes that the page starts."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
    for name, value in {
        **{"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home)},
        **{"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }.items():
        monkeypatch.setenv(name, value)


def run(block: Block, names: dict[str, Any], folder: Path, page: str) -> str:
    where = f"{page}:{block.line}"
    if block.kind == "file":
        (folder / block.name).write_text(block.code)
        return ""
    if block.kind == "bash":
        return "".join(
            typed(with_rest(command, where), folder, where)
            for command in block.commands()
        )
    code = block.code
    for word, other in FEWER.get(page, {}).items():
        code = code.replace(word, other)
    with as_a_program() as printed:
        exec(compile(code, where, "exec"), names)
    return printed.getvalue()


@contextlib.contextmanager
def as_a_program() -> Iterator[io.StringIO]:
    """Warnings as a program has them, which are errors in tests, and all that is printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("default")
        yield printed


def with_rest(command: str, where: str) -> str:
    """A command with what its rest says in place of a GPU's."""
    for start, (replaced, more) in RESTS.items():
        if command.startswith(start):
            for word, other in replaced.items():
                assert word in command, f"{where}: {word} in {command}"
                command = command.replace(word, other)
            return f"{command} {more}"
    return command


def typed(command: str, folder: Path, where: str) -> str:
    """What a command prints: a program and a script of ours run in this process, where torch is imported already."""
    words = shlex.split(command)
    if words[0] == "hf-calib":
        with as_a_program():
            result = call(*words[1:])
        assert result.exit_code == 0, (
            f"{where}: {command}\n{result.output}\n{result.exception!r}"
        )
        return str(result.stdout)
    if re.fullmatch(r"python \S+\.py( .*)?", command):
        with pytest.MonkeyPatch.context() as patch, as_a_program() as printed:
            patch.setattr(sys, "argv", words[1:])
            runpy.run_path(words[1], run_name="__main__")
        return printed.getvalue()
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (
        f"{where}: {command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    )
    return done.stdout


def compare(page: str, block: Block, printed: str) -> None:
    printed = "\n".join(line.rstrip() for line in printed.splitlines()) + "\n"
    assert block.printed is not None
    if os.environ.get("UPDATE_PAGES") and "..." not in block.printed:
        path = DOCS / page
        path.write_text(
            path.read_text().replace(
                f"```text\n{block.printed}```", f"```text\n{printed}```", 1
            )
        )
        return
    checker = doctest.OutputChecker()
    same = checker.check_output(block.printed, printed, SAME)
    assert same, f"{page}:{block.line} prints\n{printed}\nnot\n{block.printed}"
