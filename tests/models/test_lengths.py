"""How many tokens of a text a model reads: a limit that it has is kept, and one that it has not is not made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from hf_calib.models.classifier import load_classifier, predict
from hf_calib.models.reading import Reading
from tests.helpers.tiny import N_LABELS, TEXT, VOCABULARY, tiny_bert, tokenizer

LLAMA: dict[str, Any] = {
    **TEXT,
    "num_labels": N_LABELS,
    "pad_token_id": 0,
    "num_key_value_heads": 2,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2}


def with_ends() -> Any:
    """A tokenizer that writes [CLS] and [SEP] around a text."""
    made = tokenizer()
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return made


def saved(folder: Path, model: Any, words: Any = None) -> Path:
    model.save_pretrained(folder)
    (words or tokenizer()).save_pretrained(folder)
    return folder


def texts(n_words: int) -> Dataset:
    text = " ".join(f"w{i % 9}" for i in range(n_words))
    return Dataset.from_dict(
        {"text": [text, "w1 w2"], "second": ["w3"] * 2, "label": [0, 1]}
    )


def refused(folder: Path, words: str, task: str = "text", **reading: Any) -> None:
    classifier = load_classifier(folder, task)
    with pytest.raises(ValueError, match=words) as error:
        predict(classifier, texts(30), **reading)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "bart"])
def test_no_text_is_longer_than_a_table_of_positions(kind: str, tmp_path: Path) -> None:
    if kind == "bert":
        model = tiny_bert()
    elif kind == "gpt2":
        config = transformers.GPT2Config(**GPT2, n_positions=16, num_labels=N_LABELS)
        model = transformers.GPT2ForSequenceClassification(config)
    else:
        config = transformers.BartConfig(
            vocab_size=VOCABULARY,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            max_position_embeddings=16,
            num_labels=N_LABELS,
        )
        model = transformers.BartForSequenceClassification(config)
    words = "max_length to be at most 16, the positions of the model, got 17"
    refused(saved(tmp_path, model), words, max_length=17)


@pytest.mark.parametrize(("limit", "n_cut"), [(8, 0), (7, 1), (None, 0)])
def test_only_texts_of_more_tokens_are_cut(
    limit: int | None, n_cut: int, tmp_path: Path
) -> None:
    classifier = load_classifier(saved(tmp_path, tiny_bert()))
    found = classifier.encode(texts(8), Reading(max_length=limit), name="rows")
    said = f"{n_cut} of 2 texts were cut at {limit} tokens." if n_cut else ""
    assert (found.note or "").startswith(said)
    assert (found.note is None) == (n_cut == 0)
    assert found.cut_at == (limit if n_cut else None)


def test_rotary_positions_have_no_end(tmp_path: Path) -> None:
    model = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**LLAMA)
    )
    classifier = load_classifier(saved(tmp_path, model))
    found = predict(classifier, texts(30), max_length=20).as_logits()
    with torch.no_grad():
        ids = tokenizer()(texts(20)["text"][0], return_tensors="pt")["input_ids"]
        wanted = model.eval()(ids).logits
    np.testing.assert_allclose(found[:1], wanted, atol=1e-5)


def test_a_text_keeps_a_token_besides_the_marks_of_its_ends(tmp_path: Path) -> None:
    """Tokenizers do not cut at all where the marks alone are too many."""
    folder = saved(tmp_path, tiny_bert(), with_ends())
    refused(folder, "max_length to be at least 3, got 2", max_length=2)
    refused(
        folder,
        "max_length to be at least 4, got 3",
        max_length=3,
        text_pair_column="second",
    )
    assert predict(load_classifier(folder), texts(30), max_length=3).as_logits().any()


def test_tokens_have_the_same_limits(tmp_path: Path) -> None:
    folder = saved(tmp_path, tiny_bert("Token"))
    classifier = load_classifier(folder, "token")
    rows = Dataset.from_dict({"text": [["w1"] * 20], "label": [["LABEL_0"] * 20]})
    for length, words in ((0, "at least 1, got 0"), (17, "at most 16, .* got 17")):
        with pytest.raises(ValueError, match=words):
            predict(classifier, rows, max_length=length)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_no_token(side: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForTokenClassification(transformers.LlamaConfig(**LLAMA))
    folder = saved(tmp_path, model)
    sentences = [["w1", "w2", "w3", "w4", "w5"], ["w6"], ["w7", "w8"]]
    tags = [["LABEL_0"] * len(sentence) for sentence in sentences]
    rows = Dataset.from_dict({"text": sentences, "label": tags})
    classifier = load_classifier(folder, "token")
    classifier.processing_class.padding_side = side
    found = predict(classifier, rows, batch_size=3).as_logits()
    alone = [
        predict(classifier, rows.select([i])).as_logits() for i in range(len(rows))
    ]
    np.testing.assert_allclose(found, np.concatenate(alone), atol=1e-5)
