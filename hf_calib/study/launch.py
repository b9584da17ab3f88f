"""The trainings of a study as processes: here side by side, as jobs of a scheduler, or as printed commands."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from hf_calib._errors import InputValueError, expected
from hf_calib.study.plan import (
    FAILED,
    LOG,
    Cell,
    before_secret,
    clean_up,
    is_finished,
    is_secret,
    mark_failed,
)

try:
    import fcntl
except ImportError:  # Windows: two studies that run in one folder are not kept apart there
    fcntl = None  # type: ignore[assignment]

Process = subprocess.Popen[bytes]
Say = Callable[[str], None]  # takes a line of progress
Cells = Mapping[Cell, Path]  # with their folders

_PATIENCE = 10.0  # seconds that a process has to end before it is killed
_LOOK_AGAIN = 0.1  # seconds
_LAST_LINES = 12
_PORTS = range(20_000, 30_000)  # below those that Linux, macOS and Windows give to connections


@dataclass(frozen=True)
class Launch:
    """How the trainings of a study are started: the launcher, such as torchrun, stands before the script."""

    script: Path
    configs: tuple[Path, ...] = ()
    arguments: tuple[str, ...] = ()
    launcher: str | None = None
    keep_models: bool = True

    def command(self, cell: Cell, folder: Path) -> list[str]:
        """The command line of one training, from its newest complete checkpoint if it has one."""
        from hf_calib.trainer.saving import newest_checkpoint

        variant, checkpoint = cell.variant, newest_checkpoint(folder)
        configs = [*self.configs, *([] if variant.config is None else [variant.config])]
        return [
            *([sys.executable] if self.launcher is None else shlex.split(self.launcher)),
            str(self.script),
            *(word for path in configs for word in ("--config", str(path))),
            *self.arguments,
            *("--loss", variant.loss, f"--loss_kwargs={json.dumps(dict(variant.hyperparameters))}"),
            *("--seed", str(cell.seed), "--output_dir", str(folder)),
            *([] if checkpoint is None else ["--resume_from_checkpoint", checkpoint]),
        ]

    def start(self, cell: Cell, folder: Path, environment: Mapping[str, str]) -> Process | None:
        """A process that trains one cell; None where another process trains it, or has just finished.

        Whoever trains it holds the lock on its folder: two studies do not train it at once.
        """
        with open(folder / ".lock", "wb") as lock, open(folder / LOG, "ab") as log:
            if fcntl is not None:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return None
                except OSError:  # a file system without locks, as some of clusters: nobody can have it
                    pass
            if is_finished(folder):
                return None
            (folder / FAILED).unlink(missing_ok=True)  # of an earlier try
            return subprocess.Popen(
                self.command(cell, folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C reaches the study, which ends them one and all
                pass_fds=() if fcntl is None else (lock.fileno(),),  # locked while any of them lives
            )

    def finish(self, folder: Path, code: int) -> str | None:
        """Tidy up after a process has ended; return why it failed, or None."""
        if is_finished(folder):
            clean_up(folder, keep_model=self.keep_models)
            return None
        reason = (
            "The script ended without results.json and predictions.safetensors. Let it end with "
            "hf_calib.experiments.train_and_report(trainer, test_dataset)."
        )
        if code:
            how = f"exit status {code}" if code > 0 else f"killed by signal {-code}"
            reason = f"{how}; its last lines:\n{_last_lines(folder)}"
        mark_failed(folder, reason)
        return reason

    def missing(self, cells: Cells) -> dict[Cell, Path]:
        """Those to train; others are tidied up, which a study that was killed, or a printed command, did not."""
        for folder in filter(is_finished, cells.values()):
            clean_up(folder, keep_model=self.keep_models)
        return {cell: folder for cell, folder in cells.items() if not is_finished(folder)}


# Trains the cells of a study that are not finished, and returns those that failed, and why.
Executor = Callable[[Launch, Cells, Say], dict[Cell, str]]


def printed(launch: Launch, cells: Cells, say: Say) -> dict[Cell, str]:
    """An executor that says a line for a shell for each training, without secrets, and trains nothing."""
    for cell, folder in cells.items():
        if not is_finished(folder):
            say(for_shell(launch.command(cell, folder)))
    return {}


@dataclass(frozen=True)
class Local:
    """An executor that trains `jobs` side by side here (0: one on each GPU), which share out threads and GPUs."""

    jobs: int = 1

    def __call__(self, launch: Launch, cells: Cells, say: Say) -> dict[Cell, str]:
        waiting = launch.missing(cells)
        free = environments(self.jobs or max(1, len(_visible_gpus())), launch)
        running: dict[Cell, tuple[Process, dict[str, str], float]] = {}
        failed: dict[Cell, str] = {}
        told: set[Cell] = set()
        n_finished = len(cells) - len(waiting)
        if n_finished:
            say(f"{n_finished} of {len(cells)} trainings are finished already")
        try:
            while waiting or running:
                for cell, folder in list(waiting.items()):
                    process = launch.start(cell, folder, free[0]) if free else None
                    if process is not None:
                        running[cell] = process, free.pop(0), time.monotonic()
                        del waiting[cell]
                    elif free and cell not in told:
                        say(f"{cell} is being trained by another process; waiting for it")
                        told.add(cell)
                for cell, (process, environment, started) in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[cell]
                    free.append(environment)
                    reason = launch.finish(cells[cell], process.returncode)
                    failed |= {} if reason is None else {cell: reason}
                    n_finished = len(cells) - len(waiting) - len(running) - len(failed)
                    took = timedelta(seconds=round(time.monotonic() - started))
                    end = f"finished in {took}" if reason is None else f"FAILED: {reason}"
                    say(f"{_progress(n_finished, len(failed), len(cells))}: {cell} {end}")
                time.sleep(_LOOK_AGAIN)
                waiting = launch.missing(waiting)
        except BaseException:
            _stop([process for process, _, _ in running.values()])
            raise
        return failed


def _stop(processes: Sequence[Process]) -> None:
    """End processes, and those that they started; all are asked before the first wait, and killed after a while."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass(frozen=True)
