"""Hyperparameter search: its objective, and what a calibration map does for rows that it is also fitted on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from sklearn.base import clone
from transformers.trainer_utils import BestRun

from hf_calib._errors import InputValueError, did_you_mean, expected, few
from hf_calib.metrics.logged import LOGGED_METRICS
from hf_calib.metrics.streaming import StreamingCalibration
from hf_calib.trainer.calibration_map import fit_once

N_FOLDS = 5
CALIBRATED = "_calibrated"
_METRICS = [f"eval_{key}{suffix}" for suffix in ("", CALIBRATED) for key in LOGGED_METRICS]


def objective_named(
    name: str, direction: Any, *, own_metrics: bool, has_map: bool
) -> Callable[[dict[str, float]], float]:
    """The function of an evaluation's metrics that takes the one of this name.

    Args:
        name: a log key, such as "eval_nll".
        direction: of the search: "minimize" or "maximize".
        own_metrics: whether the user computes more of them than there are here.
        has_map: whether the trainer fits a calibration map.

    Raises:
        ValueError: for a name that no evaluation logs, or the wrong direction.
    """
    if name not in (*_METRICS, "eval_loss") and not own_metrics:
        requirement = "be a function of an evaluation's metrics, or the name of one"
        raise InputValueError(
            expected("compute_objective", requirement, repr(name), did_you_mean(name, _METRICS))
        )
    metric = LOGGED_METRICS.get(name.removeprefix("eval_").removesuffix(CALIBRATED))
    right = "maximize" if metric is not None and metric.higher_is_better else "minimize"
    if direction != right and (metric is not None or name == "eval_loss"):
        way_out = "pass a function of the metrics as compute_objective for another aim"
        raise InputValueError(expected("direction", f"be {right!r} for {name}", repr(direction), way_out))
    if name.endswith(CALIBRATED) and metric is not None and not has_map:
        got = "none"
        way_out = f"set calibration_method, or search for {name.removesuffix(CALIBRATED)!r}"
        raise InputValueError(expected("a calibration map", f"be asked for with {name!r}", got, way_out))

    def objective(metrics: dict[str, float]) -> float:
        if name not in metrics:
            got = few(sorted(metrics))
            raise InputValueError(
                expected(
                    "the evaluation", f"have {name!r}", got, "search for one of these, or mend the trial"
                )
            )
        return metrics[name]

    return objective


def out_of_fold_metrics(
    accelerator: Accelerator,
    scaler: Any,
    logits: NDArray[Any],
    labels: NDArray[Any],
    *,
    prefix: str,
    n_bins: int,
) -> dict[str, float]:
    """Metrics after a map, of rows which are also all that it can be fitted on: each by the map of the other folds.

    The folds are random, and the same each time, so trials are compared on the same ones. A fit that fails gives
    NaN and a warning: a trial whose logits are NaN is no reason to lose a search.

    Args:
        accelerator: the trainer's; one process fits for all.
        scaler: not fitted.
        logits: (N, C).
        labels: (N,) int, or (N, C) of 0, 1 and -100.
        prefix: of the keys, such as "eval".
        n_bins: bins of the calibration errors.
    """
    folds = np.random.default_rng(0).permutation(np.arange(len(labels)) % N_FOLDS)
    mapped = np.empty(logits.shape, dtype=np.float32)
    try:
        for fold in np.unique(folds):
            held_out = folds == fold
            fitted = clone(scaler)
            fit_once(accelerator, fitted, logits[~held_out], labels[~held_out])
            mapped[held_out] = fitted.transform(logits[held_out])
        state = StreamingCalibration(n_bins=n_bins, multi_label=labels.ndim == 2)
        state.update(torch.from_numpy(mapped), torch.from_numpy(labels))
        values = state.compute()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        warnings.warn(
            f"The calibration map could not be scored: {reason}. Its metrics are logged as NaN, which fails a trial "
            "that is judged by them. Look at the trial's settings and the labels of the calibration split.",
            stacklevel=2,
        )
        values = dict.fromkeys(LOGGED_METRICS, math.nan)
    return {f"{prefix}_{name}{CALIBRATED}": value for name, value in values.items()}


def values_of_best_trial(best: Any, hp_space: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """All that the best trial set, the constants of its space too; nothing where there is no one best trial.

    Args:
        best: what the search returned.
        hp_space: its space, for an optuna trial.
    """
    if not isinstance(best, BestRun):  # several objectives, or another process than the first
        return {}
    if not best.run_id.isdigit():  # ray and wandb: their values are drawn already
        return best.hyperparameters
    from optuna.trial import FixedTrial

    try:
        return hp_space(FixedTrial(best.hyperparameters, int(best.run_id)))
    except Exception as error:  # the study may be of an older space; its result must not be lost
        warnings.warn(
            f"The best trial's arguments were not set: {type(error).__name__}: {error}. The search space does not take "
            "the values that the study holds. Set them from the returned hyperparameters.",
            stacklevel=3,
        )
        return {}
