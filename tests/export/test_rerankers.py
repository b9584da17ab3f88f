"""Rerankers and encoders of sentence-transformers: a CrossEncoder folds, a head on embeddings takes the affine map."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax
from sklearn.linear_model import LogisticRegression
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from hf_calib import fold, fold_temperature
from hf_calib.scaling import (
    MatrixScaling,
    PerLabelTemperatureScaling,
    StructuredVectorScaling,
    TemperatureScaling,
    VectorScaling,
)
from hf_calib.scaling.affine import AffineMap
from tests.helpers.tiny import assert_same, sequences, text_of, tiny_bert, tokenizer, weights
from tests.language_models.models import language_model

# sentence_transformers is imported in the tests: it takes seconds, and every worker collects this file.
pytestmark = pytest.mark.skipif(
    find_spec("sentence_transformers") is None, reason="sentence_transformers is missing"
)

PAIRS = [(text_of(ids[:3]), text_of(ids[3:7])) for ids in sequences(tiny_bert(), 36, seed=3)["input_ids"]]


def reranker(folder: Path, num_labels: int) -> Any:
    """A CrossEncoder whose random logits spread by about 2."""
    from sentence_transformers import CrossEncoder

    tiny_bert(num_labels=num_labels).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return CrossEncoder(str(folder), device="cpu")


@pytest.fixture(scope="module")
def one_label(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return reranker(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def three_labels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return reranker(tmp_path_factory.mktemp("three"), 3)


def labels_of(logits: np.ndarray) -> np.ndarray:
    """Labels that milder logits could have given: 0 or 1 for one logit, else a class a row."""
    rng = np.random.default_rng(0)
    if logits.shape[1] == 1:
        return (rng.random(logits.shape) < expit(logits / 3)).astype(int)
    return (logits / 3 + rng.gumbel(size=logits.shape)).argmax(axis=1)


def logits_of(model: Any) -> np.ndarray:
    logits = model.predict(PAIRS, activation_fn=nn.Identity()).astype(np.float64)
    return logits[:, None] if logits.ndim == 1 else logits


def reloaded(model: Any, folder: Path) -> Any:
    from sentence_transformers import CrossEncoder

    model.save_pretrained(str(folder), create_model_card=False)
    return CrossEncoder(str(folder), device="cpu")


@pytest.mark.parametrize(
    "scaling",
    [
        StructuredVectorScaling(multi_label=True),
        TemperatureScaling(multi_label=True),
        PerLabelTemperatureScaling(),
    ],
)
def test_one_logit(one_label: Any, scaling: Any, tmp_path: Path) -> None:
    """The saved and loaded reranker returns sigmoid(map(z)); so does a plain pipeline on its folder."""
    logits = logits_of(one_label)
    scaler = scaling.fit(logits, labels_of(logits))
    assert abs(scaler.affine_map().weight - 1) > 0.05
    model = copy.deepcopy(one_label)
    assert fold(model, scaler) is model

    loaded = reloaded(model, tmp_path)
    assert isinstance(loaded.activation_fn, nn.Sigmoid)
    assert loaded.config.calibration["folded"] is True
    served = loaded.predict(PAIRS)
    assert served == pytest.approx(expit(scaler.transform(logits))[:, 0], abs=1e-5)
    ranked = loaded.rank("w1 w2", ["w3 w4", "w5 w6"])
    assert {entry["corpus_id"] for entry in ranked} == {0, 1}
    assert max(entry["score"] for entry in ranked) <= 1

    plain = pipeline(
        "text-classification",
        AutoModelForSequenceClassification.from_pretrained(tmp_path),
        tokenizer=AutoTokenizer.from_pretrained(tmp_path),
        device="cpu",
    )
    asked = [{"text": query, "text_pair": answer} for query, answer in PAIRS]
    assert [found["score"] for found in plain(asked)] == pytest.approx(served, abs=1e-5)


class Platt(VectorScaling):
    """A slope and an intercept for one logit, by hand."""

    multi_label = True

    def fit(self, logits: Any, labels: Any) -> Platt:
        self.weight_, self.bias_ = np.array([0.4]), np.array([-0.7])
        return self


def test_one_logit_with_a_bias(one_label: Any, tmp_path: Path) -> None:
    logits = logits_of(one_label)
    loaded = reloaded(fold(copy.deepcopy(one_label), Platt().fit(logits, None)), tmp_path)
    assert loaded.predict(PAIRS) == pytest.approx(expit(0.4 * logits[:, 0] - 0.7), abs=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("false_token", [9, None])
def test_a_language_model_that_scores_two_tokens(tied: bool, false_token: int | None, tmp_path: Path) -> None:
    model = token_reranker(tmp_path / "language_model", tied=tied, false_token=false_token)
    asked = [("w1 w2", "w3 w4"), ("w5", "w9 w2 w4"), ("w7 w7", "w1")] * 10
    logits = model.predict(asked, activation_fn=nn.Identity()).astype(np.float64)[:, None]
    labels = np.random.default_rng(0).random(logits.shape) < expit(logits / 3)
    scaler = TemperatureScaling(multi_label=True).fit(logits, labels)
    assert fold(model, scaler) is model
    loaded = reloaded(model, tmp_path / "folded")
    assert loaded.predict(asked) == pytest.approx(scaler.predict_proba(logits)[:, 0], abs=1e-6)
    assert abs(scaler.temperature_ - 1) > 0.1
    with pytest.raises(ValueError, match="folded only once"):
        fold(loaded, scaler)


def test_what_a_language_model_that_scores_tokens_cannot_hold(tmp_path: Path) -> None:
    model = token_reranker(tmp_path, tied=False, false_token=9)
    before = weights(model.model)
    with pytest.raises(
        ValueError, match="scaler to be a temperature for a CrossEncoder of a language model, got Platt"
    ):
        fold(model, Platt().fit(None, None))
    with pytest.raises(ValueError, match=r"got num_labels=1 .* fit the scaler with multi_label=True"):
        fold(model, TemperatureScaling().fit([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]], [0, 1, 1]))
    assert_same(weights(model.model), before)


def token_reranker(folder: Path, *, tied: bool, false_token: int | None) -> Any:
    """A CrossEncoder of a random language model, whose score is the logit of token 5, less that of another."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    language_model("Llama, tied" if tied else "Llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    transformer = Transformer(str(folder), transformer_task="text-generation")
    return CrossEncoder(modules=[transformer, LogitScore(5, false_token)], device="cpu")


