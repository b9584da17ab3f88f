"""A judge: of a language model's next tokens, the loss, metrics and temperature of a few options."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset

from hf_calib import CalibrationTrainer
from hf_calib.language_models import label_token_classifier
from tests.helpers.tiny import (
    TRUE_TEMPERATURE,
    arguments,
    differences,
    logged,
    tokenizer,
    weights,
)
from tests.language_models.models import language_model

OPTIONS = ["w50", "w51", "w52", "w53"]
SGD = {
    "optim": "sgd",
    "learning_rate": 0.002,
    "lr_scheduler_type": "constant",
    "num_train_epochs": 2,
}


def words(side: str = "right") -> Any:
    made = tokenizer()
    made.padding_side = side
    return made


@cache
def prompts(
    n: int, *, seed: int = 0, name: str = "Llama"
) -> list[tuple[list[int], int]]:
    """Token ids of different lengths, and an option drawn by what the model makes of them, less sure of itself."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (n,), generator=generator).tolist()
    known = torch.tensor([words().convert_tokens_to_ids(f"w{i}") for i in range(6, 50)])
    drawn = [
        known[torch.randint(len(known), (length,), generator=generator)]
        for length in lengths
    ]
    model, tokens = language_model(name), words().convert_tokens_to_ids(OPTIONS)
    with torch.no_grad():
        logits = torch.stack([model(ids[None]).logits[0, -1, tokens] for ids in drawn])
    answers = torch.multinomial(
        (logits / TRUE_TEMPERATURE).softmax(1), 1, generator=generator
    )
    return [
        (ids.tolist(), int(answer)) for ids, answer in zip(drawn, answers, strict=True)
    ]


def judged(n: int, *, seed: int = 0, name: str = "Llama") -> Dataset:
    """A prompt, its answer, and a token after it; the only label is the answer."""
    tokens, end = (
        words().convert_tokens_to_ids(OPTIONS),
        words().convert_tokens_to_ids("w5"),
    )
    rows = [(ids, tokens[answer]) for ids, answer in prompts(n, seed=seed, name=name)]
    return Dataset.from_list(
        [
            {
                "input_ids": [*ids, answer, end],
                "labels": [*[-100] * len(ids), answer, -100],
            }
            for ids, answer in rows
        ]
    )


def classified(n: int, *, seed: int = 0, name: str = "Llama") -> Dataset:
    """The same prompts for a classifier."""
    return Dataset.from_list(
        [
            {"input_ids": ids, "label": answer}
            for ids, answer in prompts(n, seed=seed, name=name)
        ]
    )


def judge(
    folder: Path,
    model: Any = "Llama",
    *,
    side: str = "right",
    train: Any = None,
    **more: Any,
) -> CalibrationTrainer:
    name = model if isinstance(model, str) else "Llama"
    args = arguments(folder, answer_options=more.pop("answer_options", OPTIONS), **more)
    return CalibrationTrainer(
        language_model(model) if isinstance(model, str) else model,
        args,
        processing_class=words(side),
        data_collator=transformers.DataCollatorForSeq2Seq(
            words(side), label_pad_token_id=-100
        ),
        train_dataset=judged(16, name=name) if train is None else train,
        eval_dataset=judged(10, seed=1, name=name),
        calibration_dataset=judged(60, seed=2, name=name),
    )


@pytest.mark.parametrize(
    ("loss", "name", "side"),
    [
        ("cross_entropy", "Llama", "right"),
        pytest.param("dual_focal", "Llama", "left", marks=pytest.mark.slow),
        pytest.param("cross_entropy", "GPT2", "left", marks=pytest.mark.slow),
        pytest.param("cross_entropy", "Qwen2, tied", "right", marks=pytest.mark.slow),
    ],
)
def test_it_trains_measures_and_calibrates_as_the_classifier_of_its_options(
    loss: str, name: str, side: str, tmp_path: Path
) -> None:
    classifier = label_token_classifier(language_model(name), words(), OPTIONS)
    ours = judge(tmp_path / "ours", name, side=side, loss=loss, **SGD)
    model = ours.model
    args = arguments(
        tmp_path / "theirs", loss=loss, calibration_method="temperature", **SGD
    )
    theirs = CalibrationTrainer(
        classifier,
        args,
        train_dataset=classified(16, name=name),
        eval_dataset=classified(10, seed=1, name=name),
        calibration_dataset=classified(60, seed=2, name=name),
        processing_class=words(side),
    )
    first, other = ours.evaluate(), theirs.evaluate()
    for key in (
        "eval_loss",
        "eval_nll",
        "eval_ece",
        "eval_brier",
        "eval_classwise_ece",
        "eval_accuracy",
    ):
        assert first[key] == pytest.approx(other[key], abs=2e-5), key
    ours.fit_temperature()
    theirs.fit_temperature()
    assert ours.temperature == pytest.approx(theirs.temperature, rel=1e-3)
    if (
        name != "Llama"
    ):  # whose heads are their embeddings: the classifier's rows are its own
        return
    for trainer in (ours, theirs):
        torch.manual_seed(0)
        trainer.train()
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), rel=1e-4)
    body, wanted = (weights(each.base_model) for each in (model, classifier))
    assert differences(body, wanted)[0] < 1e-5
    rows = model.get_output_embeddings().weight[words().convert_tokens_to_ids(OPTIONS)]
    torch.testing.assert_close(rows, classifier.score.weight, rtol=1e-4, atol=1e-5)


