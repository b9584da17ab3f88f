"""Files of a run: tables of losses, models as trained and calibrated, records, reports and cards."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_calib._errors import InputValueError, check, expected
from hf_calib._files import whole_file
from hf_calib._hub import CARD, with_owner
from hf_calib._text import is_hub_name
from hf_calib.cards.card import repair_stock_card, write_card
from hf_calib.cards.facts import REPORT_FOLDER
from hf_calib.cards.metadata import is_dataset_name
from hf_calib.export.folder import (
    LOSS_STATE_NAME,
    PUSHED_LOSS_STATE,
    save_folded,
    standalone_copy,
)
from hf_calib.export.hub import push_folder
from hf_calib.losses import AdaptiveLoss
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.predictions.predictions import Predictions
from hf_calib.report import CalibrationReport, ood_section, report_on_predictions
from hf_calib.scaling.saved_map import MAP_NAME, OF_PAIRS, save_map, title_of
from hf_calib.trainer.calibration_map import is_in

logger = logging.getLogger(__name__)
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
    paths = Path(directory, LOSS_STATE_NAME), Path(directory, PUSHED_LOSS_STATE)
    found = [path for path in paths if path.is_file()]
    got = "no such file, without which the loss would start over"
    way_out = "resume from another checkpoint, or train without resume_from_checkpoint"
    check(
        bool(found), f"checkpoint {directory} to hold {LOSS_STATE_NAME}", got, way_out
    )
    requirement = f"hold the table of loss {loss.name!r} with {loss.hyperparameters}"
    try:
        with safe_open(found[0], "pt") as file:
            recorded = file.metadata() or {}
            table = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        ours, theirs = (
            json.loads(json.dumps(loss.hyperparameters)),
            json.loads(recorded["hyperparameters"]),
        )
        # A tensor that is missing was introduced after the file was written.
        if recorded["loss"] != loss.name or any(
            ours.get(name) != value for name, value in theirs.items()
        ):
            raise ValueError(f"the table of loss {recorded['loss']!r} with {theirs}")
        loss.load_state_dict(table)
    except (
        SafetensorError,
        OSError,
        TypeError,
        KeyError,
        RuntimeError,
        ValueError,
    ) as error:
        got = " ".join(str(error).split())
        raise InputValueError(
            expected(str(found[0]), requirement, got, way_out)
        ) from error


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint, whose last file is the Trainer's state; None if there is none."""
    states = Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")
    steps = {path: path.parent.name.rpartition("-")[2] for path in states}
    for path in sorted(
        (p for p in steps if steps[p].isdecimal()), key=lambda p: -int(steps[p])
    ):
        try:
            json.loads(path.read_text(encoding="utf-8"))
            return str(path.parent)
        except ValueError:  # The file is incomplete.
            continue
    return None


# ---- Models ----


def warn_not_folded(trainer: Any) -> None:
    """Log once that a model is saved as trained although there is a calibrator."""
    if (
        trainer.fitted_map is not None
        and not trainer.said_not_folded
        and trainer.is_world_process_zero()
    ):
        trainer.said_not_folded = True
        logger.warning(
            "save_model writes the model as trained, without its %s: a pipeline that loads it is not "
            "calibrated. Use save_calibrated_model(output_dir) for the calibrated model.",
            title_of(trainer.calibration_map),
        )


def save_beside(trainer: Any, folder: Path) -> None:
    """Write gammas and calibrator next to a saved model, and remove those of an earlier run."""
    fitted = trainer.fitted_map
    if isinstance(trainer.calibration_loss, AdaptiveLoss):
        save_loss_state(trainer.calibration_loss, folder)
    if not is_in(fitted, folder / MAP_NAME):
        (folder / REPORT).unlink(missing_ok=True)
    if fitted is not None:
        save_map(fitted.scaler, folder, fitted.about)
    else:
        (folder / MAP_NAME).unlink(missing_ok=True)


def save_calibrated(trainer: Any, output_dir: str | os.PathLike[str]) -> None:
    """Save the model with the folded calibrator, over anything: a push replaces the files of the run."""
    fitted = trainer.fitted_map
    got = (
        "none configured"
        if trainer.calibration_config.make_scaler() is None
        else "none yet"
    )
    way_out = "train with a calibration_dataset, or call fit_calibration_map()"
    check(fitted is not None, "a calibrator to be fitted", got, way_out)
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    state_dict = (
        trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None
    )

    def save() -> None:
        save_folded(
            standalone_copy(trainer.unwrapped_model, state_dict),
            fitted.scaler,
            output_dir,
            batch=trainer.example_batch,
            processing_class=trainer.processing_class
            or getattr(trainer.data_collator, "tokenizer", None),
            about={**fitted.about, **measured(trainer)},
        )

    raise_everywhere(save, here=trainer.args.should_save)


