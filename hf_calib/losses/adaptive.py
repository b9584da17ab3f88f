"""Losses that adapt to held-out predictions: AdaFocal, AdaDualFocal, CalFocal, ECE-CE.

Each has a table, which `update` fits and its formula reads as `rows.table`.
"""

from __future__ import annotations

import sys
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_calib._errors import InputValueError, check, expected
from hf_calib.losses.loss import CalibrationLoss, Shared, loss
from hf_calib.losses.pointwise import warn_of_inverse_gamma
from hf_calib.losses.ranges import NonNegative, NonPositive, Number, NumberOfBins, UpperLimit
from hf_calib.losses.rows import Rows, focal_term, modulate, weighted
from hf_calib.losses.statistics.definitions import IGNORE_INDEX

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Where no limit is set. Far beyond it float32 is infinite, and infinity times 0 is NaN.
LARGEST_GAMMA = 1e30
PASSES_BEFORE_WARNING = 100


class AdaptiveLoss(CalibrationLoss):
    """A loss with a table that `update` fits to held-out predictions.

    The table lives on the CPU in float64, wherever the loss is moved, so that it is the same on every device
    and in every checkpoint; the copies that training reads are made once per update.
    """

    def _make_table(self) -> None:
        self._copies: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}
        self._passes_without_update = 0
        n_bins = self._values["n_bins"]
        self.register_buffer("counts", torch.zeros(n_bins, dtype=torch.float64), persistent=False)
        for name, values in self._first_table(n_bins).items():
            self.register_buffer(name, values.double())

    @abstractmethod
    def _first_table(self, n_bins: int) -> dict[str, Tensor]:
        """The buffers, on the CPU, before the first update."""

    def forward(self, logits: Any, labels: Tensor, **kwargs: Any) -> Tensor:
        """See `CalibrationLoss.forward`; warns, once, where the Trainer's `compute_loss_func` is never updated."""
        loss = super().forward(logits, labels, **kwargs)
        # The stock Trainer passes the model's output; CalibrationTrainer, which updates, passes logits.
        if not isinstance(logits, Tensor) and loss.requires_grad and not torch.compiler.is_compiling():
            self._passes_without_update += 1
            if self._passes_without_update == PASSES_BEFORE_WARNING:
                warnings.warn(
                    f"{self.name!r} has trained for {PASSES_BEFORE_WARNING} batches and was never updated: it is still "
                    "the loss that it was at first, and does not adapt. Use CalibrationTrainer, which updates it from "
                    "held-out predictions, or call its update() from a callback.",
                    UserWarning,
                    stacklevel=4,
                )
        return loss

    @torch.no_grad()
    def update(
        self, confidences: Any, correct: Any, *, class_gaps: Any = None, progress: float | None = None
    ) -> None:
        """Fit the table to held-out predictions, which must not be those that are reported.

        An update that is refused leaves the table as it was.

        Args:
            confidences: (N,) top-label probabilities in [0, 1].
            correct: (N,) whether the predicted class was right, bool or 0/1.
            class_gaps: (C,) calibration error of each class. `ece_ce` needs it, the others leave it.
            progress: share of the training that is done, in [0, 1]: 0 means cross entropy, 1 the weights of the gaps
                alone. `ece_ce` needs it, the others leave it.
        """
        for name, values in self._fitted(confidences, correct, class_gaps, progress).items():
            setattr(self, name, values.to("cpu", torch.float64))
        self._copies.clear()
        self._passes_without_update = -sys.maxsize

    @abstractmethod
    def _fitted(
        self, confidences: Any, correct: Any, class_gaps: Any, progress: float | None
    ) -> dict[str, Tensor]:
        """The buffers after held-out predictions."""

    @abstractmethod
    def log_values(self) -> dict[str, float]:
        """The table as numbers to log: `calibration_gap_00`, ..., `edge_00`, ... and so on."""

    def _apply(self, fn: Any, recurse: bool = True) -> AdaptiveLoss:
        """`.to()`, `.half()` and the like move the class weights, not the table."""
        table = dict(self._buffers)
        super()._apply(fn, recurse)
        self._buffers |= {name: value for name, value in table.items() if name != "class_weights"}
        return self

    def _like(self, name: str, tensor: Tensor) -> Tensor:
        """The buffer `name` on the tensor's device, in its dtype."""
        key = (name, tensor.device, tensor.dtype)
        if key not in self._copies:
            self._copies[key] = self.get_buffer(name).to(tensor)
        return self._copies[key]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._copies.clear()


