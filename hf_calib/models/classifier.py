"""A trained model with what reads its inputs; each way of reading is a subclass in a file of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_calib._errors import check
from hf_calib.models.labels import are_unnamed, class_ids, names_in_data
from hf_calib.models.loading import check_problem, load_trained
from hf_calib.models.reading import Reading
from hf_calib.models.tasks import TASKS, Task
from hf_calib.predictions.predictions import Predictions

if TYPE_CHECKING:
    from datasets import Dataset

# Called with the number of rows just predicted and of all rows.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Encoded:
    """Rows that a classifier can read: they have been checked.

    Args:
        inputs: one for each row.
        labels: (N,) or (N, C), of what is predicted; None where they are not read.
        sentences: (N,) which sentence each token is of; None for other tasks.
        note: on the inputs, for the report; None where there is nothing to say.
    """

    inputs: Any
    labels: NDArray[Any] | None = None
    sentences: NDArray[np.int64] | None = None
    note: str | None = None


@dataclass(frozen=True, eq=False)
class Classifier(ABC):
    """A model and its tokenizer or image processor, as a pipeline would load them, but in float32.

    Args:
        model: in evaluation mode.
        processing_class: what is saved beside it: the tokenizer or image processor.
        class_names: C names, in the order of the logits.
        task: its row.
    """

    model: Any
    processing_class: Any
    class_names: tuple[str, ...]
    task: Task

    @classmethod
    def load(cls, source: str | Path, task: Task, *, trust_remote_code: bool = False) -> Classifier:
        """Load a fine-tuned classifier, on the accelerator where there is one."""
        model = load_trained(source, task.auto_class, trust_remote_code=trust_remote_code)
        processing = cls.load_processing(source, model, trust_remote_code=trust_remote_code)
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        names = tuple(str(model.config.id2label[i]) for i in range(model.config.num_labels))
        return cls(model.to(device).eval(), processing, names, task)

    @staticmethod
    @abstractmethod
    def load_processing(source: str | Path, model: Any, *, trust_remote_code: bool) -> Any:
        """The tokenizer or image processor, checked."""

    def encode(self, rows: Dataset, reading: Reading, *, name: str, labelled: bool = True) -> Encoded:
        """Check rows and make inputs of them, before the model is run; errors call the data by name."""
        check(len(rows) > 0, "data to have rows", "none", "check the file or the split")
        labels = self.read_labels(rows, reading, name) if labelled else None
        return replace(self.encode_inputs(rows, reading, name=name), labels=labels)

    @abstractmethod
    def encode_inputs(self, rows: Dataset, reading: Reading, *, name: str) -> Encoded:
        """The same without labels."""

    def read_labels(self, rows: Dataset, reading: Reading, name: str) -> NDArray[Any]:
        """The labels, checked: (N,) class ids, or (N, C) of 0 and 1."""
        if not self.task.labels.sigmoid:
            return class_ids(rows, reading.label_column, self.class_names, reading.class_names)
        from hf_calib.data.labels import LabelLayout, label_set_ids, multi_hot_matrix

        names = names_in_data(self.class_names, reading.class_names, "labels")
        layout = LabelLayout(
            reading.label_column, reading.label_columns, reading.label_separator, reading.no_label
        )
        return multi_hot_matrix(label_set_ids(name, layout.read(name, rows), names), len(names))

    @abstractmethod
    def logits(
        self, encoded: Encoded, *, batch_size: int = 32, on_progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """(N, C) of rows of `encode`, in their order."""

    def predict(self, encoded: Encoded, **options: Any) -> Predictions:
        """Run the model over labelled rows; options are those of `logits`."""
        assert encoded.labels is not None
        logits = self.logits(encoded, **options)
        about: Any = {"class_names": self.class_names, "sentences": encoded.sentences}
        return Predictions(encoded.labels, logits=logits, **about)

    @abstractmethod
    def batch(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """Tensors on the model's device."""

    @torch.inference_mode()
    def run(self, batch: dict[str, Tensor]) -> NDArray[np.float32]:
        """The logits of a batch, float32."""
        return self.model(**batch).logits.float().cpu().numpy()

    # ---- What a pipeline with the saved model is compared with ----

    @abstractmethod
    def as_served(self, rows: Dataset, n: int, reading: Reading, *, name: str) -> list[Any]:
        """The first n rows, as a pipeline takes them."""

    def for_plain_pipeline(self, served: Sequence[Any], reading: Reading) -> list[Any]:
        """What a plain pipeline has to be given in the place of rows as hf_calib.pipeline takes them."""
        return list(served)

    @abstractmethod
    def served_batch(self, served: Sequence[Any], reading: Reading) -> dict[str, Tensor]:
        """The inputs that the model reads of these."""

    def served_logits(self, served: Sequence[Any], logits: NDArray[Any]) -> NDArray[np.float64]:
        """(n, C) of what a pipeline gives scores for, of these rows; `logits` (N, C) are those of all rows."""
        return np.asarray(logits[: len(served)], dtype=np.float64)

    @abstractmethod
    def serving_options(self, folder: Path, reading: Reading) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options of a pipeline with the model saved in a folder, and of its call."""

    def scores_of_served(self, results: Any) -> list[dict[str, float]]:
        """A pipeline's output, as class name -> score for each of `served_logits`."""
        return [{each["label"]: each["score"] for each in scores} for scores in results]

    @abstractmethod
    def identities(self, rows: Dataset, reading: Reading, *, name: str) -> Iterable[Any]:
        """A key for each example, equal for examples of the same input."""


def load_classifier(
    source: str | Path,
    task: str | Task = "text",
    *,
    trust_remote_code: bool = False,
    class_names: Sequence[str] | None = None,
) -> Classifier:
    """Load a fine-tuned classifier, on the accelerator where there is one.

    Args:
        source: a model on the Hub, or a local folder.
        task: a row of `TASKS`, or its name.
        trust_remote_code: whether code that comes with the model may run here.
        class_names: names for a model without any, whose config says LABEL_0, LABEL_1, ...; in its order.

    Raises:
        ValueError: if it cannot be loaded, has no trained head or no tokenizer or image processor of its own, or is of
            another kind or a regression.
    """
    row = TASKS[task] if isinstance(task, str) else task
    classifier = row.classifier_class.load(source, row, trust_remote_code=trust_remote_code)
    config = classifier.model.config
    check_problem(config, row)
    if class_names is None or not are_unnamed(classifier.class_names):
        return classifier
    names = names_in_data(classifier.class_names, class_names)
    config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    return replace(classifier, class_names=names)


def predict(
    classifier: Classifier,
    rows: Dataset,
    *,
    on_progress: Progress | None = None,
    **reading: Any,
) -> Predictions:
    """Run a classifier over labelled rows.

    Args:
        classifier: from `load_classifier`.
        rows: any dataset with the columns that it reads.
        on_progress: called with the number of rows done and of all rows.
        **reading: fields of `Reading`, such as text_column.

    Returns:
        Predictions with (N, C) float32 logits, in the rows' order.

    Raises:
        ValueError: if there are no rows, a column is missing or has gaps, the tokenizer does not know the texts,
            or labels do not fit the model.
        TypeError: if a column holds anything but inputs or classes.
    """
    how = Reading(**reading)
    check(how.batch_size >= 1, "batch_size to be at least 1", how.batch_size, "leave it out for the default")
    encoded = classifier.encode(rows, how, name="the rows")
    return classifier.predict(encoded, batch_size=how.batch_size, on_progress=on_progress)
