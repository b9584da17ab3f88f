"""The weights that come back from a checkpoint are those that went in, whatever names the file gives them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_calib import CalibrationTrainer
from hf_calib.trainer.checkpoint import load_weights
from tests.helpers.architectures import ARCHITECTURES, IMAGE, T5, build, some_inputs
from tests.helpers.tiny import arguments, assert_same, sequences, tiny_bert, weights

STEPS = 3
NAMES = [name for name, *_ in ARCHITECTURES]
CONFIGS = {name: config for name, config, _ in ARCHITECTURES}
RENAMED = ["Beit", "DeiT", "Dinov2", "Swin", "ViT"]
# Each way of naming, tying and nesting weights once.
OF_EACH_KIND = {"Bert", "CLIP", "GPT2", "ResNet", "Swin", "T5", "ViT"}
EVERY_NAME = [name if name in ("ViT", "T5") else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def rows(model: Any) -> list[dict[str, Any]]:
    """Enough for the steps of a training; token ids one row a step, which needs no padding token."""
    inputs = some_inputs(model)
    label = {"pixel_values": lambda i: i % 5}.get(model.main_input_name, lambda i: (2 * i) % 5)
    per_step = 2 if model.main_input_name == "pixel_values" else 1
    made = []
    for i in range(STEPS * per_step):
        shifted = {key: value[i % len(value)].clone() for key, value in inputs.items()}
        for value in shifted.values():
            value[1:2] = value[2:3] if i % 2 else value[0:1]
        made.append({**shifted, "labels": label(i)})
    return made


class Kept(TrainerCallback):
    """Keeps the weights after the last step, before the best model replaces them."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS:
            self.weights = weights(kwargs["model"])


def make_trainer(
    model: Any, folder: Path, *, kind: type[Trainer] = CalibrationTrainer, **changes: Any
) -> Any:
    """A training whose first checkpoint is the "best", because the metric falls and the largest is asked for."""
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": len(rows(model)) // STEPS,
        "per_device_eval_batch_size": 1,
        "optim": "sgd",
        "learning_rate": 0.02,
        "max_grad_norm": 1.0,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "nll",
        "greater_is_better": True,
        "temperature_criterion": "none",
        "remove_unused_columns": False,
    }
    args = arguments(folder, **{**settings, **changes})
    return kind(
        model, args, train_dataset=rows(model), eval_dataset=rows(model), callbacks=[kept := Kept()]
    ), kept


def zeroed(model: Any) -> Any:
    """The same model with nothing in it, so that every weight has to come from the checkpoint."""
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    return model


