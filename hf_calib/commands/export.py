"""`hf-calib export`: a calibrated model as an ONNX graph or a torch program, checked against the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from huggingface_hub import snapshot_download
from numpy.typing import NDArray
from scipy.special import expit, softmax

from hf_calib._errors import InputValueError, check, expected
from hf_calib._files import check_output, whole_folder
from hf_calib.commands.console import Done
from hf_calib.decisions.saved import FILE as DECISIONS
from hf_calib.export.fold import fold
from hf_calib.export.folder import ADAPTER_CONFIG, copy_files, standalone_copy
from hf_calib.export.heads import synthetic_batch
from hf_calib.export.programs import FORMATS, check_packages, load_program, logits_of, write_program
from hf_calib.models.classifier import Classifier, load_classifier
from hf_calib.models.tasks import find_task
from hf_calib.models.texts import TextClassifier
from hf_calib.scaling import FOLDABLE_SCALERS
from hf_calib.scaling.saved_map import MAP_NAME, load_map, method_of, recorded_in, save_map, title_of

if TYPE_CHECKING:
    from hf_calib.commands.options import Export
    from hf_calib.commands.source import Running

TOLERANCE = 1e-4  # of a probability: float32, by other kernels
# What lies beside a model and is true of its export, too; and what is true of one that had no map in its head only.
_REPORT = ("calibration/report.*", "calibration/figures/*")
_OF_ITS_PROBABILITIES = (MAP_NAME, DECISIONS, "decisions/*", "decisions/figures/*")
# Batches that an export is tried on, as lengths of their rows. The first is what it is traced with.
_LENGTHS = ((8, 5, 6), (3,), (13, 2, 9, 13, 4))


def run(options: Export, running: Running) -> Done:
    """Export a classifier with its map, and check it in its own runtime; a map beside the model is folded in first."""
    output = options.output
    if options.form == "onnx":
        check_packages()
    check_output(output)
    way_out = "name a new folder, or empty this one: what lies there is of another model"
    is_free = not output.is_dir() or not any(output.iterdir())
    check(is_free, "output to be a new or an empty folder", output, way_out)
    running.stages(f"loading {options.model}")
    beside, classifier = _load(options, running.trust_remote_code)
    model = classifier.model
    batches = _batches(classifier, options)
    logits = logits_of(model, batches)
    wanted = [_probabilities(z, model.config) for z in logits]
    calibration, saved, copied = None, None, [*_REPORT, *_OF_ITS_PROBABILITIES]
    notes = []
    if recorded_in(model.config).get("folded"):
        calibration = "The calibration map is in the model's head, and so in the program."
    elif (beside / MAP_NAME).is_file():
        saved, copied = load_map(beside), [*_REPORT]
        method = method_of(saved.scaler)
        way_out = "serve it with hf_calib.pipeline, or fit a map that folds with hf-calib calibrate"
        check(method in FOLDABLE_SCALERS, "the model's map to fold into its head", method, way_out)
        wanted = [saved.scaler.predict_proba(z) for z in logits]
        fold(model, saved.scaler, batch=batches[0])
        calibration = f"{title_of(saved.scaler)} from {MAP_NAME} was folded into the head first."
        if (beside / DECISIONS).is_file():
            notes.append(
                f"{DECISIONS} is left out: its rule was fitted on the probabilities from before the map. Fit it again "
                "with hf-calib decide, on a model that has the map in its head."
            )
    else:
        notes.append("The model has no calibration map: the export gives its probabilities as they are.")
    with whole_folder(output) as folder:
        path = folder / FORMATS[options.form]
        running.stages("exporting")
        write_program(model, batches[0], path)
        running.stages("checking the export")
        difference = _difference(path, model.config, batches, wanted)
        n_bytes = sum(part.stat().st_size for part in folder.iterdir())
        model.config.save_pretrained(folder)
        classifier.processing_class.save_pretrained(folder)
        found = [path for form in copied for path in beside.glob(form) if path.is_file()]
        copy_files({path.relative_to(beside).as_posix(): path for path in found}, folder)
        if saved is not None:
            about = {**saved.about, "folded": True, "head": model.config.calibration["head"]}
            save_map(saved.scaler, folder, about)
    n_rows = sum(map(len, wanted))
    said = (
        f"{path.name} ({n_bytes / 1e6:,.1f} MB) gives the model's probabilities ({n_rows:,} predictions in batches of "
        f"several sizes, largest difference {difference:.1g})."
    )
    record = {"program": path.name, "n_bytes": n_bytes, "calibration": calibration, "n_rows": n_rows}
    lines = [said, *filter(None, [calibration])]
    return Done(lines, {**record, "difference": difference, "output": str(output)}, notes)


def _load(options: Export, trust_remote_code: bool) -> tuple[Path, Classifier]:
    """The model's folder, or a copy of what lies beside it on the Hub; the model with what reads its inputs."""
    source, folder = options.model, Path(options.model)
    way_out = "export the folder of trainer.save_calibrated_model(...), which merges them"
    check(not (folder / ADAPTER_CONFIG).is_file(), "the model to have no adapters beside it", source, way_out)
    task = find_task(source, trust_remote_code=trust_remote_code)
    classifier = load_classifier(source, task, trust_remote_code=trust_remote_code)
    if not folder.is_dir():
        folder = Path(snapshot_download(source, allow_patterns=[*_REPORT, *_OF_ITS_PROBABILITIES]))
    return folder, replace(classifier, model=standalone_copy(classifier.model))


