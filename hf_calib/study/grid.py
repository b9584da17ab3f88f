"""The grid of a study: losses with their hyperparameters, seeds, and the configuration of each training."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hf_calib._errors import InputValueError, did_you_mean, expected

# What the study sets itself, for each training. The others do not change what is trained.
OWN_ARGUMENTS = ("loss", "loss_kwargs", "seed")
_NOT_OF_THE_TRAINING = (
    "output_dir",
    "resume",
    "resume_from_checkpoint",
    "run_name",
    "logging_dir",
    "report_to",
    "cache_dir",
)
_SECRET = re.compile(r"(^|_)(token|secret|password|api_key)$", re.IGNORECASE)
_KEY_LENGTH = 12
_MOST_HASHED = 2**32  # bytes of a folder; of larger ones the sizes and times of the files count


@dataclass(frozen=True)
class Variant:
    """A loss as a study compares it.

    Args:
        label: its name in the report: that of the loss, or of its file, with what `--grid` changes.
        loss: a name in `LOSSES`.
        hyperparameters: of the loss; the others have their defaults.
        config: a YAML file with further training arguments, such as `gamma_update_steps`; or None.
    """

    label: str
    loss: str
    hyperparameters: Mapping[str, Any]
    config: Path | None = None


@dataclass(frozen=True, eq=False)
class Cell:
    """One training of a study.

    Args:
        variant: the loss.
        seed: of the training.
        arguments: the resolved configuration: name -> words, as on the command line; of files their contents' hash.
    """

    variant: Variant
    seed: int
    arguments: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The hash of the configuration: another one is another cell."""
        text = json.dumps(self.arguments, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]

    @property
    def name(self) -> str:
        """Of its folder in `cells/`: readable, and unique by the key."""
        readable = re.sub(r"[^\w.=-]+", "_", self.variant.label)[:60]
        return f"{readable}-seed{self.seed}-{self.key}"


def variants(losses: Sequence[str], grid: Mapping[str, Sequence[Any]], script: Path | None) -> list[Variant]:
    """The losses that words of the command line name, once for each combination of the grid that they take.

    Args:
        losses: each a name in `LOSSES`, a YAML file with `loss: ...`, or the name of such a file in
            `configs/losses` beside the script.
        grid: hyperparameter -> values. A loss is trained with all combinations of those that it has.
        script: of the recipe, or None.

    Raises:
        ValueError: for an unknown loss, a hyperparameter that none of them has, a value out of range, or two
            that would have the same label.
    """
    from hf_calib.losses import LOSSES, make_loss

    if not losses:
        way_out = "name some, such as cross_entropy,focal,adafocal"
        raise InputValueError(expected("losses", "name at least one loss", "none", way_out))
    bases = [_variant(word, script) for word in losses]
    taken = {name for base in bases for name in LOSSES[base.loss].hyperparameters}
    for name in grid:
        if name not in taken:
            got, way_out = repr(name), did_you_mean(name, taken)
            raise InputValueError(
                expected("grid", "name a hyperparameter of one of the losses", got, way_out)
            )
    found = []
    for base in bases:
        own = {name: values for name, values in grid.items() if name in LOSSES[base.loss].hyperparameters}
        for values in product(*own.values()):
            changed = dict(zip(own, values, strict=True))
            label = " ".join([base.label, *(f"{name}={_short(value)}" for name, value in changed.items())])
            found.append(Variant(label, base.loss, {**base.hyperparameters, **changed}, base.config))
            make_loss(base.loss, **found[-1].hyperparameters)  # raises before any training does
    labels = [variant.label for variant in found]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        way_out = "name each loss once, and give its files different names"
        raise InputValueError(expected("losses", "differ", f"{twice!r} twice", way_out))
    return found


