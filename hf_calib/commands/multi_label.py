"""`hf-calib evaluate` and `calibrate` of a model with several labels a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from hf_calib._errors import InputValueError, expected, few
from hf_calib._files import check_output, whole_folder
from hf_calib.commands.calibrate import Calibration
from hf_calib.commands.evaluate import Progress, Stages, in_silence, name_of
from hf_calib.commands.fitting import fit, halves
from hf_calib.commands.inputs import config_of, tags_tokens
from hf_calib.report import MultiLabelReport, multi_label_report
from hf_calib.report.writing import write_report, write_to
from hf_calib.scaling.methods import SCALERS, fitted_numbers

# A model needs torch and transformers: they are imported where one is named.
if TYPE_CHECKING:
    from hf_calib.data.multi_label import LabelLayout
    from hf_calib.predictions.images import LabelledImages
    from hf_calib.predictions.texts import LabelledTexts

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
    about = {**rows.source(), "fingerprint": fingerprint(classifier.model)}
    report = replace(report, notes=rows.notes(read.inputs), about=about)
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
) -> Calibration:
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
    from hf_calib.commands.saving import Original
    from hf_calib.export.heads import head_loses_bias
    from hf_calib.export.saving import check_overwrites_no_original, replace_model

    if method is not None and method not in METHODS:
        requirement = f"be one of {', '.join(METHODS)} for several labels a row"
        raise InputValueError(expected("method", requirement, repr(method), "auto is the default"))
    check_output(output)
    check_overwrites_no_original(output, [source])
    stages(f"reading {rows.data}")
    data = rows.load()
    test_data = None if test is None else test.load("test_data")
    stages(f"loading {source}")
    original = Original.load(source, rows, multi_label=True, trust_remote_code=trust_remote_code)
    classifier = original.classifier
    if method is None:
        loses_bias = head_loses_bias(classifier.model, len(classifier.class_names))
        method = "temperature" if loses_bias else "auto"
    scaler = SCALERS[method].load()()
    if method != "per_label_temperature":
        scaler.set_params(multi_label=True)

    found = _read(classifier, rows, layout, data)
    tested = None if test is None else _read(classifier, test, layout, test_data)
    stages(f"predicting {len(found.labels) + (0 if tested is None else len(tested.labels)):,} rows")
    logits = rows.predict_logits(classifier, found.inputs, progress)
    if tested is None:
        half, rest, held_out = halves(np.zeros(len(logits), np.int64), seed)
        fitted, reported = ((logits[part], found.labels[part]) for part in (half, rest))
    else:
        fitted = (logits, found.labels)
        reported = (rows.predict_logits(classifier, tested.inputs, progress), tested.labels)
        held_out = f"all {len(tested.labels):,} rows of the test data"
    n_fitted, n_reported = len(fitted[0]), len(reported[0])
    stages(f"fitting on {n_fitted:,} rows, measuring {n_reported:,}")
    warned = fit(scaler, *fitted)
    report = _report(source, classifier, *reported, n_bins, scaler)
    inputs = [each.inputs for each in (found, tested) if each is not None]
    notes = tuple(note for each in inputs for note in rows.notes(each))
    report = replace(report, notes=notes)

    stages(f"saving to {output}")
    measured_on = {**(test or rows).source(), "n": n_reported}
    with whole_folder(output, replace_model) as folder:
        fitting = {"split": "calibration", "n_examples": n_fitted}
        weights, difference = original.save_calibrated(
            folder, scaler, data, logits, fitting=fitting, measured_on=measured_on
        )
        report = replace(report, about={**measured_on, "fingerprint": weights})
        write_report(report, folder / "calibration")
    return Calibration(
        method,
        getattr(scaler, "criterion", None),
        getattr(scaler, "choice_", None),
        fitted_numbers(scaler),
        n_fitted,
        held_out,
        report,
        (*original.notes, *notes, *warned),
        difference,
    )
