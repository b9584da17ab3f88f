"""The global-pooling CNN, its tokenizer, and GloVe vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from papers.networks.global_pooling_cnn import (
    GlobalPoolingCNNConfig,
    GlobalPoolingCNNForSequenceClassification,
)
from papers.words import load_glove, train_word_tokenizer
from torch import nn


def make_model(**sizes) -> GlobalPoolingCNNForSequenceClassification:
    torch.manual_seed(0)
    config = GlobalPoolingCNNConfig(
        **{
            "vocab_size": 40,
            "embedding_size": 6,
            "hidden_size": 8,
            "num_labels": 3,
            **sizes,
        }
    )
    return GlobalPoolingCNNForSequenceClassification(config).eval()


def reference_logits(
    model: GlobalPoolingCNNForSequenceClassification, ids: list[int]
) -> torch.Tensor:
    """One text without padding, in float64, layer by layer as the papers' code has them."""
    weights = {name: value.double() for name, value in model.named_parameters()}
    hidden = weights["embeddings.weight"][torch.tensor(ids)].T.unsqueeze(0)
    for number in range(3):
        if number:
            hidden = F.max_pool1d(hidden, 5, stride=1, padding=2)
        weight, bias = (
            weights[f"convolutions.{number}.{part}"] for part in ("weight", "bias")
        )
        hidden = F.relu(F.conv1d(hidden, weight, bias, padding=2))
    dense = F.relu(
        F.linear(
            hidden.max(dim=2).values, weights["dense.weight"], weights["dense.bias"]
        )
    )
    return F.linear(dense, weights["classifier.weight"], weights["classifier.bias"])[0]


def test_texts_grouped_by_length_give_the_numbers_of_the_whole_batch() -> None:
    """Logits and gradients on a CPU, against the layers written out, one text at a time, in float64."""
    model = make_model(initializer_range=1.0).double()
    for convolution in (
        model.convolutions
    ):  # with these, padding wins the maximum wherever it is not masked
        nn.init.constant_(convolution.bias, 1.0)
    lengths = torch.randint(
        1, 30, (50,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    texts = [torch.randint(1, 40, (length,)) for length in [*lengths, 1, 30]]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_side="left")
    labels = torch.arange(len(texts)) % 3

    def gradients(logits: torch.Tensor) -> torch.Tensor:
        grads = torch.autograd.grad(
            F.cross_entropy(logits, labels), list(model.parameters())
        )
        return torch.cat([grad.flatten() for grad in grads])

    together = model(input_ids=ids).logits
    alone = torch.stack([reference_logits(model, text.tolist()) for text in texts])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gradients(together), gradients(alone), rtol=1e-12, atol=1e-12
    )


def test_tokenizer_keeps_the_most_frequent_words_lower_cased() -> None:
    tokenizer = train_word_tokenizer(["B b B, a a; c!", "Don't: b"], vocab_size=4)
    assert tokenizer.get_vocab() == {"[PAD]": 0, "[UNK]": 1, "b": 2, "a": 3}
    assert tokenizer("A; c... B")["input_ids"] == [3, 1, 2]
    assert tokenizer("", padding=True)["input_ids"] == []


def write_glove(folder: Path, *lines: str) -> Path:
    path = folder / "vectors.txt"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_glove_fills_the_words_that_it_has(tmp_path: Path) -> None:
    tokenizer = train_word_tokenizer(["naïve cat dog"])
    path = write_glove(
        tmp_path,
        "zebra 9 9 9",
        "naïve 0.5 -1 2e-1",
        "at name@x.com 7 7 7",
        "dog 1 2 3",
        "dog 4 4 4",
    )
    vectors, coverage = load_glove(path, tokenizer)
    assert coverage == pytest.approx(2 / 3)
    assert vectors.dtype == torch.float32
    ids = tokenizer.get_vocab()
    torch.testing.assert_close(vectors[ids["naïve"]], torch.tensor([0.5, -1.0, 0.2]))
    torch.testing.assert_close(vectors[ids["dog"]], torch.tensor([1.0, 2.0, 3.0]))
    assert vectors[[ids["cat"], ids["[PAD]"], ids["[UNK]"]]].abs().sum() == 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ("cat 1 2 3", "dog 1 2"),
            "line 2 of .* to be a word and 3 finite numbers, got dog 1 2; check",
        ),
        (("400000 3", "cat 1 2 3"), "word2vec"),
        (("bird 1 2 3",), "to have vectors for some of the words"),
    ],
)
def test_glove_refuses(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_glove(write_glove(tmp_path, *lines), train_word_tokenizer(["cat dog"]))
