"""The token recipe on real tagged sentences: what it leaves, and that the commands say the same of its model."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax
from seqeval.metrics import f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities
from transformers import BertForTokenClassification, pipeline
from typer.testing import CliRunner

from hf_calib.cli import app
from hf_calib.commands.calibrate import split_roles
from hf_calib.commands.options import Calibrate
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.training import TrainingPredictions
from tests.helpers.places import ROOT
from tests.helpers.reports import few_resamples, quick_reports  # noqa: F401
from tests.recipes.test_recipes import SHORT, run, save_bert

TASK = str(ROOT / "recipes" / "configs" / "wnut17_minilm.yaml")


@pytest.fixture(scope="module")
def files(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first sentences of WNUT-17, with the names of their tags in place of ids, and a tiny BERT.

    Half of the test sentences are training ones: of new ones it would tag no entity right.
    """
    folder = tmp_path_factory.mktemp("wnut17")
    names = json.loads((shared_data / "wnut17" / "label_names.json").read_text())
    tagged = {}
    for split, n in (("train", 300), ("dev", 120), ("test", 120)):
        with gzip.open(
            shared_data / "wnut17" / f"{split}.jsonl.gz", "rt", encoding="utf-8"
        ) as lines:
            rows = [json.loads(line) for line, _ in zip(lines, range(n), strict=False)]
        tagged[split] = [
            {**row, "ner_tags": [names[tag] for tag in row["ner_tags"]]} for row in rows
        ]
    tagged["test"][:60] = tagged["train"][:60]
    for split, rows in tagged.items():
        text = "".join(
            json.dumps({name: row[name] for name in ("tokens", "ner_tags")}) + "\n"
            for row in rows
        )
        (folder / f"{split}.jsonl").write_text(text)
    save_bert(
        folder / "bert",
        (" ".join(row["tokens"]) for row in tagged["train"]),
        BertForTokenClassification,
        max_position_embeddings=64,
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
    )
    (folder / "names.json").write_text(json.dumps(names))
    return folder


def options(files: Path, *more: str) -> list[str]:
    own = [
        "--dataset_revision",
        "",
        "--bf16",
        "false",
        "--save_strategy",
        "no",
        "--max_length",
        "64",
        "--model",
        str(files / "bert"),
    ]
    own += ["--class_names", *json.loads((files / "names.json").read_text())]
    for name, file in (("train", "train"), ("calibration", "dev"), ("test", "test")):
        own += [f"--{name}_file", str(files / f"{file}.jsonl")]
    return ["--config", TASK, *SHORT, *own, *more]


@pytest.fixture(scope="module")
def trained(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    long_enough = [
        "--num_train_epochs",
        "10",
        "--learning_rate",
        "1e-2",
    ]  # to predict some entities
    with pytest.MonkeyPatch.context() as patch:
        few_resamples(patch, 50)
        run(
            "token_classification.py",
            *options(files, *long_enough, "--output_dir", str(folder)),
        )
    return folder


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def from_scratch(
    logits: np.ndarray, labels: np.ndarray, sentences: np.ndarray, names: Any
) -> dict[str, float]:
    """The entities' scores, by seqeval and by loops in float64."""
    probs = softmax(logits.astype(np.float64), axis=1)
    true, predicted, right = [], [], []
    confidences: dict[str, list[float]] = {"product": [], "minimum": []}
    for sentence in np.unique(sentences):
        rows = np.flatnonzero(sentences == sentence)
        true.append([names[tag] for tag in labels[rows]])
        predicted.append([names[tag] for tag in probs[rows].argmax(1)])
        for entity in get_entities(predicted[-1]):
            own = [probs[rows[i]].max() for i in range(entity[1], entity[2] + 1)]
            confidences["product"].append(math.prod(own))
            confidences["minimum"].append(min(own))
            right.append(entity in get_entities(true[-1]))
    scores = {"n_predicted": len(right), "f1": f1_score(true, predicted)}
    scores |= {
        "precision": precision_score(true, predicted),
        "recall": recall_score(true, predicted),
    }
    for kind, values in confidences.items():
        gaps = np.bincount(
            np.ceil(np.multiply(values, 15)).astype(int), np.subtract(values, right)
        )
        scores[f"ece_{kind}"] = np.abs(gaps).sum() / len(right)
    return scores


@pytest.mark.slow
def test_what_a_training_leaves(trained: Path) -> None:
    results = read(trained / "results.json")
    kept = TrainingPredictions.load(trained / "predictions.safetensors")
    assert kept.test.sentences is not None
    assert kept.calibration is not None
    assert kept.calibration.sentences is not None
    assert len(kept.test.labels) == len(kept.test.sentences) == len(kept.test.logits)
    assert (np.unique(kept.test.sentences) == np.arange(120)).all()
    entities = results["entities"]
    temperature = results["metrics"]["temperature"]
    assert temperature != 1
    for state, logits in (
        ("before", kept.test.logits),
        ("after", kept.test.logits.astype(float) / temperature),
    ):
        expected = from_scratch(
            logits, kept.test.labels, kept.test.sentences, kept.class_names
        )
        assert expected["n_predicted"] > 0
        assert entities[state]["n_predicted"] == expected.pop("n_predicted")
        for name, value in expected.items():
            found = entities[state][name]
            assert found["value"] == pytest.approx(value, abs=1e-9), (state, name)
            assert name.startswith("ece") or found["low"] < found["high"]
    assert entities["n_sentences"] == 120
    assert read(trained / "report" / "report.json")["entities"] == entities
    assert (trained / "report" / "figures" / "entities.png").is_file()
    assert "## Entities" in (trained / "report" / "report.md").read_text()


def command(*words: object) -> str:
    columns = ["--text-column", "tokens", "--label-column", "ner_tags"]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*map(str, words), *columns])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@pytest.mark.slow
