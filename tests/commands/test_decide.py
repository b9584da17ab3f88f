"""`hf-calib decide`: tables, decisions.json and the report, for a model and for files of predictions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas
import pytest
import transformers
from scipy.special import softmax

from hf_calib.cards.facts import read_facts
from hf_calib.decisions import AbstainRule, CostRule, Decisions
from hf_calib.predictions import save_predictions
from hf_calib.predictions.predictions import Predictions
from tests.helpers.commands import (
    NAMES,
    TEMPERATURE,
    assert_refused,
    call,
    called_for_json,
    names_in,
)
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.sampled import labels_by


def drawn(n: int, seed: int) -> Predictions:
    """Over-confident predictions, about two in three are right."""
    rng = np.random.default_rng(seed)
    logits = 2.2 * rng.standard_normal((n, 4))
    labels = labels_by(softmax(logits, axis=1), rng)
    return Predictions(labels, logits=1.5 * logits, class_names=NAMES)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, n, seed in (("data", 800, 1), ("test", 500, 2)):
        save_predictions(drawn(n, seed), folder / f"{name}.npz")
    return folder


def test_a_rule_is_fitted_on_the_data_and_measured_on_test_data(files: Path) -> None:
    words = ("--test-data", files / "test.npz", "--accuracy", 0.9)
    found = called_for_json("decide", files / "data.npz", *words)
    data, test = drawn(800, 1), drawn(500, 2)
    rule = AbstainRule(accuracy=0.9).fit(data.probabilities(), data.labels)
    wanted = rule.measure(test.probabilities(), test.labels)
    assert {key: tuple(row.values()) for key, row in found["before"].items()} == {
        key: pytest.approx(tuple(interval)) for key, interval in wanted.items()
    }
    assert (found["n_fitted"], found["n_measured"], found["n_folds"]) == (800, 500, 0)
    assert (found["rule"], found["notes"]) == ("abstain", [])
    assert found["options"] == {"accuracy": 0.9, "delta": 0.05, "by_class": False}
    assert 0.9 in found["curves"]["measured"]["promised"]


def test_people_get_a_table_and_files(files: Path, tmp_path: Path) -> None:
    result = call(
        "decide", files / "data.npz", "--accuracy", 0.9, "--output", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "Decisions of data decisions value" in text
    assert "Inputs answered 0." in text
    assert (
        "The rule answers inputs so that at least 90% of its answers are correct"
        in text
    )
    assert "Measured on all 800 rows, each by a rule that was fitted without it" in text
    assert names_in(tmp_path / "out") == {"decisions.json", "decisions"}
    decisions = Decisions.from_pretrained(tmp_path / "out")
    assert decisions.class_names == NAMES
    assert decisions.n_measured == 800
    report = json.loads((tmp_path / "out" / "decisions" / "report.json").read_text())
    assert (
        report["decisions"]["before"]["answered"]["value"]
        == decisions.measured["answered"].value
    )
    assert report["n_examples"] == 800
    document = (tmp_path / "out" / "decisions" / "report.md").read_text()
    assert "| Inputs answered | 0." in document


def test_a_rule_in_a_calibrated_models_folder(workplace: Path, tmp_path: Path) -> None:
    """It decides on the output of the model's pipeline, and is in the model's card."""
    folder = tmp_path / "model"
    data = ("--data", workplace / "data.csv")
    call("calibrate", workplace / "model", *data, *TEMPERATURE, "--output", folder)
    there = names_in(folder)
    words = (*data, "--test-data", workplace / "test.csv", "--accuracy", 0.3)
    found = called_for_json("decide", folder, *words, "--output", folder)
    assert names_in(folder) == there | {"decisions.json", "decisions"}

    texts = pandas.read_csv(workplace / "test.csv")["text"].tolist()
    pipe = transformers.pipeline("text-classification", model=str(folder), device="cpu")
    decided = Decisions.from_pretrained(folder)(pipe(texts, top_k=None))
    answered = np.mean([name is not None for name in decided])
    assert answered > 0.1
    assert answered == pytest.approx(found["before"]["answered"]["value"], abs=0.01)
    text = read_facts(folder).decisions or ""
    assert (
        f"It answers {answered:.0%} of inputs at 30% accuracy and abstains on the rest"
        in text
    )


def test_costs_in_any_order(files: Path, tmp_path: Path) -> None:
    costs = pandas.DataFrame(1 - np.eye(4), index=NAMES, columns=NAMES)
    costs.loc["law", "art"] = 7.5
    costs["abstain"] = 0.4
    shuffled = costs.loc[
        ["film", "art", "sport", "law"], ["abstain", "sport", "law", "art", "film"]
    ]
    shuffled.to_csv(tmp_path / "costs.csv")
    found = called_for_json(
        "decide",
        files / "data.npz",
        "--costs",
        tmp_path / "costs.csv",
        "--output",
        tmp_path,
    )
    rule = Decisions.from_pretrained(tmp_path).rule
    assert isinstance(rule, CostRule)
    np.testing.assert_array_equal(rule.costs, costs.to_numpy())
    assert found["before"]["saving"]["value"] == pytest.approx(
        found["before"]["cost_argmax"]["value"] - found["before"]["cost"]["value"]
    )


def test_every_row_is_decided_by_a_rule_that_was_fitted_without_it(files: Path) -> None:
    found = called_for_json(
        "decide", files / "data.npz", "--accuracy", 0.9, "--seed", 4
    )
    data = drawn(800, 1)
    probs = data.probabilities()
    folds = np.random.default_rng(4).permutation(800) % 5
    decided = np.empty(800, int)
    for k in range(5):
        rule = AbstainRule(accuracy=0.9).fit(probs[folds != k], data.labels[folds != k])
        decided[folds == k] = rule.predict(probs[folds == k])
    assert found["before"]["answered"]["value"] == pytest.approx((decided >= 0).mean())
    right = (decided == data.labels)[decided >= 0].mean()
    assert found["before"]["accuracy"]["value"] == pytest.approx(right)
    assert (found["n_fitted"], found["n_measured"], found["n_folds"]) == (800, 800, 5)


def test_a_rule_that_answers_nothing_is_not_written(
    files: Path, tmp_path: Path
) -> None:
    call("decide", files / "data.npz", "--accuracy", 0.6, "--output", tmp_path)
    result = call(
        "decide", files / "data.npz", "--accuracy", 0.99, "--output", tmp_path
    )
    assert result.exit_code == 0, result.output
    said = r"An accuracy of 0.99 cannot be promised at any confidence from these 800 rows, of which [\d.]+% are correct"
    said += r". The rule will always abstain. Promise less \(0\.\d+ would answer"
    assert re.search(f"warning: {said}", result.stderr)
    assert "would always abstain. That of an earlier rule was removed." in result.stderr
    assert "No input is answered." in result.stdout
    assert names_in(tmp_path) == {"decisions"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--accuracy", 0.999),
            r"0\.999 .*, got 640; .*at most 0\.995 \(some of the data's 800 rows are",
        ),
        (
            ("--accuracy", 0.9, "--alpha", 0.1),
            "one of accuracy, costs, alpha, got accuracy and alpha; run",
        ),
        (("--alpha", 0), r"expected alpha to lie in \(0, 1\), got 0"),
        (
            ("--sets", "aps"),
            "sets to be given with alpha only, got it with accuracy; leave sets out",
        ),
        (
            ("--costs", "nowhere.csv"),
            "expected costs to be a csv file of numbers, got nowhere.csv",
        ),
        (
            ("--costs", "few.csv"),
            r"the rows of .* to be the model's classes \(art, law, film, sport\)",
        ),
        (
            ("--costs", "words.csv"),
            "a csv file of numbers, got words.csv .could not convert .* 'x'",
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    words: tuple[object, ...],
    message: str,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.csv").write_text(",art,law,film,sport\nart,0,1,1,1\n")
    Path("words.csv").write_text(",art,law,film,sport\nart,0,1,1,x\n")
    assert_refused(
        call("decide", files / "data.npz", *words, "--output", "out"), message
    )
    assert not Path("out").exists()
