"""Trainings of a study as jobs of a scheduler such as Slurm, through submitit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_calib._errors import InputValueError, expected
from hf_calib.study.folder import is_finished, mark_failed
from hf_calib.study.grid import Cell
from hf_calib.study.launch import Launch, Training, lock_of, not_finished
from hf_calib.study.progress import Say, name_of, progress

_LOOK_AGAIN = 0.1  # seconds


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
    waiting = {cell: cells[cell] for cell in not_finished(launch, cells)}
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
        say(f"{progress(len(jobs), n_open, len(failed), (), 1)}: {name_of(cell)} {what}")
    return failed


def train_cell(launch: Launch, cell: Cell, folder: Path) -> str | None:
    """Train one cell where a scheduler has put it; return why it failed, or None."""
    while (lock := lock_of(folder)) is None:
        time.sleep(_LOOK_AGAIN)
    if is_finished(folder):
        lock.close()
        return None
    training = Training(launch, cell, folder, lock, {})
    training.process.wait()
    return training.finish()
