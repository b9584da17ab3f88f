"""Predictions with their labels, read from files into memory: tables, arrays, and logs.

Files are read once, whole. The scores of all files go into one matrix, a few columns of a row group
at a time, so that no second copy of them exists; every other column becomes one column of all
files, to which one rule applies.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputValueError, check, cut, few, message_of
from hf_calib.metrics.checks import (
    RowError,
    check_share,
    refuse,
)
from hf_calib.predictions.columns import (
    CONFIDENCE,
    CORRECT,
    SCORE,
    Columns,
    Wanted,
    check_different,
    check_slices,
    columns_of,
    numbers_of,
    with_all_options,
)
from hf_calib.predictions.dictionaries import (
    by_option,
    fill_unlisted,
    normalize,
    on_unlisted_labels,
)
from hf_calib.predictions.files import (
    File,
    Opened,
    find_files,
    naming,
    open_file,
    readable,
)
from hf_calib.predictions.formats import load_arrays
from hf_calib.predictions.labels import (
    FLAGS,
    OF_SCORES,
    OF_TABLES,
    are_equal,
    are_flags,
    are_ids,
    is_same,
    label_ids,
    n_different,
    other_label,
)
from hf_calib.predictions.logs import OptionScores, read_log, rows_of_log
from hf_calib.predictions.predictions import (
    OnRows,
    Predictions,
    TopLabels,
    check_not_probabilities,
    check_same_classes,
    ignore_rows,
    suffix_of,
)

# Files that are read at once, each of which waits for its storage.
_AT_ONCE = 8
# Progress is shown from this many rows on; fewer are read in a moment.
_SHOWN = 1_000_000


@dataclass(frozen=True)
class Read:
    """What files hold, returned by `read_predictions`.

    Args:
        name: the sources, for titles.
        files: the files in the order of their names, which is that of the rows.
        predictions: all rows.
        columns: the columns that were read; None for arrays and logs.
        others: all columns that hold no scores, a pyarrow table, if they were asked for.
        notes: what was assumed in reading them, for reports.
    """

    name: str
    files: tuple[File, ...] = field(repr=False)
    predictions: Predictions | TopLabels = field(repr=False)
    columns: Columns | None = None
    others: Any = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def ending(self) -> str:
        """The ending of a file that holds these rows: a table's is .parquet, that of arrays .npz."""
        return ".npz" if self.columns is None else ".parquet"


