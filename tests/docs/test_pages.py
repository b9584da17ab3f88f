"""Every block of code on the pages of the site runs, in order, in a folder that has what the page says it has.

Names on the Hub are answered by a Hub on the loopback interface, whose models are tiny. Text after a block is what it
prints. `UPDATE_PAGES=1` writes what was printed into the page, to be read before it is committed.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, PAGES, Block, blocks
from tests.docs.worlds import QUICK, RESTS, prepare
from tests.helpers.commands import call
from tests.helpers.hub_server import TOKEN, Hub
from tests.helpers.places import ROOT

RUN = {page: blocks(page) for page in PAGES if blocks(page)}
PARAMETERS = [pytest.param(page, marks=() if page in QUICK else pytest.mark.slow) for page in RUN]
SAME = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize("page", PARAMETERS)
def test_the_code_of_a_page_runs(
    page: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    caches(monkeypatch, tmp_path / "home", hub)
    prepare(page, folder, hub)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in RUN[page]:
        printed = run(block, names, folder, page)
        assert TOKEN not in printed
        if block.printed is not None:
            for mine, theirs in {
                f"{folder}/": "",
                f"{ROOT}/": "",
                hub.address: "https://huggingface.co",
                sys.executable: "python",
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
        return "".join(typed(command, folder, where) for command in block.commands())
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("default")  # as in a program
        exec(compile(block.code, where, "exec"), names)
    return printed.getvalue()


def typed(command: str, folder: Path, where: str) -> str:
    """What a command prints, with what its rest says in place of a GPU's."""
    for start, (replaced, more) in RESTS.items():
        if command.startswith(start):
            for word, other in replaced.items():
                assert word in command, f"{where}: {word} in {command}"
                command = command.replace(word, other)
            command = f"{command} {more}"
    if command.startswith("hf-calib ") and "|" not in command.replace('"|"', ""):
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            result = call(*shlex.split(command)[1:])
        assert result.exit_code == 0, f"{where}: {command}\n{result.output}\n{result.exception!r}"
        return str(result.stdout)
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{where}: {command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def compare(page: str, block: Block, printed: str) -> None:
    printed = "\n".join(line.rstrip() for line in printed.splitlines()) + "\n"
    assert block.printed is not None
    if os.environ.get("UPDATE_PAGES") and "..." not in block.printed:
        path = DOCS / page
        path.write_text(path.read_text().replace(f"```text\n{block.printed}```", f"```text\n{printed}```", 1))
        return
    checker = doctest.OutputChecker()
    same = checker.check_output(block.printed, printed, SAME)
    assert same, f"{page}:{block.line} prints\n{printed}\nnot\n{block.printed}"


def test_each_rest_is_of_a_command_that_is_there() -> None:
    commands = [
        c for found in RUN.values() for block in found if block.kind == "bash" for c in block.commands()
    ]
    for start in RESTS:
        assert any(command.startswith(start) for command in commands), start


def test_no_page_names_a_path_of_a_machine() -> None:
    for page in PAGES:
        assert not re.search(r"(?<![\w./])/(?:home|work|tmp|root)/", (DOCS / page).read_text()), page
