"""Scalers on the Hub: their files alone are downloaded, and all of them are pushed in one commit."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_calib._errors import InputValueError, expected
from hf_calib.scaling.saved_map import ARRAYS_NAME, MAP_NAME, SavedMap, load_map, read_map

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo


def load_pretrained(
    name: str | os.PathLike[str], *, revision: str | None = None, token: str | bool | None = None
) -> SavedMap:
    """The map in a folder or a repository.

    Raises:
        ValueError: if there is none, or no whole one.
    """
    if Path(name).is_dir():
        return load_map(name)
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return download(str(name), revision=revision, token=token)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        got = f"{str(name)!r} ({' '.join(str(error).split())[:300]})"
        requirement = f"be a folder, or a repository on the Hub, with {MAP_NAME}"
        way_out = "check its spelling, the revision and the token"
        raise InputValueError(expected("name", requirement, got, way_out)) from error


def download(repo_id: str, *, revision: str | None = None, token: str | bool | None = None) -> SavedMap:
    """The map in a repository.

    Raises:
        ValueError: if it is no whole one.
        huggingface_hub.errors.HfHubHTTPError: if there is none.
        huggingface_hub.errors.LocalEntryNotFoundError: without a network, if it is not in the cache.
    """
    from huggingface_hub import hf_hub_download

    file = Path(hf_hub_download(repo_id, MAP_NAME, revision=revision, token=token))
    commit = file.parent.name  # both files are of one commit, whatever is pushed meanwhile
    return read_map(file, lambda: Path(hf_hub_download(repo_id, ARRAYS_NAME, revision=commit, token=token)))


def push(
    scaler: Any,
    repo_id: str,
    *,
    revision: str | None,
    token: str | None,
    private: bool | None,
    create_pr: bool,
) -> CommitInfo:
    """Add a fitted scaler to a repository, in one commit."""
    from hf_calib._hub import push_files

    with tempfile.TemporaryDirectory() as folder:
        scaler.save_pretrained(folder)
        files = {
            path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*") if path.is_file()
        }
        pushed: Any = push_files(
            files,
            repo_id,
            revision=revision,
            token=token,
            private=private,
            create_pr=create_pr,
            message=f"Add {type(scaler).__name__}",
        )
    return pushed
