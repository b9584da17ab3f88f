"""Unfolding: the weights from before the fold, bit for bit, or a refusal that leaves the model as it was."""

from __future__ import annotations

import copy
import json
import shutil
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
    BertForTokenClassification,
    ViTImageProcessor,
)

from hf_calib import fold, unfold
from hf_calib._files import whole_folder
from hf_calib.commands.options import Unfold
from hf_calib.export.folder import KEPT_HEAD as FILE
from hf_calib.export.folder import read_kept_head, replace_model
from hf_calib.export.saving import save_folded
from hf_calib.scaling import MatrixScaling, PriorCorrection, TemperatureScaling, VectorScaling, save_map
from hf_calib.scaling.saved_map import MAP_NAME
from tests.helpers.architectures import assert_same_weights, build, logits_of, refused, weights_of
from tests.helpers.architectures import bert as new_bert
from tests.helpers.hub_server import Hub
from tests.helpers.tiny import tiny_bert, tokenizer
from tests.helpers.trained import trained

PLAIN = new_bert()
RNG = np.random.default_rng(0)
MATRIX = np.eye(5) + 0.3 * RNG.normal(size=(5, 5))
BIAS = RNG.normal(size=5)


def scaler_of(kind: Any, weight: Any, bias: Any = None) -> Any:
    scaler = kind()
    scaler.weight_, scaler.bias_ = np.array(weight), np.zeros(5) if bias is None else np.array(bias)
    return scaler


def temperature(value: float) -> TemperatureScaling:
    return TemperatureScaling(grid=[value]).fit([[1.0, 0.0]] * 3, [0, 0, 1])


VECTOR = scaler_of(VectorScaling, [0.3, 1.7, 2.0, 0.1, -1.0], BIAS)
SHARES = {"train_prior": [0.2] * 5, "target_prior": [0.1, 0.3, 0.3, 0.1, 0.2]}
SCALERS = {
    "temperature": temperature(1.7),
    "vector": VECTOR,
    "matrix": scaler_of(MatrixScaling, MATRIX, BIAS),
    "prior": PriorCorrection(**SHARES),
    "vector and prior": PriorCorrection(scaler=VECTOR, **SHARES),
    "matrix and prior": PriorCorrection(scaler=scaler_of(MatrixScaling, MATRIX, BIAS), **SHARES),
}


