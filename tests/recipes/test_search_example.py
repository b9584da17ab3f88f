"""The search in the recipes' README runs as it stands there, but for the model and the number of trials."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from transformers import pipeline

from tests.helpers.places import ROOT
from tests.helpers.tiny import N_LABELS, sequences, text_of, tiny_bert, tokenizer


@pytest.mark.slow
def test_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_bert().save_pretrained("model")
    tokenizer().save_pretrained("model")
    for seed, (name, n) in enumerate({"train": 200, "test": 40}.items(), start=1):
        rows = sequences(tiny_bert(), n, seed=seed)
        lines = [f"{text_of(row['input_ids'])},{row['label']}" for row in rows]
        Path(f"{name}.csv").write_text("\n".join(["text,label", *lines, ""]))
    text = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    (code,) = [
        each for each in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "n_trials" in each
    ]
    code = code.replace("nreimers/MiniLM-L6-H384-uncased", "model").replace("n_trials=20", "n_trials=3")
    code = code.replace('report_to="none"', 'report_to="none", use_cpu=True, dataloader_pin_memory=False')
    names: dict[str, Any] = {}
    exec(code, names)
    best, trainer = names["best"], names["trainer"]
    trials = optuna.load_study(study_name="search", storage="sqlite:///search.db").trials
    assert len(trials) == 3
    assert best.objective == min(trial.value for trial in trials if trial.value is not None)
    assert trainer.args.loss == best.hyperparameters["loss"]
    assert trainer.args.learning_rate == best.hyperparameters["learning_rate"]
    (scores,) = pipeline("text-classification", model="calibrated", top_k=None)(["w1 w2 w3"])
    assert len(scores) == N_LABELS
    assert torch.tensor([each["score"] for each in scores]).sum() == pytest.approx(1, abs=1e-5)