@pytest.mark.parametrize("name", EVERY_NAME)
def test_training_resumes_and_the_best_model_is_loaded(name: str, tmp_path: Path) -> None:
    whole, kept = make_trainer(build(name, CONFIGS[name]), tmp_path)
    whole.train()
    best = Path(whole.state.best_model_checkpoint)
    assert best.name != f"checkpoint-{STEPS}"
    logged = {entry["step"]: entry["eval_nll"] for entry in whole.state.log_history if "eval_nll" in entry}
    assert whole.state.best_metric == max(logged.values()) > logged[STEPS]
    assert whole.evaluate()["eval_nll"] == whole.state.best_metric

    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    resumed, again = make_trainer(zeroed(build(name, CONFIGS[name])), tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert_same(again.weights, kept.weights)
    assert_same(weights(resumed.model), weights(whole.model))


def as_saved(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


def named_as_in_memory(model: Any, folder: Path) -> None:
    model.save_pretrained(folder, save_original_format=False)


def in_shards(model: Any, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="4KB")
    assert len(list(folder.glob("*.safetensors"))) > 1


def by_torch_save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def by_torch_save_in_shards(model: Any, folder: Path) -> None:
    in_shards(model, folder)
    index = folder / "model.safetensors.index.json"
    text = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
    (folder / "pytorch_model.bin.index.json").write_text(text)
    index.unlink()
    for shard in folder.glob("*.safetensors"):
        torch.save(load_file(shard), folder / f"pytorch_{shard.stem}.bin")
        shard.unlink()


@pytest.mark.parametrize(
    "save", [as_saved, named_as_in_memory, in_shards, by_torch_save, by_torch_save_in_shards]
)
@pytest.mark.deep
def test_every_format_is_read(save: Any, tmp_path: Path) -> None:
    for name in sorted(OF_EACH_KIND):
        model = build(name, CONFIGS[name])
        save(model, tmp_path / name)
        loaded = zeroed(build(name, CONFIGS[name]))
        parameters = list(loaded.parameters())
        assert load_weights(loaded, tmp_path / name)
        assert_same(weights(loaded), weights(model))
        assert all(a is b for a, b in zip(loaded.parameters(), parameters, strict=True)), name  # in place


@pytest.mark.deep
@pytest.mark.parametrize("name", RENAMED)
def test_models_that_were_loaded_from_files_are_read(name: str, tmp_path: Path) -> None:
    model = build(name, CONFIGS[name])
    for folder, save in ((tmp_path / "hub", as_saved), (tmp_path / "memory", named_as_in_memory)):
        save(model, folder)
        loaded = type(model).from_pretrained(folder)  # remembers which names it converted
        loaded.save_pretrained(tmp_path / "again")
        assert load_weights(zeroed(loaded), tmp_path / "again")
        assert_same(weights(loaded), weights(model))


@pytest.mark.deep
def test_several_names_of_one_weight_count_as_one(tmp_path: Path) -> None:
    model = build("T5", T5)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert len(saved) < len(model.state_dict())
    del saved["transformer.shared.weight"]
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"3 missing: transformer\.shared\.weight"):
        load_weights(build("T5", T5), tmp_path)


def drop(saved: dict[str, Any]) -> str:
    del saved["vit.encoder.layer.1.attention.attention.key.weight"]
    return r"1 missing: vit.layers.1.attention.k_proj.weight; resume with the architecture"


def add(saved: dict[str, Any]) -> str:
    saved["vit.encoder.layer.2.attention.attention.key.weight"] = torch.zeros(16, 16)
    return "1 unknown: vit.layers.2.attention.k_proj.weight;"


def rename(saved: dict[str, Any]) -> str:
    saved["head.bias"] = saved.pop("classifier.bias")
    return "1 missing: classifier.bias; 1 unknown: head.bias;"


def reshape(saved: dict[str, Any]) -> str:
    saved["classifier.bias"] = torch.zeros(7)
    return "got 1 of another shape: classifier.bias;"


@pytest.mark.parametrize(
    "change", [drop, *(pytest.param(change, marks=pytest.mark.deep) for change in (add, rename, reshape))]
)
def test_a_checkpoint_whose_weights_do_not_all_arrive_is_refused(change: Any, tmp_path: Path) -> None:
    trainer, _ = make_trainer(build("ViT", IMAGE), tmp_path)
    trainer.train()
    path = tmp_path / f"checkpoint-{STEPS}" / "model.safetensors"
    saved = load_file(path)
    message = change(saved)
    save_file(saved, path, metadata={"format": "pt"})
    model = build("ViT", IMAGE)
    before = weights(model)
    trainer, _ = make_trainer(model, tmp_path)
    with pytest.raises(ValueError, match=f"hold every weight of the ViTForImageClassification.*{message}"):
        trainer.train(resume_from_checkpoint=True)
    assert_same(weights(model), before)
    trainer.state.best_model_checkpoint = str(path.parent)
    with pytest.raises(ValueError, match=message):
        trainer._load_best_model()


@pytest.mark.deep
@pytest.mark.parametrize("name", RENAMED)
def test_checkpoints_of_the_stock_trainer_are_read(name: str, tmp_path: Path) -> None:
    stock, kept = make_trainer(
        build(name, CONFIGS[name]), tmp_path, kind=Trainer, metric_for_best_model="loss"
    )
    stock.train()
    model = zeroed(build(name, CONFIGS[name]))
    ours, again = make_trainer(model, tmp_path)
    ours.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS - 1}"))
    largest = max(float((again.weights[k] - v).abs().max()) for k, v in kept.weights.items())
    assert largest < 1e-6  # the loss of a batch is summed in another order


class Network(nn.Module):
    """No `PreTrainedModel`: saved under the names that it has."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Embedding(64, width)
        self.head = nn.Linear(width, 4)

    def forward(self, input_ids: torch.Tensor) -> SequenceClassifierOutput:
        return SequenceClassifierOutput(logits=self.head(self.body(input_ids).mean(1)))


@pytest.mark.deep
def test_networks_of_other_kinds_are_read(tmp_path: Path) -> None:
    data = sequences(tiny_bert(), 12)

    def trainer(model: nn.Module) -> CalibrationTrainer:
        settings = {"save_strategy": "steps", "save_steps": 1, "temperature_criterion": "none"}
        return CalibrationTrainer(model, arguments(tmp_path, **settings), train_dataset=data)

    whole = trainer(Network())
    whole.train()
    resumed = trainer(Network())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(weights(resumed.model), weights(whole.model))
    with pytest.raises(
        ValueError, match=r"of the Network .* got 2 of another shape: body.weight, head.weight"
    ):
        trainer(Network(width=6)).train(resume_from_checkpoint=True)


class Growing(Network):
    """Its buffer grows with what is loaded, as it says itself."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(size))

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.seen = torch.zeros_like(state_dict["seen"])
        return super().load_state_dict(state_dict, strict, assign)


