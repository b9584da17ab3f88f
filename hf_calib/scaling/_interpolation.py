"""Interpolation of sums of exponentials at many scales from those at fewer, which cost less to compute.

A row's softmax denominator is a sum of exp(beta g), g <= 0. For all such g at once, exp(beta g) is to about
1e-10 a linear combination of its values at geometric nodes, four per octave of beta and one octave beyond
each end: the kernel exp(-beta g) has a small numerical rank. Nodes an octave apart are squares of each other,
so that 4 exponentials and 36 squares serve all of the papers' 100 temperatures.
"""

from __future__ import annotations

import numpy as np

from hf_calib.scaling._inputs import FloatArray

ACCURACY = 1e-9  # of each exponential, which is at most 1

_PER_OCTAVE = 4
_BEYOND = 1  # octaves
_MOST_OCTAVES = 8
_SAMPLES = 2000


def interpolation(betas: FloatArray) -> tuple[list[float], FloatArray] | None:
    """Return nodes (K,) and coefficients (B, K): sums at betas = coefficients @ sums at nodes; if it pays."""
    octaves = int(np.ceil(np.log2(betas.max() / betas.min()))) + 2 * _BEYOND
    if octaves > _MOST_OCTAVES + 2 * _BEYOND or len(betas) < _PER_OCTAVE * octaves:
        return None
    roots = betas.min() * 2.0 ** (np.arange(_PER_OCTAVE) / _PER_OCTAVE - _BEYOND)
    nodes = np.sort(np.outer(2.0 ** np.arange(octaves + 1), roots).ravel())
    gaps = np.append(0, np.geomspace(1e-3, 50, _SAMPLES) / betas.min())
    at_nodes, at_betas = np.exp(-np.outer(gaps, nodes)), np.exp(-np.outer(gaps, betas))
    coefficients = np.linalg.lstsq(at_nodes, at_betas, rcond=1e-13)[0]
    if np.abs(at_nodes @ coefficients - at_betas).max() > ACCURACY:
        return None
    return nodes.tolist(), coefficients.T
