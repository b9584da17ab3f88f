"""`hf-calib export`: a calibrated model as an ONNX graph or a torch program, checked against the model itself."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from huggingface_hub import snapshot_download
from numpy.typing import NDArray
from scipy.special import expit, softmax
from torch import Tensor
from transformers import AutoConfig

from hf_calib._errors import InputValueError, expected
from hf_calib._files import check_output, whole_folder
from hf_calib.commands.opening import Running
from hf_calib.decisions.saved import FILE as DECISIONS
from hf_calib.export.fold import fold
from hf_calib.export.heads import synthetic_batch
from hf_calib.export.programs import (
    FORMATS,
    check_packages,
    load_program,
    logits_of,
    write_program,
)
from hf_calib.export.saving import standalone_copy
from hf_calib.models.classifier import Classifier
from hf_calib.models.loading import refusals
from hf_calib.models.reading import Reading, RowSet
from hf_calib.models.tasks import task_of
from hf_calib.models.texts import TextClassifier
from hf_calib.scaling.methods import FOLDABLE_SCALERS, method_of
from hf_calib.scaling.saved_map import (
    MAP_NAME,
    load_map,
    recorded_in,
    save_map,
    title_of,
)

if TYPE_CHECKING:
    from hf_calib.commands.options import Export

TOLERANCE = 1e-4  # of a probability: float32, by other kernels

# What lies beside a model and is true of its export, too.
_BESIDE = (
    *("preprocessor_config.json", "processor_config.json"),
    *(MAP_NAME, DECISIONS, "decisions/*", "calibration/report.*", "calibration/figures/*"),
)
_NOT_CALIBRATED = "The model has no calibration map: the export gives its probabilities as they are."

# Batches that an export is tried on, as lengths of their rows. The first is what it is traced with.
_LENGTHS = ((8, 5, 6), (3,), (13, 2, 9, 13, 4))


@dataclass(frozen=True)
class Exported:
    """The outcome of `export_model`.

    Args:
        program: its file.
        n_bytes: of that file, and of the weights beside it.
        calibration: where the map is, in a sentence; None for a model without one.
        n_rows: predictions on which it was compared with the model; of tokens, one for each.
        difference: the largest one between their probabilities.
        notes: what to know before it is used.
    """

    program: str
    n_bytes: int
    calibration: str | None
    n_rows: int
    difference: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        return {**vars(self), "notes": list(self.notes)}


def export_model(options: Export, running: Running) -> Exported:
    """Export a classifier of texts, tokens or images with its calibration map, and check it in its own runtime.

    A map that lies beside the model in calibration.json is folded in first. Labels of the rows are not read.

    Raises:
        ValueError: if model, texts or output are wrong, or the model cannot be exported or its program not be run.
        TypeError: if the model's map cannot be folded, or the text column is of the wrong kind.
        RuntimeError: if the program gives other probabilities than the model; the output folder is not created then.
    """
    form, output = options.form, options.output
    rows = options.rows(options.data, options.split)
    if form == "onnx":
        check_packages()
    _check_is_empty(output)
    model = _load(options.model, rows, options.reading, running)
    stages = running.stages
    with whole_folder(output) as folder:
        path = folder / FORMATS[form]
        stages("exporting")
        write_program(model.plain, model.batches[0], path)
        stages("checking the export")
        difference = _check(path, model, model.wanted)
        model.write_beside(folder)
        return Exported(
            path.name,
            _size(path),
            model.calibration,
            sum(map(len, model.wanted)),
            difference,
            notes=model.notes,
        )


@dataclass(frozen=True, eq=False)
class _Loaded:
    """A model that is ready for its export, and what the export has to give.

    Args:
        plain: the model with its map folded in.
        classifier: it with its tokenizer; None for images.
        batches: of inputs, of several sizes and lengths.
        wanted: the probabilities for each, from the model in torch and the map in NumPy.
        sigmoid: whether probabilities are sigmoids of logits, not their softmax.
        calibration: where the map is, in a sentence; None for a model without one.
        beside: the folder with the files that lie beside the model.
        saved: the map and what is said about it, where it was folded here.
        notes: what to know before it is used.
    """

    plain: Any
    classifier: Classifier | None
    batches: Sequence[Mapping[str, Tensor]]
    wanted: Sequence[NDArray[np.float64]]
    sigmoid: bool
    calibration: str | None
    beside: Path
    saved: tuple[Any, Mapping[str, Any]] | None
    notes: tuple[str, ...]

    def write_beside(self, folder: Path) -> None:
        """Write the configuration, the tokenizer, and what lies beside the model and is true of its export."""
        self.plain.config.save_pretrained(folder)
        if self.classifier is not None:
            self.classifier.processing_class.save_pretrained(folder)
        for path in sorted(self.beside.rglob("*")):
            name = path.relative_to(self.beside)
            if self.saved is not None and name.parts[0] in (DECISIONS, "decisions"):
                continue  # of the probabilities from before the map
            if path.is_file() and any(fnmatch(name.as_posix(), form) for form in _BESIDE):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / name)
        if self.saved is not None:
            scaler, about = self.saved
            record = {**about, "folded": True, "head": self.plain.config.calibration["head"]}
            save_map(scaler, folder / MAP_NAME, record)


def _load(source: str, rows: RowSet | None, reading: Reading, running: Running) -> _Loaded:
    """Load a classifier of any kind, fold the map that lies beside it, and predict what its export has to give."""
    running.stages(f"loading {source}")
    there = Path(source)
    if (there / "adapter_config.json").is_file():
        way_out = "export the folder of trainer.save_calibrated_model(...), which merges them"
        raise InputValueError(expected("the model", "have no adapters beside it", source, way_out))
    way_out = "name a fine-tuned classifier on the Hub or in a folder; check that its files are complete"
    with refusals("the model", "be loadable", source, way_out):
        config = AutoConfig.from_pretrained(source, trust_remote_code=running.trust_remote_code)
        beside = there if there.is_dir() else Path(snapshot_download(source, allow_patterns=[*_BESIDE]))
    classifier = _load_model(source, config, rows, running.trust_remote_code)
    plain = standalone_copy(classifier.model)
    classifier = replace(classifier, model=plain)
    batches: Sequence[Mapping[str, Tensor]]
    if "pixel_values" in (drawn := synthetic_batch(plain)):
        pixels = drawn["pixel_values"]
        batches = [{"pixel_values": part} for part in (pixels[:3], pixels[:1], pixels.repeat(2, 1, 1, 1))]
    else:
        batches = _text_batches(classifier, drawn["input_ids"], rows, reading)
    sigmoid = plain.config.problem_type == "multi_label_classification"
    logits = logits_of(plain, batches)
    wanted = [_probabilities(z, sigmoid=sigmoid) for z in logits]
    saved = None
    calibration: str | None = None
    notes: tuple[str, ...] = ()
    if recorded_in(plain.config).get("folded"):
        calibration = "The calibration map is in the model's head, and so in the program."
    elif (beside / MAP_NAME).is_file():
        saved = load_map(beside)
        method = method_of(saved.scaler)
        if method not in FOLDABLE_SCALERS:
            way_out = "serve it with hf_calib.pipeline, or fit a map that folds with hf-calib calibrate"
            raise InputValueError(expected("the model's map", "fold into its head", method, way_out))
        wanted = [saved.scaler.predict_proba(z) for z in logits]
        fold(plain, saved.scaler, batch=batches[0])
        calibration = f"{title_of(saved.scaler)} from {MAP_NAME} was folded into the head first."
        if (beside / DECISIONS).is_file():
            notes = (
                f"{DECISIONS} is left out: its rule was fitted on the probabilities from before the map. Fit it again "
                "with hf-calib decide, on a model that has the map in its head.",
            )
    else:
        notes = (_NOT_CALIBRATED,)
    return _Loaded(plain, classifier, batches, wanted, sigmoid, calibration, beside, saved, notes)


def _load_model(source: str, config: Any, rows: RowSet | None, trust_remote_code: bool) -> Classifier:
    """A classifier of the kind that its config says, of any problem type but a regression."""
    task = task_of(config.to_dict())
    got = " ".join(config.architectures or ()) or "no architecture"
    if task is None or task.classifier is None:
        way_out = "export a fine-tuned classifier"
        requirement = "be a classifier of sequences, tokens or images"
        raise InputValueError(expected("the model", requirement, got, way_out))
    if task.inputs == "images" and rows is not None:
        way_out = "leave data out: a model of images is checked on synthetic ones"
        raise InputValueError(expected("data", "be given with a model of texts only", rows.data, way_out))
    sigmoid = config.problem_type == "multi_label_classification"
    if config.problem_type == "regression" or (config.num_labels < 2 and not sigmoid):
        got = f"problem_type={config.problem_type!r} and {config.num_labels} outputs"
        way_out = "only classifiers have probabilities; for one sigmoid set problem_type='multi_label_classification'"
        raise InputValueError(expected("the model", "be a classifier", got, way_out))
    return task.classifier_class.load(source, task, trust_remote_code=trust_remote_code)


def _text_batches(
    classifier: Any, drawn: Tensor, rows: RowSet | None, reading: Reading
) -> list[dict[str, Tensor]]:
    """Synthetic rows of several lengths, and the user's texts: all of a batch, and the shortest alone."""
    if not classifier.can_pad:
        way_out = "set tokenizer.pad_token and model.config.pad_token_id, and save both"
        got = "none in the tokenizer or in the config"
        raise InputValueError(expected("the model", "have a padding token", got, way_out))
    end, ordinary = int(drawn[0, -1]), drawn[:, :-1].flatten().tolist()
    names = classifier.tokenize(["a"])[0]
    batches = []
    for lengths in _LENGTHS:
        made = []
        for i, length in enumerate(lengths):
            n_tokens = min(length, classifier.longest or length)
            ids = [ordinary[(7 * i + j) % len(ordinary)] for j in range(n_tokens - 1)] + [end]
            others = {name: [int(name == "attention_mask")] * n_tokens for name in names}
            made.append({**others, "input_ids": ids})
        batches.append(classifier.batch(made))
    if rows is not None:
        texts = rows.load()
        first = texts.select(range(min(len(texts), reading.batch_size)))
        # The texts alone, of a token classifier too: labels are not read.
        tokens = TextClassifier.encode_inputs(classifier, first, reading, name=rows.data).inputs
        shortest = min(tokens, key=lambda row: len(row["input_ids"]))
        batches += [classifier.batch(tokens), classifier.batch([shortest])]
    return batches


