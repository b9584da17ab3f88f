"""A saved calibrated model is served by a plain pipeline as softmax(z / T), and has a fingerprint of its weights."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy.special import expit, softmax
from transformers import TextClassificationPipeline

from hf_calib import CalibrationTrainer, pipeline, unfold
from hf_calib._files import whole_folder
from hf_calib.export import save_folded, standalone_copy
from hf_calib.export.folder import replace_model
from hf_calib.models.weights import fingerprint, hash_of
from hf_calib.scaling import TemperatureScaling
from tests.helpers.commands import assert_refused, call
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
from tests.helpers.trained import (
    Network,
    images,
    images_trainer,
    lora,
    served_logits,
    trained,
)


@pytest.fixture(scope="module")
def shared_trainer(tmp_path_factory: pytest.TempPathFactory) -> CalibrationTrainer:
    """A trained trainer, for tests that only save."""
    return trained(tmp_path_factory.mktemp("shared") / "out")


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
        "multi-label": (
            trained(out, tiny_bert(problem_type="multi_label_classification")),
            expit,
        ),
        "lora": (trained(out, lora_model, learning_rate=5e-3), softmax),
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
                logits = (
                    type(plain).forward(plain, torch.tensor(rows["input_ids"])).logits
                    / bf16.temperature
                )
        else:
            logits = served_logits(trainer)
        wanted[name] = (
            expit(logits) if probabilities is expit else softmax(logits, axis=-1)
        )
        if name != "images":
            task = "token-classification" if name == "tokens" else "text-classification"
            requests[name] = (task, [text_of(ids) for ids in rows["input_ids"]])
    options = {
        "image-classification": {"top_k": 100},
        "text-classification": {"top_k": None},
    }
    answers = {name: transformers.pipeline(task, str(folder / name))(inputs, **options.get(task, {}))
               for name, (task, inputs) in requests.items()}  # fmt: skip
    return answers, wanted


KINDS = ["sequences", "multi-label", "lora", "bf16", "tokens", "images"]


@pytest.mark.parametrize("name", KINDS)
def test_a_plain_pipeline_serves_calibrated_probabilities(
    name: str, served: tuple[dict[str, Any], dict[str, np.ndarray]]
) -> None:
    answers, wanted = served[0][name], served[1][name]
    assert len(answers) == len(wanted)
    for answer, probs in zip(answers, wanted, strict=True):
        if name == "tokens":
            scores, best = (
                [word["score"] for word in answer],
                [word["entity"] for word in answer],
            )
            assert best == [f"LABEL_{label}" for label in probs.argmax(1)]
            np.testing.assert_allclose(scores, probs.max(1), atol=1e-6)
        else:
            scores = [
                score["score"]
                for score in sorted(answer, key=lambda score: score["label"])
            ]
            np.testing.assert_allclose(scores, probs, atol=1e-6)


# ---- The directory, and the model in memory ----


def test_the_model_in_memory_stays_as_it_is(
    shared_trainer: CalibrationTrainer, tmp_path: Path
) -> None:
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

    record = json.loads((tmp_path / "model" / "config.json").read_text())["calibration"]
    assert record == {
        **{
            "loss": "focal",
            "loss_kwargs": {"gamma": 3.0},
            "criterion": "nll",
            "folded": True,
        },
        **{
            "split": "calibration",
            "n_examples": 40,
            "method": "temperature",
            "head": ["classifier"],
        },
        "temperature": trainer.temperature,
    }
    # The same weights have the same fingerprint once they are loaded, and others another one.
    saved = json.loads((tmp_path / "model" / "calibration.json").read_text())[
        "fingerprint"
    ]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model"
    )
    assert fingerprint(loaded) == saved != fingerprint(trainer.model)


def test_an_existing_directory_holds_the_new_model_only(
    shared_trainer: CalibrationTrainer, tmp_path: Path
) -> None:
    """Shards or weights of another form would be loaded instead of the new ones."""
    target = tmp_path / "model"
    shared_trainer.model.save_pretrained(target, max_shard_size="5KB")
    (target / "pytorch_model.bin").write_bytes(b"old")
    (target / "notes.txt").write_text("mine")
    shared_trainer.save_calibrated_model(target)
    names = {path.name for path in target.iterdir()}
    assert {"config.json", "model.safetensors", "notes.txt", "tokenizer.json"} <= names
    assert not [
        name
        for name in names
        if name.startswith(("model-0", "model.safetensors.", "pytorch_"))
    ]


def fitted(folder: Path, model: Any, data: Any = None) -> CalibrationTrainer:
    """A trainer with a temperature for a model as it is."""
    data = data or sequences(tiny_bert(), 40, seed=2)
    trainer = CalibrationTrainer(model, arguments(folder), calibration_dataset=data)
    trainer.fit_temperature()
    return trainer


def test_a_plain_model_over_a_calibrated_one_has_no_calibrator(tmp_path: Path) -> None:
    scaler = TemperatureScaling()
    scaler.temperature_ = 1.7
    out = tmp_path / "out"
    plain = standalone_copy(tiny_bert())
    save_folded(plain, scaler, out, batch=None, processing_class=tokenizer())
    (out / "notes.txt").write_text("mine")
    (out / "decisions.json").write_text("{}")
    (out / "decisions" / "figures").mkdir(parents=True)
    (out / "decisions" / "report.json").write_text("{}")
    (out / "decisions" / "report.md").write_text("![rule](figures/rule.png)")
    (out / "decisions" / "figures" / "rule.png").write_text("")
    with whole_folder(out, replace_model) as made:
        tiny_bert(seed=1).save_pretrained(made)
    assert not (out / "decisions.json").exists()
    assert not (out / "decisions").exists()
    assert not (out / "calibration.json").exists()
    assert not (out / "calibration" / "head.safetensors").exists()
    assert (out / "notes.txt").read_text() == "mine"
    assert type(pipeline("text-classification", out)) is TextClassificationPipeline


def test_files_are_not_written_through_links(tmp_path: Path) -> None:
    """What a link in the folder names belongs to others, such as another model or a cache."""
    scaler = TemperatureScaling()
    scaler.temperature_ = 1.7
    out, others = tmp_path / "out", tmp_path / "others"
    names = ("model.safetensors", "config.json", "calibration.json", "tokenizer.json")
    for folder in (out, others):
        folder.mkdir()
    for name in names:
        (others / name).write_text("theirs")
        (out / name).symlink_to(others / name)
    (others / "calibration").mkdir()
    plain = standalone_copy(tiny_bert())
    save_folded(plain, scaler, out, batch=None, processing_class=tokenizer())
    assert [(others / name).read_text() for name in names] == ["theirs"] * len(names)
    assert not any((out / name).is_symlink() for name in names)
    shutil.rmtree(out / "calibration")
    (out / "calibration").symlink_to(others / "calibration")
    with pytest.raises(ValueError, match="to be a folder of its own, got a link to"):
        save_folded(
            standalone_copy(tiny_bert()),
            scaler,
            out,
            batch=None,
            processing_class=None,
        )
    assert not list((others / "calibration").iterdir())


def test_a_folder_that_was_moved_is_the_same_model(tmp_path: Path) -> None:
    scaler = TemperatureScaling()
    scaler.temperature_ = 1.7
    model = tiny_bert()
    out = tmp_path / "out"
    save_folded(
        standalone_copy(model), scaler, out, batch=None, processing_class=tokenizer()
    )
    moved = (tmp_path / "elsewhere" / "model").absolute()
    moved.parent.mkdir()
    out.rename(moved)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(moved)
    assert unfold(loaded).classifier.weight.equal(model.classifier.weight)
    assert pipeline("text-classification", moved)("w1 w2")


def test_what_cannot_be_saved_leaves_no_folder(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path / "out", temperature_criterion="none")
    message = r"expected a calibrator to be fitted, got none configured; .*call fit_calibration_map"
    with pytest.raises(ValueError, match=message):
        trainer.save_calibrated_model(tmp_path / "model")
    with pytest.raises(
        TypeError, match="the model to have save_pretrained, got Network; wrap"
    ):
        fitted(tmp_path / "out", Network(), images(30)).save_calibrated_model(
            tmp_path / "model"
        )
    assert not (tmp_path / "model").exists()


def test_sources_of_folding_and_merging_are_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "model"
    tiny_bert().save_pretrained(source)
    monkeypatch.chdir(tmp_path)
    trainer = fitted(
        tmp_path / "out",
        transformers.BertForSequenceClassification.from_pretrained("model"),
    )
    adapted = fitted(tmp_path / "out", lora(tiny_bert()))
    adapted.save_model(str(tmp_path / "adapters"))
    (tmp_path / "link").symlink_to(source)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in (source, "model", tmp_path / "link", tmp_path / "out" / ".." / "model"):
        with pytest.raises(
            ValueError,
            match="expected output to be another folder than the model's, got",
        ):
            trainer.save_calibrated_model(name)
    with pytest.raises(
        ValueError,
        match=r"expected output to hold no adapters, got .*; merging cannot be",
    ):
        adapted.save_calibrated_model(tmp_path / "adapters")
    assert {
        path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    } == before


# ---- Interrupted, or on other file systems ----


SCALER = TemperatureScaling(grid=[2.5]).fit([[1.0, 0.0]] * 3, [0, 0, 1])


@pytest.mark.parametrize(
    ("name", "file"),
    [("checkpoint-4", "trainer_state.json"), ("of another loop", "optimizer.pt")],
)
def test_a_checkpoint_of_a_training_is_not_replaced(
    name: str, file: str, shared_trainer: CalibrationTrainer, tmp_path: Path
) -> None:
    """Training would be resumed from weights with a calibrator in them."""
    checkpoint = tmp_path / name
    checkpoint.mkdir()
    (checkpoint / file).write_text("{}")
    (tmp_path / "link").symlink_to(checkpoint)
    plain = standalone_copy(shared_trainer.model)
    message = "output to be no checkpoint of a training, got .*; name a new folder"
    for place in (checkpoint, str(checkpoint), tmp_path / "link"):
        with pytest.raises(ValueError, match=message):
            shared_trainer.save_calibrated_model(place)
        with pytest.raises(ValueError, match=message):
            save_folded(
                plain,
                shared_trainer.calibration_map,
                place,
                batch=None,
                processing_class=None,
            )
        refused = call("unfold", tmp_path / "any model", place)
        assert_refused(refused, "output to be no checkpoint of a training, got")
    assert [path.name for path in checkpoint.iterdir()] == [file]


def save_another(target: Path) -> None:
    save_folded(
        tiny_bert(seed=1), SCALER, target, batch=None, processing_class=tokenizer()
    )


def state_of(target: Path) -> str:
    """Which model a folder holds: the old one, the new one with its tokenizer, none, or parts of both."""
    try:
        model = transformers.BertForSequenceClassification.from_pretrained(
            target
        ).eval()
    except OSError:
        return "none"
    folded = (getattr(model.config, "calibration", None) or {}).get("folded", False)
    n_words = len(
        {"tokenizer.json", "tokenizer_config.json"}
        & {path.name for path in target.iterdir()}
    )
    with torch.no_grad():
        logits, old, new = (each(input_ids=torch.arange(5, 13)[None]).logits
                            for each in (model, tiny_bert().eval(), tiny_bert(seed=1).eval()))  # fmt: skip
    if torch.allclose(logits, old, atol=1e-4) and not folded and n_words == 0:
        return "old"
    return (
        "new"
        if torch.allclose(logits, new / 2.5, atol=1e-4) and folded and n_words == 2
        else "mixture"
    )


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_old_model_or_the_new_one_or_none(
    tmp_path: Path,
) -> None:
    """Never folded weights under a config that says they are not, which would be folded twice."""
    tiny_bert().save_pretrained(tmp_path / "old", max_shard_size="5KB")
    states, status = [], signal.SIGKILL.value
    while status:
        target = tmp_path / str(len(states) + 1)
        shutil.copytree(tmp_path / "old", target)
        status, told = in_a_fork(
            lambda: (kill_before(int(target.name), target), save_another(target))  # noqa: B023
        )
        assert (status in (0, signal.SIGKILL), told) == (True, "")
        states.append(state_of(target))
        save_another(target)
        assert state_of(target) == "new"
    assert [state for state, _ in groupby(states)] == ["old", "none", "new"]


def test_a_full_disk_leaves_everything_as_it_was_and_one_clear_line(
    tmp_path: Path,
) -> None:
    line = r"InputOSError: expected output to be writable, got \S+ \(File too large\); make room there, or name .*"
    tiny_bert().save_pretrained(tmp_path / "old")
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}

    def save_on_a_full_disk(size: int, target: Path) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        save_another(target)

    for size in (
        0,
        10_000,
    ):  # bytes; the weights are about 18,000, most of the other files are smaller
        for name in ("old", "new"):
            _, told = in_a_fork(partial(save_on_a_full_disk, size, tmp_path / name))
            assert re.fullmatch(line, told)
            assert {
                path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()
            } == before
            assert [path.name for path in tmp_path.iterdir()] == ["old"]


# ---- Fingerprints ----


def test_a_fingerprint_is_the_same_in_every_version_and_in_any_order() -> None:
    tensors = {"a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3)}
    tensors |= {"b": torch.tensor([1.0], dtype=torch.bfloat16), "n": torch.tensor(2)}
    content = b"a.weight torch.float32 (2, 3)\n" + tensors["a.weight"].numpy().tobytes()
    content += b"b torch.bfloat16 (1,)\n\x80\x3f" + b"n torch.int64 ()\n\x02" + bytes(7)
    found = {hash_of(tensors), hash_of(dict(reversed(tensors.items())))}
    assert found == {sha256(content).hexdigest()}
