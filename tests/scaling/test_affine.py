"""Affine maps one after the other."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hf_calib.scaling.affine import AffineMap

RNG = np.random.default_rng(0)
MAPS = {
    "number": AffineMap(np.array(2.0)),
    "number and bias": AffineMap(np.array(0.5), RNG.normal(size=3)),
    "vector": AffineMap(RNG.normal(size=3), RNG.normal(size=3)),
    "matrix": AffineMap(RNG.normal(size=(3, 3)), RNG.normal(size=3)),
}


@pytest.mark.parametrize(("first", "following"), [*product(MAPS, MAPS)])
def test_one_map_is_both_of_them(first: str, following: str) -> None:
    logits = RNG.normal(size=(5, 3))
    wanted = MAPS[following](MAPS[first](logits))
    np.testing.assert_allclose(MAPS[first].then(MAPS[following])(logits), wanted, rtol=1e-12)
