"""`TrainingTrace`: what it records, that it changes nothing, and that it survives a kill and two processes."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from hf_calib import CalibrationTrainer, TrainingTrace
from hf_calib.metrics import expected_calibration_error
from hf_calib.metrics.sums import quantile_edges
from hf_calib.papers import Trace
from hf_calib.trainer.evaluation_pass import row_scores
from hf_calib.trainer.training_trace import _calibration
from tests.helpers.tiny import arguments, assert_same, sequences, tagged, tiny_bert, tiny_trainer, weights

EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1e-2}
GAMMAS = {"loss": "adafocal", "loss_kwargs": {"n_bins": 5}, "n_bins": 5}


def traced(folder: Path, trace: TrainingTrace | None = None, **settings: Any) -> Any:
    trainer = tiny_trainer(folder, **{**EACH_STEP, **settings})
    if trace is not None:
        trainer.add_callback(trace)
    return trainer


class Watch(TrainerCallback):
    """Keeps the logits of both sets at each evaluation, computed by the model itself."""

    def __init__(self, trainer: Any, datasets: dict[str, Any]) -> None:
        self.trainer = trainer
        self.inputs = {name: torch.tensor(rows["input_ids"]) for name, rows in datasets.items()}
        self.seen: list[dict[str, Any]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = self.trainer.model.eval()
        with torch.no_grad():
            logits = {name: model(input_ids=ids).logits for name, ids in self.inputs.items()}
        self.seen.append({"step": state.global_step, **logits})


def reference(logits: torch.Tensor, labels: list[int], edges: np.ndarray) -> dict[str, np.ndarray]:
    """By a loop over the bins, in float64."""
    probs = logits.double().softmax(dim=1).numpy()
    confidence, right = probs.max(1), probs.argmax(1) == np.array(labels)
    of_label = probs[np.arange(len(labels)), labels]
    low, high = np.r_[-1, edges[1:-1]], np.r_[edges[1:-1], 2]
    inside = [(confidence > a) & (confidence <= b) for a, b in zip(low, high, strict=True)]
    by_label = [(of_label >= a) & (of_label < b) for a, b in zip(low, high, strict=True)]
    return {
        "counts": np.array([mask.sum() for mask in inside]),
        "bin_confidence": np.array([confidence[m].mean() if m.any() else np.nan for m in inside]),
        "bin_accuracy": np.array([right[m].mean() if m.any() else np.nan for m in inside]),
        "label_counts": np.array([mask.sum() for mask in by_label]),
        "label_probability": np.array([of_label[m].mean() if m.any() else np.nan for m in by_label]),
        "row_confidence": confidence,
        "row_correct": right.astype(float),
        "row_label_probability": of_label,
        "row_rival_probability": np.array(
            [max((p for p in row if p < row[y]), default=0.0) for row, y in zip(probs, labels, strict=True)]
        ),
        "row_max_logit": logits.double().max(dim=1).values.numpy(),
    }


@pytest.mark.parametrize(
    "loss",
    [pytest.param({"loss": "focal", "n_bins": 5}, marks=pytest.mark.deep, id="focal"), GAMMAS],
)
def test_it_records_what_the_logits_say(loss: dict[str, Any], tmp_path: Path) -> None:
    trainer = traced(tmp_path, TrainingTrace(n_training_rows=10, n_kept_rows=6), **loss)
    sample = torch.randperm(16, generator=torch.Generator().manual_seed(trainer.args.seed))[:10].sort().values
    training = trainer.train_dataset.select(sample.tolist())
    watch = Watch(trainer, {"eval": trainer.eval_dataset, "training": training})
    trainer.add_callback(watch)
    trainer.train()

    trace = Trace.load(tmp_path)
    assert trace.loss == loss["loss"]
    assert trace.sets.keys() == {"eval", "training"}
    seen = [each for each in watch.seen if each["step"] > 0][:4]  # the last one is after the training
    for name, found in trace.sets.items():
        assert found.steps.tolist() == [1, 2, 3, 4]
        assert found.epochs.tolist() == [0.25, 0.5, 0.75, 1.0]
        labels = (trainer.eval_dataset if name == "eval" else training)["label"]
        assert found.n.tolist() == [len(labels)] * 4
        kept = found.rows if name == "eval" else np.searchsorted(sample.numpy(), found.rows)
        assert len(kept) == 6
        assert sorted(set(kept)) == kept.tolist()
        for t, at in enumerate(seen):
            wanted = reference(at[name], labels, found.edges[t])
            for key, values in wanted.items():
                ours = getattr(found, key)[t]
                values = values[kept] if key.startswith("row_") else values
                np.testing.assert_allclose(ours, values, rtol=2e-5, atol=1e-6, err_msg=key)
            assert found.counts[t].sum() == found.label_counts[t].sum() == len(labels)
            probs = at[name].double().softmax(dim=1).numpy()
            ece = expected_calibration_error(probs, labels, n_bins=5)
            adaptive = expected_calibration_error(probs, labels, n_bins=5, binning="quantile")
            assert (found.ece[t], found.adaptive_ece[t]) == pytest.approx((ece, adaptive), abs=1e-6)
    np.testing.assert_array_equal(trace.sets["eval"].edges, trace.sets["training"].edges)


@pytest.mark.deep
def test_a_disk_that_fills_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = traced(tmp_path, TrainingTrace(n_training_rows=0))

    @contextmanager
    def full(path: Path) -> Iterator[Path]:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield path

    monkeypatch.setattr("hf_calib.trainer.training_trace.whole_file", full)
    with pytest.warns(
        UserWarning, match=r"training_trace.json could not be written .*No space left.* goes on"
    ):
        trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps
    assert trainer.calibration_map is not None


@pytest.mark.deep
def test_the_log_and_the_trace_tell_the_same(tmp_path: Path) -> None:
    trainer = traced(tmp_path, TrainingTrace(n_training_rows=0), **GAMMAS)
    trainer.train()
    trace = Trace.load(tmp_path / "training_trace.json")
    assert trace.sets.keys() == {"eval"}
    logged = [entry for entry in trainer.state.log_history if "gamma_00" in entry]
    after = [[entry[f"gamma_{m:02d}"] for m in range(5)] for entry in logged]
    np.testing.assert_allclose(trace.gammas_after, after, rtol=1e-5)
    np.testing.assert_array_equal(trace.gammas_before[0], np.ones(5))
    np.testing.assert_array_equal(trace.gammas_before[1:], trace.gammas_after[:-1])
    edges = [[entry[f"edge_{m:02d}"] for m in range(6)] for entry in logged]
    np.testing.assert_allclose(trace.sets["eval"].edges, edges, rtol=1e-5)
    ece = [entry["eval_ece"] for entry in trainer.state.log_history if "eval_ece" in entry][:4]
    assert trace.sets["eval"].ece.tolist() == pytest.approx(ece, abs=1e-6)
    assert trainer.state.log_history[-1]["step"] == 4


@pytest.mark.deep
def test_without_a_table_the_bins_are_of_equal_mass(tmp_path: Path) -> None:
    trainer = traced(tmp_path, training_trace=True, n_bins=4, calibration_method="none")  # as an argument
    trainer.train()
    found = Trace.load(tmp_path).sets["eval"]
    edges = quantile_edges(trainer.last_evaluation.labelled().confidences, 4)
    np.testing.assert_allclose(found.edges[-1], edges, rtol=1e-5)
    assert set(found.counts.flatten()) == {5.0, 6.0, 7.0}  # the smallest is in the first bin, not left out
    np.testing.assert_allclose(found.gaps, found.bin_confidence - found.bin_accuracy)
    assert Trace.load(tmp_path).gammas_after.shape == (0, 0)


@pytest.mark.deep
def test_the_training_is_the_same_with_it(tmp_path: Path) -> None:
    ends = []
    for trace in (None, TrainingTrace()):
        trainer = traced(tmp_path / str(trace is None), trace, num_train_epochs=2, **GAMMAS)
        trainer.train()
        log = [{k: v for k, v in entry.items() if "second" not in k and "time" not in k and "flos" not in k}
               for entry in trainer.state.log_history]  # fmt: skip
        ends.append((weights(trainer.model), log))
    assert_same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


@pytest.mark.deep
def test_tokens_and_several_evaluation_sets(tmp_path: Path) -> None:
    model = tiny_bert("Token")
    trainer = CalibrationTrainer(
        model,
        arguments(tmp_path, **EACH_STEP, calibration_method="none"),
        train_dataset=tagged(model, 8),
        eval_dataset={"one": tagged(model, 5, seed=2), "two": tagged(model, 7, seed=3)},
    )
    trainer.add_callback(TrainingTrace(n_training_rows=4, n_kept_rows=3))
    trainer.train()
    trace = Trace.load(tmp_path)
    assert trace.sets.keys() == {"eval_one", "eval_two", "training"}
    for name, key in (("one", "eval_one"), ("two", "eval_two")):
        n = sum(label != -100 for row in trainer.eval_dataset[name]["labels"] for label in row)
        assert trace.sets[key].n.tolist() == [n, n]
        assert trace.sets[key].row_correct.shape == (2, 3)


@pytest.mark.deep
def test_a_second_training_starts_anew_and_the_final_evaluation_is_left_out(tmp_path: Path) -> None:
    trainer = traced(tmp_path, TrainingTrace(), eval_steps=2)
    for _ in range(2):
        trainer.train()
        trainer.evaluate()
        assert Trace.load(tmp_path).sets["eval"].steps.tolist() == [2, 4]


@pytest.mark.deep
def test_an_evaluation_after_the_training_changes_nothing(tmp_path: Path) -> None:
    trainer = traced(tmp_path, TrainingTrace())
    trainer.train()
    written = (tmp_path / "training_trace.json").read_text()
    with torch.no_grad():
        trainer.model.classifier.weight *= -1
    trainer.evaluate()
    assert (tmp_path / "training_trace.json").read_text() == written


@pytest.mark.deep
def test_a_second_training_with_another_seed_follows_other_rows(tmp_path: Path) -> None:
    trainer = traced(tmp_path, TrainingTrace(n_training_rows=6, n_kept_rows=3))
    followed = []
    for seed in (1, 2):
        trainer.args.seed = seed
        trainer.train()
        followed.append({name: found.rows.tolist() for name, found in Trace.load(tmp_path).sets.items()})
        generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
        drawn = torch.randperm(24, generator=generators[0])[:3].sort().values.tolist()
        assert followed[-1]["eval"] == drawn
    assert followed[0] != followed[1]


def test_a_probability_on_an_edge_is_in_one_bin() -> None:
    """(low, high] for predictions and [low, high) for labels, as AdaFocal has them."""
    edges = np.array([0.0, 0.5, 0.75, 1.0])
    on = np.array([[0.5, 1, 0.5, 0, 0], [0.75, 0, 0.25, 0.25, 0], [0.625, 1, 0.75, 0, 0]])
    found = _calibration(on, edges, 3)["bins"]
    assert found["counts"] == [1, 2, 0]
    assert found["label_counts"] == [1, 1, 1]


@pytest.mark.deep
def test_logits_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    trainer = traced(tmp_path, TrainingTrace(), eval_steps=2, calibration_method="none")

    class Break(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                with torch.no_grad():
                    trainer.model.classifier.bias[0] = torch.nan

    trainer.add_callback(Break())
    with pytest.warns(UserWarning, match="no calibration metrics"):
        trainer.train()
    assert Trace.load(tmp_path).sets["eval"].steps.tolist() == [2]


@pytest.mark.deep
def test_what_cannot_be_traced_is_said_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="expected TrainingTrace to have evaluations to record, got eval_str"
    ):
        traced(tmp_path, TrainingTrace(), eval_strategy="no").train()
    trainer = traced(tmp_path, TrainingTrace(), max_steps=2)
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    with pytest.raises(
        ValueError, match="to draw training rows, got a training set without a length; set n_t"
    ):
        trainer.train()
    several = tiny_bert(problem_type="multi_label_classification")
    args = arguments(tmp_path, **EACH_STEP, calibration_method="none", training_trace=True)
    sets = {"train_dataset": sequences(several, 8), "eval_dataset": sequences(several, 8)}
    trainer = CalibrationTrainer(several, args, **sets)
    with pytest.raises(ValueError, match="to go with one label a row, got several labels a row"):
        trainer.train()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"n_training_rows": -1}, ValueError, "n_training_rows to be at least 0, got -1"),
        ({"n_kept_rows": 1.5}, TypeError, "n_kept_rows to be an integer, got 1.5"),
        ({"n_kept_rows": True}, TypeError, "n_kept_rows to be an integer, got True"),
    ],
)
def test_numbers_are_checked(settings: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        TrainingTrace(**settings)


def test_the_scores_of_saturated_and_tied_rows() -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 300.0, 0.0]], dtype=torch.float16)
    scores = row_scores(logits, torch.tensor([0, 2, 0]))
    assert scores[0].tolist() == [1, 1, 1, 0, 200]  # the others are 0 in float32
    assert scores[1].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 0, 1])  # none is strictly below
    assert scores[2].tolist() == [1, 0, 0, 0, 300]
    # Equal in log probability, but the second logit is the larger one.
    close = row_scores(torch.tensor([[0.0, 1e-8]]), torch.tensor([1]))
    assert close[0, 1] == 1


class Stop(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


@pytest.mark.deep
@pytest.mark.parametrize("restored_by_the_trainer", [False, True])
def test_a_resumed_training_continues_the_history(restored_by_the_trainer: bool, tmp_path: Path) -> None:
    settings = {**GAMMAS, "save_strategy": "steps", "save_steps": 2, "eval_on_start": True}
    settings["restore_callback_states_from_checkpoint"] = restored_by_the_trainer
    traced(tmp_path / "whole", TrainingTrace(n_kept_rows=5), **settings).train()
    stopped = traced(tmp_path / "broken", TrainingTrace(n_kept_rows=5), **settings)
    stopped.add_callback(Stop())
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert Trace.load(tmp_path / "broken").sets["eval"].steps.tolist() == [0, 1, 2, 3]
    resumed = traced(tmp_path / "broken", TrainingTrace(n_kept_rows=5), **settings)
    resumed.train(resume_from_checkpoint=True)
    whole, broken = ((tmp_path / name / "training_trace.json").read_text() for name in ("whole", "broken"))
    assert broken == whole
    saved = json.loads((tmp_path / "broken" / "checkpoint-2" / "trainer_state.json").read_text())
    entries = saved["stateful_callbacks"]["TrainingTrace"]["attributes"]["entries"]
    assert [entry["step"] for entry in entries] == [0, 1, 2]


@pytest.mark.deep
def test_an_evaluation_where_a_training_resumes_is_none_of_the_history(tmp_path: Path) -> None:
    """Evaluated every second step, and resumed from the third."""
    settings = {"eval_steps": 2, "save_strategy": "steps", "save_steps": 1, "eval_on_start": True}
    stopped = traced(tmp_path, TrainingTrace(), **settings)
    stopped.add_callback(Stop())
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    traced(tmp_path, TrainingTrace(), **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert Trace.load(tmp_path).sets["eval"].steps.tolist() == [0, 2, 4]


@pytest.mark.deep
def test_a_trace_can_begin_where_a_training_resumes(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    tiny_trainer(tmp_path, max_steps=2, **settings).train()
    trainer = tiny_trainer(tmp_path, max_steps=4, training_trace=True, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert Trace.load(tmp_path).sets["eval"].steps.tolist() == [3, 4]


@pytest.mark.deep
def test_a_trace_is_not_resumed_with_other_rows(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    first, second = (tiny_trainer(tmp_path, max_steps=steps, **settings) for steps in (2, 4))
    first.add_callback(TrainingTrace(n_kept_rows=5))
    first.train()
    second.add_callback(TrainingTrace(n_kept_rows=6))
    with pytest.raises(
        ValueError,
        match=r"be that of the checkpoint \(n_bins=15, n_gammas=None, n_kept_rows=5, .*, seed=42\)",
    ):
        second.train(resume_from_checkpoint=True)
    for other, got in (
        (
            {"n_bins": 10},
            "got n_bins=10, n_gammas=None, n_kept_rows=5, n_training_rows=1000, seed=42; resume with",
        ),
        ({"seed": 7}, r"got n_bins=15, .*, seed=7; resume with the same, or train anew"),
    ):
        trainer = tiny_trainer(tmp_path, max_steps=4, **other, **settings)
        trainer.add_callback(TrainingTrace(n_kept_rows=5))
        with pytest.raises(ValueError, match=got):
            trainer.train(resume_from_checkpoint=True)


@pytest.mark.deep
def test_a_trace_has_the_gammas_of_one_table(tmp_path: Path) -> None:
    saved = {**EACH_STEP, "save_strategy": "steps", "save_steps": 1, "training_trace": True}
    saved["calibration_method"] = "none"
    tiny_trainer(tmp_path, max_steps=2, **saved, **GAMMAS).train()
    with pytest.raises(
        ValueError, match=r"that of the checkpoint \(n_bins=5, n_gammas=5.*got n_bins=5, n_gammas=None"
    ):
        tiny_trainer(tmp_path, max_steps=4, loss="focal", n_bins=5, **saved).train(
            resume_from_checkpoint=True
        )


@pytest.mark.deep
def test_rows_are_left_out_where_they_are_not_the_same(tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    tiny_trainer(tmp_path, max_steps=2, training_trace=True, **settings).train()
    trainer = tiny_trainer(tmp_path, max_steps=4, training_trace=True, **settings)
    n_eval = len(trainer.eval_dataset)
    trainer.eval_dataset = trainer.eval_dataset.select(range(9))
    trainer.train(resume_from_checkpoint=True)
    found = Trace.load(tmp_path).sets
    assert found["eval"].n.tolist() == [n_eval, n_eval, 9, 9]
    assert np.isnan(found["eval"].row_confidence).all(axis=1).tolist() == [False, False, True, True]
    assert np.isfinite(found["training"].row_confidence).all()


@pytest.mark.deep
def test_an_evaluation_within_an_evaluation_is_not_the_set_of_the_trace(tmp_path: Path) -> None:
    """A user's callback that evaluates another set, under whatever name, changes neither trace nor gammas."""

    class Probe(TrainerCallback):
        def __init__(self, trainer: Any) -> None:
            self.trainer, self.inside = trainer, False

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.inside and state.global_step:
                self.inside = True
                for prefix in ("eval", "training", "probe"):
                    rows = self.trainer.train_dataset.select(range(3))
                    self.trainer.evaluate(rows, metric_key_prefix=prefix, keep_logits=True)
                    assert len(self.trainer.last_evaluation.logits_and_labels()[1]) == 3
                self.inside = False

    def without_times(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {k: v for k, v in entry.items() if "second" not in k and "time" not in k and "flos" not in k}
            for entry in log
            if "gamma_00" in entry
        ]

    ends = []
    for probed in (False, True):
        trainer = traced(tmp_path / str(probed), TrainingTrace(n_kept_rows=5), **GAMMAS)
        if probed:
            trainer.callback_handler.callbacks.insert(1, Probe(trainer))  # before those of the trainer
        trainer.train()
        text = (tmp_path / str(probed) / "training_trace.json").read_text()
        ends.append((text, without_times(trainer.state.log_history)))
        assert len(trainer.last_evaluation.labelled().confidences) == len(trainer.eval_dataset)
        assert trainer.evaluated_dataset is trainer.eval_dataset
    assert ends[0] == ends[1]


@pytest.mark.deep
def test_an_evaluation_of_another_set_is_left_out(tmp_path: Path) -> None:
    """As by the callback that many have, which evaluates the training set at the end of each epoch."""

    class OnTrainingRows(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            kept = deepcopy(control)
            trainer.evaluate(trainer.train_dataset, metric_key_prefix="train")
            trainer.evaluate(trainer.train_dataset)
            return kept

    texts = []
    for watched in (False, True):
        trainer = traced(tmp_path / str(watched), TrainingTrace(n_kept_rows=5), eval_strategy="epoch")
        if watched:
            trainer.add_callback(OnTrainingRows())
        trainer.train()
        texts.append((tmp_path / str(watched) / "training_trace.json").read_text())
    assert texts[0] == texts[1]


@pytest.mark.deep
def test_a_file_that_cannot_be_written_is_said_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "training_trace.json").mkdir()
    with pytest.raises(
        ValueError, match=r"training_trace.json to be a file, got a folder; remove it, or cho"
    ):
        traced(tmp_path, TrainingTrace()).train()
