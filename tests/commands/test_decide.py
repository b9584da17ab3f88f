"""`hf-calib decide`: tables, decisions.json and the report, for a model and for files of predictions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from scipy.special import softmax

from hf_calib.cards.facts import read_facts
from hf_calib.commands.fitting import half_of
from hf_calib.decisions import AbstainRule, CostRule, Decisions, PredictionSets
from hf_calib.predictions import save_predictions
from hf_calib.predictions.predictions import Predictions
from hf_calib.scaling import TemperatureScaling
from tests.helpers.commands import TEMPERATURE, assert_refused, call, called_for_json, names_in
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.sampled import labels_by
from tests.helpers.tiny import sequences, text_of, tiny_bert, tokenizer

NAMES = ("art", "law", "film", "sport")


def drawn(n: int, seed: int) -> Predictions:
    """Over-confident predictions, about two in three are right."""
    rng = np.random.default_rng(seed)
    logits = 2.2 * rng.standard_normal((n, 4))
    labels = labels_by(softmax(logits, axis=1), rng)
    return Predictions(labels, logits=1.5 * logits, class_names=NAMES)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of predictions; a model of the same four classes, and labelled texts."""
    folder = tmp_path_factory.mktemp("work")
    for name, n, seed in (("data", 800, 1), ("test", 500, 2)):
        save_predictions(drawn(n, seed), folder / f"{name}.npz")
    names = dict(enumerate(NAMES))
    model = tiny_bert(id2label=names, label2id={name: i for i, name in names.items()})
    for kind in ("plain", "calibrated"):
        model.config.calibration = {"folded": True} if kind == "calibrated" else None
        model.save_pretrained(folder / kind)
        tokenizer().save_pretrained(folder / kind)
    for name, n, seed in (("data", 240, 1), ("test", 120, 2)):
        rows = sequences(model, n, seed=seed)
        texts = [text_of(ids) for ids in rows["input_ids"]]
        table = pandas.DataFrame({"text": texts, "label": [NAMES[label] for label in rows["label"]]})
        table.to_csv(folder / f"{name}.csv", index=False)
    return folder


def test_rule_and_scaler_are_fitted_on_different_rows_and_measured_on_others(workplace: Path) -> None:
    found = called_for_json(
        "decide",
        workplace / "data.npz",
        "--test-data",
        workplace / "test.npz",
        "--accuracy",
        0.9,
        "--seed",
        3,
    )
    data, test = drawn(800, 1), drawn(500, 2)
    calibrating = half_of(data.labels, 3)
    fitting = np.setdiff1d(np.arange(800), calibrating)
    scaler = TemperatureScaling().fit(data.logits[calibrating], data.labels[calibrating])
    for state, probs, rows in (
        ("before", lambda z: softmax(z, axis=1), np.arange(800)),
        ("after", scaler.predict_proba, fitting),
    ):
        rule = AbstainRule(accuracy=0.9).fit(probs(data.logits[rows]), data.labels[rows])
        wanted = rule.measure(probs(test.logits), test.labels)
        assert {key: tuple(row.values()) for key, row in found[state].items()} == {
            key: pytest.approx(tuple(interval)) for key, interval in wanted.items()
        }
    assert (found["n_calibrated_on"], found["n_fitted"], found["n_measured"]) == (400, 800, 500)
    assert (found["n_fitted_after"], found["n_folds"]) == (400, 0)
    assert (found["rule"], found["method"], found["notes"]) == ("abstain", "auto", [])
    assert found["options"] == {"accuracy": 0.9, "delta": 0.05, "by_class": False}
    assert found["before"]["accuracy"]["value"] >= 0.9
    assert 0.9 in found["curves"]["before"]["promised"]


def test_people_get_a_table_and_files(workplace: Path, tmp_path: Path) -> None:
    words = ("--accuracy", 0.9, *TEMPERATURE, "--output", tmp_path / "out")
    result = call("decide", workplace / "data.npz", *words)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "Decisions of data decisions before after" in text
    assert "Inputs answered 0." in text
    assert "The rule answers where at least 90% of its answers are right" in text
    assert (
        "It was fitted on 800 rows (400 of them after calibration), and measured on the same rows by cross-"
        in text
    )
    assert "After calibration: temperature, fitted on 400 other rows." in text
    assert (
        "Measured on all 800 rows, each by a rule that was fitted without it (cross-fitting in 5 folds"
        in text
    )
    assert "decisions.json is for the probabilities as they are" in result.stderr
    assert names_in(tmp_path / "out") == {"decisions.json", "decisions"}
    decisions = Decisions.from_pretrained(tmp_path / "out")
    assert decisions.class_names == NAMES
    assert decisions.n_measured == 800
    report = json.loads((tmp_path / "out" / "decisions" / "report.json").read_text())
    assert report["decisions"]["before"]["answered"]["value"] == decisions.measured["answered"].value
    assert report["n_examples"] == 400
    assert call("report", tmp_path / "out").exit_code == 0
    document = (tmp_path / "out" / "decisions" / "report.md").read_text()
    assert "## Decisions" in document
    assert "| Inputs answered | 0." in document


