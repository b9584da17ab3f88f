"""Options that could not change anything are refused, and so are rows and names that contradict others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pandas
import pytest

from hf_calib.commands import options
from hf_calib.predictions import load_predictions
from tests.helpers.commands import (
    NAMES,
    TEMPERATURE,
    assert_refused,
    call,
    called_for_json,
)
from tests.helpers.reports import quick_reports  # noqa: F401

# For each option that needs a model: words that give it.
OF_MODELS = {
    "split": ("--split", "train"),
    "test_split": ("--test-split", "train"),
    "text_column": ("--text-column", "words"),
    "text_pair_column": ("--text-pair-column", "words"),
    "image_column": ("--image-column", "img"),
    "label_separator": ("--label-separator", "|"),
    "label_columns": ("--label-columns", "art,law"),
    "no_label": ("--no-label", "none"),
    "max_length": ("--max-length", 8),
    "batch_size": ("--batch-size", 3),
    "trust_remote_code": ("--trust-remote-code",),
}
OF_PREDICTIONS = {
    "option_scores": ("--option-scores", "per_byte"),
    "positive_class": ("--positive-class", "law"),
    "prob_prefix": ("--prob-prefix", "p_"),
    "unlisted_at": ("--unlisted-at", 0.01),
}
OF_BOTH = {
    *("source", "data", "test_data", "ood_data", "output"),
    *("label_column", "class_names", "n_bins", "by", "weight_column", "soft_labels"),
    *("method", "criterion", "seed", "fit_on"),
    *("accuracy", "delta", "by_class", "costs", "alpha", "sets"),
}
COMMANDS = (options.Evaluate, options.Calibrate, options.Decide)


@pytest.fixture(scope="module")
def table(workplace: Path) -> Path:
    """The predictions as a csv file, with names of the classes."""
    found = load_predictions(workplace / "data.npz")
    rows = pandas.DataFrame(found.logits, columns=[f"logit_{name}" for name in NAMES])
    rows["label"] = [NAMES[label] for label in found.labels]
    rows["w"] = 1.0
    rows.to_csv(workplace / "table.csv", index=False)
    return workplace / "table.csv"


def words_of(kind: Any, source: Path, *more: object) -> tuple[object, ...]:
    output = (
        ("--output", source.parent.parent / "never")
        if kind is options.Calibrate
        else ()
    )
    return (kind.command(), source, *output, *more)


@pytest.mark.parametrize("kind", COMMANDS)
def test_each_option_is_of_a_model_or_of_predictions_or_of_both(kind: Any) -> None:
    known = {*OF_MODELS, *OF_PREDICTIONS, *OF_BOTH}
    assert {each.name for each in kind.options()} <= known


@pytest.mark.parametrize("kind", COMMANDS)
def test_options_without_effect_are_refused(
    kind: Any, table: Path, workplace: Path
) -> None:
    names = {each.name for each in kind.options()}
    for name in OF_MODELS.keys() & names:
        refused = call(*words_of(kind, table, *OF_MODELS[name]))
        option = OF_MODELS[name][0]
        assert_refused(refused, f"expected {option} to be given with a model only, got")
    data = ("--data", workplace / "data.csv")
    model = words_of(kind, workplace / "model", *data)
    for name in OF_PREDICTIONS.keys() & names:
        option = OF_PREDICTIONS[name][0]
        message = f"expected {option} to be given with predictions only, got"
        assert_refused(call(*model, *OF_PREDICTIONS[name]), message)


def test_other_options_without_effect(
    table: Path, workplace: Path, tmp_path: Path
) -> None:
    data = ("--data", workplace / "data.csv")
    model = workplace / "model"
    hub = "that is a folder or on the Hub only, got 'train'"
    evaluate, calibrate, _ = COMMANDS
    cases: list[tuple[tuple[object, ...], str]] = [
        (("evaluate", table, *OF_PREDICTIONS["option_scores"]), "a log of lm-eval"),
        (words_of(evaluate, model, *data, *OF_MODELS["split"]), f"with data {hub}"),
        (
            words_of(calibrate, model, *data, *OF_MODELS["test_split"]),
            f"--test-split to be given with --test-data {hub}",
        ),
        (
            words_of(calibrate, model, *data, "--weight-column", "w"),
            "--weight-column to be given with predictions only",
        ),
        (
            words_of(evaluate, model, *data, *OF_MODELS["image_column"]),
            "--image-column to be given for images only",
        ),
    ]
    for words, message in cases:
        assert_refused(call(*words), message)


@pytest.mark.parametrize("command", COMMANDS[:2])
def test_names_in_another_order_are_refused(
    command: Any, table: Path, workplace: Path
) -> None:
    names = ("--class-names", "law,art,film,sport")
    message = r"expected --class-names to be in the order of the classes \(art, law, "
    data = ("--data", workplace / "data.csv")
    for source in (table, workplace / "data.npz"):
        assert_refused(call(*words_of(command, source, *names)), message)
    assert_refused(
        call(*words_of(command, workplace / "model", *data, *names)), message
    )
    three = words_of(command, table, "--class-names", "a,b,c")
    assert_refused(call(*three), r"--class-names to name the model's 4 classes \(art")


def test_names_in_a_report_without_resamples(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_calib.report.rows.MOST_RESAMPLED", 10)
    found = called_for_json("evaluate", table, "--class-names", "K,R,F,S")
    assert found["before"]["metrics"]["nll"]["n_resamples"] == 0
    assert [row["name"] for row in found["before"]["classes"]] == list("KRFS")


class TestOneFileInTwoRoles:
    @pytest.mark.parametrize("form", ["same", "link", "hard link", "folder"])
    def test_of_predictions(self, form: str, table: Path, tmp_path: Path) -> None:
        data = tmp_path / "in" / "data.csv"
        data.parent.mkdir()
        shutil.copy(table, data)
        other = {"same": data, "folder": data.parent}.get(form, tmp_path / "other.csv")
        if form == "link":
            other.symlink_to(data)
        if form == "hard link":
            os.link(data, other)
        message = "to be other rows than the data, got .*; name other rows, or leave"
        for command, option in (
            ("decide", "--test-data"),
            ("evaluate", "--ood-data"),
        ):
            assert_refused(call(command, data, option, other), f"{option} {message}")
        words = words_of(options.Calibrate, data, *TEMPERATURE, "--test-data", other)
        assert_refused(call(*words), f"--test-data {message}")

    def test_of_a_model(self, workplace: Path, tmp_path: Path) -> None:
        (tmp_path / "link.csv").symlink_to(workplace / "data.csv")
        words = ("decide", workplace / "model", "--data", workplace / "data.csv")
        refused = call(*words, "--test-data", tmp_path / "link.csv")
        assert_refused(refused, "--test-data to be other rows than the data, got")

    def test_other_splits_of_a_folder(self, workplace: Path, tmp_path: Path) -> None:
        rows = pandas.read_csv(workplace / "data.csv")
        for name, part in (("validation", rows[:100]), ("test", rows[100:])):
            part.to_csv(tmp_path / f"{name}.csv", index=False)
        words = ("decide", workplace / "model", "--data", tmp_path, "--accuracy", 0.3)
        found = called_for_json(*words, "--test-data", tmp_path)
        assert (found["n_fitted"], found["n_measured"]) == (100, 140)
        refused = call(*words, "--test-data", tmp_path, "--test-split", "validation")
        assert_refused(refused, "--test-data to be other rows than the data, got")
