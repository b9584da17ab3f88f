"""Unfolding: the weights from before the fold, bit for bit, or a refusal that leaves the model as it was."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
)

from hf_calib import fold, unfold
from hf_calib.commands.options import Unfold
from hf_calib.export.folder import KEPT_HEAD as FILE
from hf_calib.export.folder import save_folded
from hf_calib.scaling import (
    MatrixScaling,
    PriorCorrection,
    TemperatureScaling,
    VectorScaling,
    save_map,
)
from hf_calib.scaling.saved_map import MAP_NAME
from tests.helpers.architectures import (
    assert_same_weights,
    logits_of,
    refused,
    weights_of,
)
from tests.helpers.architectures import bert as new_bert
from tests.helpers.hub_server import Hub
from tests.helpers.tiny import tiny_bert, tokenizer

PLAIN = new_bert()
RNG = np.random.default_rng(0)


def scaler_of(kind: Any, **fitted: Any) -> Any:
    scaler = kind()
    for name, value in fitted.items():
        setattr(scaler, f"{name}_", np.array(value))
    return scaler


BIAS = RNG.normal(size=5)
TEMPERATURE = scaler_of(TemperatureScaling, temperature=1.7)
VECTOR = scaler_of(VectorScaling, weight=[0.3, 1.7, 2.0, 0.1, -1.0], bias=BIAS)
MATRIX = scaler_of(
    MatrixScaling, weight=np.eye(5) + 0.3 * RNG.normal(size=(5, 5)), bias=BIAS
)
SINGULAR = scaler_of(MatrixScaling, weight=np.ones((5, 5)), bias=BIAS)


def bert(**changes: Any) -> Any:
    return new_bert(**changes) if changes else copy.deepcopy(PLAIN)


def save(model: Any, scaler: Any, folder: Path, processing_class: Any = None) -> Path:
    save_folded(model, scaler, folder, batch=None, processing_class=processing_class)
    return folder


def unfold_folder(source: str | Path, output: Path, **options: Any) -> None:
    """`hf-calib unfold`."""
    Unfold(source=str(source), output=output, **options)()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a model with a matrix folded in, its head kept."""
    return save(bert(), MATRIX, tmp_path / "m", tokenizer())


def loaded(folder: Path) -> Any:
    return BertForSequenceClassification.from_pretrained(folder)


# ---- The head that was kept ----


