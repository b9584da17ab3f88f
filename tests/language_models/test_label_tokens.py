"""Option tokens as classes: the language model's own logits, in a plain transformers classifier, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
)

from hf_calib import fold_temperature
from hf_calib._errors import InputTypeError, InputValueError
from hf_calib.language_models import label_token_classifier, to_language_model
from tests.helpers.tiny import tokenizer
from tests.language_models.models import ARCHITECTURES, DECODER, language_model

LABELS = {"yes": "w3", "no": "w9", "maybe": "w20"}
IDS = [8, 14, 25]  # of tiny's vocabulary: five special tokens first


def batch(side: str) -> dict[str, torch.Tensor]:
    """Rows of 7, 4 and 1 tokens."""
    rows = [[5, 9, 30, 12, 40, 33, 21], [17, 6, 44, 10], [23]]
    ids = torch.zeros(3, 7, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(7 - len(row), 7) if side == "left" else slice(0, len(row))
        ids[i, place] = torch.tensor(row)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def option_logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """At the last token of each row."""
    with torch.no_grad():
        logits = model(**inputs).logits
    places = torch.arange(inputs["input_ids"].shape[1])
    last = (places * inputs["attention_mask"]).argmax(dim=1)
    return logits[torch.arange(len(logits)), last][:, IDS]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_logits_are_the_language_models(name: str) -> None:
    model = language_model(name)
    classifier = label_token_classifier(model, tokenizer(), LABELS)
    for side in ("left", "right"):
        inputs = batch(side)
        with torch.no_grad():
            logits = classifier(**inputs).logits
        torch.testing.assert_close(
            logits, option_logits(model, inputs), rtol=1e-5, atol=1e-6
        )
    assert type(classifier).__name__.endswith("ForSequenceClassification")
    assert classifier.config.id2label == {0: "yes", 1: "no", 2: "maybe"}
    assert classifier.config.label_tokens["ids"] == IDS


@pytest.mark.parametrize("name", ["GPT2", "Llama", "OPT"])
def test_a_tokenizer_that_pads_on_the_left(name: str) -> None:
    """GPT-2's classifier counts its learned positions from the padding on; the others' do not."""
    words, model = tokenizer(), language_model(name)
    words.padding_side = "left"
    if name == "GPT2":
        message = r"padding_side to be 'right', got 'left', where .* differ by .*; set tokenizer.padding_side = "
        with pytest.raises(InputValueError, match=message):
            label_token_classifier(model, words, LABELS)
        return
    classifier = label_token_classifier(model, words, LABELS)
    with torch.no_grad():
        together = classifier(**batch("left")).logits
        alone = classifier(input_ids=batch("left")["input_ids"][1:2, 3:]).logits
    torch.testing.assert_close(together[1:2], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "Qwen2, tied", "GPT2"])
def test_and_back_with_a_temperature(name: str, tmp_path: Path) -> None:
    model = language_model(name)
    model.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    classifier = label_token_classifier(loaded, tokenizer(), LABELS)
    fold_temperature(classifier, 2.0)
    made = to_language_model(classifier)  # which finds the language model by its name
    made.save_pretrained(tmp_path / "made")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    inputs = batch("right")
    torch.testing.assert_close(
        option_logits(again, inputs),
        option_logits(model, inputs) / 2,
        rtol=1e-5,
        atol=1e-5,
    )
    with torch.no_grad():
        ours, theirs = again(**inputs).logits, model(**inputs).logits
    others = [token for token in range(64) if token not in IDS]
    torch.testing.assert_close(ours[..., others], theirs[..., others])
    assert not again.config.tie_word_embeddings


@pytest.mark.parametrize("is_tied", [True, False])
def test_neither_way_changes_the_model_that_is_given(is_tied: bool) -> None:
    model = language_model(tie_word_embeddings=is_tied)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = model.config.to_dict()
    classifier = label_token_classifier(model, tokenizer(), LABELS)
    with torch.no_grad():
        classifier.score.weight *= 3
    again = to_language_model(classifier, model)
    assert not torch.equal(
        again.get_output_embeddings().weight, before["lm_head.weight"]
    )
    assert model.config.to_dict() == config
    assert model.get_output_embeddings() is not again.get_output_embeddings()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_padding_is_the_tokenizers_even_if_the_config_has_another() -> None:
    model = language_model(pad_token_id=7)
    classifier = label_token_classifier(model, tokenizer(), LABELS)
    assert classifier.config.pad_token_id == 0
    inputs = batch("right")
    with torch.no_grad():
        logits = classifier(**inputs).logits
    torch.testing.assert_close(
        logits, option_logits(model, inputs), rtol=1e-5, atol=1e-6
    )


def test_back_generates_with_the_settings_of_the_model_that_was_given() -> None:
    model = language_model()
    model.generation_config.max_new_tokens = 3
    classifier = label_token_classifier(model, tokenizer(), LABELS)
    made = to_language_model(classifier, model)
    assert made.generation_config.max_new_tokens == 3
    assert made.generation_config is not model.generation_config


def test_soft_capped_heads_are_refused_with_a_way_out() -> None:
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**{**DECODER, "head_dim": 8})).eval()
    with torch.no_grad():
        model.lm_head.weight *= 200
    message = r"logits differ by .* from the language model's \(they are capped at 30; .*\); score its options with"
    with pytest.raises(InputValueError, match=message):
        label_token_classifier(model, tokenizer(), LABELS)


CAUSAL = "be a causal language model, got "


@pytest.mark.parametrize(
    ("model", "labels", "message"),
    [
        (
            language_model,
            {"yes": "w3 w4", "no": "w5"},
            "one token, got 2 for label 'yes'.*option_log_",
        ),
        (
            language_model,
            {"yes": "w3", "no": "w3"},
            "be different tokens, got 'w3' for 'yes' and 'no'",
        ),
        (language_model, {"yes": "w3", "no": "qwerty"}, "be known to the tokenizer"),
        (
            language_model,
            {"yes": 3, "no": 9},
            "expected labels to be texts by class name, or a list",
        ),
        (
            lambda: language_model(vocab_size=10),
            LABELS,
            "vocabulary, got token 25 for a head of 10",
        ),
        (lambda: language_model().model, LABELS, CAUSAL + "LlamaModel"),
    ],
)
def test_refused(model: Callable[[], Any], labels: Any, message: str) -> None:
    is_type = "expected labels" in message or CAUSAL in message
    with pytest.raises(InputTypeError if is_type else InputValueError, match=message):
        label_token_classifier(model(), tokenizer(), labels)


def test_back_needs_a_record_and_the_right_model() -> None:
    classifier = label_token_classifier(language_model(), tokenizer(), LABELS)
    with pytest.raises(InputValueError, match=r"expected language_model to be given"):
        to_language_model(classifier)
    for other in (
        language_model(hidden_size=32),
        language_model("GPT2"),
        torch.nn.Linear(2, 2),
    ):
        with pytest.raises(InputValueError, match=r"be the one it was made of"):
            to_language_model(classifier, other)
    plain = type(classifier)(language_model().config)
    with pytest.raises(InputValueError, match=r"say which tokens its classes are"):
        to_language_model(plain)
