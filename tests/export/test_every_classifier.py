"""Folding in every class that transformers maps to classification: exact, saved, loaded and unfolded bit for bit.

`tests.helpers.every_classifier` lists the few that are refused or cannot be built here, each with the reason.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_calib import fold, unfold
from hf_calib.export.heads import float64_logits, synthetic_batch
from hf_calib.export.saving import save_folded
from hf_calib.scaling import MatrixScaling
from hf_calib.scaling.affine import FloatArray
from tests.helpers.architectures import assert_same_weights, weights_of
from tests.helpers.every_classifier import NOT_BUILT, REFUSED, batch_for, classifiers, tiny

# Those that are used most, and those whose heads are unlike the others.
ALWAYS = {
    *("ModernBertForSequenceClassification", "ModernBertForTokenClassification"),
    *("DebertaV2ForSequenceClassification", "DebertaV2ForTokenClassification", "BertForTokenClassification"),
    *("EuroBertForSequenceClassification", "Qwen3ForSequenceClassification", "Qwen3ForTokenClassification"),
    *("Gemma2ForSequenceClassification", "Gemma3TextForSequenceClassification", "T5ForTokenClassification"),
    *("SiglipForImageClassification", "Siglip2ForImageClassification", "ConvNextV2ForImageClassification"),
    *("LevitForImageClassificationWithTeacher", "PPLCNetForImageClassification", "ViTForImageClassification"),
}

SCALER = MatrixScaling()
SCALER.weight_ = np.eye(5) / 1.7 + 0.1 * np.random.default_rng(0).normal(size=(5, 5))
SCALER.bias_ = np.zeros(5)  # heads of decoders keep none


def wanted(logits: FloatArray) -> FloatArray:
    return logits @ SCALER.weight_.T


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        pytest.param(*row, id=row[1], marks=() if row[1] in ALWAYS else pytest.mark.deep)
        for row in classifiers()
    ],
)
def test_folding_is_exact_and_can_be_undone(model_type: str, name: str, tmp_path: Path) -> None:
    reason = next((reason for prefix, reason in NOT_BUILT.items() if name.startswith(prefix)), None)
    if reason is not None:
        pytest.skip(reason)
    model = tiny(model_type, name)
    batch = batch_for(model)
    before = weights_of(model)
    if name in REFUSED:
        with pytest.raises((ValueError, TypeError), match=re.escape(REFUSED[name])):
            fold(model, SCALER, batch=batch)
        assert_same_weights(model, before)
        return
    inputs = synthetic_batch(model) if batch is None else batch
    with torch.no_grad():
        logits = float64_logits(model, inputs)
        save_folded(model, SCALER, tmp_path / "m", batch=batch, processing_class=None)
        scaled = float64_logits(model, inputs)
    assert logits.shape[-1] == 5
    assert np.abs(scaled - wanted(logits)).max() <= 1e-5 * np.abs(wanted(logits)).max()

    loaded = type(model).from_pretrained(tmp_path / "m").eval()
    assert_same_weights(loaded, weights_of(model))
    assert_same_weights(unfold(loaded), before)


def test_the_lists_name_classes_that_exist() -> None:
    names = {name for _, name in classifiers()}
    assert set(REFUSED) <= names
    assert names >= ALWAYS
    assert all(any(name.startswith(prefix) for name in names) for prefix in NOT_BUILT)
