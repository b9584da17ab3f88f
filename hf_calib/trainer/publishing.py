"""Saving and pushing of a trainer's models: as trained, calibrated, with its card."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import Trainer

from hf_calib._errors import InputValueError, expected
from hf_calib._hub import CARD, with_owner
from hf_calib.cards.card import repair_stock_card, write_card
from hf_calib.export.hub import push_folder
from hf_calib.export.saving import check_overwrites_no_original, loaded_from, save_folded, standalone_copy
from hf_calib.losses import AdaptiveLoss, CalibrationLoss
from hf_calib.predictions.labels import are_unnamed
from hf_calib.scaling.saved_map import MAP_NAME, title_of
from hf_calib.trainer.calibration_map import FittedMap
from hf_calib.trainer.checkpoint import save_loss_state
from hf_calib.trainer.config import hub_token_left_out
from hf_calib.trainer.report import REPORT, measured, write_results

logger = logging.getLogger(__name__)


class PublishingMixin(Trainer):
    """Saving and pushing of a trainer with a calibration map."""

    args: Any
    calibration_loss: CalibrationLoss
    calibration_config: Any  # a CalibrationConfig
    fitted_map: FittedMap | None
    model_config: Any
    class_names: Any  # {number: name}
    n_classes: Any  # an int, or None
    originals: set[str]  # folders and names that the model was loaded from
    _example_batch: dict[str, Any] | None = None
    _said_not_folded = False
    summary_was_at: int | None = None  # where the Trainer logged its summary, before the final evaluation

    @property
    def _output_dir(self) -> str:
        return str(self.args.output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as trained, as `Trainer.save_model` does: the map is not folded in, but lies beside it.

        What is to be served is written by `save_calibrated_model`.
        """
        if self.fitted_map is not None and not _internal_call and not self._said_not_folded:
            self._said_not_folded = True
            if self.is_world_process_zero():
                logger.warning(
                    "save_model writes the model as trained, without its %s: a pipeline that loads it is not "
                    "calibrated. Use save_calibrated_model(output_dir) for the calibrated model.",
                    title_of(self.fitted_map.scaler),
                )
        with hub_token_left_out():
            super().save_model(output_dir, _internal_call=True)
        if self.args.should_save:
            folder = Path(output_dir or self._output_dir)
            if isinstance(self.calibration_loss, AdaptiveLoss):
                save_loss_state(self.calibration_loss, folder)
            if self.fitted_map is None or not self.fitted_map.is_in(folder / MAP_NAME):
                (folder / REPORT).unlink(missing_ok=True)  # of an earlier training
            if self.fitted_map is not None:
                self.fitted_map.save(folder)
            else:  # that of an earlier training is not this model's
                (folder / MAP_NAME).unlink(missing_ok=True)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with hub_token_left_out():
            super()._push_from_checkpoint(checkpoint_folder)

    def save_calibrated_model(self, output_dir: str | os.PathLike[str]) -> None:
        """Save a copy of the model with the calibration map folded into its head.

        The directory needs no code of ours: `transformers.pipeline` on it gives the map's probabilities. It holds
        float32 weights and the tokenizer or image processor, and adapters are merged. The model in memory
        keeps its weights. `calibration.json` has the map as numbers.

        Args:
            output_dir: appears whole; in an existing directory, files are replaced and other weights removed.

        Raises:
            ValueError: if no map was fitted, or if the model has no head it can be folded into; if
                output_dir is where the model was loaded from, or holds adapters, which would be lost.
            OSError: if output_dir cannot be written; it is left as it was.
        """
        check_overwrites_no_original(output_dir, self.originals | loaded_from(self.model))
        self._save_calibrated_model(output_dir)

    def _save_calibrated_model(self, output_dir: str | os.PathLike[str]) -> None:
        """Save it over anything: a push replaces what the training has left in its own output folder."""
        fitted = self.fitted_map
        if fitted is None:
            got = "no map" if self.calibration_config.make_scaler() is None else "none yet"
            way_out = "train with a calibration_dataset, or call fit_calibration_map()"
            raise InputValueError(expected("the calibration map", "be fitted", got, way_out))
        names = list(self.class_names.values())
        if (
            are_unnamed(names)
            and len(names) == self.n_classes
            and len(names) > 1
            and self.is_world_process_zero()
        ):
            logger.warning(
                "The classes are saved as %s to %s: pipelines answer with these, and labels that are names fit none "
                "of them. Pass id2label and label2id where the model is loaded.",
                names[0],
                names[-1],
            )
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        state_dict = self.accelerator.get_state_dict(self.model_wrapped) if sharded else None

        def save() -> None:
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            save_folded(
                standalone_copy(model, state_dict),
                fitted.scaler,
                output_dir,
                batch=self._example_batch,
                processing_class=self.processing_class or getattr(self.data_collator, "tokenizer", None),
                about={**fitted.about, **measured(self)},
            )

        self.raise_everywhere(save, here=self.args.should_save)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        create_pr: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Push the calibrated model in one commit; without a map, what `Trainer.push_to_hub` pushes.

        The output folder then holds the calibrated model with its card, as `save_calibrated_model` and
        `create_model_card` write them. Weights in the repository that would be loaded in place of it are removed
        in the same commit; see `hf_calib.export.push_folder`. A push that fails leaves the repository as it was.

        Args:
            commit_message: of the commit.
            blocking: wait until all is uploaded.
            token: with write access; None takes `args.hub_token`.
            revision: the branch; None takes `args.hub_revision`.
            private: make a new repository private; None takes `args.hub_private_repo`.
            create_pr: open a pull request instead of changing the branch.
            **kwargs: for `create_model_card`.

        Returns:
            The commit, or a future of it where `blocking` is off; None on all processes but the first.

        Raises:
            ValueError: if the Hub refuses the push; or for create_pr without a map.
            OSError: if the model cannot be saved, or the Hub cannot be reached.
            RuntimeError: on the other processes, if the first one raises.
        """
        if self.fitted_map is None:
            if create_pr:
                got, way_out = "none", "train with a calibration_dataset, or push without create_pr"
                raise InputValueError(
                    expected("the calibration map", "be fitted for create_pr", got, way_out)
                )
            if private is not None:
                kwargs["private"] = private
            return super().push_to_hub(commit_message, blocking, token, revision, **kwargs)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        repo_id = self.hub_model_id or self.args.hub_model_id or Path(self._output_dir).absolute().name
        self._finish_current_push()  # one of the training's own, which reads the same folder
        self._save_calibrated_model(self._output_dir)

        def push() -> Any:
            # With its owner, without whom the card's lines would not find it.
            full_name = with_owner(repo_id, token or self.args.hub_token)
            self.hub_model_id = full_name  # type: ignore[assignment]  # transformers declares None only
            if isinstance(self.calibration_loss, AdaptiveLoss):
                save_loss_state(self.calibration_loss, self._output_dir)
            kwargs.setdefault("model_name", repo_id.split("/")[-1])
            tags = kwargs.get("tags") or []
            of_the_model = getattr(self.model, "model_tags", None) or []
            kwargs["tags"] = list(
                dict.fromkeys([*([tags] if isinstance(tags, str) else tags), *of_the_model])
            )
            self.create_model_card(**kwargs)
            return push_folder(
                self._output_dir,
                full_name,
                token=token or self.args.hub_token,
                private=self.args.hub_private_repo if private is None else private,
                revision=revision or self.args.hub_revision,
                create_pr=create_pr,
                message=commit_message or "End of training",
                run_as_future=not blocking,
            )

        return self.raise_everywhere(push, here=self.is_world_process_zero())

    def raise_everywhere(self, work: Callable[[], Any], *, here: bool) -> Any:
        """Do some work on this process or on others; where it fails, all of them raise, and none waits for it."""
        done, failed = None, None
        if here:
            try:
                done = work()
            except Exception as error:
                failed = error
        reasons = gather_object([None if failed is None else f"{failed}"])
        if failed is not None:
            raise failed
        for reason in reasons:
            if reason is not None:
                raise RuntimeError(f"Another process failed: {reason}")
        return done

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the Trainer's model card, with a section on calibration once a map is fitted.

        The arguments are those of `Trainer.create_model_card`. The report on the last evaluation is written beside
        the card, in the folder `calibration`.
        """
        history = self.state.log_history
        if self.summary_was_at is not None:
            # The stock card makes a table of the evaluations before the summary, and expects them to have the same
            # metrics; the final one has those with the map too.
            for_card = list(history)
            for entry in [entry for entry in history if "train_runtime" in entry]:
                for_card.remove(entry)
                for_card.insert(self.summary_was_at, entry)
            self.state.log_history = for_card
        try:
            super().create_model_card(*args, **kwargs)
        finally:
            self.state.log_history = history
        folder = Path(self._output_dir)
        if self.is_world_process_zero():
            base_model = getattr(self.model_config, "_name_or_path", None)
            repair_stock_card(folder / CARD, base_model, is_calibrated=self.fitted_map is not None)
            if self.fitted_map is not None:
                write_results(self, folder)
                write_card(folder, repo_id=self.hub_model_id or self.args.hub_model_id)
