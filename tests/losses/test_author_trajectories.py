"""200 SGD steps with our losses against the papers' own code in its own loop: the same training, in float64.

How the numbers were made is in `tests/golden/README.md`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hf_calib.losses import AdaptiveLoss, make_loss
from tests.helpers.places import GOLDEN

EXACT = {"rtol": 1e-10, "atol": 1e-10}
BATCH, EPOCHS = 16, 20

LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
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
OTHERS = {"focal", "flsd", "mmce_plain", "adafocal"}

FILE = dict(np.load(GOLDEN / "author_trajectories.npz"))
DATA = {name: torch.from_numpy(values) for name, values in FILE.items() if "__" not in name}


def updates_after(key: str, batch: int, n_batches: int) -> bool:
    """Whether the authors' loop updates the gammas there: `update_gamma_every` leaves out an epoch's first batch."""
    if key == "adafocal_every_4":
        return batch > 0 and batch % 4 == 0
    return key == "adafocal" and batch == n_batches - 1


@pytest.mark.parametrize(
    "key",
    [pytest.param(key, marks=[pytest.mark.slow] if key in OTHERS else []) for key in LOSSES],
)
def test_the_same_200_steps(key: str) -> None:
    name, hyperparameters = LOSSES[key]
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
    np.testing.assert_allclose(losses, FILE[f"{key}__losses"], **EXACT)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    np.testing.assert_allclose(weights, FILE[f"{key}__weights"], **EXACT)
    if name == "adafocal":
        np.testing.assert_allclose(gammas, FILE[f"{key}__gammas"], **EXACT)
        np.testing.assert_allclose(edges, FILE[f"{key}__edges"], **EXACT)


@pytest.mark.parametrize("key", ["adafocal", "adafocal_every_4"])
def test_adafocal_goes_over_to_the_inverse_loss_and_never_stands_at_0(key: str) -> None:
    """Paper and code differ at gamma 0 only (see `test_golden.py`), where no update of these arrives."""
    gammas = FILE[f"{key}__gammas"]
    assert gammas.shape == {"adafocal": (20, 15), "adafocal_every_4": (40, 10)}[key]
    assert gammas.min() < 0 < gammas.max()
    assert not (gammas == 0).any()
    settings = make_loss("adafocal", **LOSSES[key][1]).hyperparameters
    assert (abs(gammas) == settings["switch"]).any()
    assert (gammas == settings["gamma_max"]).any()
