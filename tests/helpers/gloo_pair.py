"""Two processes that are one gloo group: spawned, or launched as a user would."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
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


def launch(*command: str) -> None:
    """Run `python -m command` in an environment for tests."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_x"}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def torchrun(module: str, *arguments: str) -> None:
    """Run a module in two processes."""
    launch("torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", module, *arguments)
