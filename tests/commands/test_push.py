"""`hf-calib push`: what arrives is calibrated wherever it is loaded, or the folder is refused with a way out."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import transformers
from huggingface_hub import snapshot_download
from scipy.special import softmax
from transformers import GPT2Config, GPT2ForSequenceClassification
from typer.testing import CliRunner

from hf_calib import pipeline
from hf_calib.cli import app
from hf_calib.commands.options import Push
from hf_calib.decisions import CostRule, Decisions
from hf_calib.export import save_folded
from hf_calib.metrics import brier_score, expected_calibration_error, negative_log_likelihood
from hf_calib.scaling import IsotonicScaling, StructuredVectorScaling, TemperatureScaling
from tests.helpers.hub_server import TOKEN, Hub
from tests.helpers.interrupted_saving import in_a_fork
from tests.helpers.reports import few_resamples, no_figures
from tests.helpers.tiny import sequences, tagged, text_of, tiny_bert, tokenizer
from tests.helpers.trained import images_trainer, lora, served_logits, trained

NAMES = ("art", "law", "film", "sport")
SCALER = TemperatureScaling(grid=[2.5]).fit([[1.0, 0.0]] * 3, [0, 0, 1])


def call(*words: object) -> Any:
    return CliRunner().invoke(app, ["push", *map(str, words)])


def called_for_json(*words: object) -> Any:
    result = call(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def served(folder: Path, requests: dict[str, Any]) -> dict[str, Any]:
    """The answers of pipelines with downloaded models, where hf_calib cannot be imported."""
    (folder / "requests.json").write_text(json.dumps(requests))
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.serve", str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_texts_images_and_tokens_are_calibrated_when_they_are_loaded_again(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the output folders of trainings; and the report's figures, from a model that `calibrate` has written."""
    few_resamples(monkeypatch)
    no_figures(monkeypatch)
    words = trained(tmp_path / "words")
    (tmp_path / "images").mkdir()
    pictures, (_, paths) = images_trainer(tmp_path / "images")
    tags = trained(tmp_path / "tags", tiny_bert("Token"), data=tagged)
    requests: dict[str, Any] = {"calibrated": ["text-classification", calibrated_model(tmp_path)]}
    down = tmp_path / "down"
    for trainer, name, task in (
        (words, "words", "text-classification"),
        (pictures, "images", "image-classification"),
        (tags, "tags", "token-classification"),
    ):
        trainer.save_model()
        if name == "words":
            trainer.create_model_card()  # whose report is on the folded model, too
        folder = Path(trainer.args.output_dir)
        before = contents(folder)
        pushed = called_for_json(folder, f"me/{name}")
        assert contents(folder) == before
        assert pushed["folded"] is True
        assert f'classify = pipeline("{task}", model="me/{name}"' in pushed["usage"][1]
        snapshot_download(f"me/{name}", local_dir=down / name, token=TOKEN)
        trainer.save_calibrated_model(tmp_path / f"local {name}")
        assert (down / name / "model.safetensors").read_bytes() == (
            tmp_path / f"local {name}" / "model.safetensors"
        ).read_bytes()
        inputs = (
            paths if name == "images" else [text_of(ids) for ids in trainer.calibration_dataset["input_ids"]]
        )
        requests[name] = [task, inputs]
    assert "Below each number its 95% interval" in hub.files["me/words"]["main"]["README.md"].decode()
    called_for_json(tmp_path / "calibrated", "calibrated")
    snapshot_download("me/calibrated", local_dir=down / "calibrated", token=TOKEN)
    answers = served(down, requests)

    for trainer, name in ((words, "words"), (pictures, "images")):
        found = np.array([[row["score"] for row in sorted(each, key=by_label)] for each in answers[name]])
        np.testing.assert_allclose(found, softmax(served_logits(trainer), axis=1), atol=1e-5)
    best = softmax(served_logits(tags), axis=2).max(axis=2)
    np.testing.assert_allclose(
        [[token["score"] for token in each] for each in answers["tags"]], best, atol=1e-5
    )

    report = json.loads((down / "calibrated" / "calibration" / "report.json").read_text())["after"]["metrics"]
    rows = pandas.read_csv(tmp_path / "test.csv")
    labels = np.array([NAMES.index(name) for name in rows["label"]])
    scores = [{row["label"]: row["score"] for row in each} for each in answers["calibrated"]]
    probs = np.array([[each[name] for name in NAMES] for each in scores])
    for key, metric in (
        ("ece", expected_calibration_error),
        ("nll", negative_log_likelihood),
        ("brier", brier_score),
    ):
        assert metric(probs, labels) == pytest.approx(report[key]["value"], rel=1e-4), key