class GammaTableLoss(AdaptiveLoss):
    """AdaFocal, CalFocal: gamma comes from a table over bins of the true-class probability. AdaDualFocal: of the lead.

    Buffers, float64: `gammas` (M,) and those of `_equal_mass_bins`, of which `counts` (M,) is not saved.
    """

    counts: Tensor
    edges: Tensor
    gammas: Tensor
    gaps: Tensor
    accuracies: Tensor

    def _first_table(self, n_bins: int) -> dict[str, Tensor]:
        return {
            "edges": torch.linspace(0, 1, n_bins + 1, dtype=torch.float64),
            "gammas": torch.full((n_bins,), self._values.get("gamma_init", 1.0), dtype=torch.float64),
            "gaps": torch.zeros(n_bins),
            "accuracies": torch.full((n_bins,), torch.nan),
        }

    def _fitted(
        self, confidences: Any, correct: Any, class_gaps: Any, progress: float | None
    ) -> dict[str, Tensor]:
        bins = _equal_mass_bins(*_checked_predictions(confidences, correct), len(self.gammas))
        return {"gammas": self._updated(bins["gaps"]), **bins}

    @abstractmethod
    def _updated(self, gaps: Tensor) -> Tensor:
        """(M,) gammas after held-out predictions."""

    def gamma(self, p: Tensor) -> Tensor:
        """Gamma of examples whose label has probability p (N,), or leads by p; below 0 of the inverse focal loss."""
        return self._like("gammas", p)[self._bins_of(p)]

    def _bins_of(self, p: Tensor) -> Tensor:
        return torch.bucketize(p, self._like("edges", p)[1:-1], right=True)

    def log_values(self) -> dict[str, float]:
        return _numbered(gamma=self.gammas, calibration_gap=self.gaps, edge=self.edges, count=self.counts)


class AdaFocalLoss(GammaTableLoss):
    """gamma <- gamma * exp(+-lambda * gap), through +-switch to the other sign, within [gamma_min, gamma_max]."""

    def _updated(self, gaps: Tensor) -> Tensor:
        switch = self._values.get("switch", 0.0)
        focal = self.gammas > 0
        rate = self._values["update_rate"] * torch.where(focal, 1.0, -1.0)
        grown = self.gammas * torch.exp(rate * gaps)
        # A gamma near 0 stands for cross entropy; it goes over to the other loss. At exactly 0 the paper's
        # Algorithm 1 takes the focal branch and switches; its code, which does not, would stay focal.
        crossed = torch.full_like(grown, switch).copysign(-self.gammas).where(self.gammas != 0, -switch)
        gammas = torch.where(grown.abs() < switch, crossed, grown)
        largest = min(self._values["gamma_max"], LARGEST_GAMMA)
        return gammas.clamp(self._values.get("gamma_min", 0.0), largest)


class CalFocalLoss(GammaTableLoss):
    """gamma = exp(lambda * gap) of the bin (Eq. 3), with no memory; or of each example (Eq. 2)."""

    def _updated(self, gaps: Tensor) -> Tensor:
        return torch.exp(self._values["update_rate"] * gaps).clamp(max=LARGEST_GAMMA)

    def gamma(self, p: Tensor) -> Tensor:
        if not self._values["per_sample"]:
            return super().gamma(p)
        gaps = (p - self._like("accuracies", p)[self._bins_of(p)]).nan_to_num(0.0)  # no accuracy yet: gamma 1
        return torch.exp(self._values["update_rate"] * gaps).clamp(max=LARGEST_GAMMA)