def push(trainer: Any, message: str | None, card: dict[str, Any]) -> Any:
    """Save the calibrated model and its card in the output folder, and push it in one commit."""
    args, create_pr = trainer.args, card.pop("create_pr", False)
    about = {"message": message or "End of training", "create_pr": create_pr}
    about["run_as_future"] = not card.pop("blocking", True)
    defaults = {
        "token": args.hub_token,
        "revision": args.hub_revision,
        "private": args.hub_private_repo,
    }
    for name, default in defaults.items():
        given = card.pop(name, None)
        about[name] = default if given is None else given
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    repo_id = (
        trainer.hub_model_id
        or args.hub_model_id
        or Path(args.output_dir).absolute().name
    )
    running = getattr(trainer, "push_in_progress", None)
    if running is not None:  # A push of the Trainer reads the same folder.
        running.wait_until_done()
    save_calibrated(trainer, args.output_dir)

    def upload() -> Any:
        # The name needs its owner, so that the card's code works.
        trainer.hub_model_id = with_owner(repo_id, about["token"])
        if isinstance(trainer.calibration_loss, AdaptiveLoss):
            save_loss_state(trainer.calibration_loss, args.output_dir)
        tags, of_model = (
            card.get("tags") or [],
            getattr(trainer.model, "model_tags", None) or [],
        )
        tags = [*([tags] if isinstance(tags, str) else tags), *of_model]
        name = {"model_name": repo_id.split("/")[-1]}
        trainer.create_model_card(**{**name, **card, "tags": list(dict.fromkeys(tags))})
        return push_folder(args.output_dir, trainer.hub_model_id, **about)

    return raise_everywhere(upload, here=trainer.is_world_process_zero())


def raise_everywhere(work: Callable[[], Any], *, here: bool) -> Any:
    """Run work on this process or others; if it fails, all processes raise, so that none waits forever."""
    done, failed = None, None
    try:
        done = work() if here else None
    except Exception as error:
        failed = error
    reasons = [
        reason
        for reason in gather_object([failed and f"{failed}"])
        if reason is not None
    ]
    if failed is not None:
        raise failed
    if reasons:
        raise RuntimeError(f"Another process failed: {reasons[0]}")
    return done


def complete_card(trainer: Any) -> None:
    """Correct the stock card, and add the section on calibration if a calibrator is fitted."""
    if not trainer.is_world_process_zero():
        return
    folder, base_model = (
        Path(trainer.args.output_dir),
        getattr(trainer.model_config, "_name_or_path", None),
    )
    repair_stock_card(
        folder / CARD, base_model, is_calibrated=trainer.fitted_map is not None
    )
    if trainer.fitted_map is not None:
        write_results(trainer, folder)
        write_card(folder, repo_id=trainer.hub_model_id or trainer.args.hub_model_id)


# ---- Records and reports ----


def about_map(trainer: Any, scaler: Any, split: str, n_examples: int) -> dict[str, Any]:
    """The further entries of calibration.json: the loss, the rows and the base model, as far as recorded."""
    loss, held_out, names = (
        trainer.calibration_loss,
        trainer.calibration_split,
        trainer.class_names,
    )
    own = "evaluation" if trainer.calibration_dataset is None else "calibration"
    rows = _described(held_out)
    fitted_on = {
        **(rows if split in ("calibration", "evaluation") else {}),
        "split": split,
        "n": n_examples,
    }
    roles = {"train": _described(trainer.train_dataset), "calibration": fitted_on}
    if isinstance(loss, AdaptiveLoss) and held_out is not None:
        roles["gammas"] = fitted_on if own == split else {"split": own, **rows}
    base = getattr(trainer.model_config, "_name_or_path", None)
    known = {
        "criterion": getattr(scaler, "criterion", None),
        "split": split,
        "n_examples": n_examples,
        "loss": loss.name,
        "loss_kwargs": loss.hyperparameters,
        "class_weights": None
        if loss.class_weights is None
        else loss.class_weights.tolist(),
        **(OF_PAIRS if trainer.n_classes == 1 and not loss.multi_label else {}),
        "folded": False,
        "data": {role: rows for role, rows in roles.items() if rows},
        "base_model": base if is_hub_name(base) else None,
        "class_names": [
            names[number] for number in sorted(names)
        ],  # Adapters do not have them.
    }
    return {key: value for key, value in known.items() if value is not None}


def _described(dataset: Any) -> dict[str, Any]:
    """The number of rows, except for a stream, and the name, with its owner if the files are from the Hub."""
    info, found = getattr(dataset, "info", None), {}
    with suppress(TypeError, NotImplementedError):
        found["n"] = len(dataset)
    files = " ".join(getattr(info, "download_checksums", None) or ())
    owned = re.search(r"hf://datasets/([^/@]+/[^/@]+)[/@]", files)
    name = owned[1] if owned else getattr(info, "dataset_name", None)
    return {**found, "name": name} if is_dataset_name(name) else found


