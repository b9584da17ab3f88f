"""Samples of predictions that are not held at once, drawn by hashes: the same on every machine and for every split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputValueError
from hf_calib.metrics.checks import check_rows
from hf_calib.predictions.passes import run_pass
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.shard_formats import Piece
from hf_calib.predictions.shards import Shards, no_rows

MOST_SAMPLED = 200_000


@dataclass
class Sample:
    """Rows with the smallest hashes among those that were seen.

    Args:
        most: that are kept.
        scores: (n, C), logits or probabilities.
        labels: (n,).
        weights: (n,), 1 of rows without.
        hashes: (n,).
        n_rows: that were seen.
    """

    most: int
    scores: NDArray[np.float64]
    labels: NDArray[np.int64]
    weights: NDArray[np.float64]
    hashes: NDArray[np.uint64]
    n_rows: int = 0

    def merge(self, other: Sample) -> None:
        """Take the rows of another one."""
        rows = np.arange(len(self.hashes) + len(other.hashes))
        hashes = np.concatenate([self.hashes, other.hashes])
        kept, self.hashes = keep_smallest(rows, hashes, self.most)
        self.scores = np.concatenate([self.scores, other.scores])[kept]
        self.labels = np.concatenate([self.labels, other.labels])[kept]
        self.weights = np.concatenate([self.weights, other.weights])[kept]
        self.n_rows += other.n_rows


@dataclass(frozen=True)
class Sampling:
    """Draws a sample of the rows of a piece.

    Args:
        most: rows.
        half: 0 or 1 draws from that half of the rows only, see `half_of`; None from all.
    """

    most: int = MOST_SAMPLED
    half: int | None = None

    def __call__(self, shards: Shards, number: int, piece: Piece) -> Sample:
        found = empty_sample(self.most, len(shards.class_names))
        for first, batch in shards.batches(number, piece):
            with shards.naming(number, first):
                check_rows(batch.probs, batch.labels, batch.weights, len(shards.class_names))
            hashes = shards.row_hashes(number, first, len(batch.labels))
            rows = (
                np.arange(len(hashes)) if self.half is None else np.flatnonzero(half_of(hashes) == self.half)
            )
            rows, hashes = keep_smallest(rows, hashes[rows], self.most)
            weights = np.ones(len(batch.labels)) if batch.weights is None else batch.weights
            found.merge(
                Sample(
                    self.most,
                    batch.scores[rows].astype(np.float64),
                    batch.labels[rows],
                    weights[rows],
                    hashes,
                    len(batch.labels),
                )
            )
        return found


def draw_sample(
    shards: Shards,
    *,
    most: int = MOST_SAMPLED,
    half: int | None = None,
    workers: int | None = None,
) -> tuple[Predictions, NDArray[np.float64] | None]:
    """At most so many rows, of all or of one half of them, in the order of their hashes; and their weights.

    Raises:
        ValueError: if a row is wrong, or there is none.
    """
    sample = empty_sample(most, len(shards.class_names))
    run_pass(shards, Sampling(most, half), sample, workers=workers)
    if not len(sample.labels):
        raise InputValueError(no_rows(shards.name))
    order = np.argsort(sample.hashes, kind="stable")
    found = shards.predictions(sample.labels[order], sample.scores[order])
    return found, None if shards.columns.weight is None else sample.weights[order]


def keep_smallest(
    rows: NDArray[Any], hashes: NDArray[np.uint64], most: int
) -> tuple[NDArray[Any], NDArray[np.uint64]]:
    """Of rows (n, ...) those with the smallest hashes (n,): a sample without replacement, from any split of them."""
    if len(hashes) <= most:
        return rows, hashes
    kept = np.argpartition(hashes, most)[:most]
    return rows[kept], hashes[kept]


def empty_sample(most: int, n_classes: int) -> Sample:
    """A sample of no rows."""
    none = np.empty(0)
    return Sample(most, np.empty((0, n_classes)), np.empty(0, np.int64), none, np.empty(0, np.uint64))


def half_of(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The half, 0 or 1, that rows with these hashes belong to: by a bit that samples do not sort by."""
    return (hashes & np.uint64(1)).astype(np.int64)
