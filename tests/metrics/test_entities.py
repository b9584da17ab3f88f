"""Entities: against cases counted by hand, seqeval's own scores, and a bootstrap written out."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from seqeval.metrics import f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities

from hf_calib.metrics import Entities, entity_scores, find_entities
from hf_calib.metrics.sums import TopLabel, top_label_error

TAGS = ["O", "B-person", "I-person", "B-place", "I-place"]


def rows_of(tags: list[str], confidences: list[float]) -> np.ndarray:
    """Probabilities (N, 5) that predict these tags with these confidences; the rest is shared evenly."""
    rows = np.repeat((1 - np.array(confidences))[:, None] / 4, 5, axis=1)
    rows[np.arange(len(tags)), [TAGS.index(tag) for tag in tags]] = confidences
    return rows


def ids(tags: list[str]) -> np.ndarray:
    return np.array([TAGS.index(tag) for tag in tags])


@pytest.fixture
def by_hand() -> Entities:
    """Three sentences of 4, 3 and 3 tokens.

    1 predicted person 0-1 (right), place 3 (right); 2 predicted person 4 to 5, where the true one is 4 to 6, and
    place 6, which is none; 3 predicts nothing, where a place is.
    """
    predicted = [
        "B-person",
        "I-person",
        "O",
        "B-place",
        "B-person",
        "I-person",
        "B-place",
        "O",
        "O",
        "O",
    ]
    true = [
        "B-person",
        "I-person",
        "O",
        "B-place",
        "B-person",
        "I-person",
        "I-person",
        "O",
        "B-place",
        "O",
    ]
    confidences = [0.9, 0.8, 0.99, 0.6, 0.7, 0.5, 0.95, 0.9, 0.8, 0.7]
    sentences = [7, 7, 7, 7, 2, 2, 2, 5, 5, 5]  # any numbers
    return find_entities(
        rows_of(predicted, confidences), ids(true), sentences, tag_names=TAGS
    )


def test_entities_counted_by_hand(by_hand: Entities) -> None:
    assert by_hand.spans == (
        ("person", 0, 1),
        ("place", 3, 3),
        ("person", 4, 5),
        ("place", 6, 6),
    )
    assert by_hand.correct.tolist() == [1, 1, 0, 0]
    assert by_hand.sentences.tolist() == [0, 0, 1, 1]
    assert by_hand.n_true.tolist() == [2, 1, 1]
    np.testing.assert_allclose(by_hand.product, [0.72, 0.6, 0.35, 0.95], rtol=1e-12)
    np.testing.assert_allclose(by_hand.minimum, [0.8, 0.6, 0.5, 0.95], rtol=1e-12)
    scores = {
        name: interval.value
        for name, interval in entity_scores(by_hand, n_bins=10).items()
    }
    assert scores["precision"] == 2 / 4
    assert scores["recall"] == 2 / 4
    assert scores["f1"] == 2 / 4
    # Bins of a tenth: each product is in its own, and so is each minimum.
    product = [
        Fraction(28, 100),
        Fraction(40, 100),
        Fraction(35, 100),
        Fraction(95, 100),
    ]
    minimum = [
        Fraction(20, 100),
        Fraction(40, 100),
        Fraction(50, 100),
        Fraction(95, 100),
    ]
    assert scores["ece_product"] == pytest.approx(float(sum(product) / 4), abs=1e-12)
    assert scores["ece_minimum"] == pytest.approx(float(sum(minimum) / 4), abs=1e-12)


@pytest.fixture(scope="module")
def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """200 random sentences of 1 to 12 tokens, tagged right two times in three."""
    rng = np.random.default_rng(0)
    sentences = np.repeat(np.arange(200), rng.integers(1, 13, 200))
    labels = rng.choice(5, len(sentences), p=[0.5, 0.15, 0.1, 0.15, 0.1])
    logits = rng.normal(size=(len(sentences), 5))
    logits[np.arange(len(labels)), labels] += 2
    probs = np.exp(logits)
    return probs / probs.sum(axis=1, keepdims=True), labels, sentences


def test_scores_are_those_of_seqeval_and_of_the_metric(
    drawn: tuple[np.ndarray, ...],
) -> None:
    probs, labels, sentences = drawn
    cuts = np.flatnonzero(np.diff(sentences)) + 1
    true, predicted = (
        [[TAGS[tag] for tag in part] for part in np.split(tags, cuts)]
        for tags in (labels, probs.argmax(1))
    )
    found = find_entities(probs, labels, sentences, tag_names=TAGS)
    scores = {
        name: interval.value
        for name, interval in entity_scores(found, n_resamples=1).items()
    }
    assert scores["f1"] == pytest.approx(f1_score(true, predicted), abs=1e-12)
    assert scores["precision"] == pytest.approx(
        precision_score(true, predicted), abs=1e-12
    )
    assert scores["recall"] == pytest.approx(recall_score(true, predicted), abs=1e-12)
    spans = [get_entities(tags) for tags in predicted]
    starts = np.append(0, cuts)
    moved = [
        (kind, first + i, last + i)
        for i, each in zip(starts, spans, strict=True)
        for kind, first, last in each
    ]
    assert list(found.spans) == moved
    for kind in ("product", "minimum"):
        expected = top_label_error(TopLabel(getattr(found, kind), found.correct))
        assert scores[f"ece_{kind}"] == pytest.approx(expected, abs=1e-12)


def test_intervals_resample_sentences(drawn: tuple[np.ndarray, ...]) -> None:
    """The same draws as the library's, each measured from scratch on the sentences that it holds."""
    probs, labels, sentences = drawn
    found = find_entities(probs, labels, sentences, tag_names=TAGS)
    scores = entity_scores(found, n_resamples=60, seed=3)
    drawn_sentences = np.random.default_rng(3).integers(0, 200, (60, 200))
    of_sentence = [np.flatnonzero(sentences == i) for i in range(200)]
    redone: dict[str, list[float]] = {name: [] for name in scores}
    for chosen in drawn_sentences:
        rows = np.concatenate([of_sentence[i] for i in chosen])
        numbers = np.repeat(np.arange(200), [len(of_sentence[i]) for i in chosen])
        again = find_entities(probs[rows], labels[rows], numbers, tag_names=TAGS)
        for name, interval in entity_scores(again, n_resamples=1).items():
            redone[name].append(interval.value)
    for name, interval in scores.items():
        if name.startswith("ece"):  # which resamples would make larger
            assert interval[1:] == (None, None)
            continue
        low, high = np.quantile(redone[name], [0.025, 0.975])
        assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-12), (
            name
        )


