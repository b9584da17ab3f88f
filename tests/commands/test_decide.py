"""`hf-calib decide`: tables, decisions.json and the report, for a model and for files of predictions."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas
import pytest
import transformers
from scipy.special import softmax

import hf_calib
from hf_calib._errors import InputValueError
from hf_calib.cards.facts import read_facts
from hf_calib.decisions import AbstainRule, CostRule, Decisions, PredictionSets
from hf_calib.predictions import load_predictions, save_predictions
from hf_calib.predictions.predictions import Predictions
from hf_calib.scaling import HistogramBinning
from tests.helpers.commands import (
    NAMES,
    TEMPERATURE,
    assert_refused,
    call,
    called_for_json,
    names_in,
    one_line,
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
    assert (found["n_fitted"], found["n_measured"], found["of_fit"]) == (
        800,
        500,
        False,
    )
    assert (found["rule"], found["notes"]) == ("abstain", [])
    assert found["options"] == {"accuracy": 0.9, "delta": 0.05, "by_class": False}


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
    assert (
        "measured on the same rows, with intervals for this rule on new inputs" in text
    )
    assert "Measured on 800 rows." in text
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
    # Whoever runs decide reads the decision first.
    assert document.partition("\n## ")[2].startswith("Decisions")
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


def test_the_results_are_of_the_saved_rule(files: Path, tmp_path: Path) -> None:
    found = called_for_json(
        "decide", files / "data.npz", "--accuracy", 0.9, "--output", tmp_path
    )
    decisions = Decisions.from_pretrained(tmp_path)
    data, new = drawn(800, 1), drawn(100_000, 5)
    fitted = AbstainRule(accuracy=0.9).fit(data.probabilities(), data.labels)
    np.testing.assert_array_equal(decisions.rule.thresholds_, fitted.thresholds_)
    answered = found["before"]["answered"]
    on_fit = decisions.rule.predict(data.probabilities()) >= 0
    assert answered["value"] == pytest.approx(on_fit.mean())
    on_new = decisions.rule.measure(new.probabilities(), new.labels)
    assert answered["low"] <= on_new["answered"].value <= answered["high"]
    assert found["before"]["accuracy"]["low"] == 0.9 <= on_new["accuracy"].value
    assert (found["n_fitted"], found["n_measured"], found["of_fit"]) == (800, 800, True)
    assert "on 800 rows of the fit)" in decisions.sentence()


def test_rows_of_the_fit_as_test_data_are_called_that(
    files: Path, tmp_path: Path
) -> None:
    shutil.copy(files / "data.npz", tmp_path / "copy.npz")
    words = ("--test-data", tmp_path / "copy.npz", "--accuracy", 0.9)
    result = call("decide", files / "data.npz", *words, "--output", tmp_path)
    said = " ".join(result.stdout.split())
    assert "measured on rows, 800 of them from the fit" in said
    assert "800 rows of the fit)" in Decisions.from_pretrained(tmp_path).sentence()


def test_a_cost_rule_is_measured_on_all_rows(files: Path, tmp_path: Path) -> None:
    costs = pandas.DataFrame(1 - np.eye(4), index=NAMES, columns=NAMES)
    costs.to_csv(tmp_path / "costs.csv")
    words = ("--costs", tmp_path / "costs.csv", "--output", tmp_path / "out")
    found = called_for_json("decide", files / "data.npz", *words)
    data = drawn(800, 1)
    wanted = CostRule(costs.to_numpy()).measure(data.probabilities(), data.labels)
    for name, interval in wanted.items():
        row = found["before"][name]
        assert tuple(row.values()) == pytest.approx(tuple(interval))
    assert (found["n_fitted"], found["of_fit"]) == (0, False)
    assert (
        "Nothing of it was fitted." in call("decide", files / "data.npz", *words).stdout
    )
    said = Decisions.from_pretrained(tmp_path / "out").sentence()
    assert "800 rows not used for the fit" in said


def test_a_calibrator_beside_the_model_is_used(workplace: Path, tmp_path: Path) -> None:
    """A rule and a report are of the probabilities that the folder serves."""
    folder = tmp_path / "model"
    data = ("--data", workplace / "data.csv")
    words = (*data, "--method", "isotonic", "--output", folder)
    calibrated = called_for_json("calibrate", workplace / "model", *words)
    texts = pandas.read_csv(workplace / "test.csv")["text"].tolist()
    labels = pandas.read_csv(workplace / "test.csv")["label"].map(NAMES.index)
    classify = hf_calib.pipeline("text-classification", str(folder), top_k=None)
    scores = [{row["label"]: row["score"] for row in rows} for rows in classify(texts)]
    probs = np.array([[row[name] for name in NAMES] for row in scores])

    test = ("--data", workplace / "test.csv")
    found = called_for_json("evaluate", folder, *test)
    nll = -np.log(probs[np.arange(len(labels)), labels]).mean()
    assert found["after"]["metrics"]["nll"]["value"] == pytest.approx(nll, rel=1e-4)
    raw = called_for_json("evaluate", workplace / "model", *test)
    assert found["before"] == raw["before"]
    assert "with the isotonic scaling next to it" in " ".join(found["warnings"])

    result = call("decide", folder, *test, "--alpha", 0.2, "--output", folder)
    assert "with the isotonic scaling next to it" in result.stderr
    decisions = Decisions.from_pretrained(folder)
    wanted = PredictionSets(alpha=0.2).fit(probs, labels.to_numpy())
    np.testing.assert_allclose(
        decisions.rule.thresholds_, wanted.thresholds_, atol=1e-6
    )
    report = json.loads((folder / "decisions" / "report.json").read_text())
    assert report["before"]["metrics"]["nll"]["value"] == pytest.approx(nll, rel=1e-4)
    assert calibrated["folded"] is False


@pytest.mark.slow
def test_decisions_are_of_one_calibrator(workplace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    data = ("--data", workplace / "data.csv", "--output", folder)
    call("calibrate", workplace / "model", *data, "--method", "isotonic")
    call("decide", folder, *data, "--alpha", 0.2)
    assert Decisions.from_pretrained(folder).calibrator is not None
    found = load_predictions(workplace / "data.npz")
    other = HistogramBinning().fit(found.as_logits(), found.labels)
    other.save_pretrained(folder)
    with pytest.raises(InputValueError, match="for the calibrator next to the model"):
        Decisions.from_pretrained(folder)
    (folder / "calibration.json").unlink()
    with pytest.raises(InputValueError, match="for the calibrator next to the model"):
        Decisions.from_pretrained(folder)

    result = call("calibrate", workplace / "model", *data, *TEMPERATURE)
    assert ": decisions.json, " in result.stdout
    assert not (folder / "decisions.json").exists()
    call("decide", folder, *data, "--alpha", 0.2)
    Decisions.from_pretrained(folder)
    kept = (folder / "decisions.json").read_bytes()
    call("calibrate", workplace / "model", *data, "--method", "vector")
    (folder / "decisions.json").write_bytes(kept)
    with pytest.raises(
        InputValueError, match="for the weights of the model, got a rule"
    ):
        Decisions.from_pretrained(folder)


def test_a_rule_for_an_earlier_calibrator_is_removed(
    workplace: Path, tmp_path: Path
) -> None:
    """Of another calibrator beside the same weights, and of the model before its fold."""
    folder = tmp_path / "model"
    data = ("--data", workplace / "data.csv", "--output", folder)
    for words in (
        ("calibrate", workplace / "model", *data, "--method", "histogram"),
        ("unfold", tmp_path / "copy", folder),
    ):
        method = "isotonic" if words[0] == "calibrate" else "temperature"
        call("calibrate", workplace / "model", *data, "--method", method)
        call("decide", folder, *data, "--alpha", 0.2)
        assert (folder / "decisions").is_dir()
        shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True)
        result = call(*words)
        assert result.exit_code == 0, result.output
        assert ": decisions.json, decisions/report.json, for other" in one_line(
            result.output
        )
        assert not (folder / "decisions.json").exists()
        assert not (folder / "decisions").exists()


def test_a_calibrated_model_stays_out_of_a_folder_of_predictions(
    workplace: Path, tmp_path: Path
) -> None:
    words = (*TEMPERATURE, "--output", tmp_path / "out")
    call("calibrate", workplace / "data.npz", *words)
    data = ("--data", workplace / "data.csv")
    refused = call("calibrate", workplace / "model", *data, *words)
    assert_refused(refused, "output to hold no results of calibrate or decide")
    assert not (tmp_path / "out" / "config.json").exists()


def test_no_rule_of_a_model_next_to_another(workplace: Path, tmp_path: Path) -> None:
    shutil.copytree(workplace / "model", tmp_path / "other")
    words = ("--data", workplace / "data.csv", "--output", tmp_path / "other")
    assert_refused(
        call("decide", workplace / "model", *words), "or a folder without a model"
    )
    assert not (tmp_path / "other" / "decisions.json").exists()


def test_a_rule_that_answers_nothing_is_not_written(
    files: Path, tmp_path: Path
) -> None:
    call("decide", files / "data.npz", "--accuracy", 0.6, "--output", tmp_path)
    result = call(
        "decide", files / "data.npz", "--accuracy", 0.99, "--output", tmp_path
    )
    assert result.exit_code == 0, result.output
    said = r"An accuracy of 0.99 cannot be promised from these 800 rows, of which [\d.]+% are correct"
    said += r"\. The rule will always abstain\. Promise less, or use more rows"
    assert re.search(f"warning: {said}", result.stderr)
    assert "would always abstain. That of an earlier rule was removed." in result.stderr
    assert "No input is answered." in result.stdout
    assert names_in(tmp_path) == {"decisions"}


def test_names_of_classes_that_the_file_does_not_have(tmp_path: Path) -> None:
    """Of lists or of unnamed columns; the labels are texts."""
    rng = np.random.default_rng(0)
    probs = rng.dirichlet([1, 1], 400)
    names = ("ham", "spam")
    labels = [names[each] for each in probs.argmax(axis=1)]
    table = pandas.DataFrame({"probs": list(probs), "label": labels})
    table.to_parquet(tmp_path / "a.parquet")
    words = ("--class-names", "ham,spam", "--accuracy", 0.9, "--output", tmp_path / "b")
    assert call("decide", tmp_path / "a.parquet", *words).exit_code == 0
    assert Decisions.from_pretrained(tmp_path / "b").class_names == names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--accuracy", 0.999),
            r"0\.999 .*, got 800; .*at most 0\.996",
        ),
        (
            ("--accuracy", 0.9, "--alpha", 0.1),
            "one of accuracy, costs, alpha, got accuracy and alpha; run",
        ),
        (
            ("--delta", 0.1, "--alpha", 0.1),
            "--delta to be given with accuracy only, got 0.1; leave it out, as it has no effect",
        ),
        (("--alpha", 0), r"expected --alpha to lie in \(0, 1\), got 0"),
        (
            ("--sets", "aps"),
            "--sets to be given with alpha only, got 'aps'; leave it out, as it has no effect",
        ),
        (
            ("--costs", "nowhere.csv"),
            "expected --costs to be a csv file of numbers, got nowhere.csv",
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


def test_names_in_costs_are_quoted(files: Path, tmp_path: Path) -> None:
    costs = pandas.DataFrame(1 - np.eye(4), index=NAMES, columns=NAMES)
    costs.rename(columns={"law": "law "}).to_csv(tmp_path / "costs.csv")
    words = ("--costs", tmp_path / "costs.csv")
    assert_refused(call("decide", files / "data.npz", *words), "got .*'law '")
