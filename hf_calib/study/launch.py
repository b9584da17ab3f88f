"""The trainings of a study as processes: here side by side, as jobs of a scheduler, or as printed commands."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from hf_calib._errors import InputValueError, expected
from hf_calib.study.cells import (
    FAILED,
    LOG,
    clean_up,
    is_finished,
    last_lines,
    mark_failed,
    newest_checkpoint,
    remove_cut_short,
)
from hf_calib.study.plan import Cell, before_secret, is_secret

try:
    import fcntl
except ImportError:  # Windows: two studies that run in one folder are not kept apart there
    fcntl = None  # type: ignore[assignment]

Say = Callable[[str], None]
Cells = Mapping[Cell, Path]  # with their folders

_PATIENCE = 10.0  # seconds that a process has to end before it is killed
_LOOK_AGAIN = 0.1  # seconds
_FAILED_ALIKE = 2  # losses; then the others would fail too
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


class Executor(Protocol):
    """Trains the cells of a study that are not finished, and returns those that failed, and why."""

    def __call__(self, launch: Launch, cells: Cells, *, say: Say) -> dict[Cell, str]:
        """Start each as `launch` says; `say` takes a line of progress."""
        ...


@dataclass(frozen=True)
class Printed:
    """An executor that says a line for a shell for each training, without secrets, and trains nothing."""

    def __call__(self, launch: Launch, cells: Cells, *, say: Say) -> dict[Cell, str]:
        for cell, folder in cells.items():
            if not is_finished(folder):
                say(for_shell(launch.command(cell, folder)))
        return {}


@dataclass(frozen=True)
class Local:
    """An executor that trains `jobs` side by side here (0: one on each visible GPU), which share out threads and GPUs.

    The failure of one stops no other, but the study ends where the first ones fail alike.
    """

    jobs: int = 1

    def __call__(self, launch: Launch, cells: Cells, *, say: Say) -> dict[Cell, str]:
        waiting = not_finished(launch, cells)
        if len(waiting) < len(cells):
            say(f"{len(cells) - len(waiting)} of {len(cells)} trainings are finished already")
        jobs = self.jobs or max(1, len(_visible_gpus()))
        free = environments(jobs, launch)
        running: dict[Training, dict[str, str]] = {}
        failed: dict[Cell, str] = {}
        took: list[float] = []
        elsewhere: set[Cell] = set()
        try:
            while waiting or running:
                for cell in list(waiting) if free else []:
                    lock = lock_of(cells[cell])
                    if lock is None:
                        if cell not in elsewhere:
                            say(f"{cell} is being trained by another process; waiting for it")
                        elsewhere.add(cell)
                        continue
                    waiting.remove(cell)
                    if not not_finished(launch, {cell: cells[cell]}):  # by that other process
                        lock.close()
                        continue
                    try:
                        training = Training(launch, cell, cells[cell], lock, free[0])
                        running[training] = free.pop(0)
                    except OSError as error:  # a full disk
                        lock.close()
                        failed[cell] = f"it cannot be started: {error}"
                        say(f"{cell} FAILED: {failed[cell]}")
                    if not free:
                        break
                for training in [each for each in running if each.process.poll() is not None]:
                    free.append(running.pop(training))
                    reason, seconds = training.finish(), time.monotonic() - training.started
                    if reason is None:
                        took.append(seconds)
                        what = f"finished in {in_words(seconds)}"
                    else:
                        failed[training.cell] = reason
                        what = f"FAILED: {reason}"
                    far = progress(len(cells), len(waiting) + len(running), len(failed), took, jobs)
                    say(f"{far}: {training.cell} {what}")
                alike = _failed_alike(failed) if waiting and not took else None
                if alike is not None:
                    got = f"{len(failed)} that failed alike: {alike}"
                    folder = next(iter(cells.values())).parent
                    way_out = f"see {LOG} in {folder}/*; {len(waiting)} more were not started"
                    raise InputValueError(expected("the first trainings", "end", got, way_out))
                time.sleep(_LOOK_AGAIN)
        except BaseException:
            for training in running:  # all before the first wait, which a second Ctrl-C would end
                training.ask_to_stop()
            for training in running:
                training.stop()
            raise
        return failed


@dataclass(frozen=True)
class Submitit:
    """An executor that trains as jobs of a scheduler such as Slurm, by parameters of submitit's AutoExecutor."""

    parameters: Mapping[str, Any]

    def __call__(self, launch: Launch, cells: Cells, *, say: Say) -> dict[Cell, str]:
        try:
            import submitit
        except ImportError as error:
            way_out = "pip install submitit, or leave --submitit out"
            raise InputValueError(expected("submitit", "be installed", "no such package", way_out)) from error
        own = dict(self.parameters)
        waiting = {cell: cells[cell] for cell in not_finished(launch, cells)}
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
            if reason is not None:
                failed[cell] = reason
            far = progress(len(jobs), sum(not other.done() for other in jobs.values()), len(failed), (), 1)
            say(f"{far}: {cell} {'finished' if reason is None else f'FAILED: {reason}'}")
        return failed


