"""Folding of scalers: the model's own logits become those that the scaler makes of them, or nothing changes.

`test_every_classifier` folds a matrix into every class of transformers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from scipy.special import expit, softmax
from sklearn.exceptions import NotFittedError
from torch import nn
from transformers import BertForSequenceClassification

from hf_calib import fold, fold_temperature
from hf_calib.export.fold import check_can_be_folded
from hf_calib.scaling import (
    AutoScaling,
    DirichletScaling,
    MatrixScaling,
    PerLabelTemperatureScaling,
    PriorCorrection,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    TemperatureScaling,
    VectorScaling,
)
from hf_calib.scaling.curves import HistogramBinning, IsotonicScaling, SplineScaling
from tests.helpers.architectures import (
    ARCHITECTURES,
    TEXT,
    assert_same_weights,
    bert,
    build,
    logits_of,
    randomised,
    refused,
    some_inputs,
    weights_of,
)

PRIORS = ([0.2] * 5, [0.6, 0.1, 0.1, 0.1, 0.1])
SIGMOID = {"problem_type": "multi_label_classification"}


def scaler_of(kind: Any, **fitted: Any) -> Any:
    """A scaler as if it had been fitted, to numbers far from those of doing nothing."""
    scaler = kind() if isinstance(kind, type) else kind
    for name, value in fitted.items():
        setattr(scaler, f"{name}_", value)
    return scaler


def made(kind: str, n: int = 5, *, bias: bool = True) -> Any:
    rng = np.random.default_rng(3)
    numbers = {"bias": rng.normal(size=n) * bias}
    vector, matrix = rng.uniform(0.3, 2, n), rng.normal(size=(n, n))
    kinds: dict[str, Callable[[], Any]] = {
        "temperature": lambda: scaler_of(TemperatureScaling, temperature=1.7),
        "sigmoids": lambda: scaler_of(TemperatureScaling(multi_label=True), temperature=1.7),
        "per_label_temperature": lambda: scaler_of(PerLabelTemperatureScaling, temperatures=2 * vector),
        "vector": lambda: scaler_of(VectorScaling, weight=vector, **numbers),
        "structured_vector": lambda: scaler_of(StructuredVectorScaling, weight=vector, **numbers),
        "matrix": lambda: scaler_of(MatrixScaling, weight=matrix, **numbers),
        "structured_matrix": lambda: scaler_of(StructuredMatrixScaling, weight=matrix, **numbers),
        "auto": lambda: scaler_of(AutoScaling, weight=matrix, **numbers),
    }
    return kinds[kind]()


# ---- The logits, and the record ----

MODELS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: build(name) for name in ("Bart", "Bert", "DeiTWithTeacher", "ResNet", "T5")},
    # Decoders take no second row without a padding token.
    **{name: lambda name=name: build(name, pad_token_id=None) for name in ("GPT2", "XLNet")},
    "BertForToken": lambda: build("BertForTokenClassification"),
    "Bert, multi-label": lambda: bert(**SIGMOID),
    "Bert, one sigmoid": lambda: bert(**SIGMOID, num_labels=1),
    "Llama, multi-label": lambda: build("Llama", **SIGMOID),
}
HIDDEN = ("Bert", "DistilBert", "Roberta", "XLNet", "DeiTWithTeacher")
MODELS |= {
    f"{name}, as many labels as hidden units": lambda name=name: build(name, num_labels=16) for name in HIDDEN
}
KINDS = {
    **dict.fromkeys([name for name in MODELS if name.endswith("units")], ("temperature", "vector", "matrix")),
    "Bert": ("temperature", "auto", "vector", "matrix"),
    "Bert, multi-label": ("sigmoids", "per_label_temperature"),
    "Bert, one sigmoid": ("sigmoids",),
    "BertForToken": ("temperature", "matrix"),
    "DeiTWithTeacher": ("temperature", "structured_vector"),
    "GPT2": ("temperature", "structured_matrix"),
    "Llama, multi-label": ("per_label_temperature",),
}


def numbers_of(kind: str, scaler: Any) -> dict[str, Any]:
    """What is recorded of a scaler besides its method."""
    if kind in ("temperature", "sigmoids"):
        return {"temperature": 1.7}
    if kind == "per_label_temperature":
        return {"temperatures": scaler.temperatures_.tolist()}
    if "vector" in kind:
        return {"weight": scaler.weight_.tolist(), "bias": scaler.bias_.tolist()}
    return {"sha256": sha256(scaler.weight_.tobytes() + scaler.bias_.tobytes()).hexdigest()}


def assert_scaled(after: torch.Tensor, before: torch.Tensor, scaler: Any) -> None:
    wanted = scaler.transform(before.double().numpy())
    np.testing.assert_allclose(after.double().numpy(), wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n in MODELS for k in KINDS.get(n, ("temperature",))])
def test_logits_are_scaled_and_recorded_and_saved(name: str, kind: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    before = logits_of(model)
    scaler = made(kind, before.shape[-1], bias=name != "GPT2")
    assert fold(model, scaler) is model
    assert_scaled(logits_of(model), before, scaler)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_scaled(logits_of(loaded), before, scaler)
    method = "temperature" if kind == "sigmoids" else kind
    head = ARCHITECTURES.get(name.partition(",")[0], ["classifier"])
    record = {"method": method, **numbers_of(kind, scaler), "folded": True, "head": head}
    assert model.config.calibration == loaded.config.calibration == record
    got = "temperature 1.7" if method == "temperature" else f"{kind} scaling"
    with refused(loaded, ValueError, f"expected model to be folded only once, got a model with {got} in its"):
        fold(loaded, scaler)


def test_a_shared_bias_is_changed_once() -> None:
    model: Any = build("DeiTWithTeacher")
    model.distillation_classifier.bias = model.cls_classifier.bias
    before, scaler = logits_of(model), made("matrix")
    assert_scaled(logits_of(fold(model, scaler)), before, scaler)


@pytest.mark.parametrize("temperature", [1e-5, 0.05, 1.0, 1.000001, 20.0, 1e5])
def test_any_temperature(temperature: float) -> None:
    """As a bare number it is folded as the scaler, bit for bit."""
    model, other = bert(), bert()
    before = logits_of(model)
    assert fold_temperature(model, np.float64(temperature)) is model
    scaler = scaler_of(TemperatureScaling, temperature=temperature)
    assert_scaled(logits_of(model), before, scaler)
    assert_same_weights(fold(other, scaler), weights_of(model))
    assert other.config.calibration == json.loads(json.dumps(model.config.calibration))
    if temperature == 1:
        assert_same_weights(model, weights_of(bert()))


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
        assert_scaled(model(**some_inputs(model))[0], before, made("temperature"))


@pytest.mark.parametrize(
    ("scaler", "config"),
    [
        *((scaler, {}) for scaler in (TemperatureScaling(), VectorScaling(), MatrixScaling(), AutoScaling())),
        *((kind(), {}) for kind in (StructuredVectorScaling, StructuredMatrixScaling)),
        *((kind(multi_label=True), SIGMOID) for kind in (TemperatureScaling, AutoScaling)),
        *(
            (kind, SIGMOID)
            for kind in (PerLabelTemperatureScaling(), StructuredVectorScaling(multi_label=True))
        ),
    ],
)
def test_fitted_scalers_serve_their_probabilities(scaler: Any, config: dict[str, Any]) -> None:
    model, generator = bert(**config), torch.Generator().manual_seed(4)
    logits = logits_of(model, {"input_ids": torch.randint(10, 50, (60, 9), generator=generator)})
    labels = torch.multinomial((logits / 2).softmax(-1), 1, generator=generator)[:, 0]
    if config:  # right four times in five
        labels = ((logits > 0) ^ (torch.arange(60) % 5 == 0)[:, None]).long()
    scaler.fit(logits.numpy(), labels.numpy())
    before = logits_of(model)
    after = logits_of(fold(model, scaler)).double().numpy()
    served = expit(after) if config else softmax(after, axis=-1)
    np.testing.assert_allclose(served, scaler.predict_proba(before.numpy()), rtol=0, atol=1e-6)


def test_a_bias_that_was_taken_out_comes_back(tmp_path: Path) -> None:
    model = bert()
    model.classifier = nn.Linear(16, 5, bias=False)
    randomised(model)
    model.classifier.weight.requires_grad_(False)
    before, scaler = logits_of(model), made("vector")
    fold(model, scaler).save_pretrained(tmp_path)
    assert not model.classifier.bias.requires_grad
    assert_scaled(logits_of(type(model).from_pretrained(tmp_path)), before, scaler)


@pytest.mark.parametrize("kind", [None, "temperature", "vector", "matrix"])
def test_a_prior_correction_is_folded_with_the_map_before_it(kind: str | None, tmp_path: Path) -> None:
    first: Any = None if kind is None else made(kind)
    model, scaler = bert(), PriorCorrection(*PRIORS, first)
    before = logits_of(model).double()
    mapped = before.numpy() if first is None else first.transform(before.numpy())
    wanted = softmax(mapped, axis=-1) * np.divide(*PRIORS[::-1])
    fold(model, scaler).save_pretrained(tmp_path)
    after = logits_of(type(model).from_pretrained(tmp_path)).double()
    assert_scaled(after, before, scaler)
    np.testing.assert_allclose(
        after.softmax(-1), wanted / wanted.sum(axis=-1, keepdims=True), rtol=0, atol=1e-6
    )
    saved = json.loads((tmp_path / "config.json").read_text())["calibration"]
    assert saved.pop("train_prior") == pytest.approx(PRIORS[0])
    assert saved.pop("target_prior") == pytest.approx(PRIORS[1])
    numbers = {} if first is None else numbers_of(str(kind), first)
    recorded = {} if kind is None else {"scaler": kind, **numbers}
    assert saved == {"method": "prior_correction", "folded": True, "head": ["classifier"], **recorded}
    unchanged, decoder = PriorCorrection(PRIORS[0], PRIORS[0], made("temperature")), build("GPT2")
    before = logits_of(decoder)
    assert_scaled(logits_of(fold(decoder, unchanged)), before, unchanged)  # which needs no bias


def test_the_record_keeps_what_is_there_but_of_another_map() -> None:
    model, training = bert(), {"loss": "focal", "criterion": "nll", "split": "calibration", "n_examples": 9}
    model.config.calibration = fitted = {**training, "temperature": 1.7, "folded": False}
    fold(model, scaler := made("matrix"))
    record = {"method": "matrix", **numbers_of("matrix", scaler), "folded": True, "head": ["classifier"]}
    assert model.config.calibration == {**training, **record}
    assert fitted["folded"] is False  # the caller's dict is his
    other = bert()
    other.config.calibration = None  # as after a head was replaced
    assert fold_temperature(other, 1.7).config.calibration["folded"] is True


# ---- Batches ----


def test_inputs_with_labels_as_a_loader_gives_them() -> None:
    model, ids = bert(), torch.randint(0, 60, (3, 7))
    before = logits_of(model)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 99])}
    batch = transformers.BatchEncoding(inputs)
    fold_temperature(model, 1.7, batch=batch)
    assert_scaled(logits_of(model), before, made("temperature"))
    assert "labels" in batch


def test_speech_needs_a_batch() -> None:
    text = {name: value for name, value in TEXT.items() if name != "max_position_embeddings"}
    layers = {"conv_dim": [8, 8], "conv_stride": [4, 4], "conv_kernel": [4, 4]}
    more = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_labels": 5}
    config = transformers.Wav2Vec2Config(**text, **layers, **more)
    model = randomised(transformers.Wav2Vec2ForSequenceClassification(config))
    message = "expected model to take input_ids or pixel_values, got 'input_values'; pass batch"
    with refused(model, ValueError, message):
        fold_temperature(model, 1.7)
    batch = {"input_values": torch.randn(2, 400)}
    before = logits_of(model, batch)
    fold_temperature(model, 1.7, batch=batch)
    assert_scaled(logits_of(model, batch), before, made("temperature"))


# ---- Models and scalers that are refused ----


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


class Hooked(BertForSequenceClassification):
    """Its logits pass through a function."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = self.hook(outputs.logits)
        return outputs


