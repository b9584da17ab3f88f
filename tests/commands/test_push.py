"""`hf-calib push`: what arrives is calibrated wherever it is loaded, or the folder is refused with a way out."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import transformers

from hf_calib.decisions import CostRule, Decisions
from hf_calib.decisions.saved import calibrator_of
from hf_calib.export import save_folded
from hf_calib.models.weights import fingerprint
from hf_calib.scaling import IsotonicScaling, TemperatureScaling
from hf_calib.scaling.saved_map import save_map
from tests.helpers import commands
from tests.helpers.hub_server import TOKEN, Hub
from tests.helpers.reports import few_resamples, no_figures
from tests.helpers.tiny import sequences, tagged, text_of, tiny_bert, tokenizer
from tests.helpers.trained import lora, trained

SCALER = TemperatureScaling(grid=[2.5]).fit([[1.0, 0.0]] * 3, [0, 0, 1])
RULE = Decisions(CostRule(1 - np.eye(4)), tuple(f"LABEL_{i}" for i in range(4)))


call, called_for_json = (
    partial(commands.call, "push"),
    partial(commands.called_for_json, "push"),
)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_of_texts_and_tokens_the_calibrated_model_arrives(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the output folders of trainings: the weights are those of save_calibrated_model."""
    few_resamples(monkeypatch)
    no_figures(monkeypatch)
    words, tags = (
        trained(tmp_path / "words"),
        trained(tmp_path / "tags", tiny_bert("Token"), data=tagged),
    )
    for trainer, name, task in (
        (words, "words", "text-classification"),
        (tags, "tags", "token-classification"),
    ):
        trainer.save_model()
        if name == "words":
            trainer.create_model_card()  # whose report is on the folded model, too
        folder = Path(trainer.args.output_dir)
        before = contents(folder)
        pushed = called_for_json(folder, f"me/{name}")
        assert (contents(folder), pushed["folded"]) == (before, True)
        assert f'classify = pipeline("{task}", model="me/{name}"' in pushed["usage"][1]
        trainer.save_calibrated_model(tmp_path / f"local {name}")
        weights = (tmp_path / f"local {name}" / "model.safetensors").read_bytes()
        assert hub.files[f"me/{name}"]["main"]["model.safetensors"] == weights
    assert (
        "Below each number is its 95% interval"
        in hub.files["me/words"]["main"]["README.md"].decode()
    )


@pytest.fixture
def folded(tmp_path: Path) -> Path:
    save_folded(
        tiny_bert(),
        SCALER,
        tmp_path / "folded",
        batch=None,
        processing_class=tokenizer(),
    )
    return tmp_path / "folded"


@pytest.fixture
def unfolded(tmp_path: Path, folded: Path) -> Path:
    """The output of a training: the model as trained, its map, and a pickle."""
    folder = tmp_path / "unfolded"
    shutil.copytree(folded, folder)
    tiny_bert().save_pretrained(folder)
    save_map(SCALER, folder, {"folded": False})
    torch.save({}, folder / "training_args.bin")
    return folder


def test_what_a_user_reads(folded: Path, hub: Hub) -> None:
    hub.files["me/model"] = {"main": {"pytorch_model.bin": b"old"}}
    torch.save({}, folded / "other.pt")
    result = call(folded, "me/model")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert said.startswith(
        "Pushed 7 files to me/model: README.md, calibration.json, calibration/head.safetensors"
    )
    assert (
        f"Commit: {hub.address}/me/model/commit/{hub.head('me/model', 'main')}\n"
        in result.stdout
    )
    assert result.stdout.endswith(
        'from transformers import pipeline\nclassify = pipeline("text-classification", model="me/model", '
        'top_k=None)\nprint(classify("a text"))\n'
    )
    assert (
        "warning: pytorch_model.bin in me/model would be loaded in place of the pushed weights"
        in result.stderr
    )
    assert (
        "warning: other.pt can run code when loaded, and will not be pushed"
        in result.stderr
    )
    assert TOKEN not in result.output
    assert call(folded, "me/model").stdout.startswith(
        "Nothing is new, so no commit was made: me/model has"
    )


