"""Arrays of every kind that reach a metric: torch tensors, masked arrays, ragged rows; seeds of every size."""

from __future__ import annotations

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