def test_accumulation_changes_nothing(tmp_path: Path) -> None:
    ends = []
    for micro, steps in ((8, 1), (2, 4)):
        model = language_model().double()
        sizes = {
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": steps,
        }
        judge(
            tmp_path, model, loss="focal", calibration_method="none", **SGD, **sizes
        ).train()
        ends.append(weights(model))
    assert differences(*ends)[0] < 1e-12


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("Llama", "Gemma")),
        "GPT2",
    ],
)
def test_it_is_saved_as_a_language_model_with_its_temperature(
    name: str, tmp_path: Path
) -> None:
    trainer = judge(tmp_path / "run", name)
    model = trainer.model
    trainer.fit_temperature()
    trainer.save_calibrated_model(tmp_path / "calibrated")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "calibrated")
    ids = torch.tensor([[7, 8, 9, 10]])
    tokens = words().convert_tokens_to_ids(OPTIONS)
    with torch.no_grad():
        logits = model.eval()(ids).logits[0, -1, tokens]
        torch.testing.assert_close(
            loaded(ids).logits[0, -1, tokens],
            logits / trainer.temperature,
            rtol=1e-5,
            atol=1e-5,
        )
    assert trainer.fitted_map is not None
    assert trainer.fitted_map.about["class_names"] == OPTIONS


def test_predictions_are_of_the_options(tmp_path: Path) -> None:
    output = judge(tmp_path).predict(judged(10, seed=1))
    assert output.predictions.shape == (10, 4)
    assert output.label_ids.tolist() == [answer for _, answer in prompts(10, seed=1)]


@pytest.mark.parametrize(
    "loss", ["adafocal", pytest.param("mmce", marks=pytest.mark.slow)]
)
def test_losses_that_adapt_or_couple_the_batch(loss: str, tmp_path: Path) -> None:
    trainer = judge(tmp_path, loss=loss, eval_strategy="epoch", **SGD)
    trainer.train()
    assert trainer.evaluate()["eval_nll_calibrated"] > 0


def test_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    trainer = judge(
        tmp_path / "run", peft.get_peft_model(language_model(), config), **SGD
    )
    trainer.train()
    trainer.save_calibrated_model(tmp_path / "calibrated")
    assert (
        type(
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "calibrated")
        ).__name__
        == "LlamaForCausalLM"
    )


def without_prompt() -> Dataset:
    token = words().convert_tokens_to_ids(OPTIONS[0])
    return Dataset.from_list([{"input_ids": [token, 9], "labels": [token, -100]}] * 8)


def with_labels(labels: list[Any]) -> Dataset:
    rows = judged(8).to_list()
    rows[3]["labels"] = labels + [-100] * (len(rows[3]["input_ids"]) - len(labels))
    return Dataset.from_list(rows)


def test_bad_input_is_refused_before_the_training(tmp_path: Path) -> None:
    tokens = words().convert_tokens_to_ids(OPTIONS)
    one = r"labels to have one token per row, of \d+ \('w50'\).*in row 3 of the training split; set the"
    for labels in ([tokens[0], tokens[1]], [9]):
        with pytest.raises(ValueError, match=one):
            judge(tmp_path, train=with_labels(labels)).train()
    with pytest.raises(
        ValueError,
        match=r"the answer to follow a prompt, got one that is a row's first token",
    ):
        judge(tmp_path, train=without_prompt()).train()
    with pytest.raises(
        ValueError,
        match=r"the text of a label to be one token, got 2 for label 'w1 w2'",
    ):
        judge(tmp_path, answer_options=["w1 w2", "w3"])
    with pytest.raises(
        ValueError, match=r"the model to have a head of its own for vector scaling"
    ):
        judge(tmp_path, calibration_method="vector").train()
    args = arguments(tmp_path, answer_options=OPTIONS, calibration_method=None)
    with pytest.raises(
        ValueError,
        match=r"processing_class to be a tokenizer for answer_options, got None",
    ):
        CalibrationTrainer(language_model(), args)
    classifier = label_token_classifier(language_model(), words(), OPTIONS)
    with pytest.raises(
        ValueError,
        match=r"to be a causal language model for answer_options, got LlamaForSeq",
    ):
        CalibrationTrainer(classifier, args, processing_class=words())
    with pytest.raises(
        ValueError, match=r"class_weights to have one entry for each of the 4 .*, got 2"
    ):
        judge(tmp_path, class_weights=[1.0, 2.0]).train()


def test_rows_without_an_answer_are_left_out(tmp_path: Path) -> None:
    model = language_model()
    rows = judged(12).to_list()
    rows[4]["labels"] = [-100] * len(rows[4]["labels"])
    fewer = Dataset.from_list([row for i, row in enumerate(rows) if i != 4])
    trainer = judge(tmp_path, model)
    assert trainer.evaluate(Dataset.from_list(rows))["eval_nll"] == pytest.approx(
        trainer.evaluate(fewer)["eval_nll"], rel=1e-6
    )
