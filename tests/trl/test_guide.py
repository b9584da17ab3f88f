"""The guide on TRL runs, where TRL is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.running import run_page
from tests.helpers.hub_server import Hub

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trl")


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_the_guide(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page("guides/trl.md", hub, tmp_path, monkeypatch, runs_too="trl")
