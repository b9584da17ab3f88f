"""Folders of models that are damaged or come from somebody else: one error of one line, at once, before a push."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForSequenceClassification,
    TextClassificationPipeline,
)

import hf_calib
from hf_calib import InputError
from hf_calib._records import check_record, read_json
from hf_calib.cards import write_card
from hf_calib.export import push_folder, save_folded, standalone_copy
from hf_calib.scaling import TemperatureScaling
from hf_calib.scaling.saved_map import RECORD_KINDS, load_map, save_map
from tests.helpers.commands import assert_refused, call, called_for_json
from tests.helpers.hub_server import TOKEN, Hub
from tests.helpers.tiny import N_LABELS, sequences, text_of, tiny_bert, tokenizer

DIGEST = "0" * 64
METRIC = {"title": "ECE", "value": 0.1, "low": 0.05, "high": 0.2}
REPORT = {
    "about": {"name": "x", "n": 5, "fingerprint": DIGEST},
    "before": {"metrics": {"ece": METRIC}},
    "after": {"metrics": {"ece": METRIC}},
    "n_examples": 5,
    "n_bins": 15,
    "confidence_level": 0.95,
    "verdict": "calibrated",
}
DEEP = "[" * 100_000
WIDE = json.dumps({"a": [[]] * 400_000})


def at_temperature(value: float) -> TemperatureScaling:
    scaler = TemperatureScaling()
    scaler.temperature_ = value
    return scaler


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    plain = standalone_copy(tiny_bert())
    about = {"n_examples": 20, "data": {"calibration": {"name": "x", "n": 20}}}
    save_folded(
        plain,
        at_temperature(1.7),
        folder,
        batch=None,
        processing_class=tokenizer(),
        about=about,
    )
    weights = json.loads((folder / "calibration.json").read_text())["fingerprint"]
    report = {**REPORT, "about": {"name": "x", "n": 5, "fingerprint": weights}}
    (folder / "calibration" / "report.json").write_text(json.dumps(report))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def change(path: Path, *keys: str, value: Any) -> None:
    """Set an entry of a JSON file."""
    record = json.loads(path.read_text())
    inner = record
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(record))


def refused(work: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        work()
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 2_000


OF_CONFIG: list[tuple[str, Any]] = [
    ("folded", "yes"),
    ("folded", 1),
    ("head", "classifier"),
    ("head", [["classifier"]]),
    ("method", 5),
    ("temperature", -1),
    ("temperature", True),
    ("temperature", "1\x1b[2J"),
    ("temperature", [1.5]),
    ("n_examples", -5),
    ("sha256", "ab"),
]


@pytest.mark.parametrize(("key", "value"), OF_CONFIG)
def test_an_impossible_record_in_the_config(
    key: str, value: Any, folder: Path, hub: Hub
) -> None:
    change(folder / "config.json", "calibration", key, value=value)
    refused(
        lambda: hf_calib.pipeline("text-classification", folder), f"valid '{key}', got"
    )
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    refused(lambda: hf_calib.unfold(model), f"valid '{key}', got")
    assert_refused(call("push", folder, "me/model"), "valid 'calibration', got")
    assert not hub.requests


OF_MAP: list[tuple[str, Any]] = [
    ("folded", "no"),
    ("fingerprint", 5),
    ("n_examples", "many"),
    ("n_examples", -1),
    ("split", ["a"]),
    ("data", [1]),
    ("data", {"calibration": "x"}),
    ("data", {"calibration": {"name": 5}}),
    ("metrics", 5),
    ("metrics", {"before": {"ece": "x"}}),
    ("loss_kwargs", 5),
    ("class_names", {"0": "a"}),
    ("base_model", 5),
    ("versions", {"torch": 2}),
    ("vllm_pooler_config", ["</script>"]),
]


@pytest.mark.parametrize(("key", "value"), OF_MAP)
def test_an_impossible_entry_of_the_calibrators_file(
    key: str, value: Any, folder: Path, hub: Hub
) -> None:
    change(folder / "calibration.json", key, value=value)
    refused(lambda: load_map(folder), f"valid '{key}', got")
    assert_refused(call("push", folder, "me/model"), f"valid '{key}', got")
    (folder / "calibration" / "report.json").unlink()
    with pytest.warns(UserWarning, match=f"leaves out .*valid '{key}'"):
        write_card(folder, repo_id="me/x", license="mit")
    assert not hub.requests


def test_a_file_of_another_temperature_than_the_weights(folder: Path, hub: Hub) -> None:
    save_map(at_temperature(9.0), folder)
    words = "of the calibrator in the weights, got .*temperature 9.0.*not as in config"
    refused(lambda: hf_calib.pipeline("text-classification", folder), words)
    assert_refused(call("push", folder, "me/model"), words)
    (folder / "calibration" / "report.json").unlink()
    with pytest.warns(UserWarning, match=words):
        write_card(folder, repo_id="me/x", license="mit")
    assert "9.0" not in (folder / "README.md").read_text()
    (folder / "calibration.json").unlink()
    assert hf_calib.pipeline("text-classification", folder)


def rows_in(path: Path) -> Path:
    """Labelled texts of the tiny model's vocabulary."""
    ids = sequences(tiny_bert(), 40)["input_ids"]
    lines = [f"{text_of(row)},{i % N_LABELS}" for i, row in enumerate(ids)]
    path.write_text("\n".join(["text,label", *lines]))
    return path