def read_predictions(
    sources: str | os.PathLike[str] | Sequence[str],
    *,
    label_column: str | None = "label",
    weight_column: str | None = None,
    by: Sequence[str] = (),
    class_names: Sequence[str] | None = None,
    positive_class: str | None = None,
    prob_prefix: str | None = None,
    unlisted_at: float | None = None,
    option_scores: OptionScores = "sum",
    all_columns: bool = False,
    on_rows: OnRows = ignore_rows,
) -> Read:
    """Read files of predictions of one model into memory.

    Use it for slices, weights, or rows of which only the top label is known; `load_predictions` is
    the short form.

    Args:
        sources: files, folders, globs or fsspec addresses (s3://, gs://, hf://, https://,
            memory://), all on one filesystem, in the formats of `load_predictions`. In a folder,
            all files below it are read, also partitions (`country=de/part-0.parquet`) and links,
            except those whose names begin with "_" or ".".
        label_column: column of labels, see `load_predictions`; None if labels are not read.
        weight_column: column of weights, or None.
        by: columns that define slices.
        class_names: names of the classes of columns that do not name them: lists, or the negative
            and the positive class of one score; or the options of dictionaries that are classes.
        positive_class: the label that one score is the probability of; the one other label is the
            negative class. None if the labels are 0 and 1, or the classes have names.
        prob_prefix: beginning of the names of class columns with probabilities; None for prob_.
        unlisted_at: probability of an option that a row's dictionary leaves out, as a list of the
            most probable tokens does; None to refuse such rows.
        option_scores: scores of the answers in a log of lm-evaluation-harness: the "sum" of their
            tokens' log-likelihoods (acc), "per_character" (acc_norm) or "per_byte" (acc_bytes).
        all_columns: True to keep all columns of tables, as `others`.
        on_rows: called after each file with its number of rows, and that of all files, if they are
            many.

    Raises:
        ValueError: if a file is missing, unreadable or truncated, or the files do not go together.

    >>> read_predictions("missing.csv")
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputValueError: expected predictions to name existing files, got missing.csv, where there are ...
    """
    is_one = isinstance(sources, str | os.PathLike)
    listed = [sources] if is_one else sources
    given = [os.fspath(each) for each in _listed("sources", listed, str | os.PathLike)]
    check(bool(given), "sources to name predictions", "none", "name a file or a folder")
    texts = {
        "label_column": label_column,
        "weight_column": weight_column,
        "positive_class": positive_class,
        "prob_prefix": prob_prefix,
    }
    for option, text in texts.items():
        is_text = isinstance(text, str) and bool(text.strip())
        requirement = f"{option} to be one text, or None"
        is_known = text is None or is_text
        check(is_known, requirement, repr(text), "write it as a text")
    by = _listed("by", by, str)
    if class_names is not None:
        class_names = _listed("class_names", class_names, str)
    known = get_args(OptionScores)
    requirement = f"option_scores to be one of {', '.join(known)}"
    check(option_scores in known, requirement, repr(option_scores), "use sum for acc")
    filesystem, files = find_files(given)
    name = given[0] if len(given) == 1 else few(given)
    requirement = "class_names to be left out with positive_class"
    is_one = class_names is None or positive_class is None
    check(is_one, requirement, class_names, "give one of them")
    if unlisted_at is not None:
        unlisted_at = check_share("unlisted_at", unlisted_at, "write 1e-5, for example")
    wanted = Wanted(
        label_column=label_column,
        weight_column=weight_column,
        by=tuple(by),
        class_names=class_names,
        positive_class=positive_class,
        prob_prefix=prob_prefix,
        unlisted_at=unlisted_at,
    )
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        opening = partial(_open, filesystem, files, wanted, option_scores)
        opened = list(pool.map(opening, files))
        tables = [each for each in opened if isinstance(each, Opened)]
        held = [each for each in opened if not isinstance(each, Opened)]
        way_out = "name the files of one kind, or a glob such as 'run/*.parquet'"
        requirement = "predictions to be tables or arrays (.npz)"
        check(not (tables and held), requirement, f"both in {name}", way_out)
        if held:
            return Read(name, tuple(files), _concatenated(held, files))
        with naming(files[0], files):
            columns = columns_of(tables[0], wanted)
        # Headers are compared before any rows are read, which may take long.
        _check_alike(tables, columns, all_columns=all_columns)
        columns = with_all_options(columns, tables, wanted)
        # The error of a thread is raised where its result is taken.
        for _ in pool.map(partial(_load, columns, all_columns=all_columns), tables):
            pass
        n_rows = sum(each.n_rows for each in tables)
        way_out = "write the predictions below the header"
        check(n_rows > 0, "the predictions to have rows", f"none in {name}", way_out)
        rows = _Rows(tables, columns, all_columns=all_columns)
        for n_own in pool.map(rows.read, range(len(tables))):
            if n_rows > _SHOWN:
                on_rows(n_own, n_rows)
    with rows.naming():
        predictions = rows.predictions()
    others = rows.others() if all_columns else None
    return Read(name, tuple(files), predictions, columns, others, tuple(rows.notes))


def _listed(argument: str, given: Any, kind: Any) -> list[Any]:
    """A list of texts or paths; a single text is none, as its letters would be read."""
    is_listed = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    found = list(given) if is_listed else []
    fits = is_listed and all(isinstance(each, kind) and str(each) for each in found)
    requirement = f"{argument} to be a list of texts"
    check(fits, requirement, cut(repr(given), 100), "write them in a list")
    return found


