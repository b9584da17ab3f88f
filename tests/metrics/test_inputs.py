"""Arrays of every kind that reach a metric: torch tensors, masked arrays, ragged rows; seeds of every size."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import hf_calib.metrics as metrics
from hf_calib._errors import InputError, InputTypeError, InputValueError
from hf_calib.metrics.intervals import METRICS
from hf_calib.metrics.ranking import risk_coverage_curve
from hf_calib.plots import smooth_reliability_diagram
from hf_calib.report import calibration_report

SOFT = {"true_calibration_error"}


def tensors(n_examples: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(n_examples, 3, generator=generator).softmax(dim=1)
    return probs, torch.randint(0, 3, (n_examples,), generator=generator)


def labels_for(name: str, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(labels, 3).float() if name in SOFT else labels


# What a training script has at hand


@pytest.mark.parametrize("name", METRICS)
def test_tensors_with_a_gradient_are_read(name: str) -> None:
    probs, labels = tensors()
    labels = labels_for(name, labels)
    expected = METRICS[name].function(probs.numpy(), labels.numpy())
    assert METRICS[name].function(probs.requires_grad_(), labels) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", METRICS)
def test_narrow_tensors_are_widened(name: str, dtype: torch.dtype) -> None:
    probs, labels = tensors()
    probs = (probs * 128).round() / 128  # which bfloat16 can hold
    probs[:, 0] += 1 - probs.sum(dim=1)
    labels = labels_for(name, labels)
    expected = METRICS[name].function(probs.numpy(), labels.numpy())
    assert METRICS[name].function(probs.to(dtype), labels) == pytest.approx(
        expected, rel=1e-6, nan_ok=True
    )


def test_rows_that_bfloat16_rounds_too_far_are_refused_with_the_way_out() -> None:
    probs, labels = tensors()
    with pytest.raises(
        InputValueError,
        match=r"sum to 1, got .*; pass softmax probabilities in float32",
    ):
        metrics.accuracy(probs.bfloat16(), labels)


def test_what_numpy_cannot_read_is_refused() -> None:
    probs, labels = tensors()
    with pytest.raises(
        InputTypeError,
        match=r"probs to be a numpy array, got .*; pass one array of numbers",
    ):
        metrics.accuracy(probs.to_sparse(), labels)
    with pytest.raises(InputTypeError, match="probs to be a numpy array"):
        metrics.accuracy(list(probs.requires_grad_()), labels)
    with pytest.raises(
        InputValueError, match=r"probs to be a numpy array, got .*inhomogeneous"
    ):
        metrics.accuracy([[0.5, 0.5], [1.0]], [0, 0])
    with pytest.raises(
        InputTypeError, match="confidences to hold real numbers, got dtype <U3"
    ):
        risk_coverage_curve(["0.5"], [1])


# Masks, which a conversion to an array would drop in silence


@pytest.mark.parametrize("name", METRICS)
def test_masked_values_are_refused(name: str) -> None:
    probs, labels = (each.numpy() for each in tensors())
    labels = labels_for(name, torch.from_numpy(labels)).numpy()
    mask = np.arange(40) % 4 == 0
    function = METRICS[name].function
    with pytest.raises(
        InputValueError,
        match=r"labels to have no masked values, got .* masked of .*; drop",
    ):
        function(
            probs,
            np.ma.array(
                labels, mask=mask if labels.ndim == 1 else np.stack([mask] * 3, axis=1)
            ),
        )
    with pytest.raises(
        InputValueError, match="probs to have no masked values, got 30 masked of 120"
    ):
        function(np.ma.array(probs, mask=np.stack([mask] * 3, axis=1)), labels)
    unmasked = function(np.ma.array(probs), np.ma.array(labels, mask=False))
    assert unmasked == function(probs, labels)


# Arguments of another type or out of range, to every metric that has them

NAN, INF = float("nan"), float("inf")
WHOLE = (True, False, np.True_, 0, -1, 2.5, 15.0, "15", None, [15], {}, 10**9, NAN)
REAL = (True, False, np.True_, 0, -1, "0.1", b"1", [0.1], {}, 1j, NAN, INF)
FLAG = ("no", "False", 0, 1, None, [], 1.0)
ARGUMENTS: dict[str, tuple[object, ...]] = {
    "n_bins": WHOLE,
    "n_folds": WHOLE,
    "n_resamples": WHOLE,
    "bandwidth": REAL,
    "confidence_level": REAL,
    "debias": FLAG,
    **dict.fromkeys(("binning", "norm", "kind", "score"), ("L1", "", None, 1, ["l1"])),
    "scores": (1, None, True, "energy", ["logit"], [None], []),
}
TAKE: list[tuple[str, str]] = [
    (name, argument)
    for name in metrics.__all__
    if inspect.isfunction(getattr(metrics, name))
    for argument in inspect.signature(getattr(metrics, name)).parameters
    if argument in ARGUMENTS
]


@pytest.mark.parametrize(("name", "argument"), TAKE)
def test_arguments_of_another_type_or_out_of_range(name: str, argument: str) -> None:
    function = getattr(metrics, name)
    probs, labels = (each.numpy() for each in tensors())
    given: tuple[object, ...] = (probs, labels)
    if name == "bootstrap_interval":
        given = ("accuracy", *given)
    elif name.startswith("ood"):
        given = (probs, probs)
    elif name == "entity_scores":
        tags = ["O", "B-x", "I-x"]
        given = (metrics.find_entities(*given, np.arange(40), tag_names=tags),)
    for value in ARGUMENTS[argument]:
        with pytest.raises(InputError, match=f"^expected {argument} to "):
            function(*given, **{argument: value})


def test_arguments_of_classes() -> None:
    for value in FLAG:
        with pytest.raises(InputError, match="by_class to be True or False, got"):
            metrics.CalibrationState(n_classes=2, by_class=value)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="multi_label to be True or False, got"):
            metrics.CalibrationState(n_classes=2).update_logits(
                torch.zeros(1, 2), torch.zeros(1, dtype=int), multi_label=value
            )
    for value in WHOLE:
        with pytest.raises(InputError, match="n_bins to be"):
            metrics.CalibrationState(n_classes=2, n_bins=value)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=r"n_classes to be|at most .* sums"):
            metrics.CalibrationState(n_classes=value)  # type: ignore[arg-type]
    for correct in ([0, 2], [-1, 1], [0.5, 1.5]):
        with pytest.raises(InputError, match=r"correct to lie in \[0, 1\], got"):
            risk_coverage_curve([0.5, 0.6], correct)


# Numbers of resamples and seeds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed to be at least 0, got -1"),
        ({"seed": 0.5}, r"seed to be an integer, got 0\.5"),
        ({"seed": 2**128}, "seed to be at most 340,282,.*, got 340282"),
        ({"n_resamples": 0}, "n_resamples to be at least 1, got 0; 1000 is usual"),
        (
            {"n_resamples": 10**12},
            "n_resamples to be at most 1,000,000, got 1000000000000",
        ),
    ],
)
def test_counts_and_seeds_out_of_range(
    options: dict[str, object], message: str
) -> None:
    probs, labels = (each.numpy() for each in tensors())
    panel = {"model": (probs.max(axis=1), probs.argmax(axis=1) == labels)}
    for call in (
        lambda: metrics.bootstrap_interval("accuracy", probs, labels, **options),
        lambda: metrics.consistency_test(probs, labels, **options),
        lambda: calibration_report(probs, labels, **options),
        lambda: smooth_reliability_diagram(panel, **options),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_none_in_a_list_names_the_row() -> None:
    probs = np.full((3, 2), 0.5)
    half = [0.5, 0.5]
    cases: list[tuple[Any, Any, str]] = [
        (probs, [0, None, 1], "labels to be integers, got None in row 1; drop"),
        (
            [half, half, [0.5, None]],
            [0, 1, 1],
            "probs to be a float array, got None in row 2",
        ),
        (probs, ["a", "b", "a"], "labels to be integers, got dtype <U1"),
    ]
    for given, labels, message in cases:
        with pytest.raises(TypeError, match=message):
            metrics.expected_calibration_error(given, labels)
    with pytest.raises(TypeError, match=r"sample_weight .* got None in row 0"):
        metrics.accuracy(probs, [0, 1, 1], sample_weight=[None, 1.0, 1.0])
