"""Tasks, a row for each kind of model, and classifiers, which load, check and run the models."""

from __future__ import annotations

import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoConfig

from hf_calib._errors import InputValueError, check, expected, few
from hf_calib._records import count, read_json
from hf_calib.metrics.checks import check_names
from hf_calib.models.reading import Reading, are_unnamed, class_ids, names_in_data
from hf_calib.models.weights import fingerprint, hash_of
from hf_calib.predictions.predictions import (
    MULTI_LABEL,
    SINGLE_LABEL,
    TOKENS,
    LabelKind,
    OnRows,
    Predictions,
    ignore_rows,
)
from hf_calib.scaling.saved_map import RECORD_KINDS

if TYPE_CHECKING:
    from datasets import Dataset

_MOST_LAYERS = 2_000
_MOST_LABELS = 1_000_000


def _n_layers(value: Any) -> bool:
    return count(value) and value <= _MOST_LAYERS


def _n_labels(value: Any) -> bool:
    return count(value) and value <= _MOST_LABELS


_LAYERS = (
    "num_hidden_layers?",
    "num_layers?",
    "n_layers?",
    "n_layer?",
    "encoder_layers?",
    "decoder_layers?",
)
# Sizes of a config.json that transformers makes one by one, which could take days or all memory.
_SIZES = {**dict.fromkeys(_LAYERS, _n_layers), "num_labels?": _n_labels}
# The entries of config.json that are read here.
CONFIG_KINDS = {
    **_SIZES,
    "architectures?": [str],
    "auto_map?": dict,
    "calibration?": RECORD_KINDS,
    "id2label?": {str: str},
    "problem_type?": str,
    "prompt_template?": dict,
}


