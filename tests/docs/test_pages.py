"""Every block of code on the other pages runs: see test_guides.py. And what holds of all pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_calib.losses import LOSSES
from tests.docs.pages import DOCS, PAGES
from tests.docs.running import RUN, parameters, run_page
from tests.docs.worlds import DEEP, FEWER, QUICK, RESTS, WORLDS
from tests.helpers.hub_server import Hub


@pytest.mark.parametrize("page", parameters(guides=False))
def test_the_code_of_a_page_runs(
    page: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_page(page, hub, tmp_path, monkeypatch)


def test_each_world_and_each_rest_is_of_something_that_is_there() -> None:
    commands = [
        each for found in RUN.values() for block in found for each in block.commands()
    ]
    for start in RESTS:
        assert any(command.startswith(start) for command in commands), start
    assert {*WORLDS, *QUICK, *DEEP} <= set(RUN)
    for page, words in FEWER.items():
        assert all(word in (DOCS / page).read_text() for word in words), page


def test_no_page_names_a_path_of_a_machine() -> None:
    for page in PAGES:
        assert not re.search(
            r"(?<![\w./])/(?:home|work|tmp|root)/", (DOCS / page).read_text()
        ), page


def test_every_loss_is_in_one_table_of_the_losses() -> None:
    text = (DOCS / "losses" / "index.md").read_text()
    tables = re.findall(r"```{losses-table}\n(.*?)```", text, re.DOTALL)
    lines = "".join(tables).splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(LOSSES)
