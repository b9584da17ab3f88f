"""The tasks, one row for each kind of model: how it is loaded and checked, read, run, served and shown on its card."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoConfig

from hf_calib._errors import InputValueError, check, expected, few
from hf_calib.predictions.predictions import MULTI_LABEL, SINGLE_LABEL, TOKENS, LabelKind


@dataclass(frozen=True)
class Task:
    """One row of `TASKS`."""

    name: str
    pipeline: str  # the name of transformers' pipeline that serves it
    architecture: str  # how the class names of its models end, after "For"
    example: str  # an input, in the lines of Python that a card shows
    inputs: str  # the plural of an input
    labels: LabelKind = SINGLE_LABEL
    classifier: str | None = (
        None  # the class here, "module.Class", that runs its models; None: there are only cards
    )
    reads_unlabelled: bool = (
        True  # whether inputs without labels are read, for OOD detection and class frequencies
    )
    n_logits: int | None = None  # how many its models have; None for any number that no other row has

    @property
    def auto_class(self) -> Any:
        """The transformers class that loads its models."""
        import transformers

        return getattr(transformers, f"AutoModelFor{self.architecture}")

    @property
    def classifier_class(self) -> Any:
        """The class that reads its inputs and runs its models."""
        requirement, way_out = (
            "the model to be a classifier of texts, tokens or images",
            "use its predictions",
        )
        check(self.classifier is not None, requirement, f"a model for {self.pipeline}", way_out)
        module, name = str(self.classifier).split(".")
        return getattr(import_module(f"hf_calib.models.{module}"), name)

    @property
    def shows_all_scores(self) -> bool:
        """Whether its pipeline gives the scores of all classes where it is asked for them by `top_k=None`."""
        return self.pipeline in ("text-classification", "image-classification")

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Whether a model with this config.json, whose architecture is one of the task's, gives such labels."""
        if self.n_logits is not None:
            names = config.get("id2label")
            return isinstance(names, Mapping) and len(names) == self.n_logits
        return self.labels.sigmoid == (config.get("problem_type") == "multi_label_classification")


_TEXT = ("text-classification", "SequenceClassification", "a text", "texts")
_IMAGE = ("image-classification", "ImageClassification", "an_image.png", "images")
_TOKEN = ("token-classification", "TokenClassification", "a text", "sentences")
_ROWS = (
    Task("one-logit text", *_TEXT, MULTI_LABEL, "texts.OneLogitClassifier", n_logits=1),
    Task("text", *_TEXT, SINGLE_LABEL, "texts.TextClassifier"),
    Task("multi-label text", *_TEXT, MULTI_LABEL, "texts.TextClassifier"),
    Task("token", *_TOKEN, TOKENS, "tokens.TokenClassifier", reads_unlabelled=False),
    Task("image", *_IMAGE, SINGLE_LABEL, "images.ImageClassifier"),
    Task("multi-label image", *_IMAGE, MULTI_LABEL, "images.ImageClassifier"),
    Task("audio", "audio-classification", "AudioClassification", "a_recording.wav", "recordings"),
    Task("video", "video-classification", "VideoClassification", "a_video.mp4", "videos"),
    Task("next token", "text-generation", "CausalLM", "a text", "texts", TOKENS),
)
TASKS: dict[str, Task] = {task.name: task for task in _ROWS}


def task_of(config: Mapping[str, Any]) -> Task | None:
    """The task of a model with this config.json; None if it is none of ours.

    >>> task_of({"architectures": ["BertForSequenceClassification"]}).name
    'text'
    >>> task_of({"architectures": ["ViTForImageClassification"], "problem_type": "multi_label_classification"}).name
    'multi-label image'
    """
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    known = {architecture, *(config.get("auto_map") or {})}
    found = [task for task in _ROWS if any(f"For{task.architecture}" in name for name in known)]
    # Token and other models have no multi-label form here.
    return next((task for task in found if task.fits(config)), found[-1] if found else None)


# What broken or missing files of a model raise; a RuntimeError is of weights of another shape.
_UNLOADABLE = (
    *(OSError, ValueError, KeyError, ImportError, EOFError, RuntimeError),
    *(SafetensorError, pickle.UnpicklingError),
)


def load_trained(name: str | Path, model_class: Any, *, trust_remote_code: bool = False) -> Any:
    """Load a model in float32; a ValueError if it cannot be loaded, or some of its weights are new."""
    way_out = "name a fine-tuned classifier on the Hub or in a folder; check that its files are complete"
    with refusals("the model", "be loadable", name, way_out):
        model, report = model_class.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    new = sorted(report["missing_keys"])
    check(not new, "the model to be a fine-tuned classifier", f"no {few(new)} in {name}", "train it first")
    return model


def check_problem(config: Any, task: Task) -> None:
    """Refuse the configuration of a model with several labels a row where one is wanted, or the other way round."""
    problem = config.problem_type
    if task.labels is TOKENS:
        return
    if task.n_logits == 1:
        fits = problem in (None, "multi_label_classification")
        requirement, way_out = "be a classifier", "a regression has no probabilities to calibrate"
    elif task.labels.sigmoid:
        fits = problem == "multi_label_classification"
        requirement, way_out = "have several labels", "set its problem_type to multi_label_classification"
    else:
        fits = problem in (None, "single_label_classification") and config.num_labels > 1
        requirement, what = "choose one of several classes", task.inputs.removesuffix("s")
        way_out = f"several labels per {what} can be scaled with PerLabelTemperatureScaling in Python"
    got = f"problem_type={problem!r} and {config.num_labels} outputs"
    check(fits, f"the model to {requirement}", got, way_out)


def find_task(source: str | Path, *, trust_remote_code: bool = False) -> Task:
    """The task of a model by its config; of texts if that does not say it, as loading says what is wrong then."""
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except _UNLOADABLE:
        return TASKS["text"]
    task = task_of(config.to_dict())
    if task is None and type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING and not config.architectures:
        return TASKS["image"]
    return task or TASKS["text"]


@contextmanager
def refusals(argument: str, requirement: str, got: object, way_out: str) -> Iterator[None]:
    """Turn the libraries' errors about a name into one line that says what to do."""
    try:
        yield
    except _UNLOADABLE as error:
        cause = " ".join(str(error).split())
        if "trust_remote_code" in cause:
            way_out = "--trust-remote-code runs the code that comes with it, if you trust its author"
        raise InputValueError(expected(argument, requirement, f"{got} ({cause})", way_out)) from error
