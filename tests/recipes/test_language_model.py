"""The recipe of judges, on a tiny decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from transformers import AutoModelForSequenceClassification

import hf_calib
from hf_calib.language_models import PromptTemplate
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tiny import tokenizer
from tests.language_models.models import language_model
from tests.recipes.test_recipes import CONFIGS, SHORT, results, run

ANSWERS = {"art": " w3", "law": " w9", "film": " w20"}


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    rng = np.random.default_rng(0)
    for name in ("train", "test"):
        texts = [" ".join(f"w{i}" for i in rng.integers(5, 50, 8)) for _ in range(90)]
        labels = rng.choice(list(ANSWERS), 90)
        pandas.DataFrame({"text": texts, "label": labels}).to_csv(
            tmp_path / f"{name}.csv", index=False
        )
    language_model().save_pretrained(tmp_path / "llama")
    tokenizer().save_pretrained(tmp_path / "llama")
    files = [
        "--train_file",
        str(tmp_path / "train.csv"),
        "--test_file",
        str(tmp_path / "test.csv"),
    ]
    own = [
        "--model",
        str(tmp_path / "llama"),
        "--prompt",
        "{text} w1",
        "--save_strategy",
        "no",
    ]
    own += [
        "--answers",
        json.dumps(ANSWERS),
        "--calibration_size",
        "40",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    return ["--config", str(CONFIGS / "ag_news_qwen3.yaml"), *SHORT, *files, *own]


@pytest.mark.slow
def test_a_tiny_decoder_ends_as_a_calibrated_judge(
    options: list[str], tmp_path: Path
) -> None:
    adapters = ["--lora_rank", "4", "--loss", "adafocal", "--gamma_update_steps", "2"]
    run("language_model.py", *options, *adapters)
    saved = tmp_path / "out" / "calibrated"
    model = AutoModelForSequenceClassification.from_pretrained(saved).eval()
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert model.config.calibration["folded"] is True
    assert set(model.config.label2id) == set(ANSWERS)
    assert PromptTemplate.of(model.config) == PromptTemplate("{text} w1")
    # What the recipe reported is what the saved judge says of the same rows, by the prompt in its config.
    rows = pandas.read_csv(tmp_path / "test.csv")
    classify = hf_calib.pipeline(
        "text-classification", str(saved), top_k=None, device="cpu"
    )
    found = [
        {each["label"]: each["score"] for each in row}
        for row in classify(rows["text"].tolist())
    ]
    loss = [
        -np.log(scores[label])
        for scores, label in zip(found, rows["label"], strict=True)
    ]
    metrics: Any = results(tmp_path / "out")["metrics"]
    assert np.mean(loss) == pytest.approx(metrics["test_nll_calibrated"], abs=1e-5)
    assert results(tmp_path / "out")["loss"] == "adafocal"


def test_answers_of_other_classes_are_refused_before_the_training(
    options: list[str], tmp_path: Path
) -> None:
    with pytest.raises(
        SystemExit,
        match=r"name the classes \['art', .* got \['art', 'news'\]; give each its",
    ):
        run("language_model.py", *options, "--answers", '{"art": " w3", "news": " w4"}')
    assert not (tmp_path / "out").exists()
