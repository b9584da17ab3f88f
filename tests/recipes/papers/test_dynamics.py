"""`TrainingTrace`: what it records, that it changes nothing, that a resumed training goes on; figures sort its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from papers.dynamics import Trace, TrainingTrace, learned_epoch, learned_groups
from transformers import TrainerCallback

from hf_calib.metrics import expected_calibration_error
from tests.helpers.tiny import assert_same, tiny_trainer, weights

pytestmark = pytest.mark.slow

EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1e-2}
GAMMAS = {"loss": "adafocal", "loss_kwargs": {"n_bins": 5}, "n_bins": 5}


def traced(
    folder: Path, *, rows: tuple[int, int] | None = (10, 6), **settings: Any
) -> Any:
    trainer = tiny_trainer(folder, **{**EACH_STEP, **settings})
    if rows is not None:
        trainer.add_callback(
            TrainingTrace(trainer, n_training_rows=rows[0], n_kept_rows=rows[1])
        )
    return trainer


class Watch(TrainerCallback):
    """Keeps the probabilities and largest logits of both sets at each evaluation."""

    def __init__(self, trainer: Any, datasets: dict[str, Any]) -> None:
        self.trainer, self.seen = trainer, []
        self.inputs = {
            name: torch.tensor(rows["input_ids"]) for name, rows in datasets.items()
        }

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = self.trainer.model.eval()
        with torch.no_grad():
            logits = {
                name: model(input_ids=ids).logits.double()
                for name, ids in self.inputs.items()
            }
        self.seen.append((state.global_step, logits))


def test_it_records_what_the_logits_say(tmp_path: Path) -> None:
    trainer = traced(tmp_path, **GAMMAS)
    sample = (
        torch.randperm(16, generator=torch.Generator().manual_seed(trainer.args.seed))[
            :10
        ]
        .sort()
        .values
    )
    datasets = {
        "eval": trainer.eval_dataset,
        "training": trainer.train_dataset.select(sample.tolist()),
    }
    watch = Watch(trainer, datasets)
    trainer.add_callback(watch)
    trainer.train()
    trace = Trace.load(tmp_path)
    assert (trace.loss, list(trace.sets)) == ("adafocal", ["eval", "training"])
    seen = [logits for step, logits in watch.seen if step > 0][
        :4
    ]  # the last one is after the training
    for name, found in trace.sets.items():
        assert found.steps.tolist() == [1, 2, 3, 4]
        assert found.epochs.tolist() == [0.25, 0.5, 0.75, 1.0]
        labels = np.array(datasets[name]["label"])
        kept = (
            found.rows.astype(int)
            if name == "eval"
            else np.searchsorted(sample.numpy(), found.rows)
        )
        assert len(set(kept)) == 6
        for t, at in enumerate(seen):
            logits = at[name]
            probs = logits.softmax(dim=1).numpy()
            confidence, right = probs.max(1), probs.argmax(1) == labels
            of_label = probs[range(len(labels)), labels]
            rival = np.where(probs < of_label[:, None], probs, 0).max(axis=1)
            own_bin = np.digitize(confidence, found.edges[t][1:-1], right=True)
            label_bin = np.digitize(of_label, found.edges[t][1:-1])
            counts = np.bincount(own_bin, minlength=5)
            label_counts = np.bincount(label_bin, minlength=5)
            sums = (
                np.bincount(own_bin, confidence, minlength=5),
                np.bincount(own_bin, right, minlength=5),
            )
            with np.errstate(invalid="ignore"):
                wanted = {
                    "n": len(labels),
                    "accuracy": right.mean(),
                    "ece": expected_calibration_error(probs, labels, n_bins=5),
                    "counts": counts,
                    "bin_confidence": sums[0] / counts,
                    "bin_accuracy": sums[1] / counts,
                    "label_counts": label_counts,
                    "label_probability": np.bincount(label_bin, of_label, minlength=5)
                    / label_counts,
                    "row_confidence": confidence[kept],
                    "row_correct": right[kept],
                    "row_label_probability": of_label[kept],
                    "row_rival_probability": rival[kept],
                    "row_max_logit": logits.numpy().max(axis=1)[kept],
                }
            for key, value in wanted.items():
                np.testing.assert_allclose(
                    getattr(found, key)[t], value, rtol=2e-5, atol=1e-6, err_msg=key
                )
    np.testing.assert_array_equal(
        trace.sets["eval"].edges, trace.sets["training"].edges
    )
    logged = [entry for entry in trainer.state.log_history if "gamma_00" in entry]
    after = [[entry[f"gamma_{m:02d}"] for m in range(5)] for entry in logged]
    np.testing.assert_allclose(trace.gammas, after, rtol=1e-5)


def test_test_rows_are_recorded_in_the_bins_of_the_evaluation_rows(
    tmp_path: Path,
) -> None:
    trainer = tiny_trainer(tmp_path, **EACH_STEP)
    test = trainer.train_dataset.select(range(3, 14))
    trainer.add_callback(TrainingTrace(trainer, test_dataset=test))
    watch = Watch(trainer, {"test": test})
    trainer.add_callback(watch)
    trainer.train()
    trace = Trace.load(tmp_path)
    assert list(trace.sets) == ["eval", "test", "training"]
    found = trace.sets["test"]
    assert found.n.tolist() == [11] * 4
    np.testing.assert_array_equal(found.edges, trace.sets["eval"].edges)
    np.testing.assert_array_equal(
        trace.sets["training"].edges, trace.sets["eval"].edges
    )
    seen = [logits["test"] for step, logits in watch.seen if step > 0][:4]
    errors = [
        expected_calibration_error(logits.softmax(dim=1), test["label"], n_bins=15)
        for logits in seen
    ]
    np.testing.assert_allclose(found.ece, errors, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_the_training_is_the_same_with_it_and_when_resumed(tmp_path: Path) -> None:
    settings = {**GAMMAS, "save_strategy": "steps", "save_steps": 2}
    plain = traced(tmp_path / "plain", rows=None, **settings)
    plain.train()
    whole = traced(tmp_path / "whole", **settings)
    whole.train()
    assert_same(weights(plain.model), weights(whole.model))
    stopped = traced(tmp_path / "stopped", **settings)
    stopped.train()
    stopped = traced(tmp_path / "stopped", **settings)
    stopped.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-2"))
    assert_same(weights(plain.model), weights(stopped.model))
    texts = [
        (tmp_path / name / "training_trace.json").read_text()
        for name in ("whole", "stopped")
    ]
    assert texts[0] == texts[1]


def test_when_rows_are_learned_against_a_loop() -> None:
    rng = np.random.default_rng(0)
    correct, epochs = rng.random((12, 400)) < 0.7, np.arange(1, 13) / 2
    for r in range(400):
        right = correct[:, r]
        wrong = np.flatnonzero(~right)
        after = 0 if len(wrong) == 0 else wrong[-1] + 1
        last = epochs[after] if after < 12 else np.inf
        assert learned_epoch(epochs, correct)[r] == last


@pytest.mark.parametrize("epochs", [[2, 1], [1, 2, 3], [1, 1]])
def test_epochs_out_of_order_are_refused(epochs: list[int]) -> None:
    with pytest.raises(ValueError, match="expected 2 epochs that rise"):
        learned_epoch(epochs, [[0, 1], [1, 1]])


@pytest.mark.parametrize("boundaries", [[5, 2], [2, 2], []])
def test_boundaries_that_do_not_rise_are_refused(boundaries: list[float]) -> None:
    with pytest.raises(ValueError, match="expected boundaries to be numbers that rise"):
        learned_groups([1.0, 3.0], boundaries)
