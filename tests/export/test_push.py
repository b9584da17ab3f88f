"""A real push, to a server on the loopback interface: what arrives is the calibrated model, and its card says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load as load_safetensors

from hf_calib._errors import InputValueError
from hf_calib.export.folder import LOSS_STATE_NAME, PUSHED_LOSS_STATE
from hf_calib.losses import make_loss
from hf_calib.trainer.checkpoint import load_loss_state
from tests.helpers.hub_server import TOKEN, Fault, Hub, running_hub
from tests.helpers.push_and_load import BRANCH, WEIGHTS_BEFORE
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tiny import tiny_trainer
from tests.helpers.trained import trained


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Hub, Path, dict[str, Any], str]:
    """The server afterwards, the pusher's folder, what it found, and what it printed."""
    folder = tmp_path_factory.mktemp("pushed")
    with running_hub() as hub:
        settings = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "home")}
        settings |= {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
        environment = {key: value for key, value in os.environ.items() if key not in ("HF_TOKEN",)}
        done = subprocess.run(
            [sys.executable, "-m", "tests.helpers.push_and_load", str(folder), TOKEN],
            env={**environment, **settings},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr[-4000:] + "\n".join(hub.unknown)
    return hub, folder, json.loads((folder / "found.json").read_text()), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "adapters"])
def test_what_is_uploaded(name: str, pushed: Any) -> None:
    """The folded weights, in one commit, with all that is about them, and nothing of the training."""
    hub, folder, found, _ = pushed
    files = hub.files[f"me/{name}"]["main"]
    assert found[name]["bit_equal"] is True
    assert found[name]["off_by"] < 1e-5
    assert abs(found[name]["temperature"] - 1) > 0.05
    record = json.loads(files["config.json"])["calibration"]
    assert (record["folded"], record["temperature"]) == (True, found[name]["temperature"])
    assert "classifier.weight" in load_safetensors(files["model.safetensors"])
    wanted = {"README.md", "calibration.json", "config.json", "decisions.json", "model.safetensors"}
    wanted |= {"calibration/figures/reliability.png", "calibration/report.json", "tokenizer.json"}
    assert wanted <= set(files)
    # The pushes during the training uploaded adapters, which would be loaded on top of the merged weights.
    assert not [each for each in files if each.startswith(("checkpoint", "_", "adapter_"))]
    assert (folder / name / "checkpoint-2").is_dir()
    assert not list((folder / name).glob("adapter_*"))
    assert files["calibration/figures/reliability.png"].startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "adapters", "branch"])
def test_the_push_at_the_end_is_one_commit(name: str, pushed: Any) -> None:
    hub, _, _, _ = pushed
    messages = hub.commits[f"me/{name}", BRANCH if name == "branch" else "main"]
    at_the_end = [each for each in messages if not each.startswith(("Training in progress", "Upload"))]
    assert at_the_end == ["Model save", "End of training"][name != "adapters" :]


@pytest.mark.slow
def test_a_push_to_a_branch_removes_the_old_weights_there_and_only_there(pushed: Any) -> None:
    hub, _, found, _ = pushed
    branches = hub.files["me/branch"]
    assert branches["main"] == {".gitattributes": b"", **dict.fromkeys(WEIGHTS_BEFORE["main"], b"old")}
    kinds = (".safetensors", ".bin", "adapter_config.json")
    weights = {name for name in branches[BRANCH] if name.endswith(kinds)}
    assert weights == {"model.safetensors", "calibration/head.safetensors"}
    assert "README.md" in branches[BRANCH]
    assert found["branch"]["bit_equal"] is True


@pytest.mark.slow
def test_the_token_is_used_and_left_nowhere(pushed: Any) -> None:
    hub, folder, _, output = pushed
    assert {token for method, path, token in hub.requests if "/commit/" in path} == {f"Bearer {TOKEN}"}
    assert TOKEN not in output
    contents = [
        file for branches in hub.files.values() for files in branches.values() for file in files.values()
    ]
    contents += [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in content for content in contents)


