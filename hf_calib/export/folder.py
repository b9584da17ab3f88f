"""The folder of a model: its files, and saving with a folded calibrator."""

from __future__ import annotations

import copy
import os
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_calib._errors import InputError, check
from hf_calib._files import (
    REPORT,
    move_files,
    remove_files,
    report_files,
    whole_folder,
)
from hf_calib._records import read_json
from hf_calib.decisions.saved import DECISIONS, Decisions, rule_files
from hf_calib.export.fold import fold_and_return_head
from hf_calib.metrics.checks import check_type
from hf_calib.models.weights import fingerprint, hash_of
from hf_calib.scaling.saved_map import MAP_NAME, load_map, save_map

CONFIG = "config.json"
TRAINER_STATE = "trainer_state.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTERS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
LOSS_STATE_NAME = "calibration_loss.safetensors"
# Servers load every safetensors file in the root as weights,
# so other such files are in another place.
PUSHED_LOSS_STATE = "calibration/loss.safetensors"
KEPT_HEAD = Path("calibration", "head.safetensors")
_FOLDED = "sha256_of_the_folded_head"

# Names of weights in the order in which they are removed and written. At each step only the old
# model, nothing or the new model can be loaded: a file that makes others loadable comes after them.
_WEIGHTS = (
    "adapter_model.*",
    "model*-of-*.safetensors",
    "pytorch_model*-of-*.bin",
    "pytorch_model*.bin.index.json",
    "pytorch_model*.bin",
    "model*.safetensors.index.json",
    "model*.safetensors",
    ADAPTER_CONFIG,
)
_PICKLES = {".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pt2", ".pth"}
# Pickles of every run, which are silently not pushed.
_OF_A_TRAINING = (
    "training_args.bin",
    "optimizer*",
    "scheduler*",
    "scaler.pt",
    "rng_state*",
)


class Files(NamedTuple):
    """Files of a folder by their paths in a repository, pickles,
    and links to folders or out of the folder.
    """

    pushed: dict[str, Path]
    left_out: tuple[str, ...]
    links: tuple[str, ...]


def files_of(folder: Path) -> Files:
    """Return the files of a folder that a push uploads, and those that it leaves out."""
    pushed: dict[str, Path] = {}
    left_out, links = [], []
    for path in _walk(folder, "_*", "checkpoint-*"):
        name = path.relative_to(folder).as_posix()
        # Through a link out of the folder, any file of this machine could be published.
        if path.is_dir() or not path.resolve().is_relative_to(folder.resolve()):
            links.append(name)
        elif not _is_pickle(path):
            pushed[PUSHED_LOSS_STATE if name == LOSS_STATE_NAME else name] = path
        elif not any(fnmatch(path.name, form) for form in _OF_A_TRAINING):
            left_out.append(name)
    return Files(pushed, tuple(left_out), tuple(links))


def copy_files(
    files: Mapping[str, Path], made: Path, left_out: Iterable[str] = ()
) -> None:
    """Copy files to these paths in a folder, except weights and files of their formats."""
    for name, path in files.items():
        if not (is_weights(name) or any(fnmatch(name, form) for form in left_out)):
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, made / name)


def _walk(folder: Path, *left_out: str) -> Iterator[Path]:
    """Files and links in and below a folder, without hidden files, caches,
    and files of these formats in the root.
    """
    for path in sorted(folder.iterdir()):
        if any(fnmatch(path.name, form) for form in (".*", "__pycache__", *left_out)):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        else:
            got = (
                "a link to nothing"
                if path.is_symlink()
                else "neither a file nor a folder"
            )
            there = path.is_file() or path.is_dir()
            check(there, f"{path} to be a file", got, "remove it, or move it elsewhere")
            yield path


def _is_pickle(path: Path) -> bool:
    """Whether loading a file may run code, by its name or first bytes."""
    if path.suffix.lower() in _PICKLES:
        return True
    with path.open("rb") as file:
        start = file.read(2)
    # torch.save writes a zip archive with a pickle in it.
    if start == b"PK" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    # A pickle begins with this byte and its protocol, from 2 to 5.
    return len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5


def is_weights(name: str) -> bool:
    """Whether a file with this name in the root is loaded as weights or as their index."""
    return "/" not in name and _turn(name) > 0


