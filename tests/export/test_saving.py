"""A saved calibrated model is served by a plain pipeline as softmax(z / T), and has a fingerprint of its weights."""

from __future__ import annotations

import copy
import json
import re
import resource
import shutil
import signal
import tempfile
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from scipy.special import expit, softmax

from hf_calib import CalibrationTrainer
from hf_calib.export import save_folded, standalone_copy
from hf_calib.export.folder import fingerprint, hash_of
from hf_calib.scaling import TemperatureScaling, VectorScaling
from tests.helpers.interrupted_saving import in_a_fork, kill_before
from tests.helpers.tiny import (
    arguments,
    assert_same,
    sequences,
    tagged,
    text_of,
    tiny_bert,
    tiny_trainer,
    tokenizer,
    weights,
)
from tests.helpers.trained import Network, images, images_trainer, lora, served_logits, trained


@pytest.fixture(scope="module")
def shared_trainer(tmp_path_factory: pytest.TempPathFactory) -> CalibrationTrainer:
    """A trained trainer, for tests that only save."""
    return trained(tmp_path_factory.mktemp("shared") / "out")


def record_of(folder: Path) -> dict[str, Any]:
    """What the config says of the map."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["calibration"]
    return found


# ---- Served ----


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, shared_trainer: CalibrationTrainer
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Answers of pipelines, and the probabilities they should be, for models saved in every way."""
    folder = tmp_path_factory.mktemp("served")
    out, lora_model = folder / "out", lora(tiny_bert())
    images, image_request = images_trainer(folder)
    bf16 = trained(out, bf16=True)
    trainers: dict[str, tuple[CalibrationTrainer, Any]] = {
        "sequences": (shared_trainer, softmax),
        "multi-label": (trained(out, tiny_bert(problem_type="multi_label_classification")), expit),
        "multi-label by its labels": (trained(out, multi_label_by_labels(), data=float_labels), expit),
        "lora": (trained(out, lora_model, learning_rate=5e-3), softmax),
        "tuples": (trained(out, tiny_bert(return_dict=False)), softmax),
        "tokens": (trained(out, tiny_bert("Token"), data=tagged), softmax),
        "images": (images, softmax),
        "bf16": (bf16, softmax),
    }
    requests: dict[str, Any] = {"images": image_request}
    wanted: dict[str, np.ndarray] = {}
    for name, (trainer, probabilities) in trainers.items():
        trainer.save_calibrated_model(folder / name)
        rows = trainer.calibration_dataset
        if name == "bf16":  # served in float32, without the autocast of its forward
            plain = standalone_copy(bf16.model)
            with torch.no_grad():
                logits = type(plain).forward(plain, torch.tensor(rows["input_ids"])).logits / bf16.temperature
        else:
            logits = served_logits(trainer)
        wanted[name] = expit(logits) if probabilities is expit else softmax(logits, axis=-1)
        if name != "images":
            task = "token-classification" if name == "tokens" else "text-classification"
            requests[name] = (task, [text_of(ids) for ids in rows["input_ids"]])
    options = {"image-classification": {"top_k": 100}, "text-classification": {"top_k": None}}
    answers = {name: transformers.pipeline(task, str(folder / name))(inputs, **options.get(task, {}))
               for name, (task, inputs) in requests.items()}  # fmt: skip
    return answers, wanted


def multi_label_by_labels() -> Any:
    """A model whose config does not say that it is one for multi-label problems."""
    model = tiny_bert(problem_type="multi_label_classification")
    model.config.problem_type = None
    return model


def float_labels(model: Any, n: int, *, seed: int = 1) -> Any:
    model = copy.deepcopy(model)
    model.config.problem_type = "multi_label_classification"
    return sequences(model, n, seed=seed)


KINDS = [
    "sequences",
    "multi-label",
    "multi-label by its labels",
    "lora",
    "tuples",
    "bf16",
    "tokens",
    "images",
]


