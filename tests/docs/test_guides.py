"""Every block of code on the guides runs, in order, in a folder that has what the page says it has.

Names on the Hub are answered by a Hub on the loopback interface, whose models are tiny. Text after a block is what it
prints. `UPDATE_PAGES=1` writes what was printed into the page, to be read before it is committed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.running import parameters, run_page
from tests.helpers.hub_server import Hub


@pytest.mark.parametrize("page", parameters(guides=True))
def test_the_code_of_a_guide_runs(
    page: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_page(page, hub, tmp_path, monkeypatch)
