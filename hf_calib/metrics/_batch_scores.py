"""Scores of a batch of logits: confidence, correctness, NLL and Brier score of each prediction.

Needs torch, so only `streaming` imports it. Nothing here waits for the device: what is left out stays in
place and is marked in `used`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

IGNORED_LABEL = -100


class BatchScores(NamedTuple):
    """R rows of logits over C classes as E predictions: one per row (softmax) or one per logit (sigmoid)."""

    confidence: torch.Tensor  # (E,) probability of what was predicted
    correct: torch.Tensor  # (E,) bool
    used: torch.Tensor  # (E,) bool, False where the label is ignored or invalid
    invalid: torch.Tensor  # (E,) bool, True where the label is neither a class nor ignored
    nll: torch.Tensor  # (E,) nats
    brier: torch.Tensor  # (E,)
    row_used: torch.Tensor  # (R,) bool, whether any label of the row counts
    row_finite: torch.Tensor  # (R,) bool, False where a probability that counts is NaN
    classes: ClassScores | None  # None where the classes are too many to be looked at apart


class ClassScores(NamedTuple):
    """The probability of every class of every row."""

    probs: torch.Tensor  # (R, C)
    hits: torch.Tensor  # (R, C) bool, where the class is true
    used: torch.Tensor  # (R, C) bool


def score_softmax(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, *, by_class: bool = True
) -> BatchScores:
    """One prediction per row: logits (R, C), labels (R,) class indices."""
    n_classes = logits.shape[1]
    used = (labels >= 0) & (labels < n_classes)
    targets = labels.long().clamp(0, n_classes - 1).unsqueeze(1)
    if not by_class:
        return _score_vocabulary(logits, labels, targets, used, temperature)
    # Before the division, whose rounding could make a tie: accuracy must not depend on the temperature.
    predicted = logits.argmax(dim=1)
    shifted = logits / temperature
    shifted -= shifted.amax(dim=1, keepdim=True)
    probs = shifted.exp()
    total = probs.sum(dim=1, keepdim=True)
    probs /= total
    hits = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, targets, True)
    return BatchScores(
        confidence=probs.amax(dim=1),
        correct=predicted == labels,
        used=used,
        invalid=~used & (labels != IGNORED_LABEL),
        nll=(total.log() - shifted.gather(1, targets)).squeeze(1),
        brier=(probs - hits.to(probs.dtype)).square_().sum(dim=1, dtype=torch.float64),
        row_used=used,
        row_finite=total.squeeze(1).isfinite(),
        classes=ClassScores(probs, hits, used.unsqueeze(1).expand_as(probs)),
    )


def _score_vocabulary(
    logits: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor, used: torch.Tensor, temperature: float
) -> BatchScores:
    """The same of very many classes, in few passes over the logits and with one matrix beside them."""
    largest = logits.amax(dim=1)
    at_label = logits.gather(1, targets).squeeze(1)
    probs = (logits if temperature == 1 else logits / temperature).softmax(dim=1)
    confidence = probs.amax(dim=1)
    probs.scatter_(1, targets, 0)
    one_minus_p = probs.sum(dim=1)
    return BatchScores(
        confidence=confidence,
        correct=(logits.argmax(dim=1) == labels) & used,
        used=used,
        invalid=~used & (labels != IGNORED_LABEL),
        nll=(largest - at_label) / temperature - confidence.log(),
        brier=(torch.linalg.vector_norm(probs, dim=1).square() + one_minus_p.square()).double(),
        row_used=used,
        row_finite=confidence.isfinite(),
        classes=None,
    )


def score_sigmoid(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, *, by_class: bool = True
) -> BatchScores:
    """One prediction per logit: logits (R, C), labels (R, C) of 0 and 1."""
    positive = labels == 1
    used = positive | (labels == 0)
    scaled = logits / temperature
    probs = scaled.sigmoid()
    return BatchScores(
        confidence=scaled.abs().sigmoid().flatten(),
        correct=((logits > 0) == positive).flatten(),
        used=used.flatten(),
        invalid=(~used & (labels != IGNORED_LABEL)).flatten(),
        # Not binary_cross_entropy_with_logits, which is NaN for an infinite (masked) logit.
        nll=-F.logsigmoid(torch.where(positive, scaled, -scaled)).flatten(),
        brier=(probs - positive.to(probs.dtype)).square_().flatten(),
        row_used=used.any(dim=1),
        row_finite=(~used | probs.isfinite()).all(dim=1),
        classes=ClassScores(probs, positive, used) if by_class else None,
    )