def test_no_fold_pushes_what_lies_there(unfolded: Path, hub: Hub) -> None:
    weights = (unfolded / "model.safetensors").read_bytes()
    pushed = called_for_json(unfolded, "me/model", "--no-fold")
    assert hub.files["me/model"]["main"]["model.safetensors"] == weights
    assert pushed["folded"] is False
    assert "The calibrator is not in the weights" in pushed["notes"][0]
    called_for_json(unfolded, "me/model")
    assert hub.files["me/model"]["main"]["model.safetensors"] != weights
    (unfolded / "calibration.json").unlink()
    pushed = called_for_json(unfolded, "me/model", "--no-fold")
    assert (
        "holds no calibration.json. The pushed model is not calibrated."
        in pushed["notes"][0]
    )
    # It was of the weights before.
    assert "calibration.json" not in hub.files["me/model"]["main"]


def test_a_map_that_does_not_fold_is_pushed_beside_the_model(
    unfolded: Path, hub: Hub
) -> None:
    logits = np.random.default_rng(0).normal(size=(60, 4))
    IsotonicScaling().fit(logits, logits.argmax(axis=1)).save_pretrained(unfolded)
    pushed = called_for_json(unfolded, "me/model")
    assert pushed["notes"] == [
        "isotonic scaling does not fold into the head. A plain transformers pipeline is not calibrated; "
        "hf_calib.pipeline is."
    ]
    assert pushed["usage"][0] == "from hf_calib import pipeline"
    assert "calibration.json" in hub.files["me/model"]["main"]


def test_a_rule_for_other_weights_stays_here(unfolded: Path, hub: Hub) -> None:
    RULE.save(unfolded)
    pushed = called_for_json(unfolded, "me/model")
    assert any(
        note.startswith("decisions.json is left out: its rule")
        for note in pushed["notes"]
    )
    assert "decisions.json" not in hub.files["me/model"]["main"]
    assert (unfolded / "decisions.json").is_file()


def test_a_rule_for_the_calibrator_is_pushed_with_the_folded_model(
    unfolded: Path, hub: Hub
) -> None:
    scaler = TemperatureScaling(grid=[2.5]).fit(np.eye(4), [0, 1, 2, 0])
    save_map(scaler, unfolded)
    own = {"fingerprint": fingerprint(tiny_bert())}
    rule = replace(RULE, **own, calibrator=calibrator_of(unfolded))
    rule.save(unfolded)
    pushed = called_for_json(unfolded, "me/model")
    assert pushed["folded"]
    assert not any("decisions.json" in note for note in pushed["notes"])
    arrived = json.loads(hub.files["me/model"]["main"]["decisions.json"])
    assert arrived["calibrator"] is None
    assert arrived["fingerprint"] != rule.fingerprint
    card = hub.files["me/model"]["main"]["README.md"].decode()
    assert "A decision rule comes with the model" in card


def adapters(folder: Path) -> None:
    lora(tiny_bert()).save_pretrained(folder)


def changed(folder: Path, **entries: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))


def no_head(folder: Path) -> None:
    transformers.BertModel(tiny_bert().config).save_pretrained(folder)
    changed(folder, architectures=["BertForSequenceClassification"])


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no map": (
        lambda folder: (folder / "calibration.json").unlink(),
        r"hold a calibrated model, got no calibration.json; calibrate it first \(hf-calib calibrate\), or",
    ),
    "adapters": (
        adapters,
        r"hold a whole model, got adapters; merge them \(save_calibrated_model",
    ),
    "its own code": (
        lambda folder: changed(folder, auto_map={"AutoModel": "a.B"}),
        "hold a classifier .*got code of its own; save it with fold",
    ),
    "no head": (no_head, "be a fine-tuned classifier, got no classifier.bias"),
}


@pytest.mark.parametrize("spoil", REFUSED)
def test_folders_that_are_refused_before_anything_is_sent(
    spoil: str, unfolded: Path, hub: Hub
) -> None:
    change, message = REFUSED[spoil]
    change(unfolded)
    before = contents(unfolded)
    result = call(unfolded, "me/model")
    assert result.exit_code == 2, result.output
    (line,) = [
        line
        for line in result.stderr.splitlines()
        if line.startswith("hf-calib: expected")
    ]
    assert re.search(message, line), line
    assert hub.requests == []
    assert contents(unfolded) == before


