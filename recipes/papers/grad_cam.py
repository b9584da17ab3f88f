"""Grad-CAM: the parts of an image that are evidence for a class."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from scipy.special import expit, softmax
from torch import Tensor, nn

from hf_calib._errors import check


def grad_cam(
    model: Any,
    image: Any,
    label: int | None = None,
    *,
    processor: Any,
    scaler: Any = None,
) -> Figure:
    """Draw an image next to the part of it that is evidence for a class, with the model's confidence in it.

    A confident answer for a part of the image that has nothing to do with it is one not to trust. For networks of
    convolutions, as the papers' are; the package `grad-cam` has the map of a vision transformer.

    Args:
        model: an image classifier of `transformers`; it stays in its mode.
        image: a Pillow image, or an array (H, W, 3) of 8 bits.
        label: the class; by default the predicted one.
        processor: the model's image processor.
        scaler: fitted, for the confidence after calibration, too.

    References:
        Selvaraju et al., Grad-CAM, 2017, Eq. 1 and 2.
    """
    picture = (
        image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))
    )
    picture = picture.convert("RGB")
    names = model.config.id2label
    requirement = f"label to lie in 0..{len(names) - 1}"
    check(
        label is None or label in names,
        requirement,
        label,
        "leave it out for the predicted class",
    )
    pixels = processor(images=picture, return_tensors="pt")["pixel_values"]
    heat, logits, chosen = class_activation_map(model, pixels, label)
    several = model.config.problem_type == "multi_label_classification"
    probs = expit(logits) if several else softmax(logits)
    words = f"{names[chosen]}: {probs[chosen]:.2f}"
    if scaler is not None:
        words += f" before calibration, {scaler.predict_proba(logits[None])[0, chosen]:.2f} after"
    figure = Figure(figsize=(5.2, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.imshow(picture)
    left.set_title("image", fontsize=8)
    right.imshow(picture.convert("L"), cmap="gray")
    # Stretched over the image by Matplotlib, smoothly.
    extent = (-0.5, picture.width - 0.5, picture.height - 0.5, -0.5)
    right.imshow(
        heat,
        cmap="inferno",
        alpha=0.55,
        vmin=0,
        vmax=1,
        extent=extent,
        interpolation="bilinear",
    )
    right.set_title(words, fontsize=8, parse_math=False)
    for axes in (left, right):
        axes.set_axis_off()
    return figure


def class_activation_map(
    model: Any, pixel_values: Tensor, label: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float64], int]:
    """For pixels (1, 3, H, W), the map (h, w) in [0, 1] of the last feature map, the logits (C,) and the class."""
    modes = [(part, part.training) for part in model.modules()]
    found: list[tuple[nn.Module, Tensor]] = []

    def keep(module: nn.Module, _inputs: Any, output: Any) -> None:
        if (
            isinstance(output, Tensor)
            and output.ndim == 4
            and output.shape[2] * output.shape[3] > 1
        ):
            found.append((module, output))

    handles = [module.register_forward_hook(keep) for module in model.modules()]
    try:
        model.eval()
        with torch.enable_grad():
            logits = model(
                pixel_values=pixel_values.to(next(model.parameters())).requires_grad_()
            ).logits[0]
            # Maps that only contain patches of the image, before any layer that depends on the class, are not features.
            patches = all(
                getattr(each, "kernel_size", 0) == getattr(each, "stride", 1)
                for each, _ in found
            )
            way_out = "take a network of convolutions"
            check(
                not patches,
                "the model to have a feature map",
                type(model).__name__,
                way_out,
            )
            features = found[-1][1]
            chosen = int(logits.argmax()) if label is None else label
            (gradient,) = torch.autograd.grad(logits[chosen], features)
    finally:
        for handle in handles:
            handle.remove()
        for part, mode in modes:
            part.training = mode
    heat = (
        (gradient.mean(dim=(2, 3), keepdim=True) * features.detach())
        .sum(dim=1)[0]
        .clamp_min(0)
        .float()
    )
    heat = heat / heat.max().clamp_min(1e-12)
    return heat.cpu().numpy(), logits.detach().double().cpu().numpy(), chosen
