"""A penalty on the batches of two processes together: the value and gradient of the one large batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from hf_calib.losses import all_gather_rows
from tests.helpers.gloo_pair import run_on_two
from tests.helpers.loss_cases import (
    EXACT,
    Variant,
    make_variant,
    random_batch,
    value_and_gradient,
)

LOSSES: list[Variant] = [
    ("mmce", {}),
    ("mmce", {"variant": "plain", "class_weights": [0.5, 2.0, 1.0, 3.0, 0.25]}),
    ("soft_ece", {}),
    ("soft_ece", {"variant": "dece"}),
    ("kde_ece", {}),
    ("kde_ece", {"kind": "canonical"}),
    ("mdca", {}),
    ("avuc", {}),
]
# Rows of the first process, of twelve: as many; more; none that count; none at all.
CUTS = (6, 9, 2, 0)


def batch() -> tuple[Tensor, Tensor]:
    logits, labels = random_batch(12, 5)
    labels[[0, 1, 7]] = -100
    return logits, labels


def work(rank: int, folder: Path) -> None:
    """Of each loss and cut the value of the whole batch, and the gradient of the process's own rows."""
    logits, labels = batch()
    own = [slice(0, cut) if rank == 0 else slice(cut, 12) for cut in CUTS]
    results: dict[str, Any] = {}
    for i, variant in enumerate(LOSSES):
        loss = make_variant(variant, 5)
        loss.gather = all_gather_rows
        for cut, rows in zip(CUTS, own, strict=True):
            # As the trainer scales it: over all rows, times the processes that DDP averages over.
            count = loss.normalizer(labels) / 2
            value, gradient = value_and_gradient(
                loss, logits[rows], labels[rows], num_items_in_batch=count
            )
            dist.all_reduce(value)
            results[f"{i} {cut}"] = (value / 2, gradient / 2)
    torch.save(results, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each process, from one run of the two."""
    directory = tmp_path_factory.mktemp("processes")
    run_on_two(work, directory)
    return [
        torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("i", range(len(LOSSES)), ids=lambda i: f"{LOSSES[i]}")
def test_two_processes_are_one_batch(i: int, results: list[dict[str, Any]]) -> None:
    want_value, want_gradient = value_and_gradient(make_variant(LOSSES[i], 5), *batch())
    for cut in CUTS:
        (value, first), (same_value, second) = (
            result[f"{i} {cut}"] for result in results
        )
        assert value == same_value
        assert_close(value, want_value, **EXACT)
        assert_close(torch.cat([first, second]), want_gradient, **EXACT)
