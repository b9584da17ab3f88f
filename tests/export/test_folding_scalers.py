"""Folding of fitted scalers: the model's own logits become those that the scaler makes of them."""

from __future__ import annotations

import copy
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy.special import expit, softmax
from sklearn.exceptions import NotFittedError
from torch import nn

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
    Squashed,
    assert_same_weights,
    bert,
    build,
    logits_of,
    randomised,
    refused,
    weights_of,
)

N_LABELS = 5
WITHOUT_BIAS = {"GPT2", "Llama", "Qwen2"}


def with_values(scaler: Any, **fitted: Any) -> Any:
    """A scaler as if it had been fitted, to numbers far from those of doing nothing."""
    for name, value in fitted.items():
        setattr(scaler, name, value)
    return scaler


def made(kind: str, n_labels: int = N_LABELS, *, bias: bool = True) -> Any:
    rng = np.random.default_rng(3)
    offsets = rng.normal(size=n_labels) if bias else np.zeros(n_labels)
    if kind == "vector":
        return with_values(VectorScaling(), weight_=rng.uniform(0.3, 2, n_labels), bias_=offsets)
    if kind == "matrix":
        return with_values(MatrixScaling(), weight_=rng.normal(size=(n_labels, n_labels)), bias_=offsets)
    if kind == "structured_vector":
        return with_values(StructuredVectorScaling(), weight_=rng.uniform(0.3, 2, n_labels), bias_=offsets)
    if kind == "structured_matrix":
        weight = rng.normal(size=(n_labels, n_labels))
        return with_values(StructuredMatrixScaling(), weight_=weight, bias_=offsets)
    if kind == "auto":
        return with_values(AutoScaling(), weight_=rng.normal(size=(n_labels, n_labels)), bias_=offsets)
    if kind == "per_label_temperature":
        return with_values(PerLabelTemperatureScaling(), temperatures_=rng.uniform(0.3, 3, n_labels))
    return with_values(TemperatureScaling(), temperature_=1.7)


