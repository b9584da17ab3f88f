"""A source, a model or a file of predictions, and the predictions of every set of rows that a command names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from hf_calib._errors import InputValueError, check, expected
from hf_calib._text import plain_name
from hf_calib.models.reading import Reading, RowSet
from hf_calib.models.tasks import TASKS, Task
from hf_calib.predictions.kinds import MULTI_LABEL, LabelKind
from hf_calib.predictions.logs import is_log, load_log
from hf_calib.predictions.one_pass import OnRows, draw_sample, ignore_rows
from hf_calib.predictions.predictions import Predictions, check_same_classes
from hf_calib.predictions.shared_rows import rows_in_both
from hf_calib.predictions.table import MOST_ROWS_HELD, is_many, open_predictions, suffix_of

# Models and texts need torch and transformers: they are imported where a model is run, so that commands on files
# of predictions start without them.
if TYPE_CHECKING:
    from datasets import Dataset

    from hf_calib.models.classifier import Classifier, Encoded, Progress

# Called with the name of a stage as it begins.
Stages = Callable[[str], None]


def ignore_stage(stage: str) -> None:
    """The stages of a caller who does not want to see them."""


@dataclass(frozen=True)
class Running:
    """How a command runs a model, and whom it tells.

    Args:
        trust_remote_code: whether code that comes with the model may run.
        progress: called with the number of rows just predicted and of all rows.
        stages: called with the name of each stage as it begins.
        rows: called with the number of rows of predictions just read, and of all; None where that is not known.
        as_json: whether stdout is for one JSON object; None in Python.
    """

    trust_remote_code: bool = False
    progress: Progress | None = None
    stages: Stages = ignore_stage
    rows: OnRows = ignore_rows
    as_json: bool | None = None


def is_predictions_file(source: str) -> bool:
    """Whether a name means a file of predictions, or several, rather than a model.

    >>> is_predictions_file("logits.csv.gz"), is_predictions_file("distilbert/distilbert-base")
    (True, False)
    """
    return os.path.isfile(source) or suffix_of(source) is not None or is_many(source)


def name_of(source: str) -> str:
    """A name for titles: the file's without its suffix, the folder's, or the model's.

    >>> name_of("runs/logits.csv.gz"), name_of("s3://bucket/run/*.parquet"), name_of("someone/some-bert-2.1")
    ('logits', 'run', 'someone/some-bert-2.1')
    """
    if is_predictions_file(source):
        parts = [part for part in re.split(r"[\\/]+", source) if part and not re.search(r"[*?\[]", part)]
        last = parts[-1] if parts else "predictions"
        return last.split(".")[0] if suffix_of(last) is not None else plain_name(last)
    return Path(source).resolve().name if os.path.isdir(source) else source


def task_of_source(source: str, rows: RowSet | None, *, trust_remote_code: bool = False) -> Task | None:
    """The task of a model; None for a file of predictions, and for a model whose config cannot be read.

    Raises:
        ValueError: for rows beside a file of predictions, which holds the labels itself, and a model without rows.
    """
    if is_predictions_file(source) and not (rows is not None and os.path.isdir(source)):
        if rows is not None:
            way_out = "the file of predictions holds the labels: leave data out, or name a model"
            raise InputValueError(expected("data", "be given with a model only", rows.data, way_out))
        return None
    if rows is None:
        way_out = "name labelled texts: a file, a folder or a dataset on the Hub"
        raise InputValueError(expected("data", "be given with a model", "none", way_out))
    from hf_calib.models.loading import find_task

    return find_task(source, trust_remote_code=trust_remote_code)


def check_kind(kind: LabelKind | None, reading: Reading, single_only: Mapping[str, object]) -> None:
    """Refuse options of several labels a row where the model has one class, and the other way round.

    Args:
        kind: of the model's labels; None where it is not known.
        reading: how rows are read.
        single_only: options that go with one class a row only.
    """
    of_label_sets = (reading.label_separator, reading.label_columns, reading.no_label)
    if any(of_label_sets) and kind is not None and kind is not MULTI_LABEL:
        requirement = "go with a model whose problem_type is multi_label_classification"
        options = "--label-separator, --label-columns and --no-label"
        raise InputValueError(expected(options, requirement, "one with a class a row", "leave them out"))
    for option, value in single_only.items():
        if value and kind is MULTI_LABEL:
            got, way_out = "one with several labels a row", "leave it out"
            raise InputValueError(expected(option, "go with a model with one class a row", got, way_out))


@dataclass
class Opened:
    """A source with its sets of rows, which are read and checked; each is predicted when it is asked for.

    Args:
        source: a model or a file of predictions.
        reading: how rows are read.
        running: how the model is run.
        sets: by name: "data", "test_data", ...
        classifier: the model; None for a file.
    """

    source: str
    reading: Reading
    running: Running
    sets: dict[str, RowSet]
    classifier: Classifier | None = None
    rows: dict[str, Dataset] = field(default_factory=dict)
    encoded: dict[str, Encoded] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)
    _found: dict[str, Predictions] = field(default_factory=dict)

    @property
    def kind(self) -> LabelKind:
        """Of the labels."""
        return self._found["data"].kind if self.classifier is None else self.classifier.task.labels

    @property
    def class_names(self) -> tuple[str, ...]:
        """C names, or numbers."""
        return self._found["data"].names if self.classifier is None else self.classifier.class_names

    def n_rows(self, name: str) -> int:
        """How many rows a set has."""
        return len(self._found[name]) if self.classifier is None else len(self.rows[name])

    def predictions(self, name: str) -> Predictions | None:
        """Of a set with labels; None where there is no such set."""
        if name not in self.sets:
            return None
        if name not in self._found and self.classifier is not None:
            run: dict[str, Any] = {
                "batch_size": self.reading.batch_size,
                "on_progress": self.running.progress,
            }
            found = self.classifier.predict(self.encoded[name], **run)
            self._found[name] = self.reading.with_columns(found, self.rows[name])
        return self._found[name]

    def logits(self, name: str) -> NDArray[Any] | None:
        """(N, C) of a set, whose labels are not read; None where there is no such set."""
        if name not in self.sets:
            return None
        if self.classifier is None:
            return self._found[name].as_logits()
        return self.classifier.logits(
            self.encoded[name], batch_size=self.reading.batch_size, on_progress=self.running.progress
        )

    def notes(self) -> tuple[str, ...]:
        """On the inputs."""
        return (*self.samples, *(each.note for each in self.encoded.values() if each.note is not None))

    def n_shared(self) -> int:
        """How many of the test rows are also among the others."""
        if "test_data" not in self.sets:
            return 0
        if self.classifier is None:
            return rows_in_both(self._found["data"], self._found["test_data"])
        fitted, tested = (
            self.classifier.identities(self.rows[name], self.reading, name=self.sets[name].data)
            for name in ("data", "test_data")
        )
        known = set(fitted)
        found = self.predictions("test_data")
        assert found is not None  # of tokens, there are some that the model does not read
        return min(sum(each in known for each in tested), len(found))


def open_source(
    source: str,
    task: Task | None,
    sets: Mapping[str, RowSet | None],
    reading: Reading,
    running: Running,
    *,
    prepare: Callable[[Classifier], None] | None = None,
    sampled: bool = False,
) -> Opened:
    """Read every set of rows, load the model, and check that they go together; nothing is predicted yet.

    Args:
        source: a model, or a file of predictions.
        task: of a model, from `task_of_source`.
        sets: by name, "data" the first; None for those that were not given.
        reading: how columns are read.
        running: how the model is run.
        prepare: called with the model before anything is encoded; it may raise, or undo a map in the head.
        sampled: whether of more predictions than are held at once a sample is read.

    Raises:
        ValueError: if source or data are missing, unreadable or do not go together.
        TypeError: if columns or arrays are of the wrong kind.
    """
    given = {name: each for name, each in sets.items() if each is not None}
    opened = Opened(source, reading, running, given)
    stages = running.stages
    if is_predictions_file(source) and given["data"].data == source:
        _read_files(opened, sampled=sampled)
        return opened
    from hf_calib.models.classifier import load_classifier

    task = task or TASKS["text"]  # whose loading says what is wrong
    if task.classifier is None:
        got, way_out = f"a model for {task.pipeline}", "evaluate a file of its predictions"
        kinds = "a classifier of texts, tokens or images"
        raise InputValueError(expected("the model", f"be {kinds}", got, way_out))
    for name, each in given.items():
        stages(f"reading {each.data}")
        opened.rows[name] = each.load()
    stages(f"loading {source}")
    opened.classifier = load_classifier(
        source, task, trust_remote_code=running.trust_remote_code, class_names=reading.class_names
    )
    if prepare is not None:
        prepare(opened.classifier)
    for name, each in given.items():
        stages(f"checking {len(opened.rows[name]):,} {task.inputs}")
        opened.encoded[name] = opened.classifier.encode(
            opened.rows[name], reading, name=each.data, labelled=each.labelled
        )
    stages(f"predicting {sum(map(len, opened.rows.values())):,} rows")
    return opened


def _read_files(opened: Opened, *, sampled: bool) -> None:
    """Read files of predictions; those without labels have to be of the same model."""
    for name, each in opened.sets.items():
        opened.running.stages(f"reading {each.data}")
        found, of = _read_predictions(each, opened.reading, sampled=sampled)
        if of is not None:
            opened.samples.append(
                f"The rows of {each.argument} are a sample of {len(found):,} of the {of} rows, drawn by hashes of "
                "their files' names and their numbers."
            )
        if not each.labelled:
            check_same_classes(_TITLES[each.argument], opened._found["data"], found)
        opened._found[name] = found


def _read_predictions(rows: RowSet, reading: Reading, *, sampled: bool) -> tuple[Predictions, str | None]:
    """The rows, or a sample of them and how many there are."""
    if is_log(rows.data):
        return load_log(rows.data, reading.of_logs), None
    columns = reading.of_tables if rows.labelled else {"label_column": None}
    table = open_predictions(rows.data, **columns)
    if table.fits_into_memory():
        return table.load(), None
    total = "more" if table.n_rows is None else f"{table.n_rows:,}"
    requirement = f"{rows.argument} to have at most {MOST_ROWS_HELD:,} rows here"
    check(sampled, requirement, total, "name some of the files")
    return draw_sample(table, most=MOST_ROWS_HELD), total


_TITLES = {"target_data": "the target data", "ood_data": "the data from elsewhere"}
