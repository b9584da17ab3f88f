"""Passes of the model over held-out rows in the middle of a training, which leave everything else as it was."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DefaultFlowCallback, Trainer
from transformers.trainer_callback import CallbackHandler

from hf_calib.trainer.evaluation_pass import EvaluationPass
from hf_calib.trainer.random_state import random_state_left_as_found


class HeldOutPasses:
    """Runs a trainer's model over rows; mode, random streams, log and progress bars stay as found.

    Args:
        trainer: whose calibration split they are of by default.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.loaders: dict[int | None, tuple[Any, Any]] = {}

    def over_split(
        self, *, n_samples: int | None, keep_logits: bool, sample_tokens: bool = False
    ) -> EvaluationPass:
        """Over the calibration split, or a fixed random subset of it."""
        return self.over(self._loader(n_samples), keep_logits=keep_logits, sample_tokens=sample_tokens)

    def over(
        self,
        loader: Any,
        *,
        keep_logits: bool = False,
        sample_tokens: bool = False,
    ) -> EvaluationPass:
        """Over the rows of a loader of `get_test_dataloader`."""
        trainer = self.trainer
        keep = {"keep_logits": keep_logits, "sample_tokens": sample_tokens}
        n_bins = trainer.calibration_config.n_bins
        current = EvaluationPass(trainer.accelerator, "", n_bins=n_bins, **keep)
        model: Any = trainer.model
        visible, modes = trainer.callback_handler, [(module, module.training) for module in model.modules()]
        quiet = CallbackHandler(
            [DefaultFlowCallback()], model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler
        )
        try:
            with random_state_left_as_found(), trainer.recording(current):
                trainer.callback_handler = quiet
                Trainer.evaluation_loop(trainer, loader, "Calibration", True)
        finally:
            trainer.callback_handler = visible
            for module, mode in modes:
                module.training = mode
        current.finish()
        return current

    def _loader(self, n_samples: int | None) -> Any:
        """Made once for a split: accelerate remembers every loader that it prepares."""
        trainer = self.trainer
        split = trainer.calibration_split
        made_for, loader = self.loaders.get(n_samples, (None, None))
        if made_for is not split:
            dataset = split
            if n_samples is not None and n_samples < len(split):  # the same random examples each time
                generator = torch.Generator().manual_seed(trainer.args.seed)
                rows = torch.randperm(len(split), generator=generator)[:n_samples].tolist()
                by_index = hasattr(split, "select")
                dataset = split.select(rows) if by_index else torch.utils.data.Subset(split, rows)
            # get_eval_dataloader would, with persistent workers, give the loader of the evaluation set.
            loader = trainer.get_test_dataloader(dataset)
            self.loaders[n_samples] = (split, loader)
        return loader
