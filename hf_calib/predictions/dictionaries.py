"""Dictionaries of options by row, such as {"yes": -0.1, "no": -2.3}, as columns of classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

from hf_calib._errors import check
from hf_calib.metrics.checks import FloatArray, RowError, refuse
from hf_calib.predictions.columns import Columns
from hf_calib.predictions.files import check_numbers
from hf_calib.predictions.labels import are_numbers
from hf_calib.predictions.predictions import Predictions

# Of more labels with a stated probability a note says what they decide.
_FEW_LABELS = 1e-3
# A log-probability of a service may be above 0 by so much.
_ROUNDED = 1e-3


def by_option(
    column: Any, name: str, options: Sequence[str]
) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Return the numbers (C, n) of a column of dictionaries, and where a dictionary has none."""
    import pyarrow
    import pyarrow.compute as compute

    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    kind = column.type
    is_map = pyarrow.types.is_map(kind)
    numbers = np.full((len(options), len(column)), np.nan)
    is_missing = np.ones(numbers.shape, bool)
    for place, option in enumerate(options):
        if is_map:
            key = pyarrow.scalar(option, kind.key_type)
            own = compute.map_lookup(column, key, "first")
        else:
            field = kind.get_field_index(option)
            # Another file names an option that no row of this one has.
            if field < 0:
                continue
            own = compute.struct_field(column, field)
        check_numbers(are_numbers(own.type), name, f"{own.type} for {option!r}")
        # NaN is no missing option here: it is a wrong score, which is refused with its
        # row.
        is_missing[place] = own.is_null()
        numbers[place] = own.cast(pyarrow.float64()).fill_null(math.nan)
    return numbers, is_missing


def fill_unlisted(
    scores: FloatArray, is_missing: NDArray[np.bool_], columns: Columns
) -> str:
    """Give options (C, N) that rows leave out the stated probability, in place, and return a note;
    raise if none is stated.

    A service that lists the most probable tokens says of others only that they are less probable.
    """
    argument = f"column {columns.scores[0]!r}"
    # With the stated probability for every option, such a row would be uniform.
    has_none = np.asarray(is_missing.all(axis=0))
    requirement = "list an option in every row"
    nothing = np.full(len(has_none), "none")
    refuse(has_none, argument, requirement, nothing, "remove the rows without one")
    is_short = np.asarray(is_missing.any(axis=0))
    rows = f"{np.count_nonzero(is_short):,} of {len(is_short):,} rows"
    probability = columns.unlisted_at
    if probability is None:
        row = int(is_short.argmax())
        option = columns.class_names[int(is_missing[:, row].argmax())]
        requirement = "have a score for each option in every row"
        got = f"{rows} without one, such as {option!r}"
        way_out = "ask the service for more, or state a probability as unlisted_at"
        raise RowError(row, argument, requirement, got, way_out)
    # All logits may be larger by one number, so that none of them stands for a probability.
    requirement = f"{argument} to hold probabilities or their logarithms"
    way_out = "name the column logprobs, if these are log-probabilities"
    check(columns.scores[0] != "logits", requirement, "logits", way_out)
    is_log = columns.kind == "logits"
    scores[is_missing] = math.log(probability) if is_log else probability
    return (
        f"{rows} do not list every option. Those that they leave out have the probability "
        f"{probability:g}, as stated by unlisted_at, before the probabilities of a row are divided "
        "by their sum."
    )


def normalize(scores: FloatArray, columns: Columns) -> None:
    """Divide probabilities (C, N) of options by their sums, in place; raise for log-probabilities
    above 0.

    Options are some of all tokens, whose probabilities need not sum to 1. Those of logits do once
    they are made of them.
    """
    if columns.kind == "probs":
        with np.errstate(invalid="ignore"):
            scores /= scores.sum(axis=0)
        return
    name = columns.scores[0]
    if name == "logits":
        return
    largest = scores.max(axis=0)
    requirement = "hold log-probabilities, which are at most 0"
    way_out = "name the column logits, if these are logits"
    is_above = largest > _ROUNDED
    refuse(is_above, f"column {name!r}", requirement, largest, way_out)


def on_unlisted_labels(made: Predictions, is_missing: NDArray[np.bool_]) -> list[str]:
    """Return a note on labels whose probability is only stated, and what these decide."""
    every = np.arange(len(made))
    is_stated = is_missing[made.labels, every]
    n_stated = int(np.count_nonzero(is_stated))
    if n_stated == 0:
        return []
    note = f"Labels that their rows do not list: {n_stated:,} of {len(made):,}."
    if n_stated <= _FEW_LABELS * len(made):
        return [note]
    nats = -log_softmax(made.as_logits(), axis=1)[every, made.labels]
    if made.weights is not None:
        nats = nats * made.weights
    share = nats[is_stated].sum() / nats.sum()
    return [
        f"{note} These are {share:.0%} of the negative log-likelihood: it depends on the stated "
        "probability, and so does a calibrator that is fitted to these rows."
    ]
