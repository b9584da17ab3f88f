"""Grad-CAM: which part of an image speaks for a class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from hf_calib._errors import InputValueError, did_you_mean, expected

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor, nn

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
    title: str | None = None,
) -> Figure:
    """Draw an image beside the part of it that speaks for a class, with the model's confidence in it.

    For looking at single predictions, right or wrong: a confident answer for a part of the image that has nothing to
    do with it is one not to trust.

    Args:
        model: an image classifier of `transformers`, or any with logits; it stays in its mode.
        image: a Pillow image, or an array (H, W, 3) of 8 bits.
        label: the class, by id or by name; by default the predicted one.
        processor: the model's image processor.
        scaler: fitted, for the confidence after calibration, too. The map does not change the picture of a
            temperature.
        layer: name of the module whose output is looked at; by default the last feature map, or in a vision
            transformer (ViT, BEiT, Swin, ...) the tokens before the last attention.
        title: a line above the figure.

    Returns:
        A figure to show or to `save_figure`.

    Raises:
        ValueError: if the label or the layer is unknown, or no layer has positions.

    References:
        Selvaraju et al., Grad-CAM, 2017, Eq. 1 and 2.

    >>> from PIL import Image
    >>> from transformers import AutoModelForImageClassification, ViTImageProcessorPil
    >>> from hf_calib.papers.networks import CifarResNetConfig
    >>> model = AutoModelForImageClassification.from_config(CifarResNetConfig(depth=8)).eval()
    >>> processor = ViTImageProcessorPil(size={"height": 32, "width": 32})
    >>> figure = grad_cam(model, Image.new("RGB", (40, 40)), 0, processor=processor)
    >>> figure.axes[1].get_title()[:9]
    'LABEL_0: '
    """
    from matplotlib.figure import Figure
    from PIL import Image

    picture = image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))
    picture = picture.convert("RGB")
    inputs = processor(images=picture, return_tensors="pt")
    names = getattr(getattr(model, "config", None), "id2label", None) or {}
    chosen = _class_of(label, names)
    heat, logits, chosen = class_activation_map(model, inputs["pixel_values"], chosen, layer=layer)
    several = getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"
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
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    return figure


def class_activation_map(
    model: Any, pixel_values: Tensor, label: int | None = None, *, layer: str | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float64], int]:
    """The numbers of `grad_cam`.

    Args:
        model: as for `grad_cam`.
        pixel_values: (1, 3, H, W).
        label: the class's id; by default the predicted one.
        layer: as for `grad_cam`.

    Returns:
        The map (h, w) in [0, 1] at the size of the layer, 1 where most speaks for the class and all 0 where nothing
        does; the logits (C,); and the class.
    """
    import torch

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


def _class_of(label: int | str | None, names: Mapping[int, str]) -> int | None:
    if isinstance(label, str):
        found = next((number for number, name in names.items() if name == label), None)
        if found is None:
            requirement, way_out = "be one of the model's classes", did_you_mean(label, list(names.values()))
            raise InputValueError(expected("label", requirement, repr(label), way_out))
        return found
    if label is not None and names and label not in names:
        requirement, way_out = f"lie in 0..{len(names) - 1}", "leave it out for the predicted class"
        raise InputValueError(expected("label", requirement, label, way_out))
    return label


def _layer_of(model: Any, pixel_values: Tensor, layer: str | None) -> nn.Module:
    import torch

    modules = dict(model.named_modules())
    if layer is not None:
        if layer not in modules:
            raise InputValueError(
                expected("layer", "name a module", repr(layer), did_you_mean(layer, list(modules)))
            )
        return modules[layer]
    norms = {module for name, module in modules.items() if name.rpartition(".")[2] in _NORMS}
    maps: list[nn.Module] = []
    tokens: list[nn.Module] = []

    def note(module: nn.Module, _inputs: Any, output: Any) -> None:
        if _is_map(output):
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
    if all(getattr(module, "kernel_size", 0) == getattr(module, "stride", 1) for module in maps):
        # None, or nothing but patches of the image, of which the class has not been asked yet.
        way_out = "pass layer=, the name of a module whose output has positions"
        raise InputValueError(expected("the model", "have a feature map", type(model).__name__, way_out))
    return maps[-1]


def _is_map(output: Any) -> bool:
    return getattr(output, "ndim", 0) == 4 and output.shape[2] * output.shape[3] > 1


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
