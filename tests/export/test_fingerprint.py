"""The fingerprint ties calibration.json and decisions.json to the weights beside them."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_calib.decisions import CostRule, Decisions
from hf_calib.export.folder import fingerprint, hash_of
from tests.helpers.tiny import tiny_bert, tiny_trainer


def test_a_folded_model_is_the_same_when_it_is_loaded_again(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path / "out")
    trainer.fit_temperature()
    trainer.save_calibrated_model(tmp_path / "calibrated")
    saved = json.loads((tmp_path / "calibrated" / "calibration.json").read_text())["fingerprint"]
    served = AutoModelForSequenceClassification.from_pretrained(tmp_path / "calibrated")
    assert fingerprint(served) == saved
    assert fingerprint(trainer.model) != saved
    assert "fingerprint" not in served.config.calibration


@pytest.mark.parametrize("change", ["a value", "a dtype", "a shape", "two names"])
def test_any_change_of_the_weights_shows(change: str) -> None:
    model = tiny_bert()
    before = fingerprint(model)
    with torch.no_grad():
        if change == "a value":
            model.classifier.bias[0] = torch.nextafter(model.classifier.bias[0], torch.tensor(1.0))
        elif change == "a dtype":
            model.classifier.half()
        elif change == "a shape":
            model.classifier.weight = torch.nn.Parameter(model.classifier.weight.T)
        else:
            first, second = model.bert.encoder.layer[0].attention.self.query, model.classifier
            first.bias, second.bias = second.bias, first.bias
    assert fingerprint(model) != before


def test_decisions_remember_the_weights(tmp_path: Path) -> None:
    known = Decisions(CostRule([[0, 1], [1, 0]]), ("a", "b"), fingerprint="0" * 64)
    known.save(tmp_path)
    assert Decisions.from_pretrained(tmp_path).fingerprint == "0" * 64
    record = known.to_dict()
    del record["fingerprint"]  # as versions before 0.2 wrote it
    assert Decisions.from_dict(record).fingerprint is None


def test_it_is_the_same_in_every_version_and_in_any_order() -> None:
    tensors = {"a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3)}
    tensors |= {"b": torch.tensor([1.0], dtype=torch.bfloat16), "n": torch.tensor(2)}
    content = b"a.weight torch.float32 (2, 3)\n" + tensors["a.weight"].numpy().tobytes()
    content += b"b torch.bfloat16 (1,)\n\x80\x3f" + b"n torch.int64 ()\n\x02" + bytes(7)
    found = {hash_of(tensors), hash_of(dict(reversed(tensors.items())))}
    assert found == {sha256(content).hexdigest()}
