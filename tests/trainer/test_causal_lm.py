"""A causal language model is trained, measured and calibrated on the next token; encoder-decoders are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset

from hf_calib import CalibrationTrainer
from hf_calib.scaling import TemperatureScaling
from tests.helpers.tiny import (
    LENGTH,
    TRUE_TEMPERATURE,
    VOCABULARY,
    arguments,
    differences,
    logged,
    weights,
)

SMALL = {
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def gpt2() -> Any:
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.GPT2Config(vocab_size=VOCABULARY, **SMALL, **no_dropout)
        return transformers.GPT2LMHeadModel(config)


def texts(n: int, *, seed: int = 0) -> Dataset:
    """Each token is the one before plus 3; the last 0 to 3 labels are padding."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(VOCABULARY, (n, 1), generator=generator)
    ids = (first + 3 * torch.arange(LENGTH)) % VOCABULARY
    ends = torch.randint(LENGTH - 3, LENGTH + 1, (n, 1), generator=generator)
    labels = ids.where(torch.arange(LENGTH) < ends, -100)
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})


def pairs(model: Any, rows: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and the labels one position further on, without padding."""
    with torch.no_grad():
        logits = (
            copy.deepcopy(model)
            .eval()(input_ids=torch.tensor(rows["input_ids"][:]))
            .logits
        )
    labels = torch.tensor(rows["labels"][:])[:, 1:]
    return logits[:, :-1][labels != -100], labels[labels != -100]


def test_it_learns_what_the_model_itself_would_teach(tmp_path: Path) -> None:
    """Not the stock Trainer, which counts first tokens too for models that do not name their loss, like GPT-2."""
    ours, theirs = gpt2(), gpt2()
    settings = {
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "num_train_epochs": 3,
    }
    args = arguments(
        tmp_path, calibration_method=None, **settings, temperature_criterion="none"
    )
    trainer = CalibrationTrainer(
        ours, args, train_dataset=texts(16), eval_dataset=texts(12, seed=1)
    )
    torch.manual_seed(args.seed)
    optimizer, losses = torch.optim.SGD(theirs.parameters(), lr=0.5), []
    loader = trainer.get_train_dataloader()
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            loss = theirs(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx(losses, rel=1e-4)
    assert differences(weights(ours), weights(theirs))[0] < 1e-4
    assert losses[-1] < losses[0] - 0.1
    metrics = trainer.evaluate()
    logits, labels = pairs(ours, trainer.eval_dataset)
    assert metrics["eval_nll"] == pytest.approx(
        F.cross_entropy(logits, labels).item(), rel=1e-5
    )
    assert metrics["eval_accuracy"] == pytest.approx(
        (logits.argmax(1) == labels).double().mean().item()
    )


def test_accumulation_changes_nothing(tmp_path: Path) -> None:
    ends = []
    for micro, steps in ((8, 1), (2, 4)):
        model = gpt2().double()
        settings = {"optim": "sgd", "temperature_criterion": "none", "loss": "focal"}
        sizes = {
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": steps,
        }
        CalibrationTrainer(
            model, arguments(tmp_path, **settings, **sizes), train_dataset=texts(16)
        ).train()
        ends.append(weights(model))
    assert differences(*ends)[0] < 1e-12


def test_its_temperature_is_that_of_the_next_tokens(tmp_path: Path) -> None:
    model, rows = gpt2(), texts(20, seed=2).to_list()
    with torch.no_grad():
        model.transformer.wte.weight *= 20
        logits = (
            copy.deepcopy(model)
            .eval()(input_ids=torch.tensor([row["input_ids"] for row in rows]))
            .logits
        )
    for row, each in zip(rows, (logits / TRUE_TEMPERATURE).softmax(2), strict=True):
        drawn = torch.multinomial(each, 1, generator=torch.Generator().manual_seed(0))[
            :, 0
        ].tolist()
        row["labels"] = [-100, *drawn[:-2], -100]
    split = Dataset.from_list(rows)
    trainer = CalibrationTrainer(model, arguments(tmp_path), calibration_dataset=split)
    trainer.fit_temperature()
    logits, labels = pairs(model, split)
    wanted = TemperatureScaling().fit(logits.numpy(), labels.numpy()).temperature_
    assert trainer.temperature == pytest.approx(wanted, rel=1e-4)
    assert model.config.calibration["n_examples"] == len(labels)


def test_an_encoder_decoder_that_generates_is_refused(tmp_path: Path) -> None:
    size = {
        "d_model": 16,
        "d_ff": 16,
        "d_kv": 8,
        "num_layers": 1,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    config = transformers.T5Config(vocab_size=VOCABULARY, num_labels=4, **size)
    with pytest.raises(
        ValueError, match=r"got T5ForConditionalGeneration, an encoder-decoder.*use its"
    ):
        CalibrationTrainer(
            transformers.T5ForConditionalGeneration(config), arguments(tmp_path)
        )
    CalibrationTrainer(
        transformers.T5ForSequenceClassification(config), arguments(tmp_path)
    )


def test_a_tied_one_is_saved_with_its_temperature(tmp_path: Path) -> None:
    model = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    args = arguments(
        tmp_path, calibration_method="temperature", optim="sgd", learning_rate=0.5
    )
    trainer = CalibrationTrainer(
        model, args, train_dataset=texts(16), calibration_dataset=texts(40, seed=1)
    )
    trainer.train()
    trainer.save_calibrated_model(tmp_path / "calibrated")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "calibrated")
    ids = torch.tensor(texts(4, seed=2)["input_ids"][:])
    with torch.no_grad():
        wanted = model.eval()(ids).logits / trainer.temperature
        assert float((loaded(ids).logits - wanted).abs().max()) < 1e-6 * float(
            wanted.abs().max()
        )
    assert loaded.config.calibration["head"] == ["transformer.ln_f"]
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
