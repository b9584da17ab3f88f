"""Every map that folds is fitted, logged, recorded, saved and restored as the temperature is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AutoModelForSequenceClassification,
    TrainerCallback,
    pipeline,
)

import hf_calib
from hf_calib import (
    CalibrationMapCallback,
    CalibrationTrainer,
    TemperatureScalingCallback,
)
from hf_calib.metrics import brier_score, negative_log_likelihood
from hf_calib.models.weights import fingerprint
from hf_calib.scaling import (
    FOLDABLE_SCALERS,
    IsotonicScaling,
    MatrixScaling,
    PerLabelTemperatureScaling,
    TemperatureScaling,
    VectorScaling,
    load_map,
)
from hf_calib.scaling.saved_map import MAP_NAME, config_record
from hf_calib.trainer.calibration_map import map_of_checkpoint
from hf_calib.trainer.config import CALIBRATION_METHODS
from hf_calib.trainer.evaluation import on_device
from tests.helpers.tiny import (
    N_LABELS,
    TEXT,
    arguments,
    assert_same,
    last_evaluation,
    logged,
    sequences,
    tagged,
    text_of,
    tiny_bert,
    tiny_trainer,
    tokenizer,
)
from tests.helpers.trained import lora, trained

MULTI_LABEL = {"problem_type": "multi_label_classification"}


def kinds(method: str) -> list[bool]:
    """Whether the problem is multi-label, for each that the method takes."""
    scaler = FOLDABLE_SCALERS[method].load()()
    return (
        [False, True] if "multi_label" in scaler.get_params() else [scaler.multi_label]
    )


CASES = [
    (method, multi_label)
    for method in CALIBRATION_METHODS[:-1]
    for multi_label in kinds(method)
]


def same_map(ours: Any, theirs: Any) -> bool:
    """Bit for bit, and of one class with the same settings."""
    numbers = [
        (s.affine_map().weight.tolist(), np.asarray(s.affine_map().bias).tolist())
        for s in (ours, theirs)
    ]
    return (
        type(ours) is type(theirs)
        and numbers[0] == numbers[1]
        and ours.get_params() == theirs.get_params()
    )


def nll(probs: np.ndarray, labels: np.ndarray) -> float:
    if labels.ndim == 2:
        return float(-np.mean(np.where(labels == 1, np.log(probs), np.log1p(-probs))))
    return negative_log_likelihood(probs, labels)


@pytest.mark.filterwarnings("ignore:.*data do not determine:UserWarning")
@pytest.mark.parametrize(
    ("method", "multi_label"),
    [
        case
        if case[0] in ("temperature", "matrix", "per_label_temperature")
        else pytest.param(*case, marks=pytest.mark.slow)
        for case in CASES
    ],
)
def test_from_training_to_a_plain_pipeline(
    method: str, multi_label: bool, tmp_path: Path
) -> None:
    model = tiny_bert(**(MULTI_LABEL if multi_label else {}))
    settings = {"calibration_method": method, "num_train_epochs": 2}
    teacher = tiny_bert(**(MULTI_LABEL if multi_label else {}))
    trainer = CalibrationTrainer(
        model,
        arguments(tmp_path / "out", **settings),
        train_dataset=sequences(teacher, 8),
        calibration_dataset=sequences(teacher, 200, seed=2),
        eval_dataset=sequences(teacher, 24, seed=3),
        processing_class=tokenizer(),
    )
    trainer.train()
    scaler = trainer.calibration_map
    assert type(scaler).__name__ == FOLDABLE_SCALERS[method].name
    record = trainer.model.config.calibration
    assert {
        key: record[key] for key in ("method", "split", "n_examples", "folded")
    } == {
        "method": method,
        "split": "calibration",
        "n_examples": 200,
        "folded": False,
    }
    assert config_record(scaler).items() <= record.items()

    found = trainer.predict(trainer.eval_dataset)
    probs = scaler.predict_proba(found.predictions.astype(np.float64))
    last = last_evaluation(trainer)
    assert last["eval_nll_calibrated"] == pytest.approx(
        nll(probs, found.label_ids), rel=1e-5
    )
    if not multi_label:
        assert last["eval_brier_calibrated"] == pytest.approx(
            brier_score(probs, found.label_ids), rel=1e-5
        )
    assert last.get("temperature") == trainer.temperature
    if method == "temperature":
        assert trainer.temperature == scaler.temperature_
    if method in ("vector", "matrix", "per_label_temperature"):
        assert trainer.temperature is None

    trainer.save_calibrated_model(tmp_path / "calibrated")
    saved = load_map(tmp_path / "calibrated")
    assert same_map(saved.scaler, scaler)
    beside = {
        "class_names",
        "data",
        "fingerprint",
        "metrics",
    }  # what the config does without
    assert beside <= saved.about.keys()
    told = {key: value for key, value in saved.about.items() if key not in beside}
    assert {**told, "method": method, "folded": False}.items() <= {
        **record,
        "head": ["classifier"],
    }.items()
    assert (saved.about["folded"], saved.about["head"]) == (True, ["classifier"])
    texts = [text_of(ids) for ids in trainer.eval_dataset["input_ids"]]
    served = pipeline(
        "text-classification", str(tmp_path / "calibrated"), top_k=None, device="cpu"
    )(texts)
    ordered = [sorted(scores, key=lambda score: score["label"]) for scores in served]
    np.testing.assert_allclose(
        [[s["score"] for s in scores] for scores in ordered], probs, atol=1e-5
    )


def test_the_map_comes_with_every_save_and_goes_with_the_next_training(
    tmp_path: Path,
) -> None:
    settings = {
        "calibration_strategy": "evaluate",
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    trainer = tiny_trainer(
        tmp_path,
        calibration_method="matrix",
        save_strategy="steps",
        save_steps=2,
        **settings,
    )
    trainer.train()
    assert not (tmp_path / "checkpoint-2" / MAP_NAME).exists()  # nothing is fitted yet
    assert (tmp_path / "checkpoint-4" / MAP_NAME).exists()
    trainer.save_model()
    saved = load_map(tmp_path)
    assert same_map(saved.scaler, trainer.calibration_map)
    assert saved.about == {
        "split": "calibration",
        "n_examples": 40,
        "loss": "cross_entropy",
        "loss_kwargs": {},
        "folded": False,
        "data": {"train": {"n": 16}, "calibration": {"split": "calibration", "n": 40}},
        "class_names": [f"LABEL_{i}" for i in range(4)],
        "fingerprint": fingerprint(trainer.model),
    }
    trainer.args.calibration_method = "none"
    trainer.args.calibration_strategy = "end"
    trainer.train()
    assert trainer.calibration_map is None
    trainer.save_model()
    assert not (tmp_path / MAP_NAME).exists()


@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_the_map_of_a_saved_model_is_not_applied_to_other_weights(
    kind: str, tmp_path: Path
) -> None:
    model = tiny_bert(kind)
    rows = (tagged if kind == "Token" else sequences)(model, 40, seed=2)
    trainer = CalibrationTrainer(
        model,
        arguments(tmp_path / "out"),
        calibration_dataset=rows,
        processing_class=tokenizer(),
    )
    trainer.fit_temperature()
    trainer.save_model(str(tmp_path))
    task = "token-classification" if kind == "Token" else "text-classification"
    assert hf_calib.pipeline(task, str(tmp_path)).scaler is not None
    tiny_bert(kind, seed=5).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"calibration.json in .* of other weights"):
        hf_calib.pipeline(task, str(tmp_path))


def test_the_map_of_a_checkpoint_goes_on_to_other_weights(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.fit_temperature()
    trainer.save_model(str(tmp_path))
    assert "fingerprint" in load_map(tmp_path).about
    restored = map_of_checkpoint(tmp_path, TemperatureScaling())
    assert restored is not None
    assert restored.about == trainer.fitted_map.about


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_that_may_be_loaded_in_another_type_have_no_fingerprint(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_bert()
    rows = sequences(model, 40, seed=2)
    trainer = CalibrationTrainer(
        model.to(dtype), arguments(tmp_path), calibration_dataset=rows
    )
    trainer.fit_temperature()
    trainer.save_model(str(tmp_path))
    assert "fingerprint" not in load_map(tmp_path).about


@pytest.mark.slow
def test_a_model_is_saved_over_another_run_without_its_table_and_report(
    tmp_path: Path,
) -> None:
    first = tiny_trainer(tmp_path / "first", loss="adafocal", gamma_update_steps=1)
    first.train()
    first.save_calibrated_model(tmp_path)
    first.args.output_dir = str(tmp_path)
    first.create_model_card()
    first.save_model()
    of_the_first = ["head.safetensors", "loss.safetensors", "report.json", "report.md"]
    (tmp_path / "calibration" / "loss.safetensors").touch()
    (tmp_path / "calibration" / "head.safetensors").touch()
    assert (tmp_path / "calibration_loss.safetensors").is_file()
    found = {path.name for path in (tmp_path / "calibration").iterdir()}
    assert found >= set(of_the_first)
    (tmp_path / "calibration" / "notes.txt").write_text("of the user")
    second = tiny_trainer(tmp_path / "second", calibration_method="none")
    second.save_model(str(tmp_path))
    assert not (tmp_path / "calibration_loss.safetensors").exists()
    left = [path.name for path in (tmp_path / "calibration").iterdir()]
    assert left == ["notes.txt"]


class AtTheStart(TrainerCallback):
    """Notes the map that a training begins with."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        self.found = self.trainer.calibration_map
        self.record = getattr(self.trainer.model.config, "calibration", None)


