"""Random streams of Python, NumPy and PyTorch, kept still for the training while side work draws from them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_state_left_as_found() -> Iterator[None]:
    """Restore Python's, NumPy's and PyTorch's random states (CPU, and the current CUDA device) on exit."""
    python = random.getstate()
    numpy = np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
