"""Trainings of a study as Jobs on the Hub's machines, which leave their results in a private dataset repository."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hf_calib._errors import InputValueError, did_you_mean, expected
from hf_calib.study.folder import CELLS, is_finished, mark_failed
from hf_calib.study.grid import Cell, is_of_this_machine, path_hash
from hf_calib.study.launch import Launch, for_shell, not_finished
from hf_calib.study.progress import Say, name_of, progress
from hf_calib.study.shared import INPUTS, SharedStudy

_LOOK_AGAIN = 10.0  # seconds
# Of `HfApi.run_job`; a Job ends after half an hour unless a timeout is named.
_DEFAULTS = {"image": "python:3.12", "timeout": "12h"}
_PARAMETERS = ("flavor", "image", "timeout", "attempts", "env", "secrets", "namespace", "resource_group_id")
_ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
_LAST_LINES = 12
_PATIENCE = 600.0  # seconds without an answer
_STUDY, _CELL = "hf_calib_study", "hf_calib_cell"


def train_in_jobs(
    launch: Launch, cells: Mapping[Cell, Path], share: SharedStudy, parameters: Mapping[str, Any], *, say: Say
) -> dict[Cell, str]:
    """Train what is not finished, each cell in a Job, and wait for them; Jobs of an earlier call are waited for.

    Args:
        launch: how.
        cells: with their folders.
        share: in a dataset repository.
        parameters: of `huggingface_hub.run_job`, such as `flavor`, `timeout`, `attempts` and `image`.
        say: takes a line of progress.

    Returns:
        The failed cells, and why.

    Raises:
        ValueError: if a Job cannot be started.
    """
    from huggingface_hub import HfApi, get_token

    waiting = not_finished(launch, cells)
    if not waiting:
        return {}
    own = {**_DEFAULTS, **parameters}
    own["secrets"] = {"HF_TOKEN": get_token(), **own.get("secrets", {})}
    api = HfApi()
    with _clear_errors():
        namespace = own.get("namespace") or api.whoami()["name"]
        running = [job for job in api.list_jobs(namespace=namespace) if job.status.stage not in _ENDED]
    labels = [(job.labels or {}, job.id) for job in running]
    known = {each.get(_CELL): job for each, job in labels if each.get(_STUDY) == _label(share)}
    jobs = {cell: known[cell.key] for cell in waiting if cell.key in known}
    if jobs:
        say(f"{len(jobs)} Jobs of an earlier call run still; waiting for them")
    missing = [cell for cell in waiting if cell not in jobs]
    if missing:
        share.send_inputs(_inputs(launch, missing))
        there = _launch_there(launch)
        for cell in missing:
            with _clear_errors():
                jobs[cell] = api.run_job(**{**own, "namespace": namespace}, **_job(there, cell, share)).id
        say(f"submitted {len(missing)} Jobs: {', '.join(jobs[cell] for cell in missing)}")
    failed: dict[Cell, str] = {}
    answered = time.monotonic()
    while jobs:
        for cell, job in list(jobs.items()):
            try:
                found = api.inspect_job(job_id=job, namespace=namespace)
                if found.status.stage in _ENDED:
                    share.fetch_cell(cells[cell])
            except Exception as error:  # no network, for a while
                if time.monotonic() - answered < _PATIENCE:
                    continue
                way_out = "the Jobs go on: the same command waits for them again"
                raise InputValueError(expected("the Hub", "answer", str(error), way_out)) from error
            answered = time.monotonic()
            if found.status.stage not in _ENDED:
                continue
            del jobs[cell]
            what = "finished"
            if not is_finished(cells[cell]):
                message = f" ({found.status.message})" if found.status.message else ""
                lines = _last_lines(api, job, namespace)
                failed[cell] = f"{found.url} ended as {found.status.stage}{message}{lines}"
                mark_failed(cells[cell], failed[cell])
                what = f"FAILED: {failed[cell]}"
            say(f"{progress(len(waiting), len(jobs), len(failed), (), 1)}: {name_of(cell)} {what}")
        if jobs:
            time.sleep(_LOOK_AGAIN)
    return failed


def _last_lines(api: Any, job: str, namespace: str | None) -> str:
    """The end of a Job's output, where the Hub still has it."""
    lines: list[str] = []
    with suppress(Exception):
        lines = [line for line in api.fetch_job_logs(job_id=job, namespace=namespace) if line.strip()]
    return "; its last lines:\n" + "\n".join(lines[-_LAST_LINES:]) if lines else ""


@contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the network, or the Hub's
        way_out = "log in with hf auth login, and see hf jobs hardware for the flavors"
        words = " ".join(str(error).split())[:300]
        raise InputValueError(expected("--hf-jobs", "start Jobs on the Hub", words, way_out)) from error