def assert_scaled(after: torch.Tensor, before: torch.Tensor, scaler: Any) -> None:
    wanted = scaler.transform(before.double().numpy())
    np.testing.assert_allclose(after.double().numpy(), wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


def fitted_on(model: Any, scaler: Any, n: int = 60) -> Any:
    """Fit on the model's own logits, with labels that they do not determine."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(10, 50, (n, 9), generator=generator)
    logits = logits_of(model, {"input_ids": ids})
    if model.config.problem_type == "multi_label_classification":
        labels = ((logits > 0) ^ (torch.arange(n) % 5 == 0)[:, None]).long()  # right four times in five
    else:
        labels = torch.multinomial((logits / 2).softmax(-1), 1, generator=generator)[:, 0]
    return scaler.fit(logits.numpy(), labels.numpy())


@pytest.mark.parametrize("kind", ["auto", "structured_vector", "structured_matrix"])
@pytest.mark.parametrize("name", ["Bert", "GPT2", "DeiTWithTeacher"])
def test_architecture_with_each_map(name: str, kind: str) -> None:
    model = build(name)
    before, scaler = logits_of(model), made(kind, bias=name not in WITHOUT_BIAS)
    fold(model, scaler)
    assert_scaled(logits_of(model), before, scaler)
    assert model.config.calibration["method"] == kind
    assert model.config.calibration["head"] == ARCHITECTURES[name]


@pytest.mark.parametrize("kind", ["vector", "matrix"])
@pytest.mark.parametrize("name", sorted(WITHOUT_BIAS))
def test_a_bias_that_loading_would_drop_is_refused(name: str, kind: str) -> None:
    model = build(name)
    message = (
        f"bias in its head for {kind} scaling, got score without one, and {type(model).__name__} makes none"
    )
    with refused(model, ValueError, message):
        fold(model, made(kind))
    assert model.score.bias is None


def test_a_bias_that_was_taken_out_comes_back(tmp_path: Path) -> None:
    model = bert()
    model.classifier = nn.Linear(16, N_LABELS, bias=False)
    randomised(model)
    model.classifier.weight.requires_grad_(False)
    before, scaler = logits_of(model), made("vector")
    fold(model, scaler)
    assert_scaled(logits_of(model), before, scaler)
    assert not model.classifier.bias.requires_grad
    model.save_pretrained(tmp_path)
    assert_scaled(logits_of(type(model).from_pretrained(tmp_path)), before, scaler)


@pytest.mark.parametrize("kind", ["vector", "matrix"])
@pytest.mark.parametrize("name", ["Bert", "DistilBert", "Roberta", "XLNet", "DeiTWithTeacher"])
def test_as_many_labels_as_hidden_units(name: str, kind: str) -> None:
    model = build(name, num_labels=16)
    before, scaler = logits_of(model), made(kind, 16)
    fold(model, scaler)
    assert_scaled(logits_of(model), before, scaler)
    assert model.config.calibration["head"] == ARCHITECTURES[name]


@pytest.mark.parametrize(
    "scaler",
    [
        TemperatureScaling(),
        VectorScaling(),
        MatrixScaling(),
        StructuredVectorScaling(),
        StructuredMatrixScaling(),
        AutoScaling(),
    ],
)
def test_fitted_scalers_serve_their_probabilities(scaler: Any) -> None:
    model = bert()
    fitted_on(model, scaler)
    before = logits_of(model)
    fold(model, scaler)
    served = softmax(logits_of(model).double().numpy(), axis=-1)
    np.testing.assert_allclose(served, scaler.predict_proba(before.numpy()), rtol=0, atol=1e-6)


def test_a_temperature_is_folded_as_by_fold_temperature() -> None:
    ours = bert()
    theirs = copy.deepcopy(ours)
    scaler = fitted_on(ours, TemperatureScaling())
    fold(ours, scaler)
    fold_temperature(theirs, scaler.temperature_)
    assert_same_weights(ours, weights_of(theirs))
    assert ours.config.calibration == theirs.config.calibration


def test_token_classification() -> None:
    model = randomised(transformers.BertForTokenClassification(transformers.BertConfig(**TEXT, num_labels=3)))
    before, scaler = logits_of(model), made("matrix", 3)
    fold(model, scaler)
    assert before.shape == (1, 13, 3)
    assert_scaled(logits_of(model), before, scaler)


def hash_of(scaler: Any) -> str:
    return sha256(scaler.weight_.tobytes() + scaler.bias_.tobytes()).hexdigest()


class TestPriorCorrection:
    PRIORS = ([0.2] * 5, [0.6, 0.1, 0.1, 0.1, 0.1])

    @pytest.mark.parametrize("kind", [None, "temperature", "vector", "matrix"])
    def test_is_folded_with_the_map_before_it(self, kind: str | None, tmp_path: Path) -> None:
        model = bert()
        first = None if kind is None else made(kind)
        scaler = PriorCorrection(*self.PRIORS, first)
        before = logits_of(model).double().numpy()
        mapped = before if first is None else first.transform(before)
        ratio = np.divide(*self.PRIORS[::-1])
        wanted = softmax(mapped, axis=-1) * ratio
        fold(model, scaler)
        after = logits_of(model)
        assert_scaled(after, torch.from_numpy(before), scaler)
        served = softmax(after.double().numpy(), axis=-1)
        np.testing.assert_allclose(served, wanted / wanted.sum(axis=-1, keepdims=True), rtol=0, atol=1e-6)
        model.save_pretrained(tmp_path)
        assert_scaled(logits_of(type(model).from_pretrained(tmp_path)), torch.from_numpy(before), scaler)

        saved = json.loads((tmp_path / "config.json").read_text())["calibration"]
        assert saved.pop("train_prior") == pytest.approx(self.PRIORS[0])
        assert saved.pop("target_prior") == pytest.approx(self.PRIORS[1])
        recorded = {} if kind is None else {"scaler": kind}
        if kind == "temperature":
            recorded["temperature"] = first.temperature_
        if kind == "vector":
            recorded |= {"weight": first.weight_.tolist(), "bias": first.bias_.tolist()}
        if kind == "matrix":
            recorded["sha256"] = hash_of(first)
        assert saved == {"method": "prior_correction", "folded": True, "head": ["classifier"], **recorded}
        with refused(model, ValueError, "folded only once, got a model with prior_correction"):
            fold(model, scaler)

    def test_none_needs_no_bias(self) -> None:
        model = build("GPT2")
        before, scaler = logits_of(model), PriorCorrection([0.2] * 5, [0.2] * 5, made("temperature"))
        fold(model, scaler)
        assert_scaled(logits_of(model), before, scaler)

    def test_what_cannot_be_folded(self) -> None:
        with refused(model := build("GPT2"), ValueError, "head for prior correction, got sc"):
            fold(model, PriorCorrection(*self.PRIORS))
        several = bert(problem_type="multi_label_classification")
        with refused(several, ValueError, "be a single-label classifier, as the scaler is"):
            fold(several, PriorCorrection(*self.PRIORS))
        with refused(model := bert(), NotFittedError, "not fitted"):
            fold(model, PriorCorrection(*self.PRIORS, VectorScaling()))
        with refused(model := bert(), ValueError, "fitted on 5 classes, as the model has, got 2"):
            fold(model, PriorCorrection([1, 1], [1, 2]))


class TestMultiLabel:
    @pytest.mark.parametrize(
        "scaler",
        [
            PerLabelTemperatureScaling(),
            TemperatureScaling(multi_label=True),
            StructuredVectorScaling(multi_label=True),
            AutoScaling(multi_label=True),
        ],
        ids=["each", "one", "structured", "auto"],
    )
    def test_served_by_the_sigmoid(self, scaler: Any) -> None:
        model = bert(problem_type="multi_label_classification")
        fitted_on(model, scaler)
        before = logits_of(model)
        fold(model, scaler)
        served = expit(logits_of(model).double().numpy())
        np.testing.assert_allclose(served, scaler.predict_proba(before.numpy()), rtol=0, atol=1e-6)

    def test_needs_no_bias(self) -> None:
        model = build("Llama", problem_type="multi_label_classification")
        before, scaler = logits_of(model), made("per_label_temperature")
        fold(model, scaler)
        assert_scaled(logits_of(model), before, scaler)

    @pytest.mark.parametrize("kind", ["temperature", "vector", "matrix"])
    def test_a_scaler_for_the_softmax_is_refused(self, kind: str) -> None:
        model = bert(problem_type="multi_label_classification")
        with refused(
            model, ValueError, "model to be a single-label classifier, as the scaler is, got problem_ty"
        ):
            fold(model, made(kind))

    @pytest.mark.parametrize("problem_type", [None, "single_label_classification"])
    def test_a_scaler_for_the_sigmoid_is_refused_elsewhere(self, problem_type: str | None) -> None:
        model = bert(problem_type=problem_type)
        with refused(model, ValueError, "model to be a multi-label classifier, as the scaler is"):
            fold(model, made("per_label_temperature"))
        several = with_values(TemperatureScaling(multi_label=True), temperature_=1.7)
        with refused(model, ValueError, "model to be a multi-label classifier, as the scaler is"):
            fold(model, several)


class TestRecord:
    def test_is_json_and_holds_the_numbers_but_a_matrix(self, tmp_path: Path) -> None:
        for kind in ("vector", "matrix", "per_label_temperature"):
            problem_type = "multi_label_classification" if "label" in kind else None
            model, scaler = bert(problem_type=problem_type), made(kind)
            fold(model, scaler).save_pretrained(tmp_path / kind)
            saved = json.loads((tmp_path / kind / "config.json").read_text())["calibration"]
            assert saved == model.config.calibration
            common = {"method": kind, "folded": True, "head": ["classifier"]}
            numbers = {
                "vector": lambda s: {"weight": s.weight_.tolist(), "bias": s.bias_.tolist()},
                "matrix": lambda s: {"sha256": hash_of(s)},
                "per_label_temperature": lambda s: {"temperatures": s.temperatures_.tolist()},
            }
            assert saved == {**common, **numbers[kind](scaler)}

    def test_forgets_a_temperature_that_was_fitted_but_not_folded(self) -> None:
        model = bert()
        model.config.calibration = {"temperature": 1.7, "folded": False, "loss": "focal"}
        fold(model, made("matrix"))
        record = {"method": "matrix", "folded": True, "head": ["classifier"], "loss": "focal"}
        assert model.config.calibration == {**record, "sha256": hash_of(made("matrix"))}

    def test_a_temperature_is_not_folded_onto_another_scaler(self) -> None:
        model = fold(bert(), made("vector"))
        with refused(model, ValueError, "folded only once, got a model with vector scaling in its head"):
            fold_temperature(model, 1.7)
        with pytest.raises(ValueError, match="folded only once"):
            check_can_be_folded(model)


class Rotated(transformers.BertForSequenceClassification):
    """Each class's logit becomes the next class's, which no temperature notices."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits.roll(1, -1)
        return outputs


class Summed(transformers.BertForSequenceClassification):
    """The head is used twice, so that its bias counts twice."""

    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids, **kwargs)
        outputs.logits = outputs.logits + super().forward(input_ids.flip(1), **kwargs).logits
        return outputs