def hooked(hook: Callable[[torch.Tensor], torch.Tensor], n: int = 5) -> Any:
    model = randomised(Hooked(transformers.BertConfig(**TEXT, num_labels=n)))
    model.hook = hook
    return model


def convolutional() -> Any:
    return randomised(Convolutional(transformers.BertConfig(**TEXT, num_labels=5)))


def fails_the_second_time() -> Callable[[torch.Tensor], torch.Tensor]:
    calls = iter((True, False))

    def hook(logits: torch.Tensor) -> torch.Tensor:
        if next(calls):
            return logits
        raise KeyboardInterrupt("by the user")

    return hook


def changed(change: Callable[[Any], object], **config: Any) -> Callable[[], Any]:
    """A model after a change of it."""

    def model() -> Any:
        found = bert(**config)
        with torch.no_grad():
            change(found)
        return found

    return model


def share_a_weight(model: Any) -> None:
    model.classifier.weight = model.bert.pooler.dense.weight


def pack_in_integers(model: Any) -> None:
    """As bitsandbytes keeps weights, in a subclass of nn.Linear."""
    model.classifier.weight = nn.Parameter(torch.zeros(5, 16, dtype=torch.uint8), requires_grad=False)


def zero(model: Any) -> None:
    nn.init.zeros_(model.classifier.weight)
    nn.init.zeros_(model.classifier.bias)


