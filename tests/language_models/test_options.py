"""Log-likelihoods of options, against one sequence at a time in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hf_calib._errors import InputTypeError, InputValueError
from hf_calib.language_models import option_log_likelihoods
from tests.helpers.tiny import tokenizer
from tests.language_models.models import ARCHITECTURES, language_model

PROMPTS = ["w1 w2 w3 w4", "w9", "w7 w8"]
OPTIONS = ["w3", "w5 w6", "w10 w11 w12"]


def one_by_one(model: Any) -> np.ndarray:
    words = tokenizer()
    exact = model.double()
    found = np.empty((len(PROMPTS), len(OPTIONS)))
    for i, prompt in enumerate(PROMPTS):
        for k, option in enumerate(OPTIONS):
            asked, answer = words(prompt)["input_ids"], words(option)["input_ids"]
            with torch.no_grad():
                logits = (
                    exact(torch.tensor([asked + answer])).logits[0].log_softmax(dim=-1)
                )
            found[i, k] = sum(
                float(logits[len(asked) - 1 + t, token])
                for t, token in enumerate(answer)
            )
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_are_those_of_each_sequence_alone(name: str) -> None:
    model = language_model(name)
    found = option_log_likelihoods(model, tokenizer(), PROMPTS, OPTIONS, batch_size=4)
    np.testing.assert_allclose(found, one_by_one(model), rtol=1e-4, atol=1e-4)


def test_batches_change_nothing_and_means_are_per_token() -> None:
    model = language_model()
    whole = option_log_likelihoods(model, tokenizer(), PROMPTS, OPTIONS, batch_size=100)
    alone = option_log_likelihoods(model, tokenizer(), PROMPTS, OPTIONS, batch_size=1)
    np.testing.assert_allclose(whole, alone, atol=1e-5)
    per_token = option_log_likelihoods(
        model, tokenizer(), PROMPTS, OPTIONS, per_token=True
    )
    np.testing.assert_allclose(per_token, whole / [1, 2, 3], atol=1e-5)


def test_a_prompt_and_an_option_may_take_every_position() -> None:
    prompts = ["w1 " * 61]  # of 64, with the longest option's 3
    found = option_log_likelihoods(language_model(), tokenizer(), prompts, OPTIONS)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("trains", [False, True])
def test_a_model_is_scored_and_then_is_in_its_mode_of_before(
    trains: bool,
) -> None:
    model = language_model().train(trains)
    option_log_likelihoods(model, tokenizer(), PROMPTS, OPTIONS)
    assert model.training == trains


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], OPTIONS, "got 0 and 3"),
        (PROMPTS, ["w1", ""], "options to have at least one token, got ''"),
        (
            ["w1", ""],
            OPTIONS,
            "prompts to have at least one token, got none in prompt 1",
        ),
        (
            ["w1 " * 70],
            OPTIONS,
            "fit into the model's 64 positions, got 73 tokens in prompt 0",
        ),
    ],
)
def test_bad_input(prompts: Any, options: Any, message: str) -> None:
    with pytest.raises(InputValueError, match=message):
        option_log_likelihoods(language_model(), tokenizer(), prompts, options)
    with pytest.raises(
        InputTypeError, match="prompts to be a sequence of texts, got str"
    ):
        option_log_likelihoods(language_model(), tokenizer(), "w1", OPTIONS)
    with pytest.raises(
        InputTypeError, match="be a causal language model, got LlamaModel"
    ):
        option_log_likelihoods(language_model().model, tokenizer(), PROMPTS, OPTIONS)
