"""The trainings of a study: each a process of its own, which goes on from its checkpoint if it was interrupted."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hf_calib._errors import InputValueError, expected
from hf_calib.study.folder import FAILED, LOG, clean_up, is_finished, last_lines, mark_failed
from hf_calib.study.grid import Cell

try:
    import fcntl
except ImportError:  # Windows: two studies that run in one folder are not kept apart there
    fcntl = None  # type: ignore[assignment]

_LOOK_AGAIN = 0.1  # seconds
_FAILED_ALIKE = 2  # losses; then the others would fail too
_PATIENCE = 10.0  # seconds that a process has to end before it is killed
_PORTS = range(20_000, 30_000)  # below those that Linux, macOS and Windows give to connections
Say = Callable[[str], None]


@dataclass(frozen=True)
class Launch:
    """How the trainings of a study are started.

    Args:
        script: the recipe.
        configs: its YAML files.
        arguments: further words of its command line.
        launcher: what stands before the script, such as `torchrun --nproc_per_node 2`; by default this Python.
        keep_models: whether the calibrated model of a finished training stays.
    """

    script: Path
    configs: tuple[Path, ...] = ()
    arguments: tuple[str, ...] = ()
    launcher: str | None = None
    keep_models: bool = True

    def command(self, cell: Cell, folder: Path) -> list[str]:
        """The command line of one training, from its newest complete checkpoint if it has one."""
        variant = cell.variant
        configs = [*self.configs, *([] if variant.config is None else [variant.config])]
        checkpoint = newest_checkpoint(folder)
        return [
            *([sys.executable] if self.launcher is None else shlex.split(self.launcher)),
            str(self.script),
            *(word for path in configs for word in ("--config", str(path))),
            *self.arguments,
            *("--loss", variant.loss, f"--loss_kwargs={json.dumps(dict(variant.hyperparameters))}"),
            *("--seed", str(cell.seed), "--output_dir", str(folder)),
            *([] if checkpoint is None else ["--resume_from_checkpoint", checkpoint]),
        ]


class _Training:
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

    def ask_to_stop(self) -> None:
        """Let the process end, and those that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGTERM)

    def stop(self) -> None:
        """Wait for the end that was asked for, and force it after a while."""
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._lock.close()


def train_cells(launch: Launch, cells: Mapping[Cell, Path], *, jobs: int, say: Say) -> dict[Cell, str]:
    """Train what is not finished, some side by side; the failure of one does not stop the others.

    CPU threads (unless OMP_NUM_THREADS is set) and visible GPUs are shared out among the jobs.

    Args:
        launch: how.
        cells: with their folders.
        jobs: how many side by side.
        say: takes a line of progress.

    Returns:
        The failed cells, and why.
    """
    waiting = _not_finished(launch, cells)
    n_finished = len(cells) - len(waiting)
    if n_finished:
        say(f"{n_finished} of {len(cells)} trainings are finished already")
    environments = _environments(jobs, launch)
    running: dict[int, _Training] = {}
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
                lock = _lock(folder)
                if lock is None:
                    if cell not in elsewhere:
                        say(f"{_name(cell)} is being trained by another process; waiting for it")
                    elsewhere.add(cell)
                    continue
                waiting.remove(cell)
                if not _not_finished(launch, {cell: folder}):  # by that other process
                    lock.close()
                    continue
                try:
                    running[slot] = _Training(launch, cell, folder, lock, environments[slot])
                except OSError as error:  # a full disk
                    lock.close()
                    failed[cell] = f"it cannot be started: {error}"
                    say(f"{_name(cell)} FAILED: {failed[cell]}")
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
                progress = _progress(len(cells), n_open, len(failed), took, jobs)
                say(f"{progress}: {_name(training.cell)} {what}")
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


def _not_finished(launch: Launch, cells: Mapping[Cell, Path]) -> list[Cell]:
    """The cells to train; the others are tidied up, which a study that was killed, or a printed command, did not."""
    waiting = []
    for cell, folder in cells.items():
        if is_finished(folder):
            clean_up(folder, keep_model=launch.keep_models)
        else:
            waiting.append(cell)
    return waiting


def submit_cells(
    launch: Launch, cells: Mapping[Cell, Path], parameters: Mapping[str, Any], *, say: Say
) -> dict[Cell, str]:
    """Train what is not finished as jobs of a scheduler, through submitit, and wait for them.

    Args:
        launch: how.
        cells: with their folders.
        parameters: of `submitit.AutoExecutor.update_parameters`, such as `slurm_partition` and `timeout_min`;
            `cluster` is that of the executor.
        say: takes a line of progress.

    Returns:
        The failed cells, and why.

    Raises:
        ValueError: if submitit is not installed, or does not know a parameter.
    """
    try:
        import submitit
    except ImportError as error:
        way_out = "pip install submitit, or leave --submitit out"
        raise InputValueError(expected("submitit", "be installed", "no such package", way_out)) from error
    own = dict(parameters)
    waiting = {cell: cells[cell] for cell in _not_finished(launch, cells)}
    first = next(iter(cells.values()), None)
    if not waiting or first is None:
        return {}
    executor = submitit.AutoExecutor(
        folder=first.parent.parent / "submitit", cluster=own.pop("cluster", None)
    )
    try:
        executor.update_parameters(**own)
    except (NameError, TypeError, ValueError) as error:
        way_out = "see submitit.AutoExecutor.update_parameters"
        raise InputValueError(
            expected("--submitit", "hold parameters of submitit", error, way_out)
        ) from error
    jobs = {cell: executor.submit(train_cell, launch, cell, folder) for cell, folder in waiting.items()}
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
        n_open = sum(not other.done() for other in jobs.values())
        what = "finished" if reason is None else f"FAILED: {reason}"
        say(f"{_progress(len(jobs), n_open, len(failed), (), 1)}: {_name(cell)} {what}")
    return failed


def train_cell(launch: Launch, cell: Cell, folder: Path) -> str | None:
    """Train one cell where a scheduler has put it; return why it failed, or None."""
    while (lock := _lock(folder)) is None:
        time.sleep(_LOOK_AGAIN)
    if is_finished(folder):
        lock.close()
        return None
    training = _Training(launch, cell, folder, lock, {})
    training.process.wait()
    return training.finish()


def newest_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint, or None. Only looks: another process may be writing one just now."""
    if not any(folder.glob("checkpoint-*")):
        return None
    from hf_calib.trainer.checkpoint import last_complete_checkpoint

    try:
        return last_complete_checkpoint(folder, processes=1)
    except InputValueError:
        return None


def remove_cut_short(folder: Path) -> None:
    """Remove checkpoints that a killed training left, where none is complete; for who holds the folder."""
    if newest_checkpoint(folder) is None:
        for path in folder.glob("checkpoint-*"):
            shutil.rmtree(path, ignore_errors=True)


def _lock(folder: Path) -> IO[bytes] | None:
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


def _name(cell: Cell) -> str:
    return f"{cell.variant.label}, seed {cell.seed}"


def _progress(n_cells: int, n_open: int, n_failed: int, took: Sequence[float], jobs: int) -> str:
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
