"""The plan of a study: its runs with their configurations, study.json, and the files of each run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hf_calib._errors import InputValueError, check, did_you_mean, expected
from hf_calib._files import check_output, whole_file
from hf_calib._records import read_json
from hf_calib.predictions.training import PREDICTIONS

STUDY, CELLS = "study.json", "cells"
CELL, RESULTS, LOG, FAILED = "cell.json", "results.json", "log.txt", "failed.json"
_RESUMED_ANYWAY = "leave it out: finished runs are skipped, interrupted runs resume from their newest checkpoint"
_SET_BY_THE_STUDY = {
    "loss": "list it in --losses",
    "loss_kwargs": "use --grid, or list a YAML file with loss and loss_kwargs in --losses",
    "seed": "list it in --seeds",
    "output_dir": "use --output",
    "config": "use --config before the --",
    "resume": _RESUMED_ANYWAY,
    "resume_from_checkpoint": _RESUMED_ANYWAY,
}
_WITHOUT_EFFECT = {
    "logging_dir",
    "cache_dir",
    "run_name",
    "report_to",
    "disable_tqdm",
}  # on the model
_SECRET = re.compile(r"(^|[-_=])(token|secret|password|api[-_]key)(=|$)", re.IGNORECASE)
_KEY_LENGTH = 12
_MOST_HASHED = 2**30  # In bytes; for larger files size and time are used.


@dataclass(frozen=True)
class Variant:
    """A loss of a study with the label in its report, and possibly a YAML file with further arguments."""

    label: str
    loss: str
    hyperparameters: Mapping[str, Any]
    config: Path | None = None


@dataclass(frozen=True, eq=False)
class Cell:
    """A run of a study; arguments (name -> words) are the same for all seeds, and files are hashes of their content."""

    variant: Variant
    seed: int
    arguments: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The hash of the configuration, which identifies the cell."""
        return hash_of(self.arguments)

    @property
    def name(self) -> str:
        """The name of its folder in `cells/`, which is readable, and unique by the key."""
        readable = re.sub(r"[^\w.=-]+", "_", self.variant.label)[:60]
        return f"{readable}-seed{self.seed}-{self.key}"

    def __str__(self) -> str:
        return f"{self.variant.label}, seed {self.seed}"


def variants(
    losses: Sequence[str], grid: Mapping[str, Sequence[Any]], script: Path | None
) -> list[Variant]:
    """Return the named losses, each with every combination of the grid's values for its hyperparameters.

    A word is a name in `LOSSES`, a YAML file with `loss: ...`, or the name of one in configs/losses next to the script.
    """
    from hf_calib.losses import LOSSES, make_loss

    way_out = "use for example cross_entropy,focal,adafocal"
    check(len(losses) > 0, "losses to name at least one loss", "none", way_out)
    bases = [_variant(word, script) for word in losses]
    taken = {name for base in bases for name in LOSSES[base.loss].hyperparameters}
    requirement = "grid to name a hyperparameter of one of the losses"
    for name in grid:
        check(name in taken, requirement, repr(name), did_you_mean(name, taken))
    found: dict[str, Variant] = {}
    for base in bases:
        own = {
            name: values
            for name, values in grid.items()
            if name in LOSSES[base.loss].hyperparameters
        }
        for values in product(*own.values()):
            changed = dict(zip(own, values, strict=True))
            words = (
                f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}"
                for k, v in changed.items()
            )
            label = " ".join([base.label, *words])
            way_out = "name each loss once, and give its files different names"
            check(label not in found, "losses to differ", f"{label!r} twice", way_out)
            found[label] = Variant(
                label, base.loss, {**base.hyperparameters, **changed}, base.config
            )
            make_loss(
                base.loss, **found[label].hyperparameters
            )  # It raises before any run.
    return list(found.values())


