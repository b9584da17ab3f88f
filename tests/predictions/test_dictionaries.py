"""Dictionaries of options by row, such as the log-probabilities of a few answers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet as pq
import pytest
from scipy.special import log_softmax, softmax

from hf_calib import InputError, calibrate, decide, evaluate
from hf_calib.predictions import Predictions, Read, load_predictions, read_predictions
from tests.helpers.commands import assert_refused, call
from tests.helpers.reports import quick_reports  # noqa: F401

FORMS = ("jsonl", "struct", "map")
ROWS: list[dict[str, Any]] = [
    {"logprobs": {"yes": -0.1, "no": -2.5}, "label": "yes"},
    {"logprobs": {"no": -1, "yes": -0.5}, "label": "no"},
    {"logprobs": {"yes": -0.2, "no": -1.7}, "label": "no"},
]


def written(folder: Path, rows: list[dict[str, Any]], form: str = "jsonl") -> Path:
    """Rows as JSON lines, or as parquet with structs or maps."""
    if form == "jsonl":
        path = folder / "a.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return path
    path = folder / "a.parquet"
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    (name,) = (name for name, own in columns.items() if isinstance(own[0], dict))
    table = {each: pyarrow.array(own) for each, own in columns.items() if each != name}
    if form == "map":
        kind = pyarrow.map_(pyarrow.string(), pyarrow.float64())
        pairs = [None if each is None else [*each.items()] for each in columns[name]]
        table[name] = pyarrow.array(pairs, kind)
    else:
        table[name] = pyarrow.array(columns[name])
    pq.write_table(pyarrow.table(table), path)
    return path


def logits_of(read: Read) -> np.ndarray:
    assert isinstance(read.predictions, Predictions)
    return read.predictions.as_logits()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["logprobs", "logits", "top_logprobs"])
def test_options_are_classes(name: str, form: str, tmp_path: Path) -> None:
    rows = [{name: row["logprobs"], "label": row["label"]} for row in ROWS]
    found = load_predictions(written(tmp_path, rows, form))
    assert found.class_names == ("yes", "no")
    assert found.labels.tolist() == [0, 1, 1]
    values = np.array([[-0.1, -2.5], [-0.5, -1.0], [-0.2, -1.7]])
    np.testing.assert_array_equal(found.as_logits(), values)


@pytest.mark.parametrize("form", FORMS)
def test_probabilities_are_no_logarithms(form: str, tmp_path: Path) -> None:
    rows = [{"probs": {"a": 0.25, "b": 0.75}, "label": "b"}] * 2
    found = load_predictions(written(tmp_path, rows, form))
    np.testing.assert_array_equal(found.probs, [[0.25, 0.75]] * 2)
    rows = [{"logprobs": {"a": 0.25, "b": 0.75}, "label": "b"}] * 2
    with pytest.raises(InputError, match="log-probabilities, which are at most 0, got"):
        load_predictions(written(tmp_path, rows, form))
    # Options are some of all tokens.
    rows = [{"probs": {"a": 0.2, "b": 0.6}, "label": "b"}] * 2
    found = load_predictions(written(tmp_path, rows, form))
    np.testing.assert_allclose(found.probs, [[0.25, 0.75]] * 2)


SHORT: list[dict[str, Any]] = [
    *ROWS,
    {"logprobs": {"yes": -0.3}, "label": "yes"},
    {"logprobs": {"no": -0.4, "yes": None}, "label": "yes"},
]


class TestUnlisted:
    @pytest.mark.parametrize("form", FORMS)
    def test_options_are_refused_with_their_number(
        self, form: str, tmp_path: Path
    ) -> None:
        message = (
            r"'logprobs' to have a score for each option in every row, got 2 of 5 rows "
            r"without one, such as 'no' in row 3 of a\.(jsonl|parquet); .* unlisted_at"
        )
        with pytest.raises(InputError, match=message):
            read_predictions(written(tmp_path, SHORT, form))

    @pytest.mark.parametrize("form", FORMS)
    def test_options_have_the_stated_probability(
        self, form: str, tmp_path: Path
    ) -> None:
        path = written(tmp_path, SHORT, form)
        read = read_predictions(path, unlisted_at=0.01)
        floor = math.log(0.01)
        wanted = [[-0.1, -2.5], [-0.5, -1], [-0.2, -1.7], [-0.3, floor], [floor, -0.4]]
        np.testing.assert_array_equal(logits_of(read), wanted)
        nats = -log_softmax(wanted, axis=1)[np.arange(5), read.predictions.labels]
        rows, labels = read.notes
        assert rows.startswith("2 of 5 rows do not list every option")
        assert "the probability 0.01, as stated by unlisted_at" in rows
        share = f"These are {nats[4] / nats.sum():.0%} of the negative log-likelihood"
        assert labels.startswith("Labels that their rows do not list: 1 of 5. These")
        assert share in labels

    def test_few_labels_are_counted_only(self, tmp_path: Path) -> None:
        rows = [ROWS[0]] * 1_999 + [SHORT[-1]]
        *_, note = read_predictions(written(tmp_path, rows), unlisted_at=0.01).notes
        assert note == "Labels that their rows do not list: 1 of 2,000."
        rows = [*rows[:998], rows[-1]]
        *_, note = read_predictions(written(tmp_path, rows), unlisted_at=0.01).notes
        assert "log-likelihood" in note

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("nothing", [None, {}, {"yes": None, "no": None}])
    def test_a_row_without_any(self, nothing: Any, form: str, tmp_path: Path) -> None:
        rows = [*ROWS, {"logprobs": nothing, "label": "yes"}]
        path = written(tmp_path, rows, form)
        with pytest.raises(InputError, match=r"list an option in every .* in row 3 of"):
            read_predictions(path, unlisted_at=0.1)

    def test_an_option_that_a_file_does_not_have(self, tmp_path: Path) -> None:
        rows = [{"logprobs": {"yes": -0.1, "maybe": -2.0}, "label": "maybe"}]
        (tmp_path / "b").mkdir()
        paths = [written(tmp_path, ROWS), written(tmp_path / "b", rows)]
        with pytest.raises(InputError, match=r"got 4 of 4 rows .* such as 'maybe' in"):
            read_predictions(paths)
        found = read_predictions(paths, unlisted_at=0.1).predictions
        assert found.names == ("yes", "no", "maybe")
        assert found.labels.tolist() == [0, 1, 1, 2]

    def test_logits_have_no_probability_beside_them(self, tmp_path: Path) -> None:
        """All of them may be larger by one number, which changes no probability."""
        rows = [{"logits": row["logprobs"], "label": row["label"]} for row in SHORT]
        with pytest.raises(InputError, match="got logits; name the column logprobs"):
            read_predictions(written(tmp_path, rows), unlisted_at=0.01)

    @pytest.mark.parametrize("probability", [0, 1, -0.1, "0.1", True])
    def test_what_is_no_probability(self, probability: Any, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="unlisted_at to"):
            read_predictions(written(tmp_path, ROWS), unlisted_at=probability)

    def test_of_other_forms(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("prob_a,prob_b,label\n.2,.8,a\n")
        with pytest.raises(InputError, match="given with dictionaries of options, got"):
            read_predictions(tmp_path / "a.csv", unlisted_at=0.1)

    def test_every_command_says_so(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        values = log_softmax(rng.normal(size=(300, 3)) * 2, axis=1)
        rows = []
        for own in values:
            label = "abc"[rng.choice(3, p=softmax(own))]
            listed = np.argsort(-own)[:2]
            dictionary = {"abc"[each]: own[each] for each in sorted(listed)}
            rows.append({"logprobs": dictionary, "label": label})
        path = written(tmp_path, rows)
        assert_refused(call("evaluate", path), "score for each option in every row")
        given: dict[str, Any] = {"unlisted_at": 0.02, "class_names": ["a", "b", "c"]}
        report = evaluate(path, **given)
        done = calibrate(path, tmp_path / "out", method="temperature", **given)
        decided = decide(path, accuracy=0.5, unlisted_at=0.02)
        for notes in (report.notes, done.report.notes, decided.notes):
            assert any("the probability 0.02" in note for note in notes)
            assert any("of the negative log-likelihood" in note for note in notes)
        calibrated = pandas.read_parquet(tmp_path / "out" / "predictions.parquet")
        assert {*calibrated.columns} == {"prob_a", "prob_b", "prob_c", "label"}


def test_the_named_options_are_the_classes(tmp_path: Path) -> None:
    rows = [
        {"top_logprobs": {"no": -1.0, "yes": -1.2, "The": -3.0}, "label": "yes"},
        {"top_logprobs": {"no": -2.0, "yes": -0.2, "I": -4.0}, "label": "no"},
    ]
    path = written(tmp_path, rows)
    read = read_predictions(path, class_names=["no", "yes"])
    np.testing.assert_array_equal(logits_of(read), [[-1.0, -1.2], [-2.0, -0.2]])
    with pytest.raises(
        InputError, match=r"to be options in .*'maybe'; these are no, yes"
    ):
        read_predictions(path, class_names=["no", "maybe"])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{**ROWS[0], "label": 0}, {**ROWS[0], "label": 1}],
            r"one order, as column 'label' holds ids, got none, .* in a\.jsonl; write names",
        ),
        ([{"logprobs": {"yes": -0.1}, "label": "yes"}], "dictionaries of at least 2"),
        (
            [{"logprobs": {"yes": "a", "no": -1.0}, "label": "yes"}],
            "'logprobs' to hold numbers in every row, got string for 'yes'",
        ),
        (
            [{"logprobs": {"yes": -0.1, " yes": -1.0}, "label": "yes"}],
            "class_names to differ visibly",
        ),
        ([{**ROWS[0], "label": "maybe"}], r"\(yes, no\), got 'maybe' in row 0"),
    ],
)
def test_refused(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_predictions(written(tmp_path, rows))


@pytest.mark.parametrize(
    ("columns", "probs"),
    [
        ({"prob_yes": 0.25, "prob_no": 0.75}, [0.25, 0.75]),
        ({"probs": [0.25, 0.75], "label": 1}, [0.25, 0.75]),
        ({"score": 0.75, "label": 1}, [0.25, 0.75]),
        ({"confidence": 0.75, "correct": 1}, [0.25, 0.75]),
    ],
)
def test_columns_of_scores_come_first(
    columns: dict[str, Any], probs: list[float], tmp_path: Path
) -> None:
    """A log of an API may stand next to the scores that were made of it."""
    found = read_predictions(written(tmp_path, [{**ROWS[0], **columns}])).predictions
    np.testing.assert_allclose(found.probabilities(), [probs])


def test_keys_that_are_no_texts(tmp_path: Path) -> None:
    kind = pyarrow.map_(pyarrow.int64(), pyarrow.float64())
    columns = {"logprobs": pyarrow.array([[(1, -0.1), (2, -2.0)]], kind), "label": [1]}
    pq.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="with texts as keys, got map<int64, double"):
        read_predictions(tmp_path / "a.parquet")


def test_files_with_dictionaries_and_without(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    other = [{"logprobs": [-0.1, -2.0], "label": "yes"}]
    paths = [written(tmp_path, ROWS), written(tmp_path / "b", other)]
    with pytest.raises(InputError, match="column 'logprobs' to hold dictionaries"):
        read_predictions(paths)