@dataclass(frozen=True)
class Task:
    """A row of `TASKS`."""

    name: str
    # The name of transformers' pipeline.
    pipeline: str
    # The end of its models' class names, after "For".
    architecture: str
    # An input, for the Python code on a card.
    example: str
    # The plural of an input.
    inputs: str
    labels: LabelKind = SINGLE_LABEL
    # The class here, "module.Class", that runs its models; None: there are only cards.
    classifier: str | None = None
    # How many logits its models have; None for any number that no other row has.
    n_logits: int | None = None

    @property
    def auto_class(self) -> Any:
        """Return the transformers class that loads its models."""
        import transformers

        return getattr(transformers, f"AutoModelFor{self.architecture}")

    @property
    def classifier_class(self) -> Any:
        """Return the class that reads its inputs and runs its models."""
        requirement = "the model to be a classifier of texts, tokens or images"
        got = f"a model for {self.pipeline}"
        check(self.classifier is not None, requirement, got, "use its predictions")
        # Only the module of this task is imported: one of images needs Pillow.
        module, name = str(self.classifier).split(".")
        return getattr(import_module(f"hf_calib.models.{module}"), name)

    @property
    def shows_all_scores(self) -> bool:
        """Whether its pipeline returns the scores of all classes with `top_k=None`."""
        return self.pipeline in ("text-classification", "image-classification")

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Whether a model of its architecture with this config.json has its kind of labels."""
        if self.n_logits is not None:
            names = config.get("id2label")
            return isinstance(names, Mapping) and len(names) == self.n_logits
        has_several = config.get("problem_type") == "multi_label_classification"
        return self.labels.sigmoid == has_several


_TEXT = Task(
    "text",
    pipeline="text-classification",
    architecture="SequenceClassification",
    example="a text",
    inputs="texts",
    classifier="texts.TextClassifier",
)
_TOKEN = Task(
    "token",
    pipeline="token-classification",
    architecture="TokenClassification",
    example="a text",
    inputs="sentences",
    labels=TOKENS,
    classifier="tokens.TokenClassifier",
)
_IMAGE = Task(
    "image",
    pipeline="image-classification",
    architecture="ImageClassification",
    example="an_image.png",
    inputs="images",
    classifier="images.ImageClassifier",
)
_AUDIO = Task(
    "audio",
    pipeline="audio-classification",
    architecture="AudioClassification",
    example="a_recording.wav",
    inputs="recordings",
)
_VIDEO = Task(
    "video",
    pipeline="video-classification",
    architecture="VideoClassification",
    example="a_video.mp4",
    inputs="videos",
)
_NEXT_TOKEN = Task(
    "next token",
    pipeline="text-generation",
    architecture="CausalLM",
    example="a text",
    inputs="texts",
    labels=TOKENS,
)
_ONE_LOGIT = replace(
    _TEXT,
    name="one-logit text",
    labels=MULTI_LABEL,
    classifier="texts.OneLogitClassifier",
    n_logits=1,
)
# Of the rows that a config fits, the first counts.
_ROWS = (
    _ONE_LOGIT,
    _TEXT,
    replace(_TEXT, name="multi-label text", labels=MULTI_LABEL),
    _TOKEN,
    _IMAGE,
    replace(_IMAGE, name="multi-label image", labels=MULTI_LABEL),
    _AUDIO,
    _VIDEO,
    _NEXT_TOKEN,
)
TASKS: dict[str, Task] = {task.name: task for task in _ROWS}


def task_of(config: Mapping[str, Any]) -> Task | None:
    """Return the task of a model with this config.json, or None if it is not supported.

    >>> task_of({"architectures": ["BertForSequenceClassification"]}).name
    'text'
    >>> config = {"architectures": ["ViTForImageClassification"]}
    >>> task_of({**config, "problem_type": "multi_label_classification"}).name
    'multi-label image'
    """
    names = config.get("architectures")
    # Classes of the user's are in auto_map, by the names of transformers' own.
    known = set(config.get("auto_map") or {})
    if isinstance(names, list) and names:
        known.add(str(names[0]))
    found = [
        task
        for task in _ROWS
        if any(f"For{task.architecture}" in name for name in known)
    ]
    fitting = [task for task in found if task.fits(config)]
    if fitting:
        return fitting[0]
    # Other models, such as those of tokens, have no multi-label form here.
    return found[-1] if found else None


# The errors of broken or missing files, of weights of another shape (RuntimeError), and of a config
# of other types (AttributeError, TypeError).
_UNLOADABLE = (
    OSError,
    ValueError,
    LookupError,
    ImportError,
    EOFError,
    RuntimeError,
    AttributeError,
    TypeError,
    SafetensorError,
    pickle.UnpicklingError,
)


def check_sizes(source: str | Path) -> None:
    """Raise for the config.json of a folder whose model is too large to be built."""
    config = Path(source, "config.json")
    if os.path.isfile(config):
        read_json(config, _SIZES)


def load_trained(
    name: str | Path, model_class: Any, *, trust_remote_code: bool = False
) -> Any:
    """Load a model in float32; raise ValueError if this fails, or some of its weights are new."""
    check_sizes(name)
    way_out = "name a fine-tuned classifier on the Hub or in a folder; "
    way_out += "check that its files are complete"
    # In the 8 to 11 significant bits of 16-bit logits, scores that differ become equal.
    with refusals("the model", "be loadable", name, way_out):
        model, report = model_class.from_pretrained(
            name,
            dtype=torch.float32,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    # transformers fills weights that a file does not have with random numbers.
    new = sorted(report["missing_keys"])
    got = f"no {few(new)} in {name}"
    check(not new, "the model to be a fine-tuned classifier", got, "train it first")
    return model


def check_problem(config: Any, task: Task) -> None:
    """Raise if a model has several labels per row where one is needed, or the reverse."""
    # The problem type says nothing of models of tokens.
    if task.labels is TOKENS:
        return
    problem = config.problem_type
    of_several = "multi_label_classification"
    if task.n_logits == 1:
        fits = problem in (None, of_several)
        requirement = "be a classifier"
        way_out = "a regression has no probabilities to calibrate"
    elif task.labels.sigmoid:
        fits = problem == of_several
        requirement = "have several labels"
        way_out = f"set its problem_type to {of_several}"
    else:
        is_of_one = problem in (None, "single_label_classification")
        fits = is_of_one and config.num_labels > 1
        requirement = "choose one of several classes"
        way_out = (
            f"several labels per {task.inputs.removesuffix('s')} can be scaled with "
        )
        way_out += "PerLabelTemperatureScaling in Python"
    got = f"problem_type={problem!r} and {config.num_labels} outputs"
    check(fits, f"the model to {requirement}", got, way_out)


def find_task(source: str | Path, *, trust_remote_code: bool = False) -> Task:
    """The task of a model by its config; else that of texts, whose loading says what is wrong."""
    check_sizes(source)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except _UNLOADABLE:
        return TASKS["text"]
    task = task_of(config.to_dict())
    if task is not None:
        return task
    is_of_images = type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    # The configs of timm's models have no architectures.
    return TASKS["image" if is_of_images and not config.architectures else "text"]


class StoredWeights:
    """The weights in a folder, which are read once however often they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def have(self, wanted: str) -> bool:
        """Whether the weights have this fingerprint; True if they cannot be loaded to know it."""
        return self._of_files in (wanted, None) or self._of_model in (wanted, None)

    @cached_property
    def _of_files(self) -> str | None:
        """The fingerprint of the weights as they are in the files."""
        tensors: dict[str, Tensor] = {}
        try:
            for file in sorted(self.folder.glob("model*.safetensors")):
                tensors |= load_file(file)
        except _UNLOADABLE:
            return None
        return hash_of(tensors)

    @cached_property
    def _of_model(self) -> str | None:
        """The fingerprint of the loaded model; None also if it needs code of its own."""
        # Tied weights are in a file once, and files of other formats have other names.
        try:
            kind = find_task(self.folder).auto_class
            model = kind.from_pretrained(
                self.folder, dtype="auto", local_files_only=True
            )
        except _UNLOADABLE:
            return None
        return fingerprint(model)


