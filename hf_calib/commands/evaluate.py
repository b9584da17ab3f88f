"""`hf-calib evaluate`: the calibration of a file of predictions, or of a model on labelled texts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_calib._errors import InputValueError, expected
from hf_calib._files import check_output
from hf_calib._names import short_names
from hf_calib.predictions.files import (
    FORMATS,
    Predictions,
    check_same_classes,
    load_predictions,
    load_unlabelled,
)
from hf_calib.predictions.soft_labels import load_soft_labels
from hf_calib.report import CalibrationReport, calibration_report, ood_section, with_entities
from hf_calib.report.writing import write_to

# Models and texts need torch and transformers: they are imported where a model is run, so that commands on files
# of predictions start without them.
if TYPE_CHECKING:
    from hf_calib.commands.inputs import Labelled

# Called with the number of rows just predicted and of all rows; called with the name of a stage as it begins.
Progress = Callable[[int, int], None]
Stages = Callable[[str], None]


def in_silence(stage: str) -> None:
    """The stages of a caller who does not want to see them."""


def is_predictions_file(source: str) -> bool:
    """Whether a name means a file of predictions, rather than a model.

    >>> is_predictions_file("logits.csv.gz"), is_predictions_file("distilbert/distilbert-base")
    (True, False)
    """
    return os.path.isfile(source) or Path(source.removesuffix(".gz")).suffix.lower() in FORMATS


def name_of(source: str) -> str:
    """A name for titles: the file's without its suffix, or the model's.

    >>> name_of("runs/logits.csv.gz"), name_of("someone/some-bert-2.1")
    ('logits', 'someone/some-bert-2.1')
    """
    if is_predictions_file(source):
        return Path(source).name.split(".")[0]
    return Path(source).resolve().name if os.path.isdir(source) else source


def check_data(source: str, data: str | None) -> None:
    """Refuse data beside a file of predictions, which holds the labels itself, and a model without data."""
    if is_predictions_file(source) and data is not None:
        way_out = "the file of predictions holds the labels: leave data out, or name a model"
        raise InputValueError(expected("data", "be given with a model only", data, way_out))
    if data is None and not is_predictions_file(source):
        way_out = "name labelled texts: a file, a folder or a dataset on the Hub"
        raise InputValueError(expected("data", "be given with a model", "none", way_out))


def evaluate_predictions(
    source: str,
    *,
    label_column: str = "label",
    n_bins: int = 15,
    output: Path | None = None,
    ood: Sequence[str] = (),
    soft_labels: Path | None = None,
    stages: Stages = in_silence,
) -> CalibrationReport:
    """Report the calibration of a file of predictions.

    Args:
        source: see `load_predictions`, also for label_column.
        label_column: of labels, in a table.
        n_bins: M, at least 1.
        output: a folder for the report, see `write_report`.
        ood: files of the same model's predictions for inputs from elsewhere, of none of the classes.
        soft_labels: a file of the same rows' soft labels, see `load_soft_labels`.
        stages: called with the name of each stage as it begins.

    Raises:
        ValueError: if a file is missing, unreadable or wrong.
        TypeError: if columns or arrays are of the wrong kind.
    """
    check_output(output)
    stages(f"reading {source}")
    predictions = load_predictions(source, label_column=label_column)
    shares = None
    if soft_labels is not None:
        shares = load_soft_labels(soft_labels, len(predictions), predictions.n_classes)
    elsewhere = {}
    for path, name in zip(ood, short_names(ood), strict=True):
        stages(f"reading {path}")
        elsewhere[name] = _of_the_same_kind(predictions, source, path, label_column)
    stages(f"measuring {len(predictions):,} rows")
    report = report_on(predictions, source, n_bins, soft_labels=shares)
    found = tuple(
        ood_section(
            name, (predictions.as_logits(), other.as_logits()), probabilities=predictions.logits is None
        )
        for name, other in elsewhere.items()
    )
    report = replace(report, out_of_distribution=found)
    write_to(output, report)
    return report


def _of_the_same_kind(predictions: Predictions, source: str, other: str, label_column: str) -> Predictions:
    """Predictions from elsewhere by the same model; raises if they cannot be."""
    found = load_unlabelled(other, label_column=label_column)
    check_same_classes("the data from elsewhere", predictions, found)
    kinds = ["logits" if each.probs is None else "probabilities" for each in (predictions, found)]
    if kinds[0] != kinds[1]:
        requirement, way_out = f"hold {kinds[0]}, as {Path(source).name} does", "use predictions of one kind"
        raise InputValueError(expected("the data from elsewhere", requirement, kinds[1], way_out))
    return found


def evaluate_model(
    source: str,
    rows: Labelled,
    *,
    n_bins: int = 15,
    output: Path | None = None,
    ood: Sequence[Labelled] = (),
    soft_labels: Path | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    stages: Stages = in_silence,
) -> CalibrationReport:
    """Report the calibration of a model on labelled texts, tagged sentences or images.

    Args:
        source: a classifier of sequences, tokens or images, on the Hub or in a folder.
        rows: what it reads, labelled, that it was not trained on; `labelled_rows` chooses by the model.
        n_bins: M, at least 1.
        output: a folder for the report, see `write_report`.
        ood: such inputs from elsewhere, of none of the classes, whose labels are not read. Where the model has a map
            in its head, they are told apart before it, too.
        soft_labels: a file of the same rows' soft labels, see `load_soft_labels`.
        trust_remote_code: whether code that comes with the model may run.
        progress: called with the number of rows just predicted and of all rows.
        stages: called with the name of each stage as it begins.

    Raises:
        ValueError: if model or data cannot be loaded, or do not fit.
        TypeError: if columns are of the wrong kind.
    """
    from hf_calib.export.fingerprint import fingerprint
    from hf_calib.export.unfold import unfold
    from hf_calib.scaling.saved_map import recorded_in

    check_output(output)
    stages(f"reading {rows.data}")
    data = rows.load()
    elsewhere = []
    for others in ood:
        stages(f"reading {others.data}")
        elsewhere.append(others.load("ood_data"))
    stages(f"loading {source}")
    # Both kinds of rows have the same methods, for a classifier of their kind.
    classifier: Any = rows.load_classifier(source, trust_remote_code=trust_remote_code)
    shares = None
    if soft_labels is not None:
        shares = load_soft_labels(soft_labels, len(data), len(classifier.class_names))
    stages(rows.encoding.format(len(data)))
    encoded = rows.encode(classifier, data)
    names = short_names([each.data for each in ood])
    outside = {
        name: others.encode_inputs(classifier, loaded)
        for name, others, loaded in zip(names, ood, elsewhere, strict=True)
    }
    stages(f"predicting {len(data):,} rows")
    found = encoded.predict(batch_size=rows.batch_size, on_progress=progress)
    stages(f"measuring {len(found):,} rows")
    about = {**rows.source(), "options": rows.options(), "fingerprint": fingerprint(classifier.model)}
    notes = tuple(note for inputs in (encoded.inputs, *outside.values()) for note in rows.notes(inputs))
    report = report_on(found, source, n_bins, soft_labels=shares)
    report = replace(report, about=about, notes=(*report.notes, *notes))
    if outside:
        predict = partial(rows.predict_logits, classifier, on_progress=progress)
        stages("predicting inputs from elsewhere")
        states = [(found.as_logits(), {name: predict(inputs) for name, inputs in outside.items()})]
        if recorded_in(classifier.model.config).get("folded"):
            stages("predicting without the map")
            unfold(classifier.model)
            raw = {name: predict(inputs) for name, inputs in outside.items()}
            states.insert(0, (predict(encoded.inputs), raw))
        sections = (
            ood_section(name, *((inside, logits[name]) for inside, logits in states)) for name in outside
        )
        report = replace(report, out_of_distribution=tuple(sections))
    write_to(output, report)
    return report


def report_on(
    predictions: Predictions, source: str, n_bins: int, scaler: Any = None, *, soft_labels: Any = None
) -> CalibrationReport:
    """The report on predictions, also after a fitted scaler where there is one."""
    report = calibration_report(
        predictions.probabilities(),
        predictions.labels,
        calibrated=None if scaler is None else scaler.predict_proba(predictions.as_logits()),
        soft_labels=soft_labels,
        n_bins=n_bins,
        class_names=predictions.class_names,
        name=name_of(source),
    )
    return with_entities(report, predictions.sentences)
