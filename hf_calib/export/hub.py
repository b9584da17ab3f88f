"""Pushing the folder of a model to the Hub: the uploaded files, and the weights that they replace."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import CommitInfo
from safetensors import SafetensorError, safe_open

from hf_calib._errors import (
    InputError,
    InputOSError,
    InputValueError,
    check,
    expected,
    few,
)
from hf_calib._hub import (
    CARD,
    Destination,
    check_destination,
    push_files,
    read_card,
)
from hf_calib._records import read_json
from hf_calib.decisions.saved import DECISIONS
from hf_calib.export.folder import (
    ADAPTER_CONFIG,
    ADAPTERS,
    CONFIG,
    INDEX,
    KEPT_HEAD,
    LOSS_STATE_NAME,
    WEIGHTS,
    Files,
    files_of,
    is_weights,
)
from hf_calib.models.classifier import CONFIG_KINDS
from hf_calib.scaling.saved_map import MAP_NAME

# Files of a repository that belong to the weights there.
_CALIBRATOR = (MAP_NAME, KEPT_HEAD.as_posix())
_REPORT = "calibration/report.json"
_OF_A_REPORT = re.compile(
    r"(calibration|decisions)/(report\.(json|md|html)|figures/[\w-]+\.png)"
)

logger = logging.getLogger(__name__)


class Changes(NamedTuple):
    """The changes of a push: paths that it removes in the repository,
    and paths of the folder that are not pushed.
    """

    repo_id: str
    uploaded: tuple[str, ...]
    # Weights that would be loaded instead of the pushed ones, their calibrator and its report.
    removed: tuple[str, ...]
    # Pickles other than those of every run.
    left_out: tuple[str, ...]
    # Links to folders and to files outside.
    links: tuple[str, ...] = ()
    # The branch's latest commit, which a push of nothing new returns.
    parent: str | None = None

    def lines(self) -> list[str]:
        """Return the changes in words, for the user to read before the upload."""
        of_others = [name for name in self.removed if name in _CALIBRATOR]
        reports = [name for name in self.removed if _OF_A_REPORT.fullmatch(name)]
        rules = [name for name in self.removed if name == DECISIONS]
        beside = {*of_others, *rules, *reports}
        weights = [name for name in self.removed if name not in beside]
        removed, left_out = ", ".join(weights), ", ".join(self.left_out)
        lines = {
            f"{removed} in {self.repo_id} would be loaded in place of the pushed weights, and will be removed. Earlier "
            "commits keep them.": weights,
            f"{few(of_others)} in {self.repo_id}: a calibrator of other weights, which will be removed.": of_others,
            f"{few(rules)} in {self.repo_id}: a rule for other probabilities, which will be removed.": rules,
            f"{few(reports)} in {self.repo_id}: a report on an earlier model, which will be removed.": reports,
            f"{left_out} can run code when loaded, and will not be pushed. Save weights as safetensors.": self.left_out,
            f"{few(self.links)}: links, which will not be pushed. Copy what they name into the folder.": self.links,
        }
        return [line for line, names in lines.items() if names]


def log_changes(changes: Changes) -> None:
    """Log the removed and left-out files."""
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
    """Upload the folder of a model in one commit, which also removes weights that would be loaded
    instead.

    `HfApi.upload_folder` makes several commits for many files, uploads pickles, and removes
    nothing. During the push, or after a push that failed, the repository loads as before. A
    calibrator, a rule or a report there is removed, too, if the folder has none: it is of the model
    before. All other files are unchanged, and a new repository or branch remains after a push that
    failed.

    Args:
        folder: a folder with config.json and safetensors weights. Pickles, `checkpoint-*`, `_*`,
            hidden files, and links to folders or out of the folder are not uploaded;
            `calibration_loss.safetensors` becomes `calibration/loss.safetensors`.
        repo_id: "owner/name", or "name" for the owner of the token; a repository that does not
            exist is created.
        token: a token with write access; None uses HF_TOKEN or the token of `hf auth login`. It is
            never logged or saved.
        private: whether a new repository is private; None is the owner's default.
        revision: the branch, which is created from main if it does not exist; None is main.
        create_pr: whether to open a pull request instead of changing the branch.
        message: first line of the commit message.
        announce: a function called before the commit, and again if the repository has changed in
            the meantime.
        run_as_future: whether to upload in the background after the folder is checked.

    Returns:
        The commit, or a future of it: the branch's latest one if no file has changed, as the Hub
        makes no empty commit. `pr_url` is the address of the pull request.

    Raises:
        ValueError: if the folder, the names or the token are wrong, or the Hub rejects them.
        OSError: if a file cannot be read, or the Hub cannot be reached after several attempts.

    Notes:
        If the Hub is busy or another commit comes first, the push is repeated after 1, 2, 4 and 8
        seconds.
    """
    check_destination(repo_id, revision, token)
    files = _checked_files(Path(folder))

    def tell(repository: str, removed: tuple[str, ...], parent: str | None) -> None:
        announce(
            Changes(
                repository,
                tuple(sorted(files.pushed)),
                removed,
                files.left_out,
                files.links,
                parent,
            )
        )

    return push_files(
        files.pushed,
        Destination(repo_id, token, private, revision, create_pr),
        message=message,
        in_the_way=lambda names: _in_the_way(names, files.pushed),
        announce=tell,
        run_as_future=run_as_future,
    )


def _in_the_way(names: Iterable[str], pushed: dict[str, Path]) -> tuple[str, ...]:
    """Weights in a repository's root that would be loaded instead of the pushed ones,
    and what belongs to others.
    """
    there = set(names)
    beside = {*_CALIBRATOR, DECISIONS}
    # Without one of them, the others may be a user's own files.
    if _REPORT in there or DECISIONS in there:
        beside |= {name for name in there if _OF_A_REPORT.fullmatch(name)}
    outdated = {LOSS_STATE_NAME, *beside}
    others = {
        name for name in there if is_weights(name) or name in outdated
    } - pushed.keys()
    # Adapters are loaded before whole models.
    if WEIGHTS not in pushed and INDEX not in pushed:
        others = {
            name for name in others if name.startswith("adapter_") or name in beside
        }
    return tuple(sorted(others))


def _checked_files(folder: Path) -> Files:
    """The files of a folder, checked for a complete model."""
    way_out = "name a folder that save_calibrated_model or hf-calib calibrate wrote"
    got = f"{folder}, a file" if folder.exists() else f"{folder}, which does not exist"
    check(folder.is_dir(), "folder to be a folder with a model", got, way_out)
    try:
        files = files_of(folder)
        pushed = files.pushed
        got = f"a link out of it ({CONFIG})" if CONFIG in files.links else "none"
        is_model = CONFIG in pushed or ADAPTER_CONFIG in pushed
        check(is_model, f"the folder {folder} to hold {CONFIG}", got, way_out)
        names = [name for name in (WEIGHTS, ADAPTERS) if name in pushed]
        # transformers loads a single file of weights before an index.
        if INDEX in pushed and WEIGHTS not in pushed:
            index = read_json(pushed[INDEX], {"weight_map": {str: str}})
            names = sorted(set(index["weight_map"].values()))
        missing = sorted(set(names or [WEIGHTS]) - pushed.keys())
        got = f"no {few(missing)}"
        check(
            not missing,
            f"the folder {folder} to hold safetensors weights",
            got,
            way_out,
        )
        if CONFIG in pushed:
            read_json(pushed[CONFIG], CONFIG_KINDS)
        for name in names:
            # Opening a file compares its length with its header, so a truncated one is
            # found.
            with safe_open(pushed[name], framework="numpy"):
                pass
        if CARD in pushed:
            read_card(pushed[CARD])
    except OSError as error:
        place = str(error.filename or folder)
        raise InputOSError(
            expected(place, "be readable", error.strerror or error, "repair it")
        ) from error
    except InputError:
        raise
    except (SafetensorError, ValueError) as error:
        got = f"a file that cannot be read ({' '.join(str(error).split())})"
        raise InputValueError(
            expected(f"the folder {folder}", "hold a whole model", got, way_out)
        ) from error
    return files
