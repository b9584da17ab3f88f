"""SetFit: a temperature is folded into either of its heads, and comes back with the saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from hf_calib import fold, fold_temperature
from hf_calib.scaling import PriorCorrection, TemperatureScaling, VectorScaling
from tests.helpers.tiny import sequences, text_of, tiny_bert, tokenizer

setfit = pytest.importorskip("setfit", reason="SetFit has an environment of its own: make test-trainers")

pytestmark = pytest.mark.filterwarnings(
    "ignore:The `get_sentence_embedding_dimension`:FutureWarning"
)  # in SetFit 1.2
TEXTS = [text_of(ids) for ids in sequences(tiny_bert(), 120, seed=3)["input_ids"]]
SCALER = TemperatureScaling()
SCALER.temperature_ = 1.7
CASES = [("sklearn", 2), ("sklearn", 4), ("torch", 2), ("torch", 4)]


def model_of(kind: str, n_classes: int, folder: Path) -> Any:
    """A tiny encoder with a head that is sure of itself."""
    tiny_bert().bert.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if kind == "torch":
        settings = {"use_differentiable_head": True, "head_params": {"out_features": n_classes}}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = setfit.SetFitModel.from_pretrained(str(folder), device="cpu", **settings)
        model.model_head.linear.weight.data *= 2
        return model
    model = setfit.SetFitModel.from_pretrained(str(folder), device="cpu")
    model.model_head = LogisticRegression(C=1e3, max_iter=5000)
    labels = np.arange(len(TEXTS)) % n_classes
    model.model_head.fit(model.encode(TEXTS), labels)
    return model


def log_probs(model: Any) -> np.ndarray:
    return np.log(model.predict_proba(TEXTS, as_numpy=True).astype(np.float64))


@pytest.mark.parametrize(("kind", "n_classes"), CASES)
def test_a_temperature(kind: str, n_classes: int, tmp_path: Path) -> None:
    model = model_of(kind, n_classes, tmp_path / "made")
    logits = log_probs(model)
    assert fold(model, SCALER) is model
    wanted = SCALER.predict_proba(logits)
    assert np.abs(wanted - np.exp(logits)).max() > 0.01
    np.testing.assert_allclose(np.exp(log_probs(model)), wanted, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    loaded = setfit.SetFitModel.from_pretrained(str(tmp_path / "saved"), device="cpu")
    np.testing.assert_allclose(np.exp(log_probs(loaded)), wanted, atol=1e-5)
    with pytest.raises(ValueError, match="folded only once, got a head with temperature in it"):
        fold_temperature(loaded, 2.0)


@pytest.mark.parametrize(("kind", "n_classes"), CASES[::3])
def test_a_prior_correction(kind: str, n_classes: int, tmp_path: Path) -> None:
    model = model_of(kind, n_classes, tmp_path)
    logits = log_probs(model)
    even = np.full(n_classes, 1 / n_classes)
    target = np.arange(1, n_classes + 1) / np.arange(1, n_classes + 1).sum()
    scaler = PriorCorrection(even, target, SCALER)
    fold(model, scaler)
    np.testing.assert_allclose(np.exp(log_probs(model)), scaler.predict_proba(logits), atol=1e-5)


def test_what_does_not_fold(tmp_path: Path) -> None:
    model = model_of("sklearn", 4, tmp_path / "one")
    logits, labels = log_probs(model), np.arange(len(TEXTS)) % 4
    coef = model.model_head.coef_.copy()
    with pytest.raises(
        ValueError, match="multiply all logits of a SetFitModel alike, got a factor for each class"
    ):
        fold(model, VectorScaling().fit(logits, labels))
    with pytest.raises(ValueError, match="fitted on 4 classes, as the model has, got 2"):
        fold(model, PriorCorrection([0.5, 0.5], [0.9, 0.1]))
    np.testing.assert_array_equal(model.model_head.coef_, coef)
    several = setfit.SetFitModel.from_pretrained(
        str(tmp_path / "one"), device="cpu", multi_target_strategy="one-vs-rest"
    )
    with pytest.raises(ValueError, match="one linear head, with one label a row"):
        fold_temperature(several, 2.0)
