"""The losses where they are used: compiled, under autocast, checkpointed, in bounded memory, in the stock Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput, TokenClassifierOutput

from hf_calib.losses import LOSSES, make_loss
from tests.helpers.loss_cases import (
    EXACT,
    Variant,
    every_variant,
    every_width,
    make_variant,
    random_batch,
    value_and_gradient,
)
from tests.helpers.tiny import N_LABELS, VOCABULARY, tiny_bert

# One loss of each kind of weight, penalty and table; the others once a week.
COMPILED = {"focal", "dual_focal", "bsce_gra", "entropy_regularized", "ece_ce", "mbls"}
COMPILED |= {"mmce", "soft_ece", "kde_ece"}
MARKED = [
    pytest.param(name, marks=pytest.mark.slow if name in COMPILED else pytest.mark.deep) for name in LOSSES
]


class TestCompile:
    """Traced as one graph; without code generation, which takes minutes on two cores."""

    @pytest.mark.parametrize("name", MARKED)
    def test_one_graph_same_result(self, name: str) -> None:
        torch.compiler.reset()
        loss = make_variant((name, {}), 5)
        logits, labels = random_batch(12, 5)
        labels[3] = -100
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        want = value_and_gradient(loss, logits, labels)
        assert_close(value_and_gradient(compiled, logits, labels), want, **EXACT)

    @pytest.mark.slow
    def test_the_compiled_loss_follows_an_update(self) -> None:
        torch.compiler.reset()
        loss = make_loss("adafocal")
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        logits, labels = random_batch(12, 5)
        for _ in range(3):
            loss.update(torch.linspace(0.01, 0.99, 50), torch.zeros(50))
            assert_close(compiled(logits, labels), loss(logits, labels), **EXACT)


@every_width
@every_variant
def test_autocast_changes_nothing(variant: Variant, width: int) -> None:
    loss = make_variant(variant, width)
    logits, labels = random_batch(12, width)
    logits = logits.to(torch.bfloat16)
    want = value_and_gradient(loss, logits, labels)
    # In a backward pass under autocast, which PyTorch advises against, products of matrices are of 16 bits.
    tolerance = 1e-3 if variant[0] == "kde_ece" else 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(value_and_gradient(loss, logits, labels), want, rtol=1e-6, atol=tolerance)


@pytest.mark.parametrize("use_reentrant", [False, True])
@every_width
@pytest.mark.parametrize("name", ["focal", "dual_focal", "mmce"])
def test_checkpointed(name: str, width: int, use_reentrant: bool) -> None:
    loss = make_loss(name)
    logits, labels = random_batch(12, width)

    def checkpointed(logits: Tensor, labels: Tensor) -> Tensor:
        return checkpoint(lambda z: loss(2 * z, labels), logits, use_reentrant=use_reentrant)

    want = value_and_gradient(lambda z, y: loss(2 * z, y), logits, labels)
    assert_close(value_and_gradient(checkpointed, logits, labels), want, **EXACT)


def backward_memory(name: str, n: int, c: int, dtype: torch.dtype, **hyperparameters: str) -> float:
    """The most that PyTorch holds at once on the CPU in forward and backward beside the logits, in units of theirs."""
    logits = torch.randn(n, c, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    loss, labels = make_loss(name, **hyperparameters), torch.arange(n) % c
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        loss(logits, labels).backward()
    sizes = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return int(torch.tensor(sizes).cumsum(0).max()) / logits.nbytes


@pytest.mark.parametrize("name", ["dual_focal", "focal_calibration", "mmce", "focal_calibration in 16 bits"])
def test_large_logits_need_their_gradient_only(name: str) -> None:
    """And buffers of a block or two: of 2^18 float32, here 3% of the logits, or 6% of 16-bit ones.

    Of `F.cross_entropy` it is 3.0 times the logits.
    """
    loss, _, in_16_bits = name.partition(" ")
    dtype, limit = (torch.bfloat16, 1.25) if in_16_bits else (torch.float32, 1.05)
    assert 1.0 <= backward_memory(loss, 2048, 4000, dtype) < limit


def test_a_kernel_density_looks_at_pairs_of_confidences() -> None:
    """A few (N, N) matrices, never (N, N, C); the canonical one adds matrices like the logits."""
    n, c = 256, 200
    assert backward_memory("kde_ece", n, c, torch.float32) * c / n < 6
    assert backward_memory("kde_ece", n, c, torch.float32, kind="canonical") < 6 * n / c + 12


class Operations(TorchDispatchMode):
    """Count PyTorch's operations."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "most"), [("cross_entropy", 11), ("focal", 16), ("focal_gra", 32)])
def test_operations_of_a_small_batch(name: str, most: int) -> None:
    """Forward and backward; `F.cross_entropy` takes 8. Each costs microseconds, of few rows more than the numbers."""
    logits, labels = random_batch(32, 4)
    leaf, loss = logits.float().requires_grad_(), make_loss(name)
    with Operations() as operations:
        loss(leaf, labels).backward()
    assert operations.count <= most


class FirstStep(TrainerCallback):
    """Keeps the gradient that the first optimizer step takes."""

    gradient: Tensor

    def on_pre_optimizer_step(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        self.gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["focal", "adafocal"])
def test_the_stock_trainer_accumulates_to_the_same_gradient(name: str, tmp_path: Path) -> None:
    """A step over all eight sentences in one batch, and in four, against one call of the loss."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(VOCABULARY, (8, 6), generator=generator)
    labels = torch.randint(N_LABELS, (8,), generator=generator)
    model = tiny_bert()
    value = make_loss(name)(model(input_ids=words), labels)
    value.backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    rows: Any = [{"input_ids": each, "labels": label} for each, label in zip(words, labels, strict=True)]
    for batch_size in (8, 2):
        args = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=batch_size, gradient_accumulation_steps=8 // batch_size,
            max_steps=1, max_grad_norm=0, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=True, dataloader_pin_memory=False,
        )  # fmt: skip  # clipping would hide a wrong scale
        first = FirstStep()
        given: Any = {"train_dataset": rows, "compute_loss_func": make_loss(name), "callbacks": [first]}
        trainer = Trainer(tiny_bert(), args, **given)
        trainer.train()
        assert trainer.state.log_history[0]["loss"] == pytest.approx(value.item(), abs=1e-6)
        assert_close(first.gradient, want, rtol=1e-4, atol=1e-7)


class TestOutputsOfModels:
    LOGITS = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    LABELS = torch.arange(10).view(2, 5) % 7

    @pytest.mark.parametrize("outputs", ["object", "mapping", "tuple"])
    def test_any_output_of_a_model(self, outputs: str) -> None:
        z = self.LOGITS
        given = {"object": TokenClassifierOutput(logits=z), "mapping": {"logits": z}, "tuple": (z, None)}
        assert make_loss("focal")(given[outputs], self.LABELS) == make_loss("focal")(z, self.LABELS)

    def test_labels_of_a_language_model_that_were_not_shifted_are_warned_of(self) -> None:
        loss = make_loss("focal")
        with pytest.warns(
            UserWarning, match=r"learns to copy its input\. Use CalibrationTrainer, which shifts"
        ):
            assert loss(CausalLMOutput(logits=self.LOGITS), self.LABELS) == loss(self.LOGITS, self.LABELS)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss(TokenClassifierOutput(logits=self.LOGITS), self.LABELS)
            loss(CausalLMOutput(logits=self.LOGITS).logits[:, :-1], self.LABELS[:, 1:])
