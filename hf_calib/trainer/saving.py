"""Files of a run: tables of losses, models as trained and calibrated, and pushes."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME

from hf_calib._errors import InputValueError, check, cut, expected, few, printable
from hf_calib._files import remove_files, report_files, whole_file
from hf_calib._records import (
    count,
    fits,
    number,
    or_none,
    positive,
    read_json,
    wrong_entry,
)
from hf_calib.cards.facts import REPORT_FOLDER
from hf_calib.decisions.saved import rule_files
from hf_calib.export.folder import (
    CONFIG,
    KEPT_HEAD,
    LOSS_STATE_NAME,
    PUSHED_LOSS_STATE,
    has_rule_of,
)
from hf_calib.losses import LOSSES, AdaptiveLoss, CalibrationLoss
from hf_calib.scaling.saved_map import MAP_NAME, SavedMap, recorded_in, save_map
from hf_calib.trainer.calibration_map import is_in

_OTHER_CHECKPOINT = (
    "resume from another checkpoint, or train without resume_from_checkpoint"
)
# What the Trainer writes with torch.save, as zip archives.
_ARCHIVES = (
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*.pth",
    "pytorch_model*.bin",
    "adapter_model.bin",
)
_INDEXES = (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
# The loss of a run, in the Trainer's state: it is JSON, and in every checkpoint.
LOSS_RECORD = "CalibrationLoss"
_RECORD_KINDS = {
    "loss": str,
    "hyperparameters": dict,
    "class_weights": or_none([number]),
    "pos_weight?": [number],
}
# An entry of each table of an adaptive loss in the log.
A_GAP = "calibration_gap_00"
_LARGEST_STATE = 2**26  # In bytes: 300,000 lines of a log.


def _is_logged(entry: Any) -> bool:
    """Whether an entry of the log has what is read of it."""
    is_table = isinstance(entry, dict) and A_GAP in entry
    return fits(entry, {"step": count, "epoch": number} if is_table else dict)


# The kinds of what the Trainer reads in its state to go on. Until a metric has been measured, the
# best one is infinite.
_STATE_KINDS = {
    **dict.fromkeys(("global_step", "max_steps", "num_train_epochs"), count),
    **dict.fromkeys(("epoch", "total_flos"), number),
    "log_history": [_is_logged],
    "best_metric?": lambda value: fits(value, int) or fits(value, float),
    "best_global_step?": count,
    "best_model_checkpoint?": str,
    "stateful_callbacks": {"TrainerControl": dict, f"{LOSS_RECORD}?": _RECORD_KINDS},
}
_LARGEST_TABLE = 2**24  # In bytes: 10,000 bins, and gaps of two million classes.


# ---- Checkpoints ----


def save_loss_state(loss: AdaptiveLoss, directory: str | os.PathLike[str]) -> None:
    """Write the loss's table with its name and hyperparameters to the directory, completely or not
    at all.
    """
    table = {name: value.contiguous() for name, value in loss.state_dict().items()}
    metadata = {"loss": loss.name, "hyperparameters": json.dumps(loss.hyperparameters)}
    with whole_file(Path(directory) / LOSS_STATE_NAME) as unfinished:
        save_file(table, unfinished, metadata)


def load_loss_state(loss: AdaptiveLoss, directory: str | os.PathLike[str]) -> None:
    """Restore the table of `save_loss_state`, also from the place of a push, if it is of the same
    loss.
    """
    files = _tables(Path(directory))
    check(
        bool(files),
        f"checkpoint {directory} to hold {LOSS_STATE_NAME}",
        got="no such file, without which the loss would start over",
        way_out=_OTHER_CHECKPOINT,
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
                got=printable(error)[:500],
                way_out=_OTHER_CHECKPOINT,
            )
        ) from error


def _tables(folder: Path) -> list[Path]:
    """The files of a loss's table, of a checkpoint or of a push."""
    places = [folder / LOSS_STATE_NAME, folder / PUSHED_LOSS_STATE]
    return [path for path in places if path.is_file()]


