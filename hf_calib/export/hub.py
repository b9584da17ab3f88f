"""Pushing a folder with a model to the Hub: what of it is uploaded, and which weights there it replaces."""

from __future__ import annotations

import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import yaml
from huggingface_hub import CommitInfo, ModelCard
from safetensors import SafetensorError, safe_open

from hf_calib._errors import InputError, InputOSError, InputValueError, expected, few
from hf_calib._hub import CARD, Destination, check_destination, push_files

logger = logging.getLogger(__name__)

LOSS_STATE_NAME = "calibration_loss.safetensors"
# Servers load every safetensors file of the root as weights, so it is pushed to another place.
PUSHED_LOSS_STATE = "calibration/loss.safetensors"

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
ADAPTERS = "adapter_model.safetensors"
_INDEX = "model.safetensors.index.json"
# What transformers, peft or vLLM would load from the root in place of the pushed weights, or on top of them.
_LOADED_TOO = (
    *(
        "model*.safetensors",
        "model*.safetensors.index.json",
        "pytorch_model*.bin",
        "pytorch_model*.bin.index.json",
    ),
    *("adapter_config.json", "adapter_model.*", LOSS_STATE_NAME),
)
_PICKLES = {".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pt2", ".pth"}
# Pickles that every training leaves behind: that these stay here needs no mention.
_OF_A_TRAINING = ("training_args.bin", "optimizer*", "scheduler*", "scaler.pt", "rng_state*")


