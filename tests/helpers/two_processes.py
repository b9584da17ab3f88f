"""What the tests run on two processes at once."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import DataCollatorWithFlattening, DataCollatorWithPadding

from hf_calib import CalibrationTrainer
from hf_calib.scaling import MatrixScaling, VectorScaling
from hf_calib.trainer.evaluation import Evaluation
from tests.helpers.runs import BATCH_CASES, CASES, RAGGED_ROWS, evaluate, resume, run
from tests.helpers.tiny import (
    arguments,
    sequences,
    tagged,
    tiny_bert,
    tiny_trainer,
    tokenizer,
)


class Unlucky(VectorScaling):
    """Its fit fails where it would be done twice."""

    def fit(self, logits: Any, labels: Any) -> VectorScaling:
        assert dist.get_rank() == 0
        raise ArithmeticError("out of luck")


EVALUATIONS = {
    "Sequence": 13,
    "Token": 6,
    "Stream": 13,
    "Soft": 13,
    "Sequence few": 3,
}  # none fills 2 processes x 4 rows


PASSES = ("none", "evaluate", "predict", "fit_temperature")


def train_and_evaluate(rank: int, folder: Path) -> None:
    """The trainings that are to be those of one process, and everything else that needs two."""
    results = {name: run(name, folder / "out", 2, 2, n=RAGGED_ROWS) for name in CASES}
    results |= {
        name: run(name, folder / "out", 4, 1, n=RAGGED_ROWS) for name in BATCH_CASES
    }
    results["whole"], results["resumed"] = resume(folder / "resumed")
    (folder / f"evaluations_{rank}.json").write_text(json.dumps(_evaluations(folder)))
    if rank == 0:
        torch.save(results, folder / "results.pt")


def _evaluations(folder: Path) -> dict[str, Any]:
    """On each process: metrics, temperature and gammas; they have to agree."""
    found: dict[str, Any] = {}
    for name, n in EVALUATIONS.items():
        before, after, _ = evaluate(name.split()[0], folder / "out", n)
        found[name] = {"before": before, "after": after}
    settings = {"loss": "adafocal", "eval_strategy": "steps", "eval_steps": 1}
    trainer = tiny_trainer(folder / "gammas", n=(16, 21, 13), **settings)
    trainer.train()
    found["gammas"] = trainer.calibration_loss.gammas.tolist()
    found["edges"] = trainer.calibration_loss.edges.tolist()
    found["temperature"] = trainer.temperature
    matrix = trainer.fit_calibration_map(MatrixScaling())
    found["map"] = [part.tolist() for part in matrix.affine_map()]
    found["refused"] = []
    for scaler in (MatrixScaling(bias_penalty=-1.0), Unlucky()):
        try:
            trainer.fit_calibration_map(scaler)
        except Exception as error:
            found["refused"].append(f"{type(error).__name__}: {error}")
    trainer.fit_temperature()
    found["log"] = [_without_times(entry) for entry in trainer.state.log_history]
    trainer.save_calibrated_model(folder / "calibrated")
    found["not pushed"] = ""
    os.environ["HF_TOKEN"] = "hf_x"
    (folder / "a file").touch()
    for refused in (
        trainer.push_to_hub,
        partial(trainer.save_calibrated_model, folder / "a file"),
    ):
        try:
            refused()
        except Exception as error:
            found["not pushed"] += f"{type(error).__name__}: {error}\n"
    found["passed before"] = {
        name: trained_after(name, folder / "passed") for name in PASSES
    }
    found["of one"] = given_on_the_first_only(folder / "given")
    found["grouped"] = order_of_grouped(folder / "grouped")
    found["without padding"] = counted_without_padding(folder / "flat")
    found["kept"] = []
    # 6 rows on each: one process sees 8, the other 5.
    for few in (Evaluation.FEW_VALUES, 2 * 6 * Evaluation.VALUES_OF_A_ROW):
        Evaluation.FEW_VALUES = few
        trainer.evaluate()
        assert trainer.last_evaluation is not None
        found["kept"].append(
            [labels.tolist() for _, labels in trainer.last_evaluation.rows]
        )
    return found


def trained_after(name: str, folder: Path) -> list[float]:
    """The weights of a training of two steps after a pass of this name."""
    trainer = tiny_trainer(folder, n=(16, 21, 13), calibration_method="none")
    if name == "predict":
        trainer.predict(trainer.eval_dataset)
    elif name != "none":
        getattr(trainer, name)()
    trainer.train()
    return torch.cat([each.flatten() for each in trainer.model.parameters()]).tolist()


def given_on_the_first_only(folder: Path) -> list[str]:
    """The errors of a training and of a fit whose calibration rows the second process does not have."""
    trainer = tiny_trainer(folder, n=(16, 21, 13))
    if dist.get_rank() == 1:
        trainer.calibration_dataset = None
    errors = []
    for work in (trainer.train, trainer.fit_temperature):
        try:
            work()
        except ValueError as error:
            errors.append(str(error))
    return errors


def order_of_grouped(folder: Path) -> list[list[int]]:
    """The labels of a prediction and of an evaluation of rows of several lengths, and those of the rows."""
    model = tiny_bert()
    lengths = [8, 3, 5, 2, 7, 4, 6, 8, 2, 3, 5, 7, 4]
    rows = sequences(model, len(lengths), seed=3)
    ids = [row[:n] for row, n in zip(rows["input_ids"], lengths, strict=True)]
    ragged = Dataset.from_dict({"input_ids": ids, "label": rows["label"][:]})
    args = arguments(
        folder,
        train_sampling_strategy="group_by_length",
        per_device_eval_batch_size=4,
        calibration_method="none",
    )
    collator = DataCollatorWithPadding(tokenizer())
    trainer = CalibrationTrainer(
        model, args, eval_dataset=ragged, data_collator=collator
    )
    predicted = trainer.predict(ragged).label_ids
    trainer.evaluate(keep_logits=True)
    assert trainer.last_evaluation is not None
    kept = trainer.last_evaluation.logits_and_labels()[1]
    return [np.asarray(predicted).tolist(), kept.tolist(), ragged["label"][:]]


def counted_without_padding(folder: Path) -> int:
    """The labels that an evaluation of 13 rows, end to end in one, has counted: 5 rows are left for the last batch."""
    model = tiny_bert("Token")
    args = arguments(folder, per_device_eval_batch_size=4, calibration_method="none")
    rows, collator = tagged(model, 13), DataCollatorWithFlattening()
    trainer = CalibrationTrainer(model, args, eval_dataset=rows, data_collator=collator)
    trainer.evaluate()
    assert trainer.last_evaluation is not None
    assert trainer.last_evaluation.raw is not None
    return len(trainer.last_evaluation.raw.top_label_rows.correct)


def _without_times(entry: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in entry.items() if not k.endswith(("time", "per_second"))}
