"""The tasks: one row for each kind of model, with how it is loaded, read, run, served and shown on its card.

A further task is a further row here and, where its inputs are read in another way, a class here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hf_calib.predictions.kinds import MULTI_LABEL, SINGLE_LABEL, TOKENS, LabelKind


@dataclass(frozen=True)
class Task:
    """One row of `TASKS`.

    Args:
        name: of the row.
        pipeline: the name of transformers' pipeline that serves it.
        architecture: how the class names of its models end, after "For".
        example: an input, in the lines of Python that a card shows.
        inputs: the plural of an input.
        labels: the kind of its labels.
        classifier: the class in `hf_calib.models`, "module.Class", that reads its inputs and runs its models; None
            where the commands do not run them.
        reads_unlabelled: whether inputs without labels are read, for OOD detection and class frequencies.
        n_logits: how many its models have; None for any number that no other row has.
    """

    name: str
    pipeline: str
    architecture: str
    example: str
    inputs: str
    labels: LabelKind = SINGLE_LABEL
    classifier: str | None = None
    reads_unlabelled: bool = True
    n_logits: int | None = None

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


_OF_TEXT = ("text-classification", "SequenceClassification", "a text", "texts")
_OF_IMAGE = ("image-classification", "ImageClassification", "an_image.png", "images")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            *("one-logit text", *_OF_TEXT, MULTI_LABEL, "one_logit.OneLogitClassifier"),
            n_logits=1,
        ),
        Task("text", *_OF_TEXT, classifier="texts.TextClassifier"),
        Task("multi-label text", *_OF_TEXT, MULTI_LABEL, "texts.TextClassifier"),
        Task(
            *("token", "token-classification", "TokenClassification", "a text", "sentences"),
            *(TOKENS, "tokens.TokenClassifier"),
            reads_unlabelled=False,
        ),
        Task("image", *_OF_IMAGE, classifier="images.ImageClassifier"),
        Task("multi-label image", *_OF_IMAGE, MULTI_LABEL, "images.ImageClassifier"),
        # Of these there are only cards.
        Task("audio", "audio-classification", "AudioClassification", "a_recording.wav", "recordings"),
        Task("video", "video-classification", "VideoClassification", "a_video.mp4", "videos"),
        Task("next token", "text-generation", "CausalLM", "a text", "texts", TOKENS),
    )
}


def task_of(config: Mapping[str, Any]) -> Task | None:
    """The task of a model with this config.json; None if it is none of ours.

    >>> task_of({"architectures": ["BertForSequenceClassification"]}).name
    'text'
    >>> task_of({"architectures": ["ViTForImageClassification"], "problem_type": "multi_label_classification"}).name
    'multi-label image'
    """
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    auto_map = config.get("auto_map")
    of_its_own = auto_map if isinstance(auto_map, Mapping) else {}
    found = [
        task
        for task in TASKS.values()
        if f"For{task.architecture}" in architecture or f"AutoModelFor{task.architecture}" in of_its_own
    ]
    # Token and other models have no multi-label form here.
    return next((task for task in found if task.fits(config)), found[-1] if found else None)
