"""`hf-calib compare`: losses trained over seeds by a script, and their report."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_calib._errors import InputValueError, check, did_you_mean, expected
from hf_calib.study.cells import CELL, recorded
from hf_calib.study.launch import Cells, Executor, Launch, Local, Printed, Submitit
from hf_calib.study.measured import METHODS, check_methods
from hf_calib.study.plan import Cell, content_hash, resolved, variants, write_plan
from hf_calib.study.study import check_seeds, report_study

__all__ = ["METHODS", "Local", "Printed", "Submitit", "report_study"]


def plan_study(
    launch: Launch,
    *,
    losses: Sequence[str],
    seeds: Sequence[int],
    grid: Mapping[str, Sequence[Any]],
    output: Path,
    methods: Sequence[str] = METHODS,
) -> dict[Cell, Path]:
    """Check a study and write its plan; trains nothing.

    Args:
        launch: how its trainings are started, see `launch_of`.
        losses: see `variants`.
        seeds: of the trainings.
        grid: hyperparameter -> values.
        output: the study's folder.
        methods: post-hoc maps.

    Returns:
        The cells with their folders: all losses of one seed, then the next seed.
    """
    check_methods(methods)
    script, words = launch.script.name, (launch.configs, launch.arguments)
    # Once for a loss: this reads its file, and hashes the data.
    found = [(each, resolved(script, *words, each)) for each in variants(losses, grid, launch.script)]
    cells = [
        Cell(variant, seed, {**arguments, "seed": seed})
        for seed in check_seeds(seeds)
        for variant, arguments in found
    ]
    return write_plan(output.absolute(), cells, methods, resolved(script, *words), launch.script)


def launch_of(
    script: str,
    configs: Sequence[str] = (),
    arguments: Sequence[str] = (),
    launcher: str | None = None,
    *,
    keep_models: bool = True,
) -> Launch:
    """How a study starts its trainings; of `configs` in the folder beside the script, a name is enough."""
    path = Path(script)
    way_out = "check the path, for example recipes/text_classification.py"
    check(path.is_file(), "SCRIPT_OR_STUDY to be a script, or the folder of a study", script, way_out)
    files = tuple(_config(word, path).absolute() for word in configs)
    try:
        first = None if launcher is None else shutil.which(shlex.split(launcher)[0])
    except (ValueError, IndexError):  # a quotation mark without its other one, or no word
        first = None
    way_out = "write for example 'torchrun --nproc_per_node 2'"
    check(
        launcher is None or first is not None, "--launcher to begin with a program", repr(launcher), way_out
    )
    return Launch(path.absolute(), files, tuple(arguments), launcher, keep_models)


def _config(word: str, script: Path) -> Path:
    """A YAML file, or the name of one in the folder `configs` beside the script."""
    beside = script.parent / "configs" / word
    path = next((path for path in (Path(word), beside) if path.is_file()), None)
    if path is None:
        names = [file.name for file in beside.parent.glob("*.yaml")]
        way_out = did_you_mean(word, names) if names else "check the path"
        raise InputValueError(expected("--config", "name an existing YAML file", repr(word), way_out))
    return path


def train(launch: Launch, cells: Cells, executor: Executor, *, say: Callable[[str], None]) -> None:
    """Train what is missing; raises ValueError if no training of the study is finished in the end."""
    version = content_hash(launch.script)
    trained_by = [recorded(folder / CELL, "script") for folder in cells.values()]
    changed = sum(each not in (None, version) for each in trained_by)
    if changed:
        say(
            f"{launch.script.name} has changed since it trained {changed} of these {len(cells)}. They are not "
            "trained again: remove their folders in cells/ if the change matters"
        )
    failed = executor(launch, cells, say=say)
    got = f"{len(failed)} failures of {len(cells)}"
    way_out = f"see log.txt in {next(iter(cells.values())).parent}/*"
    check(len(failed) < len(cells), "the trainings to end", got, way_out)


def parse_grid(words: Sequence[str]) -> dict[str, list[Any]]:
    """Hyperparameters and their values, from words like gamma=1,2,3.

    >>> parse_grid(["gamma=1,2.5,1e-3", "variant=plain"])
    {'gamma': [1, 2.5, 0.001], 'variant': ['plain']}
    """
    grid: dict[str, list[Any]] = {}
    for word in words:
        name, _, values = word.partition("=")
        way_out = f"write all values in one, {name}=1,2"
        check(name not in grid, "--grid to name each hyperparameter once", repr(word), way_out)
        try:
            grid[name] = [_number(value) for value in yaml.safe_load(f"[{values}]")]
        except yaml.YAMLError:
            values = ""
        way_out = "write for example gamma=1,2,3"
        check(bool(name and values), "--grid to be name=value,value", repr(word), way_out)
    return grid


def _number(value: Any) -> Any:
    """A value of YAML; 1e-3, which it takes for text, is a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def parse_submitit(text: str) -> dict[str, Any]:
    """Parameters of submitit.

    >>> parse_submitit('{"timeout_min": 600}')
    {'timeout_min': 600}
    """
    try:
        return dict(**json.loads(text))
    except (ValueError, TypeError) as error:
        way_out = """write '{"timeout_min": 600}', or '{}'"""
        raise InputValueError(expected("--submitit", "be a JSON object", repr(text), way_out)) from error


def parse_seeds(text: str) -> list[int]:
    """Whole numbers, separated by commas.

    >>> parse_seeds("0,1,2")
    [0, 1, 2]
    """
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise InputValueError(expected("--seeds", "be whole numbers", repr(text), "write 0,1,2")) from error
