"""A calibrated model: saved in a folder with its report, and checked through a pipeline with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import transformers
from numpy.typing import NDArray

from hf_calib._errors import expected
from hf_calib._files import whole_folder
from hf_calib._text import is_hub_name
from hf_calib.commands.source import ModelSource
from hf_calib.export.fold import OF_THE_MAP, check_can_be_folded
from hf_calib.export.folder import fingerprint, replace_model
from hf_calib.export.heads import head_loses_bias
from hf_calib.export.saving import standalone_copy, write_folded
from hf_calib.export.unfold import unfold
from hf_calib.models.classifier import Served
from hf_calib.models.pipeline import pipeline
from hf_calib.predictions.labels import TOKENS
from hf_calib.scaling import SCALERS
from hf_calib.scaling.saved_map import (
    POOLER_CONFIG,
    has_bias,
    map_title,
    pooler_config,
    recorded_in,
    save_map,
)

if TYPE_CHECKING:
    from hf_calib.commands.calibrate import Measured

_SERVED = 8  # rows that the saved model is checked with
_SERVED_TOLERANCE = 1e-4  # of a probability: float32, and batches that are padded otherwise


def undo_map(source: ModelSource) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Undo a map in the model's head; what its config says of its training, and a note on the map that it had.

    Raises:
        ValueError: if it cannot be undone, or the model cannot be folded whatever the scaler.
    """
    notes: tuple[str, ...] = ()
    model = source.classifier.model
    record = recorded_in(model.config)
    if record.get("folded"):
        unfold(model)
        title = map_title(str(record.get("method", "temperature")))
        undone = "was undone first, bit for bit. The new map replaces it."
        notes = (f"{source.model} had {title} in its head, which {undone}",)
    recorded = check_can_be_folded(model)
    return {key: value for key, value in recorded.items() if key not in OF_THE_MAP}, notes


def save_calibrated(
    output: Path, training: Mapping[str, Any], source: ModelSource, method: str, measured: Measured
) -> dict[str, Any]:
    """Save the model with its map and the report, and check the probabilities that a pipeline gives with it.

    A method that does not fold is saved beside the model, as is a map with a bias that the head would lose.

    Returns:
        served_difference, the largest between the pipeline's probabilities and the scaler's; folded, whether it is.

    Raises:
        ValueError: if the scaler cannot be folded.
        RuntimeError: if the difference is more than rounding; the folder is as it was then.
    """
    served, test = measured.served, source.sets.get("test_data")
    fitting = {"split": "calibration", "n_examples": len(measured.fitted_on)}
    if hasattr(measured.scaler, "criterion"):
        fitting["criterion"] = measured.scaler.criterion
    calibration = {**source.sets["data"].source(), "n": len(measured.fitted_on)}
    reported = {**(test or source.sets["data"]).source(), "n": len(measured.reported)}
    if test is None:
        calibration["part"], reported["part"] = "one half", "the other half"
    about = {key: training[key] for key in ("loss", "loss_kwargs") if key in training} | fitting
    about["data"] = {"calibration": calibration, "test": reported}
    if is_hub_name(source.model):
        about["base_model"] = source.model
    model = standalone_copy(source.classifier.model)
    model.config.calibration = {**training, **fitting}
    # Of tokens a pipeline gives the score of the tag only, by which no map beside the model can be checked.
    loses_bias = (
        source.kind is not TOKENS
        and has_bias(served)
        and head_loses_bias(source.classifier.model, len(source.class_names))
    )
    folds = SCALERS[method].foldable and not loses_bias
    with whole_folder(output, replace_model) as folder:
        write = _write_folded if folds else _write_beside
        weights, difference = write(folder, source, model, served, about, method)
        if not difference <= _SERVED_TOLERANCE:
            requirement = f"give the calibrated probabilities within {_SERVED_TOLERANCE}"
            got, way_out = f"a difference of {difference:.2g}", "nothing was saved; please report this model"
            raise RuntimeError(expected("a pipeline with the saved model", requirement, got, way_out))
        # A half of the rows has no name, and probabilities without the prior correction are not those of the model.
        again = {} if test is None or not measured.is_served else {"options": test.options(source.reading)}
        on = {**reported, "seen": measured.n_seen, **again, "fingerprint": weights}
        replace(measured.report, about=on).save(folder / "calibration")
    return {"served_difference": difference, "folded": folds}


def _write_folded(
    folder: Path, source: ModelSource, model: Any, served: Any, about: dict[str, Any], method: str
) -> tuple[str, float]:
    """The fingerprint of the saved weights, and the largest difference."""
    classifier, first = source.classifier, _first(source)
    inputs: Any = {"batch": first.batch, "processing_class": classifier.processing_class}
    weights = write_folded(model, served, folder, **inputs, about=about)
    scores = _served_scores(source, folder, first, transformers.pipeline)
    logits = classifier.served_logits(first.inputs, source.predictions().as_logits())
    return weights, float(np.nanmax(np.abs(scores - served.predict_proba(logits))))


def _write_beside(
    folder: Path, source: ModelSource, model: Any, served: Any, about: dict[str, Any], method: str
) -> tuple[str, float]:
    """The same for a map that does not fold."""
    model.config.calibration |= {"method": method, "folded": False}
    model.save_pretrained(folder)
    source.classifier.processing_class.save_pretrained(folder)
    weights = fingerprint(model)
    told = pooler_config(served)
    vllm = {} if told is None else {POOLER_CONFIG: told}
    save_map(served, folder, {**about, **vllm, "folded": False, "fingerprint": weights})
    first = _first(source)
    # On the very logits that are served: a step turns their last bit into another probability.
    logits = _served_scores(source, folder, first, transformers.pipeline, function_to_apply="none")
    scores = _served_scores(source, folder, first, pipeline)
    return weights, float(np.nanmax(np.abs(scores - served.predict_proba(logits))))


def _first(source: ModelSource) -> Served:
    """The first rows, as a pipeline takes them."""
    rows, name = source.rows["data"], source.sets["data"].data
    first = rows.select(range(min(_SERVED, len(rows))))
    return source.classifier.served(first, source.reading, name=name)


def _served_scores(
    source: ModelSource, folder: Path, first: Served, pipeline: Callable[..., Any], **settings: Any
) -> NDArray[np.float64]:
    """(N, C) the scores that a pipeline with the saved model gives for the first rows, NaN where it gives none."""
    classifier = source.classifier
    settings |= {"trust_remote_code": source.running.trust_remote_code, "device": "cpu", **first.options}
    classify = pipeline(classifier.task.pipeline, model=str(folder), **settings)
    inputs = first.plain if pipeline is transformers.pipeline else first.inputs
    served = classifier.scores_of_served(classify(inputs, **first.call))
    return np.array([[scores.get(name, np.nan) for name in classifier.class_names] for scores in served])
