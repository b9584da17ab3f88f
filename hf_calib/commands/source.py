"""A source, files of predictions or a model, and its predictions of every set of rows that a
command names.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from hf_calib._errors import check, few, without_secrets
from hf_calib._files import identity
from hf_calib._text import counted, plain_name
from hf_calib.models.reading import RowSet, names_in_data
from hf_calib.predictions.predictions import (
    FORMATS,
    MULTI_LABEL,
    TOKENS,
    TOP_LABELS,
    LabelKind,
    OnRows,
    Predictions,
    TopLabels,
    check_same_classes,
    holds_model,
    ignore_rows,
    is_predictions,
    is_read,
    rows_in_both,
    suffix_of,
    without_query,
)
from hf_calib.predictions.reading import Read, read_predictions
from hf_calib.scaling.saved_map import MAP_NAME, load_map, map_title, method_of

# Models need torch and transformers, which commands on files of predictions start without.
if TYPE_CHECKING:
    from hf_calib.commands.options import Calibrate, Decide, Evaluate, Rows
    from hf_calib.models.classifier import Task


@dataclass(frozen=True)
class Running:
    """How a command runs a model, and whom it tells."""

    trust_remote_code: bool = False
    progress: OnRows = ignore_rows
    # Called with a line: the name of a stage as it begins;
    # what a reader has to know before the command ends.
    stages: Callable[[str], None] = lambda stage: None
    warn: Callable[[str], None] = lambda line: None


@dataclass
class Source:
    """Sets of rows by names, "data" and perhaps "test_data" and others,
    and the predictions of them.
    """

    name: str
    sets: dict[str, RowSet]
    reading: Rows
    running: Running
    notes: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    # The calibrator next to the model that `hf_calib.pipeline` applies.
    beside: Any = None

    def predictions(self, name: str = "data") -> Any:
        """`Predictions` or `TopLabels` of a set with labels, read or predicted once."""
        if name not in self.found:
            found = self._predict(name)
            if name != "data":
                check_same_classes(self.sets[name].argument, self.predictions(), found)
            self.found[name] = found
        return self.found[name]

    def _predict(self, name: str) -> Any:
        raise NotImplementedError

    @property
    def kind(self) -> LabelKind:
        """The kind of the labels."""
        return self.predictions().kind

    def served(self, name: str = "data") -> Any:
        """The predictions of a set as served, by a calibrator next to the model if there is one."""
        found = self.predictions(name)
        if self.beside is None:
            return found
        probs = self.beside.predict_proba(found.as_logits())
        return replace(found, logits=None, probs=probs)

    def on_serving(self) -> list[str]:
        """A note on a calibrator next to the model, which plain pipelines do not apply."""
        if self.beside is None:
            return []
        title = map_title(method_of(self.beside))
        return [
            f"hf_calib.pipeline serves the model with the {title} next to it: these are the probabilities after "
            "calibration, and those that a rule is made for. A plain pipeline serves the ones before."
        ]

    def tested(self) -> Any:
        """Of the test data; None without any."""
        return self.predictions("test_data") if "test_data" in self.sets else None

    def logits(self, name: str) -> NDArray[Any]:
        """(N, C) of a set, whose labels are not read."""
        return self.predictions(name).as_logits()

    def size(self) -> tuple[tuple[str, ...], int]:
        """The names of the classes, or numbers, and how many rows the data have."""
        return self.predictions().names, len(self.predictions())

    def n_shared(self) -> int:
        """How many of the test rows are also among the others."""
        tested = self.tested()
        return 0 if tested is None else rows_in_both(self.predictions(), tested)

    def n_files(self, name: str = "data") -> int | None:
        """How many files of predictions a set has; None if it is one, or a model."""
        return None

    def about(self) -> dict[str, Any]:
        """Which rows and weights these are, for readers of report.json; a file says it."""
        return {}


@dataclass
class FileSource(Source):
    """Files of predictions of one model."""

    files: list[str] = field(kw_only=True)
    all_columns: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.read: dict[str, Read] = {}
        for name, each in self.sets.items():
            self.running.stages(f"reading {each.data}")
            columns = dict(self.reading.of_tables)
            if not each.labelled:
                # Inputs of none of the classes have neither labels nor weights.
                columns |= {"label_column": None, "weight_column": None, "by": ()}
            self.read[name] = read_predictions(
                self.files if name == "data" else each.data,
                **columns,
                all_columns=self.all_columns,
                on_rows=self.running.progress,
            )
        notes = [note for each in self.read.values() for note in each.notes]
        # Data and test data that are read alike have the same notes.
        self.notes += dict.fromkeys(notes)
        files = {name: each.files for name, each in self.read.items()}
        endings = {suffix_of(file.path) for each in files.values() for file in each}
        # Only files with this ending may be logs.
        if ".jsonl" not in endings:
            self.reading.check_unused("a log of lm-evaluation-harness")
        found = self.predictions()
        if self.kind is TOP_LABELS:
            self.reading.check_unused("a score for each class")
        names_in_data(found.names, self.reading.class_names)
        places = {
            name: {identity(file.path) for file in each} for name, each in files.items()
        }
        _check_apart(self.sets, places)

    def _predict(self, name: str) -> Predictions | TopLabels:
        found = self.read[name].predictions
        if name == "data":
            return found
        # A map that is fitted to logits is not one of their probabilities,
        # and wrong and correct are not two classes.
        rows = self.sets[name]
        wanted = _form(self.predictions(), with_labels=rows.labelled)
        form = _form(found, with_labels=rows.labelled)
        requirement = f"{rows.argument} to hold {wanted}, as the data do"
        check(form == wanted, requirement, form, "use predictions of one kind")
        return found

    def n_files(self, name: str = "data") -> int | None:
        n_files = len(self.read[name].files)
        return n_files if n_files > 1 else None


def _form(found: Any, *, with_labels: bool) -> str:
    """What predictions hold for each class, and of what kind they are if their labels tell it."""
    scores = "probs" if found.logits is None else "logits"
    return f"{found.kind.name} {scores}" if with_labels else scores


@dataclass
class ModelSource(Source):
    """A model that is run over rows."""

    model: str = field(kw_only=True)
    task: Task = field(kw_only=True)

    def __post_init__(self) -> None:
        from hf_calib.models.classifier import load_classifier

        self.rows: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}
        self.columns: dict[str, dict[str, Any]] = {}
        self.cut_at: int | None = None
        for name, each in self.sets.items():
            self.running.stages(f"reading {each.data}")
            # A misspelt file is found before the model is loaded.
            self.rows[name] = each.load()
        self.running.stages(f"loading {self.model}")
        self.classifier = load_classifier(
            self.model,
            self.task,
            trust_remote_code=self.running.trust_remote_code,
            class_names=self.reading.class_names,
        )
        self._find_calibrator()
        for name, each in self.sets.items():
            rows = self.rows[name]
            self.running.stages(f"checking {counted(len(rows), 'row')}")
            if each.labelled:
                self.columns[name] = self.reading.columns(rows)
            # The rows of all sets are checked before those of the first are predicted.
            inputs = self.classifier.encode(
                rows, self.reading, name=each.data, labelled=each.labelled
            )
            self.inputs[name] = inputs
            if inputs.note is not None:
                self.notes.append(inputs.note)
            self.cut_at = inputs.cut_at or self.cut_at
        n_rows = sum(map(len, self.rows.values()))
        self.running.stages(f"predicting {counted(n_rows, 'row')}")
        self._batches: Any = {
            "batch_size": self.reading.batch_size,
            "on_progress": self.running.progress,
        }

    def _find_calibrator(self) -> None:
        """Find the calibrator that is served with the model, and note where it is missing."""
        from hf_calib.models.pipeline import calibrator_in_use

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.beside = calibrator_in_use(self.model, self.classifier.model)
        self.notes += [str(each.message) for each in caught]
        # One beside the weights was compared with them; one in the head may be of others, too.
        path = Path(self.model, MAP_NAME)
        if not path.is_file() or self.beside is not None:
            return
        # A calibrator whose record names no weights may be for these.
        named = load_map(path).about.get("fingerprint")
        if named is not None and named != self.weights:
            self.notes.append(
                f"{path} is for other weights than the model has. Calibrate it again."
            )

    @cached_property
    def weights(self) -> str:
        """The fingerprint of the model, which takes a pass over all of its weights."""
        from hf_calib.models.weights import fingerprint

        return fingerprint(self.classifier.model)

    @property
    def kind(self) -> LabelKind:
        return self.task.labels

    def size(self) -> tuple[tuple[str, ...], int]:
        return self.classifier.class_names, len(self.rows["data"])

    def _predict(self, name: str) -> Predictions:
        found = self.classifier.predict(self.inputs[name], **self._batches)
        return replace(found, **self.columns[name])

    def logits(self, name: str) -> NDArray[Any]:
        return self.classifier.logits(self.inputs[name], **self._batches)

    def about(self) -> dict[str, Any]:
        rows = self.sets["data"]
        return {
            **rows.source(),
            "options": rows.options(self.reading),
            "fingerprint": self.weights,
            **({} if self.cut_at is None else {"cut_at": self.cut_at}),
        }

    def n_shared(self) -> int:
        tested = self.tested()
        if tested is None:
            return 0
        known = set(self._identities("data"))
        n_shared = sum(each in known for each in self._identities("test_data"))
        # Of tokens, there are some that the model does not read.
        return min(n_shared, len(tested))

    def _identities(self, name: str) -> Iterable[Any]:
        """What tells the rows of a set from others."""
        rows = self.sets[name]
        return self.classifier.identities(self.rows[name], self.reading, name=rows.data)


def open_source(
    options: Evaluate | Calibrate | Decide,
    running: Running,
    check_labels: Callable[[LabelKind], None],
    *,
    all_columns: bool = False,
) -> FileSource | ModelSource:
    """Read the predictions, or load the model and check every row of all sets;
    nothing is predicted yet.

    `check_labels` refuses options that do not fit the kind of the labels, as early as that is
    known. Of tables, all columns are kept if they are asked for.
    """
    data = options.data
    sets = options.row_sets()
    files = options.source
    first = files[0]
    is_folder = os.path.isdir(first)
    # A folder with data to predict is that of a model.
    if len(files) > 1 or (is_predictions(first) and not (is_folder and data)):
        way_out = (
            "the file of predictions holds the labels: leave data out, or name a model"
        )
        check(data is None, "data to be given with a model only", data, way_out)
        options.check_unused("a model")
        others = [each.data for each in sets.values()]
        _check_is_outside(options.output, [*files, *others])
        found = FileSource(
            few([name_of(file) for file in files]),
            {"data": RowSet(few(files)), **sets},
            options,
            running,
            files=files,
            all_columns=all_columns,
        )
        check_labels(found.kind)
        return found
    is_model = not is_folder or data is not None or holds_model(first)
    requirement = f"{first} to hold predictions or a model"
    way_out = f"name a folder with files that end in {', '.join(FORMATS)}, or with a config.json"
    check(is_model, requirement, "neither", way_out)
    way_out = "name labelled texts: a file, a folder or a dataset on the Hub"
    check(data is not None, "data to be given with a model", "none", way_out)
    options.check_unused("predictions")
    for name in ("data", "test_data"):
        if name not in sets or os.path.isfile(sets[name].data):
            options.check_unused(f"{name} that is a folder or on the Hub")
    places = {name: {(identity(each.data), each.place)} for name, each in sets.items()}
    _check_apart(sets, places)
    from hf_calib.models.classifier import find_task

    task = find_task(first, trust_remote_code=running.trust_remote_code)
    check_labels(task.labels)
    name = name_of(first)
    return ModelSource(name, sets, options, running, model=first, task=task)


def _check_apart(sets: Mapping[str, RowSet], places: Mapping[str, set[Any]]) -> None:
    """Raise if rows to test on, or of none of the classes, are also the data."""
    for name, each in sets.items():
        is_apart = name == "data" or places[name].isdisjoint(places["data"])
        requirement = f"{each.argument} to be other rows than the data"
        got = f"{each.data}, which are among both"
        check(is_apart, requirement, got, "name other rows, or leave it out")


def _check_is_outside(output: Path | None, sources: Sequence[str]) -> None:
    """Raise if the output lies where all files are read,
    as it would be read with them the next time.
    """
    if output is None:
        return
    target = output.resolve()
    for source in sources:
        folder = Path(source.removeprefix("file://"))
        is_pattern = [bool(re.search(r"[*?\[]", part)) for part in folder.parts]
        # A pattern is looked for below the folder before its first wildcard.
        if not folder.is_dir() and any(is_pattern[:-1]):
            folder = Path(*folder.parts[: is_pattern.index(True)])
        folder = folder.resolve()
        if not folder.is_dir() or not target.is_relative_to(folder):
            continue
        is_input = is_read(target.relative_to(folder) / "a.npz")
        requirement = "output to be outside the folders of predictions that are read"
        way_out = (
            "name another folder, so that the output is not read as predictions later"
        )
        check(not is_input, requirement, f"{output} in {source}", way_out)


def name_of(source: str) -> str:
    """A name for titles: the file's without its suffix, the folder's, or the model's.

    >>> name_of("runs/logits.csv.gz"), name_of("s3://bucket/run/*.parquet"), name_of("someone/some-bert-2.1")
    ('logits', 'run', 'someone/some-bert-2.1')
    """
    if is_predictions(source):
        path = without_secrets(without_query(source))
        # The names between slashes that are no patterns.
        parts = re.findall(r"(?<![^\\/])[^\\/*?\[]+(?![^\\/])", path)
        last = parts[-1] if parts else "predictions"
        return last.split(".")[0] if suffix_of(last) is not None else plain_name(last)
    return Path(source).resolve().name if os.path.isdir(source) else source


def check_kind(kind: LabelKind, options: Rows) -> None:
    """Refuse options that have an effect only on labels of another kind."""
    if kind is MULTI_LABEL:
        options.check_unused("one class per row")
    else:
        options.check_unused("a model with several labels per row")
    if kind is TOKENS:
        options.check_unused("one class per row, not per token")
