"""The runs of a study as processes: parallel on this machine, as jobs of a scheduler, or as printed commands."""

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
from hf_calib._text import counted
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
except ImportError:  # On Windows, two studies in one folder are not separated.
    fcntl = None  # type: ignore[assignment]

Process = subprocess.Popen[bytes]
Say = Callable[[str], None]  # Its argument is a line of progress.
Cells = Mapping[Cell, Path]  # With their folders.

_PATIENCE = 10.0  # Seconds before a process that does not end is killed.
_LOOK_AGAIN = 0.1  # seconds
_LAST_LINES = 12
_PORTS = range(20_000, 30_000)  # Below the ports that systems give to connections.


@dataclass(frozen=True)
class Launch:
    """The start of a study's runs; the launcher, such as torchrun, precedes the script."""

    script: Path
    configs: tuple[Path, ...] = ()
    arguments: tuple[str, ...] = ()
    launcher: str | None = None
    keep_models: bool = True

    def command(self, cell: Cell, folder: Path) -> list[str]:
        """Return the command line of a run, from its newest complete checkpoint if it has one."""
        from hf_calib.trainer.saving import newest_checkpoint

        variant = cell.variant
        checkpoint = newest_checkpoint(folder, variant.loss)
        configs = [*self.configs, *([] if variant.config is None else [variant.config])]
        return [
            *(
                [sys.executable]
                if self.launcher is None
                else shlex.split(self.launcher)
            ),
            str(self.script),
            *(word for path in configs for word in ("--config", str(path))),
            *self.arguments,
            *(
                "--loss",
                variant.loss,
                f"--loss_kwargs={json.dumps(dict(variant.hyperparameters))}",
            ),
            *("--seed", str(cell.seed), "--output_dir", str(folder)),
            *([] if checkpoint is None else ["--resume_from_checkpoint", checkpoint]),
        ]

    def start(
        self, cell: Cell, folder: Path, environment: Mapping[str, str]
    ) -> Process | None:
        """Start a process that trains one cell; return None if another process trains it or has just finished.

        The process holds the lock on its folder, so that two studies do not train a cell at the same time.
        """
        with open(folder / ".lock", "wb") as lock, open(folder / LOG, "ab") as log:
            if fcntl is not None:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return None
                except OSError:  # Some file systems of clusters have no locks.
                    pass
            if is_finished(folder):
                return None
            (folder / FAILED).unlink(missing_ok=True)  # It is of an earlier try.
            return subprocess.Popen(
                self.command(cell, folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C reaches the study, which ends all processes.
                pass_fds=()
                if fcntl is None
                else (lock.fileno(),),  # It is locked while any process runs.
            )

    def finish(self, folder: Path, code: int) -> str | None:
        """Clean up after a process has ended; return the reason of its failure, or None."""
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
        """Return the cells to train; clean up finished ones, in case a killed study or a printed command did not."""
        for folder in filter(is_finished, cells.values()):
            clean_up(folder, keep_model=self.keep_models)
        return {
            cell: folder for cell, folder in cells.items() if not is_finished(folder)
        }


# It trains the unfinished cells of a study, and returns the failures with their reasons.
Executor = Callable[[Launch, Cells, Say], dict[Cell, str]]


def printed(launch: Launch, cells: Cells, say: Say) -> dict[Cell, str]:
    """Executor that prints a shell command without secrets for each run, and trains nothing."""
    for cell, folder in cells.items():
        if not is_finished(folder):
            say(for_shell(launch.command(cell, folder)))
    return {}


@dataclass(frozen=True)
class Local:
    """Executor that runs `jobs` processes in parallel here (0: one per GPU), with shares of threads and GPUs."""

    jobs: int = 1

    def __call__(self, launch: Launch, cells: Cells, say: Say) -> dict[Cell, str]:
        waiting = launch.missing(cells)
        free = environments(self.jobs or max(1, len(_visible_gpus())), launch)
        running: dict[Cell, tuple[Process, dict[str, str], float]] = {}
        failed: dict[Cell, str] = {}
        told: set[Cell] = set()
        n_finished = len(cells) - len(waiting)
        if n_finished:
            say(f"{n_finished} of {counted(len(cells), 'run')} finished earlier")
        try:
            while waiting or running:
                for cell, folder in list(waiting.items()):
                    process = launch.start(cell, folder, free[0]) if free else None
                    if process is not None:
                        running[cell] = process, free.pop(0), time.monotonic()
                        del waiting[cell]
                        say(f"{cell} started; its output is in {folder / LOG}")
                    elif free and cell not in told:
                        say(
                            f"{cell} is being trained by another process; waiting for it"
                        )
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
                    end = (
                        f"finished in {took}" if reason is None else f"FAILED: {reason}"
                    )
                    say(
                        f"{_progress(n_finished, len(failed), len(cells))}: {cell} {end}"
                    )
                time.sleep(_LOOK_AGAIN)
                waiting = launch.missing(waiting)
        except BaseException:
            _stop([process for process, _, _ in running.values()])
            raise
        return failed


def _stop(processes: Sequence[Process]) -> None:
    """End processes and their children: all are asked first, and killed later if they do not end."""
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
    """Executor that runs jobs of a scheduler such as Slurm, with parameters of submitit's AutoExecutor."""

    parameters: Mapping[str, Any]

    def __call__(self, launch: Launch, cells: Cells, say: Say) -> dict[Cell, str]:
        try:
            import submitit
        except ImportError as error:
            way_out = "pip install submitit, or leave --submitit out"
            raise InputValueError(
                expected("submitit", "be installed", "no such package", way_out)
            ) from error
        own, waiting = dict(self.parameters), launch.missing(cells)
        if not waiting:
            return {}
        folder = next(iter(waiting.values())).parent.parent / "submitit"
        executor = submitit.AutoExecutor(
            folder=folder, cluster=own.pop("cluster", None)
        )
        try:
            executor.update_parameters(**own)
        except (NameError, TypeError, ValueError) as error:
            way_out = "see submitit.AutoExecutor.update_parameters"
            message = expected(
                "--submitit", "hold parameters of submitit", error, way_out
            )
            raise InputValueError(message) from error
        jobs = {
            cell: executor.submit(_train, launch, cell, folder)
            for cell, folder in waiting.items()
        }
        say(
            f"submitted {counted(len(jobs), 'job')}: {', '.join(job.job_id for job in jobs.values())}"
        )
        failed: dict[Cell, str] = {}
        for cell, job in jobs.items():
            try:
                reason = job.result()
            except Exception as error:  # The scheduler may cause any error.
                reason = f"the job failed: {error}"
                mark_failed(waiting[cell], reason)
            failed |= {} if reason is None else {cell: reason}
            n_finished = sum(other.done() for other in jobs.values()) - len(failed)
            end = "finished" if reason is None else f"FAILED: {reason}"
            say(f"{_progress(n_finished, len(failed), len(jobs))}: {cell} {end}")
        return failed


def _train(launch: Launch, cell: Cell, folder: Path) -> str | None:
    """Train one cell in a job of a scheduler; return the reason of its failure, or None."""
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
    """The end of a run's output, with the last state of progress bars."""
    text = (folder / LOG).read_bytes()[-(2**14) :].decode("utf-8", errors="replace")
    lines = [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return "\n".join([line for line in lines if line][-_LAST_LINES:])


def environments(jobs: int, launch: Launch) -> list[dict[str, str]]:
    """Return the environment of each job: its share of GPUs and, unless OMP_NUM_THREADS is set, of threads."""
    made: list[dict[str, str]] = [{} for _ in range(jobs)]
    visible = _visible_gpus() if jobs > 1 else []
    n_cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    ports = random.SystemRandom().sample(_PORTS, jobs)
    for slot, environment in enumerate(made):
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, n_cores // jobs))
        if visible:
            own = visible[slot::jobs] or [visible[slot % len(visible)]]
            # With several GPUs, the Trainer would enlarge the batch.
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(
                own[:1] if launch.launcher is None else own
            )
        if (
            launch.launcher is not None
        ):  # torchrun and accelerate would all use the same port.
            environment["MASTER_PORT"] = environment["PET_MASTER_PORT"] = str(
                ports[slot]
            )
    return made


def _visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [word.strip() for word in named.split(",") if word.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