class Submitit:
    """An executor that trains as jobs of a scheduler such as Slurm, by parameters of submitit's AutoExecutor."""

    parameters: Mapping[str, Any]

    def __call__(self, launch: Launch, cells: Cells, say: Say) -> dict[Cell, str]:
        try:
            import submitit
        except ImportError as error:
            way_out = "pip install submitit, or leave --submitit out"
            raise InputValueError(expected("submitit", "be installed", "no such package", way_out)) from error
        own, waiting = dict(self.parameters), launch.missing(cells)
        if not waiting:
            return {}
        folder = next(iter(waiting.values())).parent.parent / "submitit"
        executor = submitit.AutoExecutor(folder=folder, cluster=own.pop("cluster", None))
        try:
            executor.update_parameters(**own)
        except (NameError, TypeError, ValueError) as error:
            way_out = "see submitit.AutoExecutor.update_parameters"
            message = expected("--submitit", "hold parameters of submitit", error, way_out)
            raise InputValueError(message) from error
        jobs = {cell: executor.submit(_train, launch, cell, folder) for cell, folder in waiting.items()}
        say(f"submitted {len(jobs)} jobs: {', '.join(job.job_id for job in jobs.values())}")
        failed: dict[Cell, str] = {}
        for cell, job in jobs.items():
            try:
                reason = job.result()
            except Exception as error:  # whatever the scheduler did to it
                reason = f"the job failed: {error}"
                mark_failed(waiting[cell], reason)
            failed |= {} if reason is None else {cell: reason}
            n_finished = sum(other.done() for other in jobs.values()) - len(failed)
            end = "finished" if reason is None else f"FAILED: {reason}"
            say(f"{_progress(n_finished, len(failed), len(jobs))}: {cell} {end}")
        return failed


def _train(launch: Launch, cell: Cell, folder: Path) -> str | None:
    """Train one cell where a scheduler has put it; return why it failed, or None."""
    while (process := launch.start(cell, folder, {})) is None:
        if is_finished(folder):
            return None
        time.sleep(_LOOK_AGAIN)
    return launch.finish(folder, process.wait())


def for_shell(words: Sequence[str]) -> str:
    """A command as a line for a shell, without the secrets that are among its words.

    >>> for_shell(["a.py", "--hub_token", "hf_x", "--max_length=64", "--hub-token=hf_y", "--env", "HF_TOKEN=hf_z"])
    'a.py --hub_token "$HF_TOKEN" --max_length=64 --hub-token="$HF_TOKEN" --env HF_TOKEN="$HF_TOKEN"'
    """
    shown, follows = [], False
    for word in words:
        before = "" if follows and not word.startswith("--") else before_secret(word)
        quoted = shlex.quote(before or word) if before != "" else ""
        shown.append(quoted if before is None else f'{quoted}"$HF_TOKEN"')
        follows = word.startswith("--") and "=" not in word and is_secret(word)
    return " ".join(shown)


def _progress(n_finished: int, n_failed: int, n_cells: int) -> str:
    return f"{n_finished} of {n_cells}" + (f", {n_failed} failed" if n_failed else "")


def _last_lines(folder: Path) -> str:
    """The end of a training's output; of a progress bar, what it showed last."""
    text = (folder / LOG).read_bytes()[-(2**14) :].decode("utf-8", errors="replace")
    lines = [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return "\n".join([line for line in lines if line][-_LAST_LINES:])


def environments(jobs: int, launch: Launch) -> list[dict[str, str]]:
    """The environment variables of each job: its share of GPUs, and of threads unless OMP_NUM_THREADS is set."""
    made: list[dict[str, str]] = [{} for _ in range(jobs)]
    visible = _visible_gpus() if jobs > 1 else []
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ports = random.SystemRandom().sample(_PORTS, jobs)
    for slot, environment in enumerate(made):
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, n_cores // jobs))
        if visible:
            own = visible[slot::jobs] or [visible[slot % len(visible)]]
            # With several, the Trainer would enlarge the batch.
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own[:1] if launch.launcher is None else own)
        if launch.launcher is not None:  # torchrun and accelerate would all meet at the same port
            environment["MASTER_PORT"] = environment["PET_MASTER_PORT"] = str(ports[slot])
    return made


def _visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [word.strip() for word in named.split(",") if word.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
