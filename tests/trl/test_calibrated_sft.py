"""TRL's supervised fine-tuning with a calibration loss: that of the logits, whatever TRL does around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from hf_calib._errors import InputTypeError, InputValueError
from hf_calib.language_models import for_causal_lm
from hf_calib.losses import LOSSES, make_loss
from tests.helpers.tiny import logged, tokenizer
from tests.language_models.models import language_model

trl = pytest.importorskip(
    "trl", reason="TRL has an environment of its own: make test-trainers"
)

from hf_calib.trl import CalibrationSFTConfig, CalibrationSFTTrainer  # noqa: E402, TRL may be missing

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`gradient_checkpointing` is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:`compute_loss_func` is deprecated:FutureWarning"
    ),  # compared with
]

REFUSED = {
    "label_smoothing": "reads MeanLogProb",
    "dual_focal": "reads Rival",
    "logit_norm": "reads LogitNorm",
    "brier": "log_sum_sq_probs to have a gradient",
    "bsce": "log_sum_sq_probs to have a gradient",
    "focal_calibration": "log_sum_sq_probs to have a gradient",
    "mmce": "couples the batch",
    "soft_ece": "couples the batch",
    "kde_ece": "couples the batch",
    "mbls": "reads MeanExcess",
    "mdca": "couples the batch",
    "avuc": "couples the batch",
    "adafocal": "train without held-out predictions",
    "ece_ce": "train without held-out predictions",
}


def words() -> PreTrainedTokenizerFast:
    made = tokenizer()
    made.eos_token = "w57"
    return made


def rows(kind: str, n: int = 16) -> Dataset:
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> str:
        return " ".join(
            f"w{i}"
            for i in torch.randint(0, 50, (length,), generator=generator).tolist()
        )

    lengths = torch.randint(3, 9, (n, 2), generator=generator).tolist()
    if kind == "text":
        return Dataset.from_list([{"text": text(a + b)} for a, b in lengths])
    return Dataset.from_list(
        [{"prompt": text(a), "completion": f" {text(b)}"} for a, b in lengths]
    )


def arguments(folder: Path, kind: type = CalibrationSFTConfig, **more: Any) -> Any:
    settings: dict[str, Any] = {
        **{
            "per_device_train_batch_size": 4,
            "num_train_epochs": 1,
            "learning_rate": 1e-3,
            "seed": 0,
        },
        **{
            "max_grad_norm": 0.0,
            "logging_steps": 1,
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
        },
        **{
            "save_strategy": "no",
            "gradient_checkpointing": False,
            "disable_tqdm": True,
        },
    }
    return kind(output_dir=str(folder), **{**settings, **more})


def trained(folder: Path, kind: str = "text", trainer: Any = None, **more: Any) -> Any:
    trainer = trainer or CalibrationSFTTrainer
    extra = (
        {"compute_loss_func": more.pop("compute_loss_func")}
        if "compute_loss_func" in more
        else {}
    )
    config = CalibrationSFTConfig if trainer is CalibrationSFTTrainer else trl.SFTConfig
    made = trainer(
        language_model(),
        args=arguments(folder, config, **more),
        train_dataset=rows(kind),
        processing_class=words(),
        **extra,
    )
    made.train()
    return made


def losses(made: Any) -> list[float]:
    return logged(made, "loss")


# One loss of each set of numbers that TRL's head keeps, with and without a gradient of its weight.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("focal", "completion"),
        ("entropy_regularized", "completion"),
        ("bsce_gra", "text"),
        ("dft", "text"),
    ],
)
def test_it_is_the_loss_of_the_shifted_logits(
    name: str, kind: str, tmp_path: Path
) -> None:
    ours = trained(tmp_path, kind, loss=name)
    theirs = trained(
        tmp_path,
        kind,
        trainer=trl.SFTTrainer,
        compute_loss_func=for_causal_lm(make_loss(name)),
    )
    assert losses(ours) == pytest.approx(losses(theirs), rel=2e-4)
    for (key, value), other in zip(
        ours.model.named_parameters(), theirs.model.parameters(), strict=True
    ):
        torch.testing.assert_close(value, other, rtol=1e-3, atol=2e-5, msg=key)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TRL's own trainer, after its training on texts."""
    return trained(tmp_path_factory.mktemp("stock"), trainer=trl.SFTTrainer)


