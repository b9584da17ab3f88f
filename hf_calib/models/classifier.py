"""Tasks, a table with a row for each kind of model, and classifiers, which load, check and run the models."""

from __future__ import annotations

import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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


# Sizes of a config.json that transformers makes one by one, which could take days or all memory.
_SIZES = {
    **dict.fromkeys(("num_hidden_layers?", "num_layers?"), _n_layers),
    **dict.fromkeys(("n_layers?", "n_layer?"), _n_layers),
    **dict.fromkeys(("encoder_layers?", "decoder_layers?"), _n_layers),
    "num_labels?": _n_labels,
}
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
    pipeline: str  # The name of transformers' pipeline.
    architecture: str  # The end of its models' class names, after "For".
    example: str  # An input, for the Python code on a card.
    inputs: str  # The plural of an input.
    labels: LabelKind = SINGLE_LABEL
    classifier: str | None = (
        None  # the class here, "module.Class", that runs its models; None: there are only cards
    )
    n_logits: int | None = (
        None  # how many its models have; None for any number that no other row has
    )

    @property
    def auto_class(self) -> Any:
        """Return the transformers class that loads its models."""
        import transformers

        return getattr(transformers, f"AutoModelFor{self.architecture}")

    @property
    def classifier_class(self) -> Any:
        """Return the class that reads its inputs and runs its models."""
        requirement, way_out = (
            "the model to be a classifier of texts, tokens or images",
            "use its predictions",
        )
        check(
            self.classifier is not None,
            requirement,
            f"a model for {self.pipeline}",
            way_out,
        )
        module, name = str(self.classifier).split(".")
        return getattr(import_module(f"hf_calib.models.{module}"), name)

    @property
    def shows_all_scores(self) -> bool:
        """Whether its pipeline returns the scores of all classes with `top_k=None`."""
        return self.pipeline in ("text-classification", "image-classification")

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Whether a model with this config.json and an architecture of the task has the task's kind of labels."""
        if self.n_logits is not None:
            names = config.get("id2label")
            return isinstance(names, Mapping) and len(names) == self.n_logits
        return self.labels.sigmoid == (
            config.get("problem_type") == "multi_label_classification"
        )


_TEXT = ("text-classification", "SequenceClassification", "a text", "texts")
_IMAGE = ("image-classification", "ImageClassification", "an_image.png", "images")
_TOKEN = ("token-classification", "TokenClassification", "a text", "sentences")
_ROWS = (
    Task("one-logit text", *_TEXT, MULTI_LABEL, "texts.OneLogitClassifier", n_logits=1),
    Task("text", *_TEXT, SINGLE_LABEL, "texts.TextClassifier"),
    Task("multi-label text", *_TEXT, MULTI_LABEL, "texts.TextClassifier"),
    Task("token", *_TOKEN, TOKENS, "tokens.TokenClassifier"),
    Task("image", *_IMAGE, SINGLE_LABEL, "images.ImageClassifier"),
    Task("multi-label image", *_IMAGE, MULTI_LABEL, "images.ImageClassifier"),
    Task(
        "audio",
        "audio-classification",
        "AudioClassification",
        "a_recording.wav",
        "recordings",
    ),
    Task(
        "video", "video-classification", "VideoClassification", "a_video.mp4", "videos"
    ),
    Task("next token", "text-generation", "CausalLM", "a text", "texts", TOKENS),
)
TASKS: dict[str, Task] = {task.name: task for task in _ROWS}


def task_of(config: Mapping[str, Any]) -> Task | None:
    """Return the task of a model with this config.json, or None if it is not supported.

    >>> task_of({"architectures": ["BertForSequenceClassification"]}).name
    'text'
    >>> task_of({"architectures": ["ViTForImageClassification"], "problem_type": "multi_label_classification"}).name
    'multi-label image'
    """
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    known = {architecture, *(config.get("auto_map") or {})}
    found = [
        task
        for task in _ROWS
        if any(f"For{task.architecture}" in name for name in known)
    ]
    # Other models, such as those of tokens, have no multi-label form here.
    return next(
        (task for task in found if task.fits(config)), found[-1] if found else None
    )


# The errors of broken or missing files; a RuntimeError means weights of another shape, an AttributeError or TypeError
# a config of other types.
_UNLOADABLE = (
    *(OSError, ValueError, LookupError, ImportError, EOFError, RuntimeError),
    *(AttributeError, TypeError),
    *(SafetensorError, pickle.UnpicklingError),
)


