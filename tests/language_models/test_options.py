"""Log-likelihoods of options, against one sequence at a time in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import RwkvConfig, RwkvForCausalLM, T5Config, T5ForConditionalGeneration

from hf_calib._errors import InputTypeError, InputValueError
from hf_calib.language_models import label_token_classifier, option_log_likelihoods
from hf_calib.metrics import expected_calibration_error
from hf_calib.scaling import TemperatureScaling
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
                logits = exact(torch.tensor([asked + answer])).logits[0].log_softmax(dim=-1)
            found[i, k] = sum(float(logits[len(asked) - 1 + t, token]) for t, token in enumerate(answer))
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_are_those_of_each_sequence_alone(name: str) -> None:
    model = language_model(name)
    found = option_log_likelihoods(model, tokenizer(), PROMPTS, OPTIONS, batch_size=4)
    np.testing.assert_allclose(found, one_by_one(model), rtol=1e-4, atol=1e-4)


def test_a_recurrent_model_reads_no_padding() -> None:
    """RWKV has no attention that a mask could hold it to."""
    config = RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = RwkvForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 2
    found = option_log_likelihoods(model, tokenizer(), PROMPTS, OPTIONS)
    np.testing.assert_allclose(found, one_by_one(model), rtol=1e-4, atol=1e-4)


def test_batches_change_nothing_and_means_are_per_token() -> None:
    model = language_model()
    whole = option_log_likelihoods(model, tokenizer(), PROMPTS, OPTIONS, batch_size=100)
    alone = option_log_likelihoods(model, tokenizer(), PROMPTS, OPTIONS, batch_size=1)
    np.testing.assert_allclose(whole, alone, atol=1e-5)
    per_token = option_log_likelihoods(model, tokenizer(), PROMPTS, OPTIONS, per_token=True)
    np.testing.assert_allclose(per_token, whole / [1, 2, 3], atol=1e-5)


def test_of_one_token_they_are_those_of_the_classifier() -> None:
    model = language_model()
    options = {"a": "w3", "b": "w9"}
    scores = option_log_likelihoods(model, tokenizer(), PROMPTS, list(options.values()))
    classifier = label_token_classifier(model, tokenizer(), options)
    for prompt, row in zip(PROMPTS, scores, strict=True):
        with torch.no_grad():
            logits = classifier(
                **tokenizer()(prompt, return_tensors="pt", return_token_type_ids=False)
            ).logits
        assert float(logits[0, 0] - logits[0, 1]) == pytest.approx(row[0] - row[1], abs=1e-5)


def test_they_are_logits_to_maps_and_metrics() -> None:
    scores = option_log_likelihoods(language_model(), tokenizer(), PROMPTS * 4, OPTIONS)
    labels = np.arange(12) % 3
    probs = TemperatureScaling().fit(scores, labels).predict_proba(scores)
    assert 0 <= expected_calibration_error(probs, labels) <= 1


def test_the_mode_is_left_as_it_was() -> None:
    model = language_model().train()
    option_log_likelihoods(model, tokenizer(), PROMPTS, OPTIONS)
    assert model.training


@pytest.mark.parametrize(
    ("prompts", "options", "kind", "message"),
    [
        ("w1", OPTIONS, InputTypeError, "prompts to be a sequence of texts, got str"),
        (PROMPTS, [1, 2], InputTypeError, "options to be a sequence of texts"),
        ([], OPTIONS, InputValueError, "got 0 prompts and 3 options"),
        (PROMPTS, ["w1"], InputValueError, "got 3 prompts and 1 options"),
        (PROMPTS, ["w1", ""], InputValueError, "options to have at least one token, got ''"),
        (["w1", ""], OPTIONS, InputValueError, "prompts to have at least one token, got none in prompt 1"),
        (
            ["w1 " * 70],
            OPTIONS,
            InputValueError,
            "fit into the model's 64 positions, got 73 tokens in prompt 0",
        ),
    ],
)
def test_bad_input(prompts: Any, options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        option_log_likelihoods(language_model(), tokenizer(), prompts, options)


@pytest.mark.parametrize("batch_size", [-1, 0, 2.5])
def test_batch_sizes_that_are_none(batch_size: Any) -> None:
    with pytest.raises(InputValueError, match=f"batch_size to be a whole number >= 1, got {batch_size}"):
        option_log_likelihoods(language_model(), tokenizer(), PROMPTS, OPTIONS, batch_size=batch_size)


def test_models_that_are_none() -> None:
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    for model in (t5, language_model().model, torch.nn.Linear(2, 2)):
        with pytest.raises(InputTypeError, match=f"be a causal language model, got {type(model).__name__}"):
            option_log_likelihoods(model, tokenizer(), PROMPTS, OPTIONS)
    with pytest.raises(
        InputValueError, match=r"have the model's vocabulary, got token 17 for a vocabulary of 10"
    ):
        option_log_likelihoods(language_model(vocab_size=10), tokenizer(), PROMPTS, OPTIONS)
