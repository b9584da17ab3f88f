"""The ways of a training through the library are no longer than they were: files entered, and hops
between them.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from hf_calib._errors import message_of
from hf_calib.metrics.checks import check_n_bins
from tests.helpers.places import ROOT

BENCHMARKS = ROOT / "benchmarks"
# The most files and hops. A shorter way lowers them.
MOST = {"micro-batch": (11, 30), "evaluation": (20, 199)}


def test_no_way_is_longer_than_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    ways = importlib.import_module("ways").ways(str(tmp_path))
    assert ways.keys() == MOST.keys()
    for name, (files, hops) in MOST.items():
        assert len(ways[name].files) <= files, name
        assert ways[name].hops.total() <= hops, name


def test_a_call_within_a_file_is_no_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    followed = importlib.import_module("ways").followed
    within = followed(lambda: message_of("n to be 1", 2, "use 1"))
    assert (len(within.files), within.hops.total()) == (1, 0)
    across = followed(lambda: check_n_bins(15))
    assert across.hops == {("metrics/checks.py:check_integer", "_errors.py:check"): 2}
