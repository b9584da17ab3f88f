"""Losses that adapt: their tables survive saving, moving and bad input."""

from __future__ import annotations

import copy
import io
import json
import warnings
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_calib.losses import LOSSES, AdaptiveLoss, make_loss
from tests.helpers.loss_cases import make_variant, random_batch, value_and_gradient

TABLES = {
    "adafocal": {"edges", "gammas", "gaps", "accuracies"},
    "ada_dual_focal": {"edges", "gammas", "gaps", "accuracies"},
    "calfocal": {"edges", "gammas", "gaps", "accuracies"},
    "ece_ce": {"bin_gaps", "mass_gaps", "class_gaps", "progress"},
}
FIRST_GAMMAS = {"ada_dual_focal": 6, "adafocal": 1, "calfocal": 1}
GAMMA_TABLES = list(FIRST_GAMMAS)


def updated(name: str, **hyperparameters: Any) -> AdaptiveLoss:
    loss = make_variant((name, hyperparameters), 5)
    assert isinstance(loss, AdaptiveLoss)
    return loss


def test_which_losses_adapt() -> None:
    assert {name for name in LOSSES if isinstance(make_loss(name), AdaptiveLoss)} == set(TABLES)


@pytest.mark.parametrize("name", TABLES)
class TestState:
    def test_round_trip_into_a_fresh_loss(self, name: str) -> None:
        loss, fresh = updated(name), make_loss(name)
        logits, labels = random_batch(20, 5)
        logits = logits.float()
        before = fresh(logits, labels)  # so that it has copies of its first table, in float32
        assert before != loss(logits, labels)
        file = io.BytesIO()
        torch.save(loss.state_dict(), file)
        file.seek(0)
        fresh.load_state_dict(torch.load(file, weights_only=True))
        assert set(loss.state_dict()) == TABLES[name]
        assert_close(dict(fresh.state_dict()), dict(loss.state_dict()), rtol=0, atol=0, equal_nan=True)
        assert fresh(logits, labels) == loss(logits, labels)

    def test_as_a_part_of_a_module(self, name: str) -> None:
        loss, fresh = updated(name), make_loss(name)
        nn.ModuleDict({"loss": fresh}).load_state_dict(nn.ModuleDict({"loss": loss}).state_dict())
        logits, labels = random_batch(20, 5)
        assert fresh(logits, labels) == loss(logits, labels)

    def test_a_copy_goes_its_own_way(self, name: str) -> None:
        loss = updated(name)
        logits, labels = random_batch(20, 5)
        value = loss(logits, labels)
        twin = copy.deepcopy(loss)
        assert twin(logits, labels) == value
        twin.update([0.3, 0.9], [1, 0], class_gaps=[0.9] * 5, progress=1.0)
        assert twin(logits, labels) != value
        assert loss(logits, labels) == value

    def test_another_process_gets_it(self, name: str) -> None:
        loss = updated(name)
        logits, labels = random_batch(20, 5)
        assert ForkingPickler.loads(ForkingPickler.dumps(loss))(logits, labels) == loss(logits, labels)

    def test_the_table_stays_float64(self, name: str) -> None:
        loss = updated(name)
        table = {key: value.clone() for key, value in loss.state_dict().items()}
        logits, labels = random_batch(20, 5)
        value = loss(logits, labels)
        moved: list[AdaptiveLoss] = [loss.half(), loss.to(torch.bfloat16), loss.float(), loss.to("cpu")]
        for other in moved:
            assert other is loss
            for key, tensor in loss.state_dict().items():
                assert tensor.dtype == torch.float64
                assert torch.equal(tensor.nan_to_num(), table[key].nan_to_num())
        assert loss(logits, labels) == value
        assert_close(loss(logits.float(), labels).double(), value, rtol=1e-5, atol=1e-6)

    def test_another_number_of_bins_is_refused(self, name: str) -> None:
        loss = make_loss(name, n_bins=10)
        with pytest.raises(RuntimeError, match="size mismatch"):
            loss.load_state_dict(updated(name).state_dict())
        assert loss(*random_batch(20, 5)).isfinite()

    def test_another_number_of_classes_can_be_loaded(self, name: str) -> None:
        """The number of classes is no hyperparameter: it is known from the first update on."""
        loss = make_loss(name)
        loss.load_state_dict(updated(name).state_dict())
        before = make_variant((name, {}), 7).state_dict()
        loss.load_state_dict(before)
        assert_close(dict(loss.state_dict()), dict(before), rtol=0, atol=0, equal_nan=True)

    def test_a_missing_entry_is_refused(self, name: str) -> None:
        state = updated(name).state_dict()
        del state[min(TABLES[name])]
        with pytest.raises(RuntimeError, match="Missing key"):
            make_loss(name).load_state_dict(state)

    def test_an_update_that_fails_changes_nothing(self, name: str) -> None:
        loss = updated(name)
        before = {key: value.clone() for key, value in loss.state_dict().items()}
        with pytest.raises(ValueError, match="expected confidences to be in"):
            loss.update([0.5, 1.5], [0, 1], class_gaps=[0.1] * 5, progress=1.0)
        assert_close(dict(loss.state_dict()), before, rtol=0, atol=0, equal_nan=True)

    def test_values_to_log(self, name: str) -> None:
        values = updated(name).log_values()
        assert len(values) == (46 if name == "ece_ce" else 61)
        assert all(isinstance(value, float) for value in values.values())
        assert {"calibration_gap_14", "count_14", "edge_00", "edge_15"} < set(values)
        assert values["edge_15"] >= values["edge_14"] > values["edge_00"]
        held_out = sum(values[f"count_{m:02d}"] for m in range(15))
        assert held_out == (400 if name == "ece_ce" else 399)  # equal-mass bins leave out the lowest


