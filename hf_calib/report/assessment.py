"""One set of probabilities, measured: what a report has of the state before and after calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.sums import Interval
from hf_calib.report.coins import Coins
from hf_calib.report.tables import BinRow, ClassRow

if TYPE_CHECKING:
    from hf_calib.metrics import ConsistencyTest
    from hf_calib.report.labels import LabelMeasurements


class Overall(NamedTuple):
    """Mean confidence minus accuracy, with its normal interval.

    Args:
        gap: the difference.
        low: of the interval.
        high: of it.
        p_value: of such a difference, either way, if every confidence is the chance to be right.
        confidence: the mean.
        accuracy: of the same rows.
        n_examples: how many these are.
    """

    gap: float
    low: float
    high: float
    p_value: float
    confidence: float
    accuracy: float
    n_examples: int

    @classmethod
    def of(cls, confidences: FloatArray, correct: FloatArray, confidence_level: float) -> Overall:
        """Whether confidence exceeds accuracy overall.

        The interval is of the paired difference, so that what both share cancels. The test is of the variance under
        calibration: where all confidences are high and few errors were drawn, that of the sample is far too small.
        """
        difference = confidences - correct
        gap, n_examples = float(difference.mean()), len(difference)
        reach = 1.0
        if n_examples > 1:
            error = float(difference.std(ddof=1)) / np.sqrt(n_examples)
            reach = float(ndtri((1 + confidence_level) / 2)) * error
        p_value = Coins.of(confidences).p_value(float(correct.sum()))
        means = float(confidences.mean()), float(correct.mean())
        return cls(gap, gap - reach, gap + reach, p_value, *means, n_examples)


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What is known of a set of probabilities without its rows.

    Args:
        metrics: key -> value with interval; see `MEASURES`, or for several labels a row `LABEL_MEASURES`, averaged as
            "macro_..." and "micro_...".
        n_resamples: key -> how many its interval is from; fewer than asked for where that is slow, 0 for none.
        bins: the confidence bins that hold examples, from the lowest.
        overall: mean confidence beside accuracy; None for several labels.
        consistency: whether a perfectly calibrated model would show such an ECE by chance; None for several labels.
        classes: one row per class; none for several labels.
    """

    metrics: Mapping[str, Interval]
    n_resamples: Mapping[str, int]
    bins: tuple[BinRow, ...]
    overall: Overall | None = None
    consistency: ConsistencyTest | None = None
    classes: tuple[ClassRow, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Assessment(Measurements):
    """The same with the rows.

    Args:
        probs: (N, C), the probabilities themselves.
        confidences: (N,) of the predicted class; of several labels a row the probability of each known label.
        correct: (N,) 1 where the prediction is right, else 0; or where the label applies.
        gap: of several labels, mean probability minus how often labels apply, over all decisions; else None.
        labels: of several labels, one entry each, in their order.
    """

    probs: NDArray[Any] = field(repr=False, compare=False)
    confidences: FloatArray = field(repr=False, compare=False)
    correct: FloatArray = field(repr=False, compare=False)
    gap: Interval | None = None
    labels: tuple[LabelMeasurements, ...] = ()
