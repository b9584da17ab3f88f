"""Arguments of a script from YAML files, with command-line overrides: `--config FILE.yaml --learning_rate 3e-5`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, get_args, get_type_hints

import torch
import yaml
from transformers import HfArgumentParser
from transformers.utils import is_torch_bf16_gpu_available

from hf_calib._errors import InputError, InputValueError, check, did_you_mean, expected, printable


def parse_arguments(dataclass_types: Iterable[Any], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Fill dataclasses from the command line, and from the files after `--config`.

    Files set defaults, a later `--config` wins over an earlier one (a task, then a loss), and the command line wins
    over all. Their values are read as if they had been typed: `learning_rate: 2e-5`, which YAML takes for a string,
    is a number, and `eval_strategy: no` or `run_name: 2026-01-31`, which it takes for a truth value and a date, are
    texts. A file's `bf16: true` (or fp16) is switched off, with a line on stderr, on a machine that cannot train in it.

    Args:
        dataclass_types: for example `(DataArguments, CalibrationTrainingArguments)`.
        argv: the command line without the program's name; `sys.argv[1:]` by default, for a script, whose errors in what
            was passed to it then end it with one line in place of a traceback.

    Returns:
        One instance per dataclass, in order.

    Raises:
        ValueError: if a file is missing, is not a YAML mapping, has a key that no dataclass knows, or a `null` where
            the default is a value.

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
    paths, argv = _take_configs(sys.argv[1:] if argv is None else argv)
    known: dict[str, tuple[bool, set[Any]]] = {}
    for kind in types:
        hints = get_type_hints(kind)
        for each in filter(lambda field: field.init, fields(kind)):
            hint = hints[each.name]
            known[each.name] = each.default is None, {hint, *get_args(hint)}
    from_files = [word for path in paths for word in _as_argv(path, known)]
    return HfArgumentParser(types).parse_args_into_dataclasses(args=from_files + argv)


def read_config(path: Path) -> dict[str, Any]:
    """The lines of a YAML file as they would be typed: words and lists of them; mappings have YAML's values."""
    keeps_value = (type(None), dict)
    return {name: value if isinstance(value, keeps_value) else words for name, words, value in _lines(path)}


class _Checked:
    """Keys are words, and there once."""

    construct_object: Any

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        """Refuse a key that is there twice, of which YAML would keep the last."""
        found: dict[str, Any] = {}
        for key, value in node.value:
            if str(key.value) in found:
                raise yaml.YAMLError(f"{key.value!r} is there twice, of which one would be lost")
            found[str(key.value)] = self.construct_object(value, deep=True)
        return found


class _Words(_Checked, yaml.BaseLoader):
    """Every scalar is the word that stands in the file."""


class _Values(_Checked, yaml.SafeLoader):
    """Truth values, numbers, 2e-5 among them, and texts; dates are texts."""


_NUMBER = re.compile(r"[-+]?\d+\.?\d*e[-+]?\d+$", re.IGNORECASE)
_Values.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
_Values.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)


def _lines(path: Path) -> Iterator[tuple[str, Any, Any]]:
    """Name, words and values of each line of a file."""
    check(os.path.isfile(path), "--config to name an existing YAML file", str(path), "check the path")
    try:
        text = path.read_text(encoding="utf-8")
        # A few lines of aliases stand for more values than any memory holds.
        aliases = (event.anchor for event in yaml.parse(text) if isinstance(event, yaml.AliasEvent))
        if (alias := next(aliases, None)) is not None:
            raise yaml.YAMLError(f"the alias *{alias}; write its value out")
        words, values = yaml.load(text, _Words), yaml.load(text, _Values)
    except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        got = "mappings within mappings without end" if isinstance(error, RecursionError) else str(error)
        raise InputValueError(expected(str(path), "be YAML", got, "correct the file")) from error
    is_mapping = isinstance(values, dict)
    check(is_mapping, f"{path} to hold `name: value` lines", type(values).__name__, "see recipes/configs")
    return ((name, words[name], value) for name, value in values.items())


def _as_argv(path: Path, known: Mapping[str, tuple[bool, set[Any]]]) -> list[str]:
    """The lines of a file as typed, without 16 bits where no accelerator here computes in them."""
    argv: list[str] = []
    can_compute = {"bf16": is_torch_bf16_gpu_available, "fp16": torch.accelerator.is_available}
    for name, words, value in _lines(path):
        way_out = "" if name in known else did_you_mean(name, known)
        check(name in known, f"keys of {path} to be arguments of the script", name, way_out)
        may_be_none, types = known[name]
        if name in can_compute and value is True and not can_compute[name]():
            print(
                f"{name} of {path} is off: no accelerator here computes in it. Results may differ a little from "
                f"those of a GPU; --{name} true insists on it.",
                file=sys.stderr,
            )
            continue
        if value is None and may_be_none:
            continue
        way_out = "leave the line out for the default"
        check(value is not None and value != [], f"{path} to give {name} a value", "none", way_out)
        if isinstance(value, list):
            takes_several = any(
                getattr(kind, "__origin__", kind) in (list, tuple, Sequence) for kind in types
            )
            got = f"a list of {len(value)}"
            check(takes_several, f"{name} in {path} to be one value", got, "write one value")
            argv += [f"--{name}", *(_typed(*each, types) for each in zip(words, value, strict=True))]
        elif isinstance(value, dict):
            argv.append(f"--{name}={json.dumps(value)}")
        else:
            argv.append(f"--{name}={_typed(words, value, types)}")
    return argv


def _typed(word: str, value: Any, types: set[Any]) -> str:
    """A value as typed on a command line: the word, unless the argument takes YAML's own type."""
    return str(value) if type(value) in types else word


def _take_configs(argv: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The files after `--config`, and the other words."""
    paths, rest, words = [], [], iter(argv)
    for word in words:
        if word.startswith("--config="):
            paths.append(Path(word.removeprefix("--config=")))
        elif word == "--config":
            path = next(words, None)
            check(path is not None, "--config to be followed by a YAML file", "nothing", "name the file")
            paths.append(Path(str(path)))
        else:
            rest.append(word)
    return paths, rest


def _say_input_errors(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """One line for what a user passed, as the command line has it; a traceback for a bug."""
    if not isinstance(error, InputError):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stdout.flush()
    print(f"{Path(sys.argv[0]).name}: {printable(error)}", file=sys.stderr, flush=True)
