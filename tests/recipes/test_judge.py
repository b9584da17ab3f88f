"""A judge of four words on real news: trained by the recipe, killed and resumed, and taken through every command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from huggingface_hub import snapshot_download
from transformers import pipeline as plain_pipeline

import hf_calib
from hf_calib.language_models import PromptTemplate
from hf_calib.scaling import Scaler
from tests.helpers.commands import call, called_for_json
from tests.helpers.decoders import decoder, learn, tokenizer_of
from tests.helpers.hub_server import TOKEN, Hub
from tests.helpers.places import ROOT
from tests.helpers.reports import quick_report  # noqa: F401

pytestmark = pytest.mark.deep  # a language model from nothing, and three times the recipe

CONFIG = ROOT / "recipes" / "configs" / "ag_news_qwen3.yaml"
CLASSES = ("World", "Sports", "Business", "Sci/Tech")
WORDS = ("World", "Sports", "Business", "Technology")
PROMPT = PromptTemplate("{text}\nThe subject of this article is")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    """Rows of AG News, and a decoder that has read others of them."""
    folder = tmp_path_factory.mktemp("news")
    rows = pandas.read_csv(shared_data / "ag_news" / "train_20k.csv.gz")
    rows["label"] = np.array(CLASSES)[rows["label"]]
    for name, part in {"train": rows[:5000], "test": rows[5000:5400], "more": rows[5400:6000]}.items():
        part.to_csv(folder / f"{name}.csv", index=False)
    texts = list(rows["text"][6000:12000])
    tokenizer = tokenizer_of(texts, WORDS)
    model = decoder(tokenizer, hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    learn(model, tokenizer, texts)
    model.save_pretrained(folder / "decoder")
    tokenizer.save_pretrained(folder / "decoder")
    return folder


def command(place: Path, output: Path, *more: str) -> list[str]:
    """The recipe's config on rows that are here; AdaFocal's gammas change in the middle of an epoch."""
    own = {
        **{"model": "decoder", "train_file": "train.csv", "test_file": "test.csv", "calibration_size": "300"},
        **{"max_train_samples": "4600", "max_length": "48", "lora_rank": "0", "loss": "adafocal"},
        **{
            "gamma_update_steps": "50",
            "save_strategy": "steps",
            "save_steps": "100",
            "num_train_epochs": "3",
        },
        **{"learning_rate": "2e-3", "use_cpu": "true", "disable_tqdm": "true", "output_dir": str(output)},
    }
    words = [word for key, value in own.items() for word in (f"--{key}", value)]
    return [
        sys.executable,
        str(ROOT / "recipes" / "language_model.py"),
        "--config",
        str(CONFIG),
        *words,
        *more,
    ]


def run(words: Sequence[str], place: Path) -> None:
    done = subprocess.run(words, cwd=place, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def judge(place: Path) -> Path:
    run(command(place, place / "whole"), place)
    return place / "whole" / "calibrated"


def test_killed_and_resumed_it_ends_as_if_it_had_not_been(place: Path, judge: Path) -> None:
    output = place / "killed"
    process = subprocess.Popen(
        command(place, output),
        cwd=place,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 300
    while not (output / "checkpoint-200" / "trainer_state.json").exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (output / "results.json").exists()
    run(command(place, output, "--resume", "true"), place)
    ours, theirs = (json.loads((folder / "results.json").read_text()) for folder in (output, judge.parent))
    assert ours["training"]["resumed"] is True
    for key, value in theirs["metrics"].items():
        if not key.endswith(("runtime", "per_second")):
            assert ours["metrics"][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_it_has_learnt_something(judge: Path) -> None:
    metrics = json.loads((judge.parent / "results.json").read_text())["metrics"]
    assert metrics["test_accuracy"] > 0.5  # 1/4 by chance
    assert metrics["test_nll_calibrated"] < np.log(4) - 0.2


@pytest.mark.usefixtures("quick_report")
def test_every_command(place: Path, judge: Path, tmp_path: Path, hub: Hub) -> None:
    reported: Any = json.loads((judge.parent / "results.json").read_text())["metrics"]
    rows = ("--data", place / "test.csv", "--max-length", 48)
    found = called_for_json("evaluate", judge, *rows, "--output", tmp_path / "measured")
    assert found["before"]["metrics"]["nll"]["value"] == pytest.approx(
        reported["test_nll_calibrated"], abs=1e-5
    )

    called_for_json("unfold", judge, tmp_path / "unfolded")
    before = called_for_json("evaluate", tmp_path / "unfolded", *rows)
    assert before["before"]["metrics"]["nll"]["value"] == pytest.approx(reported["test_nll"], abs=1e-5)

    more = ("--data", place / "more.csv", "--max-length", 48)
    done = called_for_json("calibrate", tmp_path / "unfolded", *more, "--output", tmp_path / "again")
    assert (done["method"], done["folded"]) == ("temperature", True)
    beside = ("--method", "vector", "--output", tmp_path / "beside")
    done = called_for_json("calibrate", tmp_path / "unfolded", *more, *beside)
    assert done["folded"] is False
    assert done["served_difference"] < 1e-5

    asked = pandas.read_csv(place / "test.csv")["text"].tolist()[:4]
    ours = scores(hf_calib.pipeline("text-classification", str(judge), top_k=None), asked)
    plain = plain_pipeline("text-classification", str(judge), top_k=None)
    prompts = [PROMPT.fitting(text, tokenizer=plain.tokenizer, max_length=48)[0] for text in asked]
    np.testing.assert_allclose(ours, scores(plain, prompts), atol=1e-6)
    scaler = Scaler.from_pretrained(tmp_path / "beside")
    raw = scores(hf_calib.pipeline("text-classification", str(tmp_path / "unfolded"), top_k=None), asked)
    mapped = scores(hf_calib.pipeline("text-classification", str(tmp_path / "beside"), top_k=None), asked)
    logits = plain_pipeline(
        "text-classification", str(tmp_path / "unfolded"), top_k=None, function_to_apply="none"
    )
    wanted = scaler.predict_proba(scores(logits, prompts))
    np.testing.assert_allclose(mapped, wanted, atol=1e-5)
    assert np.abs(mapped - raw).max() > 1e-3

    decided = called_for_json("decide", judge, *more, "--accuracy", 0.5, "--output", judge)
    assert decided
    exported = called_for_json("export", judge, tmp_path / "onnx", *rows, "--format", "onnx")
    assert exported["difference"] < 1e-4
    pushed = called_for_json("push", judge, "me/judge")
    assert pushed["usage"][0] == "from hf_calib import pipeline"  # which makes the prompt
    snapshot_download("me/judge", local_dir=tmp_path / "down", token=TOKEN)
    down = hf_calib.pipeline("text-classification", str(tmp_path / "down"), top_k=None)
    np.testing.assert_allclose(scores(down, asked), ours, atol=1e-6)
    card = (tmp_path / "down" / "README.md").read_text()
    assert "The subject of this article is" in card
    reports = (tmp_path / "measured" / "report.json", judge.parent / "report" / "report.json")
    assert call("report", *reports, "--output", tmp_path / "both").exit_code == 0


def scores(classify: Any, texts: list[str]) -> np.ndarray:
    """(N, 4), in the order of the model's classes."""
    found = classify(texts, truncation=True, max_length=48)
    names = classify.model.config.id2label.values()
    return np.array([[{d["label"]: d["score"] for d in row}[name] for name in names] for row in found])
