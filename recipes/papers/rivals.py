"""Dual focal loss with the "mean" rivals of the paper's Table 4, by the rule of its authors' code."""

from __future__ import annotations

import torch
from torch import Tensor


def batch_rival_loss(
    logits: Tensor, labels: Tensor, *, gamma: float = 5.0, n_rivals: int | None = None
) -> Tensor:
    r"""Dual focal loss whose rival is one number for the whole batch, as the mean over the batch.

    $$L = -\frac{1}{N} \sum_i (1 - p_{i, y_i} + Q)^\gamma \log p_{i, y_i}, \qquad
    Q = \frac{1}{N} \sum_i \sum_{k=1}^{n} q_{i, k}$$

    with $q_{i, k}$ the probability of the k-th class below the label of row i, and 0 if there is
    none. The paper calls this a mean of the rivals; in the code the mean is over the rows, and the
    rivals of a row are added up. The rivals "mean2", "mean3" and "mean_all" of
    `hf_calib.losses.dual_focal` are means over the rivals of each row instead.

    Args:
        logits: (N, C) float.
        labels: (N,) int.
        gamma: at 0 the loss is cross entropy.
        n_rivals: n, or None for all classes below the label.

    References:
        Tao et al. 2023, "Dual focal loss for calibration", Table 4;
        github.com/Linwei94/ICML2023-DualFocalLoss at cb1ea6d, `Losses/dual_focal_loss_ablation.py`,
        whose ablations 5, 6 and 4 have 2, 3 and 9 rivals.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 3.0]])
    >>> batch_rival_loss(logits, torch.tensor([0, 2]), gamma=2.0, n_rivals=2)
    tensor(0.0654)
    """
    log_probs = torch.log_softmax(logits.float(), dim=1)
    of_label = log_probs.gather(1, labels.unsqueeze(1))
    probs = log_probs.exp()
    below = torch.where(log_probs < of_label, probs, torch.zeros_like(probs))
    n_classes = logits.shape[1]
    rivals = below.topk(min(n_rivals or n_classes, n_classes), dim=1).values
    rival_of_batch = rivals.sum(dim=1).mean()
    cross_entropy = -of_label.squeeze(1)
    weights = (1 - of_label.squeeze(1).exp() + rival_of_batch) ** gamma
    return (weights * cross_entropy).mean()
