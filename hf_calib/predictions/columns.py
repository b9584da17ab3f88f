"""Which columns of a table hold what: the form of its rows is found from the names of its columns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import check, did_you_mean, few
from hf_calib._text import as_number
from hf_calib.metrics.checks import RowError, row_sum_tolerance
from hf_calib.predictions.files import NUMBERS_WAY, Opened, check_numbers
from hf_calib.predictions.labels import are_numbers, check_unambiguous, is_same
from hf_calib.predictions.predictions import check_class_names

LISTS = {"logits": "logits", "probs": "probs", "probabilities": "probs"}
# The softmax of log-probabilities are the probabilities among the options.
_DICTIONARIES = LISTS | dict.fromkeys(
    ("logprobs", "log_probs", "top_logprobs"), "logits"
)
PREFIXES = {"logits": "logit_", "probs": "prob_"}
CONFIDENCE = "confidence"
CORRECT = "correct"
PREDICTED = ("prediction", "predicted", "pred_label", "pred")
SCORE = "score"
# Columns without a prefix are judged by this many rows, because the file is not read
# yet.
_FIRST_ROWS = 200
# Next to prob_no alone, the labels 0 and 1 would be read the other way round than most
# people mean them, see `_of_one_class`.
_NEGATIVES = {"false", "no", "neg", "negative"}
# Columns of labels, which are never probabilities of a class, whichever of them is read.
_NAMES_OF_LABELS = {
    "gold",
    "label",
    "label_id",
    "labels",
    "target",
    "targets",
    "true_label",
    "y_true",
}


@dataclass(frozen=True)
class Columns:
    """The columns of a table that are read."""

    # "logits" or "probs", or "score" of the second of two classes,
    # or "confidence" of the predicted class.
    kind: str
    # A column for each class, or the one that holds lists, dictionaries or a score.
    scores: tuple[str, ...]
    # Empty for top labels, whose classes are not in the table.
    class_names: tuple[str, ...] = ()
    label: str | None = None
    weight: str | None = None
    by: tuple[str, ...] = ()
    # Whether the one column holds lists, in the order of the classes.
    listed: bool = False
    # Whether the one column holds dictionaries, which name the classes.
    by_option: bool = False
    # The probability of an option that a row's dictionary leaves out; None refuses such
    # rows.
    unlisted_at: float | None = None
    # The prefix of several class columns, by which a later file's further classes are
    # noticed.
    prefix: str | None = None
    # Of top labels: the column that says whether they are right, or which class was
    # predicted.
    outcome: str | None = None
    # Of a score: the label that it is the probability of, where others have no name yet.
    positive_class: str | None = None

    @property
    def is_nested(self) -> bool:
        """Whether one column holds the scores of all classes."""
        return self.listed or self.by_option

    @property
    def others(self) -> list[str]:
        """The columns of labels, weights, slices and outcomes, without repeats."""
        given = [self.label, self.weight, self.outcome, *self.by]
        return list(dict.fromkeys(name for name in given if name is not None))

    @property
    def numbers(self) -> list[str]:
        """The columns that hold a number in each row."""
        scores = [] if self.is_nested else list(self.scores)
        return scores + [name for name in [self.weight] if name is not None]

    @property
    def written(self) -> list[str]:
        """The columns of calibrated probabilities in a table that is written."""
        if self.kind in (CONFIDENCE, SCORE):
            return list(self.scores)
        if self.listed:
            return ["probs"]
        return [PREFIXES["probs"] + name for name in self.class_names]

    def check_kept(self, opened: Opened) -> None:
        """Raise if a column that is kept would have the name of one that is written."""
        kept = [name for name in opened.names if name not in self.scores]
        taken = [repr(name) for name in kept if name in self.written]
        requirement = "other columns not to have names of calibrated probabilities"
        check(not taken, requirement, few(taken), "rename or remove them")

    def check_same(self, opened: Opened) -> None:
        """Raise if a file has other columns, classes or folders than the first."""
        names = opened.names
        needed = [*self.scores, *self.others]
        missing = [repr(name) for name in sorted({*needed}.difference(names))]
        way_out = "write all files with the same columns"
        requirement = "the columns to be those of the first file"
        check(not missing, requirement, f"none named {few(missing)}", way_out)
        check_different(opened, needed)
        if opened.typed:
            for name in self.numbers:
                kind = opened.kinds[name]
                # Whether texts are weights is seen when they are read.
                may_be = name == self.weight and str(kind) == "string"
                check_numbers(are_numbers(kind) or may_be, name, kind)
        prefix = self.prefix or PREFIXES.get(self.kind)
        if prefix is None or self.is_nested:
            return
        known = {*self.scores, prefix}
        # A later header may have a blank before a name, which would hide the class.
        more = [
            repr(name)
            for name in names
            if name.lstrip().startswith(prefix) and name not in known
        ]
        requirement = "the classes to be those of the first file"
        check(not more, requirement, f"also {few(more)}", "use files of one model")


@dataclass(frozen=True)
class Wanted:
    """The columns that a user names."""

    label_column: str | None = "label"
    weight_column: str | None = None
    by: Sequence[str] = ()
    class_names: Sequence[str] | None = None
    positive_class: str | None = None
    prob_prefix: str | None = None
    unlisted_at: float | None = None

    @property
    def prefixes(self) -> dict[str, str]:
        """The beginnings of the names of class columns, by what these hold."""
        return PREFIXES if self.prob_prefix is None else {"probs": self.prob_prefix}


def columns_of(opened: Opened, wanted: Wanted) -> Columns:
    """Find the columns of a table; the first form that its columns have is read."""
    check_roles(wanted.label_column, wanted.weight_column, wanted.by)
    names = opened.names
    way_out = "write a column of labels and one for each class"
    check(bool(names), "the table to have columns", "none", way_out)
    # With a wrong separator the whole header is one name.
    separated = len(names) > 1 or not any(mark in names[0] for mark in ",;\t")
    way_out = "separate a .csv's columns by commas, a .tsv's by tabs"
    got = f"one column {names[0]!r}"
    check(separated, "the table to have several columns", got, way_out)
    # A column that is there as it was named may have blanks in its name.
    asked = {wanted.label_column, wanted.weight_column, *wanted.by}
    _check_blanks(names, asked.difference(names))
    label = _label_column(opened, wanted)
    _check_named(opened, wanted, label)
    taken = {label, wanted.weight_column, *wanted.by}
    others = [name for name in names if name not in taken]
    found = None
    # Dictionaries come last: the log of a service may stand next to the scores that
    # were made of it.
    forms = (_of_lists, _of_classes, _of_top_labels, _of_a_score, _of_dictionaries)
    for form in forms:
        found = found or form(opened, others, label, wanted)
    found = found or _without_prefix(opened, others, label)
    check_different(opened, found.scores)
    check_class_names(found.class_names)
    _check_is_used(wanted, found)
    positive = wanted.positive_class
    # Top labels have no class names, and with a positive class every label is a name.
    if label is not None and found.kind != CONFIDENCE and positive is None:
        kind = opened.kinds[label]
        check_unambiguous(kind, f"column {label!r}", found.class_names)
    by = tuple(dict.fromkeys(wanted.by))
    return replace(
        found,
        label=label,
        weight=wanted.weight_column,
        by=by,
        positive_class=positive,
        unlisted_at=wanted.unlisted_at,
    )


def _check_is_used(wanted: Wanted, found: Columns) -> None:
    """Raise if an option of one form is given with another form."""
    prefix = wanted.prob_prefix or ""
    has_prefix = all(name.startswith(prefix) for name in found.scores)
    one_score = "one score of two classes"
    dictionaries = "dictionaries of options"
    uses = (
        ("prob_prefix", wanted.prob_prefix, has_prefix, "columns that begin with it"),
        ("positive_class", wanted.positive_class, found.kind == SCORE, one_score),
        ("unlisted_at", wanted.unlisted_at, found.by_option, dictionaries),
    )
    for option, given, is_used, form in uses:
        requirement = f"{option} to be given with {form}"
        got = f"{given!r} with {few(found.scores)}"
        check(given is None or is_used, requirement, got, "leave it out")


def check_roles(label: str | None, weight: str | None, by: Sequence[str]) -> None:
    """Raise if one column is given for labels, weights or slices twice."""
    # A column may be named twice for slices.
    given = [name for name in (label, weight, *dict.fromkeys(by)) if name is not None]
    twice = [repr(name) for name, times in Counter(given).items() if times > 1]
    requirement = "label_column, weight_column and by to name different columns"
    got = f"{few(twice)} twice"
    way_out = "name another column for each, or leave one out"
    check(not twice, requirement, got, way_out)


def check_slices(name: str, kind: Any) -> None:
    """Raise if the values of a column cannot be slices."""
    requirement = f"column {name!r} to hold texts or numbers"
    # Of pyarrow's types, lists, structs and maps have fields.
    check(kind.num_fields == 0, requirement, kind, "name another column for by")


# ---- Forms ----


def _label_column(opened: Opened, wanted: Wanted) -> str | None:
    """The column of labels, which may have another name by default, or be none for top labels."""
    names = opened.names
    label = wanted.label_column
    if label != "label" or label in names:
        return label
    if "labels" in names and _lists_in(opened):
        # The labels in an .npz file have this name, and so have columns that are made
        # of them.
        return "labels"
    # Top labels that say whether they are right need no labels. Next to class columns,
    # labels that are missing are an error.
    is_top = CORRECT in names and (CONFIDENCE in names or SCORE in names)
    prefixes = tuple(wanted.prefixes.values())
    has_classes = any(name.startswith(prefixes) for name in names)
    return None if is_top and not has_classes else label


def _of_lists(
    opened: Opened, others: Sequence[str], label: str | None, wanted: Wanted
) -> Columns | None:
    """One column of lists of scores."""
    lists = _lists_in(opened)
    if not lists:
        return None
    name = _the_one(lists)
    first = opened.first_rows([name], 1)
    # A null in the first row counts as an empty list.
    n_classes = len(first[0][name] or ()) if first else 0
    requirement = f"column {name!r} to hold a list of at least 2 classes in each row"
    way_out = "write a score for each class"
    check(n_classes >= 2, requirement, f"{n_classes} in the first row", way_out)
    classes = [str(place) for place in range(n_classes)]
    if wanted.class_names is not None and len(wanted.class_names) == n_classes:
        classes = list(wanted.class_names)
    return Columns(LISTS[name], (name,), tuple(classes), listed=True)


def _of_classes(
    opened: Opened, others: Sequence[str], label: str | None, wanted: Wanted
) -> Columns | None:
    """Columns whose names say what they hold; a single probability is that of one class against all
    others.
    """
    found = {}
    for kind, prefix in wanted.prefixes.items():
        used = [name for name in others if name.startswith(prefix)]
        if used:
            found[kind] = used
    requirement = "the table to hold logits or probabilities"
    got = "logit_ and prob_ columns"
    check(len(found) < 2, requirement, got, "keep one kind of them")
    if not found:
        return None
    kind, used = next(iter(found.items()))
    prefix = wanted.prefixes[kind]
    classes = [name.removeprefix(prefix) for name in used]
    _check_classes_named(used, classes)
    # A class column that is read as labels, weights or slices would be missing among
    # the classes.
    of_a_class = [
        repr(name)
        for name in (label, wanted.weight_column, *wanted.by)
        if (name or "").startswith(prefix)
    ]
    requirement = "the columns of labels, weights and by not to be those of classes"
    check(not of_a_class, requirement, few(of_a_class), "name other columns")
    if len(used) == 1 and kind == "probs":
        return _of_one_class(used[0], classes[0], label, wanted)
    # A single logit may be one of a sigmoid, or of a softmax whose other column is
    # missing.
    way_out = "write a column for each class"
    requirement = "the table to hold a column for each of at least 2 classes"
    check(len(used) >= 2, requirement, used[0], way_out)
    return Columns(kind, tuple(used), tuple(classes), prefix=prefix)


def _of_one_class(column: str, name: str, label: str | None, wanted: Wanted) -> Columns:
    """The probability of one class, the second of two, against all others."""
    names = _two_names(wanted, (f"not {name}", name))
    positive = wanted.positive_class
    if positive is not None:
        requirement = f"positive_class to be the class of column {column!r}"
        way_out = f"name the column {SCORE}, or the class {name}"
        check(is_same(name, positive), requirement, repr(positive), way_out)
        return Columns(SCORE, (column,), names)
    number = as_number(name)
    # If the column's class is named first, its probability would be read as that of the
    # other class.
    is_first = name.casefold() == names[0].casefold()
    # The labels 0 and 1 are ids, of which the second is that of the column's class.
    is_second = wanted.class_names is not None and as_number(names[1]) == number
    is_named = wanted.class_names is not None or name.casefold() not in _NEGATIVES
    is_known = number in (None, 1) or is_second
    requirement = f"class_names to name the class of column {column!r} last"
    way_out = "name the other class, then this one"
    check(not is_first, requirement, few(names), way_out)
    requirement = "the class of a single column prob_<class> to be no number but 1"
    way_out = "write a column for each class, or name the other class and this one"
    check(is_known or label is None, requirement, repr(column), way_out)
    # Beside prob_no, a label 1 would be "no", and most people mean "yes" by it.
    requirement = "the class of a single column prob_<class> to be the positive one"
    way_out = (
        "give it as positive_class if it is a label, or name the other class and this "
        "one as class_names: the label 0 is the first, 1 the second"
    )
    check(is_named or label is None, requirement, repr(column), way_out)
    return Columns(SCORE, (column,), names)


def _of_top_labels(
    opened: Opened, others: Sequence[str], label: str | None, wanted: Wanted
) -> Columns | None:
    """The confidence of the predicted class, and whether it is correct, or which it is."""
    # The first outcome that is there is read: `correct` has to be compared with no
    # label.
    outcomes = [name for name in (CORRECT, *PREDICTED) if name in others]
    # Who names the class of a score says that it is not that of the prediction.
    known = (CONFIDENCE, SCORE) if wanted.positive_class is None else (CONFIDENCE,)
    scores = [name for name in known if name in others]
    if not scores or not outcomes:
        return None
    if scores[0] == SCORE:
        _check_is_the_only_score(opened, others, label)
    outcome = outcomes[0]
    requirement = "top labels to be given with a column of labels, or of 'correct'"
    got = f"{outcome!r} only"
    way_out = "write whether each prediction is correct, as 0 or 1"
    check(outcome == CORRECT or label is not None, requirement, got, way_out)
    return Columns(CONFIDENCE, (scores[0],), outcome=outcome)


def _of_a_score(
    opened: Opened, others: Sequence[str], label: str | None, wanted: Wanted
) -> Columns | None:
    """The probability of the second of two classes."""
    if SCORE not in others:
        return None
    _check_is_the_only_score(opened, others, label)
    return Columns(SCORE, (SCORE,), _two_names(wanted, ("0", "1")))


def _check_is_the_only_score(
    opened: Opened, others: Sequence[str], label: str | None
) -> None:
    """Raise if probabilities of classes stand next to a score, which may be of any of them."""
    more = [name for name in others if name != SCORE]
    classes, _ = _distribution_among(opened, more, label)
    got = f"{few(classes)}, whose rows sum to 1"
    requirement = f"the table to hold one {SCORE!r}, or probabilities of all classes"
    way_out = "keep one of them, or name the classes prob_<class>"
    check(not classes, requirement, f"{SCORE!r} next to {got}", way_out)


def _two_names(wanted: Wanted, default: tuple[str, str]) -> tuple[str, ...]:
    """The names of the negative and the positive class."""
    if wanted.positive_class is not None:
        return (f"not {wanted.positive_class}", wanted.positive_class)
    if wanted.class_names is None:
        return default
    requirement = "class_names to name the two classes of a score"
    way_out = "name the negative class, then the positive one"
    got = few(list(wanted.class_names))
    check(len(wanted.class_names) == 2, requirement, got, way_out)
    return tuple(wanted.class_names)


def _without_prefix(
    opened: Opened, others: Sequence[str], label: str | None
) -> Columns:
    """Columns that have the names of classes; they are probabilities."""
    # Of a text file, the first row decides, and a later text is an error.
    used = [name for name in others if are_numbers(opened.kinds[name])]
    classes, labels = _distribution_among(opened, used, label)
    # Other numbers may stand next to them.
    if labels.issubset(classes):
        used = classes or used
    got = ", ".join(used) or "none"
    requirement = "the table to hold a column for each of at least 2 classes"
    way_out = "name them logit_<class> or prob_<class>"
    check(len(used) >= 2, requirement, got, way_out)
    _check_classes_named(used, used)
    for name in others:
        is_label = name.casefold() in _NAMES_OF_LABELS
        got = f"{name!r} next to the label column {label!r}"
        way_out = "name the class columns prob_<class>; other columns are then ignored"
        check(not is_label, "the table to hold one column of labels", got, way_out)
    return Columns("probs", tuple(used), tuple(used))


def _distribution_among(
    opened: Opened, names: Sequence[str], label: str | None
) -> tuple[list[str], set[str]]:
    """Those of these columns that are probabilities of classes, as they sum to 1 in the first rows,
    and the labels there.

    They are all columns, or else those that the labels name, or those that hold fractions.
    """
    # Of two columns with one name, a row of the first rows has only the last.
    stored = Counter(opened.schema.names)
    kinds = opened.kinds
    numbers = [name for name in names if are_numbers(kinds[name]) and stored[name] == 1]
    read = numbers if label is None or label not in stored else [*numbers, label]
    first = opened.first_rows(read, _FIRST_ROWS) if len(numbers) > 1 else []
    values = {name: np.array([_number(row[name]) for row in first]) for name in numbers}
    labels = {str(row[label]) for row in first if label in row}
    named = [name for name in numbers if name in labels]
    # A label that names no column says that the columns are not all of the classes.
    are_named = len(named) == len(labels)
    fractions = [name for name in numbers if _are_fractions(values[name])]
    # Columns of 0 and 1 only may be flags, although a single 1 in each row sums to 1.
    every = numbers if fractions else []
    for chosen in (every, named if are_named else [], fractions):
        if len(chosen) < 2:
            continue
        sums = np.sum([values[name] for name in chosen], axis=0)
        if (np.abs(sums - 1) <= row_sum_tolerance(len(chosen))).all():
            return chosen, labels
    return [], labels


def _are_fractions(numbers: NDArray[Any]) -> bool:
    """Whether numbers lie in [0, 1] and are not only 0 and 1, as those of flags and weights."""
    is_inside = bool(((numbers >= 0) & (numbers <= 1)).all())
    return is_inside and bool((numbers % 1 > 0).any())


def _number(value: Any) -> float:
    """A value as a number, NaN for others."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _of_dictionaries(
    opened: Opened, others: Sequence[str], label: str | None, wanted: Wanted
) -> Columns | None:
    """One column of dictionaries, which name the options that they have a score for."""
    from pyarrow import types

    found = [
        name
        for name in others
        if name in _DICTIONARIES
        and (types.is_struct(opened.kinds[name]) or types.is_map(opened.kinds[name]))
    ]
    if not found:
        return None
    name = _the_one(found)
    classes = tuple(opened.options(name))
    return Columns(_DICTIONARIES[name], (name,), classes, by_option=True)