def _table_of(loss: AdaptiveLoss, path: Path) -> dict[str, Any]:
    """Read a table; raise ValueError if it is of another loss."""
    size = path.stat().st_size
    if size > _LARGEST_TABLE:
        raise ValueError(f"a file of {size:,} bytes")
    with safe_open(path, "pt") as file:
        recorded = file.metadata() or {}
        table = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    ours = loss_record(loss)["hyperparameters"]
    theirs = json.loads(recorded.get("hyperparameters", "null"))
    if "loss" not in recorded or not isinstance(theirs, dict):
        raise ValueError("a file that does not say its loss")
    # A hyperparameter that is missing there was introduced after the file was written.
    if recorded["loss"] != loss.name or not theirs.items() <= ours.items():
        raise ValueError(f"the table of loss {recorded['loss']!r} with {theirs}")
    return table


def loss_record(loss: CalibrationLoss) -> dict[str, Any]:
    """The loss of a run in JSON types, as its checkpoints have it."""
    weights = loss.class_weights
    of_positives = loss.pos_weight
    record = {
        "loss": loss.name,
        "hyperparameters": loss.hyperparameters,
        "class_weights": None if weights is None else weights.tolist(),
        "pos_weight": None if of_positives is None else of_positives.tolist(),
    }
    return json.loads(json.dumps(record))


def _check_intervals(path: Path, state: Mapping[str, Any], args: Any) -> None:
    """Raise for a state whose steps between logs, evaluations or checkpoints the Trainer cannot
    divide by.
    """
    for event in ("logging", "eval", "save"):
        name = f"{event}_steps"
        recorded = state.get(name, 1)
        own = getattr(args, name)
        # With a number of their own that is not positive, the arguments ask for none.
        is_read = getattr(args, f"{event}_strategy") == "steps"
        is_read = is_read and (own is None or own > 0)
        check(
            not is_read or positive(recorded),
            f"{path} to hold a positive {name}",
            got=cut(repr(recorded), 100),
            way_out=_OTHER_CHECKPOINT,
        )


def check_goes_on(
    loss: CalibrationLoss, args: Any, checkpoint: str | os.PathLike[str]
) -> None:
    """Raise for a checkpoint whose training cannot go on: of another loss, with a calibrator in its
    weights.
    """
    folder = Path(checkpoint)
    path = folder / TRAINER_STATE_NAME
    # With another loop there may be none.
    state: dict[str, Any] = {}
    if path.is_file():
        state = read_json(path, _STATE_KINDS, _LARGEST_STATE)
    way_out = (
        "start a new training with its weights: load the model from this folder, and leave "
        "resume_from_checkpoint out"
    )
    found = _recorded_loss(state)
    ours = loss_record(loss)
    if found is not None:
        theirs = found["hyperparameters"]
        # One that is missing there was introduced after the checkpoint was written.
        own = ours["hyperparameters"]
        is_like_ours = {**found, "hyperparameters": own} == ours
        check(
            is_like_ours and theirs.items() <= own.items(),
            f"resume_from_checkpoint to be of a training with {_in_words(ours)}",
            got=f"{folder}, of one with {_in_words(found)}",
            way_out=way_out,
        )
    check(
        not _is_folded(folder),
        "resume_from_checkpoint to hold the model as trained",
        got=f"{folder}, with a calibrator in its weights",
        way_out=f"resume from another checkpoint, or {way_out}",
    )
    if state:
        _check_intervals(path, state, args)


def _is_folded(folder: Path) -> bool:
    """Whether the config of a saved model says that a calibrator is in its weights."""
    if not (folder / CONFIG).is_file():
        return False
    return bool(recorded_in(read_json(folder / CONFIG, {})).get("folded"))