@pytest.mark.filterwarnings("ignore:.*data do not determine:UserWarning")
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=() if method == "vector" else pytest.mark.deep)
        for method, multi_label in CASES
        if not multi_label
    ],
)
def test_a_resumed_training_has_the_map_and_ends_as_the_uninterrupted_one(
    method: str, tmp_path: Path
) -> None:
    settings = {
        "calibration_method": method,
        "calibration_strategy": "evaluate",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = tiny_trainer(tmp_path, **settings)
    seen: list[tuple[int, Any]] = []

    class AtEachSave(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((state.global_step, whole.calibration_map))

    whole.add_callback(AtEachSave())
    whole.train()
    resumed = tiny_trainer(tmp_path, **settings)
    start = AtTheStart(resumed)
    resumed.add_callback(start)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (step, at_two), _ = seen
    assert step == 2
    assert same_map(start.found, at_two)
    assert start.record["n_examples"] == 40
    assert same_map(resumed.calibration_map, whole.calibration_map)
    assert not same_map(resumed.calibration_map, at_two)
    timed = ("time", "per_second")
    ends = [
        {k: v for k, v in last_evaluation(t).items() if not k.endswith(timed)}
        for t in (whole, resumed)
    ]
    assert ends[0] == ends[1]


def test_a_checkpoint_with_another_map_or_a_bad_one(tmp_path: Path) -> None:
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    tiny_trainer(tmp_path, calibration_strategy="evaluate", **settings).train()
    other = tiny_trainer(tmp_path, calibration_method="vector", **settings)
    start = AtTheStart(other)
    other.add_callback(start)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert start.found is None  # a temperature, and a vector is asked for
    assert isinstance(other.calibration_map, VectorScaling)

    file = tmp_path / "checkpoint-2" / MAP_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), "parameters": {}}))
    with pytest.raises(
        ValueError,
        match=r"checkpoint-2/calibration.json to hold a fitted calibrator, got",
    ):
        tiny_trainer(tmp_path, **settings).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-2")
        )


