"""Arguments of a script from YAML files, with command-line overrides: `--config FILE.yaml --learning_rate 3e-5`."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import yaml
from transformers import HfArgumentParser
from transformers.utils import is_torch_bf16_gpu_available

from hf_calib._errors import (
    InputError,
    InputValueError,
    check,
    did_you_mean,
    expected,
    printable,
)


def parse_arguments(
    dataclass_types: Iterable[Any], argv: Sequence[str] | None = None
) -> tuple[Any, ...]:
    """Fill dataclasses from the command line, and from the files after `--config`.

    Files set defaults, a later `--config` overrides an earlier one (a task, then a loss), and the command line
    overrides all files. Values of files are read as if they had been typed: `learning_rate: 2e-5`, a string in YAML, is
    a number, and `eval_strategy: no` or `run_name: 2026-01-31`, a boolean and a date in YAML, are texts. On a machine
    that cannot train in it, a file's `bf16: true` (or fp16) is switched off, with a line on stderr.

    Args:
        dataclass_types: dataclasses, for example `(DataArguments, CalibrationTrainingArguments)`.
        argv: command line without the program's name. The default is `sys.argv[1:]`, for a script; errors in its
            arguments then end the script with one line instead of a traceback.

    Returns:
        One instance per dataclass, in order.

    Raises:
        ValueError: if a file is missing, is not a YAML mapping, has an unknown key, or a `null` for an argument whose
            default is a value.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Arguments:
    ...     learning_rate: float = 1e-3
    >>> parse_arguments([Arguments], ["--learning_rate", "2e-5"])
    (...Arguments(learning_rate=2e-05),)
    """
    types = list(dataclass_types)
    if argv is None:
        sys.excepthook = _say_input_errors
    of_files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    of_files.add_argument("--config", action="append", type=Path, default=[])
    files, rest = of_files.parse_known_args(argv)
    known = {
        each.name: each.default for kind in types for each in fields(kind) if each.init
    }
    from_files = [word for path in files.config for word in _as_argv(path, known)]
    return HfArgumentParser(types).parse_args_into_dataclasses(args=from_files + rest)


class _Values(yaml.SafeLoader):
    """YAML loader in which 2e-5 is a number, and names are strings without repeats."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in node.value:
            if key.value in found:
                raise yaml.YAMLError(
                    f"{key.value!r} is there twice, of which one would be lost"
                )
            found[key.value] = self.construct_object(value, deep=True)
        return found


_TRUE = ("true", "yes")
_NUMBER = re.compile(r"[-+]?\d+\.?\d*e[-+]?\d+$", re.IGNORECASE)
_Values.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def read_config(path: Path) -> dict[str, Any]:
    """Return the lines of a YAML file as they would be typed: words and lists of words; mappings have YAML's values."""
    check(
        os.path.isfile(path),
        "--config to name an existing YAML file",
        str(path),
        "check the path",
    )
    try:
        text = path.read_text(encoding="utf-8")
        words, values = yaml.load(text, yaml.BaseLoader), yaml.load(text, _Values)
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise InputValueError(
            expected(str(path), "be YAML", error, "correct the file")
        ) from error
    got = type(values).__name__
    check(
        isinstance(words, dict),
        f"{path} to hold `name: value` lines",
        got,
        "see recipes/configs",
    )
    kept = {
        name: value
        for name, value in values.items()
        if value is None or isinstance(value, dict)
    }
    return words | json.loads(json.dumps(kept, default=str))


def _as_argv(path: Path, known: Mapping[str, Any]) -> list[str]:
    """The lines of a file as typed, without 16 bits if no accelerator of this machine supports them."""
    argv: list[str] = []
    can_compute = {
        "bf16": is_torch_bf16_gpu_available,
        "fp16": torch.accelerator.is_available,
    }
    for name, value in read_config(path).items():
        way_out = "" if name in known else did_you_mean(name, known)
        check(
            name in known,
            f"keys of {path} to be arguments of the script",
            name,
            way_out,
        )
        if value is None:
            way_out = "leave the line out for the default"
            check(
                known[name] is None, f"{path} to give {name} a value", "none", way_out
            )
        elif (
            name in can_compute
            and str(value).lower() in _TRUE
            and not can_compute[name]()
        ):
            print(
                f"{name} of {path} is off: no accelerator here computes in it. Results may differ a little from "
                f"those of a GPU; --{name} true insists on it.",
                file=sys.stderr,
            )
        elif isinstance(value, list):
            argv += [f"--{name}", *value]
        else:
            argv.append(
                f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"
            )
    return argv


def _say_input_errors(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """A context that prints input errors in one line, like the command line; bugs have a traceback."""
    if not isinstance(error, InputError):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stdout.flush()
    print(f"{Path(sys.argv[0]).name}: {printable(error)}", file=sys.stderr, flush=True)
