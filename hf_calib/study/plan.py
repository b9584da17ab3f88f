"""The plan of a study: losses with their hyperparameters, seeds, the configuration of each training, and study.json."""

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

from hf_calib._errors import InputValueError, check, did_you_mean, expected
from hf_calib._files import check_output
from hf_calib.study.cells import CELL, CELLS, is_finished, recorded, write_json

STUDY = "study.json"
# What the study sets itself, for each training. The others do not change what is trained.
OWN_ARGUMENTS = ("loss", "loss_kwargs", "seed")
NOT_OF_THE_TRAINING = {
    *("output_dir", "logging_dir", "cache_dir", "resume", "resume_from_checkpoint"),
    *("run_name", "report_to", "disable_tqdm"),
}
_RESUMED_ANYWAY = (
    "leave it out: what is finished is skipped, and what was interrupted goes on from its newest checkpoint"
)
_SET_BY_THE_STUDY = {
    "loss": "list it in --losses",
    "loss_kwargs": "use --grid, or list a YAML file in --losses",
    "seed": "list it in --seeds",
    "output_dir": "use --output",
    "config": "use --config before the --",
    "resume": _RESUMED_ANYWAY,
    "resume_from_checkpoint": _RESUMED_ANYWAY,
}
_UNREADABLE = (OSError, ArithmeticError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
_SECRET = re.compile(r"(^|_)(token|secret|password|api_key)$", re.IGNORECASE)
_KEY_LENGTH = 12
_MOST_HASHED = 2**32  # bytes of a folder; of larger ones the sizes and times of the files count


@dataclass(frozen=True)
class Variant:
    """A loss as a study compares it, by the label in its report; perhaps with a YAML file of further arguments."""

    label: str
    loss: str
    hyperparameters: Mapping[str, Any]
    config: Path | None = None


@dataclass(frozen=True, eq=False)
class Cell:
    """One training of a study; of its arguments (name -> words), files are the hash of what they hold."""

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

    def __str__(self) -> str:
        return f"{self.variant.label}, seed {self.seed}"


def variants(losses: Sequence[str], grid: Mapping[str, Sequence[Any]], script: Path | None) -> list[Variant]:
    """The losses that words name, once for each combination of the grid's values that they take.

    A word is a name in `LOSSES`, a YAML file with `loss: ...`, or the name of one in configs/losses beside the script.
    """
    from hf_calib.losses import LOSSES, make_loss

    way_out = "name some, such as cross_entropy,focal,adafocal"
    check(len(losses) > 0, "losses to name at least one loss", "none", way_out)
    bases = [_variant(word, script) for word in losses]
    taken = {name for base in bases for name in LOSSES[base.loss].hyperparameters}
    requirement = "grid to name a hyperparameter of one of the losses"
    for name in grid:
        check(name in taken, requirement, repr(name), did_you_mean(name, taken))
    found: dict[str, Variant] = {}
    for base in bases:
        own = {name: values for name, values in grid.items() if name in LOSSES[base.loss].hyperparameters}
        for values in product(*own.values()):
            changed = dict(zip(own, values, strict=True))
            words = (f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in changed.items())
            label = " ".join([base.label, *words])
            way_out = "name each loss once, and give its files different names"
            check(label not in found, "losses to differ", f"{label!r} twice", way_out)
            found[label] = Variant(label, base.loss, {**base.hyperparameters, **changed}, base.config)
            make_loss(base.loss, **found[label].hyperparameters)  # raises before any training does
    return list(found.values())


def _variant(word: str, script: Path | None) -> Variant:
    from hf_calib.experiments.config_file import read_config
    from hf_calib.losses import LOSSES

    if word in LOSSES:
        return Variant(word, word, {})
    folder = None if script is None else script.parent / "configs" / "losses"
    beside = None if folder is None else folder / f"{word}.yaml"
    path = beside if beside is not None and beside.is_file() else Path(word)
    if not path.is_file():
        files = [] if folder is None else [file.stem for file in folder.glob("*.yaml")]
        way_out = did_you_mean(word, [*LOSSES, *files])
        raise InputValueError(expected("losses", "be names of losses, or YAML files", repr(word), way_out))
    config = read_config(path)
    loss = config.get("loss")
    requirement = f"{path} to name its loss, as in `loss: focal`"
    check(loss in LOSSES, requirement, repr(loss), did_you_mean(loss, LOSSES))
    further = config.keys() - OWN_ARGUMENTS  # a script that reads no YAML files needs to know of these only
    return Variant(path.stem, str(loss), config.get("loss_kwargs") or {}, path if further else None)


def resolved(
    script: str, configs: Sequence[Path], arguments: Sequence[str], variant: Variant | None = None
) -> dict[str, Any]:
    """The script's arguments for all trainings, or those of one loss: later files win, and words win over files."""
    from hf_calib.experiments.config_file import read_config
    from hf_calib.losses import make_loss

    found: dict[str, Any] = {"script": script}
    for path in configs:
        found |= read_config(path)
        name = "resume_from_checkpoint"
        check(name not in found, f"{path} to leave resuming to the study", name, _RESUMED_ANYWAY)
        # These would be thought to be those of the study's losses.
        way_out = "use --grid, or list a YAML file with loss and loss_kwargs in --losses"
        check("loss_kwargs" not in found, f"{path} to leave losses to the study", "loss_kwargs", way_out)
    if variant is not None and variant.config is not None:
        found |= read_config(variant.config)
    found |= given(arguments)
    ignored = {name for name in found if name in {*NOT_OF_THE_TRAINING, *OWN_ARGUMENTS} or is_secret(name)}
    found = {name: _content(value) for name, value in found.items() if name not in ignored}
    if variant is not None:
        # With the defaults, which another version may change.
        loss = make_loss(variant.loss, **variant.hyperparameters)
        found |= {"loss": variant.loss, "loss_kwargs": loss.hyperparameters}
    return found


def is_secret(name: str) -> bool:
    """Whether an argument's value is for nobody else to read."""
    return _SECRET.search(name.strip("-").replace("-", "_")) is not None


def before_secret(word: str) -> str | None:
    """The part of a word before the value of a secret, as of an environment variable; None if it holds none.

    >>> before_secret("--env=HF_TOKEN=hf_x"), before_secret("--learning_rate=0.1")
    ('--env=HF_TOKEN=', None)
    """
    names = word.split("=")[:-1]
    return next(("=".join(names[:n]) + "=" for n, name in enumerate(names, 1) if is_secret(name)), None)


def given(arguments: Sequence[str]) -> dict[str, Any]:
    """Arguments of a command line by name; refuses a word before the first name, and what the study sets itself.

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
        else:
            way_out = "write --name value after the --"
            check(name != "", "the script's arguments to have names", repr(word), way_out)
            found[name].append(word)
    for name, way_out in _SET_BY_THE_STUDY.items():
        requirement = "the script's arguments to leave this one to the study"
        check(name not in found, requirement, f"--{name}", way_out)
    return {name: words[0] if len(words) == 1 else words or "True" for name, words in found.items()}


def _content(value: Any) -> Any:
    """A value without secrets; of files and folders what is in them: they may move, and a change is a new training."""
    if isinstance(value, list):
        return [_content(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _content(each) for name, each in value.items() if not is_secret(str(name))}
    if not isinstance(value, str):
        return value
    if os.path.isdir(value):
        return f"sha256:{_folder_hash(Path(value))}"
    return f"sha256:{content_hash(Path(value))}" if os.path.isfile(value) else before_secret(value) or value


def _folder_hash(folder: Path) -> str:
    """A hash of what is in a folder: a model, or data."""
    files = {path: path.stat() for path in sorted(folder.rglob("*")) if path.is_file()}
    read = sum(stat.st_size for stat in files.values()) <= _MOST_HASHED
    listed: list[tuple[str, Any]] = []
    for path, stat in files.items():
        content = content_hash(path) if read else (stat.st_size, stat.st_mtime_ns)
        listed.append((path.relative_to(folder).as_posix(), content))
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def content_hash(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def write_plan(
    study: Path,
    cells: Sequence[Cell],
    methods: Sequence[str],
    base: Mapping[str, Any],
    script: Path | None = None,
) -> dict[Cell, Path]:
    """Write study.json, and cell.json of each cell of this grid; return the cells' folders.

    Cells that the study has already stay in it where the base, which is what all cells share, is the same: losses and
    seeds can be added. Of the script the content is recorded.
    """
    check_output(study)
    known = (study / STUDY).is_file()
    free = known or not study.is_dir() or not any(study.iterdir())
    check(free, f"output to be new, or have a {STUDY}", f"{study}, which has none", "name a new folder")
    before = read_plan(study) if known else {"base": None, "cells": {}}
    base = json.loads(json.dumps(base))  # as it is read again: names of classes have text as keys
    listed = before["cells"] if before["base"] == base else {}
    # A mean over seeds is over trainings of one configuration: a loss whose file was changed begins anew.
    now = {cell.variant.label: _without_seed(cell.arguments) for cell in cells}
    listed = {
        name: entry
        for name, entry in listed.items()
        if now.get(entry["loss"]) in (None, _without_seed(recorded(study / CELLS / name / CELL, "arguments")))
    }
    listed |= {cell.name: {"loss": cell.variant.label, "seed": cell.seed} for cell in cells}
    folders = {cell: study / CELLS / cell.name for cell in cells}
    version = None if script is None else content_hash(script)
    for cell, folder in folders.items():
        if not is_finished(folder):
            record = {"key": cell.key, "loss": cell.variant.label, "script": version}
            write_json(folder / CELL, {**record, "arguments": dict(cell.arguments)})
    write_json(study / STUDY, {**_listed(listed), "methods": list(methods), "base": base})
    return folders


def _listed(cells: Mapping[str, Any]) -> dict[str, Any]:
    """The cells of a plan, and the losses and seeds that they have."""
    losses = list(dict.fromkeys(entry["loss"] for entry in cells.values()))
    return {"losses": losses, "seeds": sorted({entry["seed"] for entry in cells.values()}), "cells": cells}


def _without_seed(arguments: Mapping[str, Any] | None) -> str:
    return json.dumps({**(arguments or {}), "seed": None}, sort_keys=True)


def read_plan(study: Path) -> dict[str, Any]:
    """The plan in study.json, read by its cells; raises ValueError if there is none, or it is not of a study."""
    path = study / STUDY
    way_out = "pass the --output folder of an earlier hf-calib compare"
    try:
        plan = dict(json.loads(path.read_text(encoding="utf-8")))
        entries = plan["cells"].items()
        cells = {name: {"loss": str(entry["loss"]), "seed": int(entry["seed"])} for name, entry in entries}
    except _UNREADABLE as error:
        got = f"{path} ({error})"
        raise InputValueError(expected("the study", "be readable", got, way_out)) from error
    requirement = "the study to be as hf-calib compare wrote it"
    whole = isinstance(plan.get("methods"), list) and "base" in plan
    check(whole, requirement, f"{path}, which lacks some of its entries", way_out)
    outside = [name for name in cells if os.path.basename(name) != name or name in ("", ".", "..")]
    check(not outside, requirement, f"{path} with cells {outside}", way_out)
    return {**plan, **_listed(cells)}
