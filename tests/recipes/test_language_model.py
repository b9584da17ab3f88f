"""The recipe of judges: tiny random decoders, and one that was trained on local text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoModelForSequenceClassification

import hf_calib
from hf_calib.data import docstring_dataset
from hf_calib.language_models import PromptTemplate
from tests.helpers.decoders import decoder, learn, tokenizer_of
from tests.helpers.reports import quick_report  # noqa: F401
from tests.recipes.test_recipes import CONFIGS, SHORT, results, run, run_on_two_processes

PROMPT = "{text}\n\nThis function is of"
CLASSES = ("numpy", "scipy", "sklearn", "pandas", "torch", "transformers")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language_model")
    dataset = docstring_dataset(max_per_class=40)
    for split in ("train", "test"):
        rows = dataset[split]
        names = rows.features["label"].int2str(rows["label"])
        Dataset.from_dict({"text": rows["text"], "label": names}).to_json(folder / f"{split}.jsonl")
    tokenizer = tokenizer_of(list(dataset["train"]["text"]), CLASSES)
    decoder(tokenizer).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    return folder


def options(place: Path, model: str = "llama") -> list[str]:
    files = ["--train_file", str(place / "train.jsonl"), "--test_file", str(place / "test.jsonl")]
    own = ["--model", str(place / model), "--prompt", PROMPT, "--max_length", "48", "--save_strategy", "no"]
    return [*SHORT, *files, *own, "--calibration_size", "60", "--calibration_method", "temperature"]


@pytest.mark.usefixtures("quick_report")
@pytest.mark.parametrize(
    "lora", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.deep)]
)
def test_a_tiny_decoder_ends_as_a_calibrated_judge(lora: bool, place: Path, tmp_path: Path) -> None:
    task = [
        "--config",
        str(CONFIGS / "ag_news_qwen3.yaml"),
        "--answers",
        json.dumps({n: f" {n}" for n in CLASSES}),
    ]
    adapters = [*task, "--lora_rank", "4", "--loss", "adafocal", "--gamma_update_steps", "2"] if lora else []
    run("language_model.py", *options(place), *adapters, "--output_dir", str(tmp_path))
    saved = tmp_path / "calibrated"
    model = AutoModelForSequenceClassification.from_pretrained(saved).eval()
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert model.config.calibration["folded"] is True
    assert set(model.config.label2id) == set(CLASSES)
    assert PromptTemplate.of(model.config) == PromptTemplate(PROMPT)
    # What the recipe reported is what the saved judge says of the same rows, by the prompt in its config.
    rows = [json.loads(line) for line in (place / "test.jsonl").read_text().splitlines()]
    classify = hf_calib.pipeline("text-classification", str(saved), top_k=None, device="cpu")
    found = classify([row["text"] for row in rows], truncation=True, max_length=48)
    loss = [-math.log(next(e["score"] for e in each if e["label"] == row["label"]))
            for each, row in zip(found, rows, strict=True)]  # fmt: skip
    metrics: Any = results(tmp_path)["metrics"]
    assert np.mean(loss) == pytest.approx(metrics["test_nll_calibrated"], abs=1e-5)
    assert results(tmp_path)["loss"] == ("adafocal" if lora else "cross_entropy")


def test_answers_of_other_classes_are_refused_before_the_model_is_loaded(place: Path, tmp_path: Path) -> None:
    words = [*options(place, "no such model"), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(
        SystemExit, match=r"name the classes \['numpy', .* got \['numpy', 'art'\]; give each its token"
    ):
        run("language_model.py", *words, "--answers", '{"numpy": " numpy", "art": " art"}')
    assert not (tmp_path / "out" / "results.json").exists()


@pytest.mark.deep
@pytest.mark.usefixtures("quick_report")
def test_two_processes_report_what_one_does(place: Path, tmp_path: Path) -> None:
    same = [*options(place), "--loss", "focal", "--learning_rate", "0", "--lora_rank", "4"]
    run_on_two_processes("language_model.py", *same, "--output_dir", str(tmp_path / "two"))
    run("language_model.py", *same, "--output_dir", str(tmp_path / "one"))
    one, two = (results(tmp_path / name)["metrics"] for name in ("one", "two"))
    assert isinstance(one, dict)
    assert isinstance(two, dict)
    for key in ("test_ece", "test_nll_calibrated", "temperature"):
        assert two[key] == pytest.approx(one[key], rel=1e-5), key


@pytest.mark.deep
@pytest.mark.usefixtures("quick_report")
def test_a_decoder_that_read_local_text_becomes_a_judge_that_knows_it(tmp_path: Path) -> None:
    """A language model from nothing: next tokens of docstrings with their packages, then the recipe."""
    dataset = docstring_dataset(max_per_class=300)
    rows = {name: (list(dataset[name]["text"]), dataset[name].features["label"].int2str(dataset[name]["label"]))
            for name in ("train", "test")}  # fmt: skip
    texts, names = rows["train"]
    tokenizer = tokenizer_of(texts, CLASSES)
    model = decoder(tokenizer, hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    learn(model, tokenizer, texts)
    model.save_pretrained(tmp_path / "pretrained")
    tokenizer.save_pretrained(tmp_path / "pretrained")
    for name, (texts, names) in rows.items():
        Dataset.from_dict({"text": texts, "label": names}).to_json(tmp_path / f"{name}.jsonl")
    more = [
        "--num_train_epochs",
        "3",
        "--learning_rate",
        "2e-3",
        "--loss",
        "focal",
        "--calibration_size",
        "300",
    ]
    run("language_model.py", *options(tmp_path, "pretrained"), *more, "--output_dir", str(tmp_path / "out"))
    metrics: Any = results(tmp_path / "out")["metrics"]
    assert metrics["test_accuracy"] > 2 / 6  # twice what chance has
    assert metrics["test_nll_calibrated"] < math.log(6) - 0.2
