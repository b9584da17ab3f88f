"""`hf-calib evaluate` of a model with several labels a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scipy.special import expit

from hf_calib._errors import InputError, InputValueError, expected, few
from hf_calib._files import check_output
from hf_calib.commands.evaluate import LabelledTexts, Progress, Stages, in_silence, name_of
from hf_calib.report import MultiLabelReport, multi_label_report
from hf_calib.report.writing import write_to

# A model needs torch and transformers: they are imported where one is named.
if TYPE_CHECKING:
    from hf_calib.data.multi_label import LabelLayout


def is_multi_label(source: str, *, trust_remote_code: bool = False) -> bool:
    """Whether a model's config says so; one that cannot be read is left to the loading."""
    from transformers import AutoConfig

    import hf_calib.models  # noqa: F401  # the papers' networks, for the Auto classes
    from hf_calib.predictions.texts import refusals

    try:
        with refusals("the model", "be loadable", source, "name a fine-tuned classifier"):
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except InputError:
        return False
    return config.problem_type == "multi_label_classification"


def check_options(several: bool, sets: Sequence[str | None], ood_data: Sequence[str] | None) -> None:
    """Refuse options of several labels a text where the model has one class, and the other way round.

    Args:
        several: whether the model has several.
        sets: the options that say how sets of labels are written.
        ood_data: inputs from elsewhere.
    """
    if any(sets) and not several:
        requirement = "go with a model whose problem_type is multi_label_classification"
        options = "--label-separator, --label-columns and --no-label"
        raise InputValueError(expected(options, requirement, "one with a class a row", "leave them out"))
    if ood_data and several:
        got, way_out = "one with several labels a text", "leave it out"
        raise InputValueError(expected("--ood-data", "go with a model with one class a text", got, way_out))


def evaluate_multi_label(
    source: str,
    rows: LabelledTexts,
    layout: LabelLayout,
    *,
    n_bins: int = 15,
    output: Path | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    stages: Stages = in_silence,
) -> MultiLabelReport:
    """Report the calibration of a multi-label model on labelled texts.

    Args:
        source: a sequence classifier on the Hub or in a folder, whose `problem_type` is multi_label_classification.
        rows: labelled texts that it was not trained on.
        layout: where the labels of a text stand: names of the model's labels (or `class_names`), or their ids.
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
    from transformers import AutoModelForSequenceClassification

    from hf_calib.data.multi_label import label_set_ids, multi_hot_matrix
    from hf_calib.export.fingerprint import fingerprint
    from hf_calib.predictions.texts import encode_texts, load_text_model, predict_logits

    check_output(output)
    stages(f"reading {rows.data}")
    data = rows.load()
    stages(f"loading {source}")
    classifier = load_text_model(
        source, AutoModelForSequenceClassification, trust_remote_code=trust_remote_code
    )
    names = classifier.class_names if rows.class_names is None else tuple(rows.class_names)
    if len(names) != len(classifier.class_names) or len(set(names)) < len(names):
        requirement = f"name the model's {len(classifier.class_names)} labels once each"
        raise InputValueError(expected("class_names", requirement, few(names), "follow the model's order"))
    tokens = encode_texts(classifier, data, text_column=rows.text_column, max_length=rows.max_length)
    labels = multi_hot_matrix(label_set_ids(rows.data, layout.read(rows.data, data), names), len(names))
    stages(f"predicting {len(data):,} rows")
    logits = predict_logits(classifier, tokens, batch_size=rows.batch_size, on_progress=progress)
    stages(f"measuring {len(data):,} rows")
    report = multi_label_report(
        expit(logits.astype(float)),
        labels,
        n_bins=n_bins,
        class_names=classifier.class_names,
        name=name_of(source),
    )
    report = replace(report, about={**rows.source(), "fingerprint": fingerprint(classifier.model)})
    write_to(output, report)
    return report