def load_predictions(
    path: str | os.PathLike[str] | Sequence[str], *, label_column: str = "label"
) -> Predictions:
    """Load predictions and labels into memory.

    Use it for a model that runs elsewhere; `predict` runs a model here.

    Args:
        path: a file, folder, glob or address (see `read_predictions`) in one of these formats.
            .npz, a local file: arrays `logits` or `probs` (N, C), `labels` (N,) int, and optionally
            `class_names` (C,) str. Pickled objects are not read.
            .csv, .tsv (also .gz), .jsonl or .parquet: a column of labels, and one column per class,
            in the order of the classes: `logit_<class>` or `prob_<class>`, with other columns
            ignored, or only `<class>`, which are probabilities; or a column of lists, `logits` or
            `probs`, or of dictionaries, also `logprobs`; or one `score` of the second of two
            classes.
            .jsonl: a log of lm-evaluation-harness (`--log_samples`, multiple choice).
        label_column: column of labels in a table: class names, with upper and lower case ignored
            unless names differ by it alone, or class ids from 0. If every class name is a number,
            labels are names, and 1 is "1.0". Names that are ids of other classes, next to names
            that are no numbers, are refused, except for a column of integers.

    Raises:
        ValueError: if the file is missing or unreadable, or its content is incomplete, ambiguous or
            wrong.
        TypeError: if a column or array is not numeric.

    >>> load_predictions("missing.npz")
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputValueError: expected predictions to name existing files, got missing.npz, where there are ...
    """
    found = read_predictions(path, label_column=label_column).predictions
    requirement = "the predictions to have a score for each class"
    way_out = "call read_predictions, whose predictions may be top labels"
    is_whole = isinstance(found, Predictions)
    check(is_whole, requirement, "the confidences of top labels", way_out)
    assert isinstance(found, Predictions)
    return found


# ---- Arrays and logs ----


def _open(
    filesystem: Any,
    files: Sequence[File],
    wanted: Wanted,
    option_scores: OptionScores,
    file: File,
) -> Opened | Predictions | TopLabels:
    """An opened table, or the predictions of a file of arrays or a log."""
    suffix = suffix_of(file.path)
    found: Predictions | TopLabels | None = None
    with naming(file, files):
        if suffix == ".npz":
            is_here = "file" in filesystem.protocol
            way_out = "copy it here, or write a table, which is read from any address"
            requirement = "an .npz file to lie on this machine"
            check(is_here, requirement, "another filesystem's", way_out)
            is_labelled = wanted.label_column is not None
            found = load_arrays(file.path, "predictions", labelled=is_labelled)
        if suffix == ".jsonl":
            found = _log(filesystem, file, option_scores)
        if found is not None:
            _check_has_no_columns(wanted)
            return found
    return open_file(filesystem, file)


def _log(
    filesystem: Any, file: File, option_scores: OptionScores
) -> Predictions | None:
    """The predictions of a log; None for a table."""
    reading = {"compression": "infer", "encoding": "utf-8-sig"}
    with readable(file.name), filesystem.open(file.path, "rt", **reading) as lines:
        rows = rows_of_log(lines)
        return None if rows is None else read_log(rows, file.name, option_scores)


def _check_has_no_columns(wanted: Wanted) -> None:
    """Raise if columns of arrays or a log are named."""
    given = {
        "weight_column": wanted.weight_column,
        "by": ", ".join(wanted.by),
        "positive_class": wanted.positive_class,
        "prob_prefix": wanted.prob_prefix,
        "unlisted_at": wanted.unlisted_at,
    }
    if wanted.label_column not in ("label", "labels"):
        given["label_column"] = wanted.label_column
    for option, name in given.items():
        requirement = f"{option} to be given with a table"
        way_out = "write the rows to a table, such as a .parquet file"
        got = f"{name!r} with arrays or a log, which have none"
        check(not name, requirement, got, way_out)


def _concatenated(
    held: Sequence[Any], files: Sequence[File]
) -> Predictions | TopLabels:
    """The rows of several files of arrays, in their order."""
    first = held[0]
    # A file may leave out the names that another one has.
    named = next((each for each in held if each.class_names is not None), first)
    arrays = [name for name in first.ARRAYS if getattr(first, name) is not None]
    for other, file in zip(held, files, strict=True):
        with naming(file, files):
            found = [name for name in other.ARRAYS if getattr(other, name) is not None]
            got = ", ".join(found)
            requirement = f"the arrays to be {', '.join(arrays)}, as in the first file"
            check(found == arrays, requirement, got, "use files of one kind")
            requirement = f"the labels to be {first.kind.name}, as in the first file"
            way_out = "use files of one kind"
            check(other.kind is first.kind, requirement, other.kind.name, way_out)
            check_same_classes("the file", named, other)
    if len(held) == 1:
        return first
    joined = {
        name: np.concatenate([getattr(each, name) for each in held]) for name in arrays
    }
    return replace(named, **joined, validate=False)


# ---- Tables ----


