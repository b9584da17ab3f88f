# mypy: disable-error-code="no-untyped-def"
"""Losses that adapt to held-out predictions: AdaFocal, AdaDualFocal, CalFocal, ECE-CE.

Each loss has a table of bins, which `update` fits and the formula reads.
"""

from __future__ import annotations

import math
import sys
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_calib._errors import check, few
from hf_calib.losses.arithmetic import (
    at_most,
    constant,
    exp,
    expm1,
    look_up,
    number_or_zero,
    where,
)
from hf_calib.losses.loss import loss
from hf_calib.losses.pointwise import (
    dual_focal_term,
    focal_term,
    warn_of_inverse_gamma,
)
from hf_calib.losses.ranges import (
    NonNegative,
    NonPositive,
    Number,
    NumberOfBins,
    UpperLimit,
)
from hf_calib.losses.statistics.definitions import Counts, Labels, Rival
from hf_calib.losses.tables import TableLoss

# The limit if none is set. Far above it float32 is infinite, and infinity times 0 is NaN.
LARGEST_GAMMA = 1e30
PASSES_BEFORE_WARNING = 100
_ROUNDING = 1e-6  # A table may have been saved in float32.
LOG_NAMES = {
    "gammas": "gamma",
    "gaps": "calibration_gap",
    "edges": "edge",
    "counts": "count",
}


