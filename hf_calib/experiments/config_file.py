"""Arguments of a script from YAML files, with command-line overrides:
`--config FILE.yaml --learning_rate 3e-5`.
"""

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
from typing import Any, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

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

    Files set defaults, a later `--config` overrides an earlier one (a task, then a loss), and the
    command line overrides all files. Values of files are read as if they had been typed:
    `learning_rate: 2e-5`, a string in YAML, is a number, and `eval_strategy: no` or
    `run_name: 2026-01-31`, a boolean and a date in YAML, are texts. On a machine
    that cannot train in it, a file's `bf16: true` (or fp16) is switched off, with a line on stderr.

    Args:
        dataclass_types: dataclasses, for example `(DataArguments, CalibrationTrainingArguments)`.
        argv: command line without the program's name, by default `sys.argv[1:]`.

    Returns:
        One instance per dataclass, in order.

    Raises:
        ValueError: if a file is missing, is not a YAML mapping, has an unknown key, or a `null` for
            an argument whose default is a value.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Arguments:
    ...     learning_rate: float = 1e-3
    >>> parse_arguments([Arguments], ["--learning_rate", "2e-5"])
    (...Arguments(learning_rate=2e-05),)
    """
    types = list(dataclass_types)
    # Abbreviations of --config may be arguments of the script, and so is --help.
    of_files = _Strict(add_help=False, allow_abbrev=False)
    of_files.add_argument("--config", action="append", type=Path, default=[])
    files, rest = of_files.parse_known_args(argv)
    known = _arguments_of(types)
    from_files = [word for path in files.config for word in _as_argv(path, known)]
    *found, unknown = _Arguments(types).parse_args_into_dataclasses(
        # The last value counts, so that the command line overrides the files.
        args=from_files + rest,
        return_remaining_strings=True,
    )
    if unknown:
        name = unknown[0].lstrip("-").partition("=")[0]
        check(
            False,
            "the arguments to be those of the script",
            got=printable(unknown[0])[:100],
            way_out=did_you_mean(name, known),
        )
    return tuple(found)


class Argument(NamedTuple):
    """What a dataclass says of one of its fields."""

    default: Any
    takes_several: bool


def _arguments_of(types: Iterable[Any]) -> dict[str, Argument]:
    """The fields of dataclasses by name."""
    found = {}
    for kind in types:
        hints = get_type_hints(kind)
        for each in fields(kind):
            if each.init:
                of = hints[each.name]
                # A list may be optional, as in list[int] | None.
                is_list = list in (get_origin(of), *map(get_origin, get_args(of)))
                found[each.name] = Argument(each.default, takes_several=is_list)
    return found


class _Strict(argparse.ArgumentParser):
    """A parser whose errors are ours: one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        raise InputValueError(
            expected(
                "the arguments",
                "be those of the script",
                got=printable(message)[:300],
                way_out="--help lists them",
            )
        )


class _Arguments(_Strict, HfArgumentParser):
    pass


