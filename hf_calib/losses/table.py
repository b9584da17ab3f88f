"""`LOSSES`, the table of the named losses, and `make_loss`, which makes one by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_calib._errors import InputValueError, did_you_mean, expected
from hf_calib.losses import (
    adaptive_losses,
    batch_losses,
    brier_losses,
    cross_entropy_losses,
    dual_focal_losses,
    focal_losses,
    probability_losses,
)
from hf_calib.losses._calibration_loss import CalibrationLoss
from hf_calib.losses._hyperparameters import (
    ClassWeights,
    Hyperparameter,
    hyperparameters_of,
    unknown_hyperparameter,
)


@dataclass(frozen=True)
class LossEntry:
    """A row of `LOSSES`.

    Attributes:
        constructor: the function that makes the loss, such as `focal`.
        summary: the formula in one line; p is the probability of the label y.
        source: paper and equation.
    """

    constructor: Callable[..., CalibrationLoss]
    summary: str
    source: str

    @property
    def hyperparameters(self) -> Mapping[str, Hyperparameter]:
        """Name -> default and range, as the constructor's signature declares them."""
        return hyperparameters_of(self.constructor)

    @property
    def multi_label(self) -> bool:
        """Whether the loss has a form for multi-label problems."""
        return self.constructor().formula.multi_label


#: The named losses: name -> `LossEntry`.
LOSSES: dict[str, LossEntry] = {
    "cross_entropy": LossEntry(cross_entropy_losses.cross_entropy, "-log p", ""),
    "label_smoothing": LossEntry(
        cross_entropy_losses.label_smoothing,
        "cross entropy to (1 - smoothing) e_y + smoothing / C",
        "Szegedy et al. 2016",
    ),
    "brier": LossEntry(brier_losses.brier, "||p - e_y||_2^2, summed over the classes", "Brier 1950"),
    "focal": LossEntry(focal_losses.focal, "(1 - p)^gamma CE", "Lin et al. 2017; Mukhoti et al. 2020"),
    "focal_gra": LossEntry(
        focal_losses.focal_gra, "focal, its weight on the gradient only", "Lin et al. 2025 (BSCE-GRA), 5.3"
    ),
    "flsd": LossEntry(
        focal_losses.flsd, "focal, gamma by the interval of p (FLSD-53)", "Mukhoti et al. 2020"
    ),
    "flsd_gra": LossEntry(
        focal_losses.flsd_gra, "flsd, its weight on the gradient only", "Lin et al. 2025 (BSCE-GRA), 5.3"
    ),
    "inverse_focal": LossEntry(focal_losses.inverse_focal, "(1 + p)^gamma CE", "Wang et al. 2021"),
    "dual_focal": LossEntry(
        dual_focal_losses.dual_focal,
        "(1 - p + q)^gamma CE, q the largest probability below p, or a constant",
        "Tao et al. 2023 (DFL), Eq. 3 and Table 4",
    ),
    "dual_focal_gra": LossEntry(
        dual_focal_losses.dual_focal_gra,
        "dual_focal, its weight on the gradient only",
        "Lin et al. 2025 (BSCE-GRA), 5.3",
    ),
    "bsce": LossEntry(brier_losses.bsce, "||p - e_y||_norm^gamma CE", "Lin et al. 2025 (BSCE-GRA), Eq. 11"),
    "bsce_gra": LossEntry(
        brier_losses.bsce_gra, "bsce, its weight on the gradient only", "Lin et al. 2025 (BSCE-GRA), Eq. 14"
    ),
    "ece_ce": LossEntry(
        adaptive_losses.ece_ce,
        "CE, weighted by the held-out calibration gaps of p's bins and of the class",
        "Lin et al. 2025 (BSCE-GRA), 5",
    ),
    "focal_calibration": LossEntry(
        focal_losses.focal_calibration,
        "focal + brier_weight ||p - e_y||_2^2 (or ||.||_1)",
        "Liang et al. 2024 (FCL), Def. 3.1 and A.15",
    ),
    "adafocal": LossEntry(
        adaptive_losses.adafocal,
        "focal, or inverse focal where gamma < 0; gamma by held-out bins",
        "Ghosh et al. 2022 (AdaFocal), Algorithm 1",
    ),
    "ada_dual_focal": LossEntry(
        adaptive_losses.ada_dual_focal,
        "dual_focal; gamma by held-out bins, looked up by the label's lead",
        "Tao et al. 2023 (DFL), 5.2",
    ),
    "calfocal": LossEntry(
        adaptive_losses.calfocal,
        "focal, gamma = exp(update_rate * gap) of the held-out bin, or of the example",
        "Ghosh et al. 2022 (AdaFocal), Eq. 3 and Eq. 2",
    ),
    "entropy_regularized": LossEntry(
        cross_entropy_losses.entropy_regularized,
        "CE - entropy_weight H(p)",
        "Pereyra et al. 2017; the comparison study",
    ),
    "logit_norm": LossEntry(
        cross_entropy_losses.logit_norm, "CE + norm_weight ||z||_p", "the comparison study, 2.3"
    ),
    "mbls": LossEntry(
        cross_entropy_losses.mbls,
        "CE + margin_weight mean_j max(0, max z - z_j - margin)",
        "Liu et al. 2022 (MbLS), Eq. 8",
    ),
    "dft": LossEntry(probability_losses.dft, "p CE, p on the gradient only", "Wu et al. 2025 (DFT), Eq. 9"),
    "power": LossEntry(
        probability_losses.power,
        "(1 - p^exponent) / exponent",
        "Li et al. 2025; Zhang and Sabuncu 2018, Eq. 6",
    ),
    "mmce": LossEntry(batch_losses.mmce, "CE + mmce_weight MMCE of the batch", "Kumar et al. 2018"),
    "soft_ece": LossEntry(
        batch_losses.soft_ece,
        "CE + ece_weight, a soft-binned ECE of the batch",
        "Karandikar et al. 2021 (sb_ece); Bohdal et al. 2021 (dece)",
    ),
    "kde_ece": LossEntry(
        batch_losses.kde_ece,
        "CE + kde_weight, a kernel-density ECE of the batch (KDE-XE), of the top label or canonical",
        "Popordanoska et al. 2022; Tao et al. 2023 (DFL), F",
    ),
    "mdca": LossEntry(
        batch_losses.mdca,
        "CE or focal + mdca_weight, the gap of class frequencies in the batch",
        "Hebbalaguppe et al. 2022 (MDCA), Eq. 4, 5",
    ),
    "avuc": LossEntry(
        batch_losses.avuc,
        "CE + avuc_weight, the cost of being unsure where right and sure where wrong",
        "Krishnan and Tickoo 2020 (AvUC), Eq. 3",
    ),
}