def _check_alike(
    tables: Sequence[Opened], columns: Columns, *, all_columns: bool
) -> None:
    """Raise if files have other folders, columns or classes than the first,
    or columns of other kinds.
    """
    files = [each.file for each in tables]
    folders = [key for key, _ in files[0].partition]
    for each in tables:
        requirement = f"{each.file.name} to be in folders as the first file is"
        way_out = "name the columns of all partitions alike"
        is_same = [key for key, _ in each.file.partition] == folders
        check(is_same, requirement, "other folders", way_out)
        with naming(each.file, files):
            columns.check_same(each)
            if all_columns:
                check_different(each, each.names)
                columns.check_kept(each)


def _load(columns: Columns, opened: Opened, *, all_columns: bool) -> None:
    others = opened.names if all_columns else [*columns.scores, *columns.others]
    opened.load(columns.numbers, others)


class _Rows:
    """The rows of all files: a matrix of the scores, and the other columns."""

    def __init__(
        self, tables: Sequence[Opened], columns: Columns, *, all_columns: bool
    ) -> None:
        self.tables = tables
        self.columns = columns
        self.all_columns = all_columns
        self.notes: list[str] = []
        ends = np.cumsum([each.n_rows for each in tables])
        self.starts = [0, *ends.tolist()]
        names = columns.others
        if all_columns:
            every = dict.fromkeys(name for each in tables for name in each.names)
            names = [name for name in every if name not in columns.scores]
        # The parts of each column in each file, where it has the column.
        self.parts: dict[str, list[list[Any]]] = {
            name: [[] for _ in tables] for name in names
        }
        self.width = len(columns.class_names) if columns.is_nested else 1
        n_columns = self.width if columns.is_nested else len(columns.scores)
        # The numbers of a class lie next to each other, as those of a column do.
        self.scores = np.empty((n_columns, self.starts[-1]), self._dtype())
        # The options that the dictionary of a row leaves out.
        self.unlisted = np.zeros(
            self.scores.shape if columns.by_option else (0, 0), bool
        )

    def _dtype(self) -> np.dtype[Any]:
        """The type that holds the scores of all files."""
        from pyarrow import types

        if self.columns.by_option:
            return np.dtype(float)
        scores = self.columns.scores
        kinds = {table.kinds[name] for table in self.tables for name in scores}
        if self.columns.listed:
            kinds = {kind.value_type for kind in kinds}
        floats = [kind for kind in kinds if types.is_floating(kind)]
        found = [kind.to_pandas_dtype() for kind in floats]
        # Other numbers become float64.
        return np.result_type(*found) if len(floats) == len(kinds) else np.dtype(float)

    def read(self, place: int) -> int:
        """Read a file, and return its number of rows."""
        import pyarrow

        files = [each.file for each in self.tables]
        table = self.tables[place]
        # Each file has its own rows of the matrix, so that threads can write to it at
        # once.
        start = self.starts[place]
        row_of = {name: k for k, name in enumerate(self.columns.scores)}
        own = [name for name in self.parts if name in table.kinds]
        stored = [name for name in own if name not in table.folders]
        for name in self.parts.keys() & table.folders.keys():
            text = pyarrow.repeat(table.folders[name], table.n_rows)
            self.parts[name][place].append(text)
        with readable(table.file.name):
            for first, part in table.parts(self.columns.scores, self.width):
                rows = slice(start + first, start + first + len(part))
                for name, column in zip(part.schema.names, part.columns, strict=True):
                    with naming(table.file, files, first):
                        if self.columns.listed:
                            lists = _lists(column, name, self.width)
                            self.scores[:, rows] = lists.T
                        elif self.columns.by_option:
                            options = self.columns.class_names
                            numbers, is_missing = by_option(column, name, options)
                            self.scores[:, rows] = numbers
                            self.unlisted[:, rows] = is_missing
                        else:
                            numbers = numbers_of(column, name)
                            self.scores[row_of[name], rows] = numbers
            for first, part in table.parts(stored, width=1):
                for name, column in zip(part.schema.names, part.columns, strict=True):
                    with naming(table.file, files, first):
                        _check_partition(table.file, name, column)
                    self.parts[name][place].append(column)
        return table.n_rows

    @contextmanager
    def naming(self) -> Iterator[None]:
        """A context in which the error of a row names its file and its number there."""
        try:
            yield
        except RowError as error:
            row = error.args[0]
            # Files without rows start where the next file does; the row is in the last
            # that starts there.
            place = int(np.searchsorted(self.starts, row, side="right")) - 1
            file = self.tables[place].file
            raise error.at(file.name, -self.starts[place]) from None

    def predictions(self) -> Predictions | TopLabels:
        """All rows, checked."""
        columns = self.columns
        weights = None
        if columns.weight is not None:
            column = _read_texts(self.column(columns.weight))
            numbers = numbers_of(column, columns.weight)
            weights = numbers.astype(np.float64, copy=False)
        by = {name: _values(self.column(name), name) for name in columns.by}
        if columns.kind == CONFIDENCE:
            confidence = self.scores[0].astype(np.float64, copy=False)
            return TopLabels(confidence, self._correct(confidence), weights, by)
        if self.unlisted.any():
            self.notes.append(fill_unlisted(self.scores, self.unlisted, columns))
        if columns.by_option:
            normalize(self.scores, columns)
        scores = self.scores.T
        if columns.kind == "logits":
            check_not_probabilities(scores)
        elif columns.kind == SCORE:
            scores = _with_complement(self.scores[0], columns.scores[0])
        # Columns that are named as their classes do not say that they hold
        # probabilities.
        elif columns.scores == columns.class_names:
            _check_look_like_probabilities(scores)
        class_names, labels = self._labels()
        kind = "logits" if columns.kind == "logits" else "probs"
        found: dict[str, Any] = {kind: scores, "class_names": class_names}
        made = Predictions(labels, **found, weights=weights, by=by)
        if self.unlisted.any() and columns.label is not None:
            self.notes += on_unlisted_labels(made, self.unlisted)
        return made

    def _labels(self) -> tuple[tuple[str, ...] | None, NDArray[np.int64]]:
        """The names of the classes, and the label (N,) of each row, 0 if they are not read."""
        columns = self.columns
        names = columns.class_names
        positive = columns.positive_class
        if columns.label is None:
            # The other class has no name without labels.
            known = names if positive is None else None
            return known, np.zeros(self.starts[-1], np.int64)
        column = self.column(columns.label)
        argument = f"column {columns.label!r}"
        if positive is not None:
            # As texts, integers are names, also if no other label gives them an order.
            column = column.cast("string")
            names = (other_label(column, argument, positive) or names[0], positive)
            self.notes.append(
                f"The column {columns.scores[0]!r} is read as the probability of {positive!r}, "
                f"and 1 minus it as that of {names[0]!r}."
            )
        elif columns.kind == SCORE and are_flags(column, columns.label, names):
            return names, label_ids(column, argument, FLAGS)
        self._check_one_order(column, argument)
        told = OF_SCORES if columns.kind == SCORE else OF_TABLES
        return names, label_ids(column, argument, names, told)

    def _check_one_order(self, labels: Any, argument: str) -> None:
        """Raise for ids as labels where files have their class columns in several orders,
        or dictionaries, which have none.
        """
        columns = self.columns
        odd = []
        for table in self.tables:
            own = [name for name in table.names if name in columns.scores]
            if columns.by_option or tuple(own) != columns.scores:
                odd.append(table.file.name)
        is_ordered = not odd or not are_ids(labels, argument, columns.class_names)
        requirement = f"the classes to have one order, as {argument} holds ids"
        got = f"none, or another one than before, in {few(odd)}"
        way_out = "write names as labels, or class columns in the same order"
        check(is_ordered, requirement, got, way_out)

    def _correct(self, confidence: NDArray[Any]) -> NDArray[np.int64]:
        """Whether the predicted classes (N,) are correct."""
        columns = self.columns
        outcome = str(columns.outcome)
        marked = self.column(outcome)
        labels = None if columns.label is None else self.column(columns.label)
        if outcome == CORRECT:
            requirement = "whether the prediction is correct"
            way_out = "write 0 or 1, or true or false"
            told = (requirement, way_out)
            correct = label_ids(marked, f"column {outcome!r}", FLAGS, told)
            classes = [labels]
        else:
            correct = are_equal(marked, outcome, labels, str(columns.label))
            classes = [marked, labels]
        if columns.scores == (SCORE,) and labels is not None:
            _check_is_a_confidence(confidence, classes)
        return correct

    def column(self, name: str) -> Any:
        """A column of all files, with nulls for those without it;
        texts in one and numbers in another are texts.
        """
        import pyarrow

        # A column is read once, and may be as large as one of the scores.
        found = self.parts[name] if self.all_columns else self.parts.pop(name)
        tables = []
        for opened, own in zip(self.tables, found, strict=True):
            parts = own or [pyarrow.nulls(opened.n_rows)]
            tables += [pyarrow.table({name: part}) for part in parts]
        try:
            joined = pyarrow.concat_tables(tables, promote_options="permissive")
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
            texts = pyarrow.schema([(name, pyarrow.string())])
            try:
                joined = pyarrow.concat_tables([each.cast(texts) for each in tables])
            except pyarrow.ArrowNotImplementedError as error:
                kinds = few(sorted({str(each[name].type) for each in tables}))
                requirement = f"column {name!r} to have one type in all files"
                way_out = "write it alike in all files, or leave it out"
                message = message_of(requirement, kinds, way_out)
                raise InputValueError(message) from error
        return joined[name]

    def others(self) -> Any:
        """The columns that hold no scores, as a pyarrow table."""
        import pyarrow

        return pyarrow.table({name: self.column(name) for name in self.parts})


