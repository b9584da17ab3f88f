"""Losses that adapt: their tables follow held-out predictions, and survive saving, moving and bad input."""

from __future__ import annotations

import copy
import io
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


@pytest.mark.parametrize(
    "name", [name for name in LOSSES if isinstance(make_loss(name), AdaptiveLoss)]
)
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
        nn.ModuleDict({"loss": part}).load_state_dict(
            nn.ModuleDict({"loss": loss}).state_dict()
        )
        assert set(loss.state_dict()) == TABLES[name]
        assert_close(table_of(fresh), table_of(loss), **SAME)
        twin = copy.deepcopy(loss)
        assert [each(logits.float(), labels) for each in (fresh, part, twin)] == [
            value
        ] * 3
        twin.update([0.3, 0.9], [1, 0], class_gaps=[0.9] * 5, progress=1.0)
        assert twin(logits.float(), labels) != value
        assert loss(logits.float(), labels) == value

    def test_the_table_stays_float64(self, name: str) -> None:
        loss = updated(name)
        table = table_of(loss)
        logits, labels = random_batch(20, 5)
        value = loss(logits, labels)
        for moved in (
            loss.half(),
            loss.to(torch.bfloat16),
            loss.float(),
            loss.to("cpu"),
        ):
            assert moved is loss
            assert {tensor.dtype for tensor in table_of(loss).values()} == {
                torch.float64
            }
            assert_close(table_of(loss), table, **SAME)
        assert loss(logits, labels) == value
        assert_close(loss(logits.float(), labels).double(), value, rtol=1e-5, atol=1e-6)


def test_an_update_that_never_comes_is_warned_of_once() -> None:
    """In a loop of one's own as with `Trainer(compute_loss_func=adafocal())`, which passes the model's output."""
    logits, labels = torch.zeros(2, 3, requires_grad=True), torch.tensor([0, 1])
    outputs = SequenceClassifierOutput(logits=logits)
    expecting, adapted = make_loss("adafocal"), make_loss("adafocal")
    adapted.update([0.5, 0.9], [1, 0])
    expecting.expect_updates()  # as the callback of a trainer does
    for name in ("adafocal", "ece_ce"):
        for passed in (logits, outputs):
            loss = make_loss(name)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                for _ in range(101):
                    expecting(passed, labels)
                    adapted(passed, labels)
                    with torch.no_grad():  # an evaluation
                        loss(passed, labels)
                assert not found
                for _ in range(201):
                    loss(passed, labels)
            (warning,) = found
            assert warning.filename == __file__
            assert str(warning.message).startswith(
                f"{name!r} has trained for 100 batches without an update, so it has not adapted yet."
            )


EXTREME = [("bsce", {"gamma": 30, "norm": norm}) for norm in (1, 2, 30, 300)]
EXTREME += [
    ("bsce_gra", {"gamma": 30}),
    ("bsce", {"gamma": 0.01}),
    ("bsce", {"gamma": 1e30}),
]
EXTREME += [("adafocal", {"gamma_init": -32, "gamma_min": -32})]
EXTREME += [("adafocal", {"gamma_init": 1e30, "gamma_max": math.inf})]


@pytest.mark.filterwarnings("ignore:The inverse focal gamma")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "given"), EXTREME)
def test_masked_decisions(
    name: str, given: dict[str, float], dtype: torch.dtype
) -> None:
    """Extreme settings in a multi-label problem, whose cross entropy is 1e30 where the label that applies is masked."""
    lowest = torch.finfo(dtype).min
    logits = torch.tensor(
        [[-torch.inf, -torch.inf, -torch.inf, lowest, lowest, 0.0, 17.0, 60.0, -60.0]]
    )
    labels = torch.tensor([[1.0, 0.0, 0.5, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0]])
    value, gradient = value_and_gradient(
        make_loss(name, **given), logits.to(dtype), labels
    )
    assert value.isfinite()
    assert gradient.isfinite().all()