@pytest.mark.parametrize(
    "scaler",
    [VECTOR, MATRIX, SINGULAR, PriorCorrection([0.2] * 5, [0.6] + [0.1] * 4, VECTOR)],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_bit_for_bit(scaler: Any, has_bias: bool, tmp_path: Path) -> None:
    """Also where folding has added a bias, or again."""
    plain = bert()
    if not has_bias:
        plain.classifier.register_parameter("bias", None)
    before = weights_of(plain)
    model = loaded(save(plain, scaler, tmp_path / "m"))
    assert unfold(model) is model
    assert_same_weights(model, before)
    assert not hasattr(model.config, "calibration")
    again = loaded(save(model, VECTOR, tmp_path / "again"))
    assert_same_weights(unfold(again), before)


def test_folding_again_gives_the_folded_weights(folder: Path) -> None:
    folded = loaded(folder).train()
    model = unfold(copy.deepcopy(folded))
    assert model.training
    assert_same_weights(fold(model, MATRIX), weights_of(folded))
    assert (
        model.config.calibration
        == json.loads((folder / "config.json").read_text())["calibration"]
    )
    # Not where servers look for weights.
    assert {path.name for path in folder.glob("*.safetensors")} == {"model.safetensors"}


@pytest.mark.parametrize(
    "broken", ["missing", "empty", "other shapes", "no hash", "trained"]
)
def test_a_file_that_is_not_of_these_weights(folder: Path, broken: str) -> None:
    kept = load_file(folder / FILE)
    if broken == "missing":
        (folder / FILE).unlink()
    elif broken == "empty":
        (folder / FILE).write_bytes(b"")
    elif broken == "other shapes":
        with safe_open(folder / FILE, "pt") as opened:
            metadata = opened.metadata()
        weight = kept["classifier.weight"][:, :3].contiguous()
        save_file({**kept, "classifier.weight": weight}, folder / FILE, metadata)
    elif broken == "no hash":
        save_file(kept, folder / FILE)
    else:  # as a stock Trainer leaves it: the config and the head of the folded weights
        model = loaded(folder)
        with torch.no_grad():
            model.classifier.weight += 0.1
        model.save_pretrained(folder)
    message = "expected the head from before the fold to be kept with the model, .*; load the model that"
    with refused(model := loaded(folder), ValueError, message):
        unfold(model)


def test_refused_models() -> None:
    with refused(
        model := bert(),
        ValueError,
        "to have a calibrator folded into its head, got none; there is",
    ):
        unfold(model)
    with refused(
        model := fold(bert(), VECTOR).bfloat16(),
        ValueError,
        "float32 or float64 weights",
    ):
        unfold(model)
    with refused(
        folded := fold(bert(), VECTOR), ValueError, "undo it with hf_calib.unfold"
    ):
        fold(folded, VECTOR)
    folded.classifier = torch.nn.Linear(16, 3)  # a head that was replaced
    with refused(folded, ValueError, "the head from before the fold to be kept"):
        unfold(folded)


# ---- The command, on folders of other kinds and on the Hub ----


def test_names_on_the_hub(
    folder: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept head and the map are looked for there, in the revision that the model was loaded from."""
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache")
    )
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*.*")
    }
    without_head = {
        name: content for name, content in files.items() if name != FILE.as_posix()
    }
    # The head that is kept needs no map, so that another one here is not read in its place.
    save_map(scaler_of(MatrixScaling, weight=np.eye(5), bias=BIAS), tmp_path)
    other = {
        MAP_NAME: (tmp_path / MAP_NAME).read_bytes(),
        "pytorch_model.bin": b"pickled",
    }
    hub.files["me/model"] = {"main": {**files, **other}, "old": without_head}
    model = AutoModelForSequenceClassification.from_pretrained("me/model")
    assert_same_weights(unfold(model), weights_of(bert()))
    model = AutoModelForSequenceClassification.from_pretrained(
        "me/model", revision="old"
    )
    with refused(model, ValueError, "got none for these weights in me/model"):
        unfold(model, revision="old")
    unfold_folder("me/model", tmp_path / "out")
    assert_same_weights(loaded(tmp_path / "out"), weights_of(bert()))
    assert not [path for _, path, _ in hub.requests if path.endswith(".bin")]


def test_code_that_comes_with_the_model(tmp_path: Path) -> None:
    source = tmp_path / "remote"
    model = tiny_bert()
    model.save_pretrained(source)
    tokenizer().save_pretrained(source)
    (source / "modeling_mine.py").write_text(
        "from transformers import BertConfig, BertForSequenceClassification\n"
        "class MineConfig(BertConfig):\n"
        "    model_type = 'mine'\n"
        "class MineForSequenceClassification(BertForSequenceClassification):\n"
        "    config_class = MineConfig\n"
    )
    name = "AutoModelForSequenceClassification"
    own = {"model_type": "mine", "architectures": ["MineForSequenceClassification"]}
    own["auto_map"] = {
        "AutoConfig": "modeling_mine.MineConfig",
        name: f"modeling_mine.Mine{name[9:]}",
    }
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **own}))
    load = AutoModelForSequenceClassification.from_pretrained
    theirs = load(source, trust_remote_code=True).eval()
    logits = logits_of(theirs)
    save(theirs, TEMPERATURE, tmp_path / "m", tokenizer())
    torch.testing.assert_close(logits_of(theirs), logits / 1.7, rtol=1e-6, atol=1e-6)
    with pytest.raises(
        ValueError,
        match=r"expected the model to be loadable, got .* contains custom code",
    ):
        unfold_folder(tmp_path / "m", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    unfold_folder(tmp_path / "m", tmp_path / "out", trust_remote_code=True)
    back = load(tmp_path / "out", trust_remote_code=True)
    assert type(back).__name__ == "MineForSequenceClassification"
    assert_same_weights(back, weights_of(model))


def test_what_is_copied_and_what_does_not_stay_in_the_output(
    folder: Path, tmp_path: Path
) -> None:
    left_out = [
        "README.md",
        "decisions.json",
        "training_args.bin",
        "model.onnx",
        ".hidden",
        "_scratch",
    ]
    for name in (*left_out, "bpe.codes", "sentence_bert_config.json"):
        (folder / name).write_text(name)
    unfold_folder(folder, tmp_path / "out")
    files = {
        "config.json",
        "model.safetensors",
        "calibration.json",
        "bpe.codes",
        "sentence_bert_config.json",
    }
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == files | {"tokenizer.json", "tokenizer_config.json"}