def test_cross_entropy_is_the_stock_trainer(tmp_path: Path, stock: Any) -> None:
    ours = trained(tmp_path)
    assert losses(ours) == losses(stock)
    for value, other in zip(
        ours.model.parameters(), stock.model.parameters(), strict=True
    ):
        assert torch.equal(value, other)


def test_accumulated_batches_are_one_batch(tmp_path: Path) -> None:
    whole = trained(tmp_path, "completion", loss="focal", per_device_train_batch_size=8)
    parts = trained(
        tmp_path,
        "completion",
        loss="focal",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
    )
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)
    for value, other in zip(
        parts.model.parameters(), whole.model.parameters(), strict=True
    ):
        torch.testing.assert_close(value, other, rtol=1e-3, atol=2e-5)


@pytest.mark.filterwarnings("ignore:Padding-free training is enabled.*:UserWarning")
@pytest.mark.filterwarnings("ignore:You are using packing.*:UserWarning")
def test_packed_rows(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"packing": True, "max_length": 24}
    ours = trained(tmp_path, loss="focal", **settings)
    focal = for_causal_lm(make_loss("focal"))
    theirs = trained(
        tmp_path, trainer=trl.SFTTrainer, compute_loss_func=focal, **settings
    )
    assert losses(ours) == pytest.approx(losses(theirs), rel=2e-4)


def test_trls_own_metrics_stay(tmp_path: Path, stock: Any) -> None:
    ours = trained(tmp_path, loss="focal", loss_kwargs={"gamma": 2.0})
    assert logged(ours, "entropy")[0] == pytest.approx(
        logged(stock, "entropy")[0], rel=1e-5
    )
    assert (
        logged(ours, "mean_token_accuracy")[0]
        == logged(stock, "mean_token_accuracy")[0]
    )
    assert losses(ours)[0] < losses(stock)[0]


def test_the_models_own_loss_is_that_of_the_logits(tmp_path: Path) -> None:
    """Sequence parallelism reads it."""
    model = trained(tmp_path, loss="bsce_gra").model.eval()
    ids = torch.tensor([[5, 9, 30, 12, 7], [17, 6, 44, 10, 8]])
    labels = ids.masked_fill(ids == 9, -100)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        for count in (None, 20.0):
            found = model(
                input_ids=ids,
                labels=labels,
                fused_lm_head=True,
                num_items_in_batch=count,
            ).loss
            wanted = for_causal_lm(make_loss("bsce_gra"))(
                logits, labels, num_items_in_batch=count
            )
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_adapters_and_evaluations(tmp_path: Path) -> None:
    from peft import LoraConfig

    made = CalibrationSFTTrainer(
        language_model(),
        args=arguments(tmp_path, loss="bsce_gra"),
        train_dataset=rows("text"),
        eval_dataset=rows("text"),
        processing_class=words(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
    )
    made.train()
    assert len(losses(made)) == 4
    assert 0 < made.evaluate()["eval_loss"] < 10


@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_cannot_train_are_refused_before_anything_is_loaded(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(InputValueError, match=REFUSED[name]):
        arguments(tmp_path, loss=name)


def test_the_other_losses_train(tmp_path: Path) -> None:
    of_kinds = {"dual_focal_gra", "ada_dual_focal", "calfocal"}  # refused as their kin
    for name in set(LOSSES) - of_kinds - set(REFUSED):
        assert arguments(tmp_path, loss=name).make_loss().name == name


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(
        InputTypeError, match=r"args to be a CalibrationSFTConfig, got SFTConfig"
    ):
        CalibrationSFTTrainer(language_model(), args=arguments(tmp_path, trl.SFTConfig))
    with pytest.raises(
        InputValueError, match=r"loss_type to be 'nll' for loss 'focal', got 'dft'"
    ):
        arguments(tmp_path, loss="focal", loss_type="dft")
    with pytest.raises(
        InputValueError, match=r"label_smoothing_factor to be 0 with another loss"
    ):
        arguments(tmp_path, loss="focal", label_smoothing_factor=0.1)
    with pytest.raises(
        InputValueError, match=r"compute_loss_func to be None with 'focal'"
    ):
        CalibrationSFTTrainer(
            language_model(),
            args=arguments(tmp_path, loss="focal"),
            train_dataset=rows("text"),
            processing_class=words(),
            compute_loss_func=lambda *_, **__: None,
        )
    from_line = arguments(tmp_path, loss="focal", loss_kwargs='{"gamma": 1.5}')
    assert from_line.make_loss().hyperparameters == {"gamma": 1.5}