def test_the_best_model_is_the_one_of_least_nll_with_its_map(tmp_path: Path) -> None:
    trainer = tiny_trainer(
        tmp_path,
        calibration_method="vector",
        calibration_strategy="evaluate",
        metric_for_best_model="eval_nll_calibrated",
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
    )
    trainer.train()
    *during, last = logged(trainer, "eval_nll_calibrated")
    assert len(set(during)) == 4
    assert last == pytest.approx(min(during), rel=1e-6) == trainer.state.best_metric
    best = load_map(Path(trainer.state.best_model_checkpoint)).scaler.affine_map()
    np.testing.assert_allclose(
        trainer.calibration_map.affine_map().weight, best.weight, rtol=1e-6
    )


# ---- Models and tasks ----


def test_tokens_have_one_map(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path / "out", tiny_bert("Token"), data=tagged, calibration_method="vector"
    )
    found = trainer.predict(trainer.eval_dataset)
    counted = found.label_ids != -100
    probs = trainer.calibration_map.predict_proba(
        found.predictions[counted].astype(np.float64)
    )
    wanted = negative_log_likelihood(probs, found.label_ids[counted])
    assert last_evaluation(trainer)["eval_nll_calibrated"] == pytest.approx(
        wanted, rel=1e-5
    )
    trainer.save_calibrated_model(tmp_path / "calibrated")