@pytest.mark.slow
def test_the_card_shows_loss_splits_metrics_and_diagram(pushed: Any) -> None:
    hub, _, found, _ = pushed
    card = ModelCard(hub.files["me/plain"]["main"]["README.md"].decode())
    assert {"calibration", "hf_calib"} <= set(card.data.tags)
    assert (card.data.library_name, card.data.language) == ("transformers", ["en"])
    section = card.text.split("## Calibration\n")[1]
    before, after = found["plain"]["ece"], found["plain"]["ece_calibrated"]
    for phrase in (
        "Trained with the loss focal \\(gamma=3.0\\).",
        f"(temperature {found['plain']['temperature']:.4f}; criterion: nll) was fitted on 40 rows",
        f"**{before:.4f}** before, **{after:.4f}** after temperature scaling, on 20 rows of the",
        "](calibration/figures/reliability.png)",
        'pipeline("text-classification", model="me/plain", top_k=None)',
        "A decision rule comes with the model, in `decisions.json`. It takes the decision of",
    ):
        assert section.count(phrase) == 1, phrase
    assert "optimistic" not in section
    assert card.text.rstrip() + "\n" == card.text
    results = {each.metric_type: each.metric_value for each in card.data.eval_results}
    wanted = {"ece": after, "ece_before_calibration": before}
    assert {key: results[key] for key in wanted} == pytest.approx(wanted, abs=1e-6)
    adapters = ModelCard(hub.files["me/adapters"]["main"]["README.md"].decode())
    assert adapters.data.library_name == "transformers"


@pytest.mark.slow
def test_a_push_in_the_background_and_as_a_pull_request(tmp_path: Path, hub: Hub) -> None:
    trainer = trained(tmp_path / "model", loss="adafocal")
    future = trainer.push_to_hub(blocking=False, private=True, revision="tried", commit_message="Tried")
    assert future.result(timeout=60).oid == hub.head("me/model", "tried")
    assert hub.created[0]["visibility"] == "private"
    assert hub.commits["me/model", "tried"] == ["Tried"]
    assert trainer.push_to_hub(create_pr=True).pr_revision == "refs/pr/1"
    files = hub.files["me/model"]["refs/pr/1"]
    assert hub.files["me/model"]["main"].keys() == {".gitattributes"}
    assert LOSS_STATE_NAME not in files
    (tmp_path / "calibration").mkdir()
    (tmp_path / PUSHED_LOSS_STATE).write_bytes(files[PUSHED_LOSS_STATE])
    loss = make_loss("adafocal", **trainer.calibration_loss.hyperparameters)
    load_loss_state(loss, tmp_path)
    assert loss.gammas.tolist() == trainer.calibration_loss.gammas.tolist()
    assert 'model="me/model", top_k=None)' in files["README.md"].decode()  # with its owner


def test_without_a_map_the_push_is_the_stock_one(tmp_path: Path, hub: Hub) -> None:
    trainer = tiny_trainer(tmp_path / "model", temperature_criterion="none")
    trainer.train()
    with pytest.raises(
        InputValueError, match=r"the calibration map to be fitted for create_pr, got none; train with"
    ):
        trainer.push_to_hub(create_pr=True)
    assert hub.requests == []
    trainer.push_to_hub()
    assert hub.files["me/model"]["main"].keys() >= {"model.safetensors", "training_args.bin", "README.md"}


def test_a_push_that_is_refused_leaves_the_calibrated_model_here(tmp_path: Path, hub: Hub) -> None:
    trainer = trained(tmp_path / "model")
    hub.fault = lambda *_: Fault(401, "Invalid credentials in Authorization header")
    with pytest.raises(InputValueError, match="expected the token to be valid"):
        trainer.push_to_hub()
    assert hub.files == {}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["calibration"]["folded"] is True
