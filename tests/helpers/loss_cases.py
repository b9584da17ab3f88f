"""The losses in all their variants, and batches to feed them; shared by the `test_losses_*` files."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_calib.losses import AdaptiveLoss, CalibrationLoss, make_loss
from hf_calib.losses.statistics import chunked, dispatch, fused
from tests.helpers.gpu import on_a_gpu

torch.set_num_threads(1)  # the batches are tiny, and the cores are shared

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter takes milliseconds a row.

Variant = tuple[str, dict[str, Any]]

VARIANTS: list[Variant] = [
    ("cross_entropy", {}),
    ("label_smoothing", {}),
    ("label_smoothing", {"smoothing": 0.3}),
    ("brier", {}),
    ("focal", {}),
    ("focal", {"gamma": 0}),
    ("focal", {"gamma": 0.5}),
    ("focal", {"gamma": 1}),
    ("focal_gra", {}),
    ("flsd", {}),
    ("flsd", {"thresholds": (0.1, 0.2, 0.5), "gammas": (7, 5, 3, 2)}),
    ("flsd_gra", {}),
    ("inverse_focal", {}),
    ("inverse_focal", {"gamma": 0.5}),
    ("dual_focal", {}),
    ("dual_focal", {"gamma": 0.5}),
    ("dual_focal", {"rival": "second"}),
    ("dual_focal", {"rival": "third"}),
    ("dual_focal", {"rival": "mean2"}),
    ("dual_focal", {"rival": "mean3"}),
    ("dual_focal", {"rival": "mean_all"}),
    ("dual_focal", {"rival": 0.1}),
    ("dual_focal_gra", {}),
    ("bsce", {}),
    ("bsce", {"norm": 1}),
    ("bsce", {"norm": 1.5}),
    ("bsce", {"gamma": 4, "norm": 3}),
    ("bsce", {"gamma": 0.5}),
    ("bsce_gra", {}),
    ("bsce_gra", {"norm": 1}),
    ("ece_ce", {}),
    ("focal_calibration", {}),
    ("focal_calibration", {"distance": "l1"}),
    ("adafocal", {}),
    ("ada_dual_focal", {}),
    ("calfocal", {}),
    ("calfocal", {"per_sample": True}),
    ("entropy_regularized", {}),
    ("logit_norm", {}),
    ("logit_norm", {"p": 1.5}),
    ("logit_norm", {"p": 2}),
    ("logit_norm", {"p": 3}),
    ("mmce", {}),
    ("mmce", {"authors_code": True}),
    ("mmce", {"variant": "plain"}),
    ("mmce", {"variant": "plain", "authors_code": True}),
    ("soft_ece", {}),
    ("soft_ece", {"variant": "dece"}),
    ("kde_ece", {}),
    ("kde_ece", {"kind": "canonical"}),
    ("mbls", {"margin": 1.0}),
    ("mbls", {"margin": 0.0, "margin_weight": 0.5}),
    ("mdca", {}),
    ("mdca", {"gamma": 2.0}),
    ("avuc", {}),
    ("dft", {}),
    ("power", {}),
    ("power", {"exponent": 0.3}),
    ("power", {"exponent": 5.0}),
]
# Of the losses that read the same statistics the first: the ways to the statistics know no more of a loss.
ONE_OF_EACH = list(
    {make_loss(name, **given)._reads: (name, given) for name, given in VARIANTS[::-1]}.values()
)
if INTERPRETED:
    VARIANTS = ONE_OF_EACH


def variant_id(variant: Variant) -> str:
    name, hyperparameters = variant
    return "-".join([name, *(f"{key}={value}" for key, value in hyperparameters.items())])


def variants_but(*names: str) -> list[Variant]:
    return [variant for variant in VARIANTS if variant[0] not in names]


def make_variant(variant: Variant, n_classes: int, **kwargs: Any) -> CalibrationLoss:
    """The loss; if it adapts, with a table of an over- and under-confident model, near neither limit."""
    name, hyperparameters = variant
    loss = make_loss(name, **kwargs, **hyperparameters)
    generator = torch.Generator().manual_seed(0)
    confidences = torch.rand(400, generator=generator, dtype=torch.float64)
    correct = torch.rand(400, generator=generator, dtype=torch.float64) < 0.2 + 0.4 * confidences
    if isinstance(loss, AdaptiveLoss):
        class_gaps = torch.linspace(0.05, 0.4, n_classes)
        for progress in (0.3, 0.6):
            loss.update(confidences, correct, class_gaps=class_gaps, progress=progress)
    return loss


def random_batch(
    n_examples: int, n_classes: int, *, scale: float = 2.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits (N, C), float64, and labels (N,), every third of which is the predicted class."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n_examples, n_classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(n_classes, (n_examples,), generator=generator)
    labels[::3] = logits[::3].argmax(1)
    return logits, labels


def value_and_gradient(
    loss: CalibrationLoss, logits: Tensor, labels: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The loss, detached, and the gradient of its sum in the logits, which are left as they were."""
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, labels, **kwargs)
    value.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.detach().nan_to_num(), logits.nan_to_num())
    return value.detach(), leaf.grad


# The ways through the code: plain operations; one block of rows; many. Or, in Triton's interpreter and on a GPU, the
# kernels: a row at once; in blocks of columns.
KERNELS = INTERPRETED or on_a_gpu()
PATHS = ("kernels", "kernels in blocks") if KERNELS else ("direct", "one block", "blocks")
BOTH_ENDS = (PATHS[-1],) if INTERPRETED else (PATHS[0], PATHS[-1])


def take_path(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Send all logits one way, whatever their size."""
    if path == "plain":
        monkeypatch.setattr(fused, "takes", lambda logits, statistics: False)
    if path == "kernels in blocks":
        whole = fused._block_of
        monkeypatch.setattr(fused, "_block_of", lambda n_classes: max(2, whole(n_classes) // 2))
    monkeypatch.setattr(dispatch, "DIRECT_ELEMENTS", 2**40 if path == "direct" else 0)
    if path == "blocks":
        monkeypatch.setattr(chunked, "CPU_BLOCK_ELEMENTS", 25)