def job_commands(
    launch: Launch, cells: Mapping[Cell, Path], share: SharedStudy, parameters: Mapping[str, Any]
) -> list[str]:
    """What `train_in_jobs` would start, a line of the `hf` command each; nothing is sent."""
    own = {**_DEFAULTS, **parameters}
    _inputs(launch, list(cells))
    there = _launch_there(launch)
    lines = []
    for cell in (cell for cell, folder in cells.items() if not is_finished(folder)):
        job = _job(there, cell, share)
        options = [
            word
            for name in ("flavor", "timeout", "attempts", "namespace")
            if name in own
            for word in (f"--{name}", str(own[name]))
        ]
        labels = [word for name, value in job["labels"].items() for word in ("--label", f"{name}={value}")]
        words = [
            "hf",
            "jobs",
            "run",
            *options,
            "--secrets",
            "HF_TOKEN",
            *labels,
            own["image"],
            *job["command"],
        ]
        lines.append(shlex.join(words))
    return lines


def parse_jobs(text: str | None) -> dict[str, Any] | None:
    """A flavor, or parameters of `run_job`.

    Raises:
        ValueError: if a parameter is unknown, or no flavor is named.

    >>> parse_jobs("a10g-small")
    {'flavor': 'a10g-small'}
    >>> parse_jobs('{"flavor": "t4-small", "attempts": 3}')
    {'flavor': 't4-small', 'attempts': 3}
    """
    if text is None:
        return None
    way_out = """write a10g-small, or '{"flavor": "a10g-small", "timeout": "3h"}'"""
    try:
        found = json.loads(text) if text.lstrip().startswith("{") else {"flavor": text}
    except ValueError as error:
        raise InputValueError(
            expected("--hf-jobs", "be a flavor or a JSON object", repr(text), way_out)
        ) from error
    for name in found:
        if name not in _PARAMETERS:
            got = did_you_mean(name, _PARAMETERS)
            raise InputValueError(expected("--hf-jobs", "hold parameters of run_job", repr(name), got))
    if not found.get("flavor"):
        raise InputValueError(expected("--hf-jobs", "name a flavor", repr(text), way_out))
    return dict(found)


def _launch_there(launch: Launch) -> Launch:
    """How a Job starts its training, of files that it has fetched."""
    return replace(
        launch,
        script=Path(_there(launch.script)),
        configs=tuple(Path(_there(path)) for path in launch.configs),
        arguments=tuple(map(_word_there, launch.arguments)),
        python="python",
        inputs=True,
    )


def _job(there: Launch, cell: Cell, share: SharedStudy) -> dict[str, Any]:
    """The command, and the labels by which a later call knows it."""
    config = cell.variant.config
    variant = replace(cell.variant, config=None if config is None else Path(_there(config)))
    words = there.command(replace(cell, variant=variant), Path(CELLS) / cell.name)
    install = shlex.join(["pip", "install", "--quiet", f"hf_calib=={version('hf_calib')}"])
    return {
        "command": ["bash", "-c", f"{install} && {for_shell(words, there.arguments)}"],
        "labels": {"name": f"hf_calib-{cell.key}", _STUDY: _label(share), _CELL: cell.key},
    }


def _inputs(launch: Launch, cells: Sequence[Cell]) -> dict[str, Path]:
    """What the trainings read of this machine, by its names in `inputs/`.

    Raises:
        ValueError: if a YAML file names something of this machine, which it would not find there.
    """
    from hf_calib.experiments.config_file import read_config

    configs = {*launch.configs, *(cell.variant.config for cell in cells if cell.variant.config is not None)}
    for config in configs:
        for name, value in read_config(config).items():
            if isinstance(value, str) and is_of_this_machine(value):
                got, way_out = f"{name}: {value}", f"leave it out there, and pass it: -- --{name} {value}"
                raise InputValueError(expected(str(config), "name no files of this machine", got, way_out))
    paths = [launch.script, *configs, *filter(None, map(_local, launch.arguments))]
    return {_there(path).removeprefix(f"{INPUTS}/"): path for path in paths}


def _there(path: Path) -> str:
    """Where a file is when a Job has fetched it; another content is another place."""
    return f"{INPUTS}/{path_hash(path)[:8]}/{path.resolve().name}"


def _local(word: str) -> Path | None:
    """The file or folder that a word of a command line names."""
    value = word.partition("=")[2] if word.startswith("--") else word
    return Path(value) if is_of_this_machine(value) else None


def _word_there(word: str) -> str:
    path = _local(word)
    return word if path is None else f"{word[: len(word) - len(str(path))]}{_there(path)}"


def _label(share: SharedStudy) -> str:
    return sha256(share.address.encode()).hexdigest()[:12]
