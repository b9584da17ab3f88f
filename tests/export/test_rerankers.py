"""Rerankers and encoders of sentence-transformers: a CrossEncoder folds, a head on embeddings takes the affine map."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import expit
from torch import nn
from transformers import pipeline

from hf_calib import fold
from hf_calib.scaling import (
    MatrixScaling,
    StructuredVectorScaling,
    TemperatureScaling,
)
from tests.helpers.tiny import (
    assert_same,
    sequences,
    text_of,
    tiny_bert,
    tokenizer,
    weights,
)
from tests.language_models.models import language_model

# sentence_transformers is imported in the tests: it takes seconds, and every worker collects this file.
pytestmark = pytest.mark.skipif(
    find_spec("sentence_transformers") is None,
    reason="sentence_transformers is missing",
)

PAIRS = [
    (text_of(ids[:3]), text_of(ids[3:7]))
    for ids in sequences(tiny_bert(), 36, seed=3)["input_ids"]
]


@pytest.fixture(scope="module")
def rerankers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """CrossEncoders of one label and of three, whose random logits spread by about 2."""
    from sentence_transformers import CrossEncoder

    found = {}
    for n in (1, 3):
        folder = str(tmp_path_factory.mktemp("reranker"))
        tiny_bert(num_labels=n).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        found[n] = CrossEncoder(folder, device="cpu")
    return found


def labels_of(logits: np.ndarray) -> np.ndarray:
    """Labels that milder logits could have given: 0 or 1 for one logit, else a class per row."""
    rng = np.random.default_rng(0)
    if logits.shape[1] == 1:
        return (rng.random(logits.shape) < expit(logits / 3)).astype(int)
    return (logits / 3 + rng.gumbel(size=logits.shape)).argmax(axis=1)


def logits_of(model: Any) -> np.ndarray:
    logits = model.predict(PAIRS, activation_fn=nn.Identity()).astype(np.float64)
    return logits.reshape(len(PAIRS), -1)


def reloaded(model: Any, folder: Path) -> Any:
    from sentence_transformers import CrossEncoder

    model.save_pretrained(str(folder), create_model_card=False)
    return CrossEncoder(str(folder), device="cpu")


SIGMOIDS = TemperatureScaling(multi_label=True)


@pytest.mark.parametrize(
    ("n", "scaling"),
    [
        *(
            (1, scaling)
            for scaling in (StructuredVectorScaling(multi_label=True), SIGMOIDS)
        ),
        *(
            (3, scaling)
            for scaling in (SIGMOIDS, MatrixScaling(), TemperatureScaling())
        ),
    ],
)
def test_a_saved_reranker_gives_the_probabilities(
    n: int, scaling: Any, rerankers: Any, tmp_path: Path
) -> None:
    model = copy.deepcopy(rerankers[n])
    sigmoid = getattr(scaling, "multi_label", False)
    model.activation_fn = nn.Sigmoid() if sigmoid else nn.Identity()
    logits = logits_of(model)
    labels = labels_of(logits)
    scaler = scaling.fit(
        logits, np.eye(3, dtype=int)[labels] if sigmoid and n == 3 else labels
    )
    assert np.abs(scaler.affine_map().weight - 1).max() > 0.05
    assert fold(model, scaler) is model
    loaded = reloaded(model, tmp_path)
    assert loaded.config.calibration["folded"] is True
    served = loaded.predict(PAIRS, apply_softmax=not sigmoid)
    wanted = scaler.predict_proba(logits)
    assert served.reshape(wanted.shape) == pytest.approx(wanted, abs=1e-5)
    if n == 1:
        assert isinstance(loaded.activation_fn, nn.Sigmoid)
        plain = pipeline("text-classification", str(tmp_path), device="cpu")
        asked = [{"text": query, "text_pair": answer} for query, answer in PAIRS]
        assert [found["score"] for found in plain(asked)] == pytest.approx(
            served, abs=1e-5
        )


@pytest.mark.parametrize(("name", "false_token"), [("Llama", 9), ("Llama, tied", None)])
def test_a_language_model_that_scores_two_tokens(
    name: str, false_token: int | None, tmp_path: Path
) -> None:
    """Its score is the logit of token 5, less that of another."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    language_model(name).save_pretrained(tmp_path / "plain")
    tokenizer().save_pretrained(tmp_path / "plain")
    transformer = Transformer(
        str(tmp_path / "plain"), transformer_task="text-generation"
    )
    model = CrossEncoder(
        modules=[transformer, LogitScore(5, false_token)], device="cpu"
    )
    asked = [("w1 w2", "w3 w4"), ("w5", "w9 w2 w4"), ("w7 w7", "w1")] * 10
    logits = model.predict(asked, activation_fn=nn.Identity()).astype(np.float64)[
        :, None
    ]
    scaler = SIGMOIDS.fit(logits, labels_of(logits))
    assert fold(model, scaler) is model
    loaded = reloaded(model, tmp_path / "folded")
    assert loaded.predict(asked) == pytest.approx(
        scaler.predict_proba(logits)[:, 0], abs=1e-6
    )
    with pytest.raises(ValueError, match="folded only once"):
        fold(loaded, scaler)


def scaler_of(scaler: Any) -> Any:
    scaler.temperature_ = 1.7
    return scaler


def test_refused(rerankers: Any) -> None:
    from sentence_transformers import SentenceTransformer

    softmaxes = scaler_of(TemperatureScaling())
    sigmoids = scaler_of(TemperatureScaling(multi_label=True))
    model = copy.deepcopy(rerankers[1])
    before = weights(model)

    def is_refused(
        each: Any, scaler: Any, message: str, error: type[Exception] = ValueError
    ) -> None:
        with pytest.raises(error, match=message):
            fold(each, scaler)

    is_refused(
        model,
        softmaxes,
        r"got num_labels=1 and activation_fn=Sigmoid\(\); fit the scaler with ",
    )
    is_refused(
        rerankers[3],
        sigmoids,
        r"multi-label classifier, .* num_labels=3 and activation_fn=Identity",
    )
    model.activation_fn = nn.Tanh()
    is_refused(
        model,
        sigmoids,
        r"apply a sigmoid, a softmax or nothing .* got activation_fn=Tanh\(\)",
    )
    model.activation_fn = nn.Sigmoid()
    assert_same(weights(model), before)
    is_refused(fold(model, sigmoids), sigmoids, "to be folded only once")
    encoder = SentenceTransformer(modules=[nn.Linear(1, 1)], device="cpu")
    is_refused(
        encoder,
        sigmoids,
        "expected model to be a classifier, got SentenceTransformer",
        TypeError,
    )
    # A plain model with one output may be a regression, and says nothing of a sigmoid.
    message = "for one sigmoid set problem_type='multi_label_classification'"
    is_refused(tiny_bert(num_labels=1), softmaxes, message)
