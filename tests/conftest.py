"""What every test shares: no network, and where data lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.places import GOLDEN, SHARED

# Nothing in the suite may reach the network, and two cores are shared with the processes it starts.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def golden() -> Path:
    """Numbers made by running the papers' own code."""
    return GOLDEN


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data sets, which only the maintainers' machines have."""
    data = SHARED / "data"
    if not data.is_dir():
        pytest.skip(f"real data sets are not on this machine ({data}); set HF_CALIB_SHARED to their folder")
    return data
