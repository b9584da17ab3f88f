"""Passes over the calibration split do not move the training's random streams."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import default_data_collator

from hf_calib import CalibrationTrainer
from tests.helpers.tiny import (
    LENGTH,
    arguments,
    assert_same,
    logged,
    sequences,
    tiny_bert,
    weights,
)

STREAMS: dict[str, Callable[[], int]] = {
    "python": lambda: random.randrange(LENGTH),
    "numpy": lambda: int(np.random.randint(LENGTH)),
    "torch": lambda: int(torch.randint(LENGTH, ())),
}


@pytest.mark.parametrize("stream", ["numpy", "torch"])
def test_updates_leave_the_stream_where_it_was(stream: str, tmp_path: Path) -> None:
    """The collator masks a token of each row at random; the updates leave the gammas at 1."""
    sets = [sequences(tiny_bert(), n, seed=n) for n in (16, 40)]
    drawn: list[int] = []

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = default_data_collator(rows)
        for ids in batch["input_ids"]:
            drawn.append(STREAMS[stream]())
            ids[drawn[-1]] = 4
        return batch

    def trained(
        loss: str, kwargs: dict[str, float], **settings: Any
    ) -> CalibrationTrainer:
        args = arguments(
            tmp_path,
            loss=loss,
            loss_kwargs=kwargs,
            temperature_criterion="none",
            **settings,
        )
        trainer = CalibrationTrainer(
            tiny_bert(),
            args,
            collate,
            train_dataset=sets[0],
            calibration_dataset=sets[1],
        )
        trainer.train()
        return trainer

    gammas_stay = {"update_rate": 0.0, "gamma_init": 1.0}
    ours = trained("adafocal", gammas_stay, gamma_update_steps=1)
    drawn_by_ours = len(drawn)
    with pytest.warns(UserWarning, match="The loss will never adapt"):
        theirs = trained("adafocal", gammas_stay, gamma_update_steps=1_000)
    assert drawn_by_ours - (len(drawn) - drawn_by_ours) == 4 * 40
    assert_same(weights(ours.model), weights(theirs.model))
    assert logged(ours, "loss") == logged(theirs, "loss")