def _batches(classifier: Any, options: Export) -> list[dict[str, Any]]:
    """Synthetic images; or rows of several lengths; of the user's texts those of one batch, and the shortest alone."""
    drawn = synthetic_batch(classifier.model)
    if "pixel_values" in drawn:
        way_out = "leave data out: a model of images is checked on synthetic ones"
        check(options.data is None, "data to be given with a model of texts only", options.data, way_out)
        pixels = drawn["pixel_values"]
        return [{"pixel_values": part} for part in (pixels[:3], pixels[:1], pixels.repeat(2, 1, 1, 1))]
    way_out = "set tokenizer.pad_token and model.config.pad_token_id, and save both"
    got = "none in the tokenizer or in the config"
    check(classifier.can_pad, "the model to have a padding token", got, way_out)
    ordinary, end = drawn["input_ids"][:, :-1].flatten().tolist() * 4, int(drawn["input_ids"][0, -1])
    names = classifier.tokenize(["a"])[0].keys() - {"input_ids"}
    batches = []
    for lengths in _LENGTHS:
        made = [{name: [int(name == "attention_mask")] * n for name in names} for n in lengths]
        for i, n in enumerate(lengths):
            made[i]["input_ids"] = [*ordinary[i : i + n - 1], end]
        batches.append(classifier.batch(made))
    rows = options.rows()
    if rows is not None:
        given = rows.load()
        given = given.select(range(min(len(given), options.batch_size)))
        # The texts alone, of a token classifier too: labels are not read.
        tokens = TextClassifier.encode_inputs(classifier, given, options, name=rows.data).inputs
        shortest = min(tokens, key=lambda row: len(row["input_ids"]))
        batches += [classifier.batch(tokens), classifier.batch([shortest])]
    return batches


def _probabilities(logits: NDArray[np.float64], config: Any) -> NDArray[np.float64]:
    """As a pipeline makes them."""
    sigmoid = config.problem_type == "multi_label_classification"
    return expit(logits) if sigmoid else softmax(logits, axis=-1)


def _difference(path: Path, config: Any, batches: Sequence[Any], wanted: Sequence[NDArray[Any]]) -> float:
    """The largest difference of a probability; raise where it is beyond what rounding can explain."""
    try:
        found = [_probabilities(z, config) for z in logits_of(load_program(path), batches)]
        difference = max(float(np.abs(f - w).max()) for f, w in zip(found, wanted, strict=True))
    except Exception as error:  # whatever a runtime raises for a program, or a shape that it does not take
        got = f"{type(error).__name__} ({' '.join(str(error).split())[:300]})"
        way_out = "nothing was saved; try the other format, or serve the model with transformers"
        requirement = "load and run on batches of several sizes and lengths"
        raise InputValueError(expected("the exported program", requirement, got, way_out)) from error
    if not difference <= TOLERANCE:
        got, way_out = f"a difference of {difference:.2g}", "nothing was saved; please report this model"
        requirement = f"give the model's probabilities within {TOLERANCE}"
        raise RuntimeError(expected("the exported program", requirement, got, way_out))
    return difference