def bert(**changes: Any) -> Any:
    return new_bert(**changes) if changes else copy.deepcopy(PLAIN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a model with a matrix folded in, its head kept."""
    save_folded(bert(), SCALERS["matrix"], tmp_path / "m", batch=None, processing_class=tokenizer())
    return tmp_path / "m"


def loaded(folder: Path) -> Any:
    return BertForSequenceClassification.from_pretrained(folder)


class TestKept:
    def test_bit_for_bit(self, folder: Path) -> None:
        model = loaded(folder)
        assert unfold(model) is model
        assert_same_weights(model, weights_of(bert()))
        assert not hasattr(model.config, "calibration")

    def test_of_a_singular_map(self, tmp_path: Path) -> None:
        scaler = scaler_of(MatrixScaling, np.ones((5, 5)))
        save_folded(bert(), scaler, tmp_path / "m", batch=None, processing_class=None)
        model = loaded(tmp_path / "m")
        unfold(model)
        assert_same_weights(model, weights_of(bert()))

    def test_an_added_bias_is_removed(self, tmp_path: Path) -> None:
        plain = bert()
        plain.classifier.register_parameter("bias", None)
        before = weights_of(plain)
        save_folded(plain, VECTOR, tmp_path / "m", batch=None, processing_class=None)
        model = loaded(tmp_path / "m")
        assert model.classifier.bias is not None
        unfold(model)
        assert_same_weights(model, before)

    def test_not_where_servers_look_for_weights(self, folder: Path) -> None:
        assert {path.name for path in folder.glob("*.safetensors")} == {"model.safetensors"}
        kept = load_file(folder / FILE)
        assert {name: value.dtype for name, value in kept.items()} == {
            "classifier.weight": torch.float32,
            "classifier.bias": torch.float32,
        }

    @pytest.mark.parametrize(
        "broken", ["missing", "empty", "other names", "other shapes", "no hash", "trained"]
    )
    def test_a_file_that_is_not_of_these_weights(self, folder: Path, broken: str) -> None:
        kept = load_file(folder / FILE)
        with safe_open(folder / FILE, "pt") as opened:
            metadata = opened.metadata()
        if broken == "missing":
            (folder / FILE).unlink()
        elif broken == "empty":
            (folder / FILE).write_bytes(b"")
        elif broken == "other names":
            save_file({"bert.pooler.dense.weight": kept["classifier.weight"]}, folder / FILE, metadata)
        elif broken == "other shapes":
            kept["classifier.weight"] = kept["classifier.weight"][:, :3].contiguous()
            save_file(kept, folder / FILE, metadata)
        elif (
            broken == "trained"
        ):  # as a stock Trainer leaves it: the config and the head of the folded weights
            model = loaded(folder)
            with torch.no_grad():
                model.classifier.weight += 0.1
            model.save_pretrained(folder)
        else:
            save_file(kept, folder / FILE)
        message = (
            "expected the head from before the fold to be kept beside the model, .*; load the model that"
        )
        with refused(model := loaded(folder), ValueError, message):
            unfold(model)

    def test_is_the_first_head_after_folding_again(self, folder: Path, tmp_path: Path) -> None:
        model = unfold(loaded(folder))
        save_folded(model, VECTOR, tmp_path / "again", batch=None, processing_class=None)
        model = loaded(tmp_path / "again")
        unfold(model)
        assert_same_weights(model, weights_of(bert()))


class TestSavedOver:
    def test_an_older_models_head_does_not_stay(self, folder: Path, tmp_path: Path) -> None:
        plain = tmp_path / "plain"
        bert().save_pretrained(plain)
        (folder / "calibration" / "report.md").write_text("mine")
        with whole_folder(folder, replace_model) as made:
            shutil.copytree(plain, made, dirs_exist_ok=True)
        assert [path.name for path in (folder / "calibration").iterdir()] == ["report.md"]

    def test_as_trained_weights_over_a_folded_folder(self, tmp_path: Path) -> None:
        trainer = trained(tmp_path / "out")
        trainer.save_calibrated_model(tmp_path / "m")
        head = trainer.model.classifier.weight.detach().clone()
        found = unfold(loaded(tmp_path / "m"))
        assert torch.equal(found.classifier.weight, head)
        assert found.config.calibration == {"loss": "focal", "loss_kwargs": {"gamma": 3.0}}
        trainer.save_model(str(tmp_path / "m"))
        model = loaded(tmp_path / "m")
        with refused(model, ValueError, "expected model to have a map folded into its head, got none"):
            unfold(model)
        model.config.calibration["folded"] = True  # as a config from elsewhere would say
        model.config.calibration["head"] = ["classifier"]
        with refused(model, ValueError, "expected the head from before the fold to be kept"):
            unfold(model)


class TestRefused:
    def test_models(self) -> None:
        with refused(
            model := bert(), ValueError, "expected model to have a map folded into its head, got none"
        ):
            unfold(model)
        with pytest.raises(TypeError, match="expected model to be a transformers model, got Linear"):
            unfold(torch.nn.Linear(2, 2))
        with refused(model := fold(bert(), VECTOR).bfloat16(), ValueError, "float32 or float64 weights"):
            unfold(model)
        with refused(folded := fold(bert(), VECTOR), ValueError, "undo it with hf_calib.unfold"):
            fold(folded, VECTOR)

    def test_a_head_that_was_replaced(self) -> None:
        model = fold(bert(), VECTOR)
        model.classifier = torch.nn.Linear(16, 3)
        with refused(model, ValueError, "the head from before the fold to be kept"):
            unfold(model)
        model.classifier = torch.nn.Identity()
        with refused(model, ValueError, r"the layers that config.calibration names, got \['classifier'\]"):
            unfold(model)


@pytest.mark.parametrize("left_out", ["weight", "bias"])
def test_a_kept_head_without_a_weight_is_none(left_out: str, folder: Path) -> None:
    """Without its bias it is one that had none; without its weight it is damaged."""
    kept = load_file(folder / FILE)
    with safe_open(folder / FILE, "pt") as opened:
        metadata = opened.metadata()
    save_file({k: v for k, v in kept.items() if not k.endswith(left_out)}, folder / FILE, metadata=metadata)
    head = {k: v for k, v in loaded(folder).state_dict().items() if k in kept}
    assert (read_kept_head(folder / FILE, head) is None) == (left_out == "weight")


def test_folding_again_gives_the_folded_weights(folder: Path) -> None:
    folded = loaded(folder)
    model = unfold(copy.deepcopy(folded))
    assert_same_weights(fold(model, SCALERS["matrix"]), weights_of(folded))
    record = json.loads((folder / "config.json").read_text())["calibration"]
    assert model.config.calibration == record
    assert record.keys() == {"method", "sha256", "folded", "head"}


def test_modes_and_gradients_stay(folder: Path) -> None:
    model = loaded(folder).train()
    model.classifier.bias.requires_grad_(False)
    unfold(model)
    assert model.training
    assert model.classifier.weight.requires_grad
    assert not model.classifier.bias.requires_grad
    assert type(AutoModelForSequenceClassification.from_config(model.config)) is type(model)


def test_names_on_the_hub(folder: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept head and the map are looked for there, in the revision that the model was loaded from."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}
    without_head = {name: content for name, content in files.items() if name != FILE.as_posix()}
    # The head that is kept needs no map, so that another one here is not read in its place.
    save_map(scaler_of(MatrixScaling, np.eye(5), BIAS), tmp_path)
    other = {MAP_NAME: (tmp_path / MAP_NAME).read_bytes(), "pytorch_model.bin": b"pickled"}
    hub.files["me/model"] = {"main": {**files, **other}, "old": without_head}
    before = weights_of(bert())
    model = AutoModelForSequenceClassification.from_pretrained("me/model")
    assert_same_weights(unfold(model), before)
    model = AutoModelForSequenceClassification.from_pretrained("me/model", revision="old")
    with refused(model, ValueError, "got none for these weights in me/model"):
        unfold(model, revision="old")
    Unfold(source="me/model", output=tmp_path / "out")()
    assert_same_weights(loaded(tmp_path / "out"), before)
    assert not [path for _, path, _ in hub.requests if path.endswith(".bin")]


class TestOtherModels:
    """The command on folders of other kinds."""

    def saved(self, model: Any, folder: Path, processing_class: Any = None) -> None:
        save_folded(model, temperature(1.7), folder, batch=None, processing_class=processing_class)

    def test_tokens(self, tmp_path: Path) -> None:
        model = tiny_bert("Token")
        before = weights_of(model)
        self.saved(model, tmp_path / "m", tokenizer())
        Unfold(source=str(tmp_path / "m"), output=tmp_path / "out")()
        assert_same_weights(BertForTokenClassification.from_pretrained(tmp_path / "out"), before)

    @pytest.mark.parametrize("name", ["ViT", "DeiTWithTeacher"])
    def test_images(self, name: str, tmp_path: Path) -> None:
        model = build(name, image_size=16)
        before = weights_of(model)
        self.saved(model, tmp_path / "m", ViTImageProcessor(size={"height": 16, "width": 16}))
        Unfold(source=str(tmp_path / "m"), output=tmp_path / "out")()
        assert_same_weights(type(model).from_pretrained(tmp_path / "out"), before)
        assert ViTImageProcessor.from_pretrained(tmp_path / "out").size == {"height": 16, "width": 16}

    def test_code_that_comes_with_the_model(self, tmp_path: Path) -> None:
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
        own["auto_map"] = {"AutoConfig": "modeling_mine.MineConfig", name: f"modeling_mine.Mine{name[9:]}"}
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, **own}))
        theirs = AutoModelForSequenceClassification.from_pretrained(source, trust_remote_code=True).eval()
        logits = logits_of(theirs)
        self.saved(theirs, tmp_path / "m", tokenizer())
        torch.testing.assert_close(logits_of(theirs), logits / 1.7, rtol=1e-6, atol=1e-6)
        with pytest.raises(
            ValueError, match=r"expected the model to be loadable, got .* contains custom code"
        ):
            Unfold(source=str(tmp_path / "m"), output=tmp_path / "out")()
        assert not (tmp_path / "out").exists()
        Unfold(source=str(tmp_path / "m"), output=tmp_path / "out", trust_remote_code=True)()
        back = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", trust_remote_code=True)
        assert type(back).__name__ == "MineForSequenceClassification"
        assert_same_weights(back, weights_of(model))

    def test_the_map_of_another_model_does_not_stay_in_the_output(self, tmp_path: Path) -> None:
        save_folded(bert(), VECTOR, tmp_path / "out", batch=None, processing_class=None)
        save_folded(bert(), VECTOR, tmp_path / "m", batch=None, processing_class=None)
        (tmp_path / "m" / MAP_NAME).unlink()
        Unfold(source=str(tmp_path / "m"), output=tmp_path / "out")()
        files = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
        assert files == {"config.json", "model.safetensors"}

    def test_what_is_copied(self, folder: Path, tmp_path: Path) -> None:
        left_out = ["README.md", "decisions.json", "training_args.bin", "model.onnx", ".hidden", "_scratch"]
        for name in (*left_out, "bpe.codes", "sentence_bert_config.json"):
            (folder / name).write_text(name)
        Unfold(source=str(folder), output=tmp_path / "out")()
        names = {path.name for path in (tmp_path / "out").iterdir()}
        tokens = {"tokenizer.json", "tokenizer_config.json"}
        files = {
            "config.json",
            "model.safetensors",
            "calibration.json",
            "bpe.codes",
            "sentence_bert_config.json",
        }
        assert names == files | tokens

    def test_no_classifier(self, tmp_path: Path) -> None:
        bert().bert.save_pretrained(tmp_path / "body")
        with pytest.raises(ValueError, match=r"got .* \(a BertModel is not a classifier\)"):
            Unfold(source=str(tmp_path / "body"), output=tmp_path / "out")()
        assert not (tmp_path / "out").exists()


def test_a_cross_encoder(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import CrossEncoder

    plain = tiny_bert()
    plain.save_pretrained(tmp_path / "plain")
    tokenizer().save_pretrained(tmp_path / "plain")
    encoder = CrossEncoder(str(tmp_path / "plain"), device="cpu", activation_fn=torch.nn.Softmax(dim=-1))
    save_folded(encoder.model, temperature(1.7), tmp_path / "m", batch=None, processing_class=tokenizer())
    folded = CrossEncoder(str(tmp_path / "m"), device="cpu")
    assert unfold(folded) is folded
    assert_same_weights(folded.model, weights_of(plain))