def make_loss(
    name: str,
    *,
    class_weights: ClassWeights = None,
    problem_type: str | None = None,
    **hyperparameters: Any,
) -> CalibrationLoss:
    """Make a loss by its name in `LOSSES`: for names that come from a file or a command line.

    Where the name is known when the code is written, call the constructor, `hf_calib.losses.focal(gamma=2.0)`,
    which an editor completes.

    Args:
        name: see `LOSSES`; "adafocal" adapts by itself, "focal" and "dual_focal" are the usual fixed ones.
        class_weights: (C,) positive factors; each example's loss (weight x CE and its own penalties) is
            multiplied by that of its label, and the mean is the weighted mean, as in `F.cross_entropy`. In
            a multi-label problem they belong to the columns. Penalties on the whole batch are not weighted.
        problem_type: "single_label_classification" or "multi_label_classification", as in a model's config;
            None tells them apart by the labels' dtype.
        **hyperparameters: the loss's own, by name.

    Returns:
        An `nn.Module`: `loss(logits, labels, reduction="mean")`. An `AdaptiveLoss` where it has a table that
        `update` fits to held-out predictions.

    Raises:
        ValueError: for an unknown name, hyperparameter or problem type, a value out of range, or a loss
            without a multi-label form.

    Example:
        >>> import torch
        >>> loss = make_loss("focal", gamma=2.0)
        >>> loss(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.0875)
    """
    if name not in LOSSES:
        raise InputValueError(expected("loss", "be a name in LOSSES", repr(name), did_you_mean(name, LOSSES)))
    entry = LOSSES[name]
    known = entry.hyperparameters
    for given in hyperparameters:
        if given not in known:
            raise InputValueError(unknown_hyperparameter(entry.constructor, given))
    return entry.constructor(class_weights=class_weights, problem_type=problem_type, **hyperparameters)
