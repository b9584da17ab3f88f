# mypy: disable-error-code="no-untyped-def"
r"""Losses of single rows, each a formula of the row's numbers: its value,
and its derivative by each of them.

In a formula ce is the cross entropy CE of the label, and p = exp(-CE) its probability, so dp/dCE =
-p. The gradient by the logits follows from the numbers' own, which `statistics` computes.

$p_y$ is the probability of the label; $e_y$ is 1 at the label and 0 elsewhere. A loss is proper if
its expectation is lowest at the true probabilities; here only cross entropy and the Brier score
are. docs/papers/index.md has the papers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch

from hf_calib._errors import check
from hf_calib.losses.arithmetic import (
    constant,
    exp,
    expm1,
    look_up,
    plus_product,
    possible,
    power_of,
    two_powers,
    weighted,
)
from hf_calib.losses.loss import loss
from hf_calib.losses.ranges import (
    AtLeastOne,
    Gammas,
    NonNegative,
    Positive,
    RankOrNumber,
    Share,
    Thresholds,
)
from hf_calib.losses.statistics.definitions import (
    Constant,
    Entropy,
    LogitNorm,
    MeanExcess,
    MeanLogProb,
    OtherPowers,
    Rival,
    Statistic,
)
from hf_calib.losses.tables import TableLoss

# Above this gamma the gradient of the inverse focal loss changes sign near p = 0.28 and lowers p_y.
MAX_INVERSE_GAMMA = 3.59


def warn_of_inverse_gamma(gamma: float) -> None:
    """Warn, when a loss is made, of an inverse focal gamma whose gradient lowers the probability of
    some labels."""
    if gamma > MAX_INVERSE_GAMMA:
        message = f"The inverse focal gamma is {gamma}, above {MAX_INVERSE_GAMMA}. From there on the gradient "
        message += f"pushes labels down whose probability is near 0.28. Use {MAX_INVERSE_GAMMA} or less."
        # The callers are the check of the loss, the entry's `make`, and the constructor or
        # `make_loss`.
        warnings.warn(message, stacklevel=5)


def _check_steps(thresholds: Sequence[float], gammas: Sequence[float]) -> None:
    got = f"{len(gammas)} for {len(thresholds)}"
    fits = len(gammas) == len(thresholds) + 1
    check(
        fits,
        "gammas to have one entry more than thresholds",
        got,
        "give a gamma per interval",
    )


@loss(few_operations=True, multi_label=True)
def cross_entropy(ce):
    r"""Cross entropy: the baseline to beat, followed by a post-hoc calibrator such as
    `TemperatureScaling`.

    It equals `F.cross_entropy` of class indices and needs less time and memory for large logits.
    After long training the model is over-confident, which `focal` and similar losses counteract.

    $$L = -\log p_y$$

    Example:
        >>> cross_entropy()(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.4100)
    """
    return ce, 1.0


@loss(
    source="Szegedy et al. 2016, section 7",
    reads=lambda smoothing: [MeanLogProb() if smoothing else Constant(0.0)],
    multi_label=True,
)
def label_smoothing(ce, mean_log_prob, *, smoothing: Share = 0.05):
    r"""Label smoothing: cross entropy with labels that give a share ε to all classes equally.

    It is the simplest way to limit over-confidence, and is the same for every example; `focal`
    depends on p_y. As in PyTorch, ε / C also goes to the label, and class weights multiply the log
    p_j of their classes.

    $$L = -(1 - \varepsilon) \log p_y - \frac{\varepsilon}{C} \sum_j \log p_j$$

    Args:
        smoothing: ε, in [0, 1]; masked classes (-inf) get no share. The focal papers use 0.05.

    Example:
        >>> label_smoothing(smoothing=0.1)(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor(0.2269)
    """
    # 0 times the infinite term of a masked class, or of an impossible label, would be NaN.
    if smoothing == 0:
        return ce, 1.0, 0.0
    if smoothing == 1:
        return -mean_log_prob, 0.0, -1.0
    own = 1 - smoothing
    return own * ce - smoothing * mean_log_prob, own, -smoothing


@loss(source="Brier 1950", reads=lambda: [OtherPowers(2.0)], multi_label=True)
def brier(ce, others):
    r"""Brier score: the squared distance of the probabilities from the label.

    It is proper like `cross_entropy`, but bounded by 2: outliers and wrong labels count for less,
    and learning is slow if the model is confidently wrong. In a multi-label problem the loss of a
    decision is (p - y)^2.

    $$L = \lVert p - e_y \rVert_2^2 = \sum_j (p_j - [j = y])^2$$

    Example:
        >>> brier()(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.2642)
    """
    # The label's own term is (1 - p)^2.
    log_p = -ce
    rest = -expm1(log_p)
    by_ce = 2 * rest * exp(log_p)
    return others + rest * rest, by_ce, 1.0


def focal_term(ce, log_p, base, gamma):
    """The value w CE with the weight w = base^γ, and its derivative by CE,
    for base = 1 - p or 1 + p.

    Both have d base / dCE = 1 - base. Therefore
    dw/dCE = γ base^(γ - 1) (1 - base) = γ (base^(γ - 1) - w).
    """
    weight, lower = two_powers(base, gamma)
    # By the product rule, w + CE dw/dCE.
    by_ce = plus_product(weight, gamma, weight - lower, possible(log_p))
    return weighted(ce, weight), by_ce


@loss(source="Lin et al. 2017, Eq. 4; Mukhoti et al. 2020", multi_label=True)
def focal(ce, *, gamma: NonNegative = 3.0):
    r"""Focal loss: cross entropy with a lower weight for examples whose label is already probable.

    It is the usual first choice against over-confidence in long runs. After short fine-tuning the
    model is under-confident, which a temperature corrects. `dual_focal` also uses the rival class;
    `adafocal` adapts gamma. With γ = 3, two classes and a posterior of 0.7 the minimum is at 0.558.
    For γ < 1 the gradient at p_y = 1 is its limit 0; in the authors' code it is NaN.

    $$L = -(1 - p_y)^\gamma \log p_y$$

    Args:
        gamma: γ >= 0; at 0 the loss is cross entropy.

    Example:
        >>> focal(gamma=2.0)(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.0875)
    """
    log_p = -ce
    rest = -expm1(log_p)  # 1 - p
    return focal_term(ce, log_p, rest, gamma)


@loss(source="Lin et al. 2025 (BSCE-GRA), Eq. 14 and 5.3", multi_label=True)
def focal_gra(ce, *, gamma: NonNegative = 3.0):
    r"""FL-GRA: cross entropy whose gradient is scaled by the weight of `focal`.

    The weight w is treated as a constant, so the gradient is not that of the value. It never lowers
    the label's probability. With gamma = 3, two classes and a posterior of 0.7 the limit is 0.553,
    1 / (1 + (3/7)^(1/4)).

    $$L = -w \log p_y, \qquad \frac{\partial L}{\partial z} = w\, (p - e_y)$$

    Args:
        gamma: γ >= 0; at 0 the loss is cross entropy.

    Example:
        >>> focal_gra(gamma=2.0)(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.0875)
    """
    weight = constant(power_of(-expm1(-ce), gamma))
    return weight * ce, weight


class StepsLoss(TableLoss):
    """A loss whose gamma is a step function of the label's probability."""

    def _make_table(self) -> None:
        self._thresholds = torch.tensor(self._values["thresholds"], dtype=torch.float64)
        self._gammas = torch.tensor(self._values["gammas"], dtype=torch.float64)

    def _bins(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._thresholds, self._gammas

    def _sources(self) -> tuple[torch.Tensor, ...]:
        return self._bins()


@loss(source="Mukhoti et al. 2020", check=_check_steps, module=StepsLoss)
def flsd(
    ce,
    *,
    table,
    thresholds: Thresholds = (0.2,),
    gammas: Gammas = (5.0, 3.0),
):
    r"""FLSD-53: focal loss with a larger gamma for improbable labels.

    Gamma is a fixed function of p_y. `adafocal` fits it to held-out predictions; `focal` has one
    gamma for all.

    $$L = -(1 - p_y)^\gamma \log p_y, \qquad \gamma = 5 \text{ for } p_y < 0.2, \text{ otherwise }
    3$$

    Args:
        thresholds: the values of p_y at which gamma changes and the weight jumps: numbers in [0,
            1], strictly rising. An interval contains its lower end. The authors' code has
            `thresholds=(0.2, 0.5), gammas=(5, 3, 1)`.
        gammas: γ >= 0 for each interval, one more than thresholds.

    Example:
        >>> flsd()(torch.tensor([[0.0, 2.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.6071)
    """
    log_p = -ce
    rest = -expm1(log_p)
    gamma = look_up(table, exp(log_p))
    return focal_term(ce, log_p, rest, gamma)


@loss(
    source="Lin et al. 2025 (BSCE-GRA), Eq. 14 and 5.3",
    check=_check_steps,
    module=StepsLoss,
)
def flsd_gra(
    ce,
    *,
    table,
    thresholds: Thresholds = (0.2,),
    gammas: Gammas = (5.0, 3.0),
):
    r"""FLSD-GRA: cross entropy whose gradient is scaled by the weight of `flsd`.

    The weight w is treated as a constant, so the gradient is not that of the value. It never lowers
    the label's probability.

    $$L = -w \log p_y, \qquad \frac{\partial L}{\partial z} = w\, (p - e_y)$$

    Args:
        thresholds: as of `flsd`.
        gammas: as of `flsd`.

    Example:
        >>> flsd_gra()(torch.tensor([[0.0, 2.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.6071)
    """
    log_p = -ce
    gamma = look_up(table, exp(log_p))
    weight = constant(power_of(-expm1(log_p), gamma))
    return weight * ce, weight


@loss(
    source="Wang et al. 2021",
    multi_label=True,
    check=lambda gamma: warn_of_inverse_gamma(gamma),
)
def inverse_focal(ce, *, gamma: NonNegative = 2.0):
    r"""Inverse focal loss: cross entropy with a higher weight for examples whose label is probable.

    It is the opposite of `focal`, for models that end under-confident, or whose over-confidence a
    post-hoc calibrator corrects. `adafocal` switches a bin to this loss if its held-out predictions
    are under-confident.

    $$L = -(1 + p_y)^\gamma \log p_y$$

    Args:
        gamma: γ >= 0; at 0 the loss is cross entropy. Above 3.59 it warns: the gradient changes
            sign near p_y = 0.28.

    Example:
        >>> inverse_focal(gamma=2.0)(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(1.0043)
    """
    log_p = -ce
    return focal_term(ce, log_p, 1 + exp(log_p), gamma)


def rival_or_number(rival: Any, **values: Any) -> list[Statistic]:
    return [Constant(rival) if isinstance(rival, float) else Rival(rival)]


def dual_focal_term(ce, log_p, base, gamma):
    """The value w CE with w = base^γ, where base = 1 - p + q, and its derivatives by CE and q.

    dw/dq = γ base^(γ - 1), and dw/dCE = p dw/dq.
    """
    weight, lower = two_powers(base, gamma)
    by_q = -gamma * lower * possible(log_p)
    by_ce = plus_product(weight, 1.0, by_q, exp(log_p))
    return weighted(ce, weight), by_ce, by_q


@loss(source="Tao et al. 2023 (DFL), Eq. 3 and Table 4", reads=rival_or_number)
def dual_focal(
    ce,
    q,
    *,
    gamma: NonNegative = 5.0,
    rival: RankOrNumber = "next",
):
    r"""Dual focal loss (DFL): focal loss whose weight depends on the label's margin over its rival.

    The weight of `focal` depends on p_y only, which leads to under-confidence. As in the authors'
    code, q_j has a gradient, classes that tie with the label are not rivals, and q_j is 0 if no
    class is below the label. Classes are compared by logits, because small probabilities underflow
    into ties. The loss jumps when the label's rank changes.

    $$L = -(1 - p_y + q_j)^\gamma \log p_y, \qquad q_j = \max \{ p_i : p_i < p_y \}$$

    Args:
        gamma: γ >= 0; at 0 the loss is cross entropy. Tao et al. use 5 for ResNet-50 on CIFAR, and
            2.3 to 6.1 in all.
        rival: definition of q_j (Table 4). Among the classes below the label: "next" (Eq. 3),
            "second", "third", or a mean: "mean2", "mean3", "mean_all". Or a number in [0, 1), the
            paper's "fixed dual logit".

    Example:
        >>> dual_focal(gamma=2.0)(torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.3126)
    """
    log_p = -ce
    base = q - expm1(log_p)  # 1 - p + q
    return dual_focal_term(ce, log_p, base, gamma)


@loss(source="Lin et al. 2025 (BSCE-GRA), Eq. 14 and 5.3", reads=rival_or_number)
def dual_focal_gra(
    ce,
    q,
    *,
    gamma: NonNegative = 5.0,
    rival: RankOrNumber = "next",
):
    r"""DFL-GRA: cross entropy whose gradient is scaled by the weight of `dual_focal`.

    The weight w is treated as a constant, so the gradient is not that of the value. It never lowers
    the label's probability.

    $$L = -w \log p_y, \qquad \frac{\partial L}{\partial z} = w\, (p - e_y)$$

    Args:
        gamma: as of `dual_focal`.
        rival: as of `dual_focal`.

    Example:
        >>> dual_focal_gra(gamma=2.0)(torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.3126)
    """
    weight = constant(power_of(q - expm1(-ce), gamma))
    return weight * ce, weight, 0.0


@loss(
    source="Lin et al. 2025 (BSCE-GRA), Eq. 11",
    reads=lambda norm, **_: [OtherPowers(norm)],
    multi_label=True,
)
def bsce(
    ce,
    others,
    *,
    gamma: NonNegative = 2.0,
    norm: AtLeastOne = 2.0,
):
    r"""BSCE: cross entropy weighted by the generalised Brier score of the whole prediction.

    The weight of `focal` depends only on 1 - p_y; this weight also depends on the distribution over
    the other classes. `bsce_gra`, the paper's proposal, treats the weight as a constant.

    $$L = -u \log p_y, \qquad u = \lVert p - e_y \rVert_\beta^\gamma$$

    For several labels per row, u is |p - y|^γ of each label's sigmoid.

    Args:
        gamma: γ >= 0; at 0 the loss is cross entropy.
        norm: order β >= 1 of the vector norm, as in the authors' code. Its default is 1, where u is
            2^γ times the focal weight. The paper's Eq. 11 has a sum of scalar norms, on which β has
            no effect; `norm=gamma` computes it.

    Example:
        >>> bsce(gamma=2.0)(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.1751)
    """
    # u = s^(γ / β) with s = sum_{j != y} p_j^β + (1 - p)^β, and
    # d(1 - p)^β / dCE = β (1 - p)^(β - 1) p.
    log_p = -ce
    rest = -expm1(log_p)
    of_label, lower = two_powers(rest, norm)
    s = others + of_label
    u, lower_u = two_powers(s, gamma / norm)
    by_s = -gamma / norm * lower_u * possible(log_p)
    by_ce = plus_product(u, norm, by_s, lower * exp(log_p))
    return weighted(ce, u), by_ce, by_s


@loss(
    source="Lin et al. 2025 (BSCE-GRA), Eq. 14 and 5.3",
    reads=lambda norm, **_: [OtherPowers(norm)],
    multi_label=True,
)
def bsce_gra(
    ce,
    others,
    *,
    gamma: NonNegative = 2.0,
    norm: AtLeastOne = 2.0,
):
    r"""BSCE-GRA: cross entropy whose gradient is scaled by the weight of `bsce`.

    The weight w is treated as a constant, so the gradient is not that of the value. It never lowers
    the label's probability.

    $$L = -w \log p_y, \qquad \frac{\partial L}{\partial z} = w\, (p - e_y)$$

    Args:
        gamma: as of `bsce`.
        norm: as of `bsce`.

    Example:
        >>> bsce_gra(gamma=2.0)(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.1751)
    """
    of_label = power_of(-expm1(-ce), norm)
    u = constant(power_of(others + of_label, gamma / norm))
    return u * ce, u, 0.0


@loss(
    source="Liang et al. 2024 (FCL), Def. 3.1",
    reads=lambda distance, **_: [OtherPowers(2.0 if distance == "l2" else 1.0)],
    multi_label=True,
)
def focal_calibration(
    ce,
    others,
    *,
    gamma: NonNegative = 3.0,
    brier_weight: NonNegative = 0.5,
    distance: Literal["l2", "l1"] = "l2",
):
    r"""Focal calibration loss (FCL): focal loss plus the Brier score.

    The Brier term moves the minimum towards the posterior: with two classes, γ = 3 and a posterior
    of 0.7 it is at 0.598 for λ = 0.5 and at 0.683 for λ = 10. The authors' (γ, λ), with ResNet-50
    on images: CIFAR-10 (4, 1.5), CIFAR-100 (2, 0.5), Tiny-ImageNet (3, 0.5), 20 Newsgroups (5,
    4.5), AG News (4, 3), FinSen (4, 4).

    $$L = -(1 - p_y)^\gamma \log p_y + \lambda \lVert p - e_y \rVert_2^2$$

    For several labels per row, the last term is λ (p - y)^2 of each label's sigmoid.

    Args:
        gamma: γ >= 0.
        brier_weight: λ >= 0; a larger λ reduces under-confidence; at 0 the loss is `focal`.
        distance: "l2", the squared Euclidean distance, or "l1" (A.15), the sum of absolute
            differences.

    Example:
        >>> focal_calibration()(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.1755)
    """
    log_p = -ce
    rest = -expm1(log_p)
    value, by_ce = focal_term(ce, log_p, rest, gamma)
    p = exp(log_p)
    if distance == "l2":
        value = value + brier_weight * (others + rest * rest)
        by_ce = plus_product(by_ce, 2 * brier_weight, rest, p)
    else:
        value = value + brier_weight * (others + rest)
        by_ce = by_ce + brier_weight * p
    return value, by_ce, brier_weight


@loss(
    source="Pereyra et al. 2017, Eq. 2; the comparison study",
    reads=lambda entropy_weight: [Entropy()],
)
def entropy_regularized(ce, entropy, *, entropy_weight: NonNegative = 0.1):
    r"""Entropy regularisation (confidence penalty): cross entropy minus a multiple of the entropy
    of p.

    `label_smoothing` moves every class towards 1 / C; this loss hardly changes classes whose
    probability is nearly 0. With a = γ it is at most the focal loss, for every γ >= 0 (the
    comparison study, Theorem 2).

    $$L = -\log p_y - a\, H(p), \qquad H(p) = -\sum_j p_j \log p_j$$

    Args:
        entropy_weight: a >= 0; at 0 the loss is cross entropy, above 0 it can be negative. The
            default is ours.

    Example:
        >>> entropy_regularized(entropy_weight=0.1)(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor(0.0904)
    """
    return ce - entropy_weight * entropy, 1.0, -entropy_weight


@loss(
    source="the comparison study, 2.3",
    # 0 times an infinite norm would be NaN.
    reads=lambda norm_weight, p: [LogitNorm(p) if norm_weight else Constant(0.0)],
)
def logit_norm(
    ce,
    norm,
    *,
    norm_weight: NonNegative = 0.01,
    p: AtLeastOne = 1.0,
):
    r"""Logit norm: cross entropy plus the norm of the logits,
    which keeps the logits and the confidence small.

    A shift of all logits changes this loss; `entropy_regularized` depends only on the
    probabilities.

    $$L = -\log p_y + a\, \lVert z \rVert_p$$

    Args:
        norm_weight: a >= 0; at 0 the loss is cross entropy. The default and the mean over a batch
            are ours.
        p: order of the norm, >= 1. A masked logit (-inf) counts as 0.

    Example:
        >>> logit_norm(norm_weight=0.01)(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor(0.1469)
    """
    return ce + norm_weight * norm, 1.0, norm_weight


@loss(
    source="Liu et al. 2022 (MbLS), Eq. 8",
    # 0 times an infinite distance would be NaN.
    reads=lambda margin_weight, margin: [
        MeanExcess(margin) if margin_weight else Constant(0.0)
    ],
)
def mbls(
    ce,
    excess,
    *,
    margin_weight: NonNegative = 0.1,
    margin: NonNegative = 10.0,
):
    r"""MbLS (margin-based label smoothing): cross entropy plus the excess of logit distances over a
    margin.

    `label_smoothing` reduces all distances between logits; this loss reduces only distances above
    the margin, so a model may still be confident.

    $$L = -\log p_y + \frac{a}{C} \sum_j \max(0,\, \max_k z_k - z_j - m)$$

    Args:
        margin_weight: a >= 0; at 0 the loss is cross entropy.
        margin: m >= 0; the authors use 6 to 10. With 0 the loss acts like label smoothing. A masked
            class (-inf) has no distance and is not counted in C.

    Example:
        >>> mbls(margin=1.0)(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor(0.1769)
    """
    return ce + margin_weight * excess, 1.0, margin_weight


@loss(source="Wu et al. 2025 (DFT), Eq. 9")
def dft(ce):
    r"""DFT (dynamic fine-tuning): cross entropy whose gradient is scaled by the label's
    probability.

    Use it to fine-tune a strong language model on answers that it could have given itself:
    improbable tokens hardly count, whereas `focal_gra` gives them the largest weight. The gradient
    is that of `power(exponent=1)` and moves all probability to the most probable class. The loss of
    a label with logit -inf is 0, not infinity.

    $$L = -\mathrm{sg}(p_y) \log p_y \qquad \text{(sg stops the gradient)}$$

    Example:
        >>> dft()(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.2292)
    """
    log_p = -ce
    p = constant(exp(log_p))
    return -p * possible(log_p), p


@loss(source="Li et al. 2025; Zhang and Sabuncu 2018, Eq. 6")
def power(ce, *, exponent: Positive = 1.0):
    r"""Power loss: one minus a power of the label's probability,
    between cross entropy and the probability.

    The larger the exponent, the less an improbable label counts. Use it for wrong labels, or to
    fine-tune a model with a strong prior. The minimum is sharper than the posterior η: for a < 1, p
    is proportional to η^(1 / (1 - a)); for a >= 1 all probability goes to the most probable class.

    $$L = \frac{1 - p_y^a}{a}$$

    Args:
        exponent: a > 0. Near 0 the loss is cross entropy; 1 is 1 - p_y, whose gradient is that of
            `dft`.

    Example:
        >>> power()(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.3096)
    """
    log_power = -exponent * ce
    return -expm1(log_power) / exponent, exp(log_power)
