"""`hf-calib compare-losses`: losses trained over seeds by a script, and their report."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_calib._errors import check, did_you_mean
from hf_calib.commands import console
from hf_calib.study.launch import Cells, Executor, Launch, Local, Submitit, printed
from hf_calib.study.measured import METHODS, check_methods
from hf_calib.study.plan import (
    CELL,
    Cell,
    content_hash,
    recorded,
    resolved,
    variants,
    write_plan,
)
from hf_calib.study.report import document_of
from hf_calib.study.results import StudyResults
from hf_calib.study.study import check_seeds, report_study

if TYPE_CHECKING:
    from hf_calib.commands.options import CompareLosses
    from hf_calib.commands.source import Running


def run(options: CompareLosses, running: Running) -> StudyResults | console.Done:
    """Train what is missing of a script's study, then measure it; or measure a study's folder again."""
    study = Path(options.source)
    if study.is_dir():
        plain = type(options)(
            source=options.source, methods=options.methods, variance=options.variance
        )
        names = [each.name for each in fields(plain)]
        given = [
            name
            for name in names
            if getattr(options, name) not in (getattr(plain, name), [])
        ]
        got, way_out = (
            f"a study's folder with {', '.join(given)}",
            "pass the script to train more",
        )
        check(not given, "a script to be given with these arguments", got, way_out)
    else:
        check(
            options.output is not None,
            "--output to name the study's folder",
            "none",
            "add --output study",
        )
        launch, cells = planned(options)
        study = next(iter(cells.values())).parent.parent
        if options.print_commands:
            lines: list[str] = []
            printed(launch, cells, lines.append)
            return console.Done([lines] if lines else [], {"commands": lines})
        settings, way_out = (
            _value(options.submitit or "{}"),
            """write '{"timeout_min": 600}', or '{}'""",
        )
        check(
            isinstance(settings, dict),
            "--submitit to be a JSON object",
            repr(options.submitit),
            way_out,
        )
        executor = (
            Local(options.jobs) if options.submitit is None else Submitit(settings)
        )
        with console.interruptible(f"The same command resumes the study in {study}"):
            train(launch, cells, executor, say=console.print_progress)
    return report_study(
        study, methods=options.methods, variance=options.variance, stages=running.stages
    )


def shown(results: StudyResults) -> list[Any]:
    """The main table, the advice, and what is missing, all else is in the report."""
    return [document_of(results)]


def planned(options: CompareLosses) -> tuple[Launch, dict[Cell, Path]]:
    """Check a study and write its plan: how its runs are started, and their folders, seed by seed."""
    script, launcher = Path(options.source), options.launcher
    way_out = "check the path, for example recipes/text_classification.py"
    check(
        script.is_file(),
        "SCRIPT_OR_STUDY to be a script, or the folder of a study",
        script,
        way_out,
    )
    try:
        program = shutil.which(
            sys.executable if launcher is None else shlex.split(launcher)[0]
        )
    except (
        ValueError,
        IndexError,
    ):  # a quotation mark without its other one, or no word
        program = None
    way_out = "write for example 'torchrun --nproc_per_node 2'"
    check(
        program is not None,
        "--launcher to begin with a program",
        repr(launcher),
        way_out,
    )
    configs = tuple(_config(word, script).absolute() for word in options.config or ())
    launch = Launch(
        script.absolute(),
        configs,
        tuple(options.words or ()),
        launcher,
        options.keep_models,
    )
    methods, given = options.methods or METHODS, options.seeds or ()
    check_methods(methods)
    are_seeds = all(re.fullmatch(r"\d+", seed) for seed in given)
    check(
        are_seeds, "--seeds to be whole numbers", repr(",".join(given)), "write 0,1,2"
    )
    seeds = check_seeds([int(seed) for seed in given])
    words = script.name, configs, launch.arguments
    losses = variants(
        options.losses or (), parse_grid(options.grid or ()), launch.script
    )
    # Once for a loss: this reads its file, and hashes the data.
    found = [(loss, resolved(*words, loss)) for loss in losses]
    cells = [Cell(loss, seed, given) for seed in seeds for loss, given in found]
    output = Path(options.output or "").absolute()
    return launch, write_plan(output, cells, methods, resolved(*words), launch.script)


def _config(word: str, script: Path) -> Path:
    """A YAML file, or the one of this name in the folder `configs` next to the script."""
    folder = script.parent / "configs"
    path = Path(word) if Path(word).is_file() else folder / word
    way_out = did_you_mean(word, [each.name for each in folder.glob("*.yaml")])
    check(path.is_file(), "--config to name an existing YAML file", repr(word), way_out)
    return path


def train(
    launch: Launch, cells: Cells, executor: Executor, *, say: Callable[[str], None]
) -> None:
    """Train what is missing; raises ValueError if no run of the study is finished in the end."""
    version = content_hash(launch.script)
    trained_by = [recorded(folder / CELL, "script") for folder in cells.values()]
    changed = sum(each not in (None, version) for each in trained_by)
    if changed:
        say(
            f"{launch.script.name} has changed since it trained {changed} of these {len(cells)}. Finished runs are "
            "not trained again: remove their folders in cells/ if the change matters"
        )
    failed = executor(launch, cells, say)
    way_out = f"see log.txt in {next(iter(cells.values())).parent}/*"
    check(
        len(failed) < len(cells),
        "at least one run to end",
        f"none of {len(cells)}",
        way_out,
    )


def parse_grid(words: Sequence[str]) -> dict[str, list[Any]]:
    """Hyperparameters and their values, from words like gamma=1,2,3.

    >>> parse_grid(["gamma=1,2.5", "variant=plain", "gamma=1e-3"])
    {'gamma': [1, 2.5, 0.001], 'variant': ['plain']}
    """
    grid: dict[str, list[Any]] = {}
    for word in words:
        name, _, values = word.partition("=")
        way_out = "write for example gamma=1,2,3"
        check(
            bool(name and values), "--grid to be name=value,value", repr(word), way_out
        )
        grid[name] = [*grid.get(name, []), *map(_value, values.split(","))]
    return grid


def _value(text: str) -> Any:
    """A number, true or false, or a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
