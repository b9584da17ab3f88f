"""Ten crops of each test image: what a trained model says of them on average."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_expit, log_softmax, logsumexp
from sklearn.base import clone

from hf_calib.report import CalibrationReport, MultiLabelReport
from hf_calib.trainer.report import report_on

if TYPE_CHECKING:
    from hf_calib.trainer.trainer import CalibrationTrainer


def predict_views(
    trainer: CalibrationTrainer, views: Sequence[Any]
) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Logits (N, C) of the mean probabilities over views of the same rows, and the labels; called by all processes."""
    outputs = [trainer.predict(view) for view in views]
    labels = np.asarray(outputs[0].label_ids)
    logits = np.stack([np.asarray(output.predictions, np.float64) for output in outputs])
    return logits_of_mean(logits, multi_label=labels.ndim == 2), labels


def logits_of_mean(logits: NDArray[np.float64], *, multi_label: bool) -> NDArray[np.float64]:
    """Logits whose softmax, or sigmoid of several labels a row, is the mean probability.

    Args:
        logits: (V, N, C) of V views.
        multi_label: whether each logit has a sigmoid.

    Returns:
        (N, C).

    >>> two = np.log([[[0.9, 0.1]], [[0.5, 0.5]]])
    >>> np.exp(logits_of_mean(two, multi_label=False)).round(6)
    array([[0.7, 0.3]])
    """
    if multi_label:
        return logsumexp(log_expit(logits), axis=0) - logsumexp(log_expit(-logits), axis=0)
    return logsumexp(log_softmax(logits, axis=-1), axis=0) - np.log(len(logits))


def ten_crop_report(
    trainer: CalibrationTrainer, views: Mapping[str, tuple[NDArray[np.float64], NDArray[Any]]]
) -> tuple[CalibrationReport | MultiLabelReport | None, Any]:
    """The report on the means, None where they are not finite, and the scaler of its "after".

    The trainer's map is for the saved model, which sees one view of an image. The mean of several probabilities is less
    confident, so a map of the same method is fitted to the means on the calibration rows.

    Args:
        trainer: with a trained model.
        views: what `predict_views` found of "calibration" and "test".
    """
    if not all(np.isfinite(logits).all() for logits, _ in views.values()):
        return None, None
    scaler = trainer.calibration_map
    if scaler is not None:
        scaler = clone(scaler).fit(*views["calibration"])
    name = f"{trainer.calibration_loss.name}, mean of ten crops"
    return report_on(trainer, *views["test"], scaler, name=name), scaler