def _the_one(names: Sequence[str]) -> str:
    """The only column that may hold the scores of all classes."""
    requirement = "the table to hold logits or probabilities"
    check(len(names) == 1, requirement, " and ".join(names), "keep one of them")
    return names[0]


def _lists_in(opened: Opened) -> list[str]:
    from pyarrow import types

    kinds = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return [
        field.name
        for field in opened.schema
        if field.name in LISTS and any(is_of(field.type) for is_of in kinds)
    ]


def with_all_options(
    columns: Columns, tables: Sequence[Opened], wanted: Wanted
) -> Columns:
    """The columns with the options of all files as classes, or the named ones of them,
    if dictionaries hold the scores.
    """
    if not columns.by_option:
        return columns
    (name,) = columns.scores
    # A file names only the options that its own rows have.
    options = dict.fromkeys(option for each in tables for option in each.options(name))
    classes = list(options) if wanted.class_names is None else wanted.class_names
    unknown = [repr(each) for each in classes if each not in options]
    requirement = f"class_names to be options in column {name!r}"
    way_out = f"these are {few(list(options))}"
    check(not unknown, requirement, few(unknown), way_out)
    requirement = f"column {name!r} to hold dictionaries of at least 2 options"
    way_out = "write a score for each option"
    check(len(classes) >= 2, requirement, few(classes) or "none", way_out)
    check_class_names(classes)
    return replace(columns, class_names=tuple(classes))