def test_the_commands_say_the_same_of_the_saved_model(
    files: Path, trained: Path, tmp_path: Path
) -> None:
    record = json.loads(
        command(
            "evaluate", trained / "calibrated", "--data", files / "test.jsonl", "--json"
        )
    )
    report = read(trained / "report" / "report.json")
    assert any(
        "tokens are beyond max_length=64" in warning for warning in record["warnings"]
    )
    for name in ("accuracy", "nll", "brier"):
        ours = report["after"]["metrics"][name]
        assert record["before"]["metrics"][name]["value"] == pytest.approx(
            ours["value"], abs=1e-5
        ), name
    for name in ("f1", "precision", "recall", "ece_product", "ece_minimum"):
        ours = report["entities"]["after"][name]
        assert record["entities"]["before"][name]["value"] == pytest.approx(
            ours["value"], abs=1e-4
        ), name

    own = [
        "--data",
        files / "dev.jsonl",
        "--test-data",
        files / "test.jsonl",
        "--method",
        "temperature",
    ]
    done = json.loads(
        command(
            "calibrate",
            trained / "calibrated",
            *own,
            "--output",
            tmp_path / "out",
            "--json",
        )
    )
    assert done["served_difference"] < 1e-5
    # The map of the training, fitted on the same rows, was undone first.
    temperature = read(trained / "results.json")["metrics"]["temperature"]
    assert done["numbers"]["temperature"] == pytest.approx(temperature, rel=1e-3)
    served, plain = (
        pipeline("token-classification", str(path), ignore_labels=[], device="cpu")(
            "Empire State Building"
        )
        for path in (tmp_path / "out", trained / "calibrated")
    )
    assert [each["entity"] for each in served] == [each["entity"] for each in plain]
    assert [each["score"] for each in served] == pytest.approx(
        [each["score"] for each in plain], abs=1e-3
    )


def test_whole_sentences_are_held_out() -> None:
    rng = np.random.default_rng(0)
    sentences = np.repeat(np.arange(30), rng.integers(1, 9, 30))
    found = Predictions(
        rng.integers(3, size=len(sentences)),
        logits=rng.normal(size=(len(sentences), 3)),
        sentences=sentences,
    )
    options = Calibrate(source="predictions.npz", output=Path("calibrated"), seed=1)
    roles = split_roles(found, None, options)
    fitted = roles.fitted_on
    reported = roles.reported
    assert fitted.sentences is not None
    assert reported.sentences is not None
    assert len(np.unique(fitted.sentences)) == len(np.unique(reported.sentences)) == 15
    assert not set(fitted.sentences) & set(reported.sentences)
    assert len(fitted) + len(reported) == len(found)
    longest = np.bincount(sentences).argmax()
    with pytest.raises(
        ValueError, match="sentences to be at least 2, to be split in half, got 1"
    ):
        split_roles(found.select(sentences == longest), None, options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["evaluate", "--ood-data", "FILE"],
            "data without tags to be for texts or images",
        ),
        (["decide"], "to classify texts or images"),
    ],
)
def test_what_tokens_do_not_have(words: list[str], message: str, files: Path) -> None:
    data = str(files / "dev.jsonl")
    other = str(files / "test.jsonl")
    name, *rest = [other if word == "FILE" else word for word in words]
    columns = ["--data", data, "--text-column", "tokens", "--label-column", "ner_tags"]
    result = CliRunner(env={"COLUMNS": "400"}).invoke(
        app, [name, str(files / "bert"), *columns, *rest]
    )
    assert result.exit_code == 2
    assert message in result.output