class TestRollback:
    @pytest.mark.parametrize("kind", ["vector", "matrix"])
    @pytest.mark.parametrize("model_class", [Squashed, Rotated])
    def test_logits_that_the_head_does_not_give(self, model_class: Any, kind: str) -> None:
        model = randomised(model_class(transformers.BertConfig(**TEXT, num_labels=N_LABELS)))
        message = (
            f"expected model to have a linear head that {kind} scaling can be folded into, got .*; keep the"
        )
        with refused(model, ValueError, message):
            fold(model, made(kind))

    def test_a_head_that_is_used_twice(self) -> None:
        model = randomised(Summed(transformers.BertConfig(**TEXT, num_labels=N_LABELS)))
        with refused(model, ValueError, r"got \['classifier'\], which lose precision with it"):
            fold(model, made("vector"))
        before, scaler = logits_of(model), made("vector", bias=False)
        fold(model, scaler)
        assert_scaled(logits_of(model), before, scaler)

    def test_a_shared_bias_is_changed_once(self) -> None:
        model = build("DeiTWithTeacher")
        model.distillation_classifier.bias = model.cls_classifier.bias
        before, scaler = logits_of(model), made("matrix")
        fold(model, scaler)
        assert_scaled(logits_of(model), before, scaler)

    def test_numbers_that_float32_weights_cannot_hold(self) -> None:
        scaler = with_values(VectorScaling(), weight_=np.full(N_LABELS, 1e-44), bias_=np.zeros(N_LABELS))
        with refused(model := bert(), ValueError, "which lose precision with it"):
            fold(model, scaler)