def by_label(row: dict[str, Any]) -> str:
    return str(row["label"])


def calibrated_model(folder: Path) -> list[str]:
    """Write one with `hf-calib calibrate`; return the texts that its report is on."""
    names = dict(enumerate(NAMES))
    model = tiny_bert(id2label=names, label2id={name: i for i, name in names.items()})
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    for name, n in (("data", 200), ("test", 80)):
        rows = sequences(model, n, seed=n)
        texts = [text_of(ids) for ids in rows["input_ids"]]
        labels = [NAMES[label] for label in rows["label"]]
        pandas.DataFrame({"text": texts, "label": labels}).to_csv(folder / f"{name}.csv", index=False)
    words = ["calibrate", folder / "model", "--data", folder / "data.csv", "--test-data", folder / "test.csv"]
    words += ["--output", folder / "calibrated", "--method", "temperature"]
    assert CliRunner().invoke(app, list(map(str, words))).exit_code == 0
    return texts


@pytest.fixture
def folded(tmp_path: Path) -> Path:
    save_folded(tiny_bert(), SCALER, tmp_path / "folded", batch=None, processing_class=tokenizer())
    return tmp_path / "folded"


@pytest.fixture
def unfolded(tmp_path: Path, folded: Path) -> Path:
    """The output of a training: the model as trained, its map, and a pickle."""
    folder = tmp_path / "unfolded"
    shutil.copytree(folded, folder)
    tiny_bert().save_pretrained(folder)
    torch.save({}, folder / "training_args.bin")
    return folder


def test_what_a_user_reads(folded: Path, hub: Hub) -> None:
    hub.files["me/model"] = {"main": {"pytorch_model.bin": b"old"}}
    torch.save({}, folded / "other.pt")
    result = call(folded, "me/model")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert said.startswith(
        "Uploaded 7 files to me/model: README.md, calibration.json, calibration/head.safetensors"
    )
    assert f"Pushed: {hub.address}/me/model/commit/{hub.head('me/model', 'main')}\n" in result.stdout
    assert result.stdout.endswith(
        'from transformers import pipeline\nclassify = pipeline("text-classification", model="me/model", '
        'top_k=None)\nprint(classify("a text"))\n'
    )
    assert (
        "warning: pytorch_model.bin in me/model would be loaded in place of the pushed weights"
        in result.stderr
    )
    assert "warning: other.pt can run code when loaded, and will not be pushed" in result.stderr
    assert TOKEN not in result.output
    again = called_for_json(folded, "me/model", "--create-pr", "--revision", "main")
    assert again["removed"] == []
    assert "pull" not in str(again["pr_url"])


def test_branches_pull_requests_and_private_repositories(folded: Path, hub: Hub) -> None:
    pushed = called_for_json(folded, "model", "--private", "--revision", "v2")
    assert pushed["repo_id"] == "me/model"
    assert pushed["usage"][1].endswith('model="me/model", revision="v2", top_k=None)')
    assert hub.created[0]["visibility"] == "private"
    (folded / "notes.txt").write_text("new")
    pushed = called_for_json(folded, "me/model", "--create-pr")
    assert pushed["pr_url"] == f"{hub.address}/me/model/discussions/1"
    assert pushed["usage"][1].endswith('revision="refs/pr/1", top_k=None)')
    assert hub.files["me/model"].keys() == {"main", "v2", "refs/pr/1"}