class AdaptiveLoss(TableLoss):
    """A loss with a table that `update` fits to held-out predictions.

    The table stays on the CPU in float64 when the loss is moved, so it is the same on every device
    and in every checkpoint. All these losses have the `edges` (M + 1,), `gaps` (M,) and
    `accuracies` (M,) of the bins, and their `counts` (M,), which are not saved.
    """

    edges: Tensor
    gaps: Tensor
    accuracies: Tensor

    def _make_table(self) -> None:
        self._passes_without_update = 0.0
        edges = torch.linspace(0, 1, self._values["n_bins"] + 1, dtype=torch.float64)
        bins = _in_bins(edges, edges[:0], edges[:0])
        for name, values in (bins | self._at_first(bins["gaps"])).items():
            self.register_buffer(name, values, persistent=name != "counts")

    @abstractmethod
    def _at_first(self, zeros: Tensor) -> dict[str, Tensor]:
        """The entries of the table other than its M bins, before the first update; zeros has shape
        (M,)."""

    @abstractmethod
    def _fitted(
        self,
        gaps: Tensor,
        predictions: tuple[Tensor, Tensor],
        *,
        class_gaps: Any,
        progress: Any,
    ) -> dict[str, Tensor]:
        """These entries after an update with held-out predictions, which have the gaps (M,)."""

    def forward(self, logits: Any, labels: Tensor, **kwargs: Any) -> Tensor:
        """Compute the loss as in `CalibrationLoss.forward`; warn once if nothing updates the
        table."""
        loss = super().forward(logits, labels, **kwargs)
        if loss.requires_grad and not torch.compiler.is_compiling():
            self._passes_without_update += 1
            if self._passes_without_update == PASSES_BEFORE_WARNING:
                message = f"{self.name!r} has trained for {PASSES_BEFORE_WARNING} batches without an update, so it "
                message += "has not adapted yet. Call its update() with held-out predictions after each epoch or more "
                message += "often, or use CalibrationTrainer or AdaFocalCallback."
                warnings.warn(message, stacklevel=4)
        return loss

    def expect_updates(self) -> None:
        """Do not warn that the table is not updated: a callback or a later step of the loop does
        it."""
        self._passes_without_update = -math.inf

    @torch.no_grad()
    def update(
        self,
        confidences: Any,
        correct: Any,
        *,
        class_gaps: Any = None,
        progress: Any = None,
    ) -> None:
        """Fit the table to held-out predictions, which must not be those of the reported metrics.

        Args:
            confidences: (N,) probabilities of the predicted class, in [0, 1].
            correct: (N,) bool or 0/1, whether the predicted class is correct.
            class_gaps: (C,) calibration error of each class. Only `ece_ce` needs it and `progress`.
            progress: fraction of the training that is done, in [0, 1]; at 0 `ece_ce` is cross
                entropy.
        """
        predictions = _on_cpu(confidences), _on_cpu(correct)
        _check_predictions(*predictions)
        bins = _in_bins(
            _equal_masses(predictions[0], self._values["n_bins"]), *predictions
        )
        fitted = self._fitted(
            bins["gaps"], predictions, class_gaps=class_gaps, progress=progress
        )
        for name, values in (bins | fitted).items():
            setattr(self, name, values)
        self.expect_updates()

    def _limits(self) -> dict[str, tuple[float, float]]:
        """The least and the largest value of each buffer in any table that an update can write."""
        return {"edges": (0.0, 1.0), "gaps": (-1.0, 1.0), "accuracies": (0.0, 1.0)}

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any
    ) -> None:
        saved = {}
        for name in self._limits():
            tensor = state_dict.get(prefix + name)
            # PyTorch itself names what is missing or is not a tensor.
            if isinstance(tensor, Tensor):
                self._check_saved(name, tensor)
                saved[name] = tensor
        for name, tensor in saved.items():
            # The number of classes is known only after the first update.
            if tensor.shape != self.get_buffer(name).shape:
                setattr(self, name, torch.zeros(tensor.shape, dtype=torch.float64))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if bool(self.accuracies.isfinite().any()):  # It is the table of an update.
            self.expect_updates()

    def _check_saved(self, name: str, saved: Tensor) -> None:
        """Raise unless an update of this loss can have written this buffer."""
        own = self.get_buffer(name)
        low, high = self._limits()[name]
        kind = "rising numbers" if name == "edges" else "numbers"
        requirement = f"{name} of the saved table of {self.name} to have shape {tuple(own.shape)} "
        requirement += f"and {kind} in [{low:g}, {high:g}]"
        way_out = f"load the table of a loss with {self.hyperparameters}"
        fits = saved.shape == own.shape or (name == "class_gaps" and saved.dim() == 1)
        fits = fits and saved.is_floating_point()
        check(fits, requirement, f"shape {tuple(saved.shape)}, {saved.dtype}", way_out)
        inside = (saved >= low - _ROUNDING) & (saved <= high + _ROUNDING)
        if name == "accuracies":  # That of an empty bin is NaN.
            inside |= saved.isnan()
        if name == "edges":
            inside[1:] &= saved.diff() >= 0
        outside = few(saved[~inside].tolist())
        check(bool(inside.all()), requirement, outside, way_out)

    def log_values(self) -> dict[str, float]:
        """Return the table as numbers to log: `calibration_gap_00`, ..., `edge_00`, ... and so
        on."""
        found = {}
        for name, shown in LOG_NAMES.items():
            if name in self._buffers:
                for i, value in enumerate(self.get_buffer(name).tolist()):
                    found[f"{shown}_{i:02d}"] = value
        return found

    def _bins(self) -> tuple[Tensor, Tensor]:
        edges, values = self._sources()
        return edges[1:-1], values

    def _apply(self, fn: Any, recurse: bool = True) -> AdaptiveLoss:
        """Apply `.to()`, `.half()` and similar methods to the weights of classes and labels only,
        not to the table."""
        table = {
            name: self._buffers.pop(name)
            for name in [*self._buffers]
            if name not in ("class_weights", "pos_weight")
        }
        super()._apply(fn, recurse)
        self._buffers |= table
        return self