def _variant(word: str, script: Path | None) -> Variant:
    from hf_calib.experiments.config_file import read_config
    from hf_calib.losses import LOSSES

    if word in LOSSES:
        return Variant(word, word, {})
    files = () if script is None else script.parent.glob("configs/losses/*.yaml")
    beside = {file.stem: file for file in files}
    path = beside.get(word, Path(word))
    way_out = did_you_mean(word, [*LOSSES, *beside])
    check(
        path.is_file(),
        "losses to be names of losses, or YAML files",
        repr(word),
        way_out,
    )
    config = read_config(path)
    loss = config.get("loss")
    requirement = f"{path} to name its loss, as in `loss: focal`"
    check(loss in LOSSES, requirement, repr(loss), did_you_mean(loss, LOSSES))
    further = (
        config.keys() - _SET_BY_THE_STUDY
    )  # A script without YAML files needs only these.
    return Variant(
        path.stem, str(loss), config.get("loss_kwargs") or {}, path if further else None
    )


def resolved(
    script: str,
    configs: Sequence[Path],
    arguments: Sequence[str],
    variant: Variant | None = None,
) -> dict[str, Any]:
    """Return the script's arguments for all runs or one loss; later files override earlier ones, and words files."""
    from hf_calib.experiments.config_file import read_config
    from hf_calib.losses import make_loss

    found: dict[str, Any] = {"script": script}
    for path in configs:
        found |= read_config(path)
        for name in ("resume_from_checkpoint", "loss_kwargs"):
            check(
                name not in found,
                f"{path} to leave this to the study",
                name,
                _SET_BY_THE_STUDY[name],
            )
    if variant is not None and variant.config is not None:
        found |= read_config(variant.config)
    found |= given(arguments)
    found = {
        name: _content(value) for name, value in found.items() if changes_training(name)
    }
    if variant is not None:
        # Defaults are included, because another version may change them.
        loss = make_loss(variant.loss, **variant.hyperparameters)
        found |= {"loss": variant.loss, "loss_kwargs": loss.hyperparameters}
    return found


def changes_training(name: str) -> bool:
    """Whether an argument of the script is part of a configuration."""
    return name not in {*_SET_BY_THE_STUDY, *_WITHOUT_EFFECT} and not is_secret(name)


def is_secret(name: str) -> bool:
    """Whether an argument's value is secret."""
    return _SECRET.search(name) is not None


def before_secret(word: str) -> str | None:
    """Return the part of a word before a secret value, for example of an environment variable; None without one.

    >>> before_secret("--env=HF_TOKEN=hf_x"), before_secret("--learning_rate=0.1")
    ('--env=HF_TOKEN=', None)
    """
    found = _SECRET.search(word)
    return word[: found.end()] if found and found[3] else None


def given(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a command line by name; raise for a word without a name, and for those the study sets.

    >>> given(["--train_file", "a.csv", "--bf16", "--max_length=64"])
    {'train_file': 'a.csv', 'bf16': 'True', 'max_length': '64'}
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")  # HfArgumentParser accepts both.
            found[name] = [value] if equals else []
        else:
            way_out = "write --name value after the --"
            check(
                name != "", "the script's arguments to have names", repr(word), way_out
            )
            found[name].append(word)
    for name, way_out in _SET_BY_THE_STUDY.items():
        requirement = "the script's arguments to leave this argument to the study"
        check(name not in found, requirement, f"--{name}", way_out)
    return {
        name: words[0] if len(words) == 1 else words or "True"
        for name, words in found.items()
    }


def _content(value: Any) -> Any:
    """A value without secrets; files and folders are hashed, because they may move, and a change needs a new run."""
    if isinstance(value, list):
        return [_content(each) for each in value]
    if isinstance(value, Mapping):
        return {
            name: _content(each)
            for name, each in value.items()
            if not is_secret(str(name))
        }
    if not isinstance(value, str):
        return value
    return (
        f"sha256:{content_hash(Path(value))}"
        if os.path.exists(value)
        else before_secret(value) or value
    )


def content_hash(path: Path) -> str:
    """Return the SHA-256 of a file, or of the files of a folder such as a model."""
    digest = hashlib.sha256()
    for file in sorted(each for each in (path, *path.rglob("*")) if each.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path).as_posix()}\0{size}\0".encode())
        if size > _MOST_HASHED:
            digest.update(str(file.stat().st_mtime_ns).encode())
            continue
        with open(file, "rb") as opened:
            while block := opened.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def hash_of(arguments: Mapping[str, Any]) -> str:
    """Return a short hash of a configuration."""
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()[
        :_KEY_LENGTH
    ]