def test_no_fold_pushes_what_lies_there(unfolded: Path, hub: Hub) -> None:
    weights = (unfolded / "model.safetensors").read_bytes()
    pushed = called_for_json(unfolded, "me/model", "--no-fold")
    assert hub.files["me/model"]["main"]["model.safetensors"] == weights
    assert pushed["folded"] is False
    assert "The map in calibration.json is not in the weights" in pushed["notes"][0]
    called_for_json(unfolded, "me/model")
    assert hub.files["me/model"]["main"]["model.safetensors"] != weights
    (unfolded / "calibration.json").unlink()
    pushed = called_for_json(unfolded, "me/model", "--no-fold")
    assert "holds no calibration.json. The pushed model is not calibrated." in pushed["notes"][0]
    assert "calibration.json" in hub.files["me/model"]["main"]  # it was there before


def test_a_map_that_does_not_fold_is_pushed_beside_the_model(
    unfolded: Path, tmp_path: Path, hub: Hub
) -> None:
    rows = sequences(tiny_bert(), 60)
    ids, labels = torch.tensor(rows["input_ids"]), np.array(rows["label"])
    with torch.no_grad():
        model = tiny_bert().eval()  # on one text after the other, as the pipeline: isotonic steps are steep
        logits = torch.cat([model(input_ids=row[None]).logits for row in ids]).numpy()
    scaler = IsotonicScaling().fit(logits, labels)
    scaler.save_pretrained(unfolded)
    pushed = called_for_json(unfolded, "me/model")
    assert pushed["notes"] == [
        "isotonic scaling does not fold into the head. A plain transformers pipeline is not calibrated; "
        "hf_calib.pipeline is."
    ]
    assert pushed["usage"][0] == "from hf_calib import pipeline"
    assert "calibration.json" in hub.files["me/model"]["main"]
    snapshot_download("me/model", local_dir=tmp_path / "down", token=TOKEN)
    scores = pipeline("text-classification", str(tmp_path / "down"), top_k=1)(
        [text_of(row) for row in ids.tolist()]
    )
    best = scaler.predict_proba(logits).max(axis=1)
    np.testing.assert_allclose([each[0]["score"] for each in scores], best, atol=1e-5)


def test_a_map_whose_bias_the_head_would_lose_is_pushed_beside_the_model(tmp_path: Path, hub: Hub) -> None:
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16, num_labels=4)
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "gpt")
    tokenizer().save_pretrained(tmp_path / "gpt")
    weights = (tmp_path / "gpt" / "model.safetensors").read_bytes()
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(200, 4))
    scaler = StructuredVectorScaling().fit(
        logits, (logits + np.array([0, 0, 0, 2]) + rng.gumbel(size=(200, 4))).argmax(1)
    )
    scaler.save_pretrained(tmp_path / "gpt")
    pushed = called_for_json(tmp_path / "gpt", "me/model")
    assert pushed["folded"] is False
    assert pushed["notes"][0] == (
        "structured vector scaling has a bias, which the head does not keep. A plain transformers pipeline is not "
        "calibrated; hf_calib.pipeline is."
    )
    assert hub.files["me/model"]["main"]["model.safetensors"] == weights
    assert "calibration.json" in hub.files["me/model"]["main"]


def test_a_rule_for_other_weights_is_pointed_out(folded: Path, hub: Hub) -> None:
    record = json.loads((folded / "calibration.json").read_text())
    (folded / "calibration.json").write_text(json.dumps({**record, "fingerprint": "a" * 64}))
    Decisions(CostRule(1 - np.eye(4)), tuple(f"LABEL_{i}" for i in range(4))).save(folded)
    rule = json.loads((folded / "decisions.json").read_text())
    (folded / "decisions.json").write_text(json.dumps({**rule, "fingerprint": "b" * 64}))
    (note,) = called_for_json(folded, "me/model", "--no-fold")["notes"]
    assert "fitted on the probabilities of other weights than those of this folder" in note


