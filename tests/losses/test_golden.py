"""The losses against numbers from the papers' own code, in float64: of single batches, and of 200 training steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hf_calib.losses import CalibrationLoss, make_loss
from tests.helpers.loss_cases import WIDTHS, value_and_gradient, widened
from tests.helpers.places import GOLDEN

EXACT = {"rtol": 1e-8, "atol": 1e-12}
NUMBER = r"(\d+(?:p\d+)?)"

# Which loss each id of the golden files is: its name, what the numbers in the id are, and its other hyperparameters.
LOSS_OF_ID: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "ce": ("cross_entropy", (), {}),
    "ls0p05_overK": ("label_smoothing", (), {"smoothing": 0.05}),
    "brier": ("brier", (), {}),
    f"focal_g{NUMBER}": ("focal", ("gamma",), {}),
    f"focalgra_g{NUMBER}": ("focal_gra", ("gamma",), {}),
    "flsd53_g3p0": ("flsd", (), {}),
    "flsd53_g2p0": ("flsd", (), {"thresholds": (0.2, 0.5), "gammas": (5, 3, 2)}),
    "flsd53gra_g3p0": ("flsd_gra", (), {}),
    f"dfl_g{NUMBER}": ("dual_focal", ("gamma",), {}),
    f"dflgra_fulldetach_g{NUMBER}": ("dual_focal_gra", ("gamma",), {}),
    f"invfocal_g{NUMBER}": ("inverse_focal", ("gamma",), {}),
    f"bsce_g{NUMBER}_n{NUMBER}": ("bsce", ("gamma", "norm"), {}),
    f"bscegra_g{NUMBER}_n{NUMBER}": ("bsce_gra", ("gamma", "norm"), {}),
    f"fcl_g{NUMBER}_lam{NUMBER}": ("focal_calibration", ("gamma", "brier_weight"), {}),
    "derived_ce_l1logits_a0p01": ("logit_norm", (), {"norm_weight": 0.01}),
    "derived_ce_entropy_a0p1": ("entropy_regularized", (), {"entropy_weight": 0.1}),
    "ce_plus_2mmce_w": ("mmce", (), {"mmce_weight": 2, "authors_code": True}),
    "ce_plus_2mmce_m": (
        "mmce",
        (),
        {"mmce_weight": 2, "variant": "plain", "authors_code": True},
    ),
    # These three are the bare penalty: cross entropy is taken off the loss.
    "mmce_w": ("mmce", (), {"mmce_weight": 1, "authors_code": True}),
    "mmce_m_nosqrt": (
        "mmce",
        (),
        {"mmce_weight": 1, "variant": "plain", "authors_code": True},
    ),
    "dece_b15_ta100_tb0p01": ("soft_ece", (), {"variant": "dece"}),
}
BARE_PENALTIES = {"mmce_w", "mmce_m_nosqrt", "dece_b15_ta100_tb0p01"}

NOT_A_LOSS_HERE = {
    "ls0p05_overKm1": "spreads the smoothing over the other classes; ours is PyTorch's",
    "dflgra_ascoded_g5": "detaches q alone, against the paper's Eq. 9",
    "bsceadaptivegra_g3_n2": "a step schedule that the paper does not have",
    "safcl_gf2p0_gc2p0_lam1p0": "a later method",
    "mmce_fclrepo_gauss_sqrt": "another kernel than Kumar's",
}


def loss_of(golden_id: str) -> CalibrationLoss:
    found = {pattern: re.fullmatch(pattern, golden_id) for pattern in LOSS_OF_ID}
    ((pattern, match),) = (
        (pattern, match) for pattern, match in found.items() if match
    )
    name, keys, given = LOSS_OF_ID[pattern]
    numbers = [float(text.replace("p", ".")) for text in match.groups()]
    return make_loss(name, **given, **dict(zip(keys, numbers, strict=True)))


CASES = {
    path.stem.removeprefix("losses_"): dict(np.load(path))
    for path in GOLDEN.glob("losses_*.npz")
}
ALL_IDS = sorted(
    {key.split("__")[0] for case in CASES.values() for key in case if "__" in key}
)
IDS = [golden_id for golden_id in ALL_IDS if golden_id not in NOT_A_LOSS_HERE]


def assert_same_gradient(
    gradient: np.ndarray, want: np.ndarray, logits: np.ndarray, golden_id: str
) -> None:
    if golden_id.startswith("dfl"):
        # Classes of the same logit share out a subgradient: their sum is compared.
        ties = logits[:, :, None] == logits[:, None, :]
        gradient, want = (
            np.einsum("nij,nj->ni", ties, each) for each in (gradient, want)
        )
    if golden_id == "focal_g0p5":
        # (1 - p)^0.5 at p = 1: the reference has NaN, the true gradient is below 1e-40.
        undefined = np.isnan(want)
        assert np.abs(gradient[undefined]).max(initial=0) < 1e-30
        gradient, want = gradient[~undefined], want[~undefined]
    np.testing.assert_allclose(gradient, want, **EXACT)


def test_every_golden_id_is_a_loss_or_has_a_reason() -> None:
    assert len(CASES) == 12
    assert all(loss_of(golden_id) for golden_id in IDS)
    assert set(NOT_A_LOSS_HERE) <= set(ALL_IDS)


@pytest.mark.parametrize(
    "width", [None, pytest.param(WIDTHS[-1], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("golden_id", IDS)
def test_values_and_gradients(golden_id: str, width: int | None) -> None:
    """As the logits are, and with masked classes beside them, by which they become large: of the smaller batches."""
    loss = loss_of(golden_id)
    of_value, of_gradient = (
        ("value", "grad") if loss.couples_batch else ("sum", "grad_of_sum")
    )
    cases = {
        name: case for name, case in CASES.items() if f"{golden_id}__{of_value}" in case
    }
    if width is not None:
        cases = {
            name: case for name, case in cases.items() if len(case["labels"]) <= 32
        }
    assert len(cases) >= (10 if width is None else 7)
    for name, case in cases.items():
        logits, labels = (
            torch.from_numpy(case["logits"]),
            torch.from_numpy(case["labels"]),
        )
        logits = logits if width is None else widened(logits, width)
        reduction = "mean" if loss.couples_batch else "sum"
        value, gradient = value_and_gradient(loss, logits, labels, reduction=reduction)
        if golden_id in BARE_PENALTIES:
            ce_value, ce_gradient = value_and_gradient(
                make_loss("cross_entropy"), logits, labels
            )
            value, gradient = value - ce_value, gradient - ce_gradient
        np.testing.assert_allclose(value, case[f"{golden_id}__{of_value}"], **EXACT)
        want = case.get(f"{golden_id}__{of_gradient}")
        # MMCE's confidences in ties24x5 differ by rounding alone: the authors' abs() takes a side of its kink.
        if want is not None and not ("mmce" in golden_id and name == "ties24x5"):
            own = gradient[:, : case["logits"].shape[1]].numpy()
            assert_same_gradient(own, want, case["logits"], golden_id)
        if not loss.couples_batch:
            per_example = loss(logits, labels, reduction="none")
            np.testing.assert_allclose(
                per_example, case[f"{golden_id}__per_sample"], **EXACT
            )
            np.testing.assert_allclose(
                loss(logits, labels), case[f"{golden_id}__mean"], **EXACT
            )


def adafocal(file: dict[str, np.ndarray]) -> CalibrationLoss:
    theirs = {
        "update_rate": "lambda",
        "gamma_init": "gamma_initial",
        "switch": "switch_pt",
    }
    theirs |= {"gamma_max": "gamma_max", "gamma_min": "gamma_min"}
    given = {name: float(file[f"cfg_{key}"]) for name, key in theirs.items()}
    return make_loss("adafocal", n_bins=int(file["cfg_num_bins"]), **given)


def assert_trains(
    loss: CalibrationLoss, logits: Any, labels: Any, gradient: np.ndarray
) -> np.ndarray:
    """Compare the gradient of the sum; return the values of the rows."""
    z, y = torch.from_numpy(logits), torch.from_numpy(labels)
    rows, own = value_and_gradient(loss, z, y, reduction="none")
    np.testing.assert_allclose(own, gradient, **EXACT)
    return rows.numpy()


@pytest.mark.parametrize("name", ["default", "switch", "ties"])
def test_adafocal_over_six_updates(name: str, golden: Path) -> None:
    file = dict(np.load(golden / f"adafocal_{name}.npz"))
    loss = adafocal(file)
    logits, labels = file["train_logits"], file["train_labels"]
    p = torch.from_numpy(logits).softmax(1)[range(len(labels)), labels]
    for t in range(7):
        np.testing.assert_allclose(loss.edges[1:], file["edges_upper"][t], **EXACT)
        np.testing.assert_allclose(loss.edges[:-1], file["edges_lower"][t], **EXACT)
        np.testing.assert_allclose(loss.gammas, file["gamma"][t], **EXACT)
        of_rows = loss.gammas[torch.bucketize(p, loss.edges[1:-1], right=True)]
        np.testing.assert_allclose(of_rows, file["train_gamma_per_sample"][t], **EXACT)
        rows = assert_trains(loss, logits, labels, file["train_grad_of_sum"][t])
        np.testing.assert_allclose(rows, file["train_loss_per_sample"][t], **EXACT)
        np.testing.assert_allclose(rows.sum(), file["train_loss_sum"][t], **EXACT)
        if t < 6:
            loss.update(file["val_confidence"][t], file["val_correct"][t])
            np.testing.assert_allclose(loss.gaps, file["val_bin_gap"][t], **EXACT)


def test_adafocal_from_gamma_0_goes_the_papers_way(golden: Path) -> None:
    """At gamma 0 Algorithm 1 takes the focal branch and switches to -S_th; its code stays at +S_th."""
    file = dict(np.load(golden / "adafocal_gamma0.npz"))
    loss = adafocal(file)
    loss.update(file["val_confidence"][0], file["val_correct"][0])
    switch = float(file["cfg_switch_pt"])
    assert file["gamma"][1].tolist() == [switch] * len(loss.gammas)
    assert loss.gammas.tolist() == [-switch] * len(loss.gammas)


def test_ada_dual_focal_over_four_updates(golden: Path) -> None:
    """Gamma goes by the lead over the rival; it never changes its sign, whatever the held-out predictions."""
    file = dict(np.load(golden / "ada_dual_focal.npz"))
    loss = make_loss(
        "ada_dual_focal", n_bins=10, update_rate=2.0, gamma_init=6.0, gamma_max=20.0
    )
    for t in range(5):
        np.testing.assert_allclose(loss.edges, file["edges"][t], **EXACT)
        np.testing.assert_allclose(loss.gammas, file["gammas"][t], **EXACT)
        rows = assert_trains(
            loss, file["logits"], file["labels"], file["gradient_of_sum"][t]
        )
        np.testing.assert_allclose(rows, file["per_example"][t], **EXACT)
        if t < 4:
            loss.update(file["confidences"][t], file["correct"][t])
    assert file["gammas"].min() < 0.3
    assert file["gammas"].max() == 20


def test_ece_cross_entropy(golden: Path) -> None:
    file = dict(np.load(golden / "ece_ce.npz"))
    confidences, predicted = torch.from_numpy(file["stats_logits"]).softmax(1).max(1)
    correct = predicted == torch.from_numpy(file["stats_labels"])
    for epoch in (0, 100, 350):
        loss = make_loss("ece_ce")
        loss.update(
            confidences, correct, class_gaps=file["per_class_ece"], progress=epoch / 350
        )
        # The sign of a gap is of no consequence: the weight takes its magnitude.
        np.testing.assert_allclose(
            loss.bin_gaps.abs(), abs(file["bin_gap_ew"]), **EXACT
        )
        np.testing.assert_allclose(loss.gaps.abs(), abs(file["bin_gap_em"]), **EXACT)
        gradient = file[f"grad_of_sum_epoch{epoch}"]
        rows = assert_trains(loss, file["train_logits"], file["train_labels"], gradient)
        np.testing.assert_allclose(rows.sum(), file[f"loss_sum_epoch{epoch}"], **EXACT)


# 200 SGD steps with our losses and with the papers' own code in its own loop: `tests/golden/README.md` says how.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
BATCH, EPOCHS = 16, 20
TRAJECTORIES: dict[str, tuple[str, dict[str, Any]]] = {
    "focal": ("focal", {"gamma": 3.0}),
    "flsd": ("flsd", {}),
    "dual_focal": ("dual_focal", {"gamma": 5.0}),
    "bsce_gra": ("bsce_gra", {"gamma": 4.0, "norm": 2.0}),
    "mmce_weighted": ("mmce", {"mmce_weight": 2.0, "authors_code": True}),
    "mmce_plain": (
        "mmce",
        {"mmce_weight": 2.0, "variant": "plain", "authors_code": True},
    ),
    "adafocal": ("adafocal", {}),
    "adafocal_every_4": (
        "adafocal",
        {"n_bins": 10, "update_rate": 4.0, "gamma_max": 5.0, "switch": 0.5},
    ),
}
# The others are like one of these, and have the golden values of single batches.
QUICK = {"dual_focal", "bsce_gra", "mmce_weighted", "adafocal_every_4"}
MARKED = [
    pytest.param(key, marks=[] if key in QUICK else pytest.mark.slow)
    for key in TRAJECTORIES
]
FILE = dict(np.load(GOLDEN / "author_trajectories.npz"))
DATA = {
    name: torch.from_numpy(values) for name, values in FILE.items() if "__" not in name
}


@pytest.mark.parametrize("key", MARKED)
def test_the_same_200_steps(key: str) -> None:
    name, hyperparameters = TRAJECTORIES[key]
    loss: Any = make_loss(name, **hyperparameters)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    starts = [
        DATA[each].flatten() for each in ("weight_0", "bias_0", "weight_1", "bias_1")
    ]
    nn.utils.vector_to_parameters(torch.cat(starts), model.parameters())
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4
    )
    batches = list(
        zip(DATA["x"].split(BATCH), DATA["labels"].split(BATCH), strict=True)
    )
    # After which batches the authors' loop updates the gammas: `update_gamma_every` leaves out an epoch's first.
    updates = {
        "adafocal": {len(batches) - 1},
        "adafocal_every_4": set(range(4, len(batches), 4)),
    }
    found: dict[str, list[Any]] = {"losses": [], "gammas": [], "edges": []}
    for _ in range(EPOCHS):
        for number, (x, labels) in enumerate(batches):
            optimizer.zero_grad()
            value = loss(model(x), labels, reduction="sum")
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2)
            optimizer.step()
            found["losses"].append(value.item())
            if number in updates.get(key, ()):
                with torch.no_grad():
                    confidences, predicted = model(DATA["held_out_x"]).softmax(1).max(1)
                loss.update(confidences, predicted == DATA["held_out_labels"])
                found["gammas"].append(loss.gammas.tolist())
                found["edges"].append(loss.edges.tolist())
    assert len(found["losses"]) == 200
    found["weights"] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    for each, values in found.items():
        if values:
            np.testing.assert_allclose(values, FILE[f"{key}__{each}"], **CLOSE)
