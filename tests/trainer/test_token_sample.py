"""The sample of tokens that a temperature of a language model is fitted on."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from hf_calib.trainer.evaluation import Evaluation

N, LENGTH, VOCABULARY = 400, 24, 3


@pytest.mark.parametrize(
    ("constant", "value"), [("MOST_TOKENS", 600), ("MOST_LOGITS", 600 * VOCABULARY)]
)
def test_the_sample_is_random_bounded_and_even(
    constant: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each logit says where it is from: early and late tokens have the same chance."""
    labels = torch.randint(
        VOCABULARY, (N, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    lengths = torch.randint(
        4, LENGTH + 1, (N, 1), generator=torch.Generator().manual_seed(1)
    )
    labels[torch.arange(LENGTH) >= lengths] = -100
    logits = (
        torch.arange(N * LENGTH, dtype=torch.float32)
        .reshape(N, LENGTH, 1)
        .repeat(1, 1, VOCABULARY)
    )
    places = []
    for most in (value, N * LENGTH * VOCABULARY):
        monkeypatch.setattr(Evaluation, constant, most)
        current = Evaluation(
            Accelerator(cpu=True), keep_values=float("inf"), sample_tokens=True
        )
        for part, own in zip(logits.split(7), labels.split(7), strict=True):
            current.add(part, own)
        current.finish()
        kept, kept_labels = map(torch.from_numpy, current.logits_and_labels())
        places.append(kept[:, 0].long())
        assert torch.equal(kept_labels, labels.flatten()[places[-1]])
    sample, everything = places
    assert torch.equal(everything, (labels.flatten() != -100).nonzero()[:, 0])
    assert 200 < len(sample) <= 600
    assert sample.unique().numel() == len(sample)
    late = (sample > everything.median()).double().mean()
    assert abs(late - 0.5) < 4 * 0.5 / len(sample) ** 0.5