def _read_texts(column: Any) -> Any:
    """A column of numbers that are written as texts, as in a partition's name or after a csv file;
    else the column.
    """
    import pyarrow

    if not pyarrow.types.is_string(column.type):
        return column
    try:
        return column.cast(pyarrow.float64())
    except pyarrow.ArrowInvalid:
        return column


def _check_partition(file: File, name: str, column: Any) -> None:
    """Raise if a stored column holds another value than the folder of its name says."""
    if name not in dict(file.partition):
        return
    told = dict(file.partition)[name]
    # Nulls are values here, because a row without a value contradicts the folder as
    # well.
    encoded = column.cast("string").combine_chunks().dictionary_encode("encode")
    values = encoded.dictionary.to_pylist()
    others = np.array([value is None or not is_same(value, told) for value in values])
    wrong = others[np.asarray(encoded.indices)]
    if wrong.any():
        row = int(np.argmax(wrong))
        got = values[encoded.indices[row].as_py()] or "none"
        requirement = f"hold {told}, as the name of its folder says"
        way_out = "rename the column or the folder"
        raise RowError(row, f"column {name!r}", requirement, got, way_out)


def _values(column: Any, name: str) -> list[Any]:
    """The values (n,) of a column of slices, of which equal ones are one object."""
    from pyarrow import types

    check_slices(name, column.type)
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    values = np.empty(len(encoded.dictionary), object)
    values[:] = encoded.dictionary.to_pylist()
    return values[np.asarray(encoded.indices)].tolist()