class TestModels:
    def test_a_model_that_is_not_calibrated(self, workplace: Path) -> None:
        words = ("--data", workplace / "data.csv", "--test-data", workplace / "test.csv", "--accuracy", 0.3)
        found = called_for_json("decide", workplace / "plain", *words, *TEMPERATURE)
        assert (found["n_calibrated_on"], found["n_fitted"], found["n_measured"]) == (120, 240, 120)
        assert set(found["curves"]) == {"before", "after calibration"}
        assert found["before"]["answered"]["value"] > 0.1

    def test_a_calibrated_model_uses_all_rows_for_the_rule(self, workplace: Path) -> None:
        """And what is written into its folder decides on its pipeline's output, and is in its card."""
        folder = workplace / "calibrated"
        there = names_in(folder)
        words = ("--data", workplace / "data.csv", "--test-data", workplace / "test.csv", "--accuracy", 0.3)
        found = called_for_json("decide", folder, *words, "--output", folder)
        assert (found["n_calibrated_on"], found["n_fitted"]) == (0, 240)
        assert found["after"] is None
        assert found["method"] is None
        assert set(found["curves"]) == {"as it is"}
        assert names_in(folder) == there | {"decisions.json", "decisions"}

        from transformers import pipeline

        texts = pandas.read_csv(workplace / "test.csv")["text"].tolist()
        pipe = pipeline("text-classification", model=str(folder), device="cpu")
        decided = Decisions.from_pretrained(folder)(pipe(texts, top_k=None))
        answered = np.mean([name is not None for name in decided])
        assert answered > 0.1
        assert answered == pytest.approx(found["before"]["answered"]["value"], abs=0.01)
        text = read_facts(folder).decisions or ""
        assert f"It answers {answered:.0%} of inputs at 30% accuracy and hands over the rest" in text

    def test_rows_are_counted_before_the_model_runs(
        self, workplace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.nn.Module, "__call__", lambda *_, **__: pytest.fail("the model ran"))
        message = (
            r"expected the calibration rows to be at least 299 to promise accuracy=0\.99 .*, got 96; .* \(of the "
            r"data's 240 rows, some are in turn to measure on and some to calibrate on\)"
        )
        words = ("--data", workplace / "data.csv", "--accuracy", 0.99)
        assert_refused(call("decide", workplace / "plain", *words), message)
        with_test = (*words, "--test-data", workplace / "test.csv")
        assert_refused(
            call("decide", workplace / "plain", *with_test), r"got 120; .* \(of the .* calibrate on\)"
        )
        assert_refused(
            call("decide", workplace / "calibrated", *with_test), "got 240; pass more rows, or promise"
        )


def test_costs_in_any_order(workplace: Path, tmp_path: Path) -> None:
    costs = pandas.DataFrame(1 - np.eye(4), index=NAMES, columns=NAMES)
    costs.loc["law", "art"] = 7.5
    costs["abstain"] = 0.4
    shuffled = costs.loc[["film", "art", "sport", "law"], ["abstain", "sport", "law", "art", "film"]]
    shuffled.to_csv(tmp_path / "costs.csv")
    found = called_for_json(
        *("decide", workplace / "data.npz", "--costs", tmp_path / "costs.csv", "--output", tmp_path),
        *TEMPERATURE,
    )
    rule = Decisions.from_pretrained(tmp_path).rule
    assert isinstance(rule, CostRule)
    np.testing.assert_array_equal(rule.costs, costs.to_numpy())
    assert found["before"]["saving"]["value"] == pytest.approx(
        found["before"]["cost_argmax"]["value"] - found["before"]["cost"]["value"]
    )
    assert found["after"]["cost"]["value"] < found["before"]["cost"]["value"]  # the logits are too large


def test_sets(workplace: Path, tmp_path: Path) -> None:
    words = ("--alpha", 0.2, "--sets", "aps", "--by-class", *TEMPERATURE, "--output", tmp_path)
    found = called_for_json("decide", workplace / "data.npz", *words)
    rule = Decisions.from_pretrained(tmp_path).rule
    assert isinstance(rule, PredictionSets)
    assert rule.options() == {"alpha": 0.2, "method": "aps", "by_class": True}
    assert found["before"]["coverage"]["value"] == pytest.approx(0.8, abs=0.1)
    assert found["curves"] == {}