def _recorded_loss(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The loss in the state of a checkpoint; None if it was written by a program that does not
    record it.
    """
    found = state.get("stateful_callbacks", {}).get(LOSS_RECORD)
    if found is None:
        return None
    names = [name.removesuffix("?") for name in _RECORD_KINDS]
    return {name: found.get(name) for name in names}


def _in_words(record: dict[str, Any]) -> str:
    """A recorded loss in a message."""
    text = f"loss {record['loss']!r}, {record['hyperparameters']}"
    for name in ("class_weights", "pos_weight"):
        if record[name] is not None:
            text += f", {name}={few(record[name])}"
    return printable(text)[:300]


def newest_checkpoint(output_dir: str | os.PathLike[str], loss: str) -> str | None:
    """The newest complete checkpoint of a run with this loss; None if there is none."""
    for path in _checkpoints(Path(output_dir)):
        if _problem(path, loss) is None:
            return str(path)
    return None


def checkpoint_to_resume(output_dir: str | os.PathLike[str], loss: str) -> str:
    """The newest complete checkpoint, with a warning that names newer ones; raise like the Trainer
    if there is none.
    """
    incomplete = []
    for path in _checkpoints(Path(output_dir)):
        problem = _problem(path, loss)
        if problem is not None:
            incomplete.append(f"{path.name} ({problem})")
            continue
        if incomplete:
            warnings.warn(
                f"Incomplete: {', '.join(incomplete)}. Training resumes from {path}, the newest "
                "complete checkpoint, and repeats the steps since. Pass "
                "resume_from_checkpoint=FOLDER to choose another one.",
                stacklevel=3,
            )
        return str(path)
    found = f"; incomplete: {few(incomplete)}" if incomplete else ""
    raise InputValueError(
        f"No valid checkpoint found in output directory ({output_dir}){found}"
    )


def check_complete(checkpoint: str | os.PathLike[str], loss: str) -> None:
    """Raise for a checkpoint that is not there, not written to its end or cut short since; name the
    one before it.
    """
    path = Path(checkpoint)
    problem = _problem(path, loss)
    if problem is None:
        return
    siblings = _checkpoints(path.parent)
    earlier = siblings[siblings.index(path) + 1 :] if path in siblings else []
    whole = [each for each in earlier if _problem(each, loss) is None]
    way_out = _OTHER_CHECKPOINT
    if whole:
        way_out = f"resume from {whole[0]}, the complete checkpoint before it"
    check(
        False,
        "resume_from_checkpoint to be a complete checkpoint",
        got=f"{path} ({problem})",
        way_out=way_out,
    )


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first: by the number of their step, not by their
    name.
    """
    by_step: dict[int, Path] = {}
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if step.isdecimal() and path.is_dir():
            by_step[int(step)] = path
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def _problem(checkpoint: Path, loss: str) -> str | None:
    """The reason why a checkpoint is incomplete; None for a complete one. The Trainer's state is
    written last.
    """
    if not checkpoint.is_dir():
        return "no such folder"
    path = checkpoint / TRAINER_STATE_NAME
    if not path.is_file():
        return f"{TRAINER_STATE_NAME} is missing"
    size = path.stat().st_size
    if size > _LARGEST_STATE:
        return f"{TRAINER_STATE_NAME} of {size:,} bytes"
    paths = sorted(checkpoint.iterdir())
    damaged = [path.name for path in paths if path.is_file() and _is_damaged(path)]
    if damaged:
        return f"{few(damaged)} cut short or damaged"
    state = read_json(path, {}, _LARGEST_STATE)
    wrong = _wrong_in_state(checkpoint.name, state)
    if wrong is not None:
        return f"{TRAINER_STATE_NAME} with {wrong}"
    names = {path.name for path in paths}
    for index in _INDEXES:
        if index in names:
            missing = _shards(checkpoint / index) - names
            if missing:
                return f"{few(sorted(missing))} missing"
    # With save_only_model there are none of these.
    has_states = any(name.startswith(("scheduler.", "rng_state")) for name in names)
    # Adapters, and the shards of FSDP and DeepSpeed, may be in folders of their own.
    has_folders = any(path.is_dir() for path in paths)
    has_weights = has_folders or any(path.match("*model*.*") for path in paths)
    has_optimizer = has_folders or any("optimizer." in name for name in names)
    if has_states and not has_weights:
        return "the model's weights are missing"
    if has_states and not has_optimizer:
        return "the optimizer's state is missing"
    if "optimizer.pt" in names and "scheduler.pt" not in names:
        return "scheduler.pt is missing"
    entry = LOSSES.get(loss)
    adapts = entry is not None and issubclass(entry.module, AdaptiveLoss)
    recorded = _recorded_loss(state)
    # One of another loss is refused for that reason.
    is_of_another = recorded is not None and recorded["loss"] != loss
    if adapts and not is_of_another and not _tables(checkpoint):
        return f"{LOSS_STATE_NAME} is missing"
    return None


def _wrong_in_state(folder: str, state: Mapping[str, Any]) -> str | None:
    """What the Trainer cannot read in the state of a folder of this name, or None."""
    wrong = wrong_entry(state, _STATE_KINDS)
    if wrong is not None:
        return f"{wrong}: {cut(repr(state[wrong]), 100) if wrong in state else 'none'}"
    step = state["global_step"]
    if step > state["max_steps"]:
        return f"global_step: {step}, above max_steps {state['max_steps']}"
    of_folder = folder.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    if of_folder.isdecimal() and int(of_folder) != step:
        return f"global_step: {step}, in the folder of step {of_folder}"
    known = {field.name for field in dataclasses.fields(TrainerState)}
    unknown = sorted(state.keys() - known)
    if unknown:
        return f"unknown entries: {few(unknown)}"
    return None


def _is_damaged(path: Path) -> bool:
    """Whether a file that the Trainer has written cannot be read, by its head or its end."""
    try:
        if path.name == TRAINER_STATE_NAME:
            read_json(path, {}, _LARGEST_STATE)
        elif path.suffix == ".json":
            record = json.loads(path.read_text(encoding="utf-8"))
            if path.name in _INDEXES:
                return not isinstance(record["weight_map"], dict)
        if path.suffix == ".safetensors":
            # It compares the file's length with its header.
            with safe_open(path, "pt"):
                pass
        elif any(path.match(pattern) for pattern in _ARCHIVES):
            return not zipfile.is_zipfile(path)
    except (OSError, ValueError, LookupError, TypeError, SafetensorError):
        return True
    except RecursionError:  # JSON nested thousands of times.
        return True
    return False


def _shards(index: Path) -> set[str]:
    """The files of the weights that an index names."""
    record = json.loads(index.read_text(encoding="utf-8"))
    return {str(name) for name in record["weight_map"].values()}


# ---- Models ----


def save_beside(folder: Path, loss: CalibrationLoss, fitted: SavedMap | None) -> None:
    """Write gammas and calibrator next to a saved model, and remove those of an earlier run."""
    outdated = _tables(folder)
    if not _is_folded(folder):
        outdated.append(folder / KEPT_HEAD)
    if not is_in(fitted, folder / MAP_NAME):
        # The report there is on another calibrator.
        outdated += report_files(folder / REPORT_FOLDER)
    of_folder = [path for path in outdated if path.is_file()]
    if not (folder / REPORT_FOLDER).is_symlink():
        remove_files(folder, of_folder)
    if isinstance(loss, AdaptiveLoss):
        save_loss_state(loss, folder)
    if fitted is None:
        (folder / MAP_NAME).unlink(missing_ok=True)
    else:
        save_map(fitted.scaler, folder, fitted.about)
    if not has_rule_of(folder, fitted.about if fitted else {}):
        remove_files(folder, rule_files(folder))


def card_settings(
    given: dict[str, Any], repo_id: str, model_tags: list[str] | None
) -> dict[str, Any]:
    """The arguments of `create_model_card`, with the model's own tags after the given ones."""
    tags = given.get("tags") or []
    if isinstance(tags, str):
        tags = [tags]
    each_once = dict.fromkeys([*tags, *(model_tags or [])])
    return {"model_name": repo_id.split("/")[-1], **given, "tags": list(each_once)}


def raise_everywhere(work: Callable[[], Any], *, here: bool) -> Any:
    """Run work on this process or others; if it fails, all processes raise, so that none waits
    forever.
    """
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
