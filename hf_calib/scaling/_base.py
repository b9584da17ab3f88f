"""The base class of calibrators, affine maps, and the logits that these take."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin

from hf_calib._errors import check
from hf_calib.metrics import checks
from hf_calib.metrics.checks import FloatArray, row_chunks
from hf_calib.scaling.saved_map import (
    MAP_NAME,
    Fitted,
    Parameters,
    load_pretrained,
    save_map,
)

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo
    from typing_extensions import Self

# A file with more classes would ask for more memory than any model's.
N_CLASSES = Fitted(low=2, high=1e6, kind=int)
# A matrix spreads the rounding of each logit to all, and that of a larger one drowns the others.
_LARGEST_MIXED = 1e12


class Scaler(ClassifierMixin, BaseEstimator):
    """Base class of all calibrators in `SCALERS`: a scikit-learn classifier that can be saved.

    The attributes that `fit` sets have names that end with "_"; these are saved.

    >>> import tempfile
    >>> from hf_calib.scaling import TemperatureScaling
    >>> logits = [[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]]
    >>> scaler = TemperatureScaling().fit(logits, [0, 0, 0, 0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     scaler.save_pretrained(folder)
    ...     Scaler.from_pretrained(folder).predict_proba([[4.0, 0.0]]).round(2)
    array([[0.75, 0.25]])
    """

    # The parameters; that of C is first.
    _fitted: ClassVar[Parameters] = {}
    multi_label = False
    predict_proba: Callable[[ArrayLike], FloatArray]

    def predict(self, logits: ArrayLike) -> NDArray[np.int64]:
        """Return the likeliest class of each row, or with `multi_label` 0 or 1 for each label."""
        probs = self.predict_proba(logits)
        if self.multi_label:
            return (probs > 0.5).astype(np.int64)
        return probs.argmax(axis=-1)

    @property
    def classes_(self) -> NDArray[np.int64]:
        """The class indices 0..C-1, once the calibrator is fitted."""
        # Which of them a calibrator has depends on what it fits.
        for name in ("n_classes_", "_n_seen", "bias_", "temperatures_"):
            found = getattr(self, name, None)
            if found is not None:
                return np.arange(found if isinstance(found, int) else len(found))
        raise AttributeError(f"{type(self).__name__} does not know its classes")

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:  # noqa: N803, the name of scikit-learn
        """Return the settings and, once fitted, the parameters; of arrays the ends."""
        settings = super().__repr__(N_CHAR_MAX)
        found = {name: getattr(self, name, None) for name in self._fitted}
        if not found or any(value is None for value in found.values()):
            return settings
        with np.printoptions(precision=4, threshold=6, edgeitems=2):
            shown = [f"{name}={_in_short(value)}" for name, value in found.items()]
        return f"{settings} with {', '.join(shown)}"

    def _check_settings(self) -> None:
        """Raise unless `fit` takes these settings, which a file may have too."""
        checks.check_flag("multi_label", self.multi_label)

    def _is_sound(self) -> bool:
        """Whether parameters of the right kinds, shapes and ranges belong to one fit."""
        return True

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Save the fitted calibrator to a new folder, or beside its model for a pipeline."""
        save_map(self, Path(folder) / MAP_NAME)

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> Self:
        """Load a calibrator of this class from a folder or the Hub; with `Scaler`, of any class."""
        scaler = load_pretrained(name, revision=revision, token=token).scaler
        other = type(scaler).__name__
        requirement = f"{name} to hold a {cls.__name__}"
        way_out = (
            f"use {other}.from_pretrained, or Scaler.from_pretrained for any of them"
        )
        check(isinstance(scaler, cls), requirement, f"a {other}", way_out)
        return scaler

    def push_to_hub(self, repo_id: str, **where: Any) -> CommitInfo:
        """Push the fitted calibrator to a new repository, or to that of a model.

        Args:
            where: `revision`, `token`, `private` and `create_pr`.
        """
        from hf_calib._hub import Destination, push_files

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            files = {MAP_NAME: Path(folder) / MAP_NAME}
            to = Destination(repo_id, **where)
            message = f"Add {type(self).__name__}"
            return push_files(files, to, message=message)  # type: ignore[return-value]


def _in_short(value: Any) -> str:
    """A parameter in a line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    line = " ".join(str(value).split())
    return line if len(line) <= 100 else f"{line[:97]}..."


class AffineMap(NamedTuple):
    r"""The map weight z + bias of logits z in float64, which `hf_calib.fold` writes into a head.

    Args:
        weight: () or (C,), which multiplies the logits and keeps masked classes masked; or (C, C),
            which mixes them and is not defined for masked classes.
        bias: (C,), or None.

    >>> double = AffineMap(np.array(2.0))
    >>> shifted = double.then(AffineMap(np.array([1.0, 1.0]), np.array([0.0, 0.5])))
    >>> shifted([[1.0, 0.0]])
    array([[2. , 0.5]])
    """

    weight: FloatArray
    bias: FloatArray | None = None

    def __call__(self, logits: ArrayLike) -> FloatArray:
        """Return the mapped logits, a new array; the shape of the logits must end in C."""
        mapped = np.array(logits, dtype=np.float64)
        if self.weight.ndim == 2:
            refuse_masks(mapped)
            mapped = mapped @ self.weight.T
        elif (self.weight > 0).all():
            mapped *= self.weight
        else:
            # The product of -inf with this weight would not mask the class.
            masked = np.isneginf(mapped)
            mapped[masked] = 0
            mapped *= self.weight
            mapped[masked] = -np.inf
        if self.bias is not None:
            mapped += self.bias
        return mapped

    def then(self, following: AffineMap) -> AffineMap:
        """Return the composition of this map and a following map."""
        own = self.weight
        other = following.weight
        # A vector is the diagonal of a matrix, so a matrix of either map makes the weight a matrix.
        if own.ndim == other.ndim == 2:
            weight = other @ own
        elif own.ndim == 2 and other.ndim == 1:
            weight = other[:, None] * own
        else:
            weight = np.asarray(other * own)
        bias = following.bias if self.bias is None else following(self.bias)
        return AffineMap(weight, bias)


def softmax_in_place(logits: FloatArray) -> FloatArray:
    """Replace logits by probabilities along the last axis, in place."""
    largest = logits.max(axis=-1, keepdims=True)
    bare = np.isneginf(largest)
    got = f"-inf for every class in {bare.sum()} of {bare.size} rows"
    check(
        not bare.any(), "logits to allow at least one class", got, "mask fewer classes"
    )
    # Exponentials of at most 0 do not overflow.
    logits -= largest
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=-1, keepdims=True)
    return logits


def blocks(logits: NDArray[Any]) -> Iterator[tuple[slice, FloatArray]]:
    """Iterate over blocks of rows of an (N, C) array, each converted to float64."""
    for rows in row_chunks(*logits.shape):
        yield rows, logits[rows].astype(np.float64)


def as_logits(logits: ArrayLike) -> NDArray[Any]:
    """Check logits of any shape that ends in the classes. -inf is allowed and masks a class."""
    logits = checks.as_array("logits", logits)
    checks.check_kind(
        logits, "fiu", "logits to hold real numbers", "pass an array of floats"
    )
    holds = logits.ndim > 0 and logits.size > 0
    check(
        holds,
        "logits to hold at least one example",
        f"shape {logits.shape}",
        "pass an (N, C) array",
    )
    rows = logits.reshape(-1, logits.shape[-1])
    # The comparison is False for NaN, which is the largest number of its row. Rows are counted
    # only for the message, since the one largest number takes much less time.
    fine = rows.max() < np.inf
    bad = 0 if fine else np.count_nonzero(~(rows.max(axis=1) < np.inf))
    got = f"NaN or +inf in {bad} of {len(rows)} rows"
    check(
        not bad,
        "logits to be finite (or -inf for a masked class)",
        got,
        "check the model's output",
    )
    return logits


def as_fitted_logits(logits: ArrayLike, n_classes: int) -> FloatArray:
    """Check logits of any shape that ends in the classes seen in `fit`; return a float64 copy."""
    wide = as_logits(logits).astype(np.float64)
    requirement = f"logits to have the {n_classes} classes of fit"
    check(
        wide.shape[-1] == n_classes,
        requirement,
        f"shape {wide.shape}",
        "use those of the fitted model",
    )
    return wide


def refuse_masks(logits: NDArray[Any]) -> None:
    """Raise if a class is masked, because a map that mixes the classes would mask all of them."""
    masked = n_masked(logits)
    got = f"{masked} of -inf, or beyond {_LARGEST_MIXED:g}"
    way_out = (
        "use VectorScaling or TemperatureScaling, which keep masked classes masked"
    )
    check(not masked, "logits to be finite, as the classes are mixed", got, way_out)


def n_masked(logits: NDArray[Any]) -> int:
    """The number of logits that are -inf or stand for it, such as the lowest number of a dtype."""
    rows = logits.reshape(-1, logits.shape[-1])
    return sum(
        int(np.count_nonzero(np.abs(block) > _LARGEST_MIXED))
        for _, block in blocks(rows)
    )