def test_nothing_predicted() -> None:
    rows = rows_of(["O", "O"], [0.9, 0.9])
    scores = entity_scores(
        find_entities(rows, ids(["B-person", "O"]), [0, 1], tag_names=TAGS)
    )
    assert scores["f1"] == scores["precision"] == scores["recall"] == (0, 0, 0)
    for name in ("ece_product", "ece_minimum"):
        assert math.isnan(scores[name].value)
        assert scores[name].low is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"sentences": [0, 0]},
            ValueError,
            r"sentences to have shape \(3,\), got shape \(2,\)",
        ),
        ({"sentences": [0.0, 0.0, 1.0]}, TypeError, "sentences to be integers"),
        (
            {"sentences": [0, 1, 0]},
            ValueError,
            "follow each other, got sentence 0 in 2 places",
        ),
        (
            {"tag_names": TAGS[:4]},
            ValueError,
            "tag_names to hold 5 names, one per column, got 4",
        ),
        (
            {"tag_names": [*TAGS[:4], "NOUN"]},
            ValueError,
            r"O, B-TYPE and I-TYPE, got \['NOUN'\]",
        ),
        ({"labels": [0, 1, 5]}, ValueError, "labels to lie in 0..4"),
    ],
)
def test_refusals(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    rows = rows_of(["O"] * 3, [0.9] * 3)
    given = {
        "probs": rows,
        "labels": [0, 0, 0],
        "sentences": [0, 0, 1],
        "tag_names": TAGS,
    } | change
    with pytest.raises(error, match=message):
        find_entities(**given)  # type: ignore[arg-type]