def test_a_broken_promise_is_said(workplace: Path, tmp_path: Path) -> None:
    """The measured rows are harder than those that the rule was fitted on."""
    test = drawn(500, 2)
    wrong = np.where(np.arange(500) < 250, (test.labels + 1) % 4, test.labels)
    save_predictions(Predictions(wrong, logits=test.logits, class_names=NAMES), tmp_path / "other.npz")
    words = ("--test-data", tmp_path / "other.npz", "--accuracy", 0.8, *TEMPERATURE)
    result = call("decide", workplace / "data.npz", *words)
    assert "of the answers are right" in result.stderr
    assert "less than the 80% promised. They are unlike the calibration rows" in result.stderr


def test_every_row_is_decided_by_a_rule_that_was_fitted_without_it(workplace: Path) -> None:
    words = ("--accuracy", 0.9, "--seed", 4, *TEMPERATURE)
    found = called_for_json("decide", workplace / "data.npz", *words)
    data = drawn(800, 1)
    probs = softmax(data.logits, axis=1)
    folds = np.random.default_rng(4).permutation(800) % 5
    decided = np.empty(800, int)
    for k in range(5):
        rule = AbstainRule(accuracy=0.9).fit(probs[folds != k], data.labels[folds != k])
        decided[folds == k] = rule.predict(probs[folds == k])
    assert found["before"]["answered"]["value"] == pytest.approx((decided >= 0).mean())
    right = (decided == data.labels)[decided >= 0].mean()
    assert found["before"]["accuracy"]["value"] == pytest.approx(right)
    assert (found["n_fitted"], found["n_measured"], found["n_folds"]) == (800, 800, 5)


def test_a_rule_that_answers_nothing_is_not_written(workplace: Path, tmp_path: Path) -> None:
    words = ("--accuracy", 0.99, *TEMPERATURE, "--output", tmp_path)
    result = call("decide", workplace / "data.npz", *words)
    assert result.exit_code == 0, result.output
    assert re.search(
        r"warning: Before calibration: An accuracy of 0.99 cannot be promised at any confidence from these 800 "
        r"rows, of which [\d.]+% are right. Every input will be handed over. Promise less \(0\.\d+ would answer",
        result.stderr,
    )
    assert "No decisions.json was written: its rule would hand over every input." in result.stderr
    assert "Nothing is answered before calibration." in result.stdout
    assert names_in(tmp_path) == {"decisions"}


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--accuracy", 1.0), r"expected accuracy to be below 1, got 1.0; no number of rows proves"),
            (
                ("--accuracy", 0.999),
                r"at least 2,995 to promise accuracy=0\.999 .*, got 320; .*promise at most 0\.99",
            ),
            (
                ("--accuracy", 0.9, "--alpha", 0.1),
                "expected the rule to be one of accuracy, costs, alpha, got accuracy and",
            ),
            (("--alpha", 0), r"expected alpha to lie in \(0, 1\), got 0"),
            (("--delta", 2), r"expected delta to lie in \(0, 1\)"),
            (
                ("--alpha", 0.1, "--delta", 0.1),
                "expected delta to be given with accuracy only, got it with alpha",
            ),
            (
                ("--costs", "nowhere.csv", "--by-class"),
                "by_class to be given with accuracy or alpha only, got it with costs",
            ),
            (
                ("--sets", "aps"),
                "expected sets to be given with alpha only, got it with accuracy; leave sets out",
            ),
            (("--costs", "nowhere.csv"), "expected costs to be readable as csv, got nowhere.csv"),
        ],
    )
    def test_options(self, words: tuple[object, ...], message: str, workplace: Path, tmp_path: Path) -> None:
        assert_refused(call("decide", workplace / "data.npz", *words, "--output", tmp_path / "out"), message)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                ",art,law,film,sport\nart,0,1,1,1\n",
                r"the rows of .* to be the model's classes \(art, law, film, sport\)",
            ),
            (
                ",art,law,film\nart,0,1,1\nlaw,1,0,1\nfilm,1,1,0\nsport,1,1,1\n",
                "the columns of .* to be the model's",
            ),
            (
                ",art,law,film,sport\nart,0,1,1,x\n",
                "expected costs to hold numbers, got could not convert .* 'x'",
            ),
            (
                ",art,law,film,sport\nart,0,1,1,nan\nlaw,1,0,1,1\nfilm,1,1,0,1\nsport,1,1,1,0\n",
                "expected costs to be finite and at most 1e\\+12, got nan in row 0, column 3",
            ),
        ],
    )
    def test_costs(self, text: str, message: str, workplace: Path, tmp_path: Path) -> None:
        (tmp_path / "costs.csv").write_text(text)
        assert_refused(call("decide", workplace / "data.npz", "--costs", tmp_path / "costs.csv"), message)
