"""The guides on TRL and on other trainers run, where these are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.running import run_page
from tests.helpers.hub_server import Hub

pytest.importorskip(
    "trl", reason="TRL has an environment of its own: make test-trainers"
)


@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing` is deprecated:FutureWarning"
)
@pytest.mark.parametrize("page", ["trl", "other_trainers"])
def test_the_guide(
    page: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_page(
        f"guides/{page}.md",
        hub,
        tmp_path,
        monkeypatch,
        runs_too=page.rpartition("_")[2],
    )
