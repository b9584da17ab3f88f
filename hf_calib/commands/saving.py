"""A calibrated model: saved in a folder with its report, and checked through a pipeline with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from numpy.typing import NDArray

from hf_calib._errors import expected
from hf_calib._files import whole_folder
from hf_calib._text import is_hub_name
from hf_calib.commands.fitting import Measured
from hf_calib.commands.opening import Opened
from hf_calib.export.fingerprint import fingerprint
from hf_calib.export.fold import OF_THE_MAP, check_can_be_folded
from hf_calib.export.heads import head_loses_bias
from hf_calib.export.saving import replace_model, standalone_copy, write_folded
from hf_calib.export.unfold import unfold
from hf_calib.models.classifier import Classifier
from hf_calib.models.pipeline import pipeline
from hf_calib.predictions.kinds import TOKENS
from hf_calib.report.writing import write_report
from hf_calib.scaling import SCALERS
from hf_calib.scaling.saved_map import (
    POOLER_CONFIG,
    has_bias,
    map_title,
    pooler_config,
    recorded_in,
    save_map,
)

_SERVED = 8  # rows that the saved model is checked with
_SERVED_TOLERANCE = 1e-4  # of a probability: float32, and batches that are padded otherwise


@dataclass(frozen=True)
class Original:
    """A model config's record of its training, and of the map that was undone.

    Args:
        training: entries of the config.
        notes: on the map that it had.
    """

    training: Mapping[str, Any]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, source: str, classifier: Classifier) -> Original:
        """Undo a map in the model's head.

        Raises:
            ValueError: if it cannot be undone, or the model cannot be folded whatever the scaler.
        """
        notes: tuple[str, ...] = ()
        record = recorded_in(classifier.model.config)
        if record.get("folded"):
            unfold(classifier.model)
            title = map_title(str(record.get("method", "temperature")))
            notes = (
                f"{source} had {title} in its head, which was undone first, bit for bit. The new map replaces it.",
            )
        recorded = check_can_be_folded(classifier.model)
        return cls({key: value for key, value in recorded.items() if key not in OF_THE_MAP}, notes)


def save_calibrated(
    output: Path, original: Original, opened: Opened, scaler: Any, measured: Measured, method: str
) -> tuple[float, bool]:
    """Save the model with its map and the report, and check the probabilities that a pipeline gives with it.

    Args:
        output: the model's folder; see `whole_folder`.
        original: of the model.
        opened: the model, with the rows that the scaler was fitted on.
        scaler: the fitted one.
        measured: the scaler that is served, and the report.
        method: one that does not fold is saved beside the model, as is a map with a bias that the head would lose.

    Returns:
        The largest difference between the probabilities of the pipeline and of the scaler; whether the map is folded.

    Raises:
        ValueError: if the scaler cannot be folded.
        RuntimeError: if the difference is more than rounding.
    """
    fitting = {"split": "calibration", "n_examples": len(measured.fitted_on)}
    minimised = getattr(scaler, "criterion", None)
    fitting |= {} if minimised is None else {"criterion": minimised}
    test = opened.sets.get("test_data")
    fitted_on = {**opened.sets["data"].source(), "n": len(measured.fitted_on)}
    measured_on = {**(test or opened.sets["data"]).source(), "n": len(measured.reported)}
    if test is None:
        fitted_on |= {"part": "one half"}
        measured_on |= {"part": "the other half"}
    about = {
        **{key: original.training[key] for key in ("loss", "loss_kwargs") if key in original.training},
        **fitting,
        "data": {
            "calibration": fitted_on,
            "test": measured_on,
        },
        **({"base_model": opened.source} if is_hub_name(opened.source) else {}),
    }
    config = {**original.training, **fitting}
    folds = SCALERS[method].foldable and not _loses_bias(opened, measured.served)
    with whole_folder(output, replace_model) as folder:
        if folds:
            weights, difference = _save_folded(folder, opened, measured.served, config, about)
        else:
            weights, difference = _save_beside(folder, opened, measured.served, config, about, method)
        if not difference <= _SERVED_TOLERANCE:
            requirement = f"give the calibrated probabilities within {_SERVED_TOLERANCE}"
            got, way_out = f"a difference of {difference:.2g}", "nothing was saved; please report this model"
            raise RuntimeError(expected("a pipeline with the saved model", requirement, got, way_out))
        # A half of the rows has no name, and probabilities without the prior correction are not those of the model.
        again = {} if test is None or not measured.is_served else {"options": test.options(opened.reading)}
        seen = {"seen": measured.n_seen}
        report = replace(measured.report, about={**measured_on, **seen, **again, "fingerprint": weights})
        write_report(report, folder / "calibration")
    return difference, folds


def _loses_bias(opened: Opened, served: Any) -> bool:
    """Whether the head, as that of a decoder, keeps no bias, and the map has one.

    Of tokens a pipeline gives the score of the tag only, by which no other map can be checked: folding says what is
    wrong.
    """
    assert opened.classifier is not None
    if opened.classifier.task.labels is TOKENS:
        return False
    return has_bias(served) and head_loses_bias(opened.classifier.model, len(opened.class_names))


def _save_folded(
    folder: Path, opened: Opened, served: Any, config: dict[str, Any], about: dict[str, Any]
) -> tuple[str, float]:
    """The fingerprint of the saved weights, and the largest difference."""
    classifier = opened.classifier
    assert classifier is not None
    first = _first(opened)
    plain = standalone_copy(classifier.model)
    plain.config.calibration = config
    batch = classifier.served_batch(first, opened.reading)
    weights = write_folded(
        plain, served, folder, batch=batch, processing_class=classifier.processing_class, about=about
    )
    scores = _served_scores(opened, folder, first, transformers.pipeline)
    logits = classifier.served_logits(first, _logits(opened))
    return weights, float(np.nanmax(np.abs(scores - served.predict_proba(logits))))


def _save_beside(
    folder: Path,
    opened: Opened,
    served: Any,
    config: dict[str, Any],
    about: dict[str, Any],
    method: str,
) -> tuple[str, float]:
    """The same for a map that does not fold."""
    classifier = opened.classifier
    assert classifier is not None
    plain = standalone_copy(classifier.model)
    plain.config.calibration = {**config, "method": method, "folded": False}
    plain.save_pretrained(folder)
    classifier.processing_class.save_pretrained(folder)
    weights = fingerprint(plain)
    told = pooler_config(served)
    vllm = {} if told is None else {POOLER_CONFIG: told}
    save_map(served, folder, {**about, **vllm, "folded": False, "fingerprint": weights})
    serve = partial(_served_scores, opened, folder, _first(opened))
    # On the very logits that are served: a step turns their last bit into another probability.
    logits = serve(transformers.pipeline, function_to_apply="none")
    return weights, float(np.nanmax(np.abs(serve(pipeline) - served.predict_proba(logits))))


def _first(opened: Opened) -> list[Any]:
    """The first rows, as a pipeline takes them."""
    assert opened.classifier is not None
    rows, name = opened.rows["data"], opened.sets["data"].data
    return opened.classifier.as_served(rows, _SERVED, opened.reading, name=name)


def _logits(opened: Opened) -> NDArray[Any]:
    found = opened.predictions("data")
    assert found is not None
    return found.as_logits()


def _served_scores(
    opened: Opened, folder: Path, first: list[Any], pipeline: Callable[..., Any], **settings: Any
) -> NDArray[np.float64]:
    """(N, C) the scores that a pipeline with the saved model gives for the first rows, NaN where it gives none."""
    classifier = opened.classifier
    assert classifier is not None
    options, call_options = classifier.serving_options(folder, opened.reading)
    classify = pipeline(
        classifier.task.pipeline,
        model=str(folder),
        device="cpu",
        trust_remote_code=opened.running.trust_remote_code,
        **options,
        **settings,
    )
    inputs = (
        classifier.for_plain_pipeline(first, opened.reading) if pipeline is transformers.pipeline else first
    )
    served = classifier.scores_of_served(classify(inputs, **call_options))
    return np.array([[scores.get(name, np.nan) for name in classifier.class_names] for scores in served])
