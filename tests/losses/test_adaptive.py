"""Losses that adapt: their tables follow held-out predictions, and survive saving, moving and bad input."""

from __future__ import annotations

import copy
import io
import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_calib.losses import LOSSES, AdaptiveLoss, make_loss
from tests.helpers.loss_cases import make_variant, random_batch, value_and_gradient

BINS = {"edges", "gaps", "accuracies"}
TABLES = dict.fromkeys(("adafocal", "ada_dual_focal", "calfocal"), BINS | {"gammas"})
TABLES["ece_ce"] = BINS | {"bin_gaps", "class_gaps", "progress"}
SAME = {"rtol": 0, "atol": 0, "equal_nan": True}
NAN = float("nan")


def updated(name: str) -> Any:
    return make_variant((name, {}), 5)


def table_of(loss: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in loss.state_dict().items()}


@pytest.mark.parametrize("name", [name for name in LOSSES if isinstance(make_loss(name), AdaptiveLoss)])
class TestState:
    def test_copies_and_saved_tables(self, name: str) -> None:
        loss, fresh, part = updated(name), make_loss(name), make_loss(name)
        logits, labels = random_batch(20, 5)
        value = loss(logits.float(), labels)
        assert fresh(logits.float(), labels) != value
        file = io.BytesIO()
        torch.save(loss.state_dict(), file)
        file.seek(0)
        fresh.load_state_dict(torch.load(file, weights_only=True))
        nn.ModuleDict({"loss": part}).load_state_dict(nn.ModuleDict({"loss": loss}).state_dict())
        assert set(loss.state_dict()) == TABLES[name]
        assert_close(table_of(fresh), table_of(loss), **SAME)
        twin = copy.deepcopy(loss)
        assert [each(logits.float(), labels) for each in (fresh, part, twin)] == [value] * 3
        twin.update([0.3, 0.9], [1, 0], class_gaps=[0.9] * 5, progress=1.0)
        assert twin(logits.float(), labels) != value
        assert loss(logits.float(), labels) == value

    def test_the_table_stays_float64(self, name: str) -> None:
        loss = updated(name)
        table = table_of(loss)
        logits, labels = random_batch(20, 5)
        value = loss(logits, labels)
        for moved in (loss.half(), loss.to(torch.bfloat16), loss.float(), loss.to("cpu")):
            assert moved is loss
            assert {tensor.dtype for tensor in table_of(loss).values()} == {torch.float64}
            assert_close(table_of(loss), table, **SAME)
        assert loss(logits, labels) == value
        assert_close(loss(logits.float(), labels).double(), value, rtol=1e-5, atol=1e-6)

    def test_other_tables(self, name: str) -> None:
        """The number of classes is no hyperparameter: it is known from the first update on."""
        loss, of_7 = updated(name), make_variant((name, {}), 7)
        loss.load_state_dict(of_7.state_dict())
        assert_close(table_of(loss), table_of(of_7), **SAME)
        state = updated(name).state_dict()
        with pytest.raises(RuntimeError, match="size mismatch"):
            make_loss(name, n_bins=10).load_state_dict(state)
        with pytest.raises(RuntimeError, match="Missing key"):
            make_loss(name).load_state_dict({key: state[key] for key in TABLES[name] - {"gaps"}})

    def test_values_to_log(self, name: str) -> None:
        values = updated(name).log_values()
        assert len(values) == (46 if name == "ece_ce" else 61)
        assert values["edge_15"] >= values["edge_14"] > values["edge_00"]
        assert isinstance(values["calibration_gap_14"], float)
        assert sum(values[f"count_{m:02d}"] for m in range(15)) == 399  # of 400, without the lowest


def test_an_update_that_never_comes_is_warned_of_once() -> None:
    """As in `Trainer(compute_loss_func=adafocal())`, which passes the model's output and updates nothing."""
    logits = torch.zeros(2, 3, requires_grad=True)
    outputs, labels = SequenceClassifierOutput(logits=logits), torch.tensor([0, 1])
    loss, other, adapted = (make_loss("adafocal") for _ in range(3))
    adapted.update([0.5, 0.9], [1, 0])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(250):
            other(logits, labels)  # CalibrationTrainer passes the logits
            adapted(outputs, labels)
            with torch.no_grad():  # an evaluation
                loss(outputs, labels)
        assert not found
        for _ in range(250):
            loss(outputs, labels)
    (warning,) = found
    assert str(warning.message).startswith("'adafocal' has trained for 100 batches and was never updated")


