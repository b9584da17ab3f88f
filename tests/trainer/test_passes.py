"""Passes over a dataset: what they are told, what they leave behind, and errors before and after the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, BertPreTrainedModel, Trainer
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_calib import CalibrationTrainer, TemperatureScalingCallback
from tests.helpers.gloo_pair import run_on_two
from tests.helpers.tiny import (
    arguments,
    assert_same,
    logged,
    sequences,
    tagged,
    tiny_bert,
    tiny_trainer,
)


@pytest.mark.parametrize("given", [True, False])
def test_the_logits_of_several_sets_are_kept(given: bool, tmp_path: Path) -> None:
    model = tiny_bert()
    sets = {"a": sequences(model, 9), "b": sequences(model, 13, seed=2)}
    trainer = CalibrationTrainer(
        model, arguments(tmp_path), eval_dataset=None if given else sets
    )
    metrics = trainer.evaluate(sets if given else None, keep_logits=True)
    assert {"eval_a_ece", "eval_b_ece"} < set(metrics)
    logits, _ = trainer.last_evaluation.logits_and_labels()
    assert len(logits) == 13


def test_a_subclass_may_have_an_evaluate_without_our_keyword(tmp_path: Path) -> None:
    class Mine(CalibrationTrainer):
        def evaluate(
            self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"
        ):  # type: ignore[no-untyped-def, override]
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    model = tiny_bert()
    metrics = Mine(model, arguments(tmp_path)).evaluate({"a": sequences(model, 9)})
    assert "eval_a_ece" in metrics


def test_logits_that_were_not_kept_are_named_as_the_cause(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.evaluate()
    with pytest.raises(
        ValueError, match=r"expected the logits .* to be kept, .*keep_logits=True"
    ):
        trainer.last_evaluation.logits_and_labels()


def test_a_loss_outside_an_evaluation_is_in_none(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    rows = sequences(trainer.model, 8)
    batch = trainer.data_collator([rows[i] for i in range(8)])
    trainer.model.eval()
    trainer.compute_loss(trainer.model, batch)
    assert not any(
        "ece" in key for key in trainer.predict(rows.remove_columns("label")).metrics
    )


def test_an_evaluation_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    with pytest.raises(ValueError, match="input_ids"):
        trainer.evaluate(
            trainer.eval_dataset.remove_columns("input_ids"), keep_logits=True
        )
    assert trainer.current_pass is None
    assert "prediction_step" not in vars(trainer)
    trainer.evaluate()
    assert trainer.last_evaluation.rows == []
    assert trainer.last_evaluation.dataset is trainer.eval_dataset


def test_an_evaluation_that_fails_before_its_loop_plans_nothing(tmp_path: Path) -> None:
    model = tiny_bert()
    trainer = CalibrationTrainer(model, arguments(tmp_path))
    with pytest.raises(ValueError, match="evaluation requires an eval_dataset"):
        trainer.evaluate(keep_logits=True)
    loader = trainer.get_eval_dataloader(sequences(model, 8))
    trainer.evaluation_loop(loader, "Evaluation")
    assert trainer.last_evaluation.rows == []


def test_a_callback_that_the_user_removed_stays_away(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.remove_callback(TemperatureScalingCallback)
    for n_bins in (10, 12):  # The callbacks are made again for changed settings.
        trainer.args.n_bins = n_bins
        trainer.train()
        assert trainer.temperature is None


def test_a_pass_within_a_pass_counts_its_own_rows(tmp_path: Path) -> None:
    model = tiny_bert()
    rows, others = sequences(model, 20), sequences(model, 7, seed=2)
    found: dict[str, Any] = {}

    def own_metric(prediction: Any) -> dict[str, float]:
        if "nested" not in found:
            found["nested"] = True
            found.update(trainer.predict(others, metric_key_prefix="other").metrics)
        return {}

    def within(logits: Any, labels: Any) -> Any:
        if "held out" not in found and trainer.current_pass is not None:
            found["held out"] = trainer.held_out_pass()
        return logits

    trainer = CalibrationTrainer(
        model,
        arguments(tmp_path),
        eval_dataset=rows,
        calibration_dataset=others,
        compute_metrics=own_metric,
        preprocess_logits_for_metrics=within,
    )
    trainer.evaluate()
    assert "other_ece" in found
    assert len(found["held out"].raw.top_label_rows.correct) == 7
    assert len(trainer.last_evaluation.raw.top_label_rows.correct) == 20


class OwnStep(CalibrationTrainer):
    """A prediction_step of its own."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):  # type: ignore[no-untyped-def]
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            outputs = model(**inputs)
        return outputs.loss, outputs.logits, inputs["labels"]


