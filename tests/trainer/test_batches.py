"""Rows that are repeated in batches without padding; and what a step or an evaluation does only once, or never."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import DataCollatorWithFlattening

from hf_calib.losses import make_loss
from hf_calib.trainer.labels import ignore_repeated_rows
from tests.helpers.tiny import N_LABELS


@pytest.mark.parametrize("flattened", [False, True])
def test_of_a_last_batch_only_repeats_are_ignored(flattened: bool) -> None:
    """Also where the batch is one long row: 13 rows, 4 a process, leave 5, of which the second process has one."""
    rows = [{"input_ids": [7] * 3, "labels": [row] * 3} for row in range(13)]
    kept: list[int] = []
    for process in (0, 1):
        shards = BatchSamplerShard(
            BatchSampler(SequentialSampler(rows), 4, False), 2, process
        )
        *_, last = shards
        chosen = [rows[index] for index in last]
        batch: Any = {"labels": torch.tensor([row["labels"] for row in chosen])}
        if flattened:
            batch = DataCollatorWithFlattening(separator_id=-100)(chosen)
            assert batch["labels"].shape == (1, 12)
        state = SimpleNamespace(gradient_state=SimpleNamespace(end_of_dataloader=True))
        ignore_repeated_rows(
            batch, "labels", SimpleNamespace(batch_sampler=shards), state
        )  # type: ignore[arg-type]
        kept += batch["labels"].unique().tolist()
    assert sorted(set(kept) - {-100}) == [8, 9, 10, 11, 12]
    assert len(kept) == len(set(kept)) + kept.count(-100) - (-100 in kept)


def test_a_multi_label_step_does_not_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tensor without data raises where a value is asked for."""
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda device: False
    )  # which does not know "meta"
    loss = make_loss("focal", problem_type="multi_label_classification")
    labels = torch.ones(8, N_LABELS, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        bool(labels.all())
    logits = torch.zeros(8, N_LABELS, device="meta", requires_grad=True)
    count = loss.normalizer(labels).float().clamp_min(1e-12)
    loss(logits, labels, num_items_in_batch=count).backward()
    assert logits.grad is not None