# What an update is given beside what fits, to every loss or to `ece_ce`.
BAD_PREDICTIONS: list[tuple[Any, Any, str]] = [
    ([0.5, 0.6], [1], "be two .N,. vectors, N >= 1, got .2,. and .1,.;"),
    (
        [0.5, 4.2, 7.0],
        [0, 1, 1],
        r"in \[0, 1\], got 4.2 in row 1 \(2 such\); pass probabilities",
    ),
    ([0.5, 0.6], [1, 3], r"correct to be in \[0, 1\], got 3.0 in row 1"),
]
BAD_OF_ECE_CE: list[tuple[str, Any, str]] = [
    (
        "class_gaps",
        None,
        "class_gaps and progress to be given to ece_ce, got class_gaps=N",
    ),
    *(
        ("progress", value, r"to be in \[0, 1\], got .*; pass epochs done")
        for value in (-0.1, 1.1, NAN)
    ),
    *(
        ("class_gaps", value, r"be \(C,\) finite numbers, got")
        for value in ([], 0.5, [[0.1]], [0.1, NAN])
    ),
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


@pytest.mark.parametrize(
    ("name", "first"), [("ada_dual_focal", 6), ("adafocal", 1), ("calfocal", 1)]
)
def test_before_and_after_few_predictions(name: str, first: float) -> None:
    loss = make_loss(name, n_bins=4)
    assert loss.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert loss.gammas.tolist() == [first] * 4
    assert loss.gaps.tolist() == [0, 0, 0, 0]
    assert loss.accuracies.isnan().all()
    of_tensor = torch.full((20,), 0.7, dtype=torch.float64, requires_grad=True)
    for confidences in (
        [0.7],
        np.full(20, 0.7),
        of_tensor,
    ):  # one, or all alike, change nothing
        loss.update(confidences, np.zeros(len(confidences), dtype=bool))
        assert loss.gammas.tolist() == [first] * 4
        assert loss.edges.tolist() == [0.7] * 5
        assert loss(*random_batch(5, 3)).isfinite()
    of_one_bin = make_loss(name, n_bins=1, update_rate=1)
    of_one_bin.update([0.4, 0.6, 0.8], [1, 0, 0])  # the smallest is left out
    assert of_one_bin.gaps.tolist() == pytest.approx([0.7])
    assert of_one_bin.gammas.tolist() == pytest.approx([first * math.exp(0.7)])


# Entries of a saved table that no update can have written, by buffer; the gammas are those of adafocal's limits.
IMPOSSIBLE: dict[str, list[list[float]]] = {
    "edges": [
        [0, NAN, 1],
        [0, 0.7, 0.6],
        [-0.1, 0.5, 1],
        [0, 0.5, 1.5],
        [0, math.inf, 1],
    ],
    "gaps": [[NAN, 0], [0, 1.5], [-1.5, 0], [math.inf, 0]],
    "accuracies": [[0, 1.5], [-0.5, 0], [0, -math.inf]],
    "gammas": [[NAN, 1], [1, 21], [-3, 1], [1, math.inf]],
    "bin_gaps": [[NAN, 0], [0, 1.5], [-1.5, 0]],
    "class_gaps": [[NAN, 0], [math.inf, 0]],
    "progress": [],
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_no_update_writes_are_not_loaded(name: str) -> None:
    loss = make_loss(name, n_bins=2)
    fits = {"class_gaps": [0.1, 0.2], "progress": 0.5}
    loss.update([0.6, 0.7, 0.8, 0.9], [0, 1, 0, 1], **fits)
    table = table_of(loss)
    damages = [
        (key, torch.tensor(values, dtype=torch.float64))
        for key in TABLES[name]
        for values in IMPOSSIBLE[key]
        # Only adafocal's gammas may be negative, and only calfocal's have no upper limit.
        if (name, key, values) != ("calfocal", "gammas", [1, 21])
    ]
    damages += [
        (key, table[key][:-1]) for key in TABLES[name] - {"progress", "class_gaps"}
    ]
    damages += [(key, table[key][None]) for key in TABLES[name]]
    damages += [(key, table[key] + 0j) for key in TABLES[name]]
    if name == "ece_ce":
        damages += [("progress", torch.tensor(value)) for value in (NAN, -0.1, 1.1)]
    for key, value in damages:
        message = rf"expected {key} of the saved table of {name} to have shape .*, got .*; load"
        with pytest.raises(ValueError, match=message):
            loss.load_state_dict(table | {key: value})
        assert_close(table_of(loss), table, **SAME)
    loss.load_state_dict(table)


def test_a_table_with_another_number_of_bins_is_named() -> None:
    saved = {"loss": table_of(make_loss("adafocal", n_bins=10))}
    message = r"of the saved table of adafocal to have shape \(1[56],\) .*, got shape \(1[01],\).*'n_bins': 15"
    with pytest.raises(ValueError, match=message):
        make_loss("adafocal").load_state_dict(saved["loss"])
    with pytest.raises(ValueError, match="of the saved table of adafocal"):
        nn.ModuleDict({"loss": make_loss("adafocal")}).load_state_dict(
            {f"loss.{key}": value for key, value in saved["loss"].items()}
        )


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    name=st.sampled_from(sorted(TABLES)),
    n_bins=st.integers(1, 6),
    rows=st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30),
    rate=st.floats(0, 50),
)
def test_every_table_of_an_update_can_be_loaded(
    name: str, n_bins: int, rows: list[tuple[float, bool]], rate: float
) -> None:
    given_rate = {} if name == "ece_ce" else {"update_rate": rate}
    loss, other = (make_loss(name, n_bins=n_bins, **given_rate) for _ in range(2))
    confidences, correct = zip(*rows, strict=True)
    for _ in range(2):
        loss.update(confidences, correct, class_gaps=[0.5, 0.1], progress=1.0)
    other.load_state_dict(loss.state_dict())
    assert_close(table_of(other), table_of(loss), **SAME)


