"""Two processes that are one gloo group: forked from the test's own, or launched as a user would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def forked(function: Callable[[], None]) -> int:
    """Call a function in a forked process, which has imported everything already; return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of other threads: those of pytest and arrow hold nothing that the function needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            function()
            # Not through the interpreter's own end: there, gloo's threads have aborted a finished process.
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return child


def run_on_two(
    work: Callable[[int, Path], None], folder: Path, *, seconds: float = 300
) -> None:
    """Call `work(rank, folder)` on each of two processes; where one fails, end the other, and raise."""
    left = {
        forked(lambda rank=rank: _join_and_work(rank, work, folder)): rank
        for rank in (0, 1)
    }  # type: ignore[misc]
    deadline = time.monotonic() + seconds
    try:
        while left:
            for child in list(left):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    rank, code = left.pop(child), os.waitstatus_to_exitcode(status)
                    assert code == 0, f"process {rank} ended with {code}: see stderr"
            assert time.monotonic() < deadline, (
                f"the processes did not end in {seconds} seconds"
            )
            time.sleep(0.02)
    finally:
        for child in left:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _join_and_work(rank: int, work: Callable[[int, Path], None], folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.resetwarnings()  # a process of its own would not have pytest's
    # What accelerate asks for; the processes are joined already.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="localhost",
        MASTER_PORT="0",
    )
    if accelerate := sys.modules.get(
        "accelerate.state"
    ):  # the tests before this one had one process
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.GradientState._reset_state()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    work(rank, folder)
    dist.barrier()


def torchrun(module: str, *arguments: str) -> None:
    """Run a module in two processes, in an environment for tests."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    done = subprocess.run(
        [*launcher, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