@contextmanager
def refusals(
    argument: str, requirement: str, got: object, way_out: str
) -> Iterator[None]:
    """A context that converts the libraries' errors about a name into one line with a way out."""
    try:
        yield
    except _UNLOADABLE as error:
        # The libraries' messages have several lines, and name options of Python functions.
        cause = " ".join(str(error).split())
        if "trust_remote_code" in cause:
            way_out = "--trust-remote-code runs the code that comes with it, "
            way_out += "if you trust its author"
        raise InputValueError(
            expected(argument, requirement, f"{got} ({cause})", way_out)
        ) from error


@dataclass(frozen=True, eq=False)
class Encoded:
    """Checked rows that a classifier can read."""

    inputs: Any
    # (N,) or (N, C); None if labels are not read.
    labels: NDArray[Any] | None = None
    # (N,) the sentence of each token; None for other tasks.
    sentences: NDArray[np.int64] | None = None
    # A sentence on the inputs, for the report.
    note: str | None = None
    # The number of tokens that some texts were cut to.
    cut_at: int | None = None
    # The name of the data in messages.
    name: str = ""
    # The labelled sub-words of sentences.
    counted: Sequence[NDArray[np.bool_]] | None = None


class Served(NamedTuple):
    """Rows in the form of a pipeline's input."""

    # The inputs of hf_calib.pipeline.
    inputs: list[Any]
    # The inputs of a plain pipeline.
    plain: list[Any]
    # The inputs of the model.
    batch: dict[str, Tensor]
    # Options of the pipeline.
    options: dict[str, Any]
    # Options of its call.
    call: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Classifier(ABC):
    """A model and its tokenizer or image processor, loaded like a pipeline, but in float32."""

    input_columns: ClassVar[tuple[str, ...]] = ("text_column", "text_pair_column")
    # In evaluation mode.
    model: Any
    # The tokenizer or image processor.
    processing_class: Any
    # C names.
    class_names: tuple[str, ...]
    task: Task

    @classmethod
    def load(
        cls, source: str | Path, task: Task, *, trust_remote_code: bool = False
    ) -> Classifier:
        """Load a fine-tuned classifier, on the accelerator if there is one."""
        own_code: Any = {"trust_remote_code": trust_remote_code}
        model = load_trained(source, task.auto_class, **own_code)
        processing = cls.load_processing(source, model, **own_code)
        id2label = model.config.id2label
        names = tuple(str(id2label[i]) for i in range(model.config.num_labels))
        if torch.accelerator.is_available():
            model = model.to(torch.accelerator.current_accelerator())
        return cls(model.eval(), processing, names, task)

    @staticmethod
    @abstractmethod
    def load_processing(
        source: str | Path, model: Any, *, trust_remote_code: bool
    ) -> Any:
        """Load and check the tokenizer or image processor."""

    def encode(
        self, rows: Dataset, reading: Reading, *, name: str, labelled: bool = True
    ) -> Encoded:
        """Check rows and convert them to inputs, before the model is run; errors name the data."""
        check(len(rows) > 0, "data to have rows", "none", "check the file or the split")
        labels = None
        # Labels are checked first, as texts may take minutes to tokenize.
        if labelled:
            self.check_inputs_are_no_labels(reading)
            labels = self.read_labels(rows, reading, name)
        encoded = self.encode_inputs(rows, reading, name=name)
        return replace(encoded, labels=labels)

    def check_inputs_are_no_labels(self, reading: Reading) -> None:
        """Raise if a column of inputs is one of labels."""
        from hf_calib.data.columns import check_is_no_label

        labels = reading.label_columns or [reading.label_column]
        for argument in self.input_columns:
            check_is_no_label(argument, getattr(reading, argument), labels)

    @abstractmethod
    def encode_inputs(self, rows: Dataset, reading: Reading, *, name: str) -> Encoded:
        """Check and convert rows without labels."""

    def read_labels(self, rows: Dataset, reading: Reading, name: str) -> NDArray[Any]:
        """Return the checked labels: class ids (N,), or (N, C) of 0 and 1."""
        if not self.task.labels.sigmoid:
            return class_ids(
                rows, reading.label_column, self.class_names, reading.class_names
            )
        from hf_calib.data.labels import LabelLayout, label_set_ids, multi_hot_matrix

        names = names_in_data(self.class_names, reading.class_names, "labels")
        columns = reading.label_columns
        # A label without a column would count as absent in every row.
        is_whole = columns is None or len(columns) == len(names)
        requirement = f"label_columns to name a column for each label ({few(names)})"
        way_out = "add the other columns, of 0 and 1"
        check(is_whole, requirement, few(columns or []), way_out)
        layout = LabelLayout(
            reading.label_column,
            reading.label_columns,
            reading.label_separator,
            reading.no_label,
        )
        ids = label_set_ids(name, layout.read(name, rows), names)
        return multi_hot_matrix(ids, len(names))

    def logits(
        self,
        encoded: Encoded,
        *,
        batch_size: int = 32,
        on_progress: OnRows = ignore_rows,
    ) -> NDArray[np.float32]:
        """Return the logits (N, C) of rows of `encode`, in their order."""
        # Batches are not in the order of the rows, so each row is kept by its number.
        n_rows = len(encoded.inputs)
        found: dict[int, NDArray[np.float32]] = {}
        for chunk in self.chunks(encoded, batch_size):
            logits = self.run(self.batch(self.inputs(encoded, chunk)))
            for i, of_row in zip(chunk.tolist(), logits, strict=True):
                found[i] = self.own(encoded, i, of_row)
            on_progress(len(chunk), n_rows)
        return np.concatenate([found[i] for i in range(n_rows)])

    def chunks(self, encoded: Encoded, batch_size: int) -> list[NDArray[np.intp]]:
        """Return the indices of the rows of each batch."""
        n_rows = len(encoded.inputs)
        return np.split(np.arange(n_rows), range(batch_size, n_rows, batch_size))

    def inputs(self, encoded: Encoded, chunk: NDArray[np.intp]) -> Sequence[Any]:
        """Return the input of `batch` for some rows."""
        return [encoded.inputs[i] for i in chunk.tolist()]

    def predict(self, encoded: Encoded, **options: Any) -> Predictions:
        """Run the model on labelled rows; options are those of `logits`."""
        assert encoded.labels is not None
        return Predictions(
            encoded.labels,
            logits=self.logits(encoded, **options),
            class_names=self.class_names,
            sentences=encoded.sentences,
        )

    def own(
        self, encoded: Encoded, row: int, logits: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return the logits (n, C) of a row: one, or those of the labelled tokens of a sentence."""
        return logits[None]

    @abstractmethod
    def batch(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """Return tensors on the model's device."""

    @torch.inference_mode()
    def run(self, batch: dict[str, Tensor]) -> NDArray[np.float32]:
        """Return the logits of a batch in float32."""
        return self.model(**batch).logits.float().cpu().numpy()

    @abstractmethod
    def served(self, rows: Dataset, reading: Reading, *, name: str) -> Served:
        """Return a few rows, to compare a pipeline of the saved model with this model."""

    def served_logits(
        self, served: Sequence[Any], logits: NDArray[Any]
    ) -> NDArray[np.float64]:
        """Return the logits (n, C) of a pipeline's scores; `logits` (N, C) are of all rows."""
        return np.asarray(logits[: len(served)], dtype=np.float64)

    def scores_of_served(self, results: Any) -> list[dict[str, float]]:
        """Return a pipeline's output as class name -> score, for each row of `served_logits`."""
        return [{each["label"]: each["score"] for each in scores} for scores in results]

    @abstractmethod
    def identities(
        self, rows: Dataset, reading: Reading, *, name: str
    ) -> Iterable[Any]:
        """Return a key for each example, which is equal for equal inputs."""


def load_classifier(
    source: str | Path,
    task: str | Task = "text",
    *,
    trust_remote_code: bool = False,
    class_names: Sequence[str] | None = None,
) -> Classifier:
    """Load a fine-tuned classifier from the Hub or a folder, on the accelerator if there is one.

    Pass class names, in the model's order, for a model whose config has LABEL_0, LABEL_1, ... Raise
    ValueError if the model cannot be loaded, lacks a trained head or its tokenizer or image
    processor, or is not a classifier.
    """
    check_names("class_names", class_names)
    row = TASKS[task] if isinstance(task, str) else task
    classifier = row.classifier_class.load(
        source, row, trust_remote_code=trust_remote_code
    )
    config = classifier.model.config
    check_problem(config, row)
    if class_names is None or not are_unnamed(classifier.class_names):
        return classifier
    names = names_in_data(classifier.class_names, class_names)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: i for i, name in enumerate(names)}
    return replace(classifier, class_names=names)


def predict(
    classifier: Classifier,
    rows: Dataset,
    *,
    on_progress: OnRows = ignore_rows,
    **reading: Any,
) -> Predictions:
    """Run a classifier on labelled rows, read with `Reading(**reading)`; the order stays.

    The logits (N, C) are float32. Raise ValueError or TypeError if there are no rows, a column does
    not fit, or the tokenizer does not know the texts.
    """
    how = Reading(**reading)
    size = how.batch_size
    check(
        size >= 1, "batch_size to be at least 1", size, "leave it out for the default"
    )
    encoded = classifier.encode(rows, how, name="the rows")
    return classifier.predict(encoded, batch_size=size, on_progress=on_progress)
