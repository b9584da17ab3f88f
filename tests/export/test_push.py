"""A real push, to a server on the loopback interface: what arrives is the calibrated model, and its card says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForSequenceClassification

from hf_calib._errors import InputValueError
from hf_calib.decisions import CostRule, Decisions
from hf_calib.export.folder import PUSHED_LOSS_STATE
from hf_calib.losses import make_loss
from hf_calib.trainer.saving import load_loss_state
from tests.helpers.hub_server import TOKEN, Hub
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tiny import last_evaluation, tiny_bert, tiny_trainer
from tests.helpers.trained import lora, trained


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "adapters"])
def test_what_is_uploaded(
    name: str,
    tmp_path: Path,
    hub: Hub,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The folded weights, in one commit, with all that is about them, and nothing of the training."""
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache")
    )
    settings = {
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "push_to_hub": True,
        "hub_token": TOKEN,
    }
    settings |= {"hub_model_id": "model", "hub_strategy": "every_save"}
    trainer = trained(
        tmp_path / "out", lora(tiny_bert()) if name == "adapters" else None, **settings
    )
    trainer.save_model()  # may leave adapters, which would be loaded on top of the merged weights
    names = tuple(trainer.model.config.id2label.values())
    Decisions(CostRule(1 - np.eye(len(names))), names).save(tmp_path / "out")
    trainer.push_to_hub(language="en")
    files = hub.files["me/model"]["main"]
    record = json.loads(files["config.json"])["calibration"]
    assert (record["folded"], record["temperature"]) == (True, trainer.temperature)
    wanted = {
        "README.md",
        "calibration.json",
        "config.json",
        "decisions.json",
        "model.safetensors",
    }
    wanted |= {
        "calibration/figures/reliability.png",
        "calibration/report.json",
        "tokenizer.json",
    }
    assert wanted <= set(files)
    assert not [
        each for each in files if each.startswith(("checkpoint", "_", "adapter_"))
    ]
    messages = [
        each
        for each in hub.commits["me/model", "main"]
        if not each.startswith("Training in")
    ]
    assert messages[-1] == "End of training"

    pushed = AutoModelForSequenceClassification.from_pretrained(
        "me/model", token=TOKEN
    ).eval()
    ids = torch.tensor(trainer.calibration_dataset["input_ids"])
    with torch.no_grad():
        served, plain = (
            pushed(input_ids=ids).logits,
            trainer.model.eval()(input_ids=ids).logits,
        )
    torch.testing.assert_close(served, plain / trainer.temperature, rtol=0, atol=1e-5)
    assert {token for _, path, token in hub.requests if "/commit/" in path} == {
        f"Bearer {TOKEN}"
    }
    contents = [
        *files.values(),
        *(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()),
    ]
    assert not any(TOKEN.encode() in content for content in contents)
    assert TOKEN not in "".join(capfd.readouterr())

    card = ModelCard(files["README.md"].decode())
    assert {"calibration", "hf_calib"} <= set(card.data.tags)
    assert (card.data.library_name, card.data.language) == ("transformers", ["en"])
    section = card.text.split("## Calibration\n")[1]
    last = last_evaluation(trainer)
    before, after = last["eval_ece"], last["eval_ece_calibrated"]
    for phrase in (
        "Trained with the loss focal \\(gamma=3.0\\).",
        f"(temperature {trainer.temperature:.4f}; criterion: nll) was fitted on 40 rows",
        f"**{before:.4f}** before, **{after:.4f}** after temperature scaling, on 20 rows of the",
        "](calibration/figures/reliability.png)",
        'pipeline("text-classification", model="me/model", top_k=None)',
        "A decision rule comes with the model, in `decisions.json`. It makes the decision with",
    ):
        assert section.count(phrase) == 1, phrase
    results = {each.metric_type: each.metric_value for each in card.data.eval_results}
    ece = {"ece": after, "ece_before_calibration": before}
    assert {key: results[key] for key in ece} == pytest.approx(ece, abs=1e-6)


@pytest.mark.slow
def test_a_push_in_the_background_and_as_a_pull_request(
    tmp_path: Path, hub: Hub
) -> None:
    trainer = trained(tmp_path / "model", loss="adafocal", gamma_update_steps=1)
    future = trainer.push_to_hub(
        blocking=False, revision="tried", commit_message="Tried"
    )
    assert future.result(timeout=60).oid == hub.head("me/model", "tried")
    assert hub.commits["me/model", "tried"] == ["Tried"]
    assert trainer.push_to_hub(create_pr=True).pr_revision == "refs/pr/1"
    (tmp_path / "calibration").mkdir()
    (tmp_path / PUSHED_LOSS_STATE).write_bytes(
        hub.files["me/model"]["refs/pr/1"][PUSHED_LOSS_STATE]
    )
    loss = make_loss("adafocal", **trainer.calibration_loss.hyperparameters)
    load_loss_state(loss, tmp_path)
    assert loss.gammas.tolist() == trainer.calibration_loss.gammas.tolist()


def test_without_a_map_the_push_is_the_stock_one(tmp_path: Path, hub: Hub) -> None:
    trainer = tiny_trainer(tmp_path / "model", temperature_criterion="none")
    trainer.train()
    with pytest.raises(
        InputValueError,
        match=r"a calibrator to be fitted for create_pr, got none; train with",
    ):
        trainer.push_to_hub(create_pr=True)
    assert hub.requests == []
    trainer.push_to_hub()
    assert hub.files["me/model"]["main"].keys() >= {
        "model.safetensors",
        "training_args.bin",
        "README.md",
    }