@pytest.mark.parametrize("kind", ["adapters", "bf16"])
def test_adapters_and_half_precision(kind: str, tmp_path: Path) -> None:
    model = lora(tiny_bert()) if kind == "adapters" else None
    settings = {"bf16": True} if kind == "bf16" else {"learning_rate": 5e-3}
    trainer = trained(tmp_path / "out", model, calibration_method="matrix", **settings)
    trainer.save_calibrated_model(tmp_path / "calibrated")
    served = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "calibrated"
    ).eval()
    ids = torch.tensor(trainer.eval_dataset["input_ids"])
    with torch.no_grad():
        if kind == "bf16":  # it is served without autocast
            trainer.save_model(str(tmp_path / "raw"))
            raw = AutoModelForSequenceClassification.from_pretrained(tmp_path / "raw")
        else:
            raw = trainer.model
        logits, ours = raw.eval()(input_ids=ids).logits, served(input_ids=ids).logits
    wanted = trainer.calibration_map.transform(logits.double().numpy())
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)


def gpt2(kind: str = "SequenceClassification") -> Any:
    config = transformers.GPT2Config(
        vocab_size=TEXT["vocab_size"],
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        num_labels=N_LABELS,
    )
    config.pad_token_id = 0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        name = "GPT2LMHeadModel" if kind == "lm" else f"GPT2For{kind}"
        return getattr(transformers, name)(config)


@pytest.mark.parametrize("kind", ["SequenceClassification", "lm"])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_head_without_a_bias_refuses_maps_with_one_before_the_training(
    kind: str, adapted: bool, tmp_path: Path
) -> None:
    model = gpt2(kind)
    if adapted:
        from peft import LoraConfig, get_peft_model

        task = "CAUSAL_LM" if kind == "lm" else "SEQ_CLS"
        model = get_peft_model(
            model,
            LoraConfig(
                task_type=task, r=2, target_modules=["c_attn"], fan_in_fan_out=True
            ),
        )
    rows = [
        {
            "input_ids": [5 + i, 6, 7, 8],
            "labels": [5, 6, 7, 8] if kind == "lm" else i % 4,
        }
        for i in range(8)
    ]
    settings = {"train_dataset": rows, "calibration_dataset": list(rows)}
    trainer = CalibrationTrainer(
        model, arguments(tmp_path, calibration_method="vector"), **settings
    )
    message = r"in its head for vector scaling, got \w+, which makes none when it is loaded; use calibration"
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0
    with pytest.raises(ValueError, match=message):
        trainer.fit_calibration_map(VectorScaling())


