"""`hf-calib export`: a calibrated model as an ONNX graph or a torch program, checked against the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from huggingface_hub import snapshot_download

from hf_calib._errors import InputError, InputValueError, check, expected
from hf_calib._files import check_output, whole_folder
from hf_calib.commands.console import Done
from hf_calib.decisions.saved import DECISIONS, OUTDATED, Decisions
from hf_calib.export.fold import fold
from hf_calib.export.folder import ADAPTER_CONFIG, copy_files
from hf_calib.export.heads import synthetic_batch
from hf_calib.export.programs import (
    FORMATS,
    check_packages,
    load_program,
    logits_of,
    write_program,
)
from hf_calib.models.classifier import Classifier, find_task, load_classifier
from hf_calib.models.texts import TextClassifier
from hf_calib.models.weights import fingerprint, is_in_weights
from hf_calib.scaling.saved_map import (
    MAP_NAME,
    load_map,
    recorded_in,
    save_map,
    title_of,
)

if TYPE_CHECKING:
    from hf_calib.commands.options import Export
    from hf_calib.commands.source import Running

TOLERANCE = 1e-4  # of a probability: float32, by other kernels
# Files next to a model that are also about its export; only the report is, where a calibrator is folded in first.
_REPORT = ["calibration/report.*", "calibration/figures/*"]
_BESIDE = [*_REPORT, MAP_NAME, DECISIONS, "decisions/*", "decisions/figures/*"]
# An export is tried on batches of the first letters of a text, so many in each row. It is traced with the first batch.
_LENGTHS = ((28, 12, 20), (4,), (57, 5, 40, 57, 10))
_OF_DATA = "split text_column text_pair_column max_length batch_size"  # options
_TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom."


def run(options: Export, running: Running) -> Done:
    """Export a classifier with its calibrator, folded in first where it is next to it, and check it in its runtime."""
    output = options.output
    if options.data is None:
        options.check_unused(_OF_DATA, "data")
    if options.form == "onnx":
        check_packages()
    check_output(output)
    way_out = (
        "name a new folder, or empty this one: what lies there is of another model"
    )
    is_free = not output.is_dir() or not any(output.iterdir())
    check(is_free, "output to be a new or an empty folder", output, way_out)
    running.stages(f"loading {options.model}")
    source, beside, trusted = (
        options.model,
        Path(options.model),
        running.trust_remote_code,
    )
    way_out = (
        "export the folder of trainer.save_calibrated_model(...), which merges them"
    )
    check(
        not (beside / ADAPTER_CONFIG).is_file(),
        "the model to hold no adapters",
        source,
        way_out,
    )
    task = find_task(source, trust_remote_code=trusted)
    classifier = load_classifier(source, task, trust_remote_code=trusted)
    if not beside.is_dir():
        beside = Path(snapshot_download(source, allow_patterns=_BESIDE))
    model, config = classifier.model.cpu(), classifier.model.config
    batches = _batches(classifier, options)
    calibration, saved, copied, notes = None, None, _BESIDE, []
    has_rule = (beside / DECISIONS).is_file()
    is_folded = recorded_in(config).get("folded") is True
    if not is_folded and (beside / MAP_NAME).is_file():
        saved = load_map(beside)
        if is_in_weights(saved, model, source):
            is_folded = True
            saved = None
    if is_folded:
        calibration = (
            "The calibrator is in the model's head, and therefore in the export."
        )
    elif saved is not None:
        copied = _REPORT
        fold(model, saved.scaler, batch=batches[0])
        calibration = (
            f"{title_of(saved.scaler)} from {MAP_NAME} was folded into the head first."
        )
        notes += [OUTDATED] * has_rule
    else:
        notes.append(
            "The model has no calibrator: the export gives its probabilities unchanged."
        )
    if saved is None and has_rule:
        try:
            Decisions.from_pretrained(beside).check_weights(fingerprint(model))
        except InputError as error:
            notes.append(f"{DECISIONS}: {error}. Run hf-calib decide again.")
    with whole_folder(output) as folder:
        path = folder / FORMATS[options.form]
        running.stages("exporting")
        write_program(model, batches[0], path)
        running.stages("checking the export")
        n_rows, difference = _check(path, classifier, batches)
        n_bytes = sum(part.stat().st_size for part in folder.iterdir())
        config.save_pretrained(folder)
        classifier.processing_class.save_pretrained(folder)
        found = [
            path for form in copied for path in beside.glob(form) if path.is_file()
        ]
        copy_files(
            {path.relative_to(beside).as_posix(): path for path in found}, folder
        )
        if saved is not None:
            about = {
                **saved.about,
                "folded": True,
                "head": config.calibration["head"],
                "fingerprint": fingerprint(model),
            }
            save_map(saved.scaler, folder, about)
    said = (
        f"{path.name} ({n_bytes / 1e6:,.1f} MB) gives the model's probabilities ({n_rows:,} predictions in batches of "
        f"several sizes, largest difference {difference:.1g})."
    )
    record = {
        "program": path.name,
        "n_bytes": n_bytes,
        "calibration": calibration,
        "n_rows": n_rows,
    }
    lines = [said, *filter(None, [calibration])]
    return Done(
        lines, {**record, "difference": difference, "output": str(output)}, notes
    )


def _batches(classifier: Any, options: Export) -> list[dict[str, Any]]:
    """Synthetic images; or texts of several lengths, and of the user's those of one batch."""
    if classifier.model.main_input_name == "pixel_values":
        way_out = "leave data out: a model of images is checked on synthetic ones"
        check(
            options.data is None,
            "data to be given with a model of texts only",
            options.data,
            way_out,
        )
        pixels = synthetic_batch(classifier.model)["pixel_values"]
        return [
            {"pixel_values": part}
            for part in (pixels[:3], pixels[:1], pixels.repeat(2, 1, 1, 1))
        ]
    way_out = "set tokenizer.pad_token and model.config.pad_token_id, and save both"
    check(
        classifier.can_pad,
        "the model to have a padding token",
        "none in tokenizer or config",
        way_out,
    )
    tokens = [classifier.tokenize([_TEXT[:n] for n in lengths]) for lengths in _LENGTHS]
    for rows in options.row_sets().values():
        given = rows.load()
        given = given.select(range(len(given))[: options.batch_size])
        # The texts alone, of a token classifier too: labels are not read.
        tokens.append(
            TextClassifier.encode_inputs(
                classifier, given, options, name=rows.data
            ).inputs
        )
    return [classifier.batch(each) for each in tokens]


def _check(
    path: Path, classifier: Classifier, batches: list[dict[str, Any]]
) -> tuple[int, float]:
    """The number of predictions and the largest difference of a probability, which has to be explained by rounding."""

    def probabilities(program: Any) -> Any:
        return np.concatenate(
            [
                classifier.task.labels.probabilities(z)
                for z in logits_of(program, batches)
            ]
        )

    wanted = probabilities(classifier.model)
    try:
        difference = float(np.abs(probabilities(load_program(path)) - wanted).max())
    except Exception as error:  # whatever a runtime raises for a program, or a shape that it does not take
        got = f"{type(error).__name__} ({' '.join(str(error).split())[:300]})"
        way_out = "nothing was saved; try the other format, or serve the model with transformers"
        requirement = "load and run on batches of several sizes and lengths"
        raise InputValueError(
            expected("the exported program", requirement, got, way_out)
        ) from error
    if not difference <= TOLERANCE:
        requirement = f"give the model's probabilities within {TOLERANCE}"
        got, way_out = (
            f"a difference of {difference:.2g}",
            "nothing was saved; please report this model",
        )
        raise RuntimeError(expected("the exported program", requirement, got, way_out))
    return len(wanted), difference
