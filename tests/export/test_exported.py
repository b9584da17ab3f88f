"""A folded model, exported by transformers, gives the calibrated probabilities in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from scipy.special import expit
from transformers.exporters import OnnxConfig, OnnxExporter

from hf_calib.export import fold
from hf_calib.scaling import (
    PerLabelTemperatureScaling,
    TemperatureScaling,
    VectorScaling,
)
from tests.helpers.architectures import build
from tests.helpers.tiny import tiny_bert

RNG = np.random.default_rng(0)


def fitted(scaler: Any, n_classes: int) -> Any:
    logits = RNG.normal(scale=2, size=(300, n_classes))
    labels = (logits + RNG.gumbel(size=logits.shape)).argmax(axis=1)
    return scaler.fit(2 * logits, labels)


def fitted_by_label(n_labels: int) -> Any:
    logits = RNG.normal(scale=2, size=(300, n_labels))
    labels = RNG.random(logits.shape) < expit(logits)
    return PerLabelTemperatureScaling().fit(2 * logits, labels)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[int], Any]]] = {
    "texts": (tiny_bert, lambda n: fitted(VectorScaling(), n)),
    "several labels": (
        lambda: tiny_bert(problem_type="multi_label_classification"),
        fitted_by_label,
    ),
    "tokens": (lambda: tiny_bert("Token"), lambda n: fitted(TemperatureScaling(), n)),
    "images": (
        lambda: build("ViT", image_size=16),
        lambda n: fitted(VectorScaling(), n),
    ),
    "decoder": (
        lambda: build("Qwen3", vocab_size=64),
        lambda n: fitted(TemperatureScaling(), n),
    ),
}


def batch_of(model: Any, n_rows: int, length: int) -> dict[str, torch.Tensor]:
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(n_rows, 3, 16, 16)}
    ids = torch.randint(5, 60, (n_rows, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# The tree specs of torch 2.13 cause it in copyreg.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.`:FutureWarning")
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_gives_the_calibrated_probabilities_of_any_batch(
    kind: str, tmp_path: Path
) -> None:
    make, fitted_to = KINDS[kind]
    model = make().eval()
    plain = make().eval()
    plain.load_state_dict(model.state_dict())
    scaler = fitted_to(model.config.num_labels)
    fold(model, scaler)
    config = OnnxConfig(dynamic=True)
    OnnxExporter().export(model, batch_of(model, 2, 8), config=config).save_pretrained(
        tmp_path
    )

    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    names = [each.name for each in session.get_inputs()]
    for n_rows, length in ((1, 1), (1, 5), (3, 12), (7, 4)):
        batch = batch_of(model, n_rows, length)
        with torch.no_grad():
            logits = plain(**batch).logits.double().numpy()
        wanted = scaler.predict_proba(logits)
        inputs = {name: batch[name].numpy() for name in names}
        found = torch.from_numpy(session.run(["logits"], inputs)[0]).double()
        probs = found.sigmoid() if scaler.multi_label else found.softmax(dim=-1)
        np.testing.assert_allclose(probs.numpy(), wanted, atol=1e-5)