def test_reranker_without_activation(one_label: Any, tmp_path: Path) -> None:
    """Models for ranking only return logits: these are scaled, and the user decides on the sigmoid."""
    model = copy.deepcopy(one_label)
    model.activation_fn = nn.Identity()
    logits = logits_of(model)
    fold_temperature(model, 2.5)
    assert reloaded(model, tmp_path / "logits").predict(PAIRS) == pytest.approx(logits[:, 0] / 2.5, abs=1e-5)
    model.activation_fn = nn.Sigmoid()
    assert reloaded(model, tmp_path / "probs").predict(PAIRS) == pytest.approx(
        expit(logits[:, 0] / 2.5), abs=1e-5
    )


@pytest.mark.parametrize("scaling", [MatrixScaling(), TemperatureScaling(), VectorScaling()])
def test_several_labels(three_labels: Any, scaling: Any, tmp_path: Path) -> None:
    logits = logits_of(three_labels)
    scaler = scaling.fit(logits, labels_of(logits))
    loaded = reloaded(fold(copy.deepcopy(three_labels), scaler), tmp_path)
    scaled = scaler.transform(logits)
    assert loaded.predict(PAIRS) == pytest.approx(scaled, abs=1e-5 * np.abs(scaled).max())
    probs = loaded.predict(PAIRS, apply_softmax=True)
    assert probs == pytest.approx(scaler.predict_proba(logits), abs=1e-5)