LINEAR = "expected model to have a linear head .* got "
ONCE = {"num_labels": 1}
REFUSED: list[tuple[Callable[[], Any], Any, str]] = [
    (lambda: hooked(torch.tanh), 1.7, LINEAR + r".*'classifier'\]; divide the logits outside the model"),
    (lambda: hooked(torch.tanh, 16), 1.7, LINEAR + ".*'classifier'"),
    (convolutional, 1.7, LINEAR + "no such layers; divide the"),
    (lambda: hooked(torch.tanh), made("vector"), "that vector scaling can be folded into, got .*; keep the"),
    (lambda: hooked(lambda z: z.roll(1, -1)), made("matrix"), "matrix scaling can be folded into, got .*; keep the"),
    (lambda: hooked(lambda z: 2 * z), made("vector"), r"got \['classifier'\], which lose precision with it"),
    (changed(share_a_weight, num_labels=16), 1.7, "linear head"),
    (changed(lambda m: nn.utils.parametrizations.weight_norm(m.classifier)), 1.7, "linear head"),
    (bert, 1e44, r"lose precision at 1e\+44"),
    (bert, scaler_of(VectorScaling, weight=np.full(5, 1e-44), bias=np.zeros(5)), "lose precision with it"),
    (changed(lambda m: m.classifier.bias[0].fill_(torch.inf)), 1.7, "not all 0, got NaN or infinity"),
    (changed(zero), 1.7, "be finite and not all 0, got all 0"),
    (lambda: bert().bfloat16(), 1.7, "got torch.bfloat16 in bert.*; call model.float"),
    (lambda: bert().half(), 1.7, "got torch.float16 in bert.*; call model.float"),
    (changed(pack_in_integers), 1.7, "got torch.uint8 in classifier.weight; fold the model before it is"),
    *((lambda config=config: bert(**config), scaler, "expected model to be a classifier, got problem_type=.*; only")
      for config in (ONCE, {**ONCE, "problem_type": "regression"}, {"problem_type": "regression"})
      for scaler in (1.7, made("temperature"))),
    (lambda: build("GPT2"), made("vector"), "bias in its head for vector scaling, got score without one, and GPT2"),
    (lambda: build("Llama"), made("matrix"), "bias in its head for matrix scaling, got score without one, and Llama"),
    (lambda: build("GPT2"), PriorCorrection(*PRIORS), "head for prior correction, got sc"),
    (lambda: bert(**SIGMOID), PriorCorrection(*PRIORS), "be a single-label classifier, as the scaler is"),
    (bert, PriorCorrection([1, 1], [1, 2]), "fitted on 5 classes, as the model has, got 2"),
    (bert, made("vector", 4), "expected scaler to be fitted on 5 classes, as the model has, got 4"),
    (bert, made("matrix", 4), "expected scaler to be fitted on 5 classes, as the model has, got 4"),
    (lambda: bert(**SIGMOID), made("temperature"), "a single-label classifier, as the scaler is, got problem_ty"),
    (lambda: bert(**SIGMOID), made("matrix"), "a single-label classifier, as the scaler is, got problem_ty"),
    (bert, made("sigmoids"), "model to be a multi-label classifier, as the scaler is, got problem_type=None"),
    (bert, made("per_label_temperature"), "model to be a multi-label classifier, as the scaler is"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "scaler", "message"), REFUSED)
