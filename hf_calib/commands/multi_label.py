"""`hf-calib evaluate` and `calibrate` of a model with several labels a row."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from hf_calib._errors import InputValueError, expected, few
from hf_calib._files import check_output, whole_folder
from hf_calib.commands.calibrate import SERVED, checked_difference, served_scores
from hf_calib.commands.evaluate import LabelledTexts, Progress, Stages, in_silence, name_of
from hf_calib.commands.inputs import config_of, tags_tokens
from hf_calib.report import MultiLabelReport, multi_label_report
from hf_calib.report.writing import write_report, write_to
from hf_calib.scaling.methods import SCALERS, fitted_numbers

# A model needs torch and transformers: they are imported where one is named.
if TYPE_CHECKING:
    from hf_calib.data.multi_label import LabelLayout
    from hf_calib.predictions.images import LabelledImages

    Rows = LabelledTexts | LabelledImages

METHODS = ("auto", "temperature", "per_label_temperature")


def is_multi_label(source: str, *, trust_remote_code: bool = False) -> bool | None:
    """Whether a model's config says so; None for one that cannot be read, which is left to the loading."""
    config = config_of(source, trust_remote_code)
    if config is None:
        return None
    return not tags_tokens(config) and config.problem_type == "multi_label_classification"


def check_options(several: bool | None, sets: Sequence[str | None], others: Mapping[str, object]) -> None:
    """Refuse options of several labels a row where the model has one class, and the other way round.

    Args:
        several: whether the model has several; None where its config cannot be read.
        sets: the options that say how sets of labels are written.
        others: options that go with one class only.
    """
    if any(sets) and several is False:
        requirement = "go with a model whose problem_type is multi_label_classification"
        options = "--label-separator, --label-columns and --no-label"
        raise InputValueError(expected(options, requirement, "one with a class a row", "leave them out"))
    for option, value in others.items():
        if value and several:
            got, way_out = "one with several labels a row", "leave it out"
            raise InputValueError(expected(option, "go with a model with one class a row", got, way_out))


class _Rows(NamedTuple):
    """Texts or images that a model can read, with their labels (N, C)."""

    inputs: Any
    labels: NDArray[np.float32]


def _read(classifier: Any, rows: Rows, layout: LabelLayout, data: Any) -> _Rows:
    from hf_calib.data.multi_label import label_set_ids, multi_hot_matrix

    names = classifier.class_names if rows.class_names is None else tuple(rows.class_names)
    if len(names) != len(classifier.class_names) or len(set(names)) < len(names):
        requirement = f"name the model's {len(classifier.class_names)} labels once each"
        raise InputValueError(expected("class_names", requirement, few(names), "follow the model's order"))
    ids = label_set_ids(rows.data, layout.read(rows.data, data), names)
    return _Rows(rows.encode_inputs(classifier, data), multi_hot_matrix(ids, len(names)))


def evaluate_multi_label(
    source: str,
    rows: Rows,
    layout: LabelLayout,
    *,
    n_bins: int = 15,
    output: Path | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    stages: Stages = in_silence,
) -> MultiLabelReport:
    """Report the calibration of a multi-label model on labelled texts or images.

    Args:
        source: a classifier of texts or images on the Hub or in a folder, whose `problem_type` is
            multi_label_classification.
        rows: labelled texts or images that it was not trained on.
        layout: where the labels of a row stand: names of the model's labels (or `class_names`), or their ids.
        n_bins: M, at least 1.
        output: a folder for the report, see `write_report`.
        trust_remote_code: whether code that comes with the model may run.
        progress: called with the number of rows just predicted and of all rows.
        stages: called with the name of each stage as it begins.

    Raises:
        ValueError: if model or data cannot be loaded, or do not fit; a label that is none of the model's is named
            with its row.
        TypeError: if columns are of the wrong kind.
    """
    from hf_calib.export.fingerprint import fingerprint

    check_output(output)
    stages(f"reading {rows.data}")
    data = rows.load()
    stages(f"loading {source}")
    classifier: Any = rows.load_classifier(source, multi_label=True, trust_remote_code=trust_remote_code)
    read = _read(classifier, rows, layout, data)
    stages(f"predicting {len(data):,} rows")
    logits = rows.predict_logits(classifier, read.inputs, progress)
    stages(f"measuring {len(data):,} rows")
    report = _report(source, classifier, logits, read.labels, n_bins)
    report = replace(report, about={**rows.source(), "fingerprint": fingerprint(classifier.model)})
    write_to(output, report)
    return report


def _report(
    source: str,
    classifier: Any,
    logits: NDArray[np.float32],
    labels: NDArray[np.float32],
    n_bins: int,
    scaler: Any = None,
) -> MultiLabelReport:
    return multi_label_report(
        expit(logits.astype(np.float64)),
        labels,
        calibrated=None if scaler is None else scaler.predict_proba(logits),
        n_bins=n_bins,
        class_names=classifier.class_names,
        name=name_of(source),
    )


@dataclass(frozen=True)
class MultiLabelCalibration:
    """The outcome of `calibrate_multi_label`.

    Args:
        method: one of `METHODS`.
        choice: what "auto" has chosen; None for another method.
        numbers: the fitted parameters, where these are at most a number per label.
        n_fitted: rows the scaler was fitted on.
        held_out: which rows the report is on, in words.
        report: before and after calibration, on rows that the scaler has not seen.
        notes: warnings of the fit.
        served_difference: largest difference between the probabilities of a pipeline with the saved model and
            the scaler's.
    """

    method: str
    choice: str | None
    numbers: Mapping[str, Any]
    n_fitted: int
    held_out: str
    report: MultiLabelReport
    notes: tuple[str, ...]
    served_difference: float

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        return {**vars(self), "notes": list(self.notes), "report": self.report.to_dict()}


