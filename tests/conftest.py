"""The environment of every test, and where data lie."""

from __future__ import annotations

import gc
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.hub_server import TOKEN, Hub, running_hub
from tests.helpers.places import GOLDEN, SHARED

# Before torch is imported, and for the processes that tests start too: nothing may reach the network, and the
# tests already run on every core.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each process that a test starts would compile the package anew where this is set: a second or two of each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Started in the background, a shell has these ignored, and so would the processes have that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

if os.environ.get("TRITON_INTERPRET") == "1":  # make test-kernels
    from tests.helpers.interpreter import round_as_a_gpu

    round_as_a_gpu()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no worker is left with one of them when the others have finished.

    HF_CALIB_TESTS_ORDER draws another order of the files: no test may need what another file has left.
    """
    items.sort(
        key=lambda item: {"trainer", "export", "commands"}.isdisjoint(item.path.parts)
    )
    if order := os.environ.get("HF_CALIB_TESTS_ORDER"):
        items.sort(key=lambda item: zlib.crc32(f"{order} {item.path.name}".encode()))


def pytest_collection_finish() -> None:
    """Each training collects garbage: .4 s where it has to look through what all test files have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def golden() -> Path:
    """Numbers made by running the papers' own code."""
    return GOLDEN


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real datasets, which only the maintainers' machines have."""
    data = SHARED / "data"
    if not data.is_dir():
        pytest.skip(
            f"real datasets are not on this machine ({data}); set HF_CALIB_SHARED to their folder"
        )
    return data


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub of this test's own, where huggingface_hub goes with a token."""
    import huggingface_hub.constants
    import transformers.utils.hub

    with running_hub() as server:
        settings: dict[str, object] = {
            "ENDPOINT": server.address,
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }
        settings["HUGGINGFACE_CO_URL_TEMPLATE"] = (
            f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        for name, value in settings.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        # transformers keeps a client of the endpoint that there was first.
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server
    assert server.unknown == []
