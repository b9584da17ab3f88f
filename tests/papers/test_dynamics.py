"""Functions of a training's record: against closed forms, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import hf_calib.papers
from hf_calib.papers import Trace, learned_epoch, learned_groups, moving_average


def test_the_public_names() -> None:
    names = hf_calib.papers.__all__
    assert sorted(names, key=lambda name: (not name.isupper(), name)) == names
    for name in set(hf_calib.papers.__all__) - {"IMAGE_NETWORKS"}:
        assert getattr(hf_calib.papers, name).__name__ == name


def test_the_moving_average_is_a_geometric_sum() -> None:
    values = np.random.default_rng(0).random((30, 2))
    for factor in (0.0, 0.5, 0.9):
        weights = (1 - factor) * factor ** np.arange(29, -1, -1)
        weights[0] = factor**29  # of the first value, which stands for all that was before
        np.testing.assert_allclose(moving_average(values, factor=factor)[-1], weights @ values)
    np.testing.assert_array_equal(moving_average(values, factor=0.0), values)
    for bad in ({"values": [], "factor": 0.5}, {"values": [1.0], "factor": 1.0}):
        with pytest.raises(ValueError, match=r"expected (values|factor) to be"):
            moving_average(bad["values"], factor=bad["factor"])


def test_when_rows_are_learned_against_a_loop() -> None:
    rng = np.random.default_rng(0)
    correct, epochs = rng.random((12, 400)) < 0.7, np.arange(1, 13) / 2
    for r in range(400):
        right = correct[:, r]
        wrong = np.flatnonzero(~right)
        after = 0 if len(wrong) == 0 else wrong[-1] + 1
        last = epochs[after] if after < 12 else np.inf
        first = epochs[np.flatnonzero(right)[0]] if right.any() else np.inf
        assert learned_epoch(epochs, correct)[r] == last
        assert learned_epoch(epochs, correct, when="first")[r] == first


def test_each_row_is_in_one_group() -> None:
    learned = np.r_[np.random.default_rng(0).integers(1, 50, 200), np.inf]
    groups = learned_groups(learned, [10, 20, 40])
    assert list(groups) == ["to 10", "10 to 20", "20 to 40", "after 40", "never"]
    np.testing.assert_array_equal(np.sum(list(groups.values()), axis=0), 1)
    assert groups["10 to 20"].sum() == ((learned > 10) & (learned <= 20)).sum()
    for boundaries in ([5, 5], [], [5, np.inf], [np.nan]):
        with pytest.raises(ValueError, match="boundaries to be finite epochs that rise"):
            learned_groups(learned, boundaries)
    with pytest.raises(TypeError, match="a boundary to be a number, got '5'"):
        learned_groups(learned, ["5"])  # type: ignore[list-item]


def test_evaluations_without_the_rows_do_not_count() -> None:
    unknown = [[0, 1], [np.nan, np.nan], [1, 1]]
    np.testing.assert_array_equal(learned_epoch([1, 2, 3], unknown), [3, 1])


def test_a_row_that_is_not_known_at_an_evaluation_hides_no_other() -> None:
    """Only an evaluation in which no row is known is passed over."""
    correct = [[1, np.nan], [1, 1], [np.nan, np.nan]]
    assert learned_epoch([1, 2, 3], correct).tolist() == [1, 2]
    assert learned_epoch([1, 2, 3], correct, when="first").tolist() == [1, 2]


def test_boundaries_that_look_alike_have_names_of_their_own() -> None:
    groups = learned_groups([1.0], [1.00000001, 1.00000002])
    assert list(groups) == ["to 1.00000001", "1.00000001 to 1.00000002", "after 1.00000002", "never"]


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"to have shapes \(T,\) and \(T, R\), got \(3,\) and \(2, 2\)"):
        learned_epoch([1, 2, 3], [[0, 1], [1, 1]])
    with pytest.raises(ValueError, match="when to be 'last' or 'first', got 'never'"):
        learned_epoch([1], [[1]], when="never")
    with pytest.raises(ValueError, match=r"epochs to rise, got \[2.0, 1.0\]"):
        learned_epoch([2, 1], [[0], [1]])
    with pytest.raises(ValueError, match="correct to be known at some evaluation"):
        learned_epoch([1], [[np.nan]])
    with pytest.raises(TypeError, match=r"factor to be a number, got '0\.5'"):
        moving_average([1.0], factor="0.5")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "something else .JSONDecodeError"),
        ("[]", "something else .TypeError"),
        ('{"version": 1}', "something else .KeyError: 'entries'"),
        ('{"version": 2}', "to have version 1, got version 2"),
    ],
)
def test_a_file_that_is_no_trace(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "training_trace.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        Trace.load(tmp_path)


def test_no_file_and_an_empty_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got no such file; train with callbacks"):
        Trace.load(tmp_path / "nowhere.json")
    (tmp_path / "t.json").write_text(json.dumps({"version": 1, "loss": "focal", "rows": {}, "entries": []}))
    assert Trace.load(tmp_path / "t.json").sets == {}