@pytest.mark.parametrize("name", ["adafocal", "ada_dual_focal"])
def test_gammas_without_an_upper_limit(name: str) -> None:
    """They grow beyond any number, and the loss stays finite."""
    loss: Any = make_loss(name, gamma_max="Infinity", gamma_init=1.0, update_rate=1.0)
    assert loss.hyperparameters["gamma_max"] == "inf"
    logits, labels = random_batch(20, 5)
    logits[0] *= 1e3
    for _ in range(400):
        loss.update([0.6, 0.7, 0.8, 0.99], [0, 0, 0, 0])
    assert 1e20 < loss.gammas.max() < torch.inf
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        value, gradient = value_and_gradient(loss, logits.to(dtype), labels)
        assert value.isfinite()
        assert gradient.isfinite().all()
    again = make_loss(name, **json.loads(json.dumps(loss.hyperparameters, allow_nan=False)))
    again.load_state_dict(loss.state_dict())
    assert again(logits, labels) == loss(logits, labels)


EXTREME = [("bsce", {"gamma": 30, "norm": norm}) for norm in (1, 2, 30, 300)]
EXTREME += [("bsce_gra", {"gamma": 30}), ("bsce", {"gamma": 0.01}), ("bsce", {"gamma": 1e30})]
EXTREME += [("adafocal", {"gamma_init": -32, "gamma_min": -32})]
EXTREME += [("adafocal", {"gamma_init": 1e30, "gamma_max": math.inf})]


@pytest.mark.filterwarnings("ignore:The inverse focal gamma")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "given"), EXTREME)
def test_masked_decisions(name: str, given: dict[str, float], dtype: torch.dtype) -> None:
    """Extreme settings in a multi-label problem, whose cross entropy is 1e30 where the label that applies is masked."""
    lowest = torch.finfo(dtype).min
    logits = torch.tensor([[-torch.inf, -torch.inf, -torch.inf, lowest, lowest, 0.0, 17.0, 60.0, -60.0]])
    labels = torch.tensor([[1.0, 0.0, 0.5, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0]])
    value, gradient = value_and_gradient(make_loss(name, **given), logits.to(dtype), labels)
    assert value.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("gamma", [-2.0, 20.0])
def test_gradients_of_float16_logits_in_the_default_range(gamma: float) -> None:
    p = torch.linspace(1e-4, 1 - 1e-4, 999, dtype=torch.float64)
    logits = torch.stack([p, 1 - p], 1).log().half()
    loss = make_loss("adafocal", gamma_init=gamma)
    _, gradient = value_and_gradient(loss, logits, torch.zeros(999, dtype=torch.long), reduction="sum")
    assert gradient.abs().max() < 2


# What an update is given beside what fits, to every loss or to `ece_ce`.
BAD_PREDICTIONS: list[tuple[Any, Any, str]] = [
    ([], [], "be two .N,. vectors, N >= 1, got .0,. and .0,.;"),
    ([0.5, 0.6], [1], "be two .N,. vectors, N >= 1, got .2,. and .1,.;"),
    (0.5, 1, "be two .N,. vectors"),
    (np.full((2, 3), 0.3), np.ones((2, 3)), "be two .N,. vectors, N >= 1, got .2, 3. and"),
    ([0.5, NAN], [0, 1], r"confidences to be in \[0, 1\], got nan in row 1 \(1 such"),
    ([0.5, 4.2, 7.0], [0, 1, 1], r"in \[0, 1\], got 4.2 in row 1 \(2 such\); pass probabilities"),
    ([0.5, 0.6], [1, 3], r"correct to be in \[0, 1\], got 3.0 in row 1"),
]
BAD_OF_ECE_CE: list[tuple[str, Any, str]] = [
    ("class_gaps", None, "class_gaps and progress to be given to ece_ce, got class_gaps=N"),
    *(("progress", value, r"to be in \[0, 1\], got .*; pass epochs done") for value in (-0.1, 1.1, NAN)),
    *(("class_gaps", value, r"be \(C,\) finite numbers, got") for value in ([], 0.5, [[0.1]], [0.1, NAN])),
]


@pytest.mark.parametrize("name", TABLES)
def test_updates_that_do_not_fit_change_nothing(name: str) -> None:
    loss, fits = updated(name), {"class_gaps": [0.1] * 5, "progress": 0.5}
    for confidences, correct, message in BAD_PREDICTIONS:
        with pytest.raises(ValueError, match=message):
            loss.update(confidences, correct, **fits)
    for key, value, message in BAD_OF_ECE_CE if name == "ece_ce" else ():
        with pytest.raises(ValueError, match=message):
            loss.update([0.5, 0.9], [1, 0], **{**fits, key: value})
    assert_close(table_of(loss), table_of(updated(name)), **SAME)