class Changes(NamedTuple):
    """Changes that a push is about to make.

    Args:
        repo_id: the repository, with its owner.
        added: paths in the repository that are uploaded; those that it has in the same form already are skipped.
        removed: weights in its root that would be loaded in place of the pushed ones.
        left_out: files of the folder that are pickles, and stay here; not those that every training leaves.
        links: links to what lies outside of the folder, which stay here too.
    """

    repo_id: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    left_out: tuple[str, ...]
    links: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The changes in words, for the user to read before the upload."""
        said = []
        if self.removed:
            said.append(
                f"{', '.join(self.removed)} in {self.repo_id} would be loaded in place of the pushed weights, and will "
                "be removed. Earlier commits keep them."
            )
        if self.left_out:
            said.append(
                f"{', '.join(self.left_out)} can run code when loaded, and will not be pushed. Save weights as "
                "safetensors."
            )
        if self.links:
            said.append(
                f"{few(self.links)}: links out of the folder, which will not be pushed. Copy what they name into it."
            )
        return said


class _Files(NamedTuple):
    """Files of a folder, by their paths in the repository; the pickles, and the links out of it."""

    pushed: dict[str, Path]
    left_out: tuple[str, ...]
    links: tuple[str, ...]


def log_changes(changes: Changes) -> None:
    """Log what is removed, and what is left out."""
    for line in changes.lines():
        logger.warning(line)


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    message: str = "Push a calibrated model",
    announce: Callable[[Changes], None] = log_changes,
    run_as_future: bool = False,
) -> CommitInfo | Future[CommitInfo]:
    """Upload a folder with a model in one commit, which also removes weights that would be loaded in its place.

    `HfApi.upload_folder` makes several commits where there are many files, uploads pickles, and removes nothing.
    Whoever loads the repository meanwhile, or after a push that failed, gets it as it was before. Pushing again
    completes it. What else is in the repository stays.

    Args:
        folder: with config.json and safetensors weights. Neither pickles, `checkpoint-*`, `_*`, hidden files nor links
            out of the folder are uploaded; `calibration_loss.safetensors` becomes `calibration/loss.safetensors`.
        repo_id: "owner/name", or "name" for the owner of the token. A new repository is made where there is none.
        token: with write access; None takes HF_TOKEN or that of `hf auth login`. It is never logged or saved.
        private: whether a new repository is private; None is the owner's default.
        revision: the branch, which is made from main where there is none; None is main.
        create_pr: whether to open a pull request instead of changing the branch.
        message: the commit's first line.
        announce: called before the commit, and again if others have changed the repository meanwhile.
        run_as_future: whether to upload in the background, once the folder has been checked.

    Returns:
        The commit, or a future of it. `pr_url` is that of the pull request.

    Raises:
        ValueError: if the folder, the names or the token are wrong, or the Hub refuses them.
        OSError: if a file cannot be read, or the Hub cannot be reached after several attempts.

    Notes:
        Where the Hub is busy, cannot be reached, or takes a commit of others first, the push is tried again after 1, 2,
        4 and 8 seconds. A new repository or branch that was made for a push that fails stays.
    """
    check_destination(repo_id, revision, token)
    files = _checked_files(Path(folder))
    pushed = files.pushed

    def tell(repository: str, removed: tuple[str, ...]) -> None:
        announce(Changes(repository, tuple(sorted(pushed)), removed, files.left_out, files.links))

    return push_files(
        pushed,
        Destination(repo_id, token, private, revision, create_pr),
        message=message,
        in_the_way=lambda names: _in_the_way(names, pushed),
        announce=tell,
        run_as_future=run_as_future,
    )


# ---- The folder ----


def files_to_push(folder: Path) -> dict[str, Path]:
    """The files of a folder that a push would upload, by their paths in the repository."""
    return _files(folder).pushed


def _files(folder: Path) -> _Files:
    pushed: dict[str, Path] = {}
    left_out, links = [], []
    root = folder.resolve()
    for name, path in _walk(folder, root, "", ()):
        if path is None:
            links.append(name)
        elif _is_pickle(path):
            if not any(fnmatch(path.name, form) for form in _OF_A_TRAINING):
                left_out.append(name)
        else:
            pushed[PUSHED_LOSS_STATE if name == LOSS_STATE_NAME else name] = path
    return _Files(pushed, tuple(left_out), tuple(links))


def _walk(
    folder: Path, root: Path, prefix: str, above: tuple[Path, ...]
) -> Iterator[tuple[str, Path | None]]:
    """Files with their paths, and links out of the root, with None; other links are followed, but not in circles."""
    resolved = folder.resolve()
    if resolved in above:
        return
    for path in sorted(folder.iterdir()):
        hidden = path.name.startswith(".") or path.name == "__pycache__"
        if hidden or (not prefix and (path.name.startswith("_") or fnmatch(path.name, "checkpoint-*"))):
            continue
        if path.exists() and not path.resolve().is_relative_to(root):
            yield f"{prefix}{path.name}", None
        elif path.is_dir():
            yield from _walk(path, root, f"{prefix}{path.name}/", (*above, resolved))
        elif path.is_file():
            yield f"{prefix}{path.name}", path
        else:
            got = "a link to nothing" if path.is_symlink() else "neither a file nor a folder"
            raise InputValueError(expected(str(path), "be a file", got, "remove it, or move it elsewhere"))


def _is_pickle(path: Path) -> bool:
    """Whether loading it may run code, by its name or by how it begins."""
    if path.suffix.lower() in _PICKLES:
        return True
    with path.open("rb") as file:
        start = file.read(2)
    if start == b"PK" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    return len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5


def _checked_files(folder: Path) -> _Files:
    """The files of a folder that holds a whole model."""
    way_out = "name a folder that save_calibrated_model or hf-calib calibrate wrote"
    if not folder.is_dir():
        got = f"{folder}, a file" if folder.exists() else f"{folder}, which does not exist"
        raise InputValueError(expected("folder", "be a folder with a model", got, way_out))
    try:
        files = _files(folder)
        pushed = files.pushed
        if CONFIG not in pushed and "adapter_config.json" not in pushed:
            got = f"a link out of it ({CONFIG})" if CONFIG in files.links else "none"
            raise InputValueError(expected(f"the folder {folder}", f"hold {CONFIG}", got, way_out))
        names = _weights_of(pushed)
        missing = sorted(set(names) - pushed.keys())
        if missing or not names:
            got = f"no {few(missing or [WEIGHTS])}"
            raise InputValueError(expected(f"the folder {folder}", "hold safetensors weights", got, way_out))
        for name in [CONFIG, _INDEX]:
            if name in pushed:
                json.loads(pushed[name].read_text(encoding="utf-8"))
        for name in names:
            with safe_open(pushed[name], framework="numpy"):
                pass
        if CARD in pushed:
            ModelCard(pushed[CARD].read_text(encoding="utf-8"), ignore_metadata_errors=False)
    except OSError as error:
        raise InputOSError(
            expected(str(error.filename or folder), "be readable", error.strerror or error, "repair it")
        ) from error
    except InputError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        got = f"a file that cannot be read ({' '.join(str(error).split())})"
        raise InputValueError(expected(f"the folder {folder}", "hold a whole model", got, way_out)) from error
    return files


def _weights_of(pushed: dict[str, Path]) -> list[str]:
    """Names of the files with the model's weights; of those of its adapters, where these are not merged."""
    if _INDEX in pushed and WEIGHTS not in pushed:
        index = json.loads(pushed[_INDEX].read_text(encoding="utf-8"))
        return sorted(set(index["weight_map"].values()))
    return [name for name in (WEIGHTS, ADAPTERS) if name in pushed]


def is_weights(name: str) -> bool:
    """Whether a file of this name in the root is loaded as weights, or says which are."""
    return "/" not in name and any(fnmatch(name, form) for form in _LOADED_TOO)


def _in_the_way(names: Iterable[str], pushed: dict[str, Path]) -> tuple[str, ...]:
    """Weights in a repository's root that would be loaded in place of the pushed ones."""
    others = {name for name in names if is_weights(name)} - pushed.keys()
    if WEIGHTS not in pushed and _INDEX not in pushed:  # adapters, which are found before whole models
        others = {name for name in others if name.startswith("adapter_")}
    return tuple(sorted(others))
