"""A source, files of predictions or a model, and its predictions of every set of rows that a command names."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from hf_calib._errors import check, few, without_secrets
from hf_calib._files import identity
from hf_calib._text import counted, plain_name
from hf_calib.models.reading import Reading, RowSet, names_in_data
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

# Models need torch and transformers, which commands on files of predictions start without.
if TYPE_CHECKING:
    from hf_calib.commands.options import Calibrate, Decide, Evaluate
    from hf_calib.models.classifier import Task


@dataclass(frozen=True)
class Running:
    """How a command runs a model, and whom it tells."""

    trust_remote_code: bool = False
    progress: OnRows = ignore_rows
    # Called with a line: the name of a stage as it begins; what a reader has to know before the command ends.
    stages: Callable[[str], None] = lambda stage: None
    warn: Callable[[str], None] = lambda line: None


@dataclass
class Source:
    """Sets of rows by names, "data" and perhaps "test_data" and others, and the predictions of them."""

    name: str
    sets: dict[str, RowSet]
    reading: Reading
    running: Running
    notes: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    beside: Any = (
        None  # the calibrator next to the model that `hf_calib.pipeline` applies
    )

    def predictions(self, name: str = "data") -> Any:
        """`Predictions` or `TopLabels` of a set with labels, read or predicted once."""
        if name not in self.found:
            self.found[name] = self._predict(name)
        return self.found[name]

    def _predict(self, name: str) -> Any:
        raise NotImplementedError

    def served(self, name: str = "data") -> Any:
        """The predictions of a set as served, by a calibrator next to the model if there is one."""
        found = self.predictions(name)
        if self.beside is None:
            return found
        probs = self.beside.predict_proba(found.as_logits())
        return replace(found, logits=None, probs=probs)

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
                columns |= {"label_column": None, "weight_column": None, "by": ()}
            self.read[name] = read_predictions(
                self.files if name == "data" else each.data,
                **columns,
                all_columns=self.all_columns,
                on_rows=self.running.progress,
            )
        files = {name: each.files for name, each in self.read.items()}
        endings = {suffix_of(file.path) for each in files.values() for file in each}
        check(
            ".jsonl" in endings or self.reading.option_scores == "sum",
            "option_scores to be given with a log of lm-evaluation-harness only",
            repr(self.reading.option_scores),
            "leave it out, as it has no effect here",
        )
        found = self.predictions()
        is_named = self.reading.class_names is not None
        requirement = "class_names to be given with a score for each class"
        got = "the confidences of top labels"
        way_out = "leave it out, as it has no effect here"
        is_top = found.kind is TOP_LABELS
        check(not (is_top and is_named), requirement, got, way_out)
        names_in_data(found.names, self.reading.class_names)
        places = {
            name: {identity(file.path) for file in each} for name, each in files.items()
        }
        _check_apart(self.sets, places)

    def _predict(self, name: str) -> Predictions | TopLabels:
        found = self.read[name].predictions
        rows = self.sets[name]
        if not rows.labelled:
            what = "the data from elsewhere"
            own = self.predictions()
            check_same_classes(what, own, found)
            kind = "probs" if own.logits is None else "logits"
            other = "probs" if found.logits is None else "logits"
            way_out = "use predictions of one kind"
            requirement = f"{what} to hold {kind}, as the data do"
            check(kind == other, requirement, other, way_out)
        return found

    def n_files(self, name: str = "data") -> int | None:
        n_files = len(self.read[name].files)
        return n_files if n_files > 1 else None


@dataclass
class ModelSource(Source):
    """A model that is run over rows."""

    model: str = field(kw_only=True)
    task: Task = field(kw_only=True)

    def __post_init__(self) -> None:
        from hf_calib.models.classifier import load_classifier

        self.rows, self.inputs, self.columns = {}, {}, {}
        for name, each in self.sets.items():
            self.running.stages(f"reading {each.data}")
            self.rows[name] = each.load()
        self.running.stages(f"loading {self.model}")
        trusted, names = self.running.trust_remote_code, self.reading.class_names
        self.classifier = load_classifier(
            self.model, self.task, trust_remote_code=trusted, class_names=names
        )
        self._find_calibrator()
        for name, each in self.sets.items():
            self.running.stages(f"checking {counted(len(self.rows[name]), 'row')}")
            if each.labelled:
                self.columns[name] = self.reading.columns(self.rows[name])
            how: Any = {"name": each.data, "labelled": each.labelled}
            self.inputs[name] = self.classifier.encode(
                self.rows[name], self.reading, **how
            )
        self.notes += [
            each.note for each in self.inputs.values() if each.note is not None
        ]
        self.running.stages(
            f"predicting {counted(sum(map(len, self.rows.values())), 'row')}"
        )
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

    def size(self) -> tuple[tuple[str, ...], int]:
        return self.classifier.class_names, len(self.rows["data"])

    def _predict(self, name: str) -> Predictions:
        found = self.classifier.predict(self.inputs[name], **self._batches)
        return replace(found, **self.columns[name])

    def logits(self, name: str) -> NDArray[Any]:
        return self.classifier.logits(self.inputs[name], **self._batches)

    def about(self) -> dict[str, Any]:
        from hf_calib.models.weights import fingerprint

        rows, weights = self.sets["data"], fingerprint(self.classifier.model)
        return {
            **rows.source(),
            "options": rows.options(self.reading),
            "fingerprint": weights,
        }

    def n_shared(self) -> int:
        tested = self.tested()
        if tested is None:
            return 0
        fitted, reported = (
            self.classifier.identities(
                self.rows[name], self.reading, name=self.sets[name].data
            )
            for name in ("data", "test_data")
        )
        known = set(fitted)
        # Of tokens, there are some that the model does not read.
        return min(sum(each in known for each in reported), len(tested))


def open_source(
    options: Evaluate | Calibrate | Decide,
    running: Running,
    check_labels: Callable[[LabelKind], None],
    *,
    all_columns: bool = False,
) -> FileSource | ModelSource:
    """Read the predictions, or load the model and check every row of all sets; nothing is predicted yet.

    `check_labels` refuses options that do not fit the kind of the labels, as early as that is known. Of tables, all
    columns are kept if they are asked for.
    """
    data, sets = options.data, options.row_sets()
    files = [options.source] if isinstance(options.source, str) else options.source
    if len(files) > 1 or (
        is_predictions(files[0]) and (data is None or not os.path.isdir(files[0]))
    ):
        way_out = (
            "the file of predictions holds the labels: leave data out, or name a model"
        )
        check(data is None, "data to be given with a model only", data, way_out)
        options.check_unused(options.of_models, "a model")
        _check_is_outside(
            options.output, [*files, *(each.data for each in sets.values())]
        )
        sets = {"data": RowSet(few(files)), **sets}
        found = FileSource(
            few([name_of(file) for file in files]),
            sets,
            options,
            running,
            files=files,
            all_columns=all_columns,
        )
        check_labels(found.predictions().kind)
        return found
    is_folder = data is None and os.path.isdir(files[0])
    requirement = f"{files[0]} to hold predictions or a model"
    way_out = f"name a folder with files that end in {', '.join(FORMATS)}, or with a config.json"
    check(not is_folder or holds_model(files[0]), requirement, "neither", way_out)
    way_out = "name labelled texts: a file, a folder or a dataset on the Hub"
    check(data is not None, "data to be given with a model", "none", way_out)
    options.check_unused(options.of_predictions, "predictions")
    for name in ("data", "test_data"):
        if name not in sets or os.path.isfile(sets[name].data):
            split = name.replace("data", "split")
            options.check_unused(split, f"{name} that is a folder or on the Hub")
    _check_apart(
        sets,
        {name: {(identity(each.data), each.place)} for name, each in sets.items()},
    )
    from hf_calib.models.classifier import find_task

    task = find_task(files[0], trust_remote_code=running.trust_remote_code)
    check_labels(task.labels)
    return ModelSource(
        name_of(files[0]), sets, options, running, model=files[0], task=task
    )


def _check_apart(sets: Mapping[str, RowSet], places: Mapping[str, set[Any]]) -> None:
    """Raise if rows to test on, or of none of the classes, are also the data."""
    for name, each in sets.items():
        is_other = each.argument in ("test_data", "ood_data")
        check(
            not is_other or not places[name] & places["data"],
            f"{each.argument} to be other rows than the data",
            f"{each.data}, which are among both",
            "name other rows, or leave it out",
        )


def _check_is_outside(output: Path | None, sources: Sequence[str]) -> None:
    """Raise if the output lies where all files are read, as it would be read with them the next time."""
    for source in sources:
        where = Path(source.removeprefix("file://"))
        is_pattern = [bool(re.search(r"[*?\[]", part)) for part in where.parts]
        folder = where
        if not where.is_dir() and any(is_pattern[:-1]):
            folder = Path(*where.parts[: is_pattern.index(True)])
        if output is None or not folder.is_dir():
            continue
        is_inside = output.resolve().is_relative_to(folder.resolve())
        check(
            not is_inside
            or not is_read(output.resolve().relative_to(folder.resolve()) / "a.npz"),
            "output to be outside the folders of predictions that are read",
            f"{output} in {source}",
            "name another folder, so that the output is not read as predictions later",
        )


def name_of(source: str) -> str:
    """A name for titles: the file's without its suffix, the folder's, or the model's.

    >>> name_of("runs/logits.csv.gz"), name_of("s3://bucket/run/*.parquet"), name_of("someone/some-bert-2.1")
    ('logits', 'run', 'someone/some-bert-2.1')
    """
    if is_predictions(source):
        parts = [
            part
            for part in re.split(r"[\\/]+", without_secrets(without_query(source)))
            if part and not re.search(r"[*?\[]", part)
        ]
        last = parts[-1] if parts else "predictions"
        return last.split(".")[0] if suffix_of(last) is not None else plain_name(last)
    return Path(source).resolve().name if os.path.isdir(source) else source


def check_kind(
    kind: LabelKind, reading: Reading, single_only: Mapping[str, object]
) -> None:
    """Refuse options of several labels per row for a model with one class, and `single_only` the other way round."""
    of_sets = "--label-separator, --label-columns and --no-label"
    asked = any((reading.label_separator, reading.label_columns, reading.no_label))
    for option, given in {of_sets: asked, **single_only}.items():
        several = option == of_sets
        what = (
            "whose problem_type is multi_label_classification"
            if several
            else "with one class per row"
        )
        got = (
            "one with several labels per row"
            if kind is MULTI_LABEL
            else "one with a class per row"
        )
        fits = not given or several == (kind is MULTI_LABEL)
        if kind is TOKENS and option in ("--by", "--weight-column", "--soft-labels"):
            fits, got = not given, "one with a class a token"
        check(fits, f"{option} to go with a model {what}", got, "leave it out")
