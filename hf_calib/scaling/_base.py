"""Base classes of the scalers, and the softmax in place."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin

from hf_calib._errors import check, few
from hf_calib.scaling._inputs import FloatArray, as_logits
from hf_calib.scaling.methods import is_multi_label

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo
    from typing_extensions import Self

_LARGEST_MIXED = 1e12  # a matrix spreads the rounding of each logit to all


class Scaler(ClassifierMixin, BaseEstimator):
    """A post-hoc scaler: `fit(logits, labels)`, `predict_proba(logits)`, and a folder or repository to keep it in.

    The base class of all in `SCALERS`. As every classifier of scikit-learn it has `predict`, `score` (the accuracy) and
    `classes_`. What `fit` finds is in attributes whose names end with "_"; these are what is saved.

    The arguments of `fit`, in all of them, are logits (N, C) of any real dtype, read in float64, where -inf masks a
    class that is not the label; labels (N,) int in [0, C) without -100, or, with several labels a row, (N, C) of 0 and
    1, and -100 where a label is not known; and sample_weight (N,) of at least 0 where a scaler takes weights: None
    counts every row once. It returns the scaler. The other methods take logits of any shape that ends in C.

    >>> import numpy as np, tempfile
    >>> from hf_calib.scaling import TemperatureScaling
    >>> scaler = TemperatureScaling().fit([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]], [0, 0, 0, 0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     scaler.save_pretrained(folder)
    ...     Scaler.from_pretrained(folder).predict_proba([[4.0, 0.0]]).round(2)
    array([[0.75, 0.25]])
    """

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        raise NotImplementedError

    def predict(self, logits: ArrayLike) -> NDArray[np.int64]:
        """The number of the most probable class of each row; with several labels a row 0 or 1 for each."""
        probs = self.predict_proba(logits)
        return (probs > 0.5).astype(np.int64) if is_multi_label(self) else probs.argmax(axis=-1)

    @property
    def classes_(self) -> NDArray[np.int64]:
        """The numbers of the classes, 0..C-1, once it is fitted."""
        for name in ("n_classes_", "_n_seen", "bias_", "temperatures_"):
            found = getattr(self, name, None)
            if found is not None:
                return np.arange(found if isinstance(found, int) else len(found))
        raise AttributeError(f"{type(self).__name__} does not know its classes")

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the fitted scaler into a folder, new or that of its model, where `hf_calib.pipeline` finds it."""
        from hf_calib.scaling.saved_map import MAP_NAME, save_map  # here, because it imports the scalers

        save_map(self, Path(folder) / MAP_NAME)

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], *, revision: str | None = None, token: str | bool | None = None
    ) -> Self:
        """Load a fitted scaler, bit for bit, of this class (`Scaler`: of any); nothing in its files is run.

        Args:
            name: a folder, or a repository on the Hub such as "me/my-model"; a folder of that name goes first.
            revision: branch, tag or commit of a repository.
            token: for the Hub; None uses the stored one.
        """
        from hf_calib.scaling import saved_map  # here, because it imports the scalers

        scaler = saved_map.load_pretrained(name, revision=revision, token=token).scaler
        other = type(scaler).__name__
        way_out = f"use {other}.from_pretrained, or Scaler.from_pretrained for any of them"
        check(isinstance(scaler, cls), f"{name} to hold a {cls.__name__}", f"a {other}", way_out)
        return scaler

    def push_to_hub(self, repo_id: str, **where: Any) -> CommitInfo:
        """Add the fitted scaler to a model's repository on the Hub, or to a new one, in one commit.

        Args:
            repo_id: such as "me/my-model"; made where there is none.
            **where: revision, token, private and create_pr, as of `huggingface_hub.HfApi`; None, or False, by default.
        """
        from hf_calib._hub import push_files

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            paths = [path for path in Path(folder).rglob("*") if path.is_file()]
            files = {path.relative_to(folder).as_posix(): path for path in paths}
            pushed: Any = push_files(files, repo_id, message=f"Add {type(self).__name__}", **where)
        return pushed


class LogitScaling(Scaler):
    """A scaler whose probabilities are the softmax of the logits that it maps to or, with `multi_label`, sigmoids."""

    multi_label = False

    def transform(self, logits: ArrayLike) -> FloatArray:
        raise NotImplementedError

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return the calibrated probabilities, of the shape of the logits, in float64."""
        scaled = self.transform(logits)
        return expit(scaled, out=scaled) if self.multi_label else softmax_in_place(scaled)


def softmax_in_place(logits: FloatArray) -> FloatArray:
    """Turn logits into probabilities along the last axis; no second array is made."""
    largest = logits.max(axis=-1, keepdims=True)
    n_bare = np.count_nonzero(np.isneginf(largest))
    got = f"-inf for every class in {n_bare} rows"
    check(not n_bare, "logits to allow at least one class", got, "mask fewer classes")
    logits -= largest
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=-1, keepdims=True)
    return logits


def as_fitted_logits(logits: ArrayLike, n_classes: int) -> FloatArray:
    """Check logits of any shape that ends in the classes seen in `fit`; return a float64 copy."""
    checked = as_logits(logits)
    requirement = f"logits to have the {n_classes} classes of fit"
    way_out = "pass the logits of the model it was fitted on"
    check(checked.shape[-1] == n_classes, requirement, f"shape {checked.shape}", way_out)
    return checked.astype(np.float64)


def refuse_masks(logits: NDArray[Any]) -> None:
    """Raise if a class is masked: a map that mixes the classes would mask all of them."""
    masked = n_masked(logits)
    got = f"{masked} of -inf, or beyond {_LARGEST_MIXED:g}"
    way_out = "use VectorScaling or TemperatureScaling, which keep masked classes masked"
    check(not masked, "logits to be finite, as the classes are mixed", got, way_out)


def n_masked(logits: NDArray[Any]) -> int:
    """How many logits are -inf, or so large that they stand for it, such as the lowest number of a dtype."""
    if float(logits.min()) >= -_LARGEST_MIXED and float(logits.max()) <= _LARGEST_MIXED:
        return 0
    return int(np.count_nonzero(np.abs(logits.astype(np.float64)) > _LARGEST_MIXED))


def listed(numbers: NDArray[np.int64], one: str, several: str) -> str:
    """Name classes or labels in a message: "class 3", "7 labels (0, 1, 2, 3, 4, ...)", or nothing."""
    if len(numbers) == 1:
        return f"{one} {numbers[0]}"
    return f"{len(numbers)} {several} ({few(numbers.tolist())})" if len(numbers) else ""