def replace_model(made: Path, target: Path) -> None:
    """Move a finished model into a folder, and remove what belongs to an earlier model there.

    The old weights are removed first, and the new weights are written last. A process that is
    killed in between leaves a folder that cannot be loaded, and never folded weights with a config
    without a calibrator.
    """
    about = load_map(made).about if (made / MAP_NAME).is_file() else {}
    for path in sorted(target.iterdir(), key=lambda path: _turn(path.name)):
        if is_weights(path.name):
            path.unlink()
    for name in (KEPT_HEAD, MAP_NAME):
        # Through a link, a file of another folder would be removed.
        its_own = (
            not (target / name).parent.is_symlink() or (target / name).parent == target
        )
        # Otherwise the file is of the old model.
        if its_own and not (made / name).exists():
            (target / name).unlink(missing_ok=True)
    move_files(made, target, order=lambda path: _turn(path.name))
    # Until here, an earlier rule is refused when it is loaded.
    if not has_rule_of(target, about):
        remove_files(target, rule_files(target))
    reported = report_files(target)
    if reported and not (made / REPORT).exists() and not _is_on(target / REPORT, about):
        remove_files(target, reported)


def _is_on(report: Path, about: Mapping[str, Any]) -> bool:
    """Whether a report is on the weights that the record of a calibrator names."""
    try:
        rows = read_json(report, {"about": dict})["about"]
    except InputError:
        return False
    return rows.get("fingerprint") == about.get("fingerprint", "")


def has_rule_of(folder: Path, about: Mapping[str, Any]) -> bool:
    """Whether a folder has a rule for its calibrator, and for the weights that the record of one
    names.
    """
    if not (folder / DECISIONS).is_file():
        return False
    try:
        rule = Decisions.from_pretrained(folder)
        # Weights without a fingerprint are taken for others.
        rule.check_weights(about.get("fingerprint", ""))
    except InputError:
        return False
    return True


def _turn(name: str) -> int:
    """The order in which a file is removed or written; 0, before all weights, for other files."""
    return next((i for i, form in enumerate(_WEIGHTS, 1) if fnmatch(name, form)), 0)


def keep_head(
    folder: Path, before: Mapping[str, Tensor], folded: Mapping[str, Tensor]
) -> None:
    """Write a head's tensors from before the fold next to the model,
    with a hash of the folded tensors.
    """
    (folder / KEPT_HEAD).parent.mkdir(parents=True, exist_ok=True)
    # safetensors refuses tensors that are not contiguous.
    tensors = {name: tensor.cpu().contiguous() for name, tensor in before.items()}
    save_file(tensors, folder / KEPT_HEAD, metadata={_FOLDED: hash_of(folded)})