def test_what_cannot_be_folded_is_refused(model: Callable[[], Any], scaler: Any, message: str) -> None:
    with refused(built := model(), ValueError, message):
        fold_temperature(built, scaler) if isinstance(scaler, float) else fold(built, scaler)


NUMBERS_REFUSED: list[tuple[str, str, Any, str]] = [
    *(("temperature", "temperature", v, f"finite and above 0, got {v}") for v in (0.0, -1.7, np.nan, -np.inf)),
    *(("sigmoids", "temperature", v, f"finite and above 0, got {v}") for v in (0.0, np.inf)),
    *(("per_label_temperature", "temperatures", v, f"above 0, got {v}") for v in (0.0, -1.7)),
    *(("per_label_temperature", "temperatures", v, "finite, got NaN or inf") for v in (np.nan, np.inf)),
    *((kind, name, v, "finite, got NaN or infinity")
      for kind in ("vector", "matrix") for name in ("weight", "bias") for v in (np.nan, -np.inf)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "value", "message"), NUMBERS_REFUSED)
def test_numbers_that_make_no_map_are_refused(kind: str, name: str, value: float, message: str) -> None:
    scaler, model = made(kind), bert(**(SIGMOID if kind in ("sigmoids", "per_label_temperature") else {}))
    if name == "temperature":
        scaler.temperature_ = value
    else:
        getattr(scaler, f"{name}_")[2] = value
    with refused(model, ValueError, f"expected scaler.{name}_ to be {message}.*; fit it again"):
        fold(model, scaler)


