"""`hf-calib compare`: losses trained over seeds by a script, and their report."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_calib._errors import InputValueError, did_you_mean, expected
from hf_calib.study.comparing import METHODS, check_seeds, report_study
from hf_calib.study.folder import is_finished, trained_by_another_version, write_plan
from hf_calib.study.grid import Cell, content_hash, resolved, variants
from hf_calib.study.launch import Launch, for_shell
from hf_calib.study.measured import check_methods
from hf_calib.study.running import train_cells
from hf_calib.study.submitit_jobs import submit_cells

__all__ = ["METHODS", "report_study"]


def plan_study(
    script: str,
    *,
    configs: Sequence[str],
    losses: Sequence[str],
    seeds: Sequence[int],
    grid: Mapping[str, Sequence[Any]],
    methods: Sequence[str] = METHODS,
    arguments: Sequence[str],
    output: Path,
    launcher: str | None = None,
    keep_models: bool = True,
) -> tuple[Launch, dict[Cell, Path]]:
    """Check a study and write its plan; trains nothing.

    Args:
        script: the recipe, or a script of one's own that takes the same arguments.
        configs: its YAML files, or names of files in `configs` beside it.
        losses: see `variants`.
        seeds: of the trainings.
        grid: hyperparameter -> values.
        methods: post-hoc maps.
        arguments: further words of the script's command line.
        output: the study's folder.
        launcher: what stands before the script.
        keep_models: whether calibrated models stay.

    Returns:
        How the trainings are started, and the cells with their folders: all losses of one seed, then the next seed.

    Raises:
        ValueError: for whatever is wrong, before any training.
    """
    path = Path(script)
    if not path.is_file():
        requirement = "be a script, or the folder of a study"
        way_out = "check the path, for example recipes/text_classification.py"
        raise InputValueError(expected("SCRIPT_OR_STUDY", requirement, script, way_out))
    check_methods(methods)
    _check_launcher(launcher)
    launch = Launch(
        path.absolute(),
        tuple(_config(word, path).absolute() for word in configs),
        tuple(arguments),
        launcher,
        keep_models,
    )
    # Once for a loss: this reads its file, and hashes the data.
    configurations = [
        (variant, resolved(path.name, launch.configs, arguments, variant))
        for variant in variants(losses, grid, path)
    ]
    cells = [
        Cell(variant, seed, {**configuration, "seed": seed})
        for seed in check_seeds(seeds)
        for variant, configuration in configurations
    ]
    base = resolved(path.name, launch.configs, arguments)
    study = output.absolute()
    return launch, write_plan(study, cells, methods, base, launch.script)


def train(
    launch: Launch,
    cells: Mapping[Cell, Path],
    *,
    jobs: int,
    scheduler: Mapping[str, Any] | None,
    say: Callable[[str], None],
) -> None:
    """Train what is missing: here, or with parameters of submitit as jobs of a scheduler.

    Raises:
        ValueError: if no training of the study is finished in the end.
    """
    version = content_hash(launch.script)
    changed = sum(trained_by_another_version(folder, version) for folder in cells.values())
    if changed:
        say(
            f"{launch.script.name} has changed since it trained {changed} of these {len(cells)}. They are not "
            "trained again: remove their folders in cells/ if the change matters"
        )
    if scheduler is not None:
        failed = submit_cells(launch, cells, scheduler, say=say)
    else:
        failed = train_cells(launch, cells, jobs=jobs, say=say)
    if len(failed) == len(cells):
        way_out = f"see log.txt in {next(iter(cells.values())).parent}/*"
        raise InputValueError(
            expected("the trainings", "end", f"{len(failed)} failures of {len(cells)}", way_out)
        )


def check_study_folder(output: Path | None) -> Path:
    """The folder of a new study."""
    if output is None:
        raise InputValueError(expected("--output", "name the study's folder", "none", "write --output study"))
    return output.absolute()


def check_only_reports(*given: Any) -> None:
    """Raise if there is more than the folder of a study, which knows its trainings."""
    if any(given):
        got, way_out = "a study's folder with arguments", "pass the script to train more"
        raise InputValueError(expected("a script", "be given with these arguments", got, way_out))


def command_lines(launch: Launch, cells: Mapping[Cell, Path]) -> list[str]:
    """One line for a shell for each training that is not finished, to be run from this folder; without secrets."""
    return [
        for_shell(launch.command(cell, folder), launch.arguments)
        for cell, folder in cells.items()
        if not is_finished(folder)
    ]


def _check_launcher(launcher: str | None) -> None:
    """Raise unless it can be started."""
    if launcher is None:
        return
    try:
        words = shlex.split(launcher)
    except ValueError:  # a quotation mark without its other one
        words = []
    if not words or shutil.which(words[0]) is None:
        way_out = "write for example 'torchrun --nproc_per_node 2'"
        raise InputValueError(expected("--launcher", "begin with a program", repr(launcher), way_out))


def _config(word: str, script: Path) -> Path:
    """A YAML file, or the name of one in the folder `configs` beside the script."""
    beside = script.parent / "configs" / word
    path = next((path for path in (Path(word), beside) if path.is_file()), None)
    if path is None:
        names = [file.name for file in beside.parent.glob("*.yaml")]
        way_out = did_you_mean(word, names) if names else "check the path"
        raise InputValueError(expected("--config", "name an existing YAML file", repr(word), way_out))
    return path


def parse_grid(words: Sequence[str]) -> dict[str, list[Any]]:
    """Hyperparameters and their values, from words like gamma=1,2,3.

    >>> parse_grid(["gamma=1,2.5,1e-3", "variant=plain"])
    {'gamma': [1, 2.5, 0.001], 'variant': ['plain']}
    """
    grid = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not (name and equals and values):
            way_out = "write for example gamma=1,2,3"
            raise InputValueError(expected("--grid", "be name=value,value", repr(word), way_out))
        if name in grid:
            way_out = f"write all values in one, {name}=1,2"
            raise InputValueError(expected("--grid", "name each hyperparameter once", repr(word), way_out))
        try:
            grid[name] = [_number(value) for value in yaml.safe_load(f"[{values}]")]
        except yaml.YAMLError as error:
            way_out = "write for example gamma=1,2,3"
            raise InputValueError(expected("--grid", "be name=value,value", repr(word), way_out)) from error
    return grid


def _number(value: Any) -> Any:
    """A value of YAML; 1e-3, which it takes for text, is a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def parse_submitit(text: str | None) -> dict[str, Any] | None:
    """Parameters of submitit.

    >>> parse_submitit('{"timeout_min": 600}')
    {'timeout_min': 600}
    """
    if text is None:
        return None
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
