"""Folding in every class that transformers maps to classification: exact, saved, loaded and unfolded bit for bit.

`tests.helpers.architectures` lists the few that are refused or cannot be built here, each with the reason.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_calib import fold, unfold
from hf_calib.export.folder import save_folded
from hf_calib.export.heads import float64_logits, head_loses_bias, synthetic_batch
from hf_calib.scaling import MatrixScaling
from tests.helpers.architectures import (
    ARCHITECTURES,
    NOT_BUILT,
    REFUSED,
    assert_same_weights,
    batch_for,
    build,
    class_of,
    classifiers,
    logits_of,
    refused,
    weights_of,
)

HEADS = {class_of(name): head for name, head in ARCHITECTURES.items()}
# One of each kind of head, and those that are used most.
QUICK = {
    *map(class_of, ("Bert", "ModernBert", "DebertaV2", "DistilBert", "ViT", "Swin")),
    *map(class_of, ("Roberta", "Bart", "T5", "GPT2", "Llama", "XLNet")),
    *map(class_of, ("DeiTWithTeacher", "ResNet", "SwiftFormer")),
    *("T5ForTokenClassification", "LevitForImageClassificationWithTeacher"),
    "PPLCNetForImageClassification",
}
# Others that are used much, or whose models are unlike those.
ALWAYS = {
    *HEADS,
    *(
        "ModernBertForTokenClassification",
        "DebertaV2ForTokenClassification",
        "BertForTokenClassification",
    ),
    *(
        "Qwen3ForSequenceClassification",
        "Qwen3ForTokenClassification",
        "T5ForTokenClassification",
    ),
    *("Gemma2ForSequenceClassification", "Gemma3TextForSequenceClassification"),
    *(
        "SiglipForImageClassification",
        "Siglip2ForImageClassification",
        "ConvNextV2ForImageClassification",
    ),
    *("LevitForImageClassificationWithTeacher", "PPLCNetForImageClassification"),
}


def matrix(*, bias: bool) -> MatrixScaling:
    rng, scaler = np.random.default_rng(0), MatrixScaling()
    scaler.weight_ = np.eye(5) / 1.7 + 0.1 * rng.normal(size=(5, 5))
    scaler.bias_ = rng.normal(size=5) * bias
    return scaler


def how_often(name: str) -> list[pytest.MarkDecorator]:
    if name in QUICK:
        return []
    return [pytest.mark.slow if name in ALWAYS else pytest.mark.deep]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=how_often(name)) for name in classifiers()]
)
def test_folding_is_exact_and_can_be_undone(name: str, tmp_path: Path) -> None:
    reason = next(
        (reason for prefix, reason in NOT_BUILT.items() if name.startswith(prefix)),
        None,
    )
    if reason is not None:
        pytest.skip(reason)
    try:
        model = build(name)
    except Exception as error:
        if name in ALWAYS:
            raise
        pytest.skip(f"its config takes other names than most: {error}")
    batch = batch_for(model)
    scaler = matrix(bias=not head_loses_bias(model, 5))
    if name in REFUSED:
        with refused(model, (ValueError, TypeError), re.escape(REFUSED[name])):
            fold(model, scaler, batch=batch)
        return
    before = weights_of(model)
    inputs = synthetic_batch(model) if batch is None else batch
    unseen = logits_of(model).double().numpy() if name in HEADS else None
    with torch.no_grad():
        logits = float64_logits(model, inputs)
        save_folded(model, scaler, tmp_path / "m", batch=batch, processing_class=None)
        scaled = float64_logits(model, inputs)
    assert logits.shape[-1] == 5
    wanted = scaler.transform(logits)
    assert np.abs(scaled - wanted).max() <= 1e-5 * np.abs(wanted).max()
    changed = {
        n
        for n, value in model.state_dict().items()
        if not torch.equal(value, before[n])
    }
    head = model.config.calibration["head"]
    assert {n.rpartition(".")[0] for n in changed} == set(head)
    assert head == HEADS.get(name, head)

    loaded = type(model).from_pretrained(tmp_path / "m").eval()
    assert_same_weights(loaded, weights_of(model))
    if unseen is not None:
        wanted = scaler.transform(unseen)
        assert (
            np.abs(logits_of(model).double().numpy() - wanted).max()
            <= 2e-6 * np.abs(wanted).max()
        )
        # A copy, since weights that are mapped from the file lie unaligned, where products round differently.
        assert torch.equal(logits_of(copy.deepcopy(loaded)), logits_of(model))
        with refused(
            loaded,
            ValueError,
            "folded only once, got a model with matrix scaling in its head",
        ):
            fold(loaded, scaler, batch=batch)
    assert_same_weights(unfold(loaded), before)


def test_the_lists_name_classes_that_exist() -> None:
    names = set(classifiers())
    assert names >= set(REFUSED) | ALWAYS
    assert all(any(name.startswith(prefix) for name in names) for prefix in NOT_BUILT)
