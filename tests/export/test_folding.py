"""Folding of a temperature: in every architecture the logits become logits / T, or nothing changes."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import BertForSequenceClassification, PreTrainedTokenizerFast

from hf_calib import fold, fold_temperature
from hf_calib.scaling import TemperatureScaling
from tests.helpers.architectures import (
    ARCHITECTURES,
    TEXT,
    Squashed,
    assert_same_weights,
    bert,
    build,
    logits_of,
    randomised,
    refused,
    some_inputs,
    weights_of,
)


def assert_divided(after: torch.Tensor, before: torch.Tensor, temperature: float) -> None:
    wanted = before.double() / temperature
    assert (after.double() - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("name", ["Bart", "Bert", "DeiTWithTeacher", "GPT2", "ResNet", "T5", "XLNet"])
def test_architecture(name: str, tmp_path: Path) -> None:
    """A matrix is folded into every one of them in `test_every_classifier`."""
    # Decoders take no second row without a padding token.
    model = build(name, **({"pad_token_id": None} if name in ("GPT2", "XLNet") else {}))
    before, head = logits_of(model), ARCHITECTURES[name]
    assert fold_temperature(model, 1.7) is model
    assert_divided(logits_of(model), before, 1.7)
    record = {"method": "temperature", "temperature": 1.7, "folded": True, "head": head}
    assert model.config.calibration == record
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.calibration == record
    with refused(loaded, ValueError, "expected model to be folded only once, got .* temperature 1.7"):
        fold_temperature(loaded, 1.7)


@pytest.mark.parametrize("name", ["Bert", "DistilBert", "Roberta", "XLNet", "Llama", "DeiTWithTeacher"])
@pytest.mark.parametrize("temperature", [1.7, 1.000001])
def test_as_many_labels_as_hidden_units(name: str, temperature: float) -> None:
    model = build(name, num_labels=16)
    before = logits_of(model)
    fold_temperature(model, temperature)
    assert_divided(logits_of(model), before, temperature)
    assert model.config.calibration["head"] == ARCHITECTURES[name]


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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_saved_apart(tmp_path: Path) -> None:
    """A folder of adapters only: they are on top of the base model once it is loaded, and have to be merged."""
    base = bert()
    base.save_pretrained(tmp_path / "base")
    base = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False)).save_pretrained(
        tmp_path / "adapters"
    )
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "adapters", num_labels=5
    )
    message = r"got PEFT layers .*; merge them: peft\.AutoPeftModelForSequenceClassification\.from_pretrained"
    with refused(loaded, ValueError, message):
        fold_temperature(loaded, 1.7)
    merged = AutoPeftModelForSequenceClassification.from_pretrained(
        tmp_path / "adapters", num_labels=5
    ).merge_and_unload()
    before = logits_of(merged.eval())
    fold_temperature(merged, 1.7)
    assert_divided(logits_of(merged), before, 1.7)


class Convolutional(BertForSequenceClassification):
    """Its logits come from a convolution with one channel per label."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.classifier = nn.Identity()
        self.head = nn.Conv1d(config.hidden_size, config.num_labels, 1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = self.head(outputs.logits[..., None])[..., 0]
        return outputs


def test_a_convolution_is_no_linear_head() -> None:
    model = randomised(Convolutional(transformers.BertConfig(**TEXT, num_labels=5)))
    with refused(model, ValueError, "expected model to have a linear head .* got no such layers; divide the"):
        fold_temperature(model, 1.7)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)  # torch moves this to torchao
class TestQuantised:
    def quantised(self, module: nn.Module) -> Any:
        return torch.ao.quantization.quantize_dynamic(module, {nn.Linear})

    def test_head(self) -> None:
        model = self.quantised(bert())
        message = "to have a linear head .*, got no such layers; divide the logits outside the model"
        before = logits_of(model)
        with pytest.raises(ValueError, match=message):
            fold_temperature(model, 1.7)
        assert torch.equal(logits_of(model), before)

    def test_body_only(self) -> None:
        model = bert()
        model.bert = self.quantised(model.bert)
        before = logits_of(model)
        fold_temperature(model, 1.7)
        assert_divided(logits_of(model), before, 1.7)

    def test_weights_packed_in_integers(self) -> None:
        """As bitsandbytes keeps them, in a subclass of nn.Linear."""
        model = bert()
        packed = torch.zeros(5, 16, dtype=torch.uint8)
        model.classifier.weight = nn.Parameter(packed, requires_grad=False)
        with refused(model, ValueError, "got torch.uint8 in classifier.weight; fold the model before it is"):
            fold_temperature(model, 1.7)


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


