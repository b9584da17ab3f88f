"""A map for each group of rows, such as the types of questions to a judge, drawn to the map of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted

from hf_calib._errors import check, few
from hf_calib.metrics.checks import FloatArray, IntArray, check_choice, check_draws, check_integer
from hf_calib.scaling import SCALERS
from hf_calib.scaling._base import LogitScaling, as_fitted_logits, softmax_in_place
from hf_calib.scaling.affine import AffineMap
from hf_calib.scaling.auto import CHOSEN_ON, ROUGHLY, mean_and_error, parts
from hf_calib.scaling.newton import LEFT_TO_GAIN, Ridges, Rows, ScaledLoss, fit_affine

BASES = ("temperature", "structured_vector", "vector")  # maps that do not mix the classes
_PENALTIES = (np.inf, 100.0, 10.0, 1.0, 0.1)  # from one map for all to the freest


class GroupedScaling(LogitScaling):
    r"""Give each group of rows its own scale and offset of each class, drawn to the map of all rows.

    $$\hat p = \mathrm{softmax}((1 + v_g) \odot m(z) + b_g), \qquad \min_{v_g, b_g} \mathrm{NLL}_g
      + \lambda \frac{C}{N_g} (|v_g|^2 + |b_g|^2)$$

    Args:
        base: the common map m: "temperature", "structured_vector", "vector", or "auto": the second rather than the
            first where its cross-validated loss is less by two standard errors.
        n_folds, random_state: as of `AutoScaling`.

    Attributes:
        groups_, sizes_: (G,) the names of the groups, in order, and the rows of each.
        weights_, biases_: (G + 1, C), of all rows, then of each group.
        choice_: λ, "penalty=1", or "one map for all"; with "auto" the common map first: "structured_vector, penalty=1".

    Notes:
        λ is the largest of infinity, 100, 10, 1 and .1 whose loss, cross-validated on at most 20,000 rows, is within
        one standard error of the best. Saved beside the model, `hf_calib.pipeline(...)(texts, group="law")` applies it.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(scale=2, size=(4000, 3))
    >>> groups = np.repeat(["art", "law"], 2000)
    >>> offsets = np.where(groups[:, None] == "law", [0, 0, 1.5], 0)  # the third answer is right more often
    >>> labels = (logits / 2 + offsets + rng.gumbel(size=(4000, 3))).argmax(axis=1)
    >>> scaler = GroupedScaling().fit(logits, labels, groups=groups)
    >>> scaler.groups_, round(float(scaler.biases_[2, 2]), 1)
    (['art', 'law'], 1.0)
    """

    def __init__(self, base: str = "auto", *, n_folds: int = 5, random_state: int = 0) -> None:
        self.base = base
        self.n_folds = n_folds
        self.random_state = random_state

    def fit(self, logits: ArrayLike, labels: ArrayLike, *, groups: ArrayLike) -> GroupedScaling:
        """Fit the common map, choose the ridge, and fit each group's; groups (N,) are words or integers."""
        check_choice("base", self.base, ("auto", *BASES))
        check_integer("n_folds", self.n_folds, 2, "5 is enough; more folds cost more fits")
        rows = Rows.checked(logits, labels)
        names = _as_groups(groups, len(rows))
        names, numbers, self.sizes_ = np.unique(names, return_inverse=True, return_counts=True)
        self.groups_, self.n_classes_ = names.tolist(), rows.logits.shape[1]
        base, penalty = self._chosen(rows, numbers + 1)
        choice = "one map for all" if penalty == np.inf else f"penalty={penalty:g}"
        self.choice_ = f"{base}, {choice}" if self.base == "auto" else choice
        maps = self._maps(rows, numbers + 1, penalty, _common(base, rows), LEFT_TO_GAIN)
        self.weights_, self.biases_ = (np.stack(each) for each in zip(*maps, strict=True))
        return self

    def transform(self, logits: ArrayLike, *, groups: ArrayLike | None = None) -> FloatArray:
        """Return the mapped logits (N, ..., C) in float64; unknown groups (N,), or none, get the common map."""
        check_is_fitted(self, "weights_")
        rows = as_fitted_logits(logits, self.n_classes_)
        maps = list(map(AffineMap, self.weights_, self.biases_))
        if groups is None:
            return maps[0](rows)
        known = {name: number for number, name in enumerate(self.groups_, 1)}
        numbers = np.array([known.get(name, 0) for name in _as_groups(groups, len(rows)).tolist()], np.intp)
        return _mapped(rows, numbers, maps)

    def predict_proba(self, logits: ArrayLike, *, groups: ArrayLike | None = None) -> FloatArray:
        """Return the calibrated probabilities in float64; arguments as of `transform`."""
        return softmax_in_place(self.transform(logits, groups=groups))

    def _chosen(self, rows: Rows, numbers: IntArray) -> tuple[str, float]:
        """The common map's method, and the penalty."""
        rng = check_draws(1, self.random_state, seed_name="random_state")
        if len(rows) > CHOSEN_ON:  # λ weighs the offsets of groups, not rows: a sample tells it, too
            sample = rng.choice(len(rows), CHOSEN_ON, replace=False)
            rows, numbers = rows[sample], numbers[sample]
        bases, n = BASES[:2] if self.base == "auto" else (self.base,), len(rows)
        if n < 2:
            return bases[0], np.inf
        splits = list(parts(rng.permutation(np.arange(n) % min(self.n_folds, n))))
        commons = {base: [_common(base, rows[train]) for train, _ in splits] for base in bases}

        def held_out(base: str, penalty: float) -> FloatArray:
            """The loss of each row under the maps of the other parts (N,)."""
            losses = np.empty(n)
            for (train, test), common in zip(splits, commons[base], strict=True):
                maps = self._maps(rows[train], numbers[train], penalty, common, ROUGHLY)
                losses[test] = rows[test].losses(_mapped(rows.logits[test], numbers[test], maps))
            return losses

        base = bases[0]
        if self.base == "auto":
            gain, error = mean_and_error(held_out(base, np.inf) - held_out(BASES[1], np.inf))
            base = BASES[gain > 2 * error]
        if len(self.groups_) == 1:
            return base, np.inf
        losses = np.stack([held_out(base, penalty) for penalty in _PENALTIES])
        best = losses[losses.mean(axis=1).argmin()]
        within = [difference <= error for difference, error in map(mean_and_error, losses - best)]
        return base, _PENALTIES[within.index(True)]

    def _maps(
        self, rows: Rows, numbers: IntArray, penalty: float, common: AffineMap, nats: float
    ) -> list[AffineMap]:
        """The common map, and that of each group, whose numbers start at 1; of groups without rows the common one."""
        maps = [common] * (len(self.groups_) + 1)
        mapped = rows.with_logits(common(rows.logits))
        for number in np.unique(numbers) if penalty < np.inf else ():
            own = mapped[numbers == number]
            ridge = penalty * self.n_classes_ / len(own)
            maps[number] = common.then(fit_affine(own, 1.0, Ridges(ridge, ridge), nats=nats))
        return maps


def _common(base: str, rows: Rows) -> AffineMap:
    """The map of all rows, with a weight and a bias for each class."""
    found = SCALERS[base].load()().solve(rows, ScaledLoss(rows).best_temperature())
    c = rows.logits.shape[1]
    return found.then(AffineMap(np.ones(c), np.zeros(c)))


def _mapped(logits: NDArray[Any], numbers: IntArray, maps: list[AffineMap]) -> FloatArray:
    """The logits of each row under the map of its number."""
    mapped = np.empty(logits.shape)
    for number in np.unique(numbers):
        own = numbers == number
        mapped[own] = maps[number](logits[own])
    return mapped


def _as_groups(groups: ArrayLike, n: int) -> NDArray[np.str_]:
    names = np.asarray(groups)
    way_out = "give one name for each row of the logits"
    check(names.shape == (n,), f"groups to have shape ({n},)", f"shape {names.shape}", way_out)
    got = f"dtype {names.dtype}" * (names.dtype.kind not in "Uiu")
    if names.dtype.kind == "O":
        got = few(sorted({type(name).__name__ for name in names if not isinstance(name, str | int)}))
    check(not got, "groups to hold words or integers", got, "name each group")
    return names.astype(str)
