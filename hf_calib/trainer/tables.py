"""The table of an adaptive loss in the logs: all of its numbers for trackers, their ranges for people."""

from __future__ import annotations

from typing import Any

from transformers import PrinterCallback, ProgressCallback


def log_table(trainer: Any, values: dict[str, float]) -> None:
    """Log all the numbers; but print their ranges only, because nobody reads sixty numbers in a line."""
    due, handler = trainer.control.should_log, trainer.callback_handler
    callbacks = handler.callbacks
    handler.callbacks = [c for c in callbacks if not isinstance(c, PrinterCallback | ProgressCallback)]
    try:
        trainer.log(values)
    finally:
        handler.callbacks = callbacks
    show(trainer, _ranges(values))
    trainer.control.should_log = due  # the training loss may still have to be logged


def show(trainer: Any, values: dict[str, Any]) -> None:
    """Print values as the Trainer prints its log, without logging them."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, PrinterCallback | ProgressCallback):
            callback.on_log(trainer.args, trainer.state, trainer.control, logs=dict(values))


def _ranges(values: dict[str, float]) -> dict[str, Any]:
    """{"gamma_00": 1.2, "gamma_01": 0.9, "epoch": 2} -> {"gamma": "0.9 to 1.2", "epoch": 2}"""
    of_bins: dict[str, list[float]] = {}
    rest = {}
    for key, value in values.items():
        name, _, number = key.rpartition("_")
        if number.isdigit():
            of_bins.setdefault(name, []).append(value)
        else:
            rest[key] = value
    return {name: f"{min(found):.4g} to {max(found):.4g}" for name, found in of_bins.items()} | rest