@pytest.mark.parametrize(
    ("temperature", "error", "message"),
    [
        (0.0, ValueError, "expected temperature to be finite and above 0, got 0.0; 1.0 leaves the logits"),
        *((value, ValueError, f"got {value}") for value in (-1.0, float("nan"), float("inf"))),
        (True, TypeError, "expected temperature to be a number, got bool; pass a float"),
        ("1.5", TypeError, "be a number, got str"),
        (torch.ones(3), TypeError, "be a number, got Tensor"),
    ],
)
def test_refused_temperature(temperature: Any, error: type[Exception], message: str) -> None:
    with refused(model := bert(), error, message):
        fold_temperature(model, temperature)


def test_objects_of_the_wrong_type_are_refused() -> None:
    way_out = (
        "one of TemperatureScaling, PerLabelTemperatureScaling, VectorScaling, MatrixScaling.*, got .*; keep"
    )
    model = bert()
    for scaler in (DirichletScaling(), HistogramBinning(), IsotonicScaling(), SplineScaling(), 1.7):
        with refused(model, TypeError, way_out):
            fold(model, scaler)  # type: ignore[arg-type]
    unfitted = (TemperatureScaling(), VectorScaling(), MatrixScaling(), PerLabelTemperatureScaling())
    for kind in (*unfitted, PriorCorrection(*PRIORS, VectorScaling())):
        with refused(model, NotFittedError, "not fitted"):
            fold(model, kind)
    with pytest.raises(TypeError, match="expected model to be a transformers model, got Linear"):
        fold_temperature(nn.Linear(3, 3), 1.7)
    with refused(model.bert, TypeError, "expected model to return logits, got BaseModelOutput"):
        fold_temperature(model.bert, 1.7)
    with refused(model, TypeError, "expected batch to be a dict of tensors, got Tensor"):
        fold_temperature(model, 1.7, batch=torch.zeros(1, 3))  # type: ignore[arg-type]
    with refused(model, ValueError, "expected batch to be what the model takes, got ValueError"):
        fold_temperature(model, 1.7, batch={"pixels": torch.zeros(1, 3)})
    with refused(failing := hooked(fails_the_second_time()), KeyboardInterrupt, "by the user"):
        fold_temperature(failing, 1.7)
    assert check_can_be_folded(model) == {}
    with pytest.raises(ValueError, match="folded only once"):
        check_can_be_folded(fold(model, made("vector")))


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)  # torch moves this to torchao
def test_a_quantised_body_and_a_quantised_head() -> None:
    model = bert()
    model.bert = torch.ao.quantization.quantize_dynamic(model.bert, {nn.Linear})
    before = logits_of(model)
    fold_temperature(model, 1.7)
    assert_scaled(logits_of(model), before, made("temperature"))
    model = torch.ao.quantization.quantize_dynamic(bert(), {nn.Linear})
    before = logits_of(model)
    with pytest.raises(ValueError, match=r"a linear head .*, got no such layers; divide the logits outside"):
        fold_temperature(model, 1.7)
    assert torch.equal(logits_of(model), before)


# peft 0.21 reads a name that transformers 5.23 deprecates.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_have_to_be_merged(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "base")
    base = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapters")
    with refused(adapted, ValueError, "got PEFT layers .*; fold into the result of model.merge_and_unload"):
        fold_temperature(adapted, 1.7)
    # The same layers without the outer PeftModel, among them the head's ModulesToSaveWrapper.
    with refused(adapted.base_model.model, ValueError, "got PEFT layers"):
        fold_temperature(adapted.base_model.model, 1.7)
    how = {"pretrained_model_name_or_path": tmp_path / "adapters", "num_labels": 5}
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(**how)
    message = r"got PEFT layers .*; merge them: peft\.AutoPeftModelForSequenceClassification\.from_pretrained"
    with refused(loaded, ValueError, message):
        fold_temperature(loaded, 1.7)
    apart = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapters", num_labels=5)
    for merged in (adapted.merge_and_unload(), apart.merge_and_unload()):
        before = logits_of(merged.eval())
        fold_temperature(merged, 1.7)
        assert_scaled(logits_of(merged), before, made("temperature"))