def test_several_sigmoids(three_labels: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(three_labels)
    model.activation_fn = nn.Sigmoid()
    logits = logits_of(model)
    scaler = TemperatureScaling(multi_label=True).fit(logits, np.eye(3, dtype=int)[labels_of(logits)])
    loaded = reloaded(fold(model, scaler), tmp_path)
    assert loaded.predict(PAIRS) == pytest.approx(scaler.predict_proba(logits), abs=1e-5)


def test_refused(one_label: Any, three_labels: Any) -> None:
    softmaxes = TemperatureScaling().fit([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]], [0, 1, 1])
    sigmoids = TemperatureScaling(multi_label=True).fit([[2.0], [2.0], [2.0], [-2.0]], [[0], [1], [1], [0]])
    with pytest.raises(
        ValueError, match=r"got num_labels=1 and activation_fn=Sigmoid\(\); fit the scaler with "
    ):
        fold(one_label, softmaxes)
    with pytest.raises(
        ValueError, match=r"multi-label classifier, .* got num_labels=3 and activation_fn=Identity"
    ):
        fold(three_labels, sigmoids)

    model = copy.deepcopy(one_label)
    before = weights(model)
    model.activation_fn = nn.Tanh()
    with pytest.raises(
        ValueError, match=r"apply a sigmoid, a softmax or nothing .* got activation_fn=Tanh\(\)"
    ):
        fold(model, sigmoids)
    model.activation_fn = nn.Sigmoid()
    model.config.problem_type = "regression"
    with pytest.raises(ValueError, match="to be a classifier, got problem_type='regression'"):
        fold(model, sigmoids)
    model.config.problem_type = None
    model.append(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"got BertForSequenceClassification in \['Transformer', 'Linear'\]"):
        fold(model, sigmoids)
    model.pop(1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    fold(model, sigmoids)
    with pytest.raises(ValueError, match="to be folded only once"):
        fold(model, sigmoids)

    from sentence_transformers import SentenceTransformer

    with pytest.raises(TypeError, match="expected model to be a classifier, got SentenceTransformer"):
        fold(SentenceTransformer(modules=[nn.Linear(1, 1)], device="cpu"), sigmoids)
    # A plain model with one output may be a regression, and says nothing of a sigmoid.
    with pytest.raises(ValueError, match="for one sigmoid set problem_type='multi_label_classification'"):
        fold_temperature(tiny_bert(num_labels=1), 2.0)


def embeddings_of_three() -> tuple[np.ndarray, np.ndarray]:
    """Embeddings like those of sentences on three subjects, and what each is on; a seventh is mislabelled."""
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 24)
    embeddings = rng.normal(size=(3, 16))[labels] + rng.normal(size=(72, 16))
    labels[::7] = (labels[::7] + 1) % 3
    return embeddings, labels


def fold_into(head: LogisticRegression, affine_map: AffineMap) -> None:
    """The documented lines: W becomes A W, and b becomes A b + c."""
    head.coef_ = AffineMap(affine_map.weight)(head.coef_.T).T
    head.intercept_ = affine_map(head.intercept_)


@pytest.mark.parametrize("scaling", [TemperatureScaling(), MatrixScaling()])
def test_head_on_embeddings(scaling: Any) -> None:
    """As SetFit has it: a logistic regression on sentence embeddings."""
    embeddings, labels = embeddings_of_three()
    train = np.arange(len(labels)) % 2 == 0
    head = LogisticRegression(C=0.1).fit(embeddings[train], labels[train])
    logits = head.decision_function(embeddings[~train])
    assert head.predict_proba(embeddings[~train]) == pytest.approx(softmax(logits, axis=1))
    scaler = scaling.fit(logits, labels[~train])
    fold_into(head, scaler.affine_map())
    assert head.predict_proba(embeddings[~train]) == pytest.approx(scaler.predict_proba(logits), abs=1e-12)


def test_binary_head_on_embeddings() -> None:
    embeddings, labels = embeddings_of_three()
    train, positive = np.arange(len(labels)) % 2 == 0, (labels == 2).astype(int)
    head = LogisticRegression(C=0.1).fit(embeddings[train], positive[train])
    logits = head.decision_function(embeddings[~train])[:, None]
    scaler = TemperatureScaling(multi_label=True).fit(logits, positive[~train][:, None])
    fold_into(head, scaler.affine_map())
    probs = head.predict_proba(embeddings[~train])
    assert probs[:, 1:] == pytest.approx(scaler.predict_proba(logits), abs=1e-12)
