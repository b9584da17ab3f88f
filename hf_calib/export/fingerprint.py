"""The fingerprint of a model's weights, by which what lies beside a model is known to be about this one."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch


def fingerprint(model: Any) -> str:
    """The SHA-256 of a model's weights: names, dtypes, shapes and bytes, in the order of the names.

    The same model, saved and loaded again in the dtype it was saved in, has the same one, on any device.

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
    # The extra state of a module is not a weight.
    state = model.state_dict().items()
    return hash_of({name: tensor for name, tensor in state if isinstance(tensor, torch.Tensor)})


def hash_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The SHA-256 of tensors by name, as `fingerprint` has it of a whole model."""
    found = sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # NumPy has no bfloat16; its bytes are the same.
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
