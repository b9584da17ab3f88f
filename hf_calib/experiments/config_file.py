"""Arguments from a YAML file with command-line overrides: `--config FILE.yaml --learning_rate 3e-5`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from hf_calib._errors import InputValueError, did_you_mean, expected


def parse_arguments(dataclass_types: Iterable[Any], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Fill dataclasses from the command line, and from the files after `--config`.

    Files set defaults, a later `--config` wins over an earlier one (a task, then a loss), and the command line
    wins over all. The files' values are read as if they had been typed on the command line, so
    `learning_rate: 2e-5`, which YAML takes for a string, is a number here.

    Args:
        dataclass_types: for example `(DataArguments, CalibrationTrainingArguments)`.
        argv: the command line without the program's name; `sys.argv[1:]` by default.

    Returns:
        One instance per dataclass, in order.

    Raises:
        ValueError: for a file that is missing, is not a YAML mapping, has a key no dataclass knows, or a `null`
            where the default is a value.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Arguments:
        ...     learning_rate: float = 1e-3
        >>> parse_arguments([Arguments], ["--learning_rate", "2e-5"])
        (...Arguments(learning_rate=2e-05),)
    """
    types = list(dataclass_types)
    argv = list(sys.argv[1:] if argv is None else argv)
    paths, argv = _take_configs(argv)
    known = {field.name: field for kind in types for field in fields(kind) if field.init}
    from_files = [word for path in paths for word in _as_argv(_read(path), path, known)]
    return HfArgumentParser(types).parse_args_into_dataclasses(args=from_files + argv)


def _take_configs(argv: list[str]) -> tuple[list[Path], list[str]]:
    paths, rest, words = [], [], iter(argv)
    for word in words:
        if word.startswith("--config="):
            paths.append(Path(word.removeprefix("--config=")))
        elif word == "--config":
            path = next(words, None)
            if path is None:
                raise InputValueError(
                    expected("--config", "be followed by a YAML file", "nothing", "name the file")
                )
            paths.append(Path(path))
        else:
            rest.append(word)
    return paths, rest


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputValueError(expected("--config", "name an existing YAML file", str(path), "check the path"))
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise InputValueError(expected(str(path), "be YAML", str(error), "mend the file")) from error
    if not isinstance(content, dict):
        raise InputValueError(
            expected(str(path), "hold `name: value` lines", type(content).__name__, "see recipes/configs")
        )
    return content


def _as_argv(config: dict[str, Any], path: Path, known: Mapping[str, Field[Any]]) -> list[str]:
    argv: list[str] = []
    for name, value in config.items():
        if name not in known:
            raise InputValueError(
                expected(f"keys of {path}", "be arguments of the script", name, did_you_mean(name, known))
            )
        if value is None and known[name].default is None:
            continue
        if value is None or value == []:
            requirement = f"give {name} a value"
            raise InputValueError(
                expected(str(path), requirement, "none", "leave the line out for the default")
            )
        if isinstance(value, list):
            argv += [f"--{name}", *map(str, value)]
        elif isinstance(value, dict):
            argv.append(f"--{name}={json.dumps({key: _number(item) for key, item in value.items()})}")
        else:
            argv.append(f"--{name}={value}")
    return argv


def _number(value: Any) -> Any:
    """The number in a string like 2e-5, which YAML takes for text."""
    is_one = isinstance(value, str) and re.fullmatch(r"[-+]?\d+\.?\d*e[-+]?\d+", value, re.IGNORECASE)
    return float(value) if is_one else value