def _lists(column: Any, name: str, n_classes: int) -> NDArray[Any]:
    """The numbers (n, C) of a column of lists."""
    import pyarrow
    import pyarrow.compute as compute

    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    # A missing list has no values.
    lengths = np.asarray(compute.fill_null(compute.list_value_length(column), 0))
    wrong = lengths != n_classes
    requirement = f"have {n_classes} values"
    refuse(wrong, "the list", requirement, lengths, "write one for each class")
    try:
        return numbers_of(column.flatten(), name).reshape(len(column), n_classes)
    except RowError as error:
        # The error counts the values of all lists.
        place, *told = error.args
        raise RowError(place // n_classes, *told) from None


def _with_complement(score: NDArray[Any], name: str) -> NDArray[Any]:
    """The probabilities (N, 2) of both classes, from that of the second."""
    # NaN fails both comparisons, and so is outside.
    outside = ~((score >= 0) & (score <= 1))
    way_out = "write the probability of the second class"
    refuse(outside, f"column {name!r}", "hold probabilities", score, way_out)
    return np.stack([1 - score, score], axis=1)


def _check_is_a_confidence(score: NDArray[Any], classes: Sequence[Any]) -> None:
    """Raise for a score below 1/2 next to predictions and labels of two classes.

    It may be the probability of one of them. As the confidence of the prediction it would be that
    of the less probable class.
    """
    if n_different(classes) > 2:
        return
    requirement = "be at least 0.5, as the confidence of one of two classes"
    way_out = "name it prob_<class> if it is that of one class, else confidence"
    refuse(score < 0.5, f"column {SCORE!r}", requirement, score, way_out)


def _check_look_like_probabilities(scores: NDArray[Any]) -> None:
    """Raise for columns whose names do not say that they hold probabilities, and which do not."""
    # Rounding may lead a little beyond 1.
    outside = (scores < 0) | (scores > 1 + 1e-6)
    requirement = "hold probabilities, as their names do not say logit_"
    way_out = "name the columns logit_<class> if they hold logits, and prob_<class> if there are others"
    refuse(outside, "the class columns", requirement, scores, way_out)
