"""TRL's trainers on two processes train, measure and calibrate as on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.gloo_pair import torchrun

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trainers")

from tests.trl.on_two_processes import GLOBAL_BATCH, results

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")


def test_two_processes_are_one(tmp_path: Path) -> None:
    torchrun("tests.trl.on_two_processes", str(tmp_path))
    together = torch.load(tmp_path / "results.pt", weights_only=True)
    for name, value in results(tmp_path / "alone", GLOBAL_BATCH).items():
        torch.testing.assert_close(
            together[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
