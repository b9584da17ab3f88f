"""Grad-CAM: which part of an image speaks for a class."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from scipy.special import expit, softmax
from torch import Tensor, nn

from hf_calib._errors import check, did_you_mean

# What vision transformers call the norm in front of the attention of a block; behind the last attention, only the token
# that is classified has a gradient.
_NORMS = ("layernorm_before", "norm1", "layer_norm1", "norm_before")


def grad_cam(
    model: Any,
    image: Any,
    label: int | str | None = None,
    *,
    processor: Any,
    scaler: Any = None,
    layer: str | None = None,
) -> Figure:
    """Draw an image beside the part of it that speaks for a class, with the model's confidence in it.

    A confident answer for a part of the image that has nothing to do with it is one not to trust.

    Args:
        model: an image classifier of `transformers`; it stays in its mode.
        image: a Pillow image, or an array (H, W, 3) of 8 bits.
        label: the class, by id or by name; by default the predicted one.
        processor: the model's image processor.
        scaler: fitted, for the confidence after calibration, too.
        layer: name of the module whose output is looked at; by default the last feature map, or in a vision
            transformer (ViT, BEiT, Swin, ...) the tokens before the last attention.

    References:
        Selvaraju et al., Grad-CAM, 2017, Eq. 1 and 2.
    """
    picture = image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))
    picture = picture.convert("RGB")
    inputs = processor(images=picture, return_tensors="pt")
    names = model.config.id2label
    if isinstance(label, str):
        numbers = {name: number for number, name in names.items()}
        way_out = did_you_mean(label, numbers)
        check(label in numbers, "label to be one of the model's classes", repr(label), way_out)
        label = numbers[label]
    requirement = f"label to lie in 0..{len(names) - 1}"
    check(label is None or label in names, requirement, label, "leave it out for the predicted class")
    heat, logits, chosen = class_activation_map(model, inputs["pixel_values"], label, layer=layer)
    several = model.config.problem_type == "multi_label_classification"
    probs = expit(logits) if several else softmax(logits)
    words = f"{names.get(chosen, chosen)}: {probs[chosen]:.2f}"
    if scaler is not None:
        words += f" before calibration, {scaler.predict_proba(logits[None])[0, chosen]:.2f} after"
    figure = Figure(figsize=(5.2, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.imshow(picture)
    left.set_title("image", fontsize=8)
    right.imshow(picture.convert("L"), cmap="gray")
    # Stretched over the image by Matplotlib, smoothly.
    extent = (-0.5, picture.width - 0.5, picture.height - 0.5, -0.5)
    right.imshow(heat, cmap="inferno", alpha=0.55, vmin=0, vmax=1, extent=extent, interpolation="bilinear")
    right.set_title(words, fontsize=8, parse_math=False)
    for axes in (left, right):
        axes.set_axis_off()
    return figure


def class_activation_map(
    model: Any, pixel_values: Tensor, label: int | None = None, *, layer: str | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float64], int]:
    """The numbers of `grad_cam` for pixels (1, 3, H, W) and a class, by default the predicted one.

    They are the map (h, w) in [0, 1] at the size of the layer, the logits (C,) and the class.
    """
    modes = [(part, part.training) for part in model.modules()]
    kept: list[Any] = []
    try:
        model.eval()
        module = _layer_of(model, pixel_values, layer)
        keep = module.register_forward_hook(lambda _module, _inputs, output: kept.append(_first(output)))
        with keep, torch.enable_grad():
            pixels = pixel_values.to(next(model.parameters())).requires_grad_()
            logits = _first(model(pixel_values=pixels))[0]
            chosen = int(logits.argmax()) if label is None else label
            (gradient,) = torch.autograd.grad(logits[chosen], kept[-1])
    finally:
        for part, mode in modes:
            part.training = mode
    features = _as_positions(kept[-1].detach(), pixel_values, model)
    weights = _as_positions(gradient, pixel_values, model).mean(dim=(2, 3), keepdim=True)
    heat = (weights * features).sum(dim=1)[0].clamp_min(0).float()
    heat = heat / heat.max().clamp_min(1e-12)
    return heat.cpu().numpy(), logits.detach().double().cpu().numpy(), chosen


def _layer_of(model: Any, pixel_values: Tensor, layer: str | None) -> nn.Module:
    modules = dict(model.named_modules())
    if layer is not None:
        check(layer in modules, "layer to name a module", repr(layer), did_you_mean(layer, modules))
        return modules[layer]
    norms = {module for name, module in modules.items() if name.rpartition(".")[2] in _NORMS}
    maps: list[nn.Module] = []
    tokens: list[nn.Module] = []

    def note(module: nn.Module, _inputs: Any, output: Any) -> None:
        if getattr(output, "ndim", 0) == 4 and output.shape[2] * output.shape[3] > 1:
            maps.append(module)
        # MobileViT's have a part of each patch as their first dimension; behind them are maps.
        elif module in norms and getattr(output, "ndim", 0) == 3 and len(output) == 1:
            tokens.append(module)

    handles = [module.register_forward_hook(note) for module in modules.values()]
    try:
        with torch.no_grad():
            model(pixel_values=pixel_values.to(next(model.parameters())))
    finally:
        for handle in handles:
            handle.remove()
    if tokens and getattr(getattr(model, "config", None), "patch_size", None):
        return tokens[-1]
    # None, or nothing but patches of the image, of which the class has not been asked yet.
    patches = all(getattr(module, "kernel_size", 0) == getattr(module, "stride", 1) for module in maps)
    way_out = "pass layer=, the name of a module whose output has positions"
    check(not patches, "the model to have a feature map", type(model).__name__, way_out)
    return maps[-1]


def _first(output: Any) -> Any:
    """The tensor of an output: the logits of a model, the first of a tuple."""
    if hasattr(output, "logits"):
        return output.logits
    return output[0] if isinstance(output, tuple) else output


def _as_positions(values: Tensor, pixel_values: Tensor, model: Any) -> Tensor:
    """(1, channels, h, w), also from tokens (1, n, channels), of which those in front are not patches."""
    if values.ndim == 4:
        return values
    height, width = (size // model.config.patch_size for size in pixel_values.shape[2:])
    while height * width > values.shape[1]:  # each stage of Swin merges two by two patches
        height, width = (height + 1) // 2, (width + 1) // 2
    patches = values[:, values.shape[1] - height * width :]
    return patches.transpose(1, 2).reshape(1, -1, height, width)
