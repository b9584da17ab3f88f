"""The tasks: one row for each kind of model, with how it is loaded, read, run, served and shown on its card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hf_calib.predictions.labels import MULTI_LABEL, SINGLE_LABEL, TOKENS, LabelKind


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
        assert self.classifier is not None
        module, name = self.classifier.split(".")
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
