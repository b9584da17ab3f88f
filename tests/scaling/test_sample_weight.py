"""Maps fitted with `sample_weight`: rows that are repeated and rows that have weights give the same map."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hf_calib import InputError
from hf_calib.metrics import negative_log_likelihood
from hf_calib.scaling import (
    DirichletScaling,
    HistogramBinning,
    IsotonicScaling,
    MatrixScaling,
    TemperatureScaling,
    VectorScaling,
)

RNG = np.random.default_rng(0)
N, C = 1_500, 4
LOGITS = 2 * RNG.normal(size=(N, C)) + np.array([0.5, 0, 0, -0.5])
LABELS = (LOGITS / 1.7 + RNG.gumbel(size=LOGITS.shape)).argmax(axis=1)
TIMES = RNG.integers(0, 4, N)
ROWS = np.repeat(np.arange(N), TIMES)

WEIGHTED: dict[str, Any] = {
    "temperature": TemperatureScaling,
    "temperature on a grid": lambda: TemperatureScaling(grid=np.arange(1, 40) / 10),
    "vector": VectorScaling,
    "matrix": lambda: MatrixScaling(off_diagonal_penalty=0.3, bias_penalty=0.1),
    "matrix, no penalties": lambda: MatrixScaling(
        off_diagonal_penalty=0, bias_penalty=0
    ),
    "dirichlet": lambda: DirichletScaling(off_diagonal_penalty=0.3, bias_penalty=0.1),
    "isotonic": IsotonicScaling,
    "isotonic, joint": lambda: IsotonicScaling("joint"),
    "histogram": HistogramBinning,
}


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_repeated_rows(name: str, scale: float) -> None:
    found = (
        WEIGHTED[name]()
        .fit(LOGITS, LABELS, sample_weight=scale * TIMES)
        .predict_proba(LOGITS)
    )
    wanted = WEIGHTED[name]().fit(LOGITS[ROWS], LABELS[ROWS]).predict_proba(LOGITS)
    np.testing.assert_allclose(
        found, wanted, atol=2e-4 if name.startswith(("matrix", "dir", "vec")) else 1e-9
    )
    plain = WEIGHTED[name]().fit(LOGITS, LABELS).predict_proba(LOGITS)
    assert np.abs(plain - wanted).max() > 1e-3 or name == "temperature on a grid"
    if name not in ("isotonic", "isotonic, joint", "histogram"):
        losses = [
            negative_log_likelihood(each[ROWS], LABELS[ROWS])
            for each in (found, wanted)
        ]
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_weights_decide_whether_labels_score_better_than_the_average() -> None:
    """Three rows in four rank their label last, and have little weight."""
    logits = np.tile([2.0, 0.0, 0.0], (40, 1))
    labels = np.where(np.arange(40) % 4 == 0, 0, 1)
    weights = np.where(labels == 0, 10, 1)
    ours = TemperatureScaling().fit(logits, labels, sample_weight=weights)
    repeated = np.repeat(np.arange(40), weights)
    wanted = TemperatureScaling().fit(logits[repeated], labels[repeated])
    assert ours.temperature_ == pytest.approx(wanted.temperature_, rel=1e-9)
    with pytest.warns(UserWarning, match="no better than the average class"):
        TemperatureScaling().fit(logits, labels)


def test_default_penalties_follow_the_number_of_rows_of_kish() -> None:
    kish = TIMES.sum() ** 2 / (TIMES**2).sum()
    penalties = {
        "off_diagonal_penalty": 10 * C**2 * (C - 1) / kish,
        "bias_penalty": C / (2 * kish),
    }
    for kind in (MatrixScaling, DirichletScaling):
        found = kind().fit(LOGITS, LABELS, sample_weight=TIMES)
        wanted = kind(**penalties).fit(LOGITS[ROWS], LABELS[ROWS])
        np.testing.assert_allclose(found.weight_, wanted.weight_, atol=1e-3)


def test_refused() -> None:
    for make in WEIGHTED.values():
        with pytest.raises(InputError, match=r"sample_weight to have shape \(1500,\)"):
            make().fit(LOGITS, LABELS, sample_weight=np.ones(3))
        with pytest.raises(
            InputError, match="sample_weight to be finite and at least 0"
        ):
            make().fit(LOGITS, LABELS, sample_weight=-np.ones(N))
        with pytest.raises(InputError, match="sample_weight to be finite and at least"):
            make().fit(LOGITS, LABELS, sample_weight=np.full(N, np.inf))
        with pytest.raises(InputError, match=r"sample_weight to be at most 1e\+100"):
            make().fit(LOGITS, LABELS, sample_weight=np.full(N, 1e308))
    with pytest.raises(
        InputError, match="with criterion 'nll' and one label per row, got 'ece'"
    ):
        TemperatureScaling("ece").fit(LOGITS, LABELS, sample_weight=TIMES)
    with pytest.raises(InputError, match="one label per row, got multi_label=True"):
        TemperatureScaling(multi_label=True).fit(LOGITS, LABELS, sample_weight=TIMES)
