"""Tiny models, and data whose labels they could have given: drawn from softmax(logits / TRUE_TEMPERATURE)."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments

transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)  # the models are tiny, and the cores are shared

N_LABELS, VOCABULARY, LENGTH = 4, 64, 8
TRUE_TEMPERATURE = 1.7
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
TEXT |= {"vocab_size": VOCABULARY, "max_position_embeddings": 16}


def tiny_bert(
    kind: str = "Sequence", *, seed: int = 0, dropout: float = 0.0, **config: Any
) -> Any:
    """A random BERT classifier whose logits spread by about 2, like those of a trained one."""
    settings = dict.fromkeys(
        ("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model_class = getattr(transformers, f"BertFor{kind}Classification")
        model = model_class(
            transformers.BertConfig(
                **{**TEXT, **settings, "num_labels": N_LABELS, **config}
            )
        )
    with torch.no_grad():
        model.classifier.weight *= 30 if kind == "Token" else 200
    return model


# Most tests ask for the same rows of the same model, and a dataset takes longer to make than to train on.
_MADE: dict[tuple[bytes, str | None, int, int], Dataset] = {}


def sequences(model: Any, n: int, *, seed: int = 1) -> Dataset:
    """Token ids and a label per row; for a multi-label model N_LABELS floats."""
    weights = b"".join(
        weight.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        for weight in model.state_dict().values()
    )
    key = (hashlib.sha256(weights).digest(), model.config.problem_type, n, seed)
    if key not in _MADE:
        _MADE[key] = _sequences(model, n, seed)
    return copy.copy(_MADE[key])  # Formats are set on the object, rows never.


def _sequences(model: Any, n: int, seed: int) -> Dataset:
    ids, logits, generator = _ids_and_logits(model, n, seed)
    if model.config.problem_type == "multi_label_classification":
        labels = torch.bernoulli(
            (logits / TRUE_TEMPERATURE).sigmoid(), generator=generator
        )
    else:
        labels = _drawn(logits, generator)
    return Dataset.from_dict({"input_ids": ids.tolist(), "label": labels.tolist()})


def shared(model: Any, n: int, *, seed: int = 1) -> Dataset:
    """The same token ids with the distribution from which `sequences` draws the label of a row."""
    ids, logits, _ = _ids_and_logits(model, n, seed)
    probs = (logits.double() / TRUE_TEMPERATURE).softmax(1)
    return Dataset.from_dict({"input_ids": ids.tolist(), "label": probs.tolist()})


def tagged(model: Any, n: int, *, seed: int = 1) -> Dataset:
    """Token ids and a label per token, -100 for the last 0 to 6 of each row."""
    ids, logits, generator = _ids_and_logits(model, n, seed)
    labels = _drawn(logits.flatten(0, 1), generator).view(n, LENGTH)
    ends = torch.randint(2, LENGTH + 1, (n, 1), generator=generator)
    labels = labels.where(torch.arange(LENGTH) < ends, -100)
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})


def _ids_and_logits(
    model: Any, n: int, seed: int
) -> tuple[Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY, (n, LENGTH), generator=generator)
    teacher = copy.deepcopy(model).eval()
    with torch.no_grad():
        return ids, teacher(input_ids=ids)[0], generator


def _drawn(logits: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(
        (logits / TRUE_TEMPERATURE).softmax(1), 1, generator=generator
    ).squeeze(1)


def arguments(folder: Path | str, **overrides: Any) -> CalibrationTrainingArguments:
    """Arguments of a quiet training of a few steps on the CPU, logged at each step."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "calibration_method": "temperature",  # what most tests are about; tests of the maps try each of them
    }
    return CalibrationTrainingArguments(**{**settings, **overrides})


def tiny_trainer(
    folder: Path | str, *, n: tuple[int, int, int] = (16, 40, 24), **overrides: Any
) -> Any:
    """A trainer with n = (training, calibration, evaluation) examples; arguments as for `arguments`."""
    model = tiny_bert()
    train, calibration, evaluation = (
        sequences(model, size, seed=i + 1) for i, size in enumerate(n)
    )
    return CalibrationTrainer(
        model,
        arguments(folder, **overrides),
        train_dataset=train,
        calibration_dataset=calibration,
        eval_dataset=evaluation,
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Words "w0" to "w58" for the token ids from 5 on."""
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(f"w{i}" for i in range(VOCABULARY - 5)),
    ]
    made = Tokenizer(
        WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]"
    )


def text_of(ids: list[int]) -> str:
    return " ".join(f"w{i - 5}" for i in ids)


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def last_evaluation(trainer: Any) -> dict[str, float]:
    """The last evaluation in the log."""
    return [entry for entry in trainer.state.log_history if "eval_ece" in entry][-1]


def weights(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Bit for bit; NaN is the same as NaN."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        assert ours[name].numpy().tobytes() == theirs[name].numpy().tobytes(), name


def differences(
    ours: dict[str, Tensor], theirs: dict[str, Tensor]
) -> tuple[float, float]:
    """Largest absolute difference, and the absolute mean difference: a one-sided drift shows in the latter."""
    assert ours.keys() == theirs.keys()
    parts = [
        (ours[name] - theirs[name]).flatten()
        for name in ours
        if ours[name].is_floating_point()
    ]
    gaps = torch.cat(parts)
    return float(gaps.abs().max()), abs(float(gaps.mean()))