def calibrate_multi_label(
    source: str,
    rows: Rows,
    layout: LabelLayout,
    output: Path,
    *,
    test: Rows | None = None,
    method: str | None = None,
    n_bins: int = 15,
    seed: int = 0,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    stages: Stages = in_silence,
) -> MultiLabelCalibration:
    """Fit a scaler on a multi-label model's logits, fold it into the head, and save the model for a plain pipeline.

    Args:
        source: see `evaluate_multi_label`, also for rows and layout.
        rows: labelled texts or images that it was not trained on, to fit on.
        layout: of the labels of rows and test.
        output: the calibrated model's folder; the report is in its folder `calibration`.
        test: rows to report on; without them, the scaler is fitted on a random half of the rows, and the report is
            on the other half.
        method: one of `METHODS`; None is "auto", or a temperature where the head keeps no bias.
        n_bins: M, at least 1.
        seed: of the draw of that half.
        trust_remote_code: whether code that comes with the model may run.
        progress: called with the number of rows just predicted and of all rows.
        stages: called with the name of each stage as it begins.

    Raises:
        ValueError: if model, data or method are wrong, or the scaler cannot be folded.
        TypeError: if columns are of the wrong kind.
        RuntimeError: if a pipeline with the saved model gives other probabilities; nothing is saved then.
    """
    import transformers

    from hf_calib.export.fold import OF_THE_MAP, check_can_be_folded
    from hf_calib.export.heads import head_loses_bias
    from hf_calib.export.saving import (
        check_overwrites_no_original,
        replace_model,
        standalone_copy,
        write_folded,
    )
    from hf_calib.export.unfold import unfold
    from hf_calib.scaling.saved_map import recorded_in

    if method is not None and method not in METHODS:
        requirement = f"be one of {', '.join(METHODS)} for several labels a row"
        raise InputValueError(expected("method", requirement, repr(method), "auto is the default"))
    check_output(output)
    check_overwrites_no_original(output, [source])
    stages(f"reading {rows.data}")
    data = rows.load()
    test_data = None if test is None else test.load()
    stages(f"loading {source}")
    classifier: Any = rows.load_classifier(source, multi_label=True, trust_remote_code=trust_remote_code)
    notes: tuple[str, ...] = ()
    if recorded_in(classifier.model.config).get("folded"):
        notes = (
            f"{source} had a map in its head, which was undone first. {unfold(classifier.model).sentence()}",
        )
    recorded = check_can_be_folded(classifier.model)
    if method is None:
        loses_bias = head_loses_bias(classifier.model, len(classifier.class_names))
        method = "temperature" if loses_bias else "auto"
    scaler = SCALERS[method].load()()
    if method != "per_label_temperature":
        scaler.set_params(multi_label=True)

    found = _read(classifier, rows, layout, data)
    tested = None if test is None else _read(classifier, test, layout, test_data)
    stages(f"predicting {len(found.labels) + (0 if tested is None else len(tested.labels)):,} rows")
    logits, test_logits = (
        None if each is None else rows.predict_logits(classifier, each.inputs, progress)
        for each in (found, tested)
    )
    assert logits is not None
    if tested is not None and test_logits is not None:
        fitted, reported = (logits, found.labels), (test_logits, tested.labels)
        held_out = f"all {len(tested.labels):,} rows of the test data"
    else:
        if len(logits) < 2:
            got, way_out = len(logits), "pass more rows, or test data"
            raise InputValueError(expected("the rows", "be at least 2, to be split in half", got, way_out))
        drawn = np.random.default_rng(seed).permutation(len(logits))
        half, rest = np.sort(drawn[: len(drawn) // 2]), np.sort(drawn[len(drawn) // 2 :])
        fitted, reported = ((logits[part], found.labels[part]) for part in (half, rest))
        held_out = f"the other {len(rest):,} of {len(logits):,} rows, drawn with seed {seed}"

    stages(f"fitting on {len(fitted[0]):,} rows, measuring {len(reported[0]):,}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.fit(*fitted)
    notes += tuple(str(warning.message) for warning in caught)
    report = _report(source, classifier, *reported, n_bins, scaler)

    stages(f"saving to {output}")
    measured_on = {**(test or rows).source(), "n": report.n_examples}
    kept: dict[str, Any] = {key: recorded[key] for key in ("loss", "loss_kwargs") if key in recorded}
    fitting: dict[str, Any] = {"split": "calibration", "n_examples": len(fitted[0])}
    about: dict[str, Any] = {
        **kept,
        **fitting,
        "data": {"calibration": {**rows.source(), "n": len(fitted[0])}, "test": measured_on},
    }
    with whole_folder(output, replace_model) as folder:
        plain = standalone_copy(classifier.model)
        training = {key: value for key, value in recorded.items() if key not in OF_THE_MAP}
        plain.config.calibration = {**training, **fitting}
        first: Any = rows.as_served(data, SERVED)
        batch = rows.first_batch(classifier, first)
        weights = write_folded(
            plain, scaler, folder, batch=batch, processing_class=classifier.processing_class, about=about
        )
        served = served_scores(transformers.pipeline, folder, rows, classifier, first, trust_remote_code)
        difference = checked_difference(served, scaler.predict_proba(logits[: len(first)]))
        report = replace(report, about={**measured_on, "fingerprint": weights})
        write_report(report, folder / "calibration")
    choice, numbers = getattr(scaler, "choice_", None), fitted_numbers(scaler)
    return MultiLabelCalibration(method, choice, numbers, len(fitted[0]), held_out, report, notes, difference)