def test_a_rule_of_weights_that_were_trained_since_stays_here(
    unfolded: Path, hub: Hub
) -> None:
    """The calibrator's file names no weights, so that only the rule's fingerprint tells."""
    own = {"fingerprint": "0" * 64, "calibrator": calibrator_of(unfolded)}
    replace(RULE, **own).save(unfolded)
    pushed = called_for_json(unfolded, "me/model")
    assert any(note.startswith("decisions.json is left") for note in pushed["notes"])
    assert "decisions.json" not in hub.files["me/model"]["main"]


def test_a_rule_of_an_earlier_model_leaves_the_repository(
    unfolded: Path, hub: Hub
) -> None:
    there = ("decisions.json", "decisions/report.json", "decisions/notes.txt")
    hub.files["me/model"] = {"main": dict.fromkeys(there, b"{}")}
    (unfolded / "calibration.json").unlink()
    result = call(unfolded, "me/model", "--no-fold")
    assert "a rule for other probabilities, which will be removed" in result.stderr
    left = {*there} & {*hub.files["me/model"]["main"]}
    assert left == {"decisions/notes.txt"}


def test_a_folded_model_that_was_trained_since_is_refused(
    folded: Path, hub: Hub
) -> None:
    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folded)
    with torch.no_grad():
        model.classifier.weight.mul_(2)
    model.save_pretrained(folded)
    result = call(folded, "me/model")
    assert "the calibrator to be that of the model, got that of other" in result.stderr
    assert hub.requests == []


def test_a_map_that_does_not_fold_beside_folded_weights(folded: Path, hub: Hub) -> None:
    logits = np.random.default_rng(0).normal(size=(60, 4))
    IsotonicScaling().fit(logits, logits.argmax(axis=1)).save_pretrained(folded)
    pushed = called_for_json(folded, "me/model")
    assert "isotonic scaling does not fold into the head" in pushed["notes"][0]
    assert pushed["usage"][0] == "from hf_calib import pipeline"
    assert pushed["folded"] is False
    card = hub.files["me/model"]["main"]["README.md"].decode()
    assert "The calibrator is not in the weights" in card


@pytest.mark.parametrize("name", ["config.json", "calibration/report.json"])
@pytest.mark.parametrize("content", ["{", "[]", '"text"', "[" * 100_000, "\x00"])
def test_a_damaged_file_is_one_line(
    name: str, content: str, unfolded: Path, hub: Hub
) -> None:
    path = unfolded / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    result = call(unfolded, "me/model")
    commands.assert_refused(result, f"{name} to hold a JSON object, got")
    assert not hub.files


def test_a_calibrator_beside_a_model_on_the_hub_is_used(
    unfolded: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_resamples(monkeypatch)
    no_figures(monkeypatch)
    rows = sequences(tiny_bert(), 60)
    texts = [text_of(ids) for ids in rows["input_ids"]]
    table = pandas.DataFrame({"text": texts, "label": rows["label"]})
    table.to_csv(tmp_path / "rows.csv", index=False)
    logits = np.random.default_rng(0).normal(size=(60, 4))
    IsotonicScaling().fit(logits, rows["label"]).save_pretrained(unfolded)
    assert call(unfolded, "me/model", "--no-fold").exit_code == 0
    data = ("--data", tmp_path / "rows.csv")
    found = commands.called_for_json("evaluate", "me/model", *data)
    local = commands.called_for_json("evaluate", unfolded, *data)
    assert found["after"] is not None
    assert found["after"] == local["after"]
    out = ("--output", tmp_path / "out")
    result = commands.call("decide", "me/model", *data, "--alpha", 0.2, *out)
    assert "with the isotonic scaling next to it" in result.stderr
    record = json.loads((tmp_path / "out" / "decisions.json").read_text())
    assert record["calibrator"] == calibrator_of(unfolded)