def test_auto_is_a_temperature_where_the_head_has_no_bias(tmp_path: Path) -> None:
    rows = [{"input_ids": [5 + i, 6, 7, 8], "labels": i % 4} for i in range(20)]
    trainer = CalibrationTrainer(
        gpt2(), arguments(tmp_path, calibration_method="auto"), calibration_dataset=rows
    )
    assert isinstance(trainer.fit_calibration_map(), TemperatureScaling)


def test_methods_that_do_not_go_with_the_problem_are_refused_before_the_training(
    tmp_path: Path,
) -> None:
    several = tiny_bert(**MULTI_LABEL)
    one = tiny_bert(problem_type="single_label_classification")
    for model, method, kind in (
        (several, "matrix", "multi"),
        (one, "per_label_temperature", "single"),
    ):
        trainer = CalibrationTrainer(
            model,
            arguments(tmp_path, calibration_method=method),
            train_dataset=sequences(model, 8),
            calibration_dataset=sequences(model, 12, seed=2),
        )
        message = f"calibration method to be used with a {kind}-label problem, got '{method}'; choose one of"
        with pytest.raises(ValueError, match=message):
            trainer.train()
        with pytest.raises(ValueError, match=message):
            trainer.fit_calibration_map()
        assert trainer.state.global_step == 0
        assert trainer.fit_temperature() == trainer.temperature


# ---- Callbacks, and maps from elsewhere ----


def test_a_callback_brings_settings_of_its_own(tmp_path: Path) -> None:
    model = tiny_bert()
    mine = CalibrationMapCallback(MatrixScaling(off_diagonal_penalty=2.0))
    trainer = CalibrationTrainer(
        model,
        arguments(tmp_path),
        train_dataset=sequences(model, 8),
        calibration_dataset=sequences(model, 40, seed=2),
        callbacks=[TemperatureScalingCallback(), mine],
    )
    trainer.train()
    assert trainer.calibration_map.off_diagonal_penalty == 2.0
    assert not hasattr(mine.scaler, "weight_")  # each fit is of a copy
    assert trainer.fit_temperature() == trainer.temperature
    assert isinstance(trainer.calibration_map, TemperatureScaling)
    assert isinstance(trainer.fit_calibration_map(), MatrixScaling)
    with pytest.raises(
        TypeError,
        match=r"expected scaler to be one of TemperatureScaling, .*got IsotonicScaling",
    ):
        CalibrationMapCallback(IsotonicScaling())
    with pytest.raises(
        ValueError, match=r"expected strategy to be one of .*got 'always'"
    ):
        CalibrationMapCallback(VectorScaling(), strategy="always")