@pytest.mark.parametrize(
    ("share", "temperature", "message"),
    [
        # The head is halved: the error c / 2 is the same share of the largest logit z / 2 as c of z.
        (8e-6, 1.7, ""),
        (1.25e-5, 1.7, r"have a linear head whose .* got \['classifier'\]; divide"),
        # Divided by 20, the error is 19 times the share.
        (8e-6 / 19, 20.0, ""),
        (1.25e-5 / 19, 20.0, r"got \['classifier'\], which lose precision at 20"),
    ],
)
def test_logits_agree_up_to_1e_5_of_the_largest(share: float, temperature: float, message: str) -> None:
    offset = torch.zeros(5)
    model = hooked(lambda logits: logits + offset)
    # So that dividing the head divides the logits only nearly.
    offset[0] = share * float(logits_of(model).abs().max())
    if not message:
        fold_temperature(model, temperature, batch=some_inputs(model))
    else:
        with refused(model, ValueError, message):
            fold_temperature(model, temperature, batch=some_inputs(model))


# ---- Left as found ----


def draw(logits: torch.Tensor) -> torch.Tensor:
    """From every random stream, as a model may also in evaluation mode."""
    torch.rand(3)
    np.random.rand(3)
    random.random()
    return logits


@pytest.mark.parametrize("temperature", [1.7, 1e44], ids=["folded", "refused"])
def test_random_streams_are_where_they_were(temperature: float) -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]

    model, before = hooked(draw), states()
    with suppress(ValueError):
        fold_temperature(model, temperature)
    assert hasattr(model.config, "calibration") == (temperature == 1.7)
    assert states() == before
    model(**some_inputs(model))
    assert all(now != then for now, then in zip(states(), before, strict=True))


def test_modes_and_gradients_are_as_they_were_and_it_trains_on() -> None:
    model = bert().train()
    model.bert.encoder.eval()
    model.bert.embeddings.requires_grad_(False)
    model(**some_inputs(model), labels=torch.tensor([0])).loss.backward()
    modes = [module.training for module in model.modules()]
    before = [(p.requires_grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    fold_temperature(model, 1.7)
    assert [module.training for module in model.modules()] == modes
    for parameter, (trainable, gradient) in zip(model.parameters(), before, strict=True):
        assert parameter.requires_grad == trainable
        assert gradient is None if parameter.grad is None else torch.equal(parameter.grad, gradient)
    assert torch.is_grad_enabled()
    folded, fresh = fold_temperature(bert(), 1.7), bert()
    fresh.load_state_dict(folded.state_dict())
    for each in (folded, fresh):
        each(**some_inputs(each), labels=torch.tensor([0])).loss.backward()
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(folded.parameters(), fresh.parameters(), strict=True)
    )


def read_newer() -> str:
    return torch.backends.cuda.matmul.fp32_precision


def set_newer(precision: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = precision


@pytest.mark.parametrize("precision", ["highest", "high", "medium", "tf32"])
def test_float32_precision(precision: str) -> None:
    """Also where it was set through the interface that came with torch 2.9, which has other words for it."""
    newer = precision == "tf32"
    if newer and not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has the older interface only")
    read, switch = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    if newer:
        read, switch = read_newer, set_newer
    seen, before = list[str](), read()

    def watch(logits: torch.Tensor) -> torch.Tensor:
        seen.append(read())
        return logits

    switch(precision)
    try:
        fold_temperature(hooked(watch), 1.7)
        assert set(seen) == {"ieee" if newer else "highest"}
        assert read() == precision
    finally:
        switch(before)


def test_under_autocast_and_with_a_forward_that_training_in_bf16_has_wrapped() -> None:
    for wrapped in (False, True):
        model = bert()
        before = logits_of(model)
        if wrapped:  # as accelerate does
            model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
            fold_temperature(model, 1.7)
            del model.forward
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                fold_temperature(model, 1.7)
        assert_scaled(logits_of(model), before, made("temperature"))