def forget_record(folder: Path) -> None:
    """Remove the calibrator's record from the model's config."""
    record = json.loads((folder / "config.json").read_text())
    del record["calibration"]
    (folder / "config.json").write_text(json.dumps(record))


@pytest.mark.parametrize("is_folded", [True, False])
def test_a_calibrator_of_other_weights_is_not_applied(
    is_folded: bool, folder: Path, hub: Hub, tmp_path: Path
) -> None:
    change(folder / "calibration.json", "folded", value=is_folded)
    other = tiny_bert()
    with torch.no_grad():
        other.classifier.bias += 1
    other.save_pretrained(folder)
    words = "calibration.json in .* to be for the weights of the model, got .*; remove"
    data = rows_in(tmp_path / "rows.csv")
    refused(lambda: hf_calib.pipeline("text-classification", folder), words)
    for command in (
        ("evaluate", folder, "--data", data),
        ("decide", folder, "--data", data),
        ("calibrate", folder, "--data", data, "--output", tmp_path / "made"),
        ("push", folder, "me/model"),
        ("push", folder, "me/model", "--no-fold"),
    ):
        assert_refused(call(*command), words)
    assert not hub.requests
    assert not (tmp_path / "made").exists()
    (folder / "calibration.json").unlink()
    plain = hf_calib.pipeline("text-classification", folder)
    assert type(plain) is TextClassificationPipeline


def test_a_calibrator_in_the_weights_is_not_applied_again(
    folder: Path, hub: Hub, tmp_path: Path
) -> None:
    known = hf_calib.pipeline("text-classification", folder)("w1 w2 w3")
    data = rows_in(tmp_path / "rows.csv")
    ece = called_for_json("evaluate", folder, "--data", data)
    forget_record(folder)
    found = hf_calib.pipeline("text-classification", folder)
    assert type(found) is TextClassificationPipeline
    assert found("w1 w2 w3") == known
    assert (
        called_for_json("evaluate", folder, "--data", data)["before"] == ece["before"]
    )
    before = (folder / "model.safetensors").read_bytes()
    assert called_for_json("push", folder, "me/model")["folded"] is True
    assert hub.files["me/model"]["main"]["model.safetensors"] == before


def test_a_fingerprint_in_float32_says_nothing_about_a_model_of_16_bits(
    folder: Path,
) -> None:
    half: Any = {"dtype": torch.bfloat16}
    plain = hf_calib.pipeline("text-classification", folder, **half)
    assert type(plain) is TextClassificationPipeline
    forget_record(folder)
    words = "load the model in float32, or remove"
    refused(lambda: hf_calib.pipeline("text-classification", folder, **half), words)
    change(folder / "calibration.json", "folded", value=False)
    served = hf_calib.pipeline("text-classification", folder, **half)
    assert served.scaler.temperature_ == 1.7


@pytest.mark.parametrize("content", ["{", "5", DEEP])
def test_a_damaged_report_is_not_pushed(content: str, folder: Path, hub: Hub) -> None:
    (folder / "calibration" / "report.json").write_text(content)
    assert_refused(call("push", folder, "me/model"), "report.json to hold a JSON obj")
    assert not hub.requests
    with pytest.warns(UserWarning, match="leaves out report.json"):
        write_card(folder, repo_id="me/x", license="mit")


