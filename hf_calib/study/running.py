"""The trainings of a study: each a process of its own, which goes on from its checkpoint if it was interrupted."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from hf_calib._errors import InputValueError, expected
from hf_calib.study.folder import LOG
from hf_calib.study.grid import Cell
from hf_calib.study.launch import Launch, Training, lock_of, not_finished
from hf_calib.study.progress import Say, in_words, name_of, progress

_LOOK_AGAIN = 0.1  # seconds
_FAILED_ALIKE = 2  # losses; then the others would fail too
_PORTS = range(20_000, 30_000)  # below those that Linux, macOS and Windows give to connections


def train_cells(launch: Launch, cells: Mapping[Cell, Path], *, jobs: int, say: Say) -> dict[Cell, str]:
    """Train what is not finished, some side by side; the failure of one does not stop the others.

    CPU threads (unless OMP_NUM_THREADS is set) and visible GPUs are shared out among the jobs.

    Args:
        launch: how.
        cells: with their folders.
        jobs: how many side by side; 0 for one on each visible GPU.
        say: takes a line of progress.

    Returns:
        The failed cells, and why.
    """
    waiting = not_finished(launch, cells)
    n_finished = len(cells) - len(waiting)
    if n_finished:
        say(f"{n_finished} of {len(cells)} trainings are finished already")
    jobs = jobs or max(1, len(_visible_gpus()))
    environments = _environments(jobs, launch)
    running: dict[int, Training] = {}
    failed: dict[Cell, str] = {}
    took: list[float] = []
    elsewhere: set[Cell] = set()
    first = next(iter(cells.values()))
    try:
        while waiting or running:
            for cell in list(waiting):
                slot = next((i for i in range(jobs) if i not in running), None)
                if slot is None:
                    break
                folder = cells[cell]
                lock = lock_of(folder)
                if lock is None:
                    if cell not in elsewhere:
                        say(f"{name_of(cell)} is being trained by another process; waiting for it")
                    elsewhere.add(cell)
                    continue
                waiting.remove(cell)
                if not not_finished(launch, {cell: folder}):  # by that other process
                    lock.close()
                    continue
                try:
                    running[slot] = Training(launch, cell, folder, lock, environments[slot])
                except OSError as error:  # a full disk
                    lock.close()
                    failed[cell] = f"it cannot be started: {error}"
                    say(f"{name_of(cell)} FAILED: {failed[cell]}")
            for slot, training in list(running.items()):
                if training.process.poll() is None:
                    continue
                del running[slot]
                reason = training.finish()
                seconds = time.monotonic() - training.started
                if reason is None:
                    took.append(seconds)
                    what = f"finished in {in_words(seconds)}"
                else:
                    failed[training.cell] = reason
                    what = f"FAILED: {reason}"
                n_open = len(waiting) + len(running)
                far = progress(len(cells), n_open, len(failed), took, jobs)
                say(f"{far}: {name_of(training.cell)} {what}")
            alike = _failed_alike(failed) if waiting and not took else None
            if alike is not None:
                for training in running.values():
                    training.ask_to_stop()
                for training in running.values():
                    training.stop()
                got = f"{len(failed)} that failed alike: {alike}"
                way_out = f"see {LOG} in {first.parent}/*; {len(waiting)} more were not started"
                raise InputValueError(expected("the first trainings", "end", got, way_out))
            time.sleep(_LOOK_AGAIN)
    except BaseException:
        for training in running.values():  # all before the first wait, which a second Ctrl-C would end
            training.ask_to_stop()
        for training in running.values():
            training.stop()
        raise
    return failed


def _failed_alike(failed: Mapping[Cell, str]) -> str | None:
    """The last line of all failures, where there are two and more of them, of different losses, and none differs."""
    last = {reason.strip().rpartition("\n")[2] for reason in failed.values()}
    if len(last) > 1 or len({cell.variant.label for cell in failed}) < _FAILED_ALIKE:
        return None
    return next(iter(last))


def _environments(jobs: int, launch: Launch) -> list[dict[str, str]]:
    """The environment variables of each job: its share of GPUs and threads."""
    made: list[dict[str, str]] = [{} for _ in range(jobs)]
    if "OMP_NUM_THREADS" not in os.environ:
        n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        for environment in made:
            environment["OMP_NUM_THREADS"] = str(max(1, n_cores // jobs))
    if jobs > 1:
        visible = _visible_gpus()
        for slot, environment in enumerate(made):
            own = visible[slot::jobs] or ([visible[slot % len(visible)]] if visible else [])
            if launch.launcher is None:  # with several, the Trainer would enlarge the batch
                own = own[:1]
            if own:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    if launch.launcher is not None:
        # torchrun and accelerate would all meet at the same port.
        for environment, port in zip(made, _free_ports(jobs), strict=True):
            environment["MASTER_PORT"] = environment["PET_MASTER_PORT"] = str(port)
    return made


def _visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [word.strip() for word in named.split(",") if word.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def _free_ports(n: int) -> list[int]:
    """Different ports, which the system gives to nobody who does not ask for them by number."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == n:
            break
    return found