def test_a_rule_for_the_model_without_its_map_stays_here(unfolded: Path, hub: Hub) -> None:
    Decisions(CostRule(1 - np.eye(4)), tuple(f"LABEL_{i}" for i in range(4))).save(unfolded)
    pushed = called_for_json(unfolded, "me/model")
    assert any(note.startswith("decisions.json is not pushed: its rule") for note in pushed["notes"])
    assert "decisions.json" not in hub.files["me/model"]["main"]
    assert (unfolded / "decisions.json").is_file()


def no_map(folder: Path) -> None:
    (folder / "calibration.json").unlink()


def half_a_map(folder: Path) -> None:
    (folder / "calibration.json").write_text('{"method": "temperature"}')


def no_json(folder: Path) -> None:
    (folder / "calibration.json").write_text("{")


def adapters(folder: Path) -> None:
    lora(tiny_bert()).save_pretrained(folder)


def another_task(folder: Path) -> None:
    transformers.BertForQuestionAnswering(tiny_bert().config).save_pretrained(folder)


def code_of_its_own(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "a.B"}}))


def no_head(folder: Path) -> None:
    transformers.BertModel(tiny_bert().config).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["BertForSequenceClassification"]})
    )


REFUSED = {
    no_map: r"hold a calibrated model, got no calibration.json; calibrate it first \(hf-calib calibrate\), or",
    half_a_map: "calibration.json to hold a fitted map, got a file that cannot be read",
    no_json: "calibration.json to hold a fitted map, got a file that cannot be read",
    adapters: r"hold a whole model, got adapters; merge them \(save_calibrated_model",
    another_task: "hold a classifier .*got BertForQuestionAnswering; save it with fold",
    code_of_its_own: "hold a classifier .*got code of its own; save it with fold",
    no_head: "be a fine-tuned classifier, got no classifier.bias",
}


@pytest.mark.parametrize("spoil", REFUSED)
def test_folders_that_are_refused_before_anything_is_sent(spoil: Any, unfolded: Path, hub: Hub) -> None:
    spoil(unfolded)
    before = contents(unfolded)
    result = call(unfolded, "me/model")
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("hf-calib: expected")]
    assert re.search(REFUSED[spoil], line), line
    assert hub.requests == []
    assert contents(unfolded) == before


def test_adapters_are_pushed_as_they_lie(unfolded: Path, hub: Hub) -> None:
    adapters(unfolded)
    pushed = called_for_json(unfolded, "me/model", "--no-fold")
    assert "holds adapters" in pushed["notes"][0]
    assert hub.files["me/model"]["main"].keys() >= {"adapter_config.json", "adapter_model.safetensors"}


def test_a_full_disk_is_said_before_anything_is_sent(unfolded: Path, hub: Hub) -> None:
    before = contents(unfolded)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        Push(folder=unfolded, repo="me/model")()

    status, told = in_a_fork(work)
    assert status != 0
    assert told.startswith("InputOSError: expected output to be writable, got")
    assert "(File too large); make room there" in told
    assert TOKEN not in told
    assert hub.requests == []
    assert contents(unfolded) == before


def test_what_the_hub_refuses_is_one_line(folded: Path, hub: Hub) -> None:
    hub.taken = {"me/data"}
    result = call(folded, "me/data", "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "hf-calib: expected a model's repository, got 404 for me/data" in result.stderr


def test_the_lines_of_the_card_name_the_owner_too(folded: Path, hub: Hub) -> None:
    assert called_for_json(folded, "bare")["repo_id"] == "me/bare"
    assert 'model="me/bare"' in hub.files["me/bare"]["main"]["README.md"].decode()