class Offset(BertForSequenceClassification):
    """A constant is added to one logit after the head, so that dividing the head divides the logits only nearly."""

    offset = 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits[..., 0] += self.offset
        return outputs


class TestTolerance:
    """Logits agree if no error is above 1e-5 of the largest logit."""

    def offset_model(self, share: float) -> Any:
        model = randomised(Offset(transformers.BertConfig(**TEXT, num_labels=5)))
        model.offset = share * float(logits_of(model).abs().max())
        return model

    def test_in_finding_the_head(self) -> None:
        # The head is halved: the error c / 2 is the same share of the largest logit z / 2 as c of z.
        model = self.offset_model(8e-6)
        fold_temperature(model, 1.7, batch=some_inputs(model))
        model = self.offset_model(1.25e-5)
        with refused(model, ValueError, r"have a linear head whose .* got \['classifier'\]; divide"):
            fold_temperature(model, 1.7, batch=some_inputs(model))

    def test_in_checking_the_folded_head(self) -> None:
        # Divided by 20, the error is 19 times the share.
        model = self.offset_model(8e-6 / 19)
        fold_temperature(model, 20, batch=some_inputs(model))
        model = self.offset_model(1.25e-5 / 19)
        with refused(model, ValueError, r"got \['classifier'\], which lose precision at 20"):
            fold_temperature(model, 20, batch=some_inputs(model))


class Drawing(BertForSequenceClassification):
    """It draws from every random stream, also in evaluation mode."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        torch.rand(3)
        np.random.rand(3)
        random.random()
        return super().forward(*args, **kwargs)


def random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]


class TestRandomStreams:
    @pytest.mark.parametrize("temperature", [1.7, 1e44], ids=["folded", "refused"])
    def test_are_where_they_were(self, temperature: float) -> None:
        model = randomised(Drawing(transformers.BertConfig(**TEXT, num_labels=5)))
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        before = random_states()
        with suppress(ValueError):
            fold_temperature(model, temperature)
        assert hasattr(model.config, "calibration") == (temperature == 1.7)
        assert random_states() == before
        model(**some_inputs(model))
        assert all(now != then for now, then in zip(random_states(), before, strict=True))


class Watching(BertForSequenceClassification):
    """It notes in which precision matrices are multiplied."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), self.precision()]
        return super().forward(*args, **kwargs)


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

    def test_trains_on_like_any_model_with_these_weights(self) -> None:
        folded = fold_temperature(bert(), 1.7)
        fresh = bert()
        fresh.load_state_dict(folded.state_dict())
        for model in (folded, fresh):
            model(**some_inputs(model), labels=torch.tensor([0])).loss.backward()
        assert folded.classifier.weight.grad.abs().min() > 0
        for ours, theirs in zip(folded.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)

    @pytest.mark.parametrize("precision", ["highest", "high", "medium"])
    def test_float32_precision(self, precision: str) -> None:
        model = randomised(Watching(transformers.BertConfig(**TEXT, num_labels=5)))
        model.precision = torch.get_float32_matmul_precision
        torch.set_float32_matmul_precision(precision)
        try:
            fold_temperature(model, 1.7)
            assert set(model.seen) == {"highest"}
            assert torch.get_float32_matmul_precision() == precision
        finally:
            torch.set_float32_matmul_precision("highest")

    @pytest.mark.skipif(
        not hasattr(torch.backends, "fp32_precision"), reason="the interface came with torch 2.9"
    )
    def test_float32_precision_set_through_the_newer_interface(self) -> None:
        matmul = torch.backends.cuda.matmul
        before = matmul.fp32_precision
        model = randomised(Watching(transformers.BertConfig(**TEXT, num_labels=5)))
        model.precision = lambda: matmul.fp32_precision
        matmul.fp32_precision = "tf32"
        try:
            fold_temperature(model, 1.7)
            assert set(model.seen) == {"ieee"}
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


@pytest.mark.parametrize(
    "config",
    [
        {"num_labels": 1},
        {"num_labels": 1, "problem_type": "regression"},
        {"num_labels": 3, "problem_type": "regression"},
    ],
)
def test_a_regression_is_refused(config: dict[str, Any]) -> None:
    message = (
        f"expected model to be a classifier, got problem_type=.* and num_labels={config['num_labels']}; only"
    )
    with refused(model := bert(**config), ValueError, message):
        fold_temperature(model, 1.7)
    with refused(model, ValueError, message):
        fold(model, TemperatureScaling().fit([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]], [0, 1, 1]))


def test_one_sigmoid_is_no_regression() -> None:
    model = bert(num_labels=1, problem_type="multi_label_classification")
    before = logits_of(model)
    fold_temperature(model, 1.7)
    assert_divided(logits_of(model), before, 1.7)


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