def write_plan(
    study: Path,
    cells: Sequence[Cell],
    methods: Sequence[str],
    base: Mapping[str, Any],
    script: Path | None = None,
) -> dict[Cell, Path]:
    """Write study.json, and cell.json of each cell of this grid; return the cells' folders.

    Earlier cells of the study stay in it if the base, which all cells share, is the same: losses and seeds can be
    added. The content of the script is recorded.
    """
    check_output(study)
    known = (study / STUDY).is_file()
    free = known or not study.is_dir() or not any(study.iterdir())
    check(
        free,
        f"output to be new, or have a {STUDY}",
        f"{study}, which has none",
        "name a new folder",
    )
    before = read_plan(study) if known else {}
    listed = before["cells"] if before.get("base") == hash_of(base) else {}
    # A mean over seeds is over runs of one configuration, so a loss whose file has changed starts again.
    keys = {cell.variant.label: cell.key for cell in cells}
    listed = {
        name: key for name, key in listed.items() if name.endswith(keys.get(key[0], ""))
    }
    listed |= {cell.name: (cell.variant.label, cell.seed) for cell in cells}
    folders = {cell: study / CELLS / cell.name for cell in cells}
    version = None if script is None else content_hash(script)
    for cell, folder in folders.items():
        if not is_finished(folder):
            record = {"loss": cell.variant.label, "seed": cell.seed, "script": version}
            _write_json(folder / CELL, {**record, "arguments": dict(cell.arguments)})
    entries = {
        name: {"loss": loss, "seed": seed} for name, (loss, seed) in listed.items()
    }
    _write_json(
        study / STUDY,
        {"methods": list(methods), "base": hash_of(base), "cells": entries},
    )
    return folders


def read_plan(study: Path) -> dict[str, Any]:
    """Return the plan in study.json with its losses and seeds; raise ValueError if there is none."""
    path = study / STUDY
    try:
        plan = read_json(path, {})
        cells = {
            name: (str(entry["loss"]), int(entry["seed"]))
            for name, entry in plan["cells"].items()
        }
        outside = [name for name in cells if not re.fullmatch(r"[\w.=-]*\w", name)]
        if outside:
            raise ValueError(f"cells outside of its folder: {outside}")
        own = {"methods": list(plan["methods"]), "base": plan["base"]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        got, way_out = (
            f"{path} ({error})",
            "pass the --output folder of an earlier hf-calib compare-losses",
        )
        raise InputValueError(
            expected("the study", "be readable", got, way_out)
        ) from error
    losses = list(dict.fromkeys(loss for loss, _ in cells.values()))
    seeds = sorted({seed for _, seed in cells.values()})
    return {**own, "losses": losses, "seeds": seeds, "cells": cells}


def is_finished(folder: Path) -> bool:
    """Whether a run has written its results, which are written last."""
    return (folder / RESULTS).is_file() and (folder / PREDICTIONS).is_file()


def recorded(path: Path, name: str) -> Any:
    """Return an entry of a JSON file, or None if it cannot be read."""
    try:
        return read_json(path, {}).get(name)
    except (OSError, ValueError):
        return None


def mark_failed(folder: Path, reason: str) -> None:
    """Record why a run failed, for the report; if the disk is full, the other runs continue nevertheless."""
    with suppress(OSError):
        _write_json(folder / FAILED, {"reason": reason})


def clean_up(folder: Path, *, keep_model: bool) -> None:
    """Remove the checkpoints of a finished run and, unless it is kept, the model."""
    models = () if keep_model else (folder / "calibrated", folder / "uncalibrated")
    for path in (*folder.glob("checkpoint-*"), *models):
        shutil.rmtree(path, ignore_errors=True)
    (folder / FAILED).unlink(missing_ok=True)


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    with whole_file(path) as unfinished:
        unfinished.write_text(
            json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
