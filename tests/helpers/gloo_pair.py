"""Two spawned processes that are one gloo group."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_on_two(work: Callable[[int, Path], None], folder: Path) -> None:
    """Call `work(rank, folder)` on each of two processes; what it raises is raised here."""
    mp.spawn(_join_and_work, args=(work, folder), nprocs=2)


def _join_and_work(rank: int, work: Callable[[int, Path], None], folder: Path) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    work(rank, folder)
    dist.barrier()
    # Not through the interpreter's own end: there, gloo's threads have aborted a finished process.
    os._exit(0)