def read_kept_head(
    file: str | os.PathLike[str], folded: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """Return the tensors of `keep_head`, or None if they are for other weights,
    such as a head trained since.
    """
    try:
        with safe_open(file, "pt") as opened:
            is_of_these = (opened.metadata() or {}).get(_FOLDED) == hash_of(folded)
            kept = (
                {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                if is_of_these
                else {}
            )
    except (OSError, SafetensorError):
        return None
    fits = all(
        name in folded
        and tensor.shape == folded[name].shape
        and tensor.dtype == folded[name].dtype
        for name, tensor in kept.items()
    )
    # A bias that the fold has added has no value from before it.
    lost = {name.rpartition(".")[2] for name in set(folded) - set(kept)}
    return kept if kept and fits and lost <= {"bias"} else None


Place = str | os.PathLike[str]


def standalone_copy(model: Any, state_dict: Mapping[str, Tensor] | None = None) -> Any:
    """Return a float32 copy of a model on the CPU, without adapters, autocast or sharding.

    Args:
        model: the unwrapped model.
        state_dict: its full weights, if the model itself has only a shard.

    Raises:
        TypeError: if the model cannot be saved for a pipeline.
    """
    way_out = "wrap the network in a transformers.PreTrainedModel"
    can_be_saved = hasattr(model, "save_pretrained")
    check_type(
        can_be_saved, "the model to have save_pretrained", type(model).__name__, way_out
    )
    if state_dict is not None:
        plain = type(model)(copy.deepcopy(model.config))
        plain.load_state_dict(state_dict)
    else:
        plain = copy.deepcopy(model)
    if hasattr(plain, "merge_and_unload"):
        plain = plain.merge_and_unload()
    # Pipelines need it.
    plain.config.return_dict = True
    return plain.cpu().float().eval()


def check_overwrites_no_original(output_dir: Place, originals: Iterable[Place]) -> None:
    """Raise if saving would replace a folder of `loaded_from`,
    from which folding or merging starts.

    Folding can be undone, but merging cannot, and a process that is killed while it replaces a
    model leaves neither.
    """
    check_is_no_checkpoint(output_dir)
    check_is_no_original(output_dir, originals)
    way_out = (
        "merging cannot be undone: name a new folder, or delete the adapters first"
    )
    check(
        not Path(output_dir, ADAPTER_CONFIG).exists(),
        "output to hold no adapters",
        output_dir,
        way_out,
    )


def check_is_no_original(output_dir: Place, originals: Iterable[Place]) -> None:
    """Raise if an output is a folder of `loaded_from`."""
    folder = Path(output_dir)
    is_original = folder.exists() and folder.resolve() in {
        Path(name).resolve() for name in originals
    }
    way_out = "name a new folder, so that this one does not change"
    check(
        not is_original, "output to be another folder than the model's", folder, way_out
    )


def check_is_no_checkpoint(output_dir: Place) -> None:
    """Raise if saving would replace the weights from which a training is resumed."""
    folder = Path(output_dir)
    has_name = re.fullmatch(r"checkpoint-\d+", folder.resolve().name) is not None
    has_state = has_name and (folder / TRAINER_STATE).exists()
    check(
        not has_state and not (folder / "optimizer.pt").exists(),
        "output to be no checkpoint of a training",
        folder,
        "name a new folder: a training could not be resumed from other weights",
    )


def loaded_from(model: Any) -> set[str]:
    """Return where a model and the base model of its adapters were loaded from:
    full paths or names on the Hub.
    """
    adapters = getattr(model, "peft_config", None) or {}
    names = {
        getattr(model, "name_or_path", None),
        getattr(getattr(model, "config", None), "_name_or_path", None),
        *(adapter.base_model_name_or_path for adapter in adapters.values()),
    }
    return {
        os.path.abspath(name) if os.path.exists(name) else name
        for name in names
        if name
    }


def save_folded(
    plain: Any,
    scaler: Any,
    output_dir: Place,
    *,
    batch: Any,
    processing_class: Any,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Save a standalone copy with a folded calibrator and its calibration.json,
    completely or not at all.

    In an existing directory, the weights and the calibrator of another model are replaced, and all
    other files are unchanged. The head from before the fold is kept in the directory, for `unfold`.

    Args:
        plain: result of `standalone_copy`.
        scaler: a calibrator that `fold` accepts.
        output_dir: the directory.
        batch: as in `fold`.
        processing_class: a tokenizer or image processor to save with the model, or None.
        about: further entries of calibration.json.

    Raises:
        ValueError: if the model or the calibrator cannot be folded, or the directory is a
            checkpoint of a training.
        OSError: if the directory cannot be written; it is then unchanged.
    """
    check_is_no_checkpoint(output_dir)
    with whole_folder(Path(output_dir), replace_model) as folder:
        write_folded(
            plain,
            scaler,
            folder,
            batch=batch,
            processing_class=processing_class,
            about=about,
        )


def write_folded(
    plain: Any,
    scaler: Any,
    folder: Path,
    *,
    batch: Any,
    processing_class: Any,
    about: Any = None,
) -> str:
    """Write the files of `save_folded` to an empty folder;
    return the fingerprint of the folded weights.
    """
    before = fold_and_return_head(plain, scaler, batch)
    plain.save_pretrained(folder)
    head, state = plain.config.calibration["head"], plain.state_dict()
    keep_head(
        folder,
        before,
        {name: state[name] for name in state if name.rpartition(".")[0] in head},
    )
    weights = fingerprint(plain)
    save_map(
        scaler,
        folder,
        {**(about or {}), "folded": True, "head": head, "fingerprint": weights},
    )
    if processing_class is not None:
        processing_class.save_pretrained(folder)
    return weights
