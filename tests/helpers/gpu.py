"""The tests of the losses on a GPU: HF_CALIB_TESTS_ON=cuda sends each one's logits there, and the statistics back."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from hf_calib.losses.statistics import fused


def on_a_gpu() -> bool:
    """Whether the tests run so; from then on they do."""
    if os.environ.get("HF_CALIB_TESTS_ON") != "cuda":
        return False
    if fused.FusedStatistics is not _OnGpu:
        fused.FusedStatistics, fused.takes = _OnGpu, _takes  # type: ignore[assignment, misc]
    return True


class _OnGpu:
    theirs = fused.FusedStatistics

    @staticmethod
    def apply(logits: Tensor, labels: Tensor, statistics: Any) -> tuple[Tensor, ...]:
        values = _OnGpu.theirs.apply(logits.cuda(), labels.cuda(), statistics)
        return tuple(value.to(logits.device) for value in values)


_its_rule = fused.takes


def _takes(logits: Tensor, statistics: Any) -> bool:
    return _its_rule(logits.cuda(), statistics)