def check_sizes(source: str | Path) -> None:
    """Raise for the config.json of a folder whose model is too large to be built."""
    config = Path(source, "config.json")
    if os.path.isfile(config):
        read_json(config, _SIZES)


def load_trained(
    name: str | Path, model_class: Any, *, trust_remote_code: bool = False
) -> Any:
    """Load a model in float32; raise ValueError if it cannot be loaded or some of its weights are new."""
    check_sizes(name)
    way_out = "name a fine-tuned classifier on the Hub or in a folder; check that its files are complete"
    with refusals("the model", "be loadable", name, way_out):
        model, report = model_class.from_pretrained(
            name,
            dtype=torch.float32,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    new = sorted(report["missing_keys"])
    check(
        not new,
        "the model to be a fine-tuned classifier",
        f"no {few(new)} in {name}",
        "train it first",
    )
    return model


def check_problem(config: Any, task: Task) -> None:
    """Raise if a model's configuration has several labels per row where one is needed, or the reverse."""
    problem = config.problem_type
    if task.labels is TOKENS:
        return
    if task.n_logits == 1:
        fits = problem in (None, "multi_label_classification")
        requirement, way_out = (
            "be a classifier",
            "a regression has no probabilities to calibrate",
        )
    elif task.labels.sigmoid:
        fits = problem == "multi_label_classification"
        requirement, way_out = (
            "have several labels",
            "set its problem_type to multi_label_classification",
        )
    else:
        fits = (
            problem in (None, "single_label_classification") and config.num_labels > 1
        )
        requirement, what = (
            "choose one of several classes",
            task.inputs.removesuffix("s"),
        )
        way_out = f"several labels per {what} can be scaled with PerLabelTemperatureScaling in Python"
    got = f"problem_type={problem!r} and {config.num_labels} outputs"
    check(fits, f"the model to {requirement}", got, way_out)


def find_task(source: str | Path, *, trust_remote_code: bool = False) -> Task:
    """The task of a model by its config; of texts if that does not say it, as loading says what is wrong then."""
    check_sizes(source)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except _UNLOADABLE:
        return TASKS["text"]
    task = task_of(config.to_dict())
    if (
        task is None
        and type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        and not config.architectures
    ):
        return TASKS["image"]
    return task or TASKS["text"]


def has_weights(folder: Path, wanted: str) -> bool:
    """Whether a folder's weights have a fingerprint; True if they cannot be loaded, or need code of their own."""
    tensors: dict[str, Tensor] = {}
    try:
        for file in sorted(folder.glob("model*.safetensors")):
            tensors |= load_file(file)
        if hash_of(tensors) == wanted:
            return True
        # Tied weights are in a file once, and files of other formats have other names.
        kind = find_task(folder).auto_class
        model = kind.from_pretrained(folder, dtype="auto", local_files_only=True)
    except _UNLOADABLE:
        return True
    return fingerprint(model) == wanted


@contextmanager
def refusals(
    argument: str, requirement: str, got: object, way_out: str
) -> Iterator[None]:
    """A context that converts the libraries' errors about a name into one line with a way out."""
    try:
        yield
    except _UNLOADABLE as error:
        cause = " ".join(str(error).split())
        if "trust_remote_code" in cause:
            way_out = "--trust-remote-code runs the code that comes with it, if you trust its author"
        raise InputValueError(
            expected(argument, requirement, f"{got} ({cause})", way_out)
        ) from error


@dataclass(frozen=True, eq=False)
class Encoded:
    """Checked rows that a classifier can read."""

    inputs: Any
    labels: NDArray[Any] | None = None  # (N,) or (N, C); None if labels are not read.
    sentences: NDArray[np.int64] | None = (
        None  # (N,) the sentence of each token; None for other tasks.
    )
    note: str | None = None  # About the inputs, for the report.
    cut_at: int | None = None  # The number of tokens that some texts were cut to.
    name: str = ""  # The name of the data in messages.
    counted: Sequence[NDArray[np.bool_]] | None = (
        None  # The labelled sub-words of sentences.
    )


class Served(NamedTuple):
    """Rows in the form of a pipeline's input."""

    inputs: list[Any]  # For hf_calib.pipeline.
    plain: list[Any]  # For a plain pipeline.
    batch: dict[str, Tensor]  # The model's inputs.
    options: dict[str, Any]  # Options of the pipeline.
    call: dict[str, Any]  # Options of its call.


@dataclass(frozen=True, eq=False)
class Classifier(ABC):
    """A model and its tokenizer or image processor, loaded like a pipeline, but in float32."""

    input_columns: ClassVar[tuple[str, ...]] = ("text_column", "text_pair_column")
    model: Any  # In evaluation mode.
    processing_class: Any  # The tokenizer or image processor.
    class_names: tuple[str, ...]  # C names.
    task: Task

    @classmethod
    def load(
        cls, source: str | Path, task: Task, *, trust_remote_code: bool = False
    ) -> Classifier:
        """Load a fine-tuned classifier, on the accelerator if there is one."""
        model = load_trained(
            source, task.auto_class, trust_remote_code=trust_remote_code
        )
        processing = cls.load_processing(
            source, model, trust_remote_code=trust_remote_code
        )
        device = (
            torch.accelerator.current_accelerator()
            if torch.accelerator.is_available()
            else "cpu"
        )
        names = tuple(
            str(model.config.id2label[i]) for i in range(model.config.num_labels)
        )
        return cls(model.to(device).eval(), processing, names, task)

    @staticmethod
    @abstractmethod
    def load_processing(
        source: str | Path, model: Any, *, trust_remote_code: bool
    ) -> Any:
        """Load and check the tokenizer or image processor."""

    def encode(
        self, rows: Dataset, reading: Reading, *, name: str, labelled: bool = True
    ) -> Encoded:
        """Check rows and convert them to inputs, before the model is run; errors call the data by name."""
        check(len(rows) > 0, "data to have rows", "none", "check the file or the split")
        labels = None
        if labelled:
            self.check_inputs_are_no_labels(reading)
            labels = self.read_labels(rows, reading, name)
        return replace(self.encode_inputs(rows, reading, name=name), labels=labels)

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
        return multi_hot_matrix(
            label_set_ids(name, layout.read(name, rows), names), len(names)
        )

    def logits(
        self,
        encoded: Encoded,
        *,
        batch_size: int = 32,
        on_progress: OnRows = ignore_rows,
    ) -> NDArray[np.float32]:
        """Return the logits (N, C) of rows of `encode`, in their order."""
        n_rows = len(encoded.inputs)
        found: dict[int, NDArray[np.float32]] = {}
        for chunk in self.chunks(encoded, batch_size):
            logits = self.run(self.batch(self.inputs(encoded, chunk)))
            found |= {
                i: self.own(encoded, i, each)
                for i, each in zip(chunk.tolist(), logits, strict=True)
            }
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
        logits = self.logits(encoded, **options)
        about: Any = {"class_names": self.class_names, "sentences": encoded.sentences}
        return Predictions(encoded.labels, logits=logits, **about)

    def own(
        self, encoded: Encoded, row: int, logits: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return the logits (n, C) of a row: a single one, or those of the labelled tokens of a padded sentence."""
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
        """Return the logits (n, C) to which a pipeline's scores correspond; `logits` (N, C) are those of all rows."""
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

    Pass class names, in the model's order, for a model whose config has LABEL_0, LABEL_1, ... Raise ValueError if the
    model cannot be loaded, lacks a trained head or its tokenizer or image processor, or is not a classifier.
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
    config.id2label, config.label2id = (
        dict(enumerate(names)),
        {name: i for i, name in enumerate(names)},
    )
    return replace(classifier, class_names=names)


def predict(
    classifier: Classifier,
    rows: Dataset,
    *,
    on_progress: OnRows = ignore_rows,
    **reading: Any,
) -> Predictions:
    """Run a classifier on labelled rows, read with `Reading(**reading)`, and return predictions in their order.

    The logits (N, C) are float32. Raise ValueError or TypeError if there are no rows, a column does not fit, or the
    tokenizer does not know the texts.
    """
    how = Reading(**reading)
    check(
        how.batch_size >= 1,
        "batch_size to be at least 1",
        how.batch_size,
        "leave it out for the default",
    )
    encoded = classifier.encode(rows, how, name="the rows")
    return classifier.predict(
        encoded, batch_size=how.batch_size, on_progress=on_progress
    )
