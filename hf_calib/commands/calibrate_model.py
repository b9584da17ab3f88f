"""`hf-calib calibrate` on a model: saved in a folder with its map and report, and checked through a pipeline."""

from __future__ import annotations

from collections.abc import Callable
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
from hf_calib.export.folder import (
    check_overwrites_no_original,
    fingerprint,
    replace_model,
    standalone_copy,
    write_folded,
)
from hf_calib.export.heads import head_loses_bias
from hf_calib.export.unfold import unfold
from hf_calib.models.pipeline import pipeline
from hf_calib.predictions.predictions import TOKENS
from hf_calib.scaling import FOLDABLE_SCALERS, saved_map

if TYPE_CHECKING:
    from hf_calib.commands.calibrate import Calibration

_SERVED = 8  # rows that the saved model is checked with
_SERVED_TOLERANCE = 1e-4  # of a probability: float32, and batches that are padded otherwise


def calibrate_model(source: ModelSource, output: Path, fit: Callable[[str], Calibration]) -> Calibration:
    """Fit a scaler, and save the model with it and the report, if a pipeline then gives the calibrated probabilities.

    Args:
        source: the model and its rows.
        output: the folder.
        fit: fits a scaler, by this method where none is asked for, and reports.

    Raises:
        ValueError: if a map in the head cannot be undone, or the model or the scaler cannot be folded.
        RuntimeError: if the difference is more than rounding; the folder is as it was then.
    """
    check_overwrites_no_original(output, [source.model])
    model, undone = source.classifier.model, []
    record = saved_map.recorded_in(model.config)
    if record.get("folded"):
        unfold(model)
        title = saved_map.map_title(str(record.get("method", "temperature")))
        end = "was undone first, bit for bit. The new map replaces it."
        undone.append(f"{source.model} had {title} in its head, which {end}")
    recorded = check_can_be_folded(model)
    training = {key: value for key, value in recorded.items() if key not in OF_THE_MAP}
    loses_bias = head_loses_bias(model, len(source.classifier.class_names))
    done = fit("temperature" if loses_bias else "auto")
    source.running.stages(f"saving to {output}")

    fitting = {"split": "calibration", "n_examples": done.n_fitted}
    if hasattr(done.scaler, "criterion"):
        fitting["criterion"] = done.scaler.criterion
    data, test = source.sets["data"], source.sets.get("test_data")
    calibration: dict[str, Any] = {**data.source(), "n": done.n_fitted}
    reported: dict[str, Any] = {**(test or data).source(), "n": done.report.n_examples}
    if test is None:
        calibration["part"], reported["part"] = "one half", "the other half"
    about = {key: training[key] for key in ("loss", "loss_kwargs") if key in training} | fitting
    about["data"] = {"calibration": calibration, "test": reported}
    if is_hub_name(source.model):
        about["base_model"] = source.model
    plain, served = standalone_copy(model), done.served
    plain.config.calibration = {**training, **fitting}
    # Of tokens a pipeline gives the score of the tag only, by which no map beside the model can be checked.
    is_lost = loses_bias and source.predictions().kind is not TOKENS and saved_map.has_bias(served)
    done.folded = saved_map.method_of(served) in FOLDABLE_SCALERS and not is_lost
    with whole_folder(output, replace_model) as folder:
        weights, difference = _write(folder, source, plain, served, about, folds=done.folded)
        if not difference <= _SERVED_TOLERANCE:
            requirement = f"give the calibrated probabilities within {_SERVED_TOLERANCE}"
            got, way_out = f"a difference of {difference:.2g}", "nothing was saved; please report this model"
            raise RuntimeError(expected("a pipeline with the saved model", requirement, got, way_out))
        # A half of the rows has no name to read it again by.
        again = {} if test is None else {"options": test.options(source.reading)}
        on = {**reported, "seen": done.n_shared, **again, "fingerprint": weights}
        replace(done.report, about=on).save(folder / "calibration")
    done.served_difference, done.notes = difference, (*undone, *done.notes)
    return done


def _write(
    folder: Path, source: ModelSource, model: Any, served: Any, about: dict[str, Any], *, folds: bool
) -> tuple[str, float]:
    """The fingerprint of the saved weights, and the largest difference of a served probability of the first rows."""
    classifier, rows, processing = source.classifier, source.rows["data"], source.classifier.processing_class
    rows = rows.select(range(min(_SERVED, len(rows))))
    first = classifier.served(rows, source.reading, name=source.sets["data"].data)

    def scores(pipeline: Callable[..., Any], **settings: Any) -> NDArray[np.float64]:
        """(N, C), NaN where a pipeline gives none."""
        settings |= {"trust_remote_code": source.running.trust_remote_code, "device": "cpu", **first.options}
        classify = pipeline(classifier.task.pipeline, model=str(folder), **settings)
        inputs = first.plain if pipeline is transformers.pipeline else first.inputs
        found = classifier.scores_of_served(classify(inputs, **first.call))
        return np.array([[each.get(name, np.nan) for name in classifier.class_names] for each in found])

    if folds:
        inputs: Any = {"batch": first.batch, "processing_class": processing}
        weights = write_folded(model, served, folder, **inputs, about=about)
        logits = classifier.served_logits(first.inputs, source.predictions().as_logits())
    else:
        model.config.calibration |= {"method": saved_map.method_of(served), "folded": False}
        model.save_pretrained(folder)
        processing.save_pretrained(folder)
        weights, told = fingerprint(model), saved_map.pooler_config(served)
        vllm = {} if told is None else {saved_map.POOLER_CONFIG: told}
        saved_map.save_map(served, folder, {**about, **vllm, "folded": False, "fingerprint": weights})
        # On the very logits that are served: a step turns their last bit into another probability.
        logits = scores(transformers.pipeline, function_to_apply="none")
    given = scores(transformers.pipeline if folds else pipeline)
    return weights, float(np.nanmax(np.abs(given - served.predict_proba(logits))))
