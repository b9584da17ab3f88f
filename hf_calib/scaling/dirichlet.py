"""Dirichlet scaling: a linear map of the log-probabilities."""

from __future__ import annotations

import numpy as np

from hf_calib.scaling._linear import FloatArray
from hf_calib.scaling.vector_matrix import PenalisedMatrixScaling


class DirichletScaling(PenalisedMatrixScaling):
    r"""Map the log-probabilities by a full matrix and an offset, fitted on held-out predictions.

    Like `MatrixScaling`, and for the same need, but it sees the probabilities only: an offset that all logits
    of a row share has no influence. Take it where a model's logits are not at hand (pass log-probabilities),
    or where their offset means nothing. It can change the predicted class, and as the logarithm of the sum
    comes in, it cannot be folded into a linear head.

    $$\hat p = \mathrm{softmax}(W \ln \mathrm{softmax}(z) + b), \qquad \min_{W, b} \mathrm{NLL}
      + \frac{\lambda}{C (C - 1)} \sum_{i \ne j} (T w_{ij})^2 + \frac{\mu}{C} \sum_j b_j^2$$

    Args:
        off_diagonal_penalty: λ >= 0. None takes 10 C^2 (C - 1) / N, as in `MatrixScaling`.
        bias_penalty: \mu >= 0. None takes C / (2 N), a standard normal prior for each bias, in nats.

    Attributes:
        weight_: W, (C, C).
        bias_: b, (C,), which sum to 0.

    Notes:
        If each class's probability vectors follow a Dirichlet distribution, this is the exact recalibration
        map. T is the fitted temperature; Kull et al. penalise w instead of T w, and for T = 1 the two are the
        same. What `fit` does and says where data do not determine the parameters is as in `VectorScaling`. A
        probability of 0 (a logit of -inf) has no logarithm, so it is refused.

    References:
        Kull et al. 2019, "Beyond temperature scaling: obtaining well-calibrated multi-class probabilities
        with Dirichlet calibration", sections 2 and 3.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(5000, 3))
    >>> labels = (logits + rng.gumbel(size=(5000, 3))).argmax(axis=1)
    >>> scaler = DirichletScaling().fit(3 * logits, labels)
    >>> np.allclose(scaler.predict_proba(3 * logits), scaler.predict_proba(3 * logits + 100))
    True
    """

    def _features(self, block: FloatArray) -> FloatArray:
        block -= block.max(axis=-1, keepdims=True)
        block -= np.log(np.exp(block).sum(axis=-1, keepdims=True))
        return block
