"""Entities of tagged sentences: how many are found, and whether their confidences are right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import InputTypeError, check, expected
from hf_calib.metrics.checks import (
    FloatArray,
    IntArray,
    as_array,
    check_confidence_level,
    check_n_bins,
    check_n_resamples,
    check_probs_and_labels,
    check_seed,
)
from hf_calib.metrics.resamples import Interval, draw_counts, interval_of
from hf_calib.metrics.sums import TopLabel, top_label_error, winners

_BIO = re.compile(r"O|[BI]-.+")

# (type, number of its first row, number of its last row)
Span = tuple[str, int, int]


@dataclass(frozen=True, eq=False)
class Entities:
    """The K entities that a model predicts in S sentences; made by `find_entities`.

    Args:
        spans: K of (type, first row, last row), rows of the probabilities.
        product: (K,) the product of the probabilities of the tags that make up the entity.
        minimum: (K,) the smallest of them.
        correct: (K,) 1 where a true entity has the same type and span, else 0.
        sentences: (K,) which of the S sentences each is in.
        n_true: (S,) true entities of each sentence.
    """

    spans: tuple[Span, ...]
    product: FloatArray
    minimum: FloatArray
    correct: FloatArray
    sentences: IntArray
    n_true: IntArray


def are_bio(tag_names: Sequence[str]) -> bool:
    """Whether tags tell entities by B-TYPE, I-TYPE and O.

    >>> are_bio(["O", "B-person", "I-person"]), are_bio(["NOUN", "VERB"])
    (True, False)
    """
    return all(map(_BIO.fullmatch, tag_names)) and set(tag_names) != {"O"}


def has_seqeval() -> bool:
    """Whether the package that finds the spans is installed."""
    return find_spec("seqeval") is not None


def check_seqeval() -> None:
    """Raise unless seqeval is installed."""
    way_out = "pip install 'hf_calib[tokens]'"
    check(has_seqeval(), "seqeval to be installed, which finds the entities", "none", way_out)


def find_entities(
    probs: ArrayLike, labels: ArrayLike, sentences: ArrayLike, *, tag_names: Sequence[str]
) -> Entities:
    r"""Find the entities that a token classifier predicts, their confidences, and whether they are right.

    The tag of a token is the most probable one, and spans are those of seqeval, as conlleval has them: an I- tag that
    continues no entity begins one. An entity e of the tokens t with the probabilities $p_t$ of their predicted tags
    has two confidences,

    $$c^{\mathrm{product}}_e = \prod_{t \in e} p_t, \qquad c^{\mathrm{minimum}}_e = \min_{t \in e} p_t$$

    of which the first takes the tokens for independent, and is the smaller. An entity is right where a true one has
    the same type, first and last token.

    Args:
        probs: (N, C) float, rows that sum to 1: the tokens that count, sentence by sentence.
        labels: (N,) int in [0, C).
        sentences: (N,) int, the same number for all tokens of a sentence, which lie one after another.
        tag_names: C names: "O", "B-..." and "I-...".

    Returns:
        The predicted entities; `entity_scores` measures them.

    References:
        Ramshaw and Marcus 1995 (tags); Tjong Kim Sang and De Meulder 2003 (what is right); Nakayama 2018, seqeval.

    >>> probs = [[0.1, 0.9, 0.0], [0.2, 0.0, 0.8], [0.7, 0.2, 0.1]]
    >>> found = find_entities(probs, [1, 2, 0], [0, 0, 0], tag_names=["O", "B-person", "I-person"])
    >>> found.spans, found.product.round(2).tolist(), found.minimum.tolist(), found.correct.tolist()
    ((('person', 0, 1),), [0.72], [0.8], [1.0])
    """
    rows, targets = check_probs_and_labels(probs, labels)
    starts = _check_sentences(as_array("sentences", sentences), len(rows))
    n_classes = rows.shape[1]
    way_out = "name the columns of probs in their order"
    check(
        len(tag_names) == n_classes, f"tag_names to be {n_classes}, one per column", len(tag_names), way_out
    )
    others = [name for name in tag_names if not _BIO.fullmatch(name)]
    way_out = "entities are told by such tags; other tags have calibration per token only"
    check(are_bio(tag_names), "tag_names to be O, B-TYPE and I-TYPE", others or "O only", way_out)
    check_seqeval()
    from seqeval.metrics.sequence_labeling import get_entities

    names = np.array(tag_names, dtype=object)
    confidences, predicted = winners(rows)
    spans: list[Span] = []
    correct: list[bool] = []
    n_found = np.zeros(len(starts), np.intp)
    n_true = np.zeros(len(starts), np.intp)
    for i, (start, end) in enumerate(zip(starts, [*starts[1:], len(rows)], strict=True)):
        found, true = (get_entities(list(names[tags[start:end]])) for tags in (predicted, targets))
        spans += [(kind, int(start) + first, int(start) + last) for kind, first, last in found]
        correct += [span in true for span in found]
        n_found[i], n_true[i] = len(found), len(true)
    tokens = [confidences[first : last + 1] for _, first, last in spans]
    return Entities(
        spans=tuple(spans),
        product=np.array([part.prod() for part in tokens], dtype=np.float64),
        minimum=np.array([part.min() for part in tokens], dtype=np.float64),
        correct=np.array(correct, dtype=np.float64),
        sentences=np.repeat(np.arange(len(starts)), n_found),
        n_true=n_true,
    )


def entity_scores(
    entities: Entities,
    *,
    n_bins: int = 15,
    n_resamples: int = 1000,
    confidence_level: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    r"""F1, precision and recall of entities, with intervals, and the calibration error of their confidences.

    `expected_calibration_error` of the tokens says little of the entities, since most tokens are in none. Here each
    predicted entity counts once,

    $$\mathrm{ECE} = \sum_m \frac{n_m}{K} |A_m - C_m|$$

    with the share $A_m$ of right ones and the mean confidence $C_m$ in equal-width bins. An entity that is missed has
    no confidence: read the recall beside it.

    Args:
        entities: from `find_entities`.
        n_resamples: of the bootstrap, which draws sentences: the entities of one are not independent.

    Returns:
        "f1", "precision", "recall" (micro, fractions), "ece_product" and "ece_minimum". As in seqeval, a share of
        nothing is 0. The errors have no interval, as noise makes them larger and a resample adds it again; without a
        predicted entity they are NaN.

    >>> probs = [[0.1, 0.9, 0.0], [0.2, 0.0, 0.8], [0.1, 0.6, 0.3]]
    >>> found = find_entities(probs, [1, 2, 0], [0, 0, 1], tag_names=["O", "B-person", "I-person"])
    >>> {name: round(score.value, 2) for name, score in entity_scores(found).items()}
    {'f1': 0.67, 'precision': 0.5, 'recall': 1.0, 'ece_product': 0.44, 'ece_minimum': 0.4}
    """
    n_bins, n_resamples = check_n_bins(n_bins), check_n_resamples(n_resamples)
    check_confidence_level(confidence_level)
    rng = np.random.default_rng(check_seed(seed))
    n_sentences = len(entities.n_true)
    whole = _shares_of(entities, np.ones((1, n_sentences), np.intp))
    drawn = [_shares_of(entities, counts) for counts in draw_counts(n_sentences, n_resamples, rng)]
    found = {}
    for name, (value,) in whole.items():
        draws = np.concatenate([block[name] for block in drawn])
        found[name] = interval_of(float(value), draws, confidence_level)
    for name, confidences in (("product", entities.product), ("minimum", entities.minimum)):
        top = TopLabel(confidences, entities.correct)
        found[f"ece_{name}"] = Interval(top_label_error(top, n_bins=n_bins) if len(confidences) else np.nan)
    return found


def _shares_of(entities: Entities, counts: IntArray) -> dict[str, FloatArray]:
    """F1, precision and recall (R,) of R samples, in which each sentence is as often as counts (R, S) say."""
    n_sentences = len(entities.n_true)

    def total(values: FloatArray | IntArray) -> FloatArray:
        sums = np.bincount(entities.sentences, values, minlength=n_sentences)
        return (counts @ sums).astype(np.float64, copy=False)

    n_right = total(entities.correct)
    n_found = total(np.ones(len(entities.correct)))
    n_true = (counts @ entities.n_true).astype(np.float64)

    def share(of: FloatArray) -> FloatArray:
        return np.divide(n_right, of, out=np.zeros_like(n_right), where=of > 0)

    return {
        "f1": share((n_found + n_true) / 2),
        "precision": share(n_found),
        "recall": share(n_true),
    }


def _check_sentences(sentences: NDArray[np.generic], n_tokens: int) -> IntArray:
    """The row (S,) at which each sentence starts."""
    way_out = "pass the number of its sentence for each token"
    fits = sentences.shape == (n_tokens,)
    check(fits, f"sentences to have shape ({n_tokens},)", f"shape {sentences.shape}", way_out)
    if not np.issubdtype(sentences.dtype, np.integer):
        way_out = "number the sentences"
        raise InputTypeError(expected("sentences", "be integers", f"dtype {sentences.dtype}", way_out))
    starts = np.flatnonzero(np.r_[True, sentences[1:] != sentences[:-1]])
    values, counts = np.unique(sentences[starts], return_counts=True)
    if (counts > 1).any():
        got = f"sentence {values[counts > 1][0]} in {counts.max()} places"
        check(False, "the tokens of a sentence to follow each other", got, "sort the tokens by sentence")
    return starts
