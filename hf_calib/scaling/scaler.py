"""Base class of all scalers: how a fitted one is saved, loaded and pushed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin

from hf_calib._errors import InputValueError, expected
from hf_calib.scaling._inputs import FloatArray

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo
    from typing_extensions import Self


class Fitted(NamedTuple):
    """A fitted attribute: an array with one letter per axis, the same for the same length, "*" for any; or no array."""

    name: str
    shape: str = ""
    kind: type = float


class Scaler(ClassifierMixin, BaseEstimator):
    """A post-hoc scaler: `fit(logits, labels)`, `predict_proba(logits)`, and a folder or repository to keep it in.

    As every classifier of scikit-learn it has `predict` (the class of the highest probability; with several labels a
    row 0 and 1), `score` (the accuracy) and `classes_`.

    It is the base class of all in `SCALERS`. `Scaler.from_pretrained` loads any of them,
    `SplineScaling.from_pretrained` that one only.

    >>> import numpy as np, tempfile
    >>> from hf_calib.scaling import SplineScaling
    >>> rng = np.random.default_rng(0)
    >>> logits, labels = rng.normal(size=(50, 3)), rng.integers(3, size=50)
    >>> scaler = SplineScaling().fit(logits, labels)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     scaler.save_pretrained(folder)
    ...     loaded = Scaler.from_pretrained(folder)
    >>> loaded, bool((loaded.predict_proba(logits) == scaler.predict_proba(logits)).all())
    (SplineScaling(), True)
    """

    # What `fit` finds and a file has to hold.
    _fitted: ClassVar[tuple[Fitted, ...]] = ()

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        raise NotImplementedError

    def predict(self, logits: ArrayLike) -> NDArray[np.int64]:
        """The number of the most probable class of each row; with several labels a row 0 or 1 for each."""
        from hf_calib.scaling.saved_map import is_multi_label  # here, because it imports the scalers

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
        """Write the fitted scaler into a folder, which may be that of its model, where `hf_calib.pipeline` finds it.

        calibration.json holds the method, its settings and, for one that folds, its numbers; the arrays of one that
        does not are in calibration/scaler.safetensors. Files of these names are replaced, others stay.

        Args:
            folder: made where there is none.

        Raises:
            sklearn.exceptions.NotFittedError: if it is not fitted.
            ValueError: if it has numbers that are not finite.
            OSError: if it cannot be written; what was there still stands then.
        """
        from hf_calib.scaling.saved_map import MAP_NAME, save_map  # here, because it imports the scalers

        save_map(self, Path(folder) / MAP_NAME)

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> Self:
        """Load a fitted scaler, bit for bit, from a folder or from a repository on the Hub.

        Only the scaler's files are downloaded, and nothing in them is run.

        Args:
            name: a folder, or a repository such as "me/my-model"; a folder of that name goes first.
            revision: branch, tag or commit of a repository.
            token: for the Hub; None uses the stored one.

        Raises:
            ValueError: if it holds no whole scaler, or one of another class than this.
        """
        from hf_calib.scaling._hub import load_pretrained  # here, because it imports the scalers

        scaler = load_pretrained(name, revision=revision, token=token).scaler
        if not isinstance(scaler, cls):
            other = type(scaler).__name__
            way_out = f"use {other}.from_pretrained, or Scaler.from_pretrained for any of them"
            raise InputValueError(expected(str(name), f"hold a {cls.__name__}", f"a {other}", way_out))
        return scaler

    def push_to_hub(
        self,
        repo_id: str,
        *,
        revision: str | None = None,
        token: str | None = None,
        private: bool | None = None,
        create_pr: bool = False,
    ) -> CommitInfo:
        """Add the fitted scaler to a model's repository on the Hub, or to a new one, in one commit.

        Args:
            repo_id: such as "me/my-model"; made where there is none.
            revision: branch; None is main.
            token: None uses the stored one.
            private: of a new repository; None is the owner's default.
            create_pr: open a pull request with it instead.

        Raises:
            sklearn.exceptions.NotFittedError: if it is not fitted.
            ValueError: if it has numbers that are not finite.
        """
        from hf_calib.scaling._hub import push  # here, because it imports the scalers

        return push(self, repo_id, revision=revision, token=token, private=private, create_pr=create_pr)

    def _is_sound(self) -> bool:
        """Whether fitted attributes of the right shapes have values that a fit can have found."""
        return True


def is_rising(values: Any) -> bool:
    """Whether no value (..., S) is below the one before it."""
    return bool((values[..., 1:] >= values[..., :-1]).all())


def are_shares(values: Any) -> bool:
    """Whether all lie in [0, 1]."""
    return bool(((values >= 0) & (values <= 1)).all())
