"""The fingerprint of a model's weights, which shows whether a calibrator next to them is theirs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from hf_calib._errors import check
from hf_calib._records import check_same_weights
from hf_calib.scaling.saved_map import MAP_NAME, SavedMap


def fingerprint(model: Any) -> str:
    """Return the SHA-256 of a model's weights: their names, dtypes, shapes and bytes, in order.

    It does not depend on the device, and does not change if the model is saved and loaded in the
    same dtype. Files next to a model are matched to it by this fingerprint.

    Args:
        model: any `nn.Module`; parameters and persistent buffers count.

    Returns:
        64 hexadecimal digits.

    >>> layer = torch.nn.Linear(2, 2)
    >>> before = fingerprint(layer)
    >>> with torch.no_grad():
    ...     _ = layer.bias.add_(1)
    >>> len(before), fingerprint(layer) == before
    (64, False)
    """
    state = model.state_dict()
    # The state of a module's own may be of any type.
    return hash_of(
        {name: state[name] for name in state if isinstance(state[name], Tensor)}
    )


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors by name, as `fingerprint` does for a model."""
    # Sorted, since the order of a state depends on that of the attributes in the code.
    found = sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # NumPy has no bfloat16, but the bytes are the same.
        values = tensor.detach().cpu().contiguous().reshape(-1)
        found.update(values.view(torch.uint8).numpy().data)
    return found.hexdigest()


def fingerprint_if_whole(model: Any) -> str | None:
    """The fingerprint of a model; None if some weights are elsewhere or of another kind."""
    weights = [each.data for each in model.parameters()]
    is_whole = all(type(each) is Tensor and not each.is_meta for each in weights)
    return fingerprint(model) if is_whole else None


def is_loaded_alike(model: Any) -> bool:
    """Whether a model that is saved and loaded has the same fingerprint.

    Adapters and classes of the user's have other names when they are loaded, and weights of
    another dtype than float32 may be loaded in any.
    """
    is_stock = type(model).__module__.startswith("transformers.")
    has_adapters = getattr(model, "_hf_peft_config_loaded", False)
    is_float = all(each.dtype == torch.float32 for each in model.parameters())
    return is_stock and not has_adapters and is_float


def is_in_weights(saved: SavedMap, model: Any, place: str | os.PathLike[str]) -> bool:
    """Whether the calibrator beside a model is folded into it; raise if it is of other weights."""
    wanted = saved.about.get("fingerprint")
    is_folded = saved.about.get("folded") is True
    # The weights of a compiled model have other names.
    plain = getattr(model, "_orig_mod", model)
    # Fingerprints are of weights in float32. They say nothing of another dtype, or of no device.
    is_comparable = all(
        each.dtype == torch.float32 and not each.is_meta for each in plain.parameters()
    )
    if wanted is None or not (is_folded or is_comparable):
        return False
    way_out = "remove the file, and calibrate this model again"
    requirement = f"the model to have weights in float32, as in {MAP_NAME} in {place}"
    got = "weights of another type"
    load_again = f"load the model in float32, or {way_out}"
    check(is_comparable, requirement, got, load_again)
    what = f"{MAP_NAME} in {place}"
    got = "the fingerprint of other weights"
    check_same_weights(what, wanted, fingerprint(plain), got, way_out)
    return is_folded
