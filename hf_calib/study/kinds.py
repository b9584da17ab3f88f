"""The kinds of tasks that a study compares: which metrics and which post-hoc maps each of them has."""

from __future__ import annotations

from typing import Any

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.metrics.sums import Binning
from hf_calib.report.labels import TITLES
from hf_calib.report.measures import MEASURES, Measure
from hf_calib.scaling.methods import SCALERS
from hf_calib.tasks import MULTI_LABEL, SINGLE_LABEL, TOKENS, LabelKind

# Of one label per row, and of tokens.
STUDY_METRICS: dict[str, Measure] = {
    **{
        key: MEASURES[key]
        for key in ("nll", "accuracy", "brier", "ece", "adaptive_ece", "classwise_ece", "smooth_ece")
    },
    "aurc": MEASURES["area_under_risk_coverage"],
}
# Of several labels a row. These are of all decisions, each label of each row one, as the trainer logs them; their
# Brier score is (p - y)^2, half of that of two classes.
DECISION_METRICS = ("nll", "accuracy", "brier", "ece")
# And these are means over the labels, with their names in `hf_calib.metrics.multi_label`.
MACRO_METRICS = {
    "classwise_ece": "ece",  # the trainer's name
    "macro_nll": "nll",
    "macro_brier": "brier",
    "macro_auroc": "auroc",
    "macro_average_precision": "average_precision",
}


# Errors that differences are of without what noise adds to each -> their bins.
UNBIASED: dict[str, Binning] = {"ece": "uniform", "adaptive_ece": "quantile"}
# Noise is added to each class's error, and a resample adds it again: an interval held the error in 0 to 80% of cases.
WITHOUT_INTERVAL = frozenset({"classwise_ece"})

_TITLES = {key: measure.title for key, measure in STUDY_METRICS.items()}
# By kind of task: key -> title.
METRIC_TITLES: dict[str, dict[str, str]] = {
    SINGLE_LABEL.name: _TITLES,
    TOKENS.name: _TITLES,
    MULTI_LABEL.name: {
        **{key: f"{LOGGED_METRICS[key]}, of all decisions" for key in DECISION_METRICS},
        **{key: TITLES[f"macro_{name}"] for key, name in MACRO_METRICS.items()},
    },
}
# Temperatures by another criterion than the NLL, as the papers take them.
_BY_CRITERION = {"temperature_ece": "ece", "temperature_adaptive_ece": "adaptive_ece"}
MAPS = tuple(dict.fromkeys((*SINGLE_LABEL.maps, *_BY_CRITERION, *MULTI_LABEL.maps)))  # of any kind


def make_scaler(kind: LabelKind, method: str, criterion: str | None = None) -> Any:
    """A map for this kind, to be fitted; a temperature by the criterion of the trainings.

    Raises:
        ValueError: if the kind does not have it.
    """
    maps = kind.maps if kind.sigmoid else (*kind.maps, *_BY_CRITERION)
    if method not in maps:
        requirement = f"be a map for {kind.name} predictions"
        raise InputValueError(expected("the method", requirement, method, f"take {', '.join(maps)}"))
    if method in _BY_CRITERION:
        return SCALERS["temperature"].load()(criterion=_BY_CRITERION[method])
    scaler = SCALERS[method].load()()
    if method == "temperature" and criterion is not None and not kind.sigmoid:
        scaler.set_params(criterion=criterion)
    if kind.sigmoid and "multi_label" in scaler.get_params():
        scaler.set_params(multi_label=True)
    return scaler