@pytest.mark.parametrize("name", KINDS)
def test_a_plain_pipeline_serves_calibrated_probabilities(
    name: str, served: tuple[dict[str, Any], dict[str, np.ndarray]]
) -> None:
    answers, wanted = served[0][name], served[1][name]
    assert len(answers) == len(wanted)
    for answer, probs in zip(answers, wanted, strict=True):
        if name == "tokens":
            scores, best = [word["score"] for word in answer], [word["entity"] for word in answer]
            assert best == [f"LABEL_{label}" for label in probs.argmax(1)]
            np.testing.assert_allclose(scores, probs.max(1), atol=1e-6)
        else:
            scores = [score["score"] for score in sorted(answer, key=lambda score: score["label"])]
            np.testing.assert_allclose(scores, probs, atol=1e-6)


# ---- The directory, and the model in memory ----


def test_the_model_in_memory_stays_as_it_is(shared_trainer: CalibrationTrainer, tmp_path: Path) -> None:
    trainer = shared_trainer
    before, config = weights(trainer.model), trainer.model.config.to_dict()
    modes = [module.training for module in trainer.model.modules()]
    random_state = torch.get_rng_state()
    trainer.save_calibrated_model(tmp_path / "model")
    assert_same(weights(trainer.model), before)
    assert trainer.model.config.to_dict() == config
    assert [module.training for module in trainer.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert trainer.model.config.calibration["folded"] is False

    map_of = {
        "method": "temperature",
        "temperature": trainer.temperature,
        "folded": True,
        "head": ["classifier"],
    }
    fitted_on = {"split": "calibration", "n_examples": 40, "criterion": "nll"}
    assert record_of(tmp_path / "model") == {
        **{"loss": "focal", "loss_kwargs": {"gamma": 3.0}, **fitted_on},
        **map_of,
    }
    # The same weights have the same fingerprint once they are loaded, and others another one.
    saved = json.loads((tmp_path / "model" / "calibration.json").read_text())["fingerprint"]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert fingerprint(loaded) == saved != fingerprint(trainer.model)


def test_saving_twice_and_training_on_are_fine(tmp_path: Path) -> None:
    trainer = trained(tmp_path / "out")
    for name in ("a", "b", "b"):
        trainer.save_calibrated_model(tmp_path / name)
    assert_same(
        load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    )
    first = trainer.temperature
    trainer.train()
    trainer.save_calibrated_model(tmp_path / "b")
    assert record_of(tmp_path / "b")["temperature"] == trainer.temperature != first
    # What was served can be trained further, and is calibrated anew.
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "a")
    assert model.config.calibration["folded"] is True
    again = trained(tmp_path / "out", model)
    again.save_calibrated_model(tmp_path / "again")
    assert record_of(tmp_path / "again")["temperature"] == again.temperature


def test_the_collators_tokenizer_is_saved_where_there_is_no_other(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path / "out")
    trainer.data_collator = transformers.DataCollatorWithPadding(tokenizer())
    trainer.fit_temperature()
    trainer.save_calibrated_model(tmp_path / "model")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert saved("w0 w7 unknown").input_ids == tokenizer()("w0 w7 unknown").input_ids == [5, 12, 1]


def test_an_existing_directory_holds_the_new_model_only(
    shared_trainer: CalibrationTrainer, tmp_path: Path
) -> None:
    """Shards or weights of another form would be loaded instead of the new ones."""
    trainer = shared_trainer
    target = tmp_path / "model"
    trainer.model.save_pretrained(target, max_shard_size="5KB")
    (target / "pytorch_model.bin").write_bytes(b"old")
    (target / "notes.txt").write_text("mine")
    trainer.save_calibrated_model(target)
    names = {path.name for path in target.iterdir()}
    assert {"config.json", "model.safetensors", "notes.txt", "tokenizer.json"} <= names
    assert not [name for name in names if name.startswith(("model-0", "model.safetensors.", "pytorch_"))]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(target)
    ids = torch.tensor(trainer.calibration_dataset["input_ids"])
    np.testing.assert_allclose(
        model(input_ids=ids).logits.detach(), served_logits(trainer), rtol=1e-4, atol=1e-5
    )


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained(tmp_path / "out")
    trainer.save_calibrated_model(tmp_path / "model")

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (tmp_path / "model").rglob("*") if path.is_file()}

    before = files()

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(trainer.processing_class, "save_pretrained", full)
    trainer.fit_calibration_map(VectorScaling())
    for target in (tmp_path / "model", tmp_path / "new" / "model"):
        with pytest.raises(OSError, match="no space left"):
            trainer.save_calibrated_model(target)
    assert files() == before
    assert not list((tmp_path / "new").iterdir())


