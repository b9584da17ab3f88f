"""Calibration losses: one table of named losses, each a weight times cross entropy plus penalties.

    loss_i = w(p_i, y_i; gamma_i) * CE_i  +  sum_k lambda_k * penalty_k

`LOSSES` names them all; `make_loss` makes one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hf_calib._errors import InputValueError, did_you_mean, expected
from hf_calib.losses import _penalties, _weights
from hf_calib.losses._adaptive import AdaptiveLoss, EceCrossEntropy, GammaTableLoss
from hf_calib.losses._distributed import all_gather_rows
from hf_calib.losses._gammas import AdaFocalRule, CalFocalRule, StepGamma
from hf_calib.losses._hyperparameters import Hyperparameter, checked, choice, flag, real, reals, whole
from hf_calib.losses._module import CalibrationLoss, Parts, logits_of
from hf_calib.losses.statistics.direct import RIVALS

__all__ = [
    "LOSSES",
    "AdaptiveLoss",
    "CalibrationLoss",
    "LossEntry",
    "all_gather_rows",
    "logits_of",
    "make_loss",
]

# Beyond this the gradient of the inverse focal loss changes sign near p = 0.28 and pushes p_y down.
MAX_INVERSE_GAMMA = 3.59


@dataclass(frozen=True)
class LossEntry:
    """A row of `LOSSES`.

    Attributes:
        summary: the formula in one line; p is the probability of the label y.
        source: paper and equation.
        parts: the hyperparameters -> what the loss is made of.
        hyperparameters: name -> default and range.
        multi_label: whether it has a sigmoid counterpart for multi-label problems.
    """

    summary: str
    source: str
    parts: Callable[..., Parts]
    hyperparameters: Mapping[str, Hyperparameter] = field(default_factory=dict)
    multi_label: bool = False


def _focal(gamma: float) -> Parts:
    return Parts(weight=_weights.focal, gamma=gamma)


def _flsd(thresholds: tuple[float, ...], gammas: tuple[float, ...], detach: bool = False) -> Parts:
    if len(gammas) != len(thresholds) + 1:
        got = f"{len(thresholds)} thresholds and {len(gammas)} gammas"
        raise InputValueError(
            expected("gammas", "have one entry more than thresholds", got, "give a gamma per interval")
        )
    return Parts(weight=_weights.focal, gamma=StepGamma(thresholds, gammas), detach=detach)


def _ada(weight: _weights.Weight, **hyperparameters: Any) -> Parts:
    rule = AdaFocalRule(**hyperparameters)
    if not (rule.gamma_min <= -rule.switch and rule.switch <= rule.gamma_max):
        got = f"gamma_min={rule.gamma_min}, gamma_max={rule.gamma_max}, switch={rule.switch}"
        raise InputValueError(
            expected("switch", "lie within -gamma_min and gamma_max", got, "widen the gammas' range")
        )
    if not rule.gamma_min <= rule.gamma_init <= rule.gamma_max:
        got = f"gamma_init={rule.gamma_init}"
        raise InputValueError(
            expected("gamma_init", "lie in [gamma_min, gamma_max]", got, "widen the gammas' range")
        )
    _warn_inverse_gamma(-rule.gamma_min)
    return Parts(weight=weight, gamma=rule)


def _inverse_focal(gamma: float) -> Parts:
    _warn_inverse_gamma(gamma)
    return Parts(weight=_weights.focal, gamma=-gamma)


def _warn_inverse_gamma(gamma: float) -> None:
    if gamma > MAX_INVERSE_GAMMA:
        message = expected(
            "the inverse focal gamma",
            f"be at most {MAX_INVERSE_GAMMA}",
            gamma,
            "beyond it the gradient pushes the true class down near p = 0.28",
        )
        warnings.warn(message, stacklevel=4)


def _focal_calibration(gamma: float, brier_weight: float, distance: str) -> Parts:
    penalty = _penalties.squared_distance if distance == "l2" else _penalties.absolute_distance
    return Parts(weight=_weights.focal, gamma=gamma, penalties=((brier_weight, penalty),))


_GAMMA = real(3.0, 0)
_RIVAL = choice(*RIVALS)
_FLSD = {"thresholds": reals((0.2,), 0, 1, rising=True), "gammas": reals((5.0, 3.0), 0)}
_BSCE = {"gamma": real(2.0, 0), "norm": real(2.0, 1)}
_ADAFOCAL = {
    "n_bins": whole(15, 1),
    "update_rate": real(1.0, 0),
    "gamma_init": real(1.0),
    "gamma_max": real(20.0, 0),
    "gamma_min": real(-2.0, high=0),
    "switch": real(0.2, 0),
}

LOSSES: dict[str, LossEntry] = {
    "cross_entropy": LossEntry("-log p", "", Parts, multi_label=True),
    "label_smoothing": LossEntry(
        "cross entropy to (1 - smoothing) e_y + smoothing / C",
        "Szegedy et al. 2016",
        lambda smoothing: Parts(
            scale=1 - smoothing, penalties=((smoothing, _penalties.uniform_cross_entropy),)
        ),
        {"smoothing": real(0.05, 0, 1)},
        multi_label=True,
    ),
    "brier": LossEntry(
        "||p - e_y||_2^2, summed over the classes",
        "Brier 1950",
        lambda: Parts(scale=0.0, penalties=((1.0, _penalties.squared_distance),)),
        multi_label=True,
    ),
    "focal": LossEntry(
        "(1 - p)^gamma CE",
        "Lin et al. 2017; Mukhoti et al. 2020",
        _focal,
        {"gamma": _GAMMA},
        multi_label=True,
    ),
    "focal_gra": LossEntry(
        "focal, its weight on the gradient only",
        "Lin et al. 2025 (BSCE-GRA), 5.3",
        lambda gamma: Parts(weight=_weights.focal, gamma=gamma, detach=True),
        {"gamma": _GAMMA},
    ),
    "flsd": LossEntry("focal, gamma by the interval of p (FLSD-53)", "Mukhoti et al. 2020", _flsd, _FLSD),
    "flsd_gra": LossEntry(
        "flsd, its weight on the gradient only",
        "Lin et al. 2025 (BSCE-GRA), 5.3",
        lambda thresholds, gammas: _flsd(thresholds, gammas, detach=True),
        _FLSD,
    ),
    "inverse_focal": LossEntry(
        "(1 + p)^gamma CE", "Wang et al. 2021", _inverse_focal, {"gamma": real(2.0, 0)}
    ),
    "dual_focal": LossEntry(
        "(1 - p + q)^gamma CE, q the largest probability below p",
        "Tao et al. 2023 (DFL), Eq. 3 and Table 4",
        lambda gamma, rival: Parts(weight=_weights.dual_focal(rival), gamma=gamma),
        {"gamma": real(5.0, 0), "rival": _RIVAL},
    ),
    "dual_focal_gra": LossEntry(
        "dual_focal, its weight on the gradient only",
        "Lin et al. 2025 (BSCE-GRA), 5.3",
        lambda gamma, rival: Parts(weight=_weights.dual_focal(rival), gamma=gamma, detach=True),
        {"gamma": real(5.0, 0), "rival": _RIVAL},
    ),
    "bsce": LossEntry(
        "||p - e_y||_norm^gamma CE",
        "Lin et al. 2025 (BSCE-GRA), Eq. 11",
        lambda gamma, norm: Parts(weight=_weights.brier_norm(norm), gamma=gamma),
        _BSCE,
        multi_label=True,
    ),
    "bsce_gra": LossEntry(
        "bsce, its weight on the gradient only",
        "Lin et al. 2025 (BSCE-GRA), Eq. 14",
        lambda gamma, norm: Parts(weight=_weights.brier_norm(norm), gamma=gamma, detach=True),
        _BSCE,
        multi_label=True,
    ),
    "ece_ce": LossEntry(
        "CE, weighted by the held-out calibration gaps of p's bins and of the class",
        "Lin et al. 2025 (BSCE-GRA), a baseline of section 5",
        lambda n_bins: Parts(),
        {"n_bins": whole(15, 1)},
    ),
    "focal_calibration": LossEntry(
        "focal + brier_weight ||p - e_y||_2^2 (or ||.||_1)",
        "Liang et al. 2024 (FCL), Def. 3.1 and A.15",
        _focal_calibration,
        {"gamma": _GAMMA, "brier_weight": real(0.5, 0), "distance": choice("l2", "l1")},
        multi_label=True,
    ),
    "adafocal": LossEntry(
        "focal, or inverse focal where gamma < 0; gamma by held-out bins",
        "Ghosh et al. 2022 (AdaFocal), Algorithm 1",
        partial(_ada, _weights.focal),
        _ADAFOCAL,
        multi_label=True,
    ),
    "ada_dual_focal": LossEntry(
        "dual_focal with AdaFocal's gammas",
        "Tao et al. 2023 (DFL), 5.2",
        partial(_ada, _weights.dual_focal("next")),
        _ADAFOCAL,
    ),
    "calfocal": LossEntry(
        "focal, gamma = exp(update_rate * gap) of the held-out bin, or of the example",
        "Ghosh et al. 2022 (AdaFocal), Eq. 3 and Eq. 2",
        lambda **rule: Parts(weight=_weights.focal, gamma=CalFocalRule(**rule)),
        {"n_bins": whole(15, 1), "update_rate": real(10.0, 0), "per_sample": flag(False)},
    ),
    "entropy_regularized": LossEntry(
        "CE - entropy_weight H(p)",
        "Pereyra et al. 2017; the comparison study",
        lambda entropy_weight: Parts(penalties=((entropy_weight, _penalties.negative_entropy),)),
        {"entropy_weight": real(0.1, 0)},
    ),
    "logit_norm": LossEntry(
        "CE + norm_weight ||z||_p",
        "the comparison study, Eq. 3",
        lambda norm_weight, p: Parts(penalties=((norm_weight, _penalties.logit_norm(p)),)),
        {"norm_weight": real(0.01, 0), "p": real(1.0, 1)},
    ),
    "mmce": LossEntry(
        "CE + mmce_weight MMCE of the batch",
        "Kumar et al. 2018",
        lambda mmce_weight, variant, authors_code: Parts(
            batch_penalties=((mmce_weight, _penalties.mmce(variant, authors_code)),)
        ),
        {"mmce_weight": real(2.0, 0), "variant": choice("weighted", "plain"), "authors_code": flag(False)},
    ),
    "soft_ece": LossEntry(
        "CE + ece_weight, a soft-binned ECE of the batch",
        "Karandikar et al. 2021 (sb_ece); Bohdal et al. 2021 (dece)",
        lambda ece_weight, **kwargs: Parts(batch_penalties=((ece_weight, _penalties.soft_ece(**kwargs)),)),
        {
            "ece_weight": real(1.0, 0),
            "n_bins": whole(15, 1),
            "variant": choice("sb_ece", "dece"),
            "bin_temperature": real(0.01, above=0),
            "rank_sharpness": real(100.0, above=0),
        },
    ),
    "kde_ece": LossEntry(
        "CE + kde_weight, a kernel-density ECE of the batch",
        "Popordanoska et al. 2022",
        lambda kde_weight, bandwidth: Parts(batch_penalties=((kde_weight, _penalties.kde_ece(bandwidth)),)),
        {"kde_weight": real(0.5, 0), "bandwidth": real(0.1, above=0)},
    ),
}

PROBLEM_TYPES = {None: None, "single_label_classification": False, "multi_label_classification": True}


def make_loss(
    name: str,
    *,
    class_weights: Sequence[float] | torch.Tensor | None = None,
    problem_type: str | None = None,
    **hyperparameters: Any,
) -> CalibrationLoss:
    """Make a loss of `LOSSES`.

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
        >>> loss = make_loss("focal", gamma=2.0)
        >>> loss(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.0875)
    """
    if name not in LOSSES:
        raise InputValueError(expected("loss", "be a name in LOSSES", repr(name), did_you_mean(name, LOSSES)))
    if problem_type not in PROBLEM_TYPES:
        known = [kind for kind in PROBLEM_TYPES if kind]
        way_out = (
            "calibration is about classifiers"
            if problem_type == "regression"
            else did_you_mean(problem_type, known)
        )
        raise InputValueError(expected("problem_type", f"be one of {known}", repr(problem_type), way_out))
    entry = LOSSES[name]
    values = checked(name, entry.hyperparameters, hyperparameters)
    parts = entry.parts(**values)
    shared: dict[str, Any] = {
        "class_weights": _class_weights(class_weights),
        "multi_label": PROBLEM_TYPES[problem_type],
    }
    if isinstance(parts.gamma, AdaFocalRule | CalFocalRule):
        loss: CalibrationLoss = GammaTableLoss(name, values, parts, rule=parts.gamma, **shared)
    elif name == "ece_ce":
        loss = EceCrossEntropy(name, values, parts, n_bins=values["n_bins"], **shared)
    else:
        loss = CalibrationLoss(name, values, parts, **shared)
    if loss.multi_label:
        loss.check_multi_label()
    return loss


def _class_weights(weights: Sequence[float] | torch.Tensor | None) -> torch.Tensor | None:
    if weights is None:
        return None
    tensor = torch.as_tensor(weights, dtype=torch.float32).detach()
    if tensor.dim() != 1 or not bool((torch.isfinite(tensor) & (tensor > 0)).all()):
        got = tensor.tolist()
        raise InputValueError(
            expected("class_weights", "be (C,) finite positive numbers", got, "one per class, in order")
        )
    return tensor
