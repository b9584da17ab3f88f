"""The shifted loss equals the loss of shifted logits, for every loss that has a value per token."""

from __future__ import annotations

import warnings

import pytest
import torch

from hf_calib._errors import InputTypeError, InputValueError
from hf_calib.language_models import for_causal_lm
from hf_calib.losses import LOSSES, focal, make_loss
from tests.language_models.models import language_model

SEPARABLE = [
    name for name, entry in LOSSES.items() if not entry.constructor().couples_batch
]


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 11, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 11, (3, 6), generator=generator)
    labels[0, :3] = -100
    return logits.requires_grad_(), labels


@pytest.mark.parametrize("name", SEPARABLE)
def test_it_is_the_loss_of_shifted_logits(name: str) -> None:
    logits, labels = rows()
    loss = make_loss(name)
    ours = for_causal_lm(loss)(logits, labels)
    (gradient,) = torch.autograd.grad(ours, logits)
    theirs = loss(logits[:, :-1], labels[:, 1:])
    (wanted,) = torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient, wanted)
    assert not gradient[:, -1].any()


def test_labels_that_are_shifted_already_and_the_count_of_a_global_batch() -> None:
    logits, labels = rows()
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    loss = for_causal_lm(focal(gamma=2.0))
    whole = loss(logits, labels)
    torch.testing.assert_close(loss(logits, shift_labels=shifted), whole)
    count = (shifted != -100).sum()
    parts = [
        loss(z, y, num_items_in_batch=count)
        for z, y in zip(logits.split(1), labels.split(1), strict=True)
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("name", ["cross_entropy", "focal"])
def test_the_mean_is_over_the_class_weights(name: str) -> None:
    logits, labels = rows()
    weights = torch.arange(1.0, 12.0)
    loss = make_loss(name, class_weights=weights)
    ours = for_causal_lm(loss)(logits, labels)
    shifted = logits[:, :-1].flatten(0, 1)
    wanted = labels[:, 1:].flatten()
    if name == "cross_entropy":
        theirs = torch.nn.functional.cross_entropy(shifted, wanted, weights.double())
        torch.testing.assert_close(ours, theirs)
    known = wanted != -100
    each = make_loss(name)(shifted, wanted, reduction="none")[known]
    own = weights[wanted[known]]
    torch.testing.assert_close(ours, (each * own).sum() / own.sum())


def test_cross_entropy_is_the_models_own_loss() -> None:
    model = language_model()
    ids = torch.tensor([[5, 9, 30, 12], [17, 6, 44, 10]])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        own = model(input_ids=ids, labels=ids)
        ours = for_causal_lm(make_loss("cross_entropy"))(own, ids)
    torch.testing.assert_close(ours, own.loss)


def test_bad_input() -> None:
    logits, labels = rows()
    with pytest.raises(InputValueError, match=r"have a value per token, got 'mmce'"):
        for_causal_lm(make_loss("mmce"))
    loss = for_causal_lm(focal())
    with pytest.raises(
        InputTypeError, match=r"labels or shift_labels to be given, got neither"
    ):
        loss(logits)
    with pytest.raises(
        InputValueError,
        match=r"be \(B, L, V\) and \(B, L\), got \(3, 6, 11\) and \(3, 5\)",
    ):
        loss(logits, labels[:, 1:])