@pytest.mark.deep
def test_a_model_that_loads_in_its_own_way_does(tmp_path: Path) -> None:
    saved = Growing(size=3)
    saved.seen += 1
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    model = Growing()
    assert load_weights(model, tmp_path)
    assert_same(model.state_dict(), saved.state_dict())


def with_adapters() -> Any:
    torch.manual_seed(0)
    settings = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]}
    return get_peft_model(build("ViT", IMAGE), LoraConfig(**settings, init_lora_weights=False))


def adapter_trainer(folder: Path) -> tuple[Any, Kept]:
    model = with_adapters()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(0.9 if (folder / "checkpoint-1").exists() else 1)
    model.main_input_name = "pixel_values"
    return make_trainer(model, folder)


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["prompt", "p-tuning", "prefix"])
def test_prompts_are_loaded_again(kind: str, tmp_path: Path) -> None:
    """peft calls what it has loaded of them unknown."""
    common: dict[str, Any] = {"task_type": "SEQ_CLS", "num_virtual_tokens": 3}
    config = {
        "prompt": lambda: PromptTuningConfig(**common),
        "p-tuning": lambda: PromptEncoderConfig(**common, encoder_hidden_size=8),
        "prefix": lambda: PrefixTuningConfig(**common),
    }[kind]()
    model = get_peft_model(tiny_bert(), config)
    trainer = CalibrationTrainer(
        model,
        arguments(
            tmp_path,
            eval_strategy="epoch",
            save_strategy="epoch",
            num_train_epochs=2,
            load_best_model_at_end=True,
            label_names=["labels"],
        ),
        train_dataset=sequences(tiny_bert(), 16),
        eval_dataset=sequences(tiny_bert(), 16, seed=2),
        calibration_dataset=sequences(tiny_bert(), 24, seed=3),
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None
    assert trainer.calibration_map is not None
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter/calibration.json").is_file()
    with pytest.raises(
        ValueError, match=r"it cannot be merged: keep the map beside the adapter, as trainer.save_model"
    ):
        trainer.save_calibrated_model(tmp_path / "folded")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_adapters_resume_and_the_best_ones_are_loaded(tmp_path: Path) -> None:
    whole, kept = adapter_trainer(tmp_path)
    whole.train()
    assert Path(whole.state.best_model_checkpoint).name != f"checkpoint-{STEPS}"
    assert whole.evaluate()["eval_nll"] == whole.state.best_metric
    resumed, again = adapter_trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS - 1}"))
    assert_same(again.weights, kept.weights)
    assert_same(weights(resumed.model), weights(whole.model))

    path = tmp_path / f"checkpoint-{STEPS}" / "adapter_model.safetensors"
    saved = load_file(path)
    older = {name.replace("vit.layers", "vit.encoder.layer"): value for name, value in saved.items()}
    headless = {name: value for name, value in saved.items() if "classifier" not in name}
    for changed, message in ((older, "8 missing: .*; 8 unknown: "), (headless, "1 missing: .*classifier")):
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"hold every weight of the adapter and no other, got {message}"):
            adapter_trainer(tmp_path)[0].train(resume_from_checkpoint=True)


@pytest.mark.deep
def test_shards_that_are_missing_make_a_checkpoint_incomplete(tmp_path: Path) -> None:
    trainer, _ = make_trainer(build("ViT", IMAGE), tmp_path)
    trainer.train()
    newest = tmp_path / f"checkpoint-{STEPS}"
    (newest / "model.safetensors").unlink()
    in_shards(build("ViT", IMAGE), newest)
    shard = json.loads((newest / "model.safetensors.index.json").read_text())["weight_map"]["classifier.bias"]
    (newest / shard).unlink()
    with pytest.raises(
        ValueError, match=rf"{shard} missing\); resume from .*checkpoint-{STEPS - 1}, the comp"
    ):
        make_trainer(build("ViT", IMAGE), tmp_path)[0].train(resume_from_checkpoint=str(newest))
