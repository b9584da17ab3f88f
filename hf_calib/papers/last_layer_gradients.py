"""How hard each example pulls at the last layer."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib.losses import CalibrationLoss
from hf_calib.losses.loss import check_loss
from hf_calib.metrics.checks import FloatArray, as_array, as_floats


def last_layer_gradient_norms(
    loss: CalibrationLoss, logits: ArrayLike, labels: ArrayLike, features: ArrayLike, *, bias: bool = True
) -> FloatArray:
    r"""The norm of each example's gradient in the weights of a linear classifier head.

    Which examples a loss learns from, in a network that was trained with it or with another one. The logits
    $z = W h + b$ and the features are all that it takes: no backward pass per example, and no copy of the
    weights per example.

    $$\nabla_W \ell = g h^\top, \quad \nabla_b \ell = g, \quad g = \nabla_z \ell(z, y) \qquad\Rightarrow\qquad
    \|\nabla_{W, b} \, \ell\| = \|g\| \sqrt{\|h\|^2 + 1}$$

    Args:
        loss: from `make_loss`; any that has a loss per example.
        logits: (N, C) float.
        labels: (N,) int in [0, C), -100 for a norm of 0.
        features: (N, H) float, what enters the head: a forward pre-hook on the head sees them.
        bias: whether the head has a bias.

    Returns:
        (N,) Euclidean norms of the gradients of the examples' own losses, computed in float64.

    Raises:
        TypeError: if loss is not a `CalibrationLoss`, or a dtype is wrong.
        ValueError: if shapes or labels do not fit, or the loss couples the batch.

    Notes:
        For cross entropy and for `bsce_gra` with norm 2, ||g|| is a function of the Brier score B alone:
        B^(1/2) and B^((gamma + 1) / 2). All that spreads their norms at one Brier score is ||h||.

    References:
        Lin et al. 2025, Uncertainty weighted gradients for model calibration (BSCE-GRA), 5.2, Figures 4 and 5.

    >>> from hf_calib.losses import make_loss
    >>> last_layer_gradient_norms(make_loss("cross_entropy"), [[0.0, 0.0]], [1], [[3.0, 4.0]], bias=False)
    array([3.53553391])
    """
    check_loss(loss)
    if loss.couples_batch:
        way_out = "its gradient is one of the batch"
        raise InputValueError(expected("loss", "have a loss per example", repr(loss.name), way_out))
    stated, inputs = as_floats("logits", logits), as_floats("features", features)
    targets = as_array("labels", labels)
    if (
        stated.ndim != 2
        or inputs.ndim != 2
        or len(inputs) != len(stated)
        or targets.shape != stated.shape[:1]
    ):
        got = f"shapes {stated.shape}, {targets.shape} and {inputs.shape}"
        way_out = "pass one row of each an example"
        raise InputValueError(
            expected("logits, labels and features", "be (N, C), (N,) and (N, H)", got, way_out)
        )
    if targets.dtype.kind not in "iu":
        way_out = "pass class indices"
        raise InputTypeError(expected("labels", "hold integers", f"dtype {targets.dtype}", way_out))
    # A row's loss depends on its own logits only: the gradient of the sum has each row's gradient in its row.
    rows = torch.tensor(stated, requires_grad=True)
    (gradients,) = torch.autograd.grad(
        loss(rows, torch.as_tensor(targets.astype(np.int64)), reduction="sum"), rows
    )
    pull: FloatArray = np.linalg.norm(gradients.numpy(), axis=1)
    return pull * np.sqrt((inputs**2).sum(axis=1) + bias)
