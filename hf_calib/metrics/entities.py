"""Entities of tagged sentences: F1, precision, recall and the calibration of confidences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check
from hf_calib.metrics import checks
from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.sums import (
    Interval,
    TopLabel,
    draw_counts,
    interval_of,
    top_label_error,
    winners,
)

_BIO = re.compile(r"O|[BI]-.+")
# The type, and the indices of the first and the last row.
Span = tuple[str, int, int]


@dataclass(frozen=True, eq=False)
class Entities:
    """The K entities that a model predicts in S sentences, returned by `find_entities`.

    An entity has a span (type, first row, last row), the product and the minimum of the
    probabilities of its tokens' tags, `correct` (1 if a true entity has the same span, otherwise
    0), and the index of its sentence. `n_true` (S,) is the number of true entities of each
    sentence.
    """

    spans: tuple[Span, ...]
    product: FloatArray
    minimum: FloatArray
    correct: FloatArray
    sentences: IntArray
    n_true: IntArray


def are_bio(tag_names: Sequence[str]) -> bool:
    """Whether the tags are B-TYPE, I-TYPE and O."""
    return all(map(_BIO.fullmatch, tag_names)) and set(tag_names) != {"O"}


def find_entities(
    probs: ArrayLike,
    labels: ArrayLike,
    sentences: ArrayLike,
    *,
    tag_names: Sequence[str],
) -> Entities:
    """Find the entities that a token classifier predicts, with their confidences and correctness.

    Spans are those of conlleval and seqeval: an I- tag that continues no entity begins one. The
    confidences are the product of the probabilities of an entity's predicted tags, as if they were
    independent, and the minimum.

    Args:
        probs: (N, C) float, the tokens that count, in the order of the sentences.
        labels: (N,) int in [0, C).
        sentences: (N,) int, the same number for all tokens of a sentence.
        tag_names: C names: "O", "B-..." and "I-...".

    References:
        Ramshaw and Marcus 1995 (tags); Tjong Kim Sang and De Meulder 2003 (correct entities).

    >>> probs = [[0.1, 0.9, 0.0], [0.2, 0.0, 0.8], [0.7, 0.2, 0.1]]
    >>> found = find_entities(probs, [1, 2, 0], [0, 0, 0], tag_names=["O", "B-person", "I-person"])
    >>> found.spans, found.product.round(2).tolist(), found.minimum.tolist(), found.correct.tolist()
    ((('person', 0, 1),), [0.72], [0.8], [1.0])
    """
    rows, targets = checks.check_probs_and_labels(probs, labels)
    begins = _sentence_begins(sentences, len(targets))
    _check_tags(tag_names, rows.shape[1])
    confidences, predicted = winners(rows)
    spans = _spans(predicted, tag_names, begins)
    true = _spans(targets, tag_names, begins)
    tokens = [confidences[first : last + 1] for _, first, last in spans]
    products = [part.prod() for part in tokens]
    minima = [part.min() for part in tokens]
    true_spans = set(true)
    is_correct = [span in true_spans for span in spans]
    sentence_of = begins.cumsum() - 1
    of_spans = [sentence_of[first] for _, first, _ in spans]
    of_true = [sentence_of[first] for _, first, _ in true]
    # The type is given because there may be no entity.
    return Entities(
        spans=tuple(spans),
        product=np.array(products, np.float64),
        minimum=np.array(minima, np.float64),
        correct=np.array(is_correct, np.float64),
        sentences=np.array(of_spans, np.intp),
        n_true=np.bincount(of_true, minlength=begins.sum()),
    )


def _sentence_begins(sentences: ArrayLike, n_tokens: int) -> NDArray[np.bool_]:
    """The mask (N,) of the first tokens; raise unless those of a sentence follow each other."""
    numbers = checks.as_array("sentences", sentences)
    way_out = "pass the number of its sentence for each token"
    checks.check_shape("sentences", numbers, (n_tokens,), way_out)
    checks.check_kind(numbers, "iu", "sentences to be integers", way_out)
    begins = np.append(True, numbers[1:] != numbers[:-1])
    values, places = np.unique(numbers[begins], return_counts=True)
    check(
        places.max() == 1,
        "the tokens of a sentence to follow each other",
        f"sentence {values[places.argmax()]} in {places.max()} places",
        "sort the tokens by sentence",
    )
    return begins


def _check_tags(tag_names: Sequence[str], n_classes: int) -> None:
    """Raise unless there is a name for each column, and the names define entities."""
    requirement = f"tag_names to hold {n_classes} names, one per column"
    way_out = "name the columns of probs in their order"
    check(len(tag_names) == n_classes, requirement, len(tag_names), way_out)
    others = [name for name in tag_names if not _BIO.fullmatch(name)]
    check(
        are_bio(tag_names),
        "tag_names to be O, B-TYPE and I-TYPE",
        others or "O only",
        "only such tags define entities; other tags have calibration per token only",
    )


def _spans(
    tags: IntArray, tag_names: Sequence[str], begins: NDArray[np.bool_]
) -> list[Span]:
    """The entities of the tags (N,), in order; `begins` (N,) marks the first row of a sentence."""
    kinds = np.array([name[2:] for name in tag_names])[tags]
    # An entity goes on in an I- tag of the same type as the tag before it.
    goes_on = np.array([name.startswith("I") for name in tag_names])[tags]
    goes_on &= (kinds == np.roll(kinds, 1)) & ~begins
    is_inside = kinds != ""
    starts = is_inside & ~goes_on
    ends = is_inside & ~np.append(goes_on[1:], False)
    types = kinds[starts].tolist()
    first = np.flatnonzero(starts).tolist()
    last = np.flatnonzero(ends).tolist()
    return list(zip(types, first, last, strict=True))


def entity_scores(
    entities: Entities,
    *,
    n_bins: int = 15,
    n_resamples: int = 1000,
    confidence_level: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """F1, precision and recall of entities with intervals, and their calibration error.

    A missed entity has no confidence, so read the recall together with the error. The bootstrap
    draws sentences.

    Returns:
        "f1", "precision" and "recall" (micro averages; 0 if the denominator is 0), and
        "ece_product" and "ece_minimum", which have no interval, because resamples add noise to
        them, and are NaN without an entity.

    >>> probs = [[0.1, 0.9, 0.0], [0.2, 0.0, 0.8], [0.1, 0.6, 0.3]]
    >>> found = find_entities(probs, [1, 2, 0], [0, 0, 1], tag_names=["O", "B-person", "I-person"])
    >>> {name: round(score.value, 2) for name, score in entity_scores(found).items()}
    {'f1': 0.67, 'precision': 0.5, 'recall': 1.0, 'ece_product': 0.44, 'ece_minimum': 0.4}
    """
    checks.check_n_bins(n_bins)
    rng = checks.check_draws(n_resamples, seed, confidence_level)
    n_sentences = len(entities.n_true)
    n_right = np.bincount(entities.sentences, entities.correct, minlength=n_sentences)
    n_found = np.bincount(entities.sentences, minlength=n_sentences)
    n_true = entities.n_true
    # F1, the harmonic mean of precision and recall, divides by the mean of their divisors.
    n_either = (n_found + n_true) / 2
    sums = np.stack([n_right, n_either, n_found, n_true], axis=1)
    values = _shares(sums.sum(axis=0))
    blocks = draw_counts(n_sentences, n_resamples, rng)
    draws = np.concatenate([_shares(counts @ sums) for counts in blocks])
    found = {}
    for i, name in enumerate(("f1", "precision", "recall")):
        found[name] = interval_of(float(values[i]), draws[:, i], confidence_level)
    confidences = {"product": entities.product, "minimum": entities.minimum}
    for name, stated in confidences.items():
        error = np.nan
        if len(stated) > 0:
            error = top_label_error(TopLabel(stated, entities.correct), n_bins=n_bins)
        found[f"ece_{name}"] = Interval(error)
    return found


def _shares(sums: NDArray[Any]) -> FloatArray:
    """The first of the sums (..., 4) divided by each of the others; 0 if the divisor is 0."""
    right = sums[..., :1]
    divisors = sums[..., 1:]
    return np.divide(right, divisors, out=np.zeros_like(divisors), where=divisors > 0)
