from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import BertForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

from hf_calib.folding import fold_temperature

TEXT = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
DECODER = {**TEXT, "num_key_value_heads": 1}
IMAGE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
}
SEQ2SEQ = {
    "vocab_size": 60,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
}
T5 = {
    "vocab_size": 60,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
DISTILBERT = {
    "vocab_size": 60,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 32,
}
GPT2 = {
    "vocab_size": 60,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "bos_token_id": 58,
    "eos_token_id": 59,
}
XLNET = {"vocab_size": 60, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}
MOBILEVIT = {
    "image_size": 32,
    "hidden_sizes": [8, 8, 8],
    "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
    "num_attention_heads": 2,
}
SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
    "window_size": 4,
}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
SWIFTFORMER = {"image_size": 32, "embed_dims": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}


def token_ids(*roles: str) -> dict[str, int]:
    return {f"{role}_token_id": number for number, role in enumerate(roles)}


# (model class without "For...Classification", config, the layers that hold the logits' scale)
ARCHITECTURES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("Albert", {**TEXT, "embedding_size": 8}, ["classifier"]),
    ("Bart", {**SEQ2SEQ, "pad_token_id": 1}, ["classification_head.out_proj"]),
    ("Beit", IMAGE, ["classifier"]),
    ("Bert", TEXT, ["classifier"]),
    ("Camembert", TEXT, ["classifier.out_proj"]),
    (
        "ConvNext",
        {"hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2, "image_size": 32},
        ["classifier"],
    ),
    ("CLIP", {"vision_config": IMAGE, "text_config": {**TEXT, **token_ids("bos", "eos")}}, ["classifier"]),
    ("DebertaV2", TEXT, ["classifier"]),
    ("DeiT", IMAGE, ["classifier"]),
    ("DeiTWithTeacher", IMAGE, ["cls_classifier", "distillation_classifier"]),
    ("Dinov2", IMAGE, ["classifier"]),
    ("DistilBert", DISTILBERT, ["classifier"]),
    ("Electra", {**TEXT, "embedding_size": 16}, ["classifier.out_proj"]),
    ("EuroBert", {**DECODER, **token_ids("pad", "bos", "eos", "mask")}, ["classifier"]),
    ("GPT2", GPT2, ["score"]),
    ("Llama", DECODER, ["score"]),
    (
        "MobileBert",
        {**TEXT, "embedding_size": 8, "true_hidden_size": 16, "intra_bottleneck_size": 16},
        ["classifier"],
    ),
    ("MobileViT", MOBILEVIT, ["classifier"]),
    ("ModernBert", {**TEXT, **token_ids("pad", "bos", "eos", "cls", "sep")}, ["classifier"]),
    ("MPNet", TEXT, ["classifier.out_proj"]),
    ("PoolFormer", {"hidden_sizes": [8] * 4, "depths": [1] * 4, "image_size": 32}, ["classifier"]),
    ("Qwen2", {**DECODER, "pad_token_id": 0}, ["score"]),
    ("ResNet", RESNET, ["classifier.1"]),
    ("Roberta", TEXT, ["classifier.out_proj"]),
    ("SwiftFormer", SWIFTFORMER, ["dist_head", "head"]),
    ("Swin", SWIN, ["classifier"]),
    ("T5", T5, ["classification_head.out_proj"]),
    ("ViT", IMAGE, ["classifier"]),
    ("XLMRoberta", TEXT, ["classifier.out_proj"]),
    ("XLNet", XLNET, ["logits_proj"]),
]


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the initial weights, whose zero biases and tiny logits would hide a wrong head."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def build(name: str, config: Mapping[str, Any], **changes: Any) -> PreTrainedModel:
    base = name.removesuffix("WithTeacher")
    settings = getattr(transformers, f"{base}Config")(**{"num_labels": 5, **config, **changes})
    kind = "Sequence" if hasattr(transformers, f"{base}ForSequenceClassification") else "Image"
    suffix = "WithTeacher" if name.endswith("WithTeacher") else ""
    return randomised(getattr(transformers, f"{base}For{kind}Classification{suffix}")(settings))


def bert(**changes: Any) -> BertForSequenceClassification:
    return build("Bert", TEXT, **changes)


