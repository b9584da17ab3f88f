"""A temperature in a language model: in its head, or in its last norm where the head is the embedding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_calib
from hf_calib.export.folder import save_folded
from hf_calib.export.heads import has_tied_head
from hf_calib.scaling import TemperatureScaling
from tests.language_models.models import ARCHITECTURES, DECODER, language_model

T = 1.7
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))
TEMPERATURE = TemperatureScaling()
TEMPERATURE.temperature_ = T


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_logits_are_divided_and_loaded_so_and_come_back(
    name: str, tmp_path: Path
) -> None:
    model = language_model(name)
    before, weights = logits_of(model), copy.deepcopy(model.state_dict())
    save_folded(model, TEMPERATURE, tmp_path, batch=None, processing_class=None)
    changed = [
        key
        for key, value in model.state_dict().items()
        if not torch.equal(value, weights[key])
    ]
    (head,) = model.config.calibration["head"]
    assert {key.rpartition(".")[0] for key in changed} == {head}
    assert ("norm" in head or "ln_f" in head) == has_tied_head(model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_divided(logits_of(loaded), before)
    assert has_tied_head(loaded) == has_tied_head(model)
    hf_calib.unfold(loaded)
    assert all(
        torch.equal(value, loaded.state_dict()[key]) for key, value in weights.items()
    )


def assert_divided(found: torch.Tensor, before: torch.Tensor) -> None:
    assert float((found - before / T).abs().max() / before.abs().max()) < 1e-6


def test_a_norm_without_a_weight_is_refused_with_the_way_out() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.OlmoConfig(**DECODER, tie_word_embeddings=True)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    before = logits_of(model)
    message = r"got OlmoForCausalLM, whose head is .*; set model.generation_config.temperature = 1.7"
    with pytest.raises(ValueError, match=message):
        hf_calib.fold_temperature(model, T)
    assert torch.equal(logits_of(model), before)
