"""The kinds of labels, and what follows for probabilities, maps and statistics."""

from __future__ import annotations

from typing import NamedTuple

from hf_calib.scaling import SINGLE_LABEL_SCALERS


class LabelKind(NamedTuple):
    """How the labels of a task are given, and what follows for probabilities, maps and statistics."""

    name: str  # in messages
    rows: str  # the examples that have a label
    columns: str  # the columns of the logits
    sigmoid: bool  # whether each logit has a probability of its own, so that a row has any number of labels
    independent: bool  # whether examples are independent draws, as the promises of decisions need
    maps: tuple[str, ...]  # the post-hoc methods that go with it


SINGLE_LABEL = LabelKind("single-label", "rows", "classes", False, True, tuple(SINGLE_LABEL_SCALERS))
TOKENS = LabelKind("token", "tokens", "classes", False, False, tuple(SINGLE_LABEL_SCALERS))
MULTI_LABEL = LabelKind(
    "multi-label", "rows", "labels", True, True, ("auto", "temperature", "per_label_temperature")
)
