"""One set of probabilities, measured: what a report has of the state before and after calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from hf_calib.metrics.binning import FloatArray
from hf_calib.metrics.bootstrap import Interval
from hf_calib.report.tables import BinRow, ClassRow

if TYPE_CHECKING:
    from hf_calib.metrics import ConsistencyTest
    from hf_calib.report.labels import LabelMeasurements


@dataclass(frozen=True)
class Assessment:
    """One set of probabilities, measured.

    Args:
        metrics: key -> value with interval; see `MEASURES`, or for several labels a row `LABEL_MEASURES`, averaged as
            "macro_..." and "micro_...".
        n_resamples: key -> how many its interval is from; fewer than asked for where that is slow, 0 for none.
        bins: the confidence bins that hold examples, from the lowest.
        probs: (N, C), the probabilities themselves.
        confidences: (N,) of the predicted class; of several labels a row the probability of each known label.
        correct: (N,) 1 where the prediction is right, else 0; or where the label applies.
        consistency: whether a perfectly calibrated model would show such an ECE by chance; None for several labels.
        classes: one row per class; none for several labels.
        gap: of several labels, mean probability minus how often labels apply, over all decisions; else None.
        labels: of several labels, one entry each, in their order.
    """

    metrics: Mapping[str, Interval]
    n_resamples: Mapping[str, int]
    bins: tuple[BinRow, ...]
    probs: NDArray[Any] = field(repr=False, compare=False)
    confidences: FloatArray = field(repr=False, compare=False)
    correct: FloatArray = field(repr=False, compare=False)
    consistency: ConsistencyTest | None = None
    classes: tuple[ClassRow, ...] = ()
    gap: Interval | None = None
    labels: tuple[LabelMeasurements, ...] = ()
