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
from hf_calib.export.folder import LOSS_STATE_NAME
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
def test_the_uploaded_weights_are_the_folded_ones(name: str, pushed: Any) -> None:
    hub, _, found, _ = pushed
    assert found[name]["bit_equal"] is True
    assert found[name]["off_by"] < 1e-5
    assert abs(found[name]["temperature"] - 1) > 0.05
    config = json.loads(hub.files[f"me/{name}"]["main"]["config.json"])
    assert config["calibration"]["folded"] is True
    assert config["calibration"]["temperature"] == found[name]["temperature"]
    assert "classifier.weight" in load_safetensors(hub.files[f"me/{name}"]["main"]["model.safetensors"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "adapters"])
def test_what_is_uploaded(name: str, pushed: Any) -> None:
    hub, folder, _, _ = pushed
    names = set(hub.files[f"me/{name}"]["main"])
    wanted = {
        "README.md",
        "calibration.json",
        "config.json",
        "decisions.json",
        "model.safetensors",
        "calibration/figures/reliability.png",
        "calibration/report.json",
        "tokenizer.json",
    }
    assert wanted <= names
    assert not [each for each in names if each.startswith(("checkpoint", "_"))]
    assert (folder / name / "checkpoint-2").is_dir()
    assert hub.files[f"me/{name}"]["main"]["calibration/figures/reliability.png"].startswith(b"\x89PNG")
    # The pushes during the training uploaded adapters, which would be loaded on top of the merged weights.
    assert not [each for each in names if each.startswith("adapter_")]
    assert not list((folder / name).glob("adapter_*"))


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
    weights = {
        name for name in branches[BRANCH] if name.endswith((".safetensors", ".bin")) or "adapter" in name
    }
    assert weights == {"model.safetensors", "calibration/head.safetensors"}
    assert "README.md" in branches[BRANCH]
    assert found["branch"]["bit_equal"] is True


@pytest.mark.slow
def test_the_token_is_used_and_left_nowhere(pushed: Any) -> None:
    hub, folder, _, output = pushed
    assert {token for method, path, token in hub.requests if "/commit/" in path} == {f"Bearer {TOKEN}"}
    assert TOKEN not in output
    for branches in hub.files.values():
        for files in branches.values():
            for name, content in files.items():
                assert TOKEN.encode() not in content, name
    for path in folder.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_the_card_shows_loss_splits_metrics_and_diagram(pushed: Any) -> None:
    hub, _, found, _ = pushed
    card = ModelCard(hub.files["me/plain"]["main"]["README.md"].decode())
    assert {"calibration", "hf_calib"} <= set(card.data.tags)
    assert card.data.library_name == "transformers"
    assert card.data.language == ["en"]
    section = card.text.split("## Calibration\n")[1]
    assert "Trained with the loss focal \\(gamma=3.0\\)." in section
    temperature = found["plain"]["temperature"]
    assert (
        f"Temperature scaling (temperature {temperature:.4f}; criterion: nll) was fitted on 40 rows"
        in section
    )
    before, after = found["plain"]["ece"], found["plain"]["ece_calibrated"]
    assert f"**{before:.4f}** before, **{after:.4f}** after temperature scaling, on 20 rows of the" in section
    assert "](calibration/figures/reliability.png)" in section
    assert "optimistic" not in section
    assert 'model="me/plain"' in section
    results = {each.metric_type: each.metric_value for each in card.data.eval_results}
    assert results["ece"] == pytest.approx(after, abs=1e-6)
    assert results["ece_before_calibration"] == pytest.approx(before, abs=1e-6)
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
    table = load_safetensors(files["calibration/loss.safetensors"])
    assert table["gammas"].tolist() == trainer.calibration_loss.gammas.tolist()
    downloaded = tmp_path / "downloaded"
    (downloaded / "calibration").mkdir(parents=True)
    (downloaded / "calibration" / "loss.safetensors").write_bytes(files["calibration/loss.safetensors"])
    loss = make_loss("adafocal", **trainer.calibration_loss.hyperparameters)
    load_loss_state(loss, downloaded)
    assert loss.gammas.tolist() == trainer.calibration_loss.gammas.tolist()


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
    hub.refused[TOKEN] = Fault(401, "Invalid credentials in Authorization header")
    with pytest.raises(InputValueError, match="expected the token to be valid"):
        trainer.push_to_hub()
    assert hub.files == {}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["calibration"]["folded"] is True


@pytest.mark.slow
def test_the_card_states_the_decisions_beside_the_model(pushed: Any) -> None:
    hub, _, _, _ = pushed
    card = hub.files["me/plain"]["main"]["README.md"].decode()
    _, section = card.split("## Calibration\n")
    assert (
        section.count("A decision rule comes with the model, in `decisions.json`. It takes the decision of")
        == 1
    )
    assert card.endswith("\n")
    assert not card.endswith("\n\n")


@pytest.mark.slow
def test_the_lines_of_the_card_name_the_owner_too(tmp_path: Path, hub: Hub) -> None:
    trained(tmp_path / "model").push_to_hub()
    card = hub.files["me/model"]["main"]["README.md"].decode()
    assert 'pipeline("text-classification", model="me/model", top_k=None)' in card