# ---- Checks ----


def _check_named(opened: Opened, wanted: Wanted, label: str | None) -> None:
    """Raise unless the columns that the user names are there, once each."""
    names = opened.names
    options = [("label_column", label), ("weight_column", wanted.weight_column)]
    options += [("by", name) for name in wanted.by]
    for option, name in options:
        if name is None:
            continue
        requirement = f"{option} to be one of {', '.join(names)}"
        way_out = did_you_mean(name, names)
        check(name in names, requirement, repr(name), way_out)
    for name in wanted.by:
        check_slices(name, opened.kinds[name])


def _check_blanks(names: Sequence[str], missing: Set[str | None]) -> None:
    """Raise if a column would be read without the blanks at the ends of its name."""
    prefixes = tuple(PREFIXES.values())
    blank = [
        repr(name)
        for name in names
        if name.strip() in missing
        or (not name.startswith(prefixes) and name.lstrip().startswith(prefixes))
    ]
    requirement = "the names of columns to have no blanks at their ends"
    way_out = "write the header without blanks next to its commas"
    check(not blank, requirement, few(blank), way_out)


def check_different(opened: Opened, names: Iterable[str]) -> None:
    """Raise if several columns of a file have one of these names."""
    times = Counter(opened.names)
    requirement = "the columns of a table to have different names"
    way_out = "rename or remove all but one"
    for name in names:
        got = f"a file that contained multiple columns named {name}"
        check(times[name] < 2, requirement, got, way_out)


def _check_classes_named(used: Sequence[str], classes: Sequence[str]) -> None:
    pairs = zip(used, classes, strict=True)
    # In a csv file of pandas the index is a column without a name, which would be a
    # class.
    blank = [repr(name) for name, each in pairs if not each.strip()]
    way_out = "name the class, or write the table without its index"
    requirement = "the class columns to name their classes"
    check(not blank, requirement, few(blank), way_out)


def numbers_of(column: Any, name: str) -> NDArray[Any]:
    """Return a column of numbers (n,), with floats unchanged and others as float64;
    raise if a value is missing.
    """
    import pyarrow
    import pyarrow.compute as compute

    check_numbers(are_numbers(column.type), name, column.type)
    # numpy has no null: a missing number would become NaN.
    if column.null_count:
        row = int(np.argmax(column.is_null()))
        requirement = "hold numbers in every row"
        raise RowError(row, f"column {name!r}", requirement, "none", NUMBERS_WAY)
    # As numpy arrays, decimals would be Python objects.
    if not pyarrow.types.is_floating(column.type):
        column = compute.cast(column, pyarrow.float64())
    return np.asarray(column)