def test_a_prediction_step_of_a_subclass_has_the_metrics(tmp_path: Path) -> None:
    model = tiny_bert()
    rows = sequences(model, 20)
    ours = CalibrationTrainer(model, arguments(tmp_path)).evaluate(rows)
    assert (
        OwnStep(model, arguments(tmp_path)).evaluate(rows)["eval_ece"]
        == ours["eval_ece"]
    )


def test_a_prediction_step_that_was_set_on_the_trainer_is_called_and_stays(
    tmp_path: Path,
) -> None:
    trainer = tiny_trainer(tmp_path)
    theirs = trainer.prediction_step
    calls = []

    def own_step(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return theirs(*args, **kwargs)

    trainer.prediction_step = own_step
    trainer.evaluate()
    assert calls
    assert trainer.prediction_step is own_step


class ListOfBatches(CalibrationTrainer):
    """Its loader for evaluations is a list."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return list(super().get_eval_dataloader(eval_dataset))


def test_a_list_of_batches_is_a_loader(tmp_path: Path) -> None:
    """Also at the end of an epoch, when the last batch of the training is the last one that accelerate knows of."""
    model = tiny_bert()
    settings = {
        "eval_strategy": "epoch",
        "num_train_epochs": 2,
        "calibration_method": "none",
    }
    args = arguments(tmp_path, per_device_train_batch_size=4, **settings)
    trainer = ListOfBatches(
        model,
        args,
        train_dataset=sequences(model, 10),
        eval_dataset=sequences(model, 24, seed=3),
    )
    trainer.train()
    assert len(trainer.last_evaluation.raw.top_label_rows.correct) == 24
    assert len(logged(trainer, "eval_ece")) == 2


# ---- Several label columns ----


class TwoHeads(BertPreTrainedModel):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.first = nn.Linear(config.hidden_size, 4)
        self.second = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        labels: Any = None,
        labels_2: Any = None,
    ) -> Any:
        hidden = self.bert(input_ids, attention_mask).pooler_output
        loss = None
        if labels is not None:
            cross_entropy = nn.functional.cross_entropy
            loss = cross_entropy(self.first(hidden), labels) + cross_entropy(
                self.second(hidden), labels_2
            )
        return SequenceClassifierOutput(loss=loss, logits=self.first(hidden))


def test_two_label_columns_are_refused_before_the_first_step(tmp_path: Path) -> None:
    model = TwoHeads(tiny_bert().config)
    rows = [{**row, "labels_2": 1} for row in sequences(model, 16)]
    settings = {"calibration_method": "none", "num_train_epochs": 1}
    trainer = CalibrationTrainer(
        model, arguments(tmp_path, **settings), train_dataset=rows
    )
    with pytest.raises(
        ValueError,
        match=r"one label column, got labels, labels_2; set label_names=\['labels'\]",
    ):
        trainer.train()
    assert trainer.state.global_step == 0
    # As an input, which this model ignores without labels.
    args = arguments(tmp_path, label_names=["labels"], **settings)
    CalibrationTrainer(model, args, train_dataset=rows).train()


# ---- Checkpoints ----


def test_the_best_model_by_a_metric_that_comes_too_late_is_refused(
    tmp_path: Path,
) -> None:
    model = tiny_bert()
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_nll_calibrated",
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
    }
    rows = {"eval_dataset": sequences(model, 8)}
    message = "expected metric_for_best_model to be a metric of each evaluation, got 'eval_nll_calibrated'"
    with pytest.raises(ValueError, match=message):
        CalibrationTrainer(model, arguments(tmp_path, **best), **rows)
    fitting = TemperatureScalingCallback(strategy="evaluate")
    CalibrationTrainer(model, arguments(tmp_path, **best), callbacks=[fitting], **rows)
    CalibrationTrainer(
        model, arguments(tmp_path, calibration_strategy="evaluate", **best), **rows
    )
    unread = {**best, "load_best_model_at_end": False, "eval_strategy": "no"}
    CalibrationTrainer(model, arguments(tmp_path, **unread), **rows)


@pytest.mark.parametrize("loss", ["cross_entropy", "adafocal"])
def test_an_empty_name_of_a_checkpoint_is_refused_as_by_the_stock_trainer(
    loss: str, tmp_path: Path
) -> None:
    ours = tiny_trainer(tmp_path, loss=loss)
    stock = Trainer(tiny_bert(), arguments(tmp_path), train_dataset=ours.train_dataset)
    for trainer in (ours, stock):
        with pytest.raises(ValueError, match="Can't find a valid checkpoint at"):
            trainer.train(resume_from_checkpoint="")


# ---- Errors of one process ----


class Broken(torch.utils.data.Dataset[Any]):
    """Rows of which the last one cannot be read."""

    def __init__(self) -> None:
        self.rows = sequences(tiny_bert(), 16, seed=2)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index == len(self) - 1:
            raise OSError("a broken row")
        return self.rows[index]


def fit_to_broken_rows(rank: int, folder: Path) -> None:
    trainer = tiny_trainer(
        folder / "out", max_steps=1, calibration_method="temperature"
    )
    trainer.calibration_dataset = Broken()
    try:
        trainer.train()
        outcome = "no error"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.txt").write_text(outcome)
    assert (
        outcome == "no error"
    )  # Otherwise this ends the process, for which the other one waits.


def test_an_error_of_one_process_at_the_end_is_raised(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"process . ended with 1"):
        run_on_two(fit_to_broken_rows, tmp_path, seconds=60)
    assert (tmp_path / "1.txt").read_text() == "OSError: a broken row"


# ---- What a user's code changes in place ----


def measured(
    trainer_of: Any, rows: Any, folder: Path, **hooks: Any
) -> tuple[dict[str, float], Any, Any]:
    """The metrics of an evaluation, and the logits and labels that it kept."""
    hooks.setdefault("compute_metrics", lambda _: {})  # Hooks are for these metrics.
    trainer = CalibrationTrainer(trainer_of, arguments(folder), **hooks)
    metrics = trainer.evaluate(rows, keep_logits=True)
    timed = ("runtime", "per_second", "time")
    kept = {key: value for key, value in metrics.items() if not key.endswith(timed)}
    return kept, *trainer.last_evaluation.logits_and_labels()


def logits_in_place(logits: Any, labels: Any) -> Any:
    return logits.sub_(5 * torch.arange(4)).argmax(-1)


def labels_in_place(logits: Any, labels: Any) -> Any:
    labels[labels == -100] = 0
    labels.clamp_(max=1)
    return logits


def arrays_in_place(prediction: Any) -> dict[str, float]:
    prediction.predictions[...] = 0
    prediction.label_ids[...] = 0
    return {}


@pytest.mark.parametrize("kind", ["Sequence", "Token"])
@pytest.mark.parametrize(
    "hook",
    [
        {"preprocess_logits_for_metrics": logits_in_place},
        {"preprocess_logits_for_metrics": labels_in_place},
        {"compute_metrics": arrays_in_place},
    ],
)
def test_hooks_that_work_in_place_change_no_metric(
    kind: str, hook: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_bert(kind)
    rows = (sequences if kind == "Sequence" else tagged)(model, 20)
    metrics, logits, labels = measured(model, rows, tmp_path)
    found, its_logits, its_labels = measured(model, rows, tmp_path, **hook)
    assert found == metrics
    assert (its_logits == logits).all()
    assert (its_labels == labels).all()


class OneBuffer(nn.Module):
    """It writes the logits of each batch into the same memory."""

    def __init__(self, *, reuses: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.rows = nn.Embedding(64, 4)
        self.buffer = torch.zeros(8, 4)
        self.reuses = reuses

    def forward(self, input_ids: Any) -> Any:
        logits = self.rows.weight[input_ids].sum(1).detach()
        if not self.reuses:
            return logits
        return self.buffer[: len(logits)].copy_(logits)


def test_a_model_may_reuse_the_memory_of_its_outputs(tmp_path: Path) -> None:
    rows = sequences(tiny_bert(), 20)
    usual, logits, _ = measured(OneBuffer(reuses=False), rows, tmp_path)
    reused, its_logits, _ = measured(OneBuffer(reuses=True), rows, tmp_path)
    assert reused == usual
    assert (its_logits == logits).all()


# ---- The loader of the calibration split ----


def test_the_calibration_pass_follows_what_is_replaced(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    collate = trainer.data_collator

    def labelled_zero(rows: Any) -> Any:
        batch = collate(rows)
        return {**batch, "labels": torch.zeros_like(batch["labels"])}

    def labels() -> Any:
        return trainer.held_out_pass(keep_logits=True).logits_and_labels()[1]

    assert labels().any()
    trainer.data_collator = labelled_zero
    assert not labels().any()
    trainer.data_collator = collate

    sizes: list[int] = []
    hook = trainer.model.register_forward_pre_hook(
        lambda _, args, given: sizes.append(len(given["input_ids"])), with_kwargs=True
    )
    trainer.args.per_device_eval_batch_size = 40
    assert len(labels()) == 40
    hook.remove()
    assert sizes == [40]

    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        return {**rows, "label": [3] * len(rows["label"])}

    trainer.calibration_dataset.set_transform(transform)
    assert (labels() == 3).all()
    trainer.calibration_dataset = sequences(trainer.model, 7, seed=9)
    assert len(labels()) == 7


# ---- Several label columns in evaluations ----


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs.logits.sum()


def test_a_loss_of_the_users_own_has_no_name_in_the_records(tmp_path: Path) -> None:
    model = tiny_bert()
    rows = sequences(model, 8)
    args = arguments(tmp_path, save_strategy="epoch")
    trainer = CalibrationTrainer(
        model,
        args,
        train_dataset=rows,
        calibration_dataset=sequences(model, 40, seed=2),
        compute_loss_func=own_loss,
    )
    trainer.train()
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert "CalibrationLoss" not in state["stateful_callbacks"]
    assert not {"loss", "loss_kwargs"} & trainer.fitted_map.about.keys()


@pytest.mark.parametrize("loss", [None, own_loss])
@pytest.mark.parametrize("second", ["labels_2", "labels_3"])
def test_two_label_columns_have_no_metrics_and_are_refused(
    loss: Any, second: str, tmp_path: Path
) -> None:
    """Also if the batches have one of them only, for which the Trainer evaluates nothing."""
    model = TwoHeads(tiny_bert().config)
    rows = [{**row, "labels_2": 1} for row in sequences(model, 8)]
    settings = {"calibration_method": "none"}
    message = rf"one label column, got labels, {second}; set label_names=\['labels'\]"
    args = arguments(tmp_path, label_names=["labels", second], **settings)
    with pytest.raises(ValueError, match=message):
        CalibrationTrainer(model, args, compute_loss_func=loss)
    # The names that the Trainer finds in a model may be of outputs that nobody asks for.
    args = arguments(tmp_path, **settings)
    trainer = CalibrationTrainer(
        model, args, train_dataset=rows, compute_loss_func=loss
    )
    trainer.label_names = ["labels", second]
    with pytest.raises(ValueError, match=message):
        trainer.train()
    with pytest.raises(ValueError, match=message):
        trainer.evaluate(rows)
    unlabelled = [{"input_ids": row["input_ids"]} for row in rows]
    assert len(trainer.predict(unlabelled).predictions) == 8


def test_a_compute_loss_of_ones_own_may_read_two_label_columns(tmp_path: Path) -> None:
    class Stock(CalibrationTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):  # type: ignore[no-untyped-def]
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    model = TwoHeads(tiny_bert().config)
    before = model.second.weight.clone()
    rows = [{**row, "labels_2": 1} for row in sequences(model, 8)]
    args = arguments(tmp_path, max_steps=1, calibration_method="none")
    trainer = Stock(model, args, train_dataset=rows)
    trainer.train()
    assert not torch.equal(model.second.weight, before)
    _, second = trainer.predict(rows).label_ids
    assert second.tolist() == [1] * 8


@pytest.mark.parametrize("n_rows", [20, 5])
def test_the_calibration_pass_drops_no_rows(n_rows: int, tmp_path: Path) -> None:
    """Dropping the last rows is for the batches of a training."""
    settings: dict[str, Any] = {"per_device_eval_batch_size": 8, "loss": "adafocal"}
    settings["gamma_update_steps"] = 2
    whole, dropping = (
        tiny_trainer(
            tmp_path / str(drops),
            n=(16, n_rows, 24),
            dataloader_drop_last=drops,
            **settings,
        )
        for drops in (False, True)
    )
    for trainer in (whole, dropping):
        trainer.train()
    logits, _ = dropping.held_out_pass(keep_logits=True).logits_and_labels()
    assert len(logits) == n_rows
    assert dropping.temperature == whole.temperature
    assert dropping.args.dataloader_drop_last is True


@pytest.mark.filterwarnings("ignore:dataloader_drop_last leaves")
def test_gammas_follow_all_rows_of_a_single_evaluation_set(tmp_path: Path) -> None:
    tables = []
    for drops in (False, True):
        trainer = tiny_trainer(
            tmp_path,
            n=(16, 8, 20),
            loss="adafocal",
            per_device_eval_batch_size=16,
            eval_strategy="steps",
            eval_steps=2,
            dataloader_drop_last=drops,
        )
        trainer.calibration_dataset = None
        with pytest.warns(UserWarning, match="also the calibration split"):
            trainer.train()
        tables.append(trainer.calibration_loss.state_dict())
    assert_same(tables[1], tables[0])