class Headless(transformers.BertForSequenceClassification):
    """Its logits are not what a linear layer gives."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        outputs = super().forward(input_ids, attention_mask)
        outputs.logits = outputs.logits.tanh()
        return outputs


def fitted(folder: Path, model: Any, data: Any = None) -> CalibrationTrainer:
    """A trainer with a temperature for a model as it is."""
    data = data or sequences(tiny_bert(), 40, seed=2)
    trainer = CalibrationTrainer(model, arguments(folder), calibration_dataset=data)
    trainer.fit_temperature()
    return trainer


def test_what_cannot_be_saved_leaves_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    message = r"expected the calibration map to be fitted, got no map; .*call fit_calibration_map"
    trainers: list[tuple[CalibrationTrainer, type[Exception], str]] = [
        (tiny_trainer(out, temperature_criterion="none"), ValueError, message),
        (
            fitted(out, Headless(tiny_bert().config)),
            ValueError,
            "a linear head whose division divides the logits",
        ),
        (
            fitted(out, Network(), images(30)),
            TypeError,
            "the model to have save_pretrained, got Network; wrap",
        ),
    ]
    for trainer, error, message in trainers:
        with pytest.raises(error, match=message):
            trainer.save_calibrated_model(tmp_path / "model")
        assert not (tmp_path / "model").exists()


# ---- Sources of folding and merging are never overwritten ----


def test_the_folder_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model"
    tiny_bert().save_pretrained(source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    monkeypatch.chdir(tmp_path)
    load = transformers.BertForSequenceClassification.from_pretrained
    trainer, by_name = (fitted(tmp_path / "out", load(name)) for name in (source, "model"))
    adapted = fitted(tmp_path / "out", lora(base := load(source)))
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "elsewhere").mkdir()

    def is_refused(each: CalibrationTrainer, name: str | Path) -> None:
        with pytest.raises(ValueError, match="expected output to be another folder than the model's, got"):
            each.save_calibrated_model(name)
        assert {path.name: path.read_bytes() for path in source.iterdir()} == before

    for name in (source, "model", tmp_path / "link", tmp_path / "out" / ".." / "model"):
        is_refused(trainer, name)
    is_refused(adapted, source)
    base.config._name_or_path = base.name_or_path = ""  # the adapters still say where it came from
    is_refused(adapted, source)
    trainer.save_calibrated_model("another")
    monkeypatch.chdir(tmp_path / "elsewhere")  # after the model was loaded by a name in another folder
    is_refused(by_name, "../model")


def test_the_folder_of_adapters(tmp_path: Path) -> None:
    trainer = fitted(tmp_path / "out", lora(tiny_bert()))
    trainer.save_model(str(tmp_path / "adapters"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "adapters").iterdir()}
    with pytest.raises(ValueError, match=r"expected output to hold no adapters, got .*; merging cannot be"):
        trainer.save_calibrated_model(tmp_path / "adapters")
    assert {path.name: path.read_bytes() for path in (tmp_path / "adapters").iterdir()} == before


def test_a_model_of_ones_own_may_be_saved_in_the_working_directory(
    shared_trainer: CalibrationTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was never loaded has the empty name, which is not that directory."""
    monkeypatch.chdir(tmp_path)
    shared_trainer.save_calibrated_model(".")
    assert (tmp_path / "model.safetensors").exists()


# ---- Interrupted, or on other file systems ----


SCALER = TemperatureScaling(grid=[2.5]).fit([[1.0, 0.0]] * 3, [0, 0, 1])


def save_another(target: Path) -> None:
    save_folded(tiny_bert(seed=1), SCALER, target, batch=None, processing_class=tokenizer())