def with_map(trainer: Any) -> Any:
    """The last evaluation, if it was with the trainer's current calibrator."""
    evaluation = trainer.last_evaluation
    measured = evaluation is not None and evaluation.calibrated is not None
    return (
        evaluation
        if measured and evaluation.calibration_map is trainer.calibration_map
        else None
    )


def measured(trainer: Any) -> dict[str, Any]:
    """The entry "metrics" of calibration.json: the metrics before and after calibration, and their rows."""
    evaluation = with_map(trainer)
    if evaluation is None:
        return {}
    found = {
        key.removeprefix(f"{evaluation.prefix}_"): value
        for key, value in evaluation.metrics().items()
    }
    finite = {
        key: value if math.isfinite(value) else None for key, value in found.items()
    }
    before = {name: finite[name] for name in LOGGED_METRICS if name in finite}
    after = {name: finite[f"{name}_calibrated"] for name in before}
    rows = _rows(trainer, evaluation)
    return {
        "metrics": {
            **rows,
            "n_bins": evaluation.n_bins,
            "before": before,
            "after": after,
        }
    }


def report_of(
    trainer: Any, outside: Mapping[str, Any] | None = None
) -> CalibrationReport | None:
    """Return the report on the last evaluation before and after calibration, with sections on OOD logits by name.

    It is None if no logits were kept, and in the cases of `report_on`.
    """
    evaluation, scaler = trainer.last_evaluation, trainer.calibration_map
    if evaluation is None or not evaluation.rows:
        return None
    report = report_on(trainer, evaluation.predictions(trainer.class_names), scaler)
    if report is None:
        return None
    sections, inside = [], evaluation.logits_and_labels()[0].astype(np.float64)
    for name, found in ({} if report.multi_label else outside or {}).items():
        pair = inside, found.astype(np.float64)
        after = None if scaler is None else tuple(map(scaler.affine_map(), pair))
        sections.append(ood_section(name, pair, after))
    return replace(
        report, about=_rows(trainer, evaluation), out_of_distribution=tuple(sections)
    )


def report_on(
    trainer: Any, predictions: Predictions, scaler: Any, name: str | None = None
) -> CalibrationReport | None:
    """Return the report on logits before and after a fitted calibrator or None; the default name is the loss's.

    It is None without finite logits, and for multi-label labels that are neither 0 nor 1.
    """
    logits: Any = predictions.logits
    hard = (
        predictions.labels.ndim == 1 or np.isin(predictions.labels, (0, 1, -100)).all()
    )
    if not (hard and np.isfinite(logits).all()):
        return None
    wide, n_bins = (
        replace(predictions, logits=logits.astype(np.float64)),
        trainer.calibration_config.n_bins,
    )
    return report_on_predictions(
        wide, name or trainer.calibration_loss.name, n_bins, scaler
    )


def write_results(
    trainer: Any, folder: Path, outside: Mapping[str, Any] | None = None
) -> CalibrationReport | None:
    """Write the results of the last evaluation to the folder of a model with the trainer's calibrator, for the card.

    Return the report in the folder `calibration`, or None, with only metrics written, if no such logits were kept.
    """
    path, fitted, evaluation = folder / MAP_NAME, trainer.fitted_map, with_map(trainer)
    if not is_in(fitted, path):
        save_map(fitted.scaler, path, fitted.about)
    (folder / REPORT).unlink(missing_ok=True)  # It is of an earlier evaluation.
    record = json.loads(path.read_text(encoding="utf-8"))
    record.pop("metrics", None)
    record |= {
        key: value for key, value in fitted.about.items() if key != "folded"
    } | measured(trainer)
    report = None if evaluation is None else report_of(trainer, outside)
    if report is not None:
        weights = {key: record[key] for key in ("fingerprint",) if key in record}
        report = replace(report, about={**report.about, **weights})
        report.save(folder / REPORT_FOLDER)
    with whole_file(path) as unfinished:
        unfinished.write_text(
            json.dumps(record, allow_nan=False) + "\n", encoding="utf-8"
        )
    return report


def _rows(trainer: Any, evaluation: Any) -> dict[str, Any]:
    """The rows of an evaluation, and the number of rows to which the calibrator was fitted."""
    dataset, raw, precision = (
        evaluation.dataset,
        evaluation.raw,
        trainer.accelerator.mixed_precision,
    )
    is_train = dataset is not None and dataset is trainer.train_dataset
    split = "evaluation" if evaluation.prefix == "eval" else evaluation.prefix
    rows = {"split": "train" if is_train else split, **_described(dataset)}
    if precision in ("bf16", "fp16"):
        rows["autocast"] = precision
    if raw is not None and not raw.multi_label:
        rows["n"] = len(raw.top_label.correct)  # The number of tokens.
    if dataset is not None and dataset is trainer.calibration_split:
        rows["seen"] = rows.get("n") or trainer.fitted_map.about["n_examples"]
    return rows
