"""Files of a run: tables of losses, models as trained and calibrated, and pushes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_calib._errors import InputValueError, check, expected
from hf_calib._files import whole_file
from hf_calib.cards.facts import REPORT_FOLDER
from hf_calib.export.folder import LOSS_STATE_NAME, PUSHED_LOSS_STATE
from hf_calib.losses import AdaptiveLoss, CalibrationLoss
from hf_calib.scaling.saved_map import MAP_NAME, SavedMap, save_map
from hf_calib.trainer.calibration_map import is_in

REPORT = f"{REPORT_FOLDER}/report.json"


# ---- Checkpoints ----


def save_loss_state(loss: AdaptiveLoss, directory: str | os.PathLike[str]) -> None:
    """Write the loss's table with its name and hyperparameters to the directory, completely or not at all."""
    table = {name: value.contiguous() for name, value in loss.state_dict().items()}
    metadata = {"loss": loss.name, "hyperparameters": json.dumps(loss.hyperparameters)}
    with whole_file(Path(directory) / LOSS_STATE_NAME) as unfinished:
        save_file(table, unfinished, metadata)


def load_loss_state(loss: AdaptiveLoss, directory: str | os.PathLike[str]) -> None:
    """Restore the table of `save_loss_state`, also from the place of a push, if it is of the same loss."""
    way_out = "resume from another checkpoint, or train without resume_from_checkpoint"
    places = [Path(directory, LOSS_STATE_NAME), Path(directory, PUSHED_LOSS_STATE)]
    files = [path for path in places if path.is_file()]
    check(
        bool(files),
        f"checkpoint {directory} to hold {LOSS_STATE_NAME}",
        got="no such file, without which the loss would start over",
        way_out=way_out,
    )
    try:
        loss.load_state_dict(_table_of(loss, files[0]))
    # Everything that reading a file that is broken, or of another program, may raise.
    except (
        SafetensorError,
        OSError,
        TypeError,
        KeyError,
        RuntimeError,
        ValueError,
    ) as error:
        raise InputValueError(
            expected(
                str(files[0]),
                f"hold the table of loss {loss.name!r} with {loss.hyperparameters}",
                got=" ".join(str(error).split()),  # On one line.
                way_out=way_out,
            )
        ) from error


def _table_of(loss: AdaptiveLoss, path: Path) -> dict[str, Any]:
    """Read a table; raise ValueError if it is of another loss."""
    with safe_open(path, "pt") as file:
        recorded = file.metadata() or {}
        table = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    ours = json.loads(json.dumps(loss.hyperparameters))  # In the types of JSON.
    theirs = json.loads(recorded["hyperparameters"])
    # A hyperparameter or tensor that is missing there was introduced after the file was written.
    differing = [name for name, value in theirs.items() if ours.get(name) != value]
    if recorded["loss"] != loss.name or differing:
        raise ValueError(f"the table of loss {recorded['loss']!r} with {theirs}")
    return table


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint, whose last file is the Trainer's state; None if there is none."""
    by_step: dict[int, Path] = {}
    for path in Path(output_dir).glob(
        f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}"
    ):
        number = path.parent.name.rpartition("-")[2]
        if number.isdecimal():
            by_step[int(number)] = path
    for step in sorted(by_step, reverse=True):
        try:
            json.loads(by_step[step].read_text(encoding="utf-8"))
        except ValueError:  # The file is incomplete.
            continue
        return str(by_step[step].parent)
    return None


# ---- Models ----


def save_beside(folder: Path, loss: CalibrationLoss, fitted: SavedMap | None) -> None:
    """Write gammas and calibrator next to a saved model, and remove those of an earlier run."""
    if isinstance(loss, AdaptiveLoss):
        save_loss_state(loss, folder)
    if not is_in(fitted, folder / MAP_NAME):
        # The report there is on another calibrator.
        (folder / REPORT).unlink(missing_ok=True)
    if fitted is None:
        (folder / MAP_NAME).unlink(missing_ok=True)
    else:
        save_map(fitted.scaler, folder, fitted.about)


class PushSettings(NamedTuple):
    """Where a push goes; the names are those of `hf_calib.export.hub.push_folder`."""

    message: str
    create_pr: bool
    run_as_future: bool
    token: str | None
    revision: str | None
    private: bool | None


def push_settings(
    message: str | None, given: dict[str, Any], args: Any
) -> PushSettings:
    """Take the settings of a push out of the arguments of `push_to_hub`; the others stay, for the model card.

    What is not given is as in the Trainer's arguments.
    """

    def taken(name: str, default: Any) -> Any:
        value = given.pop(name, None)
        return default if value is None else value

    return PushSettings(
        message=message or "End of training",
        create_pr=given.pop("create_pr", False),
        run_as_future=not given.pop("blocking", True),
        token=taken("token", args.hub_token),
        revision=taken("revision", args.hub_revision),
        private=taken("private", args.hub_private_repo),
    )


def card_settings(
    given: dict[str, Any], repo_id: str, model_tags: list[str] | None
) -> dict[str, Any]:
    """The arguments of `create_model_card`, with the model's own tags after those that are given."""
    tags = given.get("tags") or []
    if isinstance(tags, str):
        tags = [tags]
    each_once = dict.fromkeys([*tags, *(model_tags or [])])
    return {"model_name": repo_id.split("/")[-1], **given, "tags": list(each_once)}


def raise_everywhere(work: Callable[[], Any], *, here: bool) -> Any:
    """Run work on this process or others; if it fails, all processes raise, so that none waits forever."""
    done = None
    failure: Exception | None = None
    if here:
        try:
            done = work()
        except Exception as error:  # It is raised once the other processes know of it.
            failure = error
    reason = None if failure is None else str(failure)
    reasons = [each for each in gather_object([reason]) if each is not None]
    if failure is not None:
        raise failure
    if reasons:
        raise RuntimeError(f"Another process failed: {reasons[0]}")
    return done