class GapTableLoss(AdaptiveLoss):
    """Cross entropy whose weight moves, as training goes on, from 1 to the held-out gaps of the example.

    Buffers, float64: `bin_gaps` (M,) and `mass_gaps` (M,) of the equal-width and equal-mass bins, `class_gaps` (C,),
    `progress` (); `counts` (M,), of each equal-width bin, is not saved.
    """

    counts: Tensor
    bin_gaps: Tensor
    mass_gaps: Tensor
    class_gaps: Tensor
    progress: Tensor

    def _first_table(self, n_bins: int) -> dict[str, Tensor]:
        gaps = {"bin_gaps": torch.zeros(n_bins), "mass_gaps": torch.zeros(n_bins)}
        return {**gaps, "class_gaps": torch.zeros(0), "progress": torch.zeros(())}

    def _fitted(
        self, confidences: Any, correct: Any, class_gaps: Any, progress: float | None
    ) -> dict[str, Tensor]:
        if class_gaps is None or progress is None:
            got = f"class_gaps={class_gaps}, progress={progress}"
            message = expected("class_gaps and progress", f"be given to {self.name}", got, "pass both")
            raise InputValueError(message)
        check(0 <= progress <= 1, "progress to be in [0, 1]", progress, "pass epochs done / epochs in all")
        class_gaps = _on_cpu(class_gaps)
        fits = class_gaps.dim() == 1 and len(class_gaps) > 0 and bool(class_gaps.isfinite().all())
        check(fits, "class_gaps to be (C,) finite numbers", class_gaps.tolist(), "pass one per class")
        confidences, correct = _checked_predictions(confidences, correct)
        n_bins = len(self.bin_gaps)
        index = (torch.searchsorted(self._bin_edges(), confidences) - 1).clamp_min(0)
        totals = torch.zeros(2, n_bins, dtype=torch.float64)
        totals[0].index_add_(0, index, confidences - correct)
        totals[1].index_add_(0, index, torch.ones_like(confidences))
        return {
            "bin_gaps": totals[0] / totals[1].clamp_min(1),
            "mass_gaps": _equal_mass_bins(confidences, correct, n_bins)["gaps"],
            "class_gaps": class_gaps,
            "counts": totals[1],
            "progress": torch.tensor(float(progress), dtype=torch.float64),
        }

    def log_values(self) -> dict[str, float]:
        return _numbered(calibration_gap=self.bin_gaps, edge=self._bin_edges(), count=self.counts)

    def _bin_edges(self) -> Tensor:
        return torch.linspace(0, 1, len(self.bin_gaps) + 1).double()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        # How many classes there are is known from the first update on.
        saved = state_dict.get(f"{prefix}class_gaps", self.class_gaps)
        self.class_gaps = torch.zeros_like(saved, dtype=torch.float64)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _check(self, logits: Tensor, labels: Tensor) -> bool:
        requirement = f"class_gaps to have one entry for each of {logits.shape[-1]} classes"
        way_out = "update the loss with the gaps of this model's classes"
        multi_label = super()._check(logits, labels)
        check(len(self.class_gaps) in (0, logits.shape[-1]), requirement, len(self.class_gaps), way_out)
        return multi_label

    def weight(self, p: Tensor, labels: Tensor) -> Tensor:
        """What the table says of examples with these labels (N,), whose probability is p (N,), all of one batch."""
        if len(self.class_gaps) == 0:
            return torch.ones_like(p)
        valid = labels != IGNORE_INDEX
        n_bins = len(self.bin_gaps)
        bin_index = (p * n_bins).long().clamp(max=n_bins - 1)
        bin_gap = self._like("bin_gaps", p)[bin_index] * (p < 1)
        rank = p.argsort(stable=True).argsort()  # rows that do not count have p = 1, and come last
        size = valid.sum() // n_bins
        mass_index = torch.where(size > 0, rank // size.clamp_min(1), n_bins - 1).clamp(max=n_bins - 1)
        mass_gap = self._like("mass_gaps", p)[mass_index]
        class_gap = self._like("class_gaps", p)[labels.where(valid, 0)]
        progress = self._like("progress", p)
        return 1 - progress + progress * (bin_gap.abs() + mass_gap.abs() + 2 * class_gap.abs()) / 3


def _equal_mass_bins(confidences: Tensor, correct: Tensor, n_bins: int) -> dict[str, Tensor]:
    """Edges (M + 1,), counts, gaps (mean confidence minus accuracy, or 0) and accuracies (or NaN) of (N,) confidences.

    As in the papers' code the edges interpolate the sorted confidences and the bins are (low, high], which leaves out
    the smallest confidence and its ties.
    """
    ordered = confidences.sort().values
    n = len(ordered)
    position = torch.arange(n_bins + 1, dtype=torch.float64) * (n / n_bins)
    low = position.floor().long().clamp(max=n - 1)
    high = (low + 1).clamp(max=n - 1)
    edges = ordered[low] + (ordered[high] - ordered[low]) * (position - low)
    index = torch.searchsorted(edges, confidences, right=False) - 1  # duplicate edges: an empty bin
    inside = index >= 0
    added = torch.stack([torch.ones_like(confidences), confidences, correct])[:, inside]
    sums = torch.zeros(3, n_bins, dtype=torch.float64).index_add_(1, index[inside], added)
    counts, confidence_sums, correct_sums = sums
    gaps = (confidence_sums - correct_sums) / counts.clamp_min(1)
    return {"edges": edges, "counts": counts, "gaps": gaps, "accuracies": correct_sums / counts}


def _numbered(**vectors: Tensor) -> dict[str, float]:
    """Log keys `name_00`, `name_01`, ... for the values of each vector."""
    return {f"{name}_{i:02d}": v for name, values in vectors.items() for i, v in enumerate(values.tolist())}


def _on_cpu(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()


def _checked_predictions(confidences: Any, correct: Any) -> tuple[Tensor, Tensor]:
    """Check held-out predictions; return both as (N,) float64 on the CPU."""
    confidences, correct = _on_cpu(confidences), _on_cpu(correct)
    fits = confidences.dim() == 1 and confidences.shape == correct.shape and len(confidences) > 0
    got = f"{tuple(confidences.shape)} and {tuple(correct.shape)}"
    requirement = "confidences and correct to be two (N,) vectors, N >= 1"
    check(fits, requirement, got, "pass one entry per held-out example")
    for name, values in (("confidences", confidences), ("correct", correct)):
        outside = ~((values >= 0) & (values <= 1))  # NaN too
        if bool(outside.any()):
            row = int(outside.nonzero()[0])
            got = f"{values[row].item()} in row {row} ({int(outside.sum())} such)"
            way_out = "pass probabilities, not logits; NaN means the model's logits are NaN"
            raise InputValueError(expected(name, "be in [0, 1]", got, way_out))
    return confidences, correct


def _check_gammas(
    *, gamma_init: float, gamma_max: float, gamma_min: float = 0.0, switch: float = 0.0, **others: Any
) -> None:
    got = f"gamma_min={gamma_min}, gamma_max={gamma_max}, switch={switch}"
    fits = gamma_min <= -switch and switch <= gamma_max
    check(fits, "switch to lie within -gamma_min and gamma_max", got, "widen the gammas' range")
    fits = gamma_min <= gamma_init <= min(gamma_max, LARGEST_GAMMA)
    requirement = "gamma_init to lie in [gamma_min, gamma_max]"
    check(fits, requirement, f"gamma_init={gamma_init}", "widen the gammas' range")
    warn_of_inverse_gamma(-gamma_min)


@loss(
    "focal, or inverse focal where gamma < 0; gamma by held-out bins",
    source="Ghosh et al. 2022 (AdaFocal), Algorithm 1",
    multi_label=True,
    module=AdaFocalLoss,
    check=_check_gammas,
)
def adafocal(
    r: Rows,
    *,
    n_bins: NumberOfBins = 15,
    update_rate: NonNegative = 1.0,
    gamma_init: Number = 1.0,
    gamma_max: UpperLimit = 20.0,
    gamma_min: NonPositive = -2.0,
    switch: NonNegative = 0.2,
    **shared: Unpack[Shared],
) -> Tensor:
    r"""AdaFocal: focal loss with a gamma per confidence bin, fitted to held-out predictions as training goes on.

    Where held-out predictions are over-confident the bin's gamma grows, where they are under-confident it
    shrinks, and below the switch the bin goes over to the inverse focal loss. No gamma has to be chosen, as
    with `focal`, but it needs a calibration split. `calfocal` has no memory; `ada_dual_focal` goes by the lead over
    the rival class.

    $$L = \begin{cases} -(1 - p_y)^{\gamma} \log p_y & \gamma \ge 0 \\
        -(1 + p_y)^{|\gamma|} \log p_y & \gamma < 0 \end{cases}$$

    $$\gamma_b \leftarrow \gamma_b \exp(\pm\lambda (C_b - A_b))$$

    with $C_b$ the mean held-out confidence and $A_b$ the accuracy of bin b, and the sign that of $\gamma_b$.

    Args:
        n_bins: number M of bins, >= 1.
        update_rate: λ >= 0.
        gamma_init: γ of all bins before the first update, in [gamma_min, gamma_max].
        gamma_max: upper limit of γ, >= switch; `math.inf` for none, as in appendix N.3 (in files "inf", in YAML
            .inf). The paper's 20 varies less between seeds.
        gamma_min: lower limit of γ, <= -switch; below -3.59 it warns, as `inverse_focal`.
        switch: S_th >= 0: a bin with |γ| below it goes over to the other loss, at ∓S_th.

    Notes:
        Bins come from the confidences of the predicted class, and are looked up by p_y in training. As in the
        authors' code they are (low, high] for the held-out predictions, which leaves out the smallest, and
        [low, high) in training. The code forgets its gammas on resume; here they are in the `state_dict`.

    References:
        Ghosh et al. 2022, "AdaFocal: calibration-aware adaptive focal loss", Algorithm 1; limits of gamma:
        appendix N; updates more often than once an epoch: appendix I.

    Example:
        >>> loss = adafocal(n_bins=2)
        >>> loss.update([0.6, 0.7, 0.8, 0.9], [0, 1, 0, 0])
        >>> loss.gammas.tolist()  # over-confident in both bins: both gammas grow
        [1.28..., 2.45...]
    """
    return focal_term(r.ce, r.table.gamma(r.p))


@loss(
    "dual_focal; gamma by held-out bins, looked up by the label's lead",
    source="Tao et al. 2023 (DFL), 5.2",
    module=AdaFocalLoss,
    check=_check_gammas,
)
def ada_dual_focal(
    r: Rows,
    *,
    n_bins: NumberOfBins = 15,
    update_rate: NonNegative = 2.0,
    gamma_init: NonNegative = 6.0,
    gamma_max: UpperLimit = 20.0,
    **shared: Unpack[Shared],
) -> Tensor:
    r"""AdaDualFocal: dual focal loss with a gamma per bin of the label's lead over its rival.

    As `dual_focal`, but gamma is fitted to held-out predictions; as `adafocal`, but gamma and weight go by the
    lead p_y - q_j, and no bin goes over to an inverse loss: gamma only shrinks towards 0.

    $$L = -(1 - p_y + q_j)^{\gamma_b} \log p_y, \qquad \gamma_b \leftarrow \gamma_b \exp(\lambda (C_b - A_b))$$

    with b the bin of p_y - q_j, and $C_b$ and $A_b$ as in `adafocal`.

    Args:
        n_bins: number M of bins, >= 1.
        update_rate: λ >= 0.
        gamma_init: γ of all bins before the first update, in [0, gamma_max].
        gamma_max: upper limit of γ, >= 0; `math.inf` for none.

    Notes:
        As in the authors' code, bins of held-out confidences are looked up by the lead, so that every lead below the
        second edge is in the first. The rival has a gradient. The authors choose the first γ and λ for each network:
        on CIFAR-10 6 and 2 (ResNet-50, the defaults here), 7 and 2 (ResNet-110), 6 and 1 (DenseNet-121), 5 and 0.1
        (Wide ResNet).

    Example:
        >>> loss = ada_dual_focal(n_bins=2)
        >>> loss.update([0.6, 0.7, 0.8, 0.9], [0, 1, 0, 0])
        >>> loss.gammas.tolist()
        [9.89..., 20.0]
    """
    rival = r.rival("next")
    assert isinstance(rival, Tensor)
    gamma = r.table.gamma(r.p - rival.detach())
    return weighted(modulate(r.rest + rival, gamma), r.ce)


@loss(
    "focal, gamma = exp(update_rate * gap) of the held-out bin, or of the example",
    source="Ghosh et al. 2022 (AdaFocal), Eq. 3 and Eq. 2",
    module=CalFocalLoss,
)
def calfocal(
    r: Rows,
    *,
    n_bins: NumberOfBins = 15,
    update_rate: NonNegative = 10.0,
    per_sample: bool = False,
    **shared: Unpack[Shared],
) -> Tensor:
    r"""CalFocal: focal loss whose gamma is the exponential of the held-out calibration gap.

    The step on the way to `adafocal`: gamma has no memory, so it swings with the gaps, and is never negative.

    $$L = -(1 - p_y)^{\gamma} \log p_y, \qquad \gamma = \exp(\lambda (C_b - A_b))$$

    (Eq. 3), with $C_b$ and $A_b$ as in `adafocal`; or, by the example, $\gamma = \exp(\lambda (p_y - A_b))$ (Eq. 2).

    Args:
        n_bins: number M of bins, >= 1.
        update_rate: λ >= 0. With 0 it is `focal` with γ = 1.
        per_sample: False for a gamma per bin (Eq. 3), True for one per example (Eq. 2).

    Notes:
        Without held-out predictions, of all or of a bin, γ is 1. There is no authors' code for this loss.

    Example:
        >>> loss = calfocal(n_bins=2)
        >>> loss.update([0.6, 0.7, 0.8, 0.9], [0, 1, 0, 0])
        >>> loss.gammas.tolist()
        [12.18..., 8103.08...]
    """
    return focal_term(r.ce, r.table.gamma(r.p))


@loss(
    "CE, weighted by the held-out calibration gaps of p's bins and of the class",
    source="Lin et al. 2025 (BSCE-GRA), 5",
    module=GapTableLoss,
)
def ece_ce(r: Rows, *, n_bins: NumberOfBins = 15, **shared: Unpack[Shared]) -> Tensor:
    r"""ECE-CE: cross entropy weighted by the held-out calibration gaps of the example's bins and class.

    It weighs by how miscalibrated predictions like this one are, where `bsce_gra` weighs by how uncertain this
    one is. Needs a calibration split, like `adafocal`.

    $$L = -w \log p_y, \qquad w = (1 - t) + \frac{t}{3} (|g_b| + |g_m| + 2 g_y)$$

    with t the share of the training that is done, $g_b$ the gap of the equal-width bin of p_y, $g_m$ that of the
    equal-mass bin of its rank within the batch, and $g_y$ the class-wise calibration error of the label.

    Args:
        n_bins: number M of bins, >= 1.

    Notes:
        Before the first update it is cross entropy. w is a constant to the gradient, but its rank, that of the
        authors' code, depends on which examples stand together; of a batch with fewer examples than bins all have the
        last bin. The paper gives no formula. Bins are those of `adafocal`; p_y = 1 lies in none.

    Example:
        >>> loss = ece_ce(n_bins=2)
        >>> loss.update([0.6, 0.9], [1, 0], class_gaps=[0.1, 0.3], progress=1.0)
        >>> loss(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.2117)
    """
    return weighted(r.table.weight(r.p, r.labels), r.ce)