class TestRefusedScalers:
    @pytest.mark.parametrize(
        "scaler", [DirichletScaling(), HistogramBinning(), IsotonicScaling(), SplineScaling(), 1.7]
    )
    def test_what_is_no_linear_function_of_the_logits(self, scaler: Any) -> None:
        message = "one of TemperatureScaling, PerLabelTemperatureScaling, VectorScaling, MatrixScaling.*, got .*; keep"
        with refused(model := bert(), TypeError, message):
            fold(model, scaler)

    @pytest.mark.parametrize(
        "scaler", [TemperatureScaling(), VectorScaling(), MatrixScaling(), PerLabelTemperatureScaling()]
    )
    def test_what_is_not_fitted(self, scaler: Any) -> None:
        with refused(model := bert(), NotFittedError, "not fitted"):
            fold(model, scaler)

    @pytest.mark.parametrize("kind", ["vector", "matrix"])
    def test_other_classes(self, kind: str) -> None:
        with refused(
            model := bert(), ValueError, "expected scaler to be fitted on 5 classes, as the model has, got 4"
        ):
            fold(model, made(kind, 4))

    @pytest.mark.parametrize("value", [0.0, -1.7, np.nan, np.inf, -np.inf])
    def test_a_temperature_that_divides_nothing(self, value: float) -> None:
        message = rf"expected scaler.temperature_ to be finite and above 0, got {value}; fit it again"
        with refused(model := bert(), ValueError, message):
            fold(model, with_values(TemperatureScaling(), temperature_=value))
        several = bert(problem_type="multi_label_classification")
        with refused(several, ValueError, message):
            fold(several, with_values(TemperatureScaling(multi_label=True), temperature_=value))

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (0.0, "above 0, got 0.0"),
            (-1.7, "above 0, got -1.7"),
            (np.nan, "finite, got NaN or infinity"),
            (np.inf, "finite, got NaN or infinity"),
        ],
    )
    def test_one_of_many_temperatures_that_divides_nothing(self, value: float, message: str) -> None:
        scaler = made("per_label_temperature")
        scaler.temperatures_[2] = value
        model = bert(problem_type="multi_label_classification")
        with refused(model, ValueError, f"expected scaler.temperatures_ to be {message}; fit it again"):
            fold(model, scaler)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("name", ["weight_", "bias_"])
    @pytest.mark.parametrize("kind", ["vector", "matrix"])
    def test_weights_that_are_not_finite(self, kind: str, name: str, value: float) -> None:
        scaler = made(kind)
        getattr(scaler, name)[2] = value
        message = f"expected scaler.{name} to be finite, got NaN or infinity; fit it again"
        with refused(model := bert(), ValueError, message):
            fold(model, scaler)


def test_what_no_model_is_refused_for_whatever_scaler() -> None:
    with pytest.raises(TypeError, match="expected model to be a transformers model, got Linear"):
        fold(nn.Linear(3, 3), made("vector", 3))
    with pytest.raises(ValueError, match=r"got torch.bfloat16 in bert"):
        check_can_be_folded(bert().bfloat16())
    assert check_can_be_folded(bert()) == {}