def some_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Inputs unlike those that the folding makes up."""
    generator = torch.Generator().manual_seed(2)
    if model.main_input_name == "pixel_values":
        size = getattr(getattr(model.config, "vision_config", model.config), "image_size", 48)
        return {"pixel_values": torch.rand(3, 3, size, size, generator=generator)}
    ids = torch.randint(10, 50, (1, 13), generator=generator)
    end = getattr(model.config, "eos_token_id", None)
    if end is not None:
        ids[:, -1] = end
    return {"input_ids": ids}


def logits_of(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(**(inputs or some_inputs(model))).logits


def assert_divided(after: torch.Tensor, before: torch.Tensor, temperature: float) -> None:
    wanted = before.double() / temperature
    assert (after.double() - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_weights(model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


@contextmanager
def refused(model: PreTrainedModel, error: type[Exception], message: str) -> Iterator[None]:
    """Expect an error that leaves weights and config alone."""
    before, config = weights_of(model), copy.deepcopy(model.config.to_dict())
    with pytest.raises(error, match=message):
        yield
    assert_same_weights(model, before)
    assert model.config.to_dict() == config


@pytest.mark.parametrize(("name", "config", "head"), ARCHITECTURES, ids=[row[0] for row in ARCHITECTURES])
def test_architecture(name: str, config: dict[str, Any], head: list[str], tmp_path: Path) -> None:
    model = build(name, config)
    before, body = logits_of(model), weights_of(model)
    assert fold_temperature(model, 1.7) is model
    after = logits_of(model)
    assert_divided(after, before, 1.7)
    record = {"method": "temperature", "temperature": 1.7, "folded": True, "head": head}
    assert model.config.calibration == record
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, body[n])}
    assert {n.rpartition(".")[0] for n in changed} == set(head)

    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_same_weights(loaded, weights_of(model))
    # A copy, since weights that are mapped from the file lie unaligned, where products round differently.
    assert torch.equal(logits_of(copy.deepcopy(loaded)), after)
    assert loaded.config.calibration == record
    with refused(loaded, ValueError, "expected model to be folded only once, got .* temperature 1.7"):
        fold_temperature(loaded, 1.7)


@pytest.mark.parametrize(
    ("name", "config", "head"),
    [
        row
        for row in ARCHITECTURES
        if row[0] in ("Bert", "DistilBert", "Roberta", "XLNet", "Llama", "DeiTWithTeacher")
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("temperature", [1.7, 1.000001])
def test_as_many_labels_as_hidden_units(
    name: str, config: dict[str, Any], head: list[str], temperature: float
) -> None:
    model = build(name, config, num_labels=16)
    before = logits_of(model)
    fold_temperature(model, temperature)
    assert_divided(logits_of(model), before, temperature)
    assert model.config.calibration["head"] == head


@pytest.mark.parametrize("temperature", [1e-5, 0.05, 1.0, 20.0, 1e5])
def test_any_temperature(temperature: float) -> None:
    model = bert()
    before = logits_of(model)
    fold_temperature(model, temperature)
    assert_divided(logits_of(model), before, temperature)


def test_temperature_1_changes_no_weight() -> None:
    model = bert()
    before = weights_of(model)
    fold_temperature(model, 1)
    assert_same_weights(model, before)


def test_token_classification() -> None:
    model = randomised(transformers.BertForTokenClassification(transformers.BertConfig(**TEXT, num_labels=3)))
    before = logits_of(model)
    fold_temperature(model, 0.6)
    assert before.shape == (1, 13, 3)
    assert_divided(logits_of(model), before, 0.6)


def test_multi_label() -> None:
    model = bert(problem_type="multi_label_classification")
    before = logits_of(model)
    fold_temperature(model, 0.6)
    assert_divided(logits_of(model), before, 0.6)


def test_float64() -> None:
    model = bert().double()
    before = logits_of(model)
    fold_temperature(model, 1.7)
    torch.testing.assert_close(logits_of(model), before / 1.7, rtol=1e-13, atol=1e-14)


def test_a_model_that_returns_tuples() -> None:
    model = bert(return_dict=False)
    with torch.no_grad():
        before = model(**some_inputs(model))[0]
        fold_temperature(model, 1.7)
        assert_divided(model(**some_inputs(model))[0], before, 1.7)


# peft 0.21 reads a name that transformers 5.23 deprecates.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_merged_lora() -> None:
    adapted = get_peft_model(bert(), LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False))
    with refused(adapted, ValueError, "got PEFT layers .*; fold into the result of model.merge_and_unload"):
        fold_temperature(adapted, 1.7)
    # The same layers without the outer PeftModel, among them the head's ModulesToSaveWrapper.
    with refused(adapted.base_model.model, ValueError, "got PEFT layers"):
        fold_temperature(adapted.base_model.model, 1.7)
    merged = adapted.merge_and_unload()
    before = logits_of(merged)
    fold_temperature(merged, 1.7)
    assert_divided(logits_of(merged), before, 1.7)


class TestRecord:
    def test_keeps_what_is_there(self, tmp_path: Path) -> None:
        model = bert()
        fitted = {
            "temperature": 1.7,
            "folded": False,
            "criterion": "nll",
            "split": "calibration",
            "n_examples": 9,
        }
        model.config.calibration = fitted
        fold_temperature(model, 1.7)
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())["calibration"]
        assert saved == {**fitted, "method": "temperature", "folded": True, "head": ["classifier"]}
        assert fitted["folded"] is False  # the caller's dict is his

    def test_none_means_not_folded(self) -> None:
        model = bert()
        model.config.calibration = None
        fold_temperature(model, 1.7)
        assert model.config.calibration["folded"] is True

    def test_numpy_temperature_is_saved_as_a_number(self, tmp_path: Path) -> None:
        import numpy as np

        model = fold_temperature(bert(), np.float32(1.5))
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["calibration"]["temperature"] == 1.5


class TestBatch:
    def test_inputs_with_labels_as_a_loader_gives_them(self) -> None:
        model = bert()
        before = logits_of(model)
        ids = torch.randint(0, 60, (3, 7))
        batch = transformers.BatchEncoding(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 99])}
        )
        fold_temperature(model, 1.7, batch=batch)
        assert_divided(logits_of(model), before, 1.7)
        assert "labels" in batch

    def test_speech_needs_one(self) -> None:
        config = transformers.Wav2Vec2Config(
            **{k: v for k, v in TEXT.items() if k != "max_position_embeddings"},
            conv_dim=[8, 8],
            conv_stride=[4, 4],
            conv_kernel=[4, 4],
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            num_labels=5,
        )
        model = randomised(transformers.Wav2Vec2ForSequenceClassification(config))
        with refused(
            model,
            ValueError,
            "expected model to take input_ids or pixel_values, got 'input_values'; pass batch",
        ):
            fold_temperature(model, 1.7)
        batch = {"input_values": torch.randn(2, 400)}
        before = logits_of(model, batch)
        fold_temperature(model, 1.7, batch=batch)
        assert_divided(logits_of(model, batch), before, 1.7)

    def test_refused(self) -> None:
        model = bert()
        with refused(model, TypeError, "expected batch to be a dict of tensors, got Tensor"):
            fold_temperature(model, 1.7, batch=torch.zeros(1, 3))
        with refused(model, ValueError, "expected batch to be what the model takes, got ValueError"):
            fold_temperature(model, 1.7, batch={"pixels": torch.zeros(1, 3)})


class Squashed(BertForSequenceClassification):
    """Its logits are no linear function of any layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits.tanh()
        return outputs


