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
from hf_calib.plots.style import drawing


def grad_cam(
    model: Any,
    image: Any,
    label: int | None = None,
    *,
    processor: Any,
    scaler: Any = None,
) -> Figure:
    """Draw an image next to the part of it that is evidence for a class, with the model's confidence in it.

    A confident answer for a part of the image that has nothing to do with it is one not to trust.
    For networks of convolutions, as the papers' are; the package `grad-cam` has the map of a vision
    transformer.

    Args:
        model: an image classifier of `transformers`; it stays in its mode.
        image: a Pillow image, or an array (H, W, 3) of 8 bits.
        label: the class; by default the predicted one.
        processor: the model's image processor.
        scaler: fitted, for the confidence after calibration, too.

    References:
        Selvaraju et al., Grad-CAM, 2017, Eq. 1 and 2.
    """
    if not isinstance(image, Image.Image):
        image = Image.fromarray(np.asarray(image))
    picture = image.convert("RGB")
    names = model.config.id2label
    is_known = label is None or label in names
    requirement = f"label to lie in 0..{len(names) - 1}"
    check(is_known, requirement, label, "leave it out for the predicted class")
    pixels = processor(images=picture, return_tensors="pt")["pixel_values"]
    heat, logits, chosen = class_activation_map(model, pixels, label)
    several = model.config.problem_type == "multi_label_classification"
    probs = expit(logits) if several else softmax(logits)
    words = f"{names[chosen]}: {probs[chosen]:.2f}"
    if scaler is not None:
        (calibrated,) = scaler.predict_proba(logits[None])
        words += f" before calibration, {calibrated[chosen]:.2f} after"
    with drawing(5.2, 2.9) as figure:
        left, right = figure.subplots(1, 2)
        left.imshow(picture)
        left.set_title("image", fontsize=8)
        right.imshow(picture.convert("L"), cmap="gray")
        # Matplotlib stretches the map over the image, smoothly.
        extent = (-0.5, picture.width - 0.5, picture.height - 0.5, -0.5)
        look: Any = {"cmap": "inferno", "alpha": 0.55, "vmin": 0, "vmax": 1}
        right.imshow(heat, extent=extent, interpolation="bilinear", **look)
        right.set_title(words, fontsize=8)
        for axes in (left, right):
            axes.set_axis_off()
    return figure


def class_activation_map(
    model: Any, pixel_values: Tensor, label: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float64], int]:
    """For pixels (1, 3, H, W), the map (h, w) in [0, 1] of the last feature map, the logits (C,) and the class."""
    modes = [(part, part.training) for part in model.modules()]
    maps: list[tuple[nn.Module, Tensor]] = []

    def keep(module: nn.Module, _inputs: Any, output: Any) -> None:
        is_map = isinstance(output, Tensor) and output.ndim == 4
        if is_map and output.shape[2:].numel() > 1:
            maps.append((module, output))

    handles = [module.register_forward_hook(keep) for module in model.modules()]
    try:
        model.eval()
        with torch.enable_grad():
            pixels = pixel_values.to(next(model.parameters())).requires_grad_()
            logits = model(pixel_values=pixels).logits[0]
            has_features = not all(_cuts_patches(module) for module, _ in maps)
            requirement = "the model to have a feature map"
            way_out = "take a network of convolutions"
            check(has_features, requirement, type(model).__name__, way_out)
            _, features = maps[-1]
            chosen = int(logits.argmax()) if label is None else label
            (gradient,) = torch.autograd.grad(logits[chosen], features)
    finally:
        for handle in handles:
            handle.remove()
        for part, mode in modes:
            part.training = mode
    weights = gradient.mean(dim=(2, 3), keepdim=True)
    evidence = (weights * features.detach()).sum(dim=1)
    heat = evidence[0].clamp_min(0).float()
    heat = heat / heat.max().clamp_min(1e-12)
    return heat.cpu().numpy(), logits.detach().double().cpu().numpy(), chosen


def _cuts_patches(module: nn.Module) -> bool:
    """Whether its map only contains patches of the image, before any layer that depends on the class: no features."""
    return bool(getattr(module, "kernel_size", 0) == getattr(module, "stride", 1))
