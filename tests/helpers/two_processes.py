"""Everything that the tests run on two processes at once.

torchrun --nproc_per_node 2 -m tests.helpers.two_processes FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_calib.experiments import train_and_report
from hf_calib.report import calibration_report, of_predictions
from hf_calib.scaling import MatrixScaling, VectorScaling
from hf_calib.trainer.evaluation_pass import EvaluationPass
from tests.helpers.runs import (
    BATCH_CASES,
    CASES,
    GLOBAL_BATCH,
    RAGGED,
    RAGGED_ROWS,
    cross_calibrated,
    evaluate,
    resume,
    run,
    searched,
)
from tests.helpers.tiny import tiny_trainer

torch.set_num_threads(1)


class Unlucky(VectorScaling):
    """Its fit fails where it would be done twice."""

    def fit(self, logits: Any, labels: Any) -> VectorScaling:
        assert dist.get_rank() == 0
        raise ArithmeticError("out of luck")


EVALUATIONS = {"Sequence": 13, "Token": 6, "Stream": 13, "Sequence few": 3}  # none fills 2 processes x 4 rows


def main(folder: Path, only: list[str]) -> None:
    results: dict[str, Any] = {}
    for name in only or [*CASES, *BATCH_CASES]:
        micro = GLOBAL_BATCH // 2
        results[name] = run(name, folder / "out", micro, 1)
        if name in CASES:
            results[f"{name}, accumulated"] = run(name, folder / "out", micro // 2, 2)
    for name in () if only else RAGGED:
        for micro in (4, 2) if name in CASES else (4,):
            results[f"{name}, ragged, {micro}"] = run(name, folder / "out", micro, 4 // micro, n=RAGGED_ROWS)
    assert dist.get_world_size() == 2
    if not only:
        results["whole"], results["resumed"] = resume(folder / "resumed")
    evaluations = {} if only else _evaluations(folder)
    (folder / f"evaluations_{dist.get_rank()}.json").write_text(json.dumps(evaluations))
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()
    # Not through the interpreter's own end: there, gloo's threads have aborted a finished process.
    os._exit(0)


def _evaluations(folder: Path) -> dict[str, Any]:
    """On each process: metrics, temperature and gammas; they have to agree."""
    found: dict[str, Any] = {}
    for name, n in EVALUATIONS.items():
        before, after, _ = evaluate(name.split()[0], folder / "out", n)
        found[name] = {"before": before, "after": after}
    settings = {"loss": "adafocal", "eval_strategy": "steps", "eval_steps": 1, "training_trace": True}
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
    (folder / "a file").touch()
    for refused in (trainer.push_to_hub, partial(trainer.save_calibrated_model, folder / "a file")):
        try:
            refused()
        except Exception as error:
            found["not pushed"] += f"{type(error).__name__}: {error}\n"
    found["cross-calibrated"] = [cross_calibrated(folder / "cross", GLOBAL_BATCH // 2) for _ in range(2)]
    found["searched"] = searched(folder / "searched", GLOBAL_BATCH // 2)
    reported = tiny_trainer(folder / "reported", n=(16, 21, 13), num_train_epochs=1)
    of_predictions.calibration_report = partial(calibration_report, n_resamples=10)
    train_and_report(reported, reported.eval_dataset)
    assert reported.last_evaluation is not None
    wanted = reported.eval_dataset["label"]
    found["in order"] = reported.last_evaluation.logits_and_labels()[1].tolist() == list(wanted)
    found["kept"] = []
    for few in (
        EvaluationPass.FEW_VALUES,
        2 * 6 * EvaluationPass.VALUES_OF_A_ROW,
    ):  # 6 rows on each: one process sees 8, the other 5
        EvaluationPass.FEW_VALUES = few
        reported.evaluate()
        assert reported.last_evaluation is not None
        found["kept"].append([len(labels) for _, labels in reported.last_evaluation.rows])
    found["written"] = sorted(path.name for path in (folder / "reported").iterdir())
    return found


def _without_times(entry: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in entry.items() if not k.endswith(("time", "per_second"))}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
