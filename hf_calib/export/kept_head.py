"""The head from before the fold, kept beside a folded model, so that folding can be undone bit for bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_calib.export.fingerprint import hash_of

# Not in the model's own folder, where servers load every file of this form as weights.
FILE = Path("calibration", "head.safetensors")
_FOLDED = "sha256_of_the_folded_head"


def keep_head(folder: Path, before: Mapping[str, Tensor], folded: Mapping[str, Tensor]) -> None:
    """Write a head's tensors from before the fold, with a hash of the folded ones.

    Args:
        folder: of the model.
        before: the head's tensors, by their names in the model's state dict.
        folded: those that the model is saved with.
    """
    (folder / FILE).parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in before.items()}
    save_file(tensors, folder / FILE, metadata={_FOLDED: hash_of(folded)})


def read_kept_head(file: str | os.PathLike[str], folded: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Read what `keep_head` wrote; None where that was for other weights, as those of a head trained since.

    Args:
        file: head.safetensors; it may come from anywhere.
        folded: the tensors of the model's head as they are now.
    """
    try:
        with safe_open(file, "pt") as opened:
            is_of_these = (opened.metadata() or {}).get(_FOLDED) == hash_of(folded)
            kept = {name: opened.get_tensor(name) for name in opened.keys()} if is_of_these else {}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    fits = all(
        name in folded and tensor.shape == folded[name].shape and tensor.dtype == folded[name].dtype
        for name, tensor in kept.items()
    )
    lost = {name.rpartition(".")[2] for name in set(folded) - set(kept)}
    return kept if kept and fits and lost <= {"bias"} else None