class Failing(BertForSequenceClassification):
    """It runs once, and not again while the head is divided."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls > 1:
            raise KeyboardInterrupt("by the user")
        return super().forward(*args, **kwargs)


class TestRollback:
    @pytest.mark.parametrize("num_labels", [5, 16])
    def test_no_linear_head(self, num_labels: int) -> None:
        model = randomised(Squashed(transformers.BertConfig(**TEXT, num_labels=num_labels)))
        with refused(model, ValueError, "expected model to have a linear head .* got .*'classifier'"):
            fold_temperature(model, 1.7)

    def test_a_forward_that_is_interrupted(self) -> None:
        model = randomised(Failing(transformers.BertConfig(**TEXT, num_labels=5)))
        with refused(model, KeyboardInterrupt, "by the user"):
            fold_temperature(model, 1.7)

    def test_a_head_whose_weight_another_layer_uses(self) -> None:
        model = bert(num_labels=16)
        model.classifier.weight = model.bert.pooler.dense.weight
        with refused(model, ValueError, "linear head"):
            fold_temperature(model, 1.7)

    def test_a_head_whose_weight_is_computed(self) -> None:
        model = bert()
        nn.utils.parametrizations.weight_norm(model.classifier)
        with refused(model, ValueError, "linear head"):
            fold_temperature(model, 1.7)

    def test_a_temperature_that_float32_weights_cannot_hold(self) -> None:
        with refused(model := bert(), ValueError, "lose precision at 1e\\+44"):
            fold_temperature(model, 1e44)

    def test_logits_that_tell_nothing(self) -> None:
        model = bert()
        with torch.no_grad():
            model.classifier.bias[0] = torch.inf
        with refused(model, ValueError, "be finite and not all 0, got NaN or infinity"):
            fold_temperature(model, 1.7)
        nn.init.zeros_(model.classifier.weight)
        nn.init.zeros_(model.classifier.bias)
        with refused(model, ValueError, "be finite and not all 0, got all 0"):
            fold_temperature(model, 1.7)


class TestLeftAsFound:
    def test_modes_gradients_and_random_state(self) -> None:
        model = bert().train()
        model.bert.encoder.eval()
        model.bert.embeddings.requires_grad_(False)
        model(**some_inputs(model), labels=torch.tensor([0])).loss.backward()
        modes = [module.training for module in model.modules()]
        trainable = [parameter.requires_grad for parameter in model.parameters()]
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        state = torch.get_rng_state()
        fold_temperature(model, 1.7)
        assert [module.training for module in model.modules()] == modes
        assert [parameter.requires_grad for parameter in model.parameters()] == trainable
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert gradient is None if parameter.grad is None else torch.equal(parameter.grad, gradient)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.is_grad_enabled()

    def test_trains_on(self) -> None:
        model = fold_temperature(bert(), 1.7).train()
        model(**some_inputs(model), labels=torch.tensor([0])).loss.backward()
        assert model.classifier.weight.grad.abs().sum() > 0

    @pytest.mark.parametrize("precision", ["highest", "high", "medium"])
    def test_float32_precision(self, precision: str) -> None:
        model = bert()
        before = logits_of(model)
        torch.set_float32_matmul_precision(precision)
        try:
            fold_temperature(model, 1.7)
            assert torch.get_float32_matmul_precision() == precision
        finally:
            torch.set_float32_matmul_precision("highest")
        assert_divided(logits_of(model), before, 1.7)

    @pytest.mark.skipif(
        not hasattr(torch.backends, "fp32_precision"), reason="the interface came with torch 2.9"
    )
    def test_float32_precision_set_through_the_newer_interface(self) -> None:
        matmul = torch.backends.cuda.matmul
        before = matmul.fp32_precision
        matmul.fp32_precision = "tf32"
        try:
            fold_temperature(bert(), 1.7)
            assert matmul.fp32_precision == "tf32"
        finally:
            matmul.fp32_precision = before


class TestReducedPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_16_bit_weights_are_refused(self, dtype: torch.dtype) -> None:
        model = bert().to(dtype)
        with refused(model, ValueError, f"got {dtype} in bert.*; call model.float"):
            fold_temperature(model, 1.7)

    def test_inside_autocast(self) -> None:
        model = bert()
        before = logits_of(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fold_temperature(model, 1.7)
        assert_divided(logits_of(model), before, 1.7)

    def test_a_forward_that_training_in_bf16_has_wrapped(self) -> None:
        model = bert()
        before = logits_of(model)
        original = model.forward
        model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(original)  # as accelerate does
        fold_temperature(model, 1.7)
        del model.forward
        assert_divided(logits_of(model), before, 1.7)


@pytest.mark.parametrize(
    ("temperature", "error", "message"),
    [
        (0.0, ValueError, "temperature to be finite and above 0, got 0.0"),
        (-1.0, ValueError, "got -1.0"),
        (float("nan"), ValueError, "got nan"),
        (float("inf"), ValueError, "got inf"),
        (True, TypeError, "be a number, got bool"),
        ("1.5", TypeError, "be a number, got str"),
        (torch.ones(3), TypeError, "be a number, got Tensor"),
    ],
)
def test_refused_temperature(temperature: Any, error: type[Exception], message: str) -> None:
    with refused(model := bert(), error, message):
        fold_temperature(model, temperature)


def test_refused_models() -> None:
    with pytest.raises(TypeError, match="expected model to be a transformers model, got Linear"):
        fold_temperature(nn.Linear(3, 3), 1.7)
    body = bert().bert
    with refused(body, TypeError, "expected model to return logits, got BaseModelOutput"):
        fold_temperature(body, 1.7)


def test_plain_pipeline(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "good", "bad", "film", "a"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    model, texts = bert(), ["a good film", "bad", "a bad bad unknown film"]
    wanted = [
        (logits_of(model, fast(text, return_tensors="pt")).double() / 2.3).softmax(-1)[0] for text in texts
    ]
    fold_temperature(model, 2.3).save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)
    classify = transformers.pipeline("text-classification", model=str(tmp_path), top_k=None)
    for scores, probs in zip(classify(texts), wanted, strict=True):
        by_label = {score["label"]: score["score"] for score in scores}
        ours = torch.tensor([by_label[model.config.id2label[c]] for c in range(5)], dtype=torch.float64)
        torch.testing.assert_close(ours, probs, rtol=0, atol=1e-6)