class AdaFocalLoss(AdaptiveLoss):
    """The update gamma * exp(+-lambda * gap), which changes sign at +-switch, within [gamma_min,
    gamma_max]."""

    gammas: Tensor

    def _sources(self) -> tuple[Tensor, ...]:
        return self.edges, self.gammas

    def _at_first(self, zeros: Tensor) -> dict[str, Tensor]:
        return {"gammas": zeros + self._values.get("gamma_init", 1.0)}

    def _fitted(
        self, gaps: Tensor, predictions: tuple[Tensor, Tensor], **given: Any
    ) -> dict[str, Tensor]:
        switch = self._values.get("switch", 0.0)
        # With a gamma near 0 the loss is cross entropy, and the bin switches to the other loss. At
        # exactly 0 the paper's Algorithm 1 takes the focal branch and switches; the paper's code
        # would remain focal.
        sign = torch.ones_like(gaps).where(self.gammas >= 0, -1)
        grown = self.gammas * torch.exp(self._values["update_rate"] * sign * gaps)
        crossed = -switch * sign
        gammas = torch.where(grown.abs() < switch, crossed, grown)
        return {"gammas": gammas.clamp(*self._limits()["gammas"])}

    def _limits(self) -> dict[str, tuple[float, float]]:
        least = self._values.get("gamma_min", 0.0)
        largest = min(self._values.get("gamma_max", math.inf), LARGEST_GAMMA)
        return super()._limits() | {"gammas": (least, largest)}


class CalFocalLoss(AdaFocalLoss):
    """The update gamma = exp(lambda * gap), without memory; for a gamma per sample the formula
    reads accuracies."""

    def _sources(self) -> tuple[Tensor, ...]:
        per_sample = self._values["per_sample"]
        return self.edges, self.accuracies if per_sample else self.gammas

    def _fitted(
        self, gaps: Tensor, predictions: tuple[Tensor, Tensor], **given: Any
    ) -> dict[str, Tensor]:
        gammas = torch.exp(self._values["update_rate"] * gaps)
        return {"gammas": gammas.clamp(max=LARGEST_GAMMA)}


