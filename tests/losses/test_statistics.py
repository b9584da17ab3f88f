"""A row statistic is declared in one place, and a path that cannot compute it refuses it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hf_calib.losses.statistics.chunked import Block, ForwardBlock
from hf_calib.losses.statistics.definitions import (
    CROSS_ENTROPY,
    Correct,
    Entropy,
    LogConfidence,
    LogitNorm,
    OtherPowers,
    Rival,
    Rows,
    SoftRank,
    Statistic,
)
from hf_calib.losses.statistics.direct import LabelledRows
from hf_calib.losses.statistics.dispatch import multi_label_statistics, read_by, row_statistics
from tests.helpers.loss_cases import BOTH_ENDS, PATHS, random_batch, take_path


@dataclass(frozen=True)
class LogitOfClass(Statistic):
    """z of one class: a statistic that no loss has, known to two paths of the three."""

    index: int

    def direct(self, rows: LabelledRows) -> Tensor:
        return rows.logits[:, self.index]

    def chunked(self, block: ForwardBlock) -> Rows:
        return {"value": block.z[:, self.index]}

    def coefficients(self, rows: Rows, slope: Tensor) -> Rows:
        return {"alpha": torch.zeros_like(slope), "slope": slope}

    def add_to(self, gradient: Tensor, block: Block, coefficients: Rows) -> None:
        gradient[:, self.index] += coefficients["slope"].squeeze(1)


@dataclass(frozen=True)
class DirectOnly(Statistic):
    """Known to one path."""

    def direct(self, rows: LabelledRows) -> Tensor:
        return rows.logits.sum(1)


@pytest.mark.parametrize("path", PATHS)
def test_a_new_statistic_needs_its_declaration_only(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_path(monkeypatch, path)
    logits, labels = random_batch(23, 5)
    labels[4] = -100
    leaf = logits.clone().requires_grad_()
    statistics = read_by([LogitOfClass(1), Entropy()], [LogitOfClass(3), LogitOfClass(1)])
    assert statistics == (CROSS_ENTROPY, LogitOfClass(1), Entropy(), LogitOfClass(3))
    stats = row_statistics(leaf, labels, statistics)
    counts = labels != -100
    assert_close(stats[LogitOfClass(3)].detach(), logits[:, 3] * counts)
    (stats[LogitOfClass(1)] + 2 * stats[LogitOfClass(3)]).sum().backward()
    assert_close(leaf.grad, torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0]).double() * counts[:, None])


@pytest.mark.parametrize("path", BOTH_ENDS)
def test_one_statistic_twice_with_other_parameters(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_path(monkeypatch, path)
    logits, labels = random_batch(23, 5)
    leaf = logits.clone().requires_grad_()
    pair = (OtherPowers(2.0), OtherPowers(1.5))
    stats = row_statistics(leaf, labels, read_by(pair))
    others = logits.softmax(1).scatter(1, labels[:, None], 0)
    for statistic in pair:
        assert_close(stats[statistic].detach(), others.pow(statistic.power).sum(1))
    (stats[pair[0]] + 3 * stats[pair[1]]).sum().backward()
    truth = logits.clone().requires_grad_()
    probs = truth.softmax(1).scatter(1, labels[:, None], 0)
    (probs.square().sum() + 3 * probs.clamp_min(1e-300).pow(1.5).sum()).backward()
    assert_close(leaf.grad, truth.grad)


def test_a_path_that_cannot_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = random_batch(23, 5)
    assert_close(row_statistics(logits, labels, read_by([DirectOnly()]))[DirectOnly()], logits.sum(1))
    take_path(monkeypatch, "blocks")
    with pytest.raises(
        ValueError, match=r"what the chunked path computes, got DirectOnly\(\); use a loss of"
    ):
        row_statistics(logits, labels, read_by([DirectOnly()]))
    take_path(monkeypatch, "direct")
    with pytest.raises(ValueError, match=r"what the direct path computes, got <.*Statistic"):
        row_statistics(logits, labels, read_by([Statistic()]))


@pytest.mark.parametrize(
    "statistic",
    [Rival("next"), Entropy(), LogConfidence(), Correct(), LogitNorm(1.0), SoftRank(3.0)],
    ids=repr,
)
def test_what_a_multi_label_problem_lacks(statistic: Statistic) -> None:
    logits, labels = torch.zeros(3, 2), torch.ones(3, 2)
    with pytest.raises(
        ValueError, match="expected the loss to read what the multi-label path computes, got "
    ):
        multi_label_statistics(logits, labels, read_by([statistic]))
