"""A penalty on the batches of two processes together: the value and gradient of the one large batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from hf_calib.losses import all_gather_rows, make_loss
from tests.helpers.gloo_pair import run_on_two
from tests.helpers.loss_cases import random_batch, value_and_gradient

EXACT = {"rtol": 1e-10, "atol": 1e-12}
LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("mmce", {}),
    ("mmce", {"variant": "plain", "class_weights": [0.5, 2.0, 1.0, 3.0, 0.25]}),
    ("soft_ece", {}),
    ("soft_ece", {"variant": "dece"}),
    ("kde_ece", {}),
    ("kde_ece", {"kind": "canonical"}),
]
# Rows of each process: as many; more and fewer; none that count; none at all.
CUTS = [(6, 12), (9, 12), (2, 12), (0, 12)]


def batch() -> tuple[Tensor, Tensor]:
    logits, labels = random_batch(12, 5)
    labels[[1, 7]] = -100
    return logits, labels


def cut(rank: int, cuts: tuple[int, int]) -> slice:
    return slice(0, cuts[0]) if rank == 0 else slice(*cuts)


def shared_results(rank: int) -> dict[str, Any]:
    """Results of each loss in one process: value of the whole batch, gradient of its own rows."""
    logits, labels = batch()
    results: dict[str, Any] = {}
    for i, (name, hyperparameters) in enumerate(LOSSES):
        loss = make_loss(name, **hyperparameters)
        loss.gather = all_gather_rows
        for cuts in CUTS:
            own = cut(rank, cuts)
            # As the trainer scales it: over all rows, times the processes that DDP averages over.
            count = loss.normalizer(labels) / 2
            value, gradient = value_and_gradient(loss, logits[own], labels[own], num_items_in_batch=count)
            dist.all_reduce(value)
            results[f"{i} {cuts}"] = (value / 2, gradient / 2)
    return results


def model_gradient(rank: int) -> Tensor:
    """Through DistributedDataParallel, as a training does it."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(5, 5, dtype=torch.float64))
    logits, labels = batch()
    own = cut(rank, (6, 12))
    loss = make_loss("mmce")
    loss.gather = all_gather_rows
    loss(model(logits[own]), labels[own], num_items_in_batch=loss.normalizer(labels) / 2).backward()
    assert model.module.weight.grad is not None
    return model.module.weight.grad


def gathered_vectors(rank: int) -> tuple[list[Tensor], int]:
    """Vectors of 2 and of 3 entries, and matrices of as many rows."""
    numbers = torch.arange(2.0 + rank) + 10 * rank
    return all_gather_rows([numbers, -numbers, torch.stack([numbers, numbers + 100], dim=1)])


def work(rank: int, folder: Path) -> None:
    results = {
        "losses": shared_results(rank),
        "model": model_gradient(rank),
        "vectors": gathered_vectors(rank),
    }
    torch.save(results, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each process, from one run of the two."""
    directory = tmp_path_factory.mktemp("processes")
    run_on_two(work, directory)
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("i", range(len(LOSSES)), ids=lambda i: f"{LOSSES[i]}")
def test_two_processes_are_one_batch(i: int, cuts: tuple[int, int], results: list[dict[str, Any]]) -> None:
    name, hyperparameters = LOSSES[i]
    want_value, want_gradient = value_and_gradient(make_loss(name, **hyperparameters), *batch())
    (value, first), (same_value, second) = (r["losses"][f"{i} {cuts}"] for r in results)
    assert value == same_value
    assert_close(value, want_value, **EXACT)
    assert_close(torch.cat([first, second]), want_gradient, **EXACT)


def test_without_it_they_are_not() -> None:
    """The penalty of two halves is not that of the whole: what the gathering is for."""
    logits, labels = batch()
    whole = make_loss("mmce")(logits, labels)
    halves = [make_loss("mmce")(z, y) for z, y in zip(logits.split(6), labels.split(6), strict=True)]
    assert abs(sum(halves) / 2 - whole) > 1e-3


@pytest.mark.slow
def test_the_model_gets_the_gradient_of_the_whole_batch(results: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 5, dtype=torch.float64)
    logits, labels = batch()
    make_loss("mmce")(model(logits), labels).backward()
    for result in results:
        assert_close(result["model"], model.weight.grad, **EXACT)


@pytest.mark.slow
def test_shorter_vectors_are_filled_up_with_zeros(results: list[dict[str, Any]]) -> None:
    for result in results:
        (numbers, negatives, matrix), processes = result["vectors"]
        assert processes == 2
        assert numbers.tolist() == [0, 1, 0, 10, 11, 12]
        assert negatives.tolist() == [0, -1, 0, -10, -11, -12]
        assert matrix.tolist() == [[0, 100], [1, 101], [0, 0], [10, 110], [11, 111], [12, 112]]


def test_one_process_keeps_its_own() -> None:
    vectors = [torch.arange(3.0)]
    assert all_gather_rows(vectors) == (vectors, 1)
    loss, logits_and_labels = make_loss("mmce"), batch()
    alone = value_and_gradient(loss, *logits_and_labels)
    loss.gather = all_gather_rows
    assert_close(value_and_gradient(loss, *logits_and_labels), alone, **EXACT)