def state_of(target: Path) -> str:
    """Which model a folder holds: the old one, the new one with its tokenizer, none, or parts of both."""
    try:
        model = transformers.BertForSequenceClassification.from_pretrained(target).eval()
    except OSError:
        return "none"
    folded = (getattr(model.config, "calibration", None) or {}).get("folded", False)
    n_words = len({"tokenizer.json", "tokenizer_config.json"} & {path.name for path in target.iterdir()})
    with torch.no_grad():
        logits, old, new = (each(input_ids=torch.arange(5, 13)[None]).logits
                            for each in (model, tiny_bert().eval(), tiny_bert(seed=1).eval()))  # fmt: skip
    if torch.allclose(logits, old, atol=1e-4) and not folded and n_words == 0:
        return "old"
    return "new" if torch.allclose(logits, new / 2.5, atol=1e-4) and folded and n_words == 2 else "mixture"


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_old_model_or_the_new_one_or_none(tmp_path: Path) -> None:
    """Never folded weights under a config that says they are not, which would be folded twice."""
    tiny_bert().save_pretrained(tmp_path / "old", max_shard_size="5KB")
    states, status = [], signal.SIGKILL.value
    while status:
        target = tmp_path / str(len(states) + 1)
        shutil.copytree(tmp_path / "old", target)
        status, told = in_a_fork(lambda: (kill_before(int(target.name), target), save_another(target)))  # noqa: B023
        assert (status in (0, signal.SIGKILL), told) == (True, "")
        states.append(state_of(target))
        save_another(target)
        assert state_of(target) == "new"
    assert [state for state, _ in groupby(states)] == ["old", "none", "new"]


def test_a_full_disk_leaves_everything_as_it_was_and_one_clear_line(tmp_path: Path) -> None:
    line = r"InputOSError: expected output to be writable, got \S+ \(File too large\); make room there, or name .*"
    tiny_bert().save_pretrained(tmp_path / "old")
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}

    def save_on_a_full_disk(size: int, target: Path) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        save_another(target)

    for size in (
        0,
        1_000,
        10_000,
    ):  # bytes; the weights are about 18,000, most of the other files are smaller
        for name in ("old", "new"):
            _, told = in_a_fork(partial(save_on_a_full_disk, size, tmp_path / name))
            assert re.fullmatch(line, told)
            assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before
            assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_an_existing_directory_may_be_on_another_file_system(
    shared_trainer: CalibrationTrainer, tmp_path: Path
) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    with tempfile.TemporaryDirectory(dir=other) as mount:
        (tmp_path / "model").symlink_to(mount)
        shared_trainer.save_calibrated_model(tmp_path / "model")
        assert {"config.json", "model.safetensors"} <= {path.name for path in Path(mount).iterdir()}
        assert not list(Path(mount).glob("_*"))


def test_weights_are_saved_in_float32_whatever_they_were_trained_in(tmp_path: Path) -> None:
    trainer = fitted(tmp_path / "out", tiny_bert().bfloat16())
    trainer.save_calibrated_model(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float32"
    head = trainer.model.classifier.weight.detach()
    assert head.dtype == torch.bfloat16
    wanted = head.float() / trainer.temperature
    torch.testing.assert_close(saved["classifier.weight"], wanted, rtol=1e-6, atol=0)


# ---- Fingerprints ----


@pytest.mark.parametrize("change", ["a value", "a dtype", "a shape", "two names"])
def test_any_change_of_the_weights_shows(change: str) -> None:
    model = tiny_bert()
    before, head = fingerprint(model), model.classifier
    with torch.no_grad():
        if change == "a value":
            head.bias[0] = torch.nextafter(head.bias[0], torch.tensor(1.0))
        elif change == "a dtype":
            head.half()
        elif change == "a shape":
            head.weight = torch.nn.Parameter(head.weight.T)
        else:
            query = model.bert.encoder.layer[0].attention.self.query
            query.bias, head.bias = head.bias, query.bias
    assert fingerprint(model) != before


def test_a_fingerprint_is_the_same_in_every_version_and_in_any_order() -> None:
    tensors = {"a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3)}
    tensors |= {"b": torch.tensor([1.0], dtype=torch.bfloat16), "n": torch.tensor(2)}
    content = b"a.weight torch.float32 (2, 3)\n" + tensors["a.weight"].numpy().tobytes()
    content += b"b torch.bfloat16 (1,)\n\x80\x3f" + b"n torch.int64 ()\n\x02" + bytes(7)
    found = {hash_of(tensors), hash_of(dict(reversed(tensors.items())))}
    assert found == {sha256(content).hexdigest()}
