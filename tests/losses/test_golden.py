"""The losses against numbers from the papers' own code, in float64: of single batches, and of 200 training steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_calib.losses import AdaptiveLoss, CalibrationLoss, make_loss
from tests.helpers.loss_cases import WIDTHS, value_and_gradient, widened
from tests.helpers.places import GOLDEN

EXACT = {"rtol": 1e-8, "atol": 1e-12}
NUMBER = r"(\d+(?:p\d+)?)"

# Which loss each id of the golden files is; what stands in the groups are numbers.
LOSS_OF_ID: dict[str, Callable[..., CalibrationLoss]] = {
    "ce": lambda: make_loss("cross_entropy"),
    "ls0p05_overK": lambda: make_loss("label_smoothing", smoothing=0.05),
    "brier": lambda: make_loss("brier"),
    f"focal_g{NUMBER}": lambda gamma: make_loss("focal", gamma=gamma),
    f"focalgra_g{NUMBER}": lambda gamma: make_loss("focal_gra", gamma=gamma),
    "flsd53_g3p0": lambda: make_loss("flsd"),
    "flsd53_g2p0": lambda: make_loss("flsd", thresholds=(0.2, 0.5), gammas=(5, 3, 2)),
    "flsd53gra_g3p0": lambda: make_loss("flsd_gra"),
    f"dfl_g{NUMBER}": lambda gamma: make_loss("dual_focal", gamma=gamma),
    f"dflgra_fulldetach_g{NUMBER}": lambda gamma: make_loss("dual_focal_gra", gamma=gamma),
    f"invfocal_g{NUMBER}": lambda gamma: make_loss("inverse_focal", gamma=gamma),
    f"bsce_g{NUMBER}_n{NUMBER}": lambda gamma, norm: make_loss("bsce", gamma=gamma, norm=norm),
    f"bscegra_g{NUMBER}_n{NUMBER}": lambda gamma, norm: make_loss("bsce_gra", gamma=gamma, norm=norm),
    f"fcl_g{NUMBER}_lam{NUMBER}": lambda gamma, weight: make_loss(
        "focal_calibration", gamma=gamma, brier_weight=weight
    ),
    "derived_ce_l1logits_a0p01": lambda: make_loss("logit_norm", norm_weight=0.01),
    "derived_ce_entropy_a0p1": lambda: make_loss("entropy_regularized", entropy_weight=0.1),
    "ce_plus_2mmce_w": lambda: make_loss("mmce", mmce_weight=2, authors_code=True),
    "ce_plus_2mmce_m": lambda: make_loss("mmce", mmce_weight=2, variant="plain", authors_code=True),
    # These three are the bare penalty: cross entropy is taken off the loss.
    "mmce_w": lambda: make_loss("mmce", mmce_weight=1, authors_code=True),
    "mmce_m_nosqrt": lambda: make_loss("mmce", mmce_weight=1, variant="plain", authors_code=True),
    "dece_b15_ta100_tb0p01": lambda: make_loss("soft_ece", variant="dece"),
}
BARE_PENALTIES = {"mmce_w", "mmce_m_nosqrt", "dece_b15_ta100_tb0p01"}

NOT_A_LOSS_HERE = {
    "ls0p05_overKm1": "spreads the smoothing over the other classes; ours is PyTorch's",
    "dflgra_ascoded_g5": "detaches q alone, against the paper's Eq. 9",
    "bsceadaptivegra_g3_n2": "a step schedule that the paper does not have",
    "safcl_gf2p0_gc2p0_lam1p0": "a later method",
    "mmce_fclrepo_gauss_sqrt": "another kernel than Kumar's",
}


def number(text: str) -> float:
    return float(text.replace("p", "."))


def loss_of(golden_id: str) -> CalibrationLoss:
    for pattern, make in LOSS_OF_ID.items():
        if match := re.fullmatch(pattern, golden_id):
            return make(*map(number, match.groups()))
    raise KeyError(golden_id)


CASES = {path.stem.removeprefix("losses_"): dict(np.load(path)) for path in GOLDEN.glob("losses_*.npz")}
ALL_IDS = sorted({key.split("__")[0] for case in CASES.values() for key in case if "__" in key})
IDS = [golden_id for golden_id in ALL_IDS if golden_id not in NOT_A_LOSS_HERE]


def batch_of(case: dict[str, np.ndarray]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(case["logits"]), torch.from_numpy(case["labels"])


def sum_over_ties(gradient: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """(N, C): at each class the sum over the classes of the same logit, which share out a subgradient."""
    return np.einsum("nij,nj->ni", logits[:, :, None] == logits[:, None, :], gradient)


def assert_same_gradient(gradient: np.ndarray, want: np.ndarray, logits: np.ndarray, golden_id: str) -> None:
    if golden_id.startswith("dfl"):
        gradient, want = sum_over_ties(gradient, logits), sum_over_ties(want, logits)
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


@pytest.mark.parametrize("width", [None, WIDTHS[-1]])
@pytest.mark.parametrize("golden_id", IDS)
def test_values_and_gradients(golden_id: str, width: int | None) -> None:
    """As the logits are, and with masked classes beside them, by which they become large."""
    loss = loss_of(golden_id)
    checked = 0
    for name, case in CASES.items():
        logits, labels = batch_of(case)
        if width is not None:
            if len(logits) > 32:  # the same for the others
                continue
            logits = widened(logits, width)
        reduction = "mean" if loss.couples_batch else "sum"
        suffix = "value" if loss.couples_batch else "sum"
        if f"{golden_id}__{suffix}" not in case:
            continue
        checked += 1
        value, gradient = value_and_gradient(loss, logits, labels, reduction=reduction)
        if golden_id in BARE_PENALTIES:
            ce_value, ce_gradient = value_and_gradient(make_loss("cross_entropy"), logits, labels)
            value, gradient = value - ce_value, gradient - ce_gradient
        np.testing.assert_allclose(value, case[f"{golden_id}__{suffix}"], **EXACT)
        key = f"{golden_id}__{'grad' if loss.couples_batch else 'grad_of_sum'}"
        # These confidences differ by rounding alone, by which the authors' abs() takes a side of its kink.
        kink = "mmce" in golden_id and name == "ties24x5"
        if key in case and not kink:
            own = gradient[:, : case["logits"].shape[1]].numpy()
            assert_same_gradient(own, case[key], case["logits"], golden_id)
        if not loss.couples_batch:
            per_example = loss(logits, labels, reduction="none")
            np.testing.assert_allclose(per_example, case[f"{golden_id}__per_sample"], **EXACT)
            np.testing.assert_allclose(loss(logits, labels), case[f"{golden_id}__mean"], **EXACT)
    assert checked >= (10 if width is None else 7)


def adafocal(file: dict[str, np.ndarray]) -> CalibrationLoss:
    theirs = {"update_rate": "lambda", "gamma_init": "gamma_initial", "switch": "switch_pt"}
    names = ("update_rate", "gamma_init", "gamma_max", "gamma_min", "switch")
    given = {name: float(file[f"cfg_{theirs.get(name, name)}"]) for name in names}
    return make_loss("adafocal", n_bins=int(file["cfg_num_bins"]), **given)


def assert_trains(
    loss: CalibrationLoss,
    logits: np.ndarray,
    labels: np.ndarray,
    rows: np.ndarray | None,
    gradient: np.ndarray,
) -> float:
    """Compare values a row and the gradient of their sum, which is returned."""
    z, y = torch.from_numpy(logits), torch.from_numpy(labels)
    value, own = value_and_gradient(loss, z, y, reduction="sum")
    np.testing.assert_allclose(own, gradient, **EXACT)
    if rows is not None:
        np.testing.assert_allclose(loss(z, y, reduction="none"), rows, **EXACT)
    return value.item()


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
        np.testing.assert_allclose(loss.gamma(p), file["train_gamma_per_sample"][t], **EXACT)
        rows, gradient = file["train_loss_per_sample"][t], file["train_grad_of_sum"][t]
        value = assert_trains(loss, logits, labels, rows, gradient)
        np.testing.assert_allclose(value, file["train_loss_sum"][t], **EXACT)
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
    np.testing.assert_allclose(loss.edges[1:], file["edges_upper"][1], **EXACT)


def test_ada_dual_focal_over_four_updates(golden: Path) -> None:
    """Gamma goes by the lead over the rival; it never changes its sign, whatever the held-out predictions."""
    file = dict(np.load(golden / "ada_dual_focal.npz"))
    loss = make_loss("ada_dual_focal", n_bins=10, update_rate=2.0, gamma_init=6.0, gamma_max=20.0)
    for t in range(5):
        np.testing.assert_allclose(loss.edges, file["edges"][t], **EXACT)
        np.testing.assert_allclose(loss.gammas, file["gammas"][t], **EXACT)
        rows, gradient = file["per_example"][t], file["gradient_of_sum"][t]
        assert_trains(loss, file["logits"], file["labels"], rows, gradient)
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
        loss.update(confidences, correct, class_gaps=file["per_class_ece"], progress=epoch / 350)
        # The sign of a gap is of no consequence: the weight takes its magnitude.
        np.testing.assert_allclose(loss.bin_gaps.abs(), abs(file["bin_gap_ew"]), **EXACT)
        np.testing.assert_allclose(loss.mass_gaps.abs(), abs(file["bin_gap_em"]), **EXACT)
        gradient = file[f"grad_of_sum_epoch{epoch}"]
        value = assert_trains(loss, file["train_logits"], file["train_labels"], None, gradient)
        np.testing.assert_allclose(value, file[f"loss_sum_epoch{epoch}"], **EXACT)


# 200 SGD steps with our losses and with the papers' own code in its own loop: `tests/golden/README.md` says how.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
BATCH, EPOCHS = 16, 20

TRAJECTORIES: dict[str, tuple[str, dict[str, Any]]] = {
    "focal": ("focal", {"gamma": 3.0}),
    "flsd": ("flsd", {}),
    "dual_focal": ("dual_focal", {"gamma": 5.0}),
    "bsce_gra": ("bsce_gra", {"gamma": 4.0, "norm": 2.0}),
    "mmce_weighted": ("mmce", {"mmce_weight": 2.0, "authors_code": True}),
    "mmce_plain": ("mmce", {"mmce_weight": 2.0, "variant": "plain", "authors_code": True}),
    "adafocal": ("adafocal", {}),
    "adafocal_every_4": (
        "adafocal",
        {"n_bins": 10, "update_rate": 4.0, "gamma_max": 5.0, "gamma_min": -2.0, "switch": 0.5},
    ),
}

# `make test-slow` follows these: each has a like one, and the golden values of single batches.
LIKE_ANOTHER = {"focal", "flsd", "mmce_plain", "adafocal"}

FILE = dict(np.load(GOLDEN / "author_trajectories.npz"))
DATA = {name: torch.from_numpy(values) for name, values in FILE.items() if "__" not in name}


def updates_after(key: str, batch: int, n_batches: int) -> bool:
    """Whether the authors' loop updates the gammas there: `update_gamma_every` leaves out an epoch's first batch."""
    if key == "adafocal_every_4":
        return batch > 0 and batch % 4 == 0
    return key == "adafocal" and batch == n_batches - 1


@pytest.mark.parametrize(
    "key",
    [pytest.param(key, marks=[pytest.mark.slow] if key in LIKE_ANOTHER else []) for key in TRAJECTORIES],
)
def test_the_same_200_steps(key: str) -> None:
    name, hyperparameters = TRAJECTORIES[key]
    loss = make_loss(name, **hyperparameters)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    starts = [DATA[each] for each in ("weight_0", "bias_0", "weight_1", "bias_1")]
    with torch.no_grad():
        for parameter, start in zip(model.parameters(), starts, strict=True):
            parameter.copy_(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    batches = list(zip(DATA["x"].split(BATCH), DATA["labels"].split(BATCH), strict=True))

    losses: list[float] = []
    gammas: list[list[float]] = []
    edges: list[list[float]] = []
    for _ in range(EPOCHS):
        for number, (x, labels) in enumerate(batches):
            optimizer.zero_grad()
            value = loss(model(x), labels, reduction="sum")
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2)
            optimizer.step()
            losses.append(value.item())
            if updates_after(key, number, len(batches)):
                assert isinstance(loss, AdaptiveLoss)
                with torch.no_grad():
                    confidences, predicted = model(DATA["held_out_x"]).softmax(1).max(1)
                loss.update(confidences, predicted == DATA["held_out_labels"])
                gammas.append(loss.gammas.tolist())
                edges.append(loss.edges.tolist())

    assert len(losses) == 200
    np.testing.assert_allclose(losses, FILE[f"{key}__losses"], **CLOSE)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    np.testing.assert_allclose(weights, FILE[f"{key}__weights"], **CLOSE)
    if name == "adafocal":
        np.testing.assert_allclose(gammas, FILE[f"{key}__gammas"], **CLOSE)
        np.testing.assert_allclose(edges, FILE[f"{key}__edges"], **CLOSE)