@pytest.mark.parametrize(("name", "first"), [("ada_dual_focal", 6), ("adafocal", 1), ("calfocal", 1)])
def test_before_and_after_few_predictions(name: str, first: float) -> None:
    loss = make_loss(name, n_bins=4)
    assert loss.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert loss.gammas.tolist() == [first] * 4
    assert loss.gaps.tolist() == [0, 0, 0, 0]
    assert loss.accuracies.isnan().all()
    of_tensor = torch.full((20,), 0.7, dtype=torch.float64, requires_grad=True)
    for confidences in ([0.7], np.full(20, 0.7), of_tensor):  # one, or all alike, change nothing
        loss.update(confidences, np.zeros(len(confidences), dtype=bool))
        assert loss.gammas.tolist() == [first] * 4
        assert loss.edges.tolist() == [0.7] * 5
        assert loss(*random_batch(5, 3)).isfinite()
    of_one_bin = make_loss(name, n_bins=1, update_rate=1)
    of_one_bin.update([0.4, 0.6, 0.8], [1, 0, 0])  # the smallest is left out
    assert of_one_bin.gaps.tolist() == pytest.approx([0.7])
    assert of_one_bin.gammas.tolist() == pytest.approx([first * math.exp(0.7)])


class TestCalFocal:
    def test_of_each_example_in_empty_bins(self) -> None:
        """Where a bin has no held-out prediction there is no accuracy, and gamma is 1."""
        loss = make_loss("calfocal", n_bins=4, update_rate=2, per_sample=True)
        p = torch.tensor([0.01, 0.49, 0.51, 0.6, 0.74, 0.76, 0.99], dtype=torch.float64)
        logits, labels = torch.stack([p, 1 - p], 1).log(), torch.zeros(7, dtype=torch.long)
        assert_close(loss(logits, labels, reduction="none"), -(1 - p) * p.log())
        loss.update([0.5] * 9 + [0.75] * 3, [1] * 9 + [0] * 3)
        # The edges are 0.5, 0.5, 0.5, 0.75, 0.75: only the third bin has predictions, all of them wrong.
        assert loss.accuracies.isnan().tolist() == [True, True, False, True]
        gamma = torch.where((p >= 0.5) & (p < 0.75), torch.exp(2 * p), 1.0)
        assert_close(loss(logits, labels, reduction="none"), -((1 - p) ** gamma) * p.log())

    @pytest.mark.parametrize("per_sample", [False, True])
    def test_a_very_fast_one_stays_finite(self, per_sample: bool) -> None:
        loss = make_loss("calfocal", update_rate=1000.0, per_sample=per_sample)
        loss.update(torch.linspace(0.01, 0.99, 300), torch.zeros(300))
        logits, labels = random_batch(200, 5, scale=60)
        assert value_and_gradient(loss, logits.float(), labels)[1].isfinite().all()


class TestEceCrossEntropy:
    @pytest.mark.parametrize("n_classes", [4, 6])
    def test_gaps_of_other_classes(self, n_classes: int) -> None:
        with pytest.raises(
            ValueError, match="class_gaps to have one entry for each class of the logits, got 5;"
        ):
            updated("ece_ce")(*random_batch(20, n_classes))

    def test_edges_of_the_bins(self) -> None:
        """Held-out bins are (low, high], and 0 is in the first; in training [low, high), and 1 is in none."""
        loss = make_loss("ece_ce", n_bins=4)
        confidences, correct = [0.0, 0.25, 0.5, 0.5, 0.75, 1.0], [1, 0, 0, 1, 1, 1]
        loss.update(confidences, correct, class_gaps=[0.0, 0.0], progress=1.0)
        assert loss.bin_gaps.tolist() == [(0.25 - 1) / 2, 0.0, 0.75 - 1, 0.0]
        loss.update([0.1, 0.3, 0.6, 0.9], [1, 1, 1, 1], class_gaps=[0.0, 0.0], progress=1.0)
        p = torch.tensor([0.0, 0.2499, 0.25, 0.4999, 0.5, 0.75, 0.9999, 1.0], dtype=torch.float64)
        labels = torch.zeros(8, dtype=torch.long)
        by_mass = loss.gaps.abs()[[0, 0, 1, 1, 2, 2, 3, 3]]
        by_width = 3 * loss.weight(p, labels) - by_mass
        assert_close(by_width, torch.tensor([0.9, 0.9, 0.7, 0.7, 0.4, 0.1, 0.1, 0.0], dtype=torch.float64))

    def test_ignored_rows_have_no_rank(self) -> None:
        """The mass gap goes by the rank of p within the batch: of the rows that count."""
        loss = updated("ece_ce")
        logits, labels = random_batch(60, 5)
        logits[:30], labels[:30] = 1000 * logits[:30], logits[:30].argmax(1)  # p = 1, as if ignored
        keep = torch.arange(60) % 4 > 0
        with_ignored = loss(logits, labels.where(keep, -100), reduction="none")
        assert_close(with_ignored[keep], loss(logits[keep], labels[keep], reduction="none"))