def _probabilities(logits: NDArray[np.float64], *, sigmoid: bool) -> NDArray[np.float64]:
    """As a pipeline makes them."""
    return expit(logits) if sigmoid else softmax(logits, axis=-1)


def _check(path: Path, model: _Loaded, wanted: Sequence[NDArray[np.float64]]) -> float:
    """The largest difference of a probability; raise where it is beyond what rounding can explain."""
    try:
        program = load_program(path, model.plain.config)
        found = [_probabilities(z, sigmoid=model.sigmoid) for z in logits_of(program, model.batches)]
        difference = max(float(np.abs(f - w).max()) for f, w in zip(found, wanted, strict=True))
    except Exception as error:  # whatever a runtime raises for a program, or a shape that it does not take
        got = f"{type(error).__name__} ({' '.join(str(error).split())[:300]})"
        way_out = "nothing was saved; try the other format, or serve the model with transformers"
        requirement = "load and run on batches of several sizes and lengths"
        raise InputValueError(expected("the exported program", requirement, got, way_out)) from error
    if not difference <= TOLERANCE:
        got = f"a difference of {difference:.2g}"
        requirement = f"give the model's probabilities within {TOLERANCE}"
        way_out = "nothing was saved; please report this model"
        raise RuntimeError(expected("the exported program", requirement, got, way_out))
    return difference


def _check_is_empty(output: Path) -> None:
    check_output(output)
    if output.is_dir() and any(output.iterdir()):
        way_out = "name a new folder, or empty this one: what lies there is of another model"
        raise InputValueError(expected("output", "be a new or an empty folder", output, way_out))


def _size(path: Path) -> int:
    return sum(part.stat().st_size for part in path.parent.glob(f"{path.name}*"))
