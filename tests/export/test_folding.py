"""Folding of scalers: the model's own logits become those that the scaler makes of them, or nothing changes.

`test_every_classifier` folds a matrix into every class of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
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
        "sigmoids": lambda: scaler_of(
            TemperatureScaling(multi_label=True), temperature=1.7
        ),
        "per_label_temperature": lambda: scaler_of(
            PerLabelTemperatureScaling, temperatures=2 * vector
        ),
        "vector": lambda: scaler_of(VectorScaling, weight=vector, **numbers),
        "structured_vector": lambda: scaler_of(
            StructuredVectorScaling, weight=vector, **numbers
        ),
        "matrix": lambda: scaler_of(MatrixScaling, weight=matrix, **numbers),
        "structured_matrix": lambda: scaler_of(
            StructuredMatrixScaling, weight=matrix, **numbers
        ),
        "auto": lambda: scaler_of(AutoScaling, weight=matrix, **numbers),
    }
    return kinds[kind]()


# ---- The logits, and the record ----

MODELS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "Bert": (bert, ("temperature", "auto", "vector", "matrix")),
    "BertForToken": (lambda: build("BertForTokenClassification"), ("temperature",)),
    "Bert, multi-label": (
        lambda: bert(**SIGMOID),
        ("sigmoids", "per_label_temperature"),
    ),
    "Bert, one sigmoid": (lambda: bert(**SIGMOID, num_labels=1), ("sigmoids",)),
    "DeiTWithTeacher": (lambda: build("DeiTWithTeacher"), ("structured_vector",)),
    # Decoders take no second row without a padding token.
    "GPT2": (lambda: build("GPT2", pad_token_id=None), ("structured_matrix",)),
    "XLNet, as many labels as hidden units": (
        lambda: build("XLNet", num_labels=16),
        ("vector", "matrix"),
    ),
}


def numbers_of(kind: str, scaler: Any) -> dict[str, Any]:
    """What is recorded of a scaler besides its method."""
    if kind in ("temperature", "sigmoids"):
        return {"temperature": 1.7}
    if kind == "per_label_temperature":
        return {"temperatures": scaler.temperatures_.tolist()}
    if "vector" in kind:
        return {"weight": scaler.weight_.tolist(), "bias": scaler.bias_.tolist()}
    return {
        "sha256": sha256(scaler.weight_.tobytes() + scaler.bias_.tobytes()).hexdigest()
    }


def assert_scaled(after: torch.Tensor, before: torch.Tensor, scaler: Any) -> None:
    wanted = scaler.transform(before.double().numpy())
    np.testing.assert_allclose(
        after.double().numpy(), wanted, rtol=0, atol=2e-6 * np.abs(wanted).max()
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name, (_, kinds) in MODELS.items() for kind in kinds],
)
def test_logits_are_scaled_and_recorded_and_saved(
    name: str, kind: str, tmp_path: Path
) -> None:
    model = MODELS[name][0]()
    before = logits_of(model)
    scaler = made(kind, before.shape[-1], bias=name != "GPT2")
    assert fold(model, scaler) is model
    assert_scaled(logits_of(model), before, scaler)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert_scaled(logits_of(loaded), before, scaler)
    method = "temperature" if kind == "sigmoids" else kind
    head = ARCHITECTURES.get(name.partition(",")[0], ["classifier"])
    record = {
        "method": method,
        **numbers_of(kind, scaler),
        "folded": True,
        "head": head,
    }
    assert model.config.calibration == loaded.config.calibration == record
    got = "temperature 1.7" if method == "temperature" else f"{kind} scaling"
    with refused(
        loaded,
        ValueError,
        f"expected model to be folded only once, got a model with {got} in its",
    ):
        fold(loaded, scaler)


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 20.0])
def test_any_temperature(temperature: float) -> None:
    """As a bare number it is folded as the scaler, bit for bit."""
    model, other = bert(), bert()
    before = logits_of(model)
    assert fold_temperature(model, np.float64(temperature)) is model
    scaler = scaler_of(TemperatureScaling, temperature=temperature)
    assert_scaled(logits_of(model), before, scaler)
    assert_same_weights(fold(other, scaler), weights_of(model))
    assert other.config.calibration == json.loads(json.dumps(model.config.calibration))


@pytest.mark.parametrize(
    ("scaler", "config"),
    [
        *(
            (scaler, {})
            for scaler in (
                TemperatureScaling(),
                VectorScaling(),
                MatrixScaling(),
                AutoScaling(),
            )
        ),
        *((kind(), {}) for kind in (StructuredVectorScaling, StructuredMatrixScaling)),
        *(
            (kind(multi_label=True), SIGMOID)
            for kind in (TemperatureScaling, AutoScaling)
        ),
        *(
            (kind, SIGMOID)
            for kind in (
                PerLabelTemperatureScaling(),
                StructuredVectorScaling(multi_label=True),
            )
        ),
    ],
)
def test_fitted_scalers_serve_their_probabilities(
    scaler: Any, config: dict[str, Any]
) -> None:
    model, generator = bert(**config), torch.Generator().manual_seed(4)
    logits = logits_of(
        model, {"input_ids": torch.randint(10, 50, (60, 9), generator=generator)}
    )
    labels = torch.multinomial((logits / 2).softmax(-1), 1, generator=generator)[:, 0]
    if config:  # right four times in five
        labels = ((logits > 0) ^ (torch.arange(60) % 5 == 0)[:, None]).long()
    scaler.fit(logits.numpy(), labels.numpy())
    before = logits_of(model)
    after = logits_of(fold(model, scaler)).double().numpy()
    served = expit(after) if config else softmax(after, axis=-1)
    np.testing.assert_allclose(
        served, scaler.predict_proba(before.numpy()), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("kind", [None, "vector"])
def test_a_prior_correction_is_folded_with_the_map_before_it(
    kind: str | None, tmp_path: Path
) -> None:
    first: Any = None if kind is None else made(kind)
    model, scaler = bert(), PriorCorrection(*PRIORS, first)
    before = logits_of(model).double()
    mapped = before.numpy() if first is None else first.transform(before.numpy())
    wanted = softmax(mapped, axis=-1) * np.divide(*PRIORS[::-1])
    fold(model, scaler).save_pretrained(tmp_path)
    after = logits_of(type(model).from_pretrained(tmp_path)).double()
    assert_scaled(after, before, scaler)
    np.testing.assert_allclose(
        after.softmax(-1),
        wanted / wanted.sum(axis=-1, keepdims=True),
        rtol=0,
        atol=1e-6,
    )
    saved = json.loads((tmp_path / "config.json").read_text())["calibration"]
    assert saved.pop("train_prior") == pytest.approx(PRIORS[0])
    assert saved.pop("target_prior") == pytest.approx(PRIORS[1])
    numbers = {} if first is None else numbers_of(str(kind), first)
    recorded = {} if kind is None else {"scaler": kind, **numbers}
    assert saved == {
        "method": "prior_correction",
        "folded": True,
        "head": ["classifier"],
        **recorded,
    }


def test_the_record_keeps_what_is_there_but_of_another_map() -> None:
    model, training = (
        bert(),
        {"loss": "focal", "criterion": "nll", "split": "calibration", "n_examples": 9},
    )
    model.config.calibration = fitted = {
        **training,
        "temperature": 1.7,
        "folded": False,
    }
    fold(model, scaler := made("matrix"))
    record = {
        "method": "matrix",
        **numbers_of("matrix", scaler),
        "folded": True,
        "head": ["classifier"],
    }
    assert model.config.calibration == {**training, **record}
    assert fitted["folded"] is False  # the caller's dict is his


# ---- Batches ----


def test_inputs_with_labels_as_a_loader_gives_them() -> None:
    model, ids = bert(), torch.randint(0, 60, (3, 7))
    before = logits_of(model)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.tensor([0, 1, 99]),
    }
    batch = transformers.BatchEncoding(inputs)
    fold_temperature(model, 1.7, batch=batch)
    assert_scaled(logits_of(model), before, made("temperature"))
    assert "labels" in batch


# ---- Models and scalers that are refused ----


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


def packed_in_integers() -> Any:
    """As bitsandbytes keeps weights, in a subclass of nn.Linear."""
    model = bert()
    model.classifier.weight = nn.Parameter(
        torch.zeros(5, 16, dtype=torch.uint8), requires_grad=False
    )
    return model


LINEAR = "expected model to have a linear head .* got "
REFUSED: list[tuple[Callable[[], Any], Any, str]] = [
    (lambda: hooked(torch.tanh), 1.7, LINEAR + r".*'classifier'\]; divide the logits outside the model"),
    (lambda: hooked(torch.tanh), made("vector"), "that vector scaling can be folded into, got .*; keep the"),
    (lambda: hooked(lambda z: 2 * z), made("vector"), r"got \['classifier'\], which lose precision with it"),
    (torch.inference_mode()(lambda: bert()), 1.7, "weights that can be changed, got .*; load it with"),
    (lambda: bert().bfloat16(), 1.7, "got torch.bfloat16 in bert.*; call model.float"),
    (packed_in_integers, 1.7, "got torch.uint8 in classifier.weight; fold the model before it is"),
    (lambda: bert(num_labels=1), 1.7, "expected model to be a classifier, got problem_type=.*; only"),
    (lambda: build("GPT2"), made("vector"), "bias in its head for vector scaling, got score without one, and GPT2"),
    (lambda: bert(**SIGMOID), PriorCorrection(*PRIORS), "be a single-label classifier, as the scaler is"),
    (bert, made("matrix", 4), "expected scaler to be fitted on 5 classes, as the model has, got 4"),
    (lambda: bert(**SIGMOID), made("matrix"), "a single-label classifier, as the scaler is, got problem_ty"),
    (lambda: hooked(lambda z: 0 * z), 1.7, "logits to be finite and not all 0, got all 0; pass"),
    (lambda: hooked(lambda z: z / 0), 1.7, "logits to be finite and not all 0, got NaN or infinity;"),
    (bert, made("sigmoids"), "model to be a multi-label classifier, as the scaler is, got problem_type=None"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "scaler", "message"), REFUSED)
def test_what_cannot_be_folded_is_refused(
    model: Callable[[], Any], scaler: Any, message: str
) -> None:
    with refused(built := model(), ValueError, message):
        fold_temperature(built, scaler) if isinstance(scaler, float) else fold(
            built, scaler
        )


@pytest.mark.parametrize(
    "temperature", [1e30, 1e-30, 10**400, -1.5, math.nan, math.inf, Fraction(10) ** 400]
)
def test_a_temperature_that_no_fit_finds_is_not_folded(temperature: Any) -> None:
    with refused(bert(), ValueError, r"temperature to lie in \[1e-05, 100000\], got"):
        fold_temperature(bert(), temperature)


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("name", ["weight_", "bias_"])
def test_numbers_that_a_head_cannot_hold_are_not_folded(
    name: str, number: float
) -> None:
    scaler = made("vector")
    setattr(scaler, name, np.full(5, number))
    with refused(bert(), ValueError, rf"expected {name[:-1]} to be float in \[-1e\+12"):
        fold(bert(), scaler)
    corrected = PriorCorrection(*PRIORS, scaler)
    with refused(bert(), ValueError, rf"expected {name[:-1]} to be float in \[-1e\+12"):
        fold(bert(), corrected)


@pytest.mark.parametrize("temperature", [0.0, 1e30, 1e-30, math.nan, "2", None])
def test_a_temperature_set_by_hand_is_checked(temperature: Any) -> None:
    scaler = made("temperature")
    scaler.temperature_ = temperature
    with refused(bert(), ValueError, "expected .*(temperature|scaler) to "):
        fold(bert(), scaler)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_refused_with_the_way_out() -> None:
    compiled: Any = torch.compile(bert())
    with pytest.raises(
        TypeError, match=r"got OptimizedModule; .* without torch.compile"
    ):
        fold_temperature(compiled, 1.7)


def test_objects_of_the_wrong_type_are_refused() -> None:
    model = bert()
    with refused(
        model,
        ValueError,
        r"expected temperature to lie in \[1e-05, 100000\], got 0.0; 1.0 does not",
    ):
        fold_temperature(model, 0.0)
    with refused(
        model, TypeError, "expected temperature to be a number, got '1.5'; pass a float"
    ):
        fold_temperature(model, "1.5")  # type: ignore[arg-type]
    with refused(
        model,
        TypeError,
        "one of TemperatureScaling, PerLabelTemperatureScaling, .*, got .*; save",
    ):
        fold(model, DirichletScaling())
    with refused(model, NotFittedError, "not fitted"):
        fold(model, PriorCorrection(*PRIORS, VectorScaling()))
    with pytest.raises(
        TypeError, match="expected model to be a transformers model, got Linear"
    ):
        fold_temperature(nn.Linear(3, 3), 1.7)
    with refused(
        model.bert, TypeError, "expected model to return logits, got BaseModelOutput"
    ):
        fold_temperature(model.bert, 1.7)
    with refused(
        model, ValueError, "expected batch to be what the model takes, got ValueError"
    ):
        fold_temperature(model, 1.7, batch={"pixels": torch.zeros(1, 3)})
    speech = bert()
    speech.main_input_name = "input_values"
    with refused(
        speech,
        ValueError,
        "to take input_ids or pixel_values, got 'input_values'; pass batch",
    ):
        fold_temperature(speech, 1.7)


# peft 0.21 reads a name that transformers 5.23 deprecates.
@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
def test_adapters_have_to_be_merged(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "base")
    base = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        base, LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapters")
    with refused(
        adapted,
        ValueError,
        "got PEFT layers .*; fold into the result of model.merge_and_unload",
    ):
        fold_temperature(adapted, 1.7)
    how = {"pretrained_model_name_or_path": tmp_path / "adapters", "num_labels": 5}
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(**how)
    message = r"got PEFT layers .*; merge them: peft\.AutoPeftModelForSequenceClassification\.from_pretrained"
    with refused(loaded, ValueError, message):
        fold_temperature(loaded, 1.7)
    merged = (
        AutoPeftModelForSequenceClassification.from_pretrained(**how)
        .merge_and_unload()
        .eval()
    )
    before = logits_of(merged)
    assert_scaled(logits_of(fold_temperature(merged, 1.7)), before, made("temperature"))


# ---- Left as found ----


def test_modes_and_gradients_are_as_they_were() -> None:
    model = bert().train()
    model.bert.encoder.eval()
    model.bert.embeddings.requires_grad_(False)
    model(**some_inputs(model), labels=torch.tensor([0])).loss.backward()
    modes = [module.training for module in model.modules()]
    before = [
        (p.requires_grad, None if p.grad is None else p.grad.clone())
        for p in model.parameters()
    ]
    fold_temperature(model, 1.7)
    assert [module.training for module in model.modules()] == modes
    for parameter, (trainable, gradient) in zip(
        model.parameters(), before, strict=True
    ):
        assert parameter.requires_grad == trainable
        assert (
            gradient is None
            if parameter.grad is None
            else torch.equal(parameter.grad, gradient)
        )


def test_under_autocast_and_with_a_forward_that_training_in_bf16_has_wrapped() -> None:
    model = bert()
    before = logits_of(model)
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(
        model.forward
    )  # as accelerate does
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fold_temperature(model, 1.7)
    del model.forward
    assert_scaled(logits_of(model), before, made("temperature"))
