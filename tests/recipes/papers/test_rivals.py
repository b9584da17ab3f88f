"""The rule of the dual focal authors' code for the "mean" rivals of Table 4."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from papers.rivals import batch_rival_loss
from scipy.special import softmax

from hf_calib.losses import make_loss

LOGITS = np.array([[2.0, 1.0, 0.5, -1.0], [0.3, 0.1, 1.4, 0.2], [-2.0, 1.0, 0.0, 3.0]])
LABELS = np.array([0, 3, 0])


@pytest.mark.parametrize(("n_rivals", "counted"), [(2, 2), (3, 3), (None, 4)])
def test_the_rival_is_the_batch_mean_of_summed_probabilities(
    n_rivals: int | None, counted: int
) -> None:
    probs = softmax(LOGITS, axis=1)
    of_label = probs[np.arange(3), LABELS]
    sums = []
    for row, threshold in zip(probs, of_label, strict=True):
        below = sorted(row[row < threshold], reverse=True)
        sums.append(sum(below[:counted]))
    expected = -((1 - of_label + np.mean(sums)) ** 5 * np.log(of_label)).mean()
    found = batch_rival_loss(
        torch.tensor(LOGITS), torch.tensor(LABELS), gamma=5.0, n_rivals=n_rivals
    )
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_it_is_another_rule_than_the_mean_of_each_row() -> None:
    ours = make_loss("dual_focal", gamma=5.0, rival="mean2")(
        torch.tensor(LOGITS), torch.tensor(LABELS)
    )
    theirs = batch_rival_loss(
        torch.tensor(LOGITS), torch.tensor(LABELS), gamma=5.0, n_rivals=2
    )
    assert theirs.item() > 1.05 * ours.item()


def test_one_row_with_one_rival_is_dual_focal_loss() -> None:
    logits, labels = torch.tensor(LOGITS[:1]), torch.tensor(LABELS[:1])
    assert batch_rival_loss(logits, labels, n_rivals=1).item() == pytest.approx(
        make_loss("dual_focal", gamma=5.0)(logits, labels).item(), rel=1e-5
    )


def test_the_rival_has_a_gradient_in_every_row() -> None:
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    batch_rival_loss(logits, torch.tensor(LABELS), n_rivals=2).backward()
    assert logits.grad is not None
    # The label of the last row is its least probable class, so only this row has no rival of its own.
    assert (logits.grad[:2, 1:].abs() > 0).any(dim=1).all()
    assert torch.allclose(logits.grad.sum(dim=1), torch.zeros(3).double(), atol=1e-6)