@pytest.mark.parametrize(
    "content", ["{", "[1]", "", '{"a": "\udcff"}', DEEP, WIDE, '{"auto_map": 5}']
)
def test_a_damaged_config_is_not_pushed(content: str, folder: Path, hub: Hub) -> None:
    path = folder / "config.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert_refused(call("push", folder, "me/model"), r"config.json to .*, got ")
    refused(lambda: push_folder(folder, "me/model", token=TOKEN), "config.json to ")
    assert not hub.requests


@pytest.mark.parametrize(
    "content",
    ["{}", *(json.dumps({**REPORT, key: "x\x1b"}) for key in REPORT)],
)
def test_a_damaged_report_is_left_out_of_the_card(
    content: str, folder: Path, hub: Hub
) -> None:
    (folder / "calibration" / "report.json").write_text(content)
    result = call("push", folder, "me/model")
    assert result.exit_code == 0, result.output
    if '"verdict": "x' not in content:
        assert "leaves out report.json" in result.stderr
    assert "\x1b" not in (folder / "README.md").read_text() + result.output


@pytest.mark.parametrize("weight_map", [[1], 5, {"a": 5}, {"a": "../../x"}])
def test_an_index_of_other_files(weight_map: Any, folder: Path, hub: Hub) -> None:
    (folder / "model.safetensors").unlink()
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    words = "weight_map|hold safetensors weights"
    refused(lambda: push_folder(folder, "me/model", token=TOKEN), words)
    assert not hub.requests


ALIASES = "\n".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]"
    for a, b in zip("abcdefg", "bcdefgh", strict=True)
)
MERGES = "\n".join(
    f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}"
    for a, b in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    "metadata",
    [
        f"a: &a [x]\n{ALIASES}",
        f"a: &a {{x: 1}}\n{MERGES}",
        f"a: {'[' * 3_000}",
        "license: !!python/object/apply:os.getcwd []",
        "tags: 5",
        "model-index: 5",
    ],
)
def test_metadata_of_a_card_are_bounded(metadata: str, folder: Path, hub: Hub) -> None:
    card = folder / "README.md"
    card.write_text(f"---\n{metadata}\n---\n\nMine.")
    words = "expected README.md to have metadata that can be read"
    refused(lambda: write_card(folder), words)
    refused(lambda: push_folder(folder, "me/model", token=TOKEN), words)
    assert card.read_text().endswith("Mine.")
    assert not hub.requests


def test_metadata_of_other_types_are_left_out(folder: Path) -> None:
    card = "---\nbase_model: {a: 1}\ndatasets: 7\n---\n\nMine."
    (folder / "README.md").write_text(card)
    write_card(folder, repo_id="me/x", license="mit")
    assert "Mine." in (folder / "README.md").read_text()


NAMES = st.sampled_from(["n", "name", "ece", "before"])
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
FLAT = LEAF | st.lists(LEAF, max_size=3) | st.dictionaries(NAMES, LEAF)
JSON = FLAT | st.lists(FLAT, max_size=3) | st.dictionaries(NAMES, FLAT)


@given(st.dictionaries(st.sampled_from([key[:-1] for key in RECORD_KINDS]), JSON))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_any_record_is_taken_or_refused_in_words(record: dict[str, Any]) -> None:
    said = ""
    try:
        check_record("the record", record, RECORD_KINDS)
        assert record.get("folded") in (None, True, False)
    except InputError as error:
        said = str(error)
    assert said.isprintable()


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    refused(
        lambda: read_json(path, {}), "at most 16,777,216 bytes, got 1,099,511,627,776"
    )


def test_a_kept_head_of_another_form_is_not_used(folder: Path) -> None:
    head = folder / "calibration" / "head.safetensors"
    content = head.read_bytes()
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    before = model.classifier.weight.clone()
    for damaged in (b"", content[:50], (2**60).to_bytes(8, "little") + b"{}"):
        head.write_bytes(damaged)
        refused(lambda: hf_calib.unfold(model), "the head from before the fold")
        assert torch.equal(model.classifier.weight, before)
    head.write_bytes(content)
    hf_calib.unfold(model)
