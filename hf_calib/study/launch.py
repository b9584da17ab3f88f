"""How one training of a study is started, and what it leaves behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hf_calib.study.folder import (
    FAILED,
    LOG,
    clean_up,
    is_finished,
    last_lines,
    mark_failed,
    remove_cut_short,
    resume_words,
)
from hf_calib.study.grid import Cell, before_secret, secrets

try:
    import fcntl
except ImportError:  # Windows: two studies that run in one folder are not kept apart there
    fcntl = None  # type: ignore[assignment]

_PATIENCE = 10.0  # seconds that a process has to end before it is killed


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
        return [
            *([sys.executable] if self.launcher is None else shlex.split(self.launcher)),
            str(self.script),
            *(word for path in configs for word in ("--config", str(path))),
            *self.arguments,
            *("--loss", variant.loss, f"--loss_kwargs={json.dumps(dict(variant.hyperparameters))}"),
            *("--seed", str(cell.seed), "--output_dir", str(folder)),
            *resume_words(folder),
        ]


def for_shell(words: Sequence[str], arguments: Sequence[str]) -> str:
    """A command as a line for a shell, without the secrets that are among the script's arguments."""
    hidden = secrets(arguments)

    def shown(word: str) -> str:
        if word not in hidden:
            return shlex.quote(word)
        before = before_secret(word)
        return f'{shlex.quote(before) if before else ""}"$HF_TOKEN"'

    return " ".join(map(shown, words))


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


def not_finished(launch: Launch, cells: Mapping[Cell, Path]) -> list[Cell]:
    """The cells to train; the others are tidied up, which a study that was killed, or a printed command, did not."""
    waiting = []
    for cell, folder in cells.items():
        if is_finished(folder):
            clean_up(folder, keep_model=launch.keep_models)
        else:
            waiting.append(cell)
    return waiting


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