def test_a_map_from_elsewhere(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(60, N_LABELS)), rng.integers(N_LABELS, size=60)
    scaler = VectorScaling().fit(logits, labels)
    trainer.use_calibration_map(scaler, split="out-of-fold", n_examples=60)
    assert "eval_nll_calibrated" in trainer.evaluate()
    record = trainer.model.config.calibration
    assert (record["split"], record["n_examples"], record["weight"]) == (
        "out-of-fold",
        60,
        scaler.weight_.tolist(),
    )
    single = tiny_bert(problem_type="single_label_classification")
    told = CalibrationTrainer(single, arguments(tmp_path))
    with pytest.raises(
        ValueError,
        match="used with a single-label problem, got 'per_label_temperature'",
    ):
        told.use_calibration_map(PerLabelTemperatureScaling(), split="a", n_examples=1)
    broken = VectorScaling().fit(logits, labels)
    broken.bias_ = np.array([0.0, 0.0, 0.0, math.nan])
    with pytest.raises(ValueError, match=r"expected bias to be float in .*, got nan"):
        trainer.use_calibration_map(broken, split="a", n_examples=1)
    for split, n_examples, message in (
        (3, 60, "expected split to be a name, got 3"),
        ("", 60, "expected split to be a name, got ''"),
        ("a", -3, "expected n_examples to be at least 1, got -3"),
        ("a", 1.5, "expected n_examples to be an integer, got 1.5"),
        ("a", True, "expected n_examples to be an integer, got True"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            trainer.use_calibration_map(scaler, split=split, n_examples=n_examples)
    assert trainer.calibration_map is scaler


def test_the_map_on_the_device_is_that_of_the_scaler() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(50, 5)) * 3, rng.integers(5, size=50)
    for scaler in (TemperatureScaling(), VectorScaling(), MatrixScaling()):
        mapping = scaler.fit(logits, labels).affine_map()
        for dtype, rtol in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
            typed = torch.from_numpy(logits).to(dtype)
            found = on_device(mapping, typed)(typed)
            assert found.dtype == dtype
            np.testing.assert_allclose(
                found, scaler.transform(logits), rtol=rtol, atol=rtol
            )
    masked = torch.tensor([[1.0, -torch.inf, 2.0]])
    negative = type(mapping)(np.array([-1.0, -1.0, 0.5]), np.array([0.0, 1.0, 2.0]))
    assert (
        on_device(negative, masked)(masked).tolist()
        == [[-1.0, -math.inf, 3.0]]
        == negative(masked.numpy()).tolist()
    )
    narrow = torch.from_numpy(logits).bfloat16()
    half = on_device(mapping, narrow)(narrow)
    assert half.dtype == torch.float32


# ---- Weights that the map was not fitted to ----


def test_a_checkpoint_has_only_a_map_of_its_own_weights(tmp_path: Path) -> None:
    trainer = tiny_trainer(
        tmp_path,
        calibration_strategy="evaluate",
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=1,
    )
    trainer.train()
    for step in (1, 2, 3, 4):
        folder = tmp_path / f"checkpoint-{step}"
        config = json.loads((folder / "config.json").read_text())
        is_fitted = step % 2 == 0
        assert (folder / MAP_NAME).is_file() == is_fitted, step
        assert ("calibration" in config) == is_fitted, step
    resumed = tiny_trainer(
        tmp_path / "resumed", calibration_strategy="evaluate", eval_strategy="epoch"
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.temperature == trainer.temperature


@pytest.mark.parametrize(
    "setting",
    ["bf16_full_eval", pytest.param("fp16_full_eval", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("run", ["evaluate", "fit_temperature", "fit_calibration_map"])
def test_a_pass_in_16_bits_leaves_the_weights(
    setting: str, run: str, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path, **{setting: True})
    trainer.train()
    before = {name: each.clone() for name, each in trainer.model.state_dict().items()}
    getattr(trainer, run)()
    assert_same(trainer.model.state_dict(), before)
    trainer.save_calibrated_model(tmp_path / "calibrated")


def test_weights_that_were_rounded_after_the_training_are_not_saved_as_float32(
    tmp_path: Path,
) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.train()
    trainer.model.bfloat16()
    message = "float32 or float64 weights, got torch.bfloat16 in bert.* torch.float32;"
    with pytest.raises(ValueError, match=message):
        trainer.save_calibrated_model(tmp_path / "calibrated")
    assert not (tmp_path / "calibrated").exists()


@pytest.mark.parametrize(
    ("given", "kind"), [("", ValueError), (None, TypeError), (3, TypeError)]
)
def test_a_calibrated_model_is_saved_in_a_folder_with_a_name(
    given: Any, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = tiny_trainer(tmp_path / "out")
    trainer.fit_temperature()
    with pytest.raises(kind, match=f"output_dir to be the path .* got {given!r}; name"):
        trainer.save_calibrated_model(given)
    assert [path.name for path in tmp_path.iterdir() if path.name != "out"] == []