def test_ece_ce_has_no_bin_gap_where_p_is_1() -> None:
    """As in the authors' code, whose last equal-width bin is open above."""
    loss = make_loss("ece_ce", n_bins=2)
    loss.update([0.6, 0.95, 0.9], [0, 1, 0], class_gaps=[0.1, 0.3], progress=1.0)
    last_bin, last_mass = loss.bin_gaps[1].abs(), loss.gaps[1].abs()
    assert min(last_bin, last_mass) > 0.05
    for gap, bin_gap in ((25.0, 0.0), (3.0, last_bin)):
        # The other class has a gradient, even if the loss is 0.
        batch = torch.tensor([[gap, 0.0]]), torch.tensor([0])
        slopes = [
            value_and_gradient(each, *batch)[1][0, 1]
            for each in (loss, make_loss("cross_entropy"))
        ]
        weight = slopes[0] / slopes[1]
        wanted = (bin_gap + last_mass + 2 * 0.1) / 3
        assert weight.item() == pytest.approx(float(wanted), rel=1e-5)


def test_the_loss_is_that_of_its_newest_table() -> None:
    """Several updates between two passes give new tensors the places in memory of old ones."""
    logits, labels = torch.randn(64, 5), torch.arange(64) % 5
    n_stale = 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        loss: Any = make_loss("calfocal", n_bins=5)
        for _ in range(4):
            loss(logits, labels)
            for _ in range(4):
                sure = torch.rand(50, generator=generator)
                loss.update(sure, (torch.rand(50, generator=generator) < sure).float())
            value = loss(logits, labels)
            fresh = make_loss("calfocal", n_bins=5)
            fresh.load_state_dict(loss.state_dict())
            n_stale += bool(value != fresh(logits, labels))
    assert n_stale == 0