class GapTableLoss(AdaptiveLoss):
    """A weight that moves with `progress` from 1 to the mean of three gaps; `bin_gaps` are of
    equal-width bins."""

    bin_gaps: Tensor
    class_gaps: Tensor

    def _at_first(self, zeros: Tensor) -> dict[str, Tensor]:
        return {
            "bin_gaps": zeros.clone(),
            "class_gaps": zeros[:0],
            "progress": zeros.new_zeros(()),
        }

    def _fitted(
        self,
        gaps: Tensor,
        predictions: tuple[Tensor, Tensor],
        *,
        class_gaps: Any,
        progress: Any,
    ) -> dict[str, Tensor]:
        is_given = class_gaps is not None and progress is not None
        requirement = f"class_gaps and progress to be given to {self.name}"
        got = f"class_gaps={class_gaps}, progress={progress}"
        check(is_given, requirement, got, "pass both")
        done = _on_cpu(progress)
        is_share = bool(0 <= done <= 1)
        way_out = "pass epochs done / epochs in all"
        check(is_share, "progress to be in [0, 1]", progress, way_out)
        of_class = _on_cpu(class_gaps)
        fits = of_class.dim() == 1 and len(of_class) > 0
        fits = fits and bool(of_class.isfinite().all())
        requirement = "class_gaps to be (C,) finite numbers"
        check(fits, requirement, of_class.tolist(), "pass one per class")
        edges = torch.linspace(0, 1, len(gaps) + 1, dtype=torch.float64)
        edges[0] = -1  # a confidence of 0 is in the first bin
        bin_gaps = _in_bins(edges, *predictions)["gaps"]
        return {"bin_gaps": bin_gaps, "class_gaps": of_class, "progress": done}

    def _limits(self) -> dict[str, tuple[float, float]]:
        finite = (-sys.float_info.max, sys.float_info.max)
        own = {"bin_gaps": (-1.0, 1.0), "class_gaps": finite, "progress": (0.0, 1.0)}
        return super()._limits() | own

    def _check_number_of_classes(self, n_classes: int) -> None:
        super()._check_number_of_classes(n_classes)
        got = len(self.class_gaps)
        requirement = "class_gaps to have one entry for each class of the logits"
        way_out = "update the loss with those of its own model"
        check(got in (0, n_classes), requirement, got, way_out)

    def arguments(self, ce: Tensor) -> dict[str, Any]:
        return {"table": self, **self._values}

    def weight(self, p: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        """The weights (N,) of the examples of one batch with probabilities p of their labels
        (N,)."""
        if len(self.class_gaps) == 0:
            return torch.ones_like(p)
        n_bins = len(self.bin_gaps)
        last = n_bins - 1
        bin_index = (p * n_bins).long().clamp(max=last)
        bin_gap = self._like("bin_gaps", p)[bin_index] * (p < 1)
        # Ignored rows have p = 1 and come last.
        rank = p.argsort(stable=True).argsort()
        size = counts.sum().long() // n_bins
        mass_index = torch.where(size > 0, rank // size.clamp_min(1), last)
        mass_gap = self._like("gaps", p)[mass_index.clamp(max=last)]
        class_gap = self._like("class_gaps", p)[labels]
        progress = self._like("progress", p)
        gaps = bin_gap.abs() + mass_gap.abs() + 2 * class_gap.abs()
        return 1 - progress + progress * gaps / 3

    def _like(self, name: str, tensor: Tensor) -> Tensor:
        """A buffer with the tensor's device and dtype; the host does not wait for the copy."""
        buffer = self.get_buffer(name).to(tensor.dtype)
        return buffer.to(tensor.device, non_blocking=True)


def _equal_masses(confidences: Tensor, n_bins: int) -> Tensor:
    """The edges (M + 1,), interpolated between the sorted confidences (N,) as in the papers'
    code."""
    ordered = confidences.sort().values
    last = len(ordered) - 1
    position = torch.arange(n_bins + 1, dtype=torch.float64) * (len(ordered) / n_bins)
    low = position.floor().long().clamp(max=last)
    high = (low + 1).clamp(max=last)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _in_bins(edges: Tensor, confidences: Tensor, correct: Tensor) -> dict[str, Tensor]:
    """Counts, gaps (mean confidence minus accuracy; 0 if empty) and accuracies (NaN if empty) of
    bins (low, high]."""
    # Duplicate edges give an empty bin.
    index = torch.searchsorted(edges, confidences) - 1
    inside = index >= 0
    added = torch.stack([torch.ones_like(confidences), confidences, correct])[:, inside]
    counts, of_confidence, of_correct = edges.new_zeros(3, len(edges) - 1).index_add_(
        1, index[inside], added
    )
    gaps = (of_confidence - of_correct) / counts.clamp_min(1)
    return {
        "edges": edges,
        "counts": counts,
        "gaps": gaps,
        "accuracies": of_correct / counts,
    }


def _on_cpu(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()


def _check_predictions(confidences: Tensor, correct: Tensor) -> None:
    fits = confidences.dim() == 1 and len(confidences) > 0
    fits = fits and confidences.shape == correct.shape
    got = f"{tuple(confidences.shape)} and {tuple(correct.shape)}"
    requirement = "confidences and correct to be two (N,) vectors, N >= 1"
    check(fits, requirement, got, "pass one entry per held-out example")
    for name, values in (("confidences", confidences), ("correct", correct)):
        # This is also True for NaN.
        outside = ~((values >= 0) & (values <= 1))
        row = int(outside.int().argmax())
        got = f"{values[row].item()} in row {row} ({int(outside.sum())} such)"
        way_out = "pass probabilities, not logits; NaN means the model's logits are NaN"
        check(not outside.any(), f"{name} to be in [0, 1]", got, way_out)


def _check_gammas(
    *,
    gamma_init: float,
    gamma_max: float,
    gamma_min: float = 0.0,
    switch: float = 0.0,
    **others: Any,
) -> None:
    way_out = "widen the gammas' range"
    fits = gamma_min <= -switch and switch <= gamma_max
    got = f"gamma_min={gamma_min}, gamma_max={gamma_max}, switch={switch}"
    check(fits, "switch to lie within -gamma_min and gamma_max", got, way_out)
    fits = gamma_min <= gamma_init <= min(gamma_max, LARGEST_GAMMA)
    requirement = "gamma_init to lie in [gamma_min, gamma_max]"
    check(fits, requirement, gamma_init, way_out)
    warn_of_inverse_gamma(-gamma_min)


@loss(
    source="Ghosh et al. 2022 (AdaFocal), Algorithm 1 and appendix N",
    multi_label=True,
    module=AdaFocalLoss,
    check=_check_gammas,
)
def adafocal(
    ce,
    *,
    table,
    n_bins: NumberOfBins = 15,
    update_rate: NonNegative = 1.0,
    gamma_init: Number = 1.0,
    gamma_max: UpperLimit = 20.0,
    gamma_min: NonPositive = -2.0,
    switch: NonNegative = 0.2,
):
    r"""AdaFocal: focal loss with a gamma per confidence bin,
    fitted to held-out predictions during training.

    The gamma of a bin grows if its held-out predictions are over-confident, and falls if they are
    under-confident. Unlike `focal`, the loss has no gamma to choose, but it needs a calibration
    split.

    $$L = \begin{cases} -(1 - p_y)^{\gamma} \log p_y & \gamma \ge 0 \\
        -(1 + p_y)^{|\gamma|} \log p_y & \gamma < 0 \end{cases} \qquad
        \gamma_b \leftarrow \gamma_b \exp(\pm\lambda (C_b - A_b))$$

    where $C_b$ is the mean held-out confidence and $A_b$ the accuracy of bin b; the sign is that of
    $\gamma_b$.

    Args:
        n_bins: number M of bins, >= 1, with equally many held-out predictions; p_y selects the bin.
            As in the authors' code, bins are (low, high] in the update, without the smallest
            confidence, and [low, high) in training.
        update_rate: λ >= 0.
        gamma_init: γ of all bins before the first update, in [gamma_min, gamma_max].
        gamma_max: upper limit of γ, >= switch; `math.inf` for no limit (in files "inf"), as in
            appendix N.3.
        gamma_min: lower limit of γ, <= -switch. It warns below -3.59; below -21 float16 gradients
            may be infinite.
        switch: S_th >= 0. A bin with |γ| < S_th switches to the other loss, and its γ becomes
            ∓S_th.

    Example:
        >>> loss = adafocal(n_bins=2)
        >>> loss.update([0.6, 0.7, 0.8, 0.9], [0, 1, 0, 0])
        >>> loss.gammas.tolist()  # Both bins are over-confident, so both gammas grow.
        [1.28..., 2.45...]
    """
    log_p = -ce
    rest = -expm1(log_p)
    gamma = look_up(table, exp(log_p))
    if table.least >= 0:
        return focal_term(ce, log_p, rest, gamma)
    base = where(gamma < 0, 2 - rest, rest)  # 1 + p or 1 - p
    return focal_term(ce, log_p, base, abs(gamma))


@loss(
    source="Tao et al. 2023 (DFL), 5.2",
    reads=lambda **_: [Rival("next")],
    module=AdaFocalLoss,
    check=_check_gammas,
)
def ada_dual_focal(
    ce,
    q,
    *,
    table,
    n_bins: NumberOfBins = 15,
    update_rate: NonNegative = 2.0,
    gamma_init: NonNegative = 6.0,
    gamma_max: UpperLimit = 20.0,
):
    r"""AdaDualFocal: dual focal loss with a gamma per bin of the label's margin over its rival.

    It adapts like `adafocal`, with the same $C_b$ and $A_b$, but gamma and weight depend on the
    margin p_y - q_j of `dual_focal`, and gamma is never negative.

    $$L = -(1 - p_y + q_j)^{\gamma_b} \log p_y, \qquad \gamma_b \leftarrow \gamma_b \exp(\lambda
    (C_b - A_b))$$

    Args:
        n_bins: number M of bins, >= 1. As in the authors' code, the margin selects a bin of
            held-out confidences:
            every margin below the second edge is in the first bin.
        update_rate: λ >= 0.
        gamma_init: γ of all bins before the first update, in [0, gamma_max]. The authors' γ and λ
            on CIFAR-10: 6 and 2 (ResNet-50, the defaults), 7 and 2 (ResNet-110), 6 and 1
            (DenseNet-121), 5 and 0.1 (Wide ResNet).
        gamma_max: upper limit of γ, >= 0; `math.inf` for no limit.

    Example:
        >>> loss = ada_dual_focal(n_bins=2)
        >>> loss.update([0.6, 0.7, 0.8, 0.9], [0, 1, 0, 0])
        >>> loss.gammas.tolist()
        [9.89..., 20.0]
    """
    log_p = -ce
    base = q - expm1(log_p)  # 1 - p + q
    # The margin p - q selects the bin.
    gamma = look_up(table, 1 - base)
    return dual_focal_term(ce, log_p, base, gamma)


@loss(source="Ghosh et al. 2022 (AdaFocal), Eq. 3 and Eq. 2", module=CalFocalLoss)
def calfocal(
    ce,
    *,
    table,
    n_bins: NumberOfBins = 15,
    update_rate: NonNegative = 10.0,
    per_sample: bool = False,
):
    r"""CalFocal: focal loss whose gamma is the exponential of the held-out calibration gap.

    The paper's intermediate step towards `adafocal`, with the same $C_b$ and $A_b$. Gamma has no
    memory, so it varies with the gaps; it is never negative. The authors published no code for it.

    $$L = -(1 - p_y)^{\gamma} \log p_y, \qquad \gamma = \exp(\lambda (C_b - A_b))
        \quad\text{or}\quad \exp(\lambda (p_y - A_b))$$

    Args:
        n_bins: number M of bins, >= 1.
        update_rate: λ >= 0. With λ = 0, and in bins without held-out predictions, γ is 1.
        per_sample: False for a gamma per bin (Eq. 3), True for one per example (Eq. 2).

    Example:
        >>> loss = calfocal(n_bins=2)
        >>> loss.update([0.6, 0.7, 0.8, 0.9], [0, 1, 0, 0])
        >>> loss.gammas.tolist()
        [12.18..., 8103.08...]
    """
    log_p = -ce
    rest = -expm1(log_p)
    p = constant(exp(log_p))
    found = look_up(table, p)
    if per_sample:
        # The accuracy of an empty bin is NaN.
        gap = number_or_zero(p - found)
        found = at_most(exp(update_rate * gap), LARGEST_GAMMA)
    return focal_term(ce, log_p, rest, found)


@loss(
    source="Lin et al. 2025 (BSCE-GRA), 5",
    reads=lambda n_bins: [Labels(), Counts()],
    few_operations=True,
    needs_all_rows=True,
    module=GapTableLoss,
)
def ece_ce(
    ce: Tensor,
    labels: Tensor,
    counts: Tensor,
    *,
    table,
    n_bins: NumberOfBins = 15,
):
    r"""ECE-CE: cross entropy weighted by the held-out calibration gaps of the example's bins and
    class.

    The weight is the miscalibration of similar predictions; that of `bsce_gra` is the uncertainty
    of the prediction itself. Like `adafocal`, the loss needs a calibration split; before the first
    update it is cross entropy.

    $$L = -w \log p_y, \qquad w = (1 - t) + \frac{t}{3} (|g_b| + |g_m| + 2 g_y)$$

    where t is the fraction of the training that is done, $g_b$ the gap of the equal-width bin of
    p_y, $g_m$ that of the equal-mass bin of its rank in the batch, and $g_y$ the classwise
    calibration error of the label.

    Args:
        n_bins: number M of bins, >= 1, as in `adafocal`; p_y = 1 is in no bin. The rank is that of
            the authors' code (the paper has no formula): in a batch with fewer examples than bins,
            all are in the last bin.

    Example:
        >>> loss = ece_ce(n_bins=2)
        >>> loss.update([0.6, 0.9], [1, 0], class_gaps=[0.1, 0.3], progress=1.0)
        >>> loss(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.2117)
    """
    weight = table.weight(torch.exp(-ce.detach()), labels, counts)
    # 0 times an infinite cross entropy would be NaN.
    return weight * ce.masked_fill(weight == 0, 0), weight, 0.0, 0.0