class _Values(yaml.SafeLoader):
    """YAML loader in which 2e-5 is a number, and names are strings without repeats."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        # A few aliases of aliases stand for billions of values.
        if self.check_event(yaml.AliasEvent):
            alias = self.get_event().anchor
            raise yaml.YAMLError(f"an alias, *{alias}: write its value instead")
        self._depth += 1
        if self._depth > _DEEPEST:
            raise yaml.YAMLError(f"lists or mappings in more than {_DEEPEST} others")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in node.value:
            # Names are used as they are written: YAML would read `no` as False.
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError("a name that is a list or a mapping")
            if key.value in found:
                raise yaml.YAMLError(
                    f"{key.value!r} is there twice, of which one would be lost"
                )
            found[key.value] = self.construct_object(value, deep=True)
        return found


# Much deeper ones would exhaust the stack of Python.
_DEEPEST = 20
# In bytes; half a second for the reader.
_LARGEST_FILE = 2**15
_TRUE = ("true", "yes")
# YAML 1.1 reads a number with an exponent and no dot as a text.
_NUMBER = re.compile(r"[-+]?\d+\.?\d*e[-+]?\d+$", re.IGNORECASE)
_Values.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def read_config(path: Path) -> dict[str, Any]:
    """Return the lines of a YAML file as they would be typed: words and lists of words;
    mappings have YAML's values.
    """
    check(
        # Path.is_file raises for a name that is too long.
        os.path.isfile(path),
        "--config to name an existing YAML file",
        str(path),
        "check the path",
    )
    size = path.stat().st_size
    check(
        size <= _LARGEST_FILE,
        f"{path} to have at most {_LARGEST_FILE:,} bytes",
        got=f"{size:,}",
        way_out="name a file of arguments",
    )
    try:
        loader = _Values(path.read_text(encoding="utf-8"))
        node: Any = loader.get_single_node()
        values = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise InputValueError(
            expected(str(path), "be YAML", printable(error)[:300], "correct the file")
        ) from error
    if not isinstance(values, dict):
        got = type(values).__name__
        requirement = "hold `name: value` lines"
        raise InputValueError(
            expected(str(path), requirement, got, "see recipes/configs")
        )
    # Mappings are passed as JSON, whose values have types; what JSON lacks, such as a
    # date, is a text.
    kept = {
        name: value
        for name, value in values.items()
        if value is None or isinstance(value, dict)
    }
    return _words(node) | json.loads(json.dumps(kept, default=str))


def _words(node: yaml.Node) -> Any:
    """A value as it stands in the file."""
    if isinstance(node, yaml.SequenceNode):
        return [_words(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {name.value: _words(item) for name, item in node.value}
    return node.value


def _as_argv(path: Path, arguments: Mapping[str, Argument]) -> list[str]:
    """The lines of a file as typed, without 16 bits if no accelerator of this machine supports
    them.
    """
    argv: list[str] = []
    # A file is used on several machines, so that its 16 bits are switched off where
    # nothing computes in them; who types the option insists on it.
    can_compute = {
        "bf16": is_torch_bf16_gpu_available,
        "fp16": torch.accelerator.is_available,
    }
    for name, value in read_config(path).items():
        check(
            name in arguments,
            f"keys of {path} to be arguments of the script",
            printable(name)[:100],
            "" if name in arguments else did_you_mean(name, arguments),
        )
        if isinstance(value, list):
            argv += [f"--{name}", *_several(name, value, arguments[name], path)]
        # The command line has no word for None.
        elif value is None:
            check(
                arguments[name].default is None,
                f"{path} to give {name} a value",
                "none",
                "leave the line out for the default",
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
        elif isinstance(value, dict):
            argv.append(f"--{name}={json.dumps(value)}")
        else:
            # After an equals sign, a value may begin with a dash.
            argv.append(f"--{name}={value}")
    return argv


def _several(name: str, values: list[Any], argument: Argument, path: Path) -> list[str]:
    """The words of a list; raise if the argument is one value, or an item is not a word."""
    check(
        argument.takes_several,
        f"{name} in {path} to be one value",
        got=f"a list of {len(values)}",
        way_out="write one value",
    )
    are_words = all(
        # argparse would take such a word for the next argument.
        isinstance(each, str) and not each.startswith("--")
        for each in values
    )
    check(
        bool(values) and are_words,
        f"{name} in {path} to be a list of numbers or words",
        got=printable(values)[:200],
        way_out="leave the line out for the default",
    )
    return values


def print_input_errors(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an error in the input as one line, like the command line; a bug has its traceback.

    A script sets it once, before it reads its arguments: `sys.excepthook = print_input_errors`.

    Args:
        kind, error, trace: those of `sys.excepthook`, which Python calls with an error that ends
            the script.
    """
    if not isinstance(error, InputError):
        sys.__excepthook__(kind, error, trace)
        return
    # What the script has printed comes before its error, also where both go to one
    # file.
    sys.stdout.flush()
    script = Path(sys.argv[0]).name
    print(f"{script}: {printable(error)}", file=sys.stderr, flush=True)