def _short(value: Any) -> str:
    """A hyperparameter's value in a label: 1 and 1.0 are the same."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _variant(word: str, script: Path | None) -> Variant:
    from hf_calib.experiments.config_file import read_config
    from hf_calib.losses import LOSSES

    beside = None if script is None else script.parent / "configs" / "losses" / f"{word}.yaml"
    if word in LOSSES:
        return Variant(word, word, {})
    path = beside if beside is not None and beside.is_file() else Path(word)
    if not path.is_file():
        files = [] if beside is None else [file.stem for file in beside.parent.glob("*.yaml")]
        requirement = "be names of losses, or YAML files"
        raise InputValueError(
            expected("losses", requirement, repr(word), did_you_mean(word, [*LOSSES, *files]))
        )
    config = read_config(path)
    loss = config.get("loss")
    if loss not in LOSSES:
        requirement = "name its loss, as in `loss: focal`"
        raise InputValueError(expected(str(path), requirement, repr(loss), did_you_mean(loss, LOSSES)))
    further = config.keys() - OWN_ARGUMENTS  # a script that reads no YAML files needs to know of these only
    return Variant(path.stem, str(loss), config.get("loss_kwargs") or {}, path if further else None)


def resolved(
    script: str, configs: Sequence[Path], arguments: Sequence[str], variant: Variant | None = None
) -> dict[str, Any]:
    """The script's arguments, from files and words, for all trainings of a study or those of one loss.

    Args:
        script: its file's name.
        configs: YAML files, of which later ones win.
        arguments: words of the command line, which win over the files.
        variant: the loss.

    Raises:
        ValueError: if one of the files cannot be read, or sets a loss's hyperparameters.
    """
    from hf_calib.experiments.config_file import read_config
    from hf_calib.losses import make_loss

    found: dict[str, Any] = {"script": script}
    for path in configs:
        found |= read_config(path)
        if "resume_from_checkpoint" in found:
            raise InputValueError(expected(str(path), *_RESUMED_ANYWAY))
        if "loss_kwargs" in found:  # they would be thought to be those of the study's losses
            way_out = "use --grid, or list a YAML file with loss and loss_kwargs in --losses"
            raise InputValueError(expected(str(path), "leave losses to the study", "loss_kwargs", way_out))
    if variant is not None and variant.config is not None:
        found |= read_config(variant.config)
    found |= given(arguments)
    ignored = (*_NOT_OF_THE_TRAINING, *OWN_ARGUMENTS)
    found = {
        name: _content(value) for name, value in found.items() if name not in ignored and not is_secret(name)
    }
    if variant is not None:
        # With the defaults, which another version may change.
        loss = make_loss(variant.loss, **variant.hyperparameters)
        found |= {"loss": variant.loss, "loss_kwargs": loss.hyperparameters}
    return found


_RESUMED_ANYWAY = (
    *("leave resuming to the study", "resume_from_checkpoint"),
    "leave it out: what is finished is skipped, and what was interrupted goes on from its newest checkpoint",
)


def is_secret(name: str) -> bool:
    """Whether an argument's value is for nobody else to read."""
    return _SECRET.search(name) is not None


def secrets(arguments: Sequence[str]) -> set[str]:
    """The words of a command line that nobody else may read, such as a token.

    >>> sorted(secrets(["--hub_token", "hf_x", "--max_length=64", "--hub-token=hf_y", "--env", "HF_TOKEN=hf_z"]))
    ['--hub-token=hf_y', 'HF_TOKEN=hf_z', 'hf_x']
    """
    found = set()
    hidden = False
    for word in arguments:
        if word.startswith("--"):
            hidden = "=" not in word and is_secret(word.removeprefix("--").replace("-", "_"))
        elif hidden:
            found.add(word)
        if before_secret(word) is not None:
            found.add(word)
    return found


def before_secret(word: str) -> str | None:
    """The part of a word before the value of a secret, as of an environment variable; None if it holds none.

    >>> before_secret("--env=HF_TOKEN=hf_x"), before_secret("--learning_rate=0.1")
    ('--env=HF_TOKEN=', None)
    """
    names = word.split("=")[:-1]
    for n, name in enumerate(names, 1):
        if is_secret(name.strip("-").replace("-", "_")):
            return "=".join(names[:n]) + "="
    return None


def given(arguments: Sequence[str]) -> dict[str, Any]:
    """Arguments of a command line by name.

    Raises:
        ValueError: for a word before the first name, or an argument that the study sets itself.

    >>> given(["--train_file", "a.csv", "--bf16", "--max_length=64"])
    {'train_file': 'a.csv', 'bf16': 'True', 'max_length': '64'}
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")  # HfArgumentParser takes both
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
        else:
            way_out = "write --name value after the --"
            raise InputValueError(expected("the script's arguments", "have names", repr(word), way_out))
    for name, way_out in (
        ("loss", "list it in --losses"),
        ("loss_kwargs", "use --grid, or list a YAML file in --losses"),
        ("seed", "list it in --seeds"),
        ("output_dir", "use --output"),
        ("config", "use --config before the --"),
        ("resume", _RESUMED_ANYWAY[-1]),
        ("resume_from_checkpoint", _RESUMED_ANYWAY[-1]),
    ):
        if name in found:
            raise InputValueError(
                expected("the script's arguments", "leave this one to the study", f"--{name}", way_out)
            )
    single = {name: words[0] if len(words) == 1 else words for name, words in found.items()}
    return {name: "True" if words == [] else words for name, words in single.items()}


def _content(value: Any) -> Any:
    """A value; of files and folders what is in them: they may move, and a changed one is a changed configuration.

    Secrets are left out.
    """
    if isinstance(value, list):
        return [_content(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _content(each) for name, each in value.items() if not is_secret(str(name))}
    if isinstance(value, str) and is_of_this_machine(value):
        return f"sha256:{path_hash(Path(value))}"
    return (before_secret(value) or value) if isinstance(value, str) else value


def is_of_this_machine(value: str) -> bool:
    """Whether a word names a file or folder that is here."""
    return os.path.isfile(value) or os.path.isdir(value)


def path_hash(path: Path) -> str:
    """A hash of what is in a file or a folder."""
    return _folder_hash(path) if path.is_dir() else content_hash(path)


def _folder_hash(folder: Path) -> str:
    """A hash of what is in a folder: a model, or data."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    read = sum(path.stat().st_size for path in files) <= _MOST_HASHED
    listed = [
        (
            path.relative_to(folder).as_posix(),
            content_hash(path) if read else (path.stat().st_size, path.stat().st_mtime_ns),
        )
        for path in files
    ]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def content_hash(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