def _train(launch: Launch, cell: Cell, folder: Path) -> str | None:
    """Train one cell where a scheduler has put it; return why it failed, or None."""
    while (lock := lock_of(folder)) is None:
        time.sleep(_LOOK_AGAIN)
    if is_finished(folder):
        lock.close()
        return None
    training = Training(launch, cell, folder, lock, {})
    training.process.wait()
    return training.finish()


class Training:
    """A process that trains one cell, and holds the lock on its folder: two studies do not train it at once."""

    def __init__(
        self, launch: Launch, cell: Cell, folder: Path, lock: IO[bytes], environment: Mapping[str, str]
    ):
        self.launch, self.cell, self.folder, self.started = launch, cell, folder, time.monotonic()
        self._lock = lock
        remove_cut_short(folder)
        (folder / FAILED).unlink(missing_ok=True)  # of an earlier try
        with open(folder / LOG, "ab") as log:
            self.process = subprocess.Popen(
                launch.command(cell, folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C reaches the study, which ends them one and all
                pass_fds=() if fcntl is None else (lock.fileno(),),  # locked while any of them lives
            )

    def finish(self) -> str | None:
        """Tidy up after the process has ended; return why it failed, or None."""
        self._lock.close()
        code = self.process.returncode
        if is_finished(self.folder):
            clean_up(self.folder, keep_model=self.launch.keep_models)
            return None
        if code == 0:
            reason = (
                "The script ended without results.json and predictions.safetensors. Let it end with "
                "hf_calib.experiments.train_and_report(trainer, test_dataset)."
            )
        else:
            how = f"exit status {code}" if code > 0 else f"killed by signal {-code}"
            reason = f"{how}; its last lines:\n{last_lines(self.folder)}"
        mark_failed(self.folder, reason)
        return reason

    def ask_to_stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Let the process end, and those that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, how)

    def stop(self) -> None:
        """Wait for the end that was asked for, and force it after a while."""
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.ask_to_stop(signal.SIGKILL)
            self.process.wait()
        self._lock.close()


def not_finished(launch: Launch, cells: Cells) -> list[Cell]:
    """The cells to train; the others are tidied up, which a study that was killed, or a printed command, did not."""
    for folder in filter(is_finished, cells.values()):
        clean_up(folder, keep_model=launch.keep_models)
    return [cell for cell, folder in cells.items() if not is_finished(folder)]


def lock_of(folder: Path) -> IO[bytes] | None:
    """The folder's lock, held until it is closed by all processes that have it; None if another study has it."""
    lock = open(folder / ".lock", "wb")  # noqa: SIM115
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        except OSError:  # a file system without locks, as some of clusters: nobody can have it
            pass
    return lock


def for_shell(words: Sequence[str]) -> str:
    """A command as a line for a shell, without the secrets that are among its words.

    >>> for_shell(["a.py", "--hub_token", "hf_x", "--max_length=64", "--hub-token=hf_y", "--env", "HF_TOKEN=hf_z"])
    'a.py --hub_token "$HF_TOKEN" --max_length=64 --hub-token="$HF_TOKEN" --env HF_TOKEN="$HF_TOKEN"'
    """
    shown, follows = [], False
    for word in words:
        before = "" if follows and not word.startswith("--") else before_secret(word)
        if before is None:
            shown.append(shlex.quote(word))
        else:
            shown.append(f'{shlex.quote(before) if before else ""}"$HF_TOKEN"')
        if word.startswith("--"):
            follows = "=" not in word and is_secret(word)
    return " ".join(shown)


def progress(n_cells: int, n_open: int, n_failed: int, took: Sequence[float], jobs: int) -> str:
    """How far the study is, and about how long the rest takes, by the trainings of this run."""
    words = f"{n_cells - n_open - n_failed} of {n_cells}" + (f", {n_failed} failed" if n_failed else "")
    if took and n_open:
        words += f", about {in_words(sum(took) / len(took) * n_open / jobs)} left"
    return words


def in_words(seconds: float) -> str:
    """A duration.

    >>> in_words(42.0), in_words(600.0), in_words(9000.0)
    ('42 s', '10 min', '2 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _failed_alike(failed: Mapping[Cell, str]) -> str | None:
    """The last line of all failures, where there are two and more of them, of different losses, and none differs."""
    last = {reason.strip().rpartition("\n")[2] for reason in failed.values()}
    n_losses = len({cell.variant.label for cell in failed})
    return last.pop() if len(last) == 1 and n_losses >= _FAILED_ALIKE else None


def environments(jobs: int, launch: Launch) -> list[dict[str, str]]:
    """The environment variables of each job: its share of GPUs, and of threads unless OMP_NUM_THREADS is set."""
    made: list[dict[str, str]] = [{} for _ in range(jobs)]
    visible = _visible_gpus() if jobs > 1 else []
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # torchrun and accelerate would all meet at the same port.
    ports = [] if launch.launcher is None else _free_ports(jobs)
    for slot, environment in enumerate(made):
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, n_cores // jobs))
        if visible:
            own = visible[slot::jobs] or [visible[slot % len(visible)]]
            # With several, the Trainer would enlarge the batch.
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own[:1] if launch.launcher is None else own)
        if ports:
            environment["MASTER_PORT"] = environment["PET_MASTER_PORT"] = str(ports[slot])
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
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == n:
            break
    return found
