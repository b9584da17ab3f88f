"""Work-arounds for versions of other libraries, each with the version that ends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_float32() -> Iterator[None]:
    """Switch TF32 and bfloat16 products off for the length of a with block.

    Once a program has set `fp32_precision`, the interface of torch 2.9, the older one refuses to answer. The
    older one can go once torch 2.9 is the oldest supported.
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        matmul: Any = torch.backends.cuda.matmul
        newer = matmul.fp32_precision
        matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = newer
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
