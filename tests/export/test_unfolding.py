"""Unfolding: the weights from before the fold, bit for bit where the head was kept, else within the bound it states."""

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

from hf_calib import fold, fold_temperature, unfold
from hf_calib._errors import InputValueError
from hf_calib._files import whole_folder
from hf_calib.commands.unfold import unfold_model
from hf_calib.export.kept_head import FILE, read_kept_head
from hf_calib.export.saving import replace_model, save_folded
from hf_calib.scaling import (
    MatrixScaling,
    PerLabelTemperatureScaling,
    PriorCorrection,
    TemperatureScaling,
    VectorScaling,
    save_map,
)
from hf_calib.scaling.saved_map import MAP_NAME
from tests.helpers.architectures import IMAGE, assert_same_weights, build, logits_of, refused, weights_of
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


def difference(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> float:
    after = model.state_dict()
    assert list(after) == list(before)
    return max(float((after[name].double() - before[name].double()).abs().max()) for name in before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a model with a matrix folded in, its head kept."""
    save_folded(bert(), SCALERS["matrix"], tmp_path / "m", batch=None, processing_class=tokenizer())
    return tmp_path / "m"


def loaded(folder: Path) -> Any:
    return BertForSequenceClassification.from_pretrained(folder)


@pytest.mark.parametrize(
    "damage",
    [
        {"weight": "abc"},
        {"weight": [1.0, float("nan"), 1.0, 1.0, 1.0]},
        {"bias": [0.0, float("inf"), 0.0, 0.0, 0.0]},
        {"temperature": 0},
        {"method": "prior_correction"},
        {"method": "prior_correction", **SHARES, "train_prior": [0.0, 1.0, 0.0, 0.0, 0.0]},
        {"head": None},
    ],
    ids=str,
)
def test_a_damaged_record_is_refused_and_the_model_stays(damage: dict[str, Any]) -> None:
    model = fold(bert(), VECTOR)
    folded = weights_of(model)
    model.config.calibration |= damage
    with pytest.raises(ValueError, match=r"expected (config\.calibration|model) to h.*; (pass|load) the"):
        unfold(model)
    assert_same_weights(model, folded)


@pytest.mark.parametrize(
    "damage",
    [
        {"temperature": -2.0},
        {"temperature": 0.0},
        {"temperature": 1e-300},
        {"temperatures": [1.0, 2.0, -1.0, 1.0]},
        {"temperature": 1e300},
    ],
)
def test_numbers_that_no_fit_finds(damage: dict[str, Any]) -> None:
    model = fold_temperature(bert(), 2.0)
    del model.config.calibration["temperature"]
    model.config.calibration |= damage
    before = weights_of(model)
    with pytest.raises(InputValueError, match=r"a damaged record|to be invertible"):
        unfold(model)
    assert_same_weights(model, before)


def test_what_else_has_changed_the_weights_is_not_promised_away(folder: Path) -> None:
    found = unfold(loaded(folder).bfloat16().float())
    assert difference(found.model, weights_of(bert())) > 100 * found.largest_difference > 0
    assert found.sentence().endswith("What else has changed them since the fold (training, 16 bits) stays.")


class TestByTheInverse:
    @pytest.mark.parametrize("name", SCALERS)
    @pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.deep)])
    def test_within_the_bound_it_states(self, name: str, dtype: torch.dtype) -> None:
        model = bert().to(dtype)
        before = weights_of(model)
        fold(model, SCALERS[name])
        assert difference(model, before) > 0.01
        # A matrix folded in memory is written down nowhere.
        found = unfold(model, SCALERS[name] if "matrix" in name else None)
        assert found.model is model
        assert not found.exact
        assert difference(model, before) <= found.largest_difference < 1000 * torch.finfo(dtype).eps
        assert model.config.calibration == {"unfolded_within": found.largest_difference}

    @pytest.mark.deep
    def test_the_bound_is_not_far_off(self) -> None:
        """Of a matrix that blows the rounding up, it is reached up to a factor that sums of roundings cancel."""
        weight = np.eye(5) + 20 * np.outer(RNG.normal(size=5), RNG.normal(size=5))
        model = bert()
        before = weights_of(model)
        fold(model, scaler := scaler_of(MatrixScaling, weight))
        found = unfold(model, scaler)
        assert found.largest_difference / 30 < difference(model, before) <= found.largest_difference

    @pytest.mark.deep
    def test_sigmoids(self) -> None:
        model = bert(problem_type="multi_label_classification")
        before = weights_of(model)
        scaler = PerLabelTemperatureScaling()
        scaler.temperatures_ = np.array([0.5, 1.0, 1.7, 3.0, 30.0])
        assert difference(model, before) <= unfold(fold(model, scaler)).largest_difference < 1e-6

    @pytest.mark.deep
    def test_several_heads(self) -> None:
        model = build("DeiTWithTeacher", IMAGE)
        before, logits = weights_of(model), logits_of(model)
        found = unfold(fold_temperature(model, 1.7))
        assert difference(model, before) <= found.largest_difference < 1e-6
        torch.testing.assert_close(logits_of(model), logits, rtol=1e-6, atol=1e-6)

    @pytest.mark.deep
    @pytest.mark.parametrize("weight", [np.diag([1.0, 1.0, 0.0, 1.0, 1.0]), np.ones((5, 5))])
    def test_a_singular_matrix(self, weight: np.ndarray) -> None:
        scaler = scaler_of(MatrixScaling, weight)
        model = fold(bert(), scaler)
        with refused(model, ValueError, "expected the folded map to be invertible, got one that is singular"):
            unfold(model, scaler)
        model = fold(bert(), vector := scaler_of(VectorScaling, np.diag(weight) * [1, 1, 0, 1, 1]))
        with refused(model, ValueError, "got one that is singular"):
            unfold(model, vector)

    @pytest.mark.deep
    def test_a_badly_conditioned_matrix(self) -> None:
        scaler = scaler_of(MatrixScaling, np.ones((5, 5)) + 1e-5 * np.eye(5))
        model = fold(bert(), scaler)
        message = (
            r"invertible, got one that is badly conditioned: weights may be wrong by \S+ of the largest; take"
        )
        with refused(model, ValueError, message):
            unfold(model, scaler)
        # Small weights of a vector do no harm: each output is scaled by itself.
        model = bert()
        before = weights_of(model)
        found = unfold(fold(model, scaler_of(VectorScaling, [1e-6, 1.0, 1e6, 1.0, 1.0])))
        assert difference(model, before) <= found.largest_difference < 1e-6

    @pytest.mark.deep
    def test_an_added_bias_stays_as_zeros(self) -> None:
        model = bert()
        model.classifier.register_parameter("bias", None)
        found = unfold(fold(model, VECTOR))
        assert model.classifier.bias.abs().max() <= found.largest_difference


class TestKept:
    def test_bit_for_bit(self, folder: Path) -> None:
        model = loaded(folder)
        found = unfold(model)
        assert (found.exact, found.largest_difference) == (True, 0.0)
        assert_same_weights(model, weights_of(bert()))
        assert not hasattr(model.config, "calibration")

    def test_of_a_singular_map(self, tmp_path: Path) -> None:
        scaler = scaler_of(MatrixScaling, np.ones((5, 5)))
        save_folded(bert(), scaler, tmp_path / "m", batch=None, processing_class=None)
        model = loaded(tmp_path / "m")
        assert unfold(model).exact
        assert_same_weights(model, weights_of(bert()))

    def test_an_added_bias_is_removed(self, tmp_path: Path) -> None:
        plain = bert()
        plain.classifier.register_parameter("bias", None)
        before = weights_of(plain)
        save_folded(plain, VECTOR, tmp_path / "m", batch=None, processing_class=None)
        model = loaded(tmp_path / "m")
        assert model.classifier.bias is not None
        assert unfold(model).exact
        assert_same_weights(model, before)

    def test_not_where_servers_look_for_weights(self, folder: Path) -> None:
        assert {path.name for path in folder.glob("*.safetensors")} == {"model.safetensors"}
        kept = load_file(folder / FILE)
        assert {name: value.dtype for name, value in kept.items()} == {
            "classifier.weight": torch.float32,
            "classifier.bias": torch.float32,
        }

    def test_not_that_of_a_head_trained_since(self, folder: Path) -> None:
        """As a stock Trainer leaves it: other weights, the config and the kept head of the folded ones."""
        model = loaded(folder)
        with torch.no_grad():
            model.classifier.weight += 0.1
        model.save_pretrained(folder)
        wanted = np.linalg.solve(MATRIX, model.classifier.weight.detach().double().numpy())
        found = unfold(model := loaded(folder))
        assert not found.exact
        weight = model.classifier.weight.detach().double().numpy()
        assert np.abs(weight - wanted).max() <= found.largest_difference < 1e-5

    @pytest.mark.parametrize("broken", ["missing", "empty", "other names", "other shapes", "no hash"])
    def test_a_file_that_is_not_ours(self, folder: Path, broken: str) -> None:
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
        else:
            save_file(kept, folder / FILE)
        found = unfold(model := loaded(folder))
        assert not found.exact
        assert difference(model, weights_of(bert())) <= found.largest_difference < 1e-5

    def test_is_the_first_head_after_folding_again(self, folder: Path, tmp_path: Path) -> None:
        model = unfold(loaded(folder)).model
        save_folded(model, VECTOR, tmp_path / "again", batch=None, processing_class=None)
        model = loaded(tmp_path / "again")
        assert unfold(model).exact
        assert_same_weights(model, weights_of(bert()))

    def test_what_was_inverted_once_is_not_called_exact_later(self, tmp_path: Path) -> None:
        found = unfold(fold(bert(), VECTOR))
        save_folded(found.model, temperature(1.7), tmp_path / "m", batch=None, processing_class=None)
        again = unfold(loaded(tmp_path / "m"))
        assert (again.exact, again.largest_difference) == (False, found.largest_difference)
        assert difference(again.model, weights_of(bert())) <= again.largest_difference


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
        assert found.exact
        assert torch.equal(found.model.classifier.weight, head)
        assert found.model.config.calibration == {"loss": "focal", "loss_kwargs": {"gamma": 3.0}}
        trainer.save_model(str(tmp_path / "m"))
        model = loaded(tmp_path / "m")
        with refused(model, ValueError, "expected model to have a map folded into its head, got none"):
            unfold(model)
        model.config.calibration["folded"] = True  # as a config from elsewhere would say
        model.config.calibration["head"] = ["classifier"]
        assert not unfold(model).exact


class TestTheMap:
    def test_beside_the_model(self, folder: Path) -> None:
        """A folder from before heads were kept, or one that was made by hand."""
        (folder / FILE).unlink()
        found = unfold(model := loaded(folder))
        assert difference(model, weights_of(bert())) <= found.largest_difference < 1e-5
        (folder / "calibration.json").unlink()
        with refused(
            model := loaded(folder), ValueError, "expected model to have its map written down, got matrix"
        ):
            unfold(model)
        assert not unfold(model, SCALERS["matrix"]).exact

    def test_of_another_method_or_broken(self, folder: Path) -> None:
        (folder / FILE).unlink()
        save_map(VECTOR, folder)
        with refused(model := loaded(folder), ValueError, "calibration.json, which holds another one"):
            unfold(model)
        (folder / "calibration.json").write_text("{}")
        with refused(model, ValueError, "calibration.json, which holds another one .*hold a fitted map"):
            unfold(model)

    def test_another_matrix(self, folder: Path) -> None:
        """As in another revision on the Hub."""
        (folder / FILE).unlink()
        model = loaded(folder)
        save_map(scaler_of(MatrixScaling, 2 * MATRIX, BIAS), folder)
        with refused(model, ValueError, "calibration.json, which holds another one .*'sha256': "):
            unfold(model)
        del model.config.calibration["sha256"]  # as version 0.1 left it out
        assert not unfold(model).exact

    def test_a_scaler_that_was_not_folded(self) -> None:
        model = fold(bert(), VECTOR)
        with refused(
            model, ValueError, "expected scaler to be the one that was folded into the model, .* got"
        ):
            unfold(model, temperature(1.7))
        with refused(model, TypeError, "expected scaler to be one of TemperatureScaling"):
            unfold(model, object())
        unfold(model, VECTOR)

    def test_a_model_whose_folder_is_gone(self, folder: Path) -> None:
        model = loaded(folder)
        shutil.rmtree(folder)
        assert not unfold(model, SCALERS["matrix"]).exact


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
        with refused(model, ValueError, r"have a head of the map's 5 classes, got \[3\] outputs; load"):
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
    model = unfold(copy.deepcopy(folded)).model
    assert_same_weights(fold(model, SCALERS["matrix"]), weights_of(folded))
    record = json.loads((folder / "config.json").read_text())["calibration"]
    assert model.config.calibration == record
    assert record.keys() == {"method", "sha256", "folded", "head"}


def test_modes_and_gradients_stay() -> None:
    model = fold(bert(), VECTOR).train()
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
    for revision in ("main", "old"):
        model = AutoModelForSequenceClassification.from_pretrained("me/model", revision=revision)
        found = unfold(model, revision=revision)
        assert found.exact == (revision == "main")
        assert difference(model, before) <= found.largest_difference
    assert unfold_model("me/model", tmp_path / "out").exact
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
        assert unfold_model(str(tmp_path / "m"), tmp_path / "out").exact
        assert_same_weights(BertForTokenClassification.from_pretrained(tmp_path / "out"), before)

    @pytest.mark.parametrize("name", ["ViT", "DeiTWithTeacher"])
    def test_images(self, name: str, tmp_path: Path) -> None:
        model = build(name, IMAGE)
        before = weights_of(model)
        self.saved(model, tmp_path / "m", ViTImageProcessor(size={"height": 16, "width": 16}))
        assert unfold_model(str(tmp_path / "m"), tmp_path / "out").exact
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
            unfold_model(str(tmp_path / "m"), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert unfold_model(str(tmp_path / "m"), tmp_path / "out", trust_remote_code=True).exact
        back = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", trust_remote_code=True)
        assert type(back).__name__ == "MineForSequenceClassification"
        assert_same_weights(back, weights_of(model))

    def test_a_folder_that_only_fold_and_save_pretrained_made(self, tmp_path: Path) -> None:
        """Nothing was kept: the map is that of the config, and none lies beside the model then."""
        fold(bert(), VECTOR).save_pretrained(tmp_path / "m")
        done = unfold_model(str(tmp_path / "m"), tmp_path / "out")
        assert (done.exact, done.map_kept) == (False, False)
        assert f"more than {done.largest_difference:.1g}" in done.said
        assert difference(loaded(tmp_path / "out"), weights_of(bert())) <= done.largest_difference < 1e-5
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["calibration"] == {"unfolded_within": done.largest_difference}

    def test_the_map_of_another_model_does_not_stay_in_the_output(self, tmp_path: Path) -> None:
        save_folded(bert(), VECTOR, tmp_path / "out", batch=None, processing_class=None)
        fold(bert(), VECTOR).save_pretrained(tmp_path / "m")
        unfold_model(str(tmp_path / "m"), tmp_path / "out")
        files = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
        assert files == {"config.json", "model.safetensors"}

    def test_what_is_copied(self, folder: Path, tmp_path: Path) -> None:
        left_out = ["README.md", "decisions.json", "training_args.bin", "model.onnx", ".hidden", "_scratch"]
        for name in (*left_out, "bpe.codes", "sentence_bert_config.json"):
            (folder / name).write_text(name)
        unfold_model(str(folder), tmp_path / "out")
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
            unfold_model(str(tmp_path / "body"), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_cross_encoder(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import CrossEncoder

    plain = tiny_bert()
    plain.save_pretrained(tmp_path / "plain")
    tokenizer().save_pretrained(tmp_path / "plain")
    encoder = CrossEncoder(str(tmp_path / "plain"), device="cpu", activation_fn=torch.nn.Softmax(dim=-1))
    fold(encoder, temperature(1.7))
    encoder.save_pretrained(str(tmp_path / "m"))
    found = unfold(encoder)
    assert found.model is encoder
    assert difference(encoder.model, weights_of(plain)) <= found.largest_difference < 1e-5
    done = unfold_model(str(tmp_path / "m"), tmp_path / "out")
    back = CrossEncoder(str(tmp_path / "out"), device="cpu")
    assert difference(back.model, weights_of(plain)) <= done.largest_difference < 1e-5
    assert isinstance(back.activation_fn, torch.nn.Softmax)
