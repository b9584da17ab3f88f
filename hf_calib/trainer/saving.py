"""Saving and pushing of a trainer's models: as trained, calibrated, with its card."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from hf_calib._errors import check
from hf_calib._hub import CARD, with_owner
from hf_calib.cards.card import repair_stock_card, write_card
from hf_calib.export.hub import push_folder
from hf_calib.export.saving import save_folded, standalone_copy
from hf_calib.losses import AdaptiveLoss
from hf_calib.models.labels import are_unnamed
from hf_calib.scaling.saved_map import MAP_NAME, title_of
from hf_calib.trainer.checkpoint import save_loss_state
from hf_calib.trainer.report import REPORT, measured, write_results

logger = logging.getLogger(__name__)


def warn_not_folded(trainer: Any) -> None:
    """Say once that a model is saved as trained, although there is a map."""
    if trainer.fitted_map is not None and not trainer.said_not_folded and trainer.is_world_process_zero():
        logger.warning(
            "save_model writes the model as trained, without its %s: a pipeline that loads it is not "
            "calibrated. Use save_calibrated_model(output_dir) for the calibrated model.",
            title_of(trainer.calibration_map),
        )
        trainer.said_not_folded = True


def save_beside(trainer: Any, folder: Path) -> None:
    """Write the gammas and the map beside a saved model; those of an earlier training are not this model's."""
    fitted = trainer.fitted_map
    if isinstance(trainer.calibration_loss, AdaptiveLoss):
        save_loss_state(trainer.calibration_loss, folder)
    if fitted is None or not fitted.is_in(folder / MAP_NAME):
        (folder / REPORT).unlink(missing_ok=True)
    if fitted is not None:
        fitted.save(folder)
    else:
        (folder / MAP_NAME).unlink(missing_ok=True)


def save_calibrated(trainer: Any, output_dir: str | os.PathLike[str]) -> None:
    """Save the model with its map folded in, over anything: a push replaces what the training has left."""
    fitted = trainer.fitted_map
    got = "no map" if trainer.calibration_config.make_scaler() is None else "none yet"
    way_out = "train with a calibration_dataset, or call fit_calibration_map()"
    check(fitted is not None, "the calibration map to be fitted", got, way_out)
    names = list(trainer.class_names.values())
    if are_unnamed(names) and len(names) == trainer.n_classes > 1 and trainer.is_world_process_zero():
        logger.warning(
            "The classes are saved as %s to %s: pipelines answer with these, and labels that are names fit none "
            "of them. Pass id2label and label2id where the model is loaded.",
            names[0],
            names[-1],
        )
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    state_dict = trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None

    def save() -> None:
        save_folded(
            standalone_copy(trainer.unwrapped_model, state_dict),
            fitted.scaler,
            output_dir,
            batch=trainer.example_batch,
            processing_class=trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None),
            about={**fitted.about, **measured(trainer)},
        )

    raise_everywhere(save, here=trainer.args.should_save)


def push(
    trainer: Any, message: str | None, blocking: bool, where: dict[str, Any], card: dict[str, Any]
) -> Any:
    """Save the calibrated model and its card in the output folder, and push that in one commit.

    Where to: token, revision, private and create_pr. What of it is None is as the trainer's arguments say.
    """
    args = trainer.args
    where["token"] = where["token"] or args.hub_token
    where["revision"] = where["revision"] or args.hub_revision
    where["private"] = args.hub_private_repo if where["private"] is None else where["private"]
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    repo_id = trainer.hub_model_id or args.hub_model_id or Path(args.output_dir).absolute().name
    running = getattr(trainer, "push_in_progress", None)
    if running is not None:  # one of the training's own, which reads the same folder
        running.wait_until_done()
    save_calibrated(trainer, args.output_dir)

    def upload() -> Any:
        # With its owner, without whom the card's lines would not find it.
        trainer.hub_model_id = with_owner(repo_id, where["token"])
        if isinstance(trainer.calibration_loss, AdaptiveLoss):
            save_loss_state(trainer.calibration_loss, args.output_dir)
        tags = card.get("tags") or []
        tags = [
            *([tags] if isinstance(tags, str) else tags),
            *(getattr(trainer.model, "model_tags", None) or []),
        ]
        name = {"model_name": repo_id.split("/")[-1]}
        trainer.create_model_card(**{**name, **card, "tags": list(dict.fromkeys(tags))})
        about: dict[str, Any] = {"message": message or "End of training", "run_as_future": not blocking}
        return push_folder(args.output_dir, trainer.hub_model_id, **where, **about)

    return raise_everywhere(upload, here=trainer.is_world_process_zero())


def raise_everywhere(work: Callable[[], Any], *, here: bool) -> Any:
    """Do some work on this process or on others; where it fails, all of them raise, and none waits for it."""
    done, failed = None, None
    if here:
        try:
            done = work()
        except Exception as error:
            failed = error
    reasons = [reason for reason in gather_object([failed and f"{failed}"]) if reason is not None]
    if failed is not None:
        raise failed
    if reasons:
        raise RuntimeError(f"Another process failed: {reasons[0]}")
    return done


@contextmanager
def summary_where_it_was(trainer: Any) -> Iterator[None]:
    """Within it, the log has the summary of the training before the final evaluation.

    The stock card makes a table of the evaluations before the summary, and expects them to have the same metrics; the
    final one has those with the map too.
    """
    history, place = trainer.state.log_history, trainer.summary_was_at
    if place is not None:
        summaries = [entry for entry in history if "train_runtime" in entry]
        others = [entry for entry in history if "train_runtime" not in entry]
        trainer.state.log_history = [*others[:place], *summaries, *others[place:]]
    try:
        yield
    finally:
        trainer.state.log_history = history


def complete_card(trainer: Any) -> None:
    """Repair the stock card, and add the section on calibration once a map is fitted."""
    if not trainer.is_world_process_zero():
        return
    folder, is_calibrated = Path(trainer.args.output_dir), trainer.fitted_map is not None
    base_model = getattr(trainer.model_config, "_name_or_path", None)
    repair_stock_card(folder / CARD, base_model, is_calibrated=is_calibrated)
    if is_calibrated:
        write_results(trainer, folder)
        write_card(folder, repo_id=trainer.hub_model_id or trainer.args.hub_model_id)
