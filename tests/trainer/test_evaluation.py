"""Content and cost of evaluations; the rest of the stock Trainer's evaluation is untouched."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from scipy.special import expit
from transformers import EvalPrediction, Trainer

from hf_calib import CalibrationTrainer
from hf_calib.metrics import (
    accuracy,
    expected_calibration_error,
    negative_log_likelihood,
)
from hf_calib.scaling import TemperatureScaling
from hf_calib.trainer.evaluation import Evaluation
from tests.helpers.evaluations import NAMES, assert_reports, one_shot
from tests.helpers.tiny import (
    N_LABELS,
    arguments,
    logged,
    sequences,
    tagged,
    tiny_bert,
    tiny_trainer,
)


def count_forwards(model: torch.nn.Module) -> list[int]:
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("n_bins", [15, 4])
@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_the_metrics_are_those_of_all_logits_at_once(
    kind: str, n_bins: int, tmp_path: Path
) -> None:
    model = tiny_bert(kind)
    held_out = (tagged if kind == "Token" else sequences)(model, 53)
    trainer = CalibrationTrainer(
        model, arguments(tmp_path, n_bins=n_bins), eval_dataset=held_out
    )
    metrics = trainer.evaluate()
    predicted = trainer.predict(held_out)
    counted = predicted.label_ids.flatten() != -100
    logits = predicted.predictions.reshape(-1, N_LABELS)[counted]
    wanted = one_shot(logits, predicted.label_ids.flatten()[counted], n_bins=n_bins)
    assert_reports(metrics, wanted, "eval")
    assert_reports(predicted.metrics, wanted, "test")
    assert metrics["eval_loss"] == pytest.approx(metrics["eval_nll"], rel=0.1)
    assert "temperature" not in metrics

    scaler = TemperatureScaling(grid=[2.0]).fit(
        logits, predicted.label_ids.flatten()[counted]
    )
    trainer.use_calibration_map(scaler, split="evaluation", n_examples=len(logits))
    metrics = trainer.evaluate()
    assert_reports(metrics, wanted, "eval")
    assert_reports(
        metrics,
        one_shot(logits / 2, predicted.label_ids.flatten()[counted], n_bins=n_bins),
        "eval",
        "_calibrated",
    )
    assert metrics["temperature"] == 2.0


def test_a_multi_label_evaluation_takes_each_label_for_a_binary_one(
    tmp_path: Path,
) -> None:
    model = tiny_bert(problem_type="multi_label_classification")
    held_out = sequences(model, 41)
    trainer = CalibrationTrainer(model, arguments(tmp_path), eval_dataset=held_out)
    metrics, predicted = trainer.evaluate(), trainer.predict(held_out)
    probs, labels = (
        expit(predicted.predictions.astype(np.float64)).ravel(),
        predicted.label_ids.ravel(),
    )
    pairs, chosen = np.stack([1 - probs, probs], axis=1), labels.astype(int)
    assert metrics["eval_accuracy"] == pytest.approx(accuracy(pairs, chosen))
    assert metrics["eval_ece"] == pytest.approx(
        expected_calibration_error(pairs, chosen), rel=2e-6
    )
    assert metrics["eval_nll"] == pytest.approx(
        negative_log_likelihood(pairs, chosen), rel=2e-6
    )
    assert metrics["eval_brier"] == pytest.approx(
        np.mean((probs - labels) ** 2), rel=2e-6
    )


def test_an_evaluation_runs_the_model_once_and_keeps_no_logits(tmp_path: Path) -> None:
    trainer = tiny_trainer(
        tmp_path, n=(4, 4, 37), loss="adafocal", per_device_eval_batch_size=8
    )
    calls = count_forwards(trainer.model)
    trainer.evaluate()
    assert len(calls) == math.ceil(37 / 8)
    output = trainer.evaluation_loop(
        trainer.get_eval_dataloader(), "Evaluation", prediction_loss_only=True
    )
    assert output.predictions is None
    assert output.label_ids is None
    assert "eval_ece" in output.metrics
    assert trainer.last_evaluation.rows == []


def test_a_batch_costs_the_same_however_many_came_before() -> None:
    """Counted in calls of functions, for a pass that keeps few logits."""
    current = Evaluation(Accelerator(cpu=True), "eval", n_bins=15, keep_values=10**9)
    logits, labels = torch.randn(2, 4), torch.tensor([0, 1])
    counts = []
    for _ in range(60):
        calls: list[str] = []
        sys.setprofile(lambda frame, event, arg, calls=calls: calls.append(event))
        current.add(logits, labels)
        sys.setprofile(None)
        counts.append(len(calls))
    assert np.median(counts[-10:]) <= np.median(counts[1:11]) + 20


def stock_and_ours(
    tmp_path: Path, model: Any = None, **kwargs: Any
) -> tuple[Trainer, CalibrationTrainer]:
    model = model or tiny_bert()
    sets = {
        "train_dataset": sequences(model, 16),
        "eval_dataset": sequences(model, 21, seed=2),
    }
    settings = {
        **sets,
        **{
            k: v
            for k, v in kwargs.items()
            if k in ("compute_metrics", "preprocess_logits_for_metrics")
        },
    }
    options = {k: v for k, v in kwargs.items() if k not in settings}
    args = arguments(tmp_path, temperature_criterion="none", **options)
    return Trainer(model, args, **settings), CalibrationTrainer(model, args, **settings)


def accuracy_of_last_batch_first(
    prediction: EvalPrediction, compute_result: bool = True
) -> dict[str, float]:
    if not compute_result:
        return {}
    return {
        "right": float(
            (
                np.asarray(prediction.predictions) == np.asarray(prediction.label_ids)
            ).mean()
        )
    }


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {
            "compute_metrics": lambda p: {
                "right": float((p.predictions.argmax(-1) == p.label_ids).mean())
            }
        },
        {
            "compute_metrics": accuracy_of_last_batch_first,
            "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        },
        {
            "compute_metrics": accuracy_of_last_batch_first,
            "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
            "batch_eval_metrics": True,
        },
        {
            "compute_metrics": lambda p: {
                "seen": float(p.losses.mean()),
                "inputs": float(p.inputs.sum()),
            },
            "include_for_metrics": ["inputs", "loss"],
            "eval_accumulation_steps": 1,
        },
    ],
    ids=["plain", "compute_metrics", "preprocess", "batch_eval_metrics", "include"],
)
def test_what_the_stock_trainer_reports_stays(
    kwargs: dict[str, Any], tmp_path: Path
) -> None:
    stock, ours = stock_and_ours(tmp_path, **kwargs)
    theirs, metrics = stock.evaluate(), ours.evaluate()
    same = [key for key in theirs if not key.endswith(("time", "per_second"))]
    assert "eval_loss" in same
    assert {key: metrics[key] for key in same} == pytest.approx(
        {key: theirs[key] for key in same}, rel=1e-6
    )
    assert set(metrics) - set(theirs) == {f"eval_{name}" for name in NAMES}


def test_the_loss_of_an_evaluation_batch_is_its_weighted_mean(tmp_path: Path) -> None:
    model, class_weights = tiny_bert(), [0.5, 2.0, 1.0, 4.0]
    args = arguments(
        tmp_path, class_weights=class_weights, per_device_eval_batch_size=64
    )
    trainer = CalibrationTrainer(model, args, eval_dataset=sequences(model, 21))
    found = trainer.predict(trainer.eval_dataset)
    logits, labels = (
        torch.from_numpy(found.predictions),
        torch.from_numpy(found.label_ids),
    )
    wanted = torch.nn.functional.cross_entropy(
        logits, labels, weight=torch.tensor(class_weights)
    ).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-6)


def some_ignored(kind: str) -> Any:
    """Rows or tokens of which a whole batch and single ones are not labelled."""
    if kind == "Token":
        return tagged(tiny_bert("Token"), 21)
    problem = {"problem_type": kind} if kind != "Sequence" else {}
    rows = sequences(tiny_bert(**problem), 21)
    labels = np.array(rows["label"])
    labels[:4] = labels[6] = labels[20] = -100
    if kind != "Sequence":
        labels[8, 1] = -100
    return rows.remove_columns("label").add_column("label", labels.tolist())


@pytest.mark.parametrize("kind", ["Sequence", "Token", "multi_label_classification"])
@pytest.mark.parametrize(
    "class_weights",
    [pytest.param(None, marks=pytest.mark.slow), [0.5, 2.0, 1.0, 4.0]],
)
def test_the_loss_is_that_of_all_labelled_rows_whatever_the_batch_size(
    kind: str, class_weights: list[float] | None, tmp_path: Path
) -> None:
    is_text = kind != "Token"
    problem = {"problem_type": kind} if kind.islower() else {}
    model = tiny_bert("Sequence" if is_text else "Token", **problem)
    rows = some_ignored(kind)
    found = []
    for size, loss_only in ((1, False), (4, True), (21, False)):
        args = arguments(
            tmp_path,
            loss="focal",
            class_weights=class_weights,
            per_device_eval_batch_size=size,
            prediction_loss_only=loss_only,
        )
        sets = {"a": rows, "b": rows.select([0, 20])}
        trainer = CalibrationTrainer(model, args, eval_dataset=sets)
        with warnings.catch_warnings():
            # Without any label there are no metrics, which has its own test.
            warnings.filterwarnings("ignore", "This evaluation has no calibration")
            metrics = trainer.evaluate()
        found.append(metrics["eval_a_loss"])
        assert trainer.predict(rows).metrics["test_loss"] == metrics["eval_a_loss"]
        assert is_text == math.isnan(metrics["eval_b_loss"])
    out = trainer.predict(rows)
    wanted = trainer.calibration_loss(
        torch.from_numpy(out.predictions), torch.from_numpy(out.label_ids)
    )
    assert found == pytest.approx([float(wanted)] * 3, rel=1e-6)


@pytest.mark.parametrize("several", [True, False])
def test_an_evaluation_set_that_there_is_not_is_named(
    several: bool, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path)
    way_out = "pass a dataset"
    if several:
        trainer.eval_dataset = {"a": trainer.eval_dataset}
        way_out = "there are a"
    message = f"or the name of an evaluation set, got 'b'; {way_out}"
    with pytest.raises(ValueError, match=message):
        trainer.evaluate("b")


def test_the_loss_does_not_displace_a_users_metric_of_its_name(tmp_path: Path) -> None:
    _, ours = stock_and_ours(tmp_path, compute_metrics=lambda p: {"loss": -1.0})
    assert ours.evaluate()["eval_loss"] == -1.0


def test_a_loss_that_couples_the_batch_is_the_mean_over_the_batches(
    tmp_path: Path,
) -> None:
    model = tiny_bert()
    rows = sequences(model, 21)
    args = arguments(tmp_path, loss="mmce", per_device_eval_batch_size=8)
    trainer = CalibrationTrainer(model, args, eval_dataset=rows)
    of_batches = [
        (len(batch), trainer.evaluate(rows.select(batch))["eval_loss"])
        for batch in (range(8), range(8, 16), range(16, 21))
    ]
    wanted = sum(n * loss for n, loss in of_batches) / 21
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-6)


def test_a_metric_of_the_users_own_goes_first(tmp_path: Path) -> None:
    _, ours = stock_and_ours(tmp_path, compute_metrics=lambda p: {"accuracy": -1.0})
    assert ours.evaluate()["eval_accuracy"] == -1.0


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_predictions_come_in_the_order_of_the_rows(
    strategy: str, tmp_path: Path
) -> None:
    # The stock Trainer shuffles what it evaluates by its seed when training batches are grouped by length.
    rows = sequences(tiny_bert(), 40)
    trainer = tiny_trainer(tmp_path, train_sampling_strategy=strategy, seed=3)
    one_by_one = [
        trainer.predict(rows.select([i])).predictions[0] for i in range(len(rows))
    ]
    found = trainer.predict(rows)
    np.testing.assert_array_equal(found.label_ids, rows["label"])
    np.testing.assert_allclose(found.predictions, one_by_one, atol=1e-6)
    trainer.evaluate(rows, keep_logits=True)
    assert trainer.last_evaluation is not None
    logits, _ = trainer.last_evaluation.logits_and_labels()
    np.testing.assert_array_equal(logits, found.predictions)


def test_several_evaluation_sets_are_told_apart(tmp_path: Path) -> None:
    model = tiny_bert()
    sets = {name: sequences(model, 20, seed=seed) for seed, name in enumerate("ab", 2)}
    trainer = CalibrationTrainer(
        model,
        arguments(
            tmp_path,
            eval_strategy="epoch",
            loss="adafocal",
            calibration_strategy="evaluate",
        ),
        train_dataset=sequences(model, 8),
        calibration_dataset=sequences(model, 20, seed=5),
        eval_dataset=sets,
    )
    calls = count_forwards(model)
    with pytest.warns(UserWarning, match="The loss will never adapt"):
        trainer.train()
    steps, batches = 2, math.ceil(20 / 8)
    once = batches + 2 * batches  # the temperature, and two sets
    assert (
        len(calls) == steps + (once + batches) + once
    )  # the gammas once, too; and again at the end
    metrics = trainer.evaluate()
    for name, dataset in sets.items():
        predicted = trainer.predict(dataset)
        assert_reports(
            metrics,
            one_shot(predicted.predictions, predicted.label_ids),
            f"eval_{name}",
        )
        assert f"eval_{name}_ece_calibrated" in metrics
    assert len(logged(trainer, "gamma_00")) == 1  # two sets make one evaluation
    before_and_end = [
        entry["temperature"]
        for entry in trainer.state.log_history
        if "temperature" in entry
    ]
    assert (
        len(set(before_and_end)) == 1
    )  # the same weights all along: fitted once for both sets


@pytest.mark.parametrize("call", ["evaluate", "predict", "fit_calibration_map"])
@pytest.mark.parametrize("as_list", [False, True])
def test_rows_without_a_label_are_named(
    call: str, as_list: bool, tmp_path: Path
) -> None:
    trainer = tiny_trainer(tmp_path)
    labels = [None if row == 37 else 0 for row in range(40)]
    rows: Any = trainer.calibration_dataset.remove_columns("label")
    rows = rows.add_column("label", labels)
    rows = rows.to_list() if as_list else rows
    trainer.calibration_dataset = rows
    given = () if call == "fit_calibration_map" else (rows,)
    with pytest.raises(
        ValueError, match=r"labels of the .* in every row, got None in row 37"
    ):
        getattr(trainer, call)(*given)


def test_rows_without_any_label_are_predicted(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    rows = [{**row, "label": None} for row in trainer.eval_dataset]
    assert trainer.predict(rows).label_ids is None


def test_rows_that_an_evaluation_drops_are_named_once(tmp_path: Path) -> None:
    """The stock Trainer drops them without a word."""
    settings = {"dataloader_drop_last": True, "per_device_eval_batch_size": 16}
    trainer = tiny_trainer(tmp_path, n=(16, 20, 20), **settings)
    message = "leaves 4 of 20 rows out of this evaluation, so its loss and metrics are"
    with pytest.warns(UserWarning, match=message):
        first = trainer.evaluate()
    rows = trainer.eval_dataset
    # A second warning would be an error.
    assert first["eval_nll"] == trainer.evaluate()["eval_nll"]
    assert first["eval_nll"] == trainer.evaluate(rows.select(range(16)))["eval_nll"]


class Views(CalibrationTrainer):
    """A trainer whose predictions are the mean over two orders of the tokens."""

    def prediction_step(
        self, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        found = []
        for shift in (0, 1):
            view = {**inputs, "input_ids": inputs["input_ids"].roll(shift, 1)}
            loss, logits, labels = super().prediction_step(model, view, *args, **kwargs)
            found.append(logits)
        return loss, torch.stack(found).mean(0), labels


def test_metrics_are_of_the_logits_that_a_step_returns(tmp_path: Path) -> None:
    model = tiny_bert(seed=5)
    rows = sequences(model, 40, seed=9)
    trainer = Views(model, arguments(tmp_path), eval_dataset=rows)
    predicted = trainer.predict(rows)
    logits = torch.tensor(predicted.predictions)
    nll = torch.nn.functional.cross_entropy(logits, torch.tensor(predicted.label_ids))
    assert predicted.metrics["test_nll"] == pytest.approx(nll.item(), rel=1e-5)