class TestAnUpdateThatNeverComes:
    """As in `Trainer(compute_loss_func=adafocal())`, which passes the model's output and updates nothing."""

    def passes(self, loss: AdaptiveLoss, outputs: Any, *, n: int = 250) -> None:
        for _ in range(n):
            loss(outputs, torch.tensor([0, 1]))

    def test_is_warned_of_once(self) -> None:
        outputs = SequenceClassifierOutput(logits=torch.zeros(2, 3, requires_grad=True))
        with pytest.warns(
            UserWarning, match=r"'adafocal' has trained for 100 batches and was never up"
        ) as found:
            self.passes(make_loss("adafocal"), outputs)
        assert len(found) == 1

    def test_is_none_in_evaluations_in_our_trainer_and_after_an_update(self) -> None:
        logits = torch.zeros(2, 3, requires_grad=True)
        loss, updated = make_loss("adafocal"), make_loss("adafocal")
        updated.update([0.5, 0.9], [1, 0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.no_grad():
                self.passes(loss, SequenceClassifierOutput(logits=logits))
            self.passes(loss, logits)  # CalibrationTrainer passes the logits
            self.passes(updated, SequenceClassifierOutput(logits=logits))


@pytest.mark.parametrize("name", ["adafocal", "ada_dual_focal"])
def test_gammas_without_an_upper_limit(name: str) -> None:
    """They grow beyond any number, and the loss stays finite."""
    for given in (float("inf"), "Infinity"):
        assert make_loss(name, gamma_max=given).hyperparameters["gamma_max"] == "inf"
    same = {"gamma_init": 1.0, "update_rate": 1.0}
    free = make_loss(name, gamma_max="inf", **same)
    limited = make_loss(name, **same)
    logits, labels = random_batch(20, 5)
    logits[0] *= 1e3
    for n in range(400):
        for loss in (free, limited):
            loss.update([0.6, 0.7, 0.8, 0.99], [0, 0, 0, 0])
        if n == 2:
            assert_close(free.gammas, limited.gammas, rtol=0, atol=0)
    assert limited.gammas.max() == 20
    assert 1e20 < free.gammas.max() < torch.inf
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        value, gradient = value_and_gradient(free, logits.to(dtype), labels)
        assert value.isfinite()
        assert gradient.isfinite().all()
    assert free.hyperparameters["gamma_max"] == "inf"
    again = make_loss(name, **json.loads(json.dumps(free.hyperparameters, allow_nan=False)))
    again.load_state_dict(free.state_dict())
    assert_close(again(logits, labels), free(logits, labels), rtol=0, atol=0)


BAD_PREDICTIONS = {
    "none": ([], [], "be two .N,. vectors, N >= 1, got .0,. and .0,.;"),
    "lengths": ([0.5, 0.6], [1], "be two .N,. vectors, N >= 1, got .2,. and .1,.;"),
    "one number": (0.5, 1, "be two .N,. vectors"),
    "matrix": (np.full((2, 3), 0.3), np.ones((2, 3)), "be two .N,. vectors, N >= 1, got .2, 3. and"),
    "not a number": (
        [0.5, float("nan")],
        [0, 1],
        r"confidences to be in \[0, 1\], got nan in row 1 \(1 such",
    ),
    "logits": ([0.5, 4.2, 7.0], [0, 1, 1], r"in \[0, 1\], got 4.2 in row 1 \(2 such\); pass probabilities"),
    "negative": ([-0.1], [1], r"confidences to be in \[0, 1\], got -0.1 in row 0"),
    "class indices": ([0.5, 0.6], [1, 3], r"correct to be in \[0, 1\], got 3.0 in row 1"),
}


@pytest.mark.parametrize("case", BAD_PREDICTIONS.values(), ids=BAD_PREDICTIONS)
@pytest.mark.parametrize("name", TABLES)
def test_predictions_that_do_not_fit(name: str, case: tuple[Any, Any, str]) -> None:
    confidences, correct, message = case
    with pytest.raises(ValueError, match=message):
        make_loss(name).update(confidences, correct, class_gaps=[0.1] * 5, progress=0.5)


@pytest.mark.parametrize("name", GAMMA_TABLES)
class TestGammaTable:
    def test_first_table(self, name: str) -> None:
        loss = make_loss(name, n_bins=4)
        assert loss.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
        assert loss.gammas.tolist() == [FIRST_GAMMAS[name]] * 4
        assert loss.gaps.tolist() == [0, 0, 0, 0]
        assert loss.accuracies.isnan().all()

    def test_one_bin(self, name: str) -> None:
        loss = make_loss(name, n_bins=1, update_rate=1)
        loss.update([0.4, 0.6, 0.8], [1, 0, 0])  # the smallest is left out
        assert_close(loss.gaps, torch.tensor([0.7], dtype=torch.float64))
        assert_close(loss.gammas, FIRST_GAMMAS[name] * torch.tensor([0.7], dtype=torch.float64).exp())
        assert loss(*random_batch(5, 3)).isfinite()

    def test_one_prediction_or_all_alike_change_nothing(self, name: str) -> None:
        for confidences in ([0.7], [0.7] * 20):
            loss = make_loss(name)
            loss.update(confidences, [0] * len(confidences))
            assert loss.gammas.tolist() == [FIRST_GAMMAS[name]] * 15
            assert loss.edges.tolist() == [0.7] * 16
            assert loss(*random_batch(5, 3)).isfinite()

    def test_types_of_predictions(self, name: str) -> None:
        confidences, correct = [0.3, 0.5, 0.75, 1.0, 0.25], [1, 0, 1, 1, 0]
        want = make_loss(name, n_bins=2)
        want.update(confidences, correct)
        for given in (
            (np.array(confidences), np.array(correct, dtype=bool)),
            (torch.tensor(confidences, requires_grad=True), torch.tensor(correct, dtype=torch.bool)),
            (np.array(confidences), np.array(correct, dtype=np.float32)),
        ):
            loss = make_loss(name, n_bins=2)
            loss.update(*given)
            assert_close(loss.gammas, want.gammas, rtol=1e-7, atol=0)

    def test_the_next_loss_sees_the_update(self, name: str) -> None:
        loss = make_loss(name)
        logits, labels = random_batch(20, 5)
        before = loss(logits, labels)
        loss.update(torch.linspace(0.01, 0.99, 50), torch.zeros(50))
        assert loss(logits, labels) != before


def test_gammas_stay_within_their_limits() -> None:
    loss = make_loss("adafocal", n_bins=1, update_rate=5, gamma_max=4, gamma_min=-1.5)
    for _ in range(5):
        loss.update([0.5, 0.9], [0, 0])
    assert loss.gammas.tolist() == [4]
    for _ in range(9):
        loss.update([0.1, 0.2], [1, 1])
    assert loss.gammas.tolist() == [-1.5]


class TestCalFocalOfEachExample:
    """Where a bin has no held-out prediction there is no accuracy, and gamma is 1."""

    def test_before_its_first_update(self) -> None:
        loss = make_loss("calfocal", per_sample=True)
        logits, labels = random_batch(40, 5)
        want = make_loss("focal", gamma=1.0)(logits, labels, reduction="none")
        assert_close(loss(logits, labels, reduction="none"), want)
        assert loss.gamma(torch.linspace(0, 1, 101)).tolist() == [1.0] * 101

    def test_in_empty_bins(self) -> None:
        loss = make_loss("calfocal", n_bins=4, update_rate=2, per_sample=True)
        loss.update([0.5] * 9 + [0.75] * 3, [1] * 9 + [0] * 3)
        # The edges are 0.5, 0.5, 0.5, 0.75, 0.75: only the third bin has predictions, all of them wrong.
        assert loss.accuracies.isnan().tolist() == [True, True, False, True]
        p = torch.tensor([0.0, 0.49, 0.5, 0.6, 0.74, 0.75, 1.0], dtype=torch.float64)
        gamma = loss.gamma(p)
        assert gamma[[0, 1, 5, 6]].tolist() == [1.0] * 4
        assert_close(gamma[2:5], torch.exp(2 * p[2:5]))


class TestEceCrossEntropy:
    def test_edges_of_the_bins(self) -> None:
        """Held-out bins are (low, high], and 0 is in the first; in training [low, high), and 1 is in none."""
        loss = make_loss("ece_ce", n_bins=4)
        confidences, correct = [0.0, 0.25, 0.5, 0.5, 0.75, 1.0], [1, 0, 0, 1, 1, 1]
        loss.update(confidences, correct, class_gaps=[0.0, 0.0], progress=1.0)
        assert loss.bin_gaps.tolist() == [(0.25 - 1) / 2, 0.0, 0.75 - 1, 0.0]
        loss.update([0.1, 0.3, 0.6, 0.9], [1, 1, 1, 1], class_gaps=[0.0, 0.0], progress=1.0)
        p = torch.tensor([0.0, 0.2499, 0.25, 0.4999, 0.5, 0.75, 0.9999, 1.0], dtype=torch.float64)
        labels = torch.zeros(8, dtype=torch.long)
        by_mass = loss.mass_gaps.abs()[[0, 0, 1, 1, 2, 2, 3, 3]]
        by_width = 3 * loss.weight(p, labels) - by_mass
        assert_close(by_width, torch.tensor([0.9, 0.9, 0.7, 0.7, 0.4, 0.1, 0.1, 0.0], dtype=torch.float64))

    def test_class_gaps_and_progress_are_needed(self) -> None:
        with pytest.raises(
            ValueError, match=r"class_gaps and progress to be given to ece_ce, got class_gaps=N"
        ):
            make_loss("ece_ce").update([0.5, 0.9], [1, 0])

    def update(self, **changes: Any) -> AdaptiveLoss:
        loss = make_loss("ece_ce")
        loss.update([0.5, 0.9], [1, 0], **({"class_gaps": [0.1, 0.2, 0.3], "progress": 0.5} | changes))
        return loss

    @pytest.mark.parametrize("progress", [-0.1, 1.1, float("nan")])
    def test_progress(self, progress: float) -> None:
        with pytest.raises(
            ValueError, match=r"expected progress to be in \[0, 1\], got .*; pass epochs done"
        ):
            self.update(progress=progress)

    @pytest.mark.parametrize("class_gaps", [[], 0.5, [[0.1]], [0.1, float("nan")]])
    def test_class_gaps(self, class_gaps: Any) -> None:
        with pytest.raises(ValueError, match=r"expected class_gaps to be \(C,\) finite numbers, got"):
            self.update(class_gaps=class_gaps)

    def test_class_gaps_of_another_model(self) -> None:
        with pytest.raises(ValueError, match="class_gaps to have one entry for each of 5 classes, got 3"):
            self.update()(*random_batch(4, 5))

    def test_ignored_rows_have_no_rank(self) -> None:
        """The mass gap goes by the rank of p within the batch: of the rows that count."""
        loss = updated("ece_ce")
        logits, labels = random_batch(60, 5)
        logits[:30], labels[:30] = 1000 * logits[:30], logits[:30].argmax(1)  # p = 1, as if ignored
        keep = torch.arange(60) % 4 > 0
        with_ignored = loss(logits, labels.where(keep, -100), reduction="none")
        assert_close(with_ignored[keep], loss(logits[keep], labels[keep], reduction="none"))


@pytest.mark.parametrize("per_sample", [False, True])
def test_gammas_of_a_very_fast_calfocal_stay_finite(per_sample: bool) -> None:
    loss = make_loss("calfocal", update_rate=1000.0, per_sample=per_sample)
    loss.update(torch.linspace(0.01, 0.99, 300), torch.zeros(300))
    logits = (60 * torch.randn(200, 5, generator=torch.Generator().manual_seed(0))).requires_grad_()
    loss(logits, torch.arange(200) % 5).backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    assert bool(loss.gammas.isfinite().all())
