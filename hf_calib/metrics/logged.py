"""The table of the metrics that the trainer logs: their keys, their titles, and which direction is better.

The streaming evaluation, the trainer's arguments, the model card, the report and the recipes all read it.
"""

from __future__ import annotations

from typing import NamedTuple


class LoggedMetric(NamedTuple):
    """A row of `LOGGED_METRICS`."""

    title: str
    higher_is_better: bool = False


# By log key: the trainer logs eval_ece, and eval_ece_calibrated with the temperature.
LOGGED_METRICS: dict[str, LoggedMetric] = {
    "accuracy": LoggedMetric("Accuracy", higher_is_better=True),
    "nll": LoggedMetric("Negative log-likelihood (nats)"),
    "brier": LoggedMetric("Brier score"),
    "ece": LoggedMetric("Expected calibration error (ECE)"),
    "adaptive_ece": LoggedMetric("Adaptive ECE"),
    "classwise_ece": LoggedMetric("Classwise ECE"),
    "mce": LoggedMetric("Maximum calibration error"),
}


def lower_is_better(log_key: str) -> bool:
    """Whether a log key names one of these metrics of which the smaller value is the better.

    >>> [lower_is_better(key) for key in ("eval_ece", "eval_nll_calibrated", "eval_accuracy", "eval_piece")]
    [True, True, False, False]
    """
    name = "_" + log_key.removesuffix("_calibrated")
    return any(name.endswith(f"_{key}") for key, row in LOGGED_METRICS.items() if not row.higher_is_better)
