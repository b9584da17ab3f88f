"""Arguments of a script from YAML files, with command-line overrides: `--config FILE.yaml --learning_rate 3e-5`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
import yaml
from transformers import HfArgumentParser
from transformers.utils import is_torch_bf16_gpu_available

from hf_calib._errors import InputError, InputValueError, did_you_mean, expected, printable


def parse_arguments(dataclass_types: Iterable[Any], argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Fill dataclasses from the command line, and from the files after `--config`.

    Files set defaults, a later `--config` wins over an earlier one (a task, then a loss), and the command line
    wins over all. A file's `bf16: true` (or fp16) is switched off, with a line on stderr, on a machine that cannot
    train in it: a recipe runs on a laptop too. The files' values are read as if they had been typed on the command
    line: `learning_rate: 2e-5`, which YAML takes for a string, is a number, and `eval_strategy: no` or
    `run_name: 2026-01-31`, which it takes for a truth value and a date, are texts.

    Args:
        dataclass_types: for example `(DataArguments, CalibrationTrainingArguments)`.
        argv: the command line without the program's name; `sys.argv[1:]` by default, for a script, whose errors in what
            was passed to it then end it with one line in place of a traceback.

    Returns:
        One instance per dataclass, in order.

    Raises:
        ValueError: if a file is missing, is not a YAML mapping, has a key that no dataclass knows, or a `null`
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
    if argv is None:
        sys.excepthook = _say_input_errors
    argv = list(sys.argv[1:] if argv is None else argv)
    paths, argv = _take_configs(argv)
    hints = {name: hint for kind in types for name, hint in get_type_hints(kind).items()}
    known = {
        field.name: _Argument(field, {hints[field.name], *get_args(hints[field.name])})
        for kind in types
        for field in fields(kind)
        if field.init
    }
    from_files = [
        word for path in paths for word in _as_argv(_for_this_machine(_read(path), path), path, known)
    ]
    return HfArgumentParser(types).parse_args_into_dataclasses(args=from_files + argv)


def _say_input_errors(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """One line for what a user passed, as the command line has it; a traceback for a bug."""
    if not isinstance(error, InputError):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stdout.flush()
    print(f"{Path(sys.argv[0]).name}: {printable(error)}", file=sys.stderr, flush=True)


def _for_this_machine(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The lines of a file, without 16 bits where no accelerator here computes in them."""
    found = dict(config)
    for name, is_there in (("bf16", is_torch_bf16_gpu_available), ("fp16", torch.accelerator.is_available)):
        value = found.get(name)
        if getattr(value, "value", value) is True and not is_there():
            del found[name]
            print(
                f"{name} of {path} is off: no accelerator here computes in it. Results may differ a little from "
                f"those of a GPU; --{name} true insists on it.",
                file=sys.stderr,
            )
    return found


def read_config(path: Path) -> dict[str, Any]:
    """The lines of a YAML file as they would be typed on the command line: words, lists of them, and mappings.

    Raises:
        ValueError: if the file is missing, or no YAML mapping.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "c.yaml")
    ...     _ = path.write_text("learning_rate: 2e-5\\nbf16: true\\nloss_kwargs: {gamma: 2}\\n")
    ...     read_config(path)
    {'learning_rate': '2e-5', 'bf16': 'true', 'loss_kwargs': {'gamma': 2}}
    """
    return {name: _as_words(value) for name, value in _read(path).items()}


class _Argument(NamedTuple):
    """A dataclass field and the types that it takes."""

    field: Field[Any]
    types: set[Any]

    @property
    def takes_several(self) -> bool:
        """Whether a list can be given."""
        return any(getattr(kind, "__origin__", kind) in (list, tuple, Sequence) for kind in self.types)


class _Scalar(NamedTuple):
    """A value that YAML takes for something else than text, and the word that stands in the file."""

    value: Any
    word: str


class _Loader(yaml.SafeLoader):
    """Reads plain YAML; truth values, numbers and dates keep their words."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse aliases: a few lines of them stand for more values than any memory holds."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"the alias *{self.peek_event().anchor}; write its value out")
        return super().compose_node(parent, index)


def _construct_scalar(loader: _Loader, node: yaml.ScalarNode) -> _Scalar | str:
    if node.tag == "tag:yaml.org,2002:timestamp":
        return node.value
    kind = node.tag.rpartition(":")[2]
    return _Scalar(getattr(yaml.SafeLoader, f"construct_yaml_{kind}")(loader, node), node.value)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise yaml.YAMLError(f"{twice!r} is there twice, of which one would be lost")
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
for _kind in ("bool", "int", "float", "timestamp"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _construct_scalar)


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
    if not os.path.isfile(path):
        raise InputValueError(expected("--config", "name an existing YAML file", str(path), "check the path"))
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise InputValueError(expected(str(path), "be YAML", str(error), "correct the file")) from error
    except RecursionError as error:
        got = "mappings within mappings without end"
        raise InputValueError(expected(str(path), "be YAML", got, "correct the file")) from error
    if not isinstance(content, dict):
        got = type(content.value if isinstance(content, _Scalar) else content).__name__
        raise InputValueError(expected(str(path), "hold `name: value` lines", got, "see recipes/configs"))
    return {_word(name): value for name, value in content.items()}


def _as_argv(config: dict[str, Any], path: Path, known: Mapping[str, _Argument]) -> list[str]:
    argv: list[str] = []
    for name, value in config.items():
        if name not in known:
            raise InputValueError(
                expected(f"keys of {path}", "be arguments of the script", name, did_you_mean(name, known))
            )
        argument = known[name]
        if value is None and argument.field.default is None:
            continue
        if value is None or value == []:
            requirement = f"give {name} a value"
            raise InputValueError(
                expected(str(path), requirement, "none", "leave the line out for the default")
            )
        if isinstance(value, list) and not argument.takes_several:
            got, way_out = f"a list of {len(value)}", "write one value"
            raise InputValueError(expected(f"{name} in {path}", "be one value", got, way_out))
        if isinstance(value, list):
            argv += [f"--{name}", *(_typed(item, argument.types) for item in value)]
        elif isinstance(value, dict):
            argv.append(f"--{name}={json.dumps(_plain(value))}")
        else:
            argv.append(f"--{name}={_typed(value, argument.types)}")
    return argv


def _word(key: Any) -> Any:
    return key.word if isinstance(key, _Scalar) else key


def _typed(value: Any, types: set[Any]) -> str:
    """The value as typed on a command line: the word, unless the argument takes YAML's own type."""
    if isinstance(value, _Scalar):
        return str(value.value) if type(value.value) in types else value.word
    return str(value)


def _as_words(value: Any) -> Any:
    if isinstance(value, _Scalar):
        return value.word
    if isinstance(value, list):
        return [_as_words(item) for item in value]
    return value if isinstance(value, str) else _plain(value)


def _plain(value: Any) -> Any:
    """A value as YAML reads it; a string like 2e-5, which YAML takes for text, becomes a number."""
    if isinstance(value, _Scalar):
        return value.value
    if isinstance(value, dict):
        return {_word(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    is_one = isinstance(value, str) and re.fullmatch(r"[-+]?\d+\.?\d*e[-+]?\d+", value, re.IGNORECASE)
    return float(value) if is_one else value
