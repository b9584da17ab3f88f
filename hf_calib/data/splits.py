"""Splits into train, calibration and test. Every draw is reproducible from a seed."""

from __future__ import annotations

import warnings
from numbers import Integral, Real

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, concatenate_datasets

from hf_calib._errors import check, few
from hf_calib.data.labels import has_several_labels
from hf_calib.data.sources import read_column
from hf_calib.metrics.checks import check_integer

_SEED = "the default is 0"


def split_calibration(
    dataset: DatasetDict,
    *,
    size: float | int = 0.1,
    seed: int = 0,
    stratify: bool = True,
    source: str = "train",
) -> DatasetDict:
    """Return a dataset with a calibration split, taken from train or test if there is none.

    Gammas and the temperature are fitted to these rows, so they are neither in train nor in test.

    Args:
        dataset: a result of `choose_columns`. A dataset with a `calibration` split is returned
            unchanged.
        size: a fraction of `source` in (0, 1), or a number of rows (int >= 1).
        seed: seed of the draw; the rows keep their order.
        stratify: whether to keep the class frequencies of `source`, with at least one row of each
            class left there; ignored with several labels per row.
        source: the split from which rows are taken: "train", or "test" to halve, for example,
            ImageNet's validation set.

    Raises:
        ValueError: if `size` leaves no row in `source`, or with `stratify` no row of some class.

    >>> rows = Dataset.from_dict({"text": list("abcdefgh"), "label": [0, 1] * 4})
    >>> splits = split_calibration(DatasetDict({"train": rows, "test": rows}), size=0.25)
    >>> {name: sorted(split["label"][:]) for name, split in splits.items()}
    {'train': [0, 0, 0, 1, 1, 1], 'calibration': [0, 1], 'test': [0, 0, 0, 0, 1, 1, 1, 1]}
    """
    if "calibration" in dataset:
        return dataset
    check_integer("seed", seed, 0, _SEED)
    requirement = f"source to name a split ({', '.join(dataset)})"
    check(source in dataset, requirement, repr(source), "the default is train")
    rng = np.random.default_rng(seed)
    rest, drawn = _drawn(dataset[source], size, rng, stratify=stratify)
    # Recipes print the splits in this order.
    parts = {"train": dataset["train"], source: rest, "calibration": drawn}
    others = {name: split for name, split in dataset.items() if name not in parts}
    return DatasetDict(parts | others)


def draw_test(dataset: DatasetDict, *, size: float | int, seed: int = 0) -> DatasetDict:
    """Merge train and test, if there is one, and draw a new stratified random test split from them.

    Use it for datasets without a test split, or with a split by date (20 Newsgroups). A repeated
    text may then be in both splits. A `calibration` split does not change. `size` refers to all
    rows, as in `split_calibration`.

    >>> rows = Dataset.from_dict({"text": list("abcdefgh"), "label": [0, 1] * 4})
    >>> by_date = DatasetDict({"train": rows.select(range(6)), "test": rows.select([6, 7])})
    >>> splits = draw_test(by_date, size=0.5)
    >>> {name: sorted(split["label"][:]) for name, split in splits.items()}
    {'train': [0, 0, 1, 1], 'test': [0, 0, 1, 1]}
    """
    check_integer("seed", seed, 0, _SEED)
    known = [dataset[name] for name in ("train", "test") if name in dataset]
    merged = concatenate_datasets(known)
    # The stream differs from that of `split_calibration`, which draws from the remaining rows.
    rest, drawn = _drawn(merged, size, np.random.default_rng([seed, 1]))
    return DatasetDict({**dataset, "train": rest, "test": drawn})


def limit_samples(
    dataset: DatasetDict,
    *,
    max_train_samples: int | None = None,
    max_calibration_samples: int | None = None,
    max_test_samples: int | None = None,
    seed: int = 0,
) -> DatasetDict:
    """Keep a random subset of each split, for a quick trial.

    Each limit is an int >= 1, or None for all rows. The same seed keeps the same rows in their
    order, and a smaller subset is a part of a larger one. Raise ValueError if train would have
    fewer rows than classes, and warn of classes of which it has no row.

    >>> rows = Dataset.from_dict({"text": list("abcdefgh"), "label": [0, 1] * 4})
    >>> limit_samples(DatasetDict({"train": rows}), max_train_samples=3)["train"].num_rows
    3
    """
    check_integer("seed", seed, 0, _SEED)
    limits = {
        "train": max_train_samples,
        "calibration": max_calibration_samples,
        "test": max_test_samples,
    }
    kept = dict(dataset)
    for name, limit in limits.items():
        if limit is None:
            continue
        check_integer(f"max_{name}_samples", limit, 1, "leave it out for all")
        if limit < len(dataset.get(name, ())):
            whole = dataset[name]
            # The first rows of one order, so that a smaller subset is a part of a larger one.
            order = np.random.default_rng(seed).permutation(len(whole))
            kept[name] = whole.select(np.sort(order[:limit]))
            if name == "train":
                _check_classes_stay(whole, kept[name], limit)
    return DatasetDict(kept)


def _check_classes_stay(whole: Dataset, kept: Dataset, limit: int) -> None:
    """Raise for fewer training rows than classes, and warn of classes of which none is left."""
    # Sentences and rows of several labels have no class of their own.
    feature = whole.features.get("label")
    if not isinstance(feature, ClassLabel):
        return
    classes = np.unique(read_column(whole, "label"))
    requirement = f"max_train_samples to be at least {len(classes)}, a row per class"
    check(limit >= len(classes), requirement, limit, "ask for more rows")
    lost = np.setdiff1d(classes, np.unique(read_column(kept, "label")))
    if len(lost) > 0:
        names = few([feature.names[label] for label in lost])
        warnings.warn(
            f"max_train_samples={limit} leaves no training row of {len(lost)} of "
            f"{len(classes)} classes ({names}), which the model cannot learn. Ask for more rows.",
            stacklevel=3,
        )


def draw_rows(labels: np.ndarray, n_rows: int, rng: np.random.Generator) -> np.ndarray:
    """Return sorted indices of rows drawn by class frequency; a row of every class stays.

    scikit-learn's stratified draws need two rows of each class, and may leave none of a class.
    """
    classes, counts = np.unique(labels, return_counts=True)
    n_all = len(labels)
    requirement = (
        f"size to leave at least one of {n_all} rows for each of {len(classes)} classes"
    )
    fits = 1 <= n_rows <= n_all - len(classes)
    check(fits, requirement, n_rows, "ask for fewer rows")
    # The method of largest remainders: first the whole parts of the quotas, then the rest of the
    # rows one by one, to the class whose quota is missed most.
    quotas = counts * n_rows / n_all
    taken = np.floor(quotas).astype(int)
    while taken.sum() < n_rows:
        missing = np.where(taken < counts - 1, quotas - taken, -np.inf)
        taken[np.argmax(missing)] += 1
    drawn = []
    for label, n_taken in zip(classes, taken, strict=True):
        rows = rng.permutation(np.flatnonzero(labels == label))
        drawn.append(rows[:n_taken])
    return np.sort(np.concatenate(drawn))


def _drawn(
    whole: Dataset,
    size: float | int,
    rng: np.random.Generator,
    *,
    stratify: bool = True,
) -> tuple[Dataset, Dataset]:
    """The remaining rows and the drawn rows, stratified if each row has one class."""
    n_all = len(whole)
    # 1.0 is neither: it may be meant as all rows or as one.
    is_fraction = isinstance(size, Real) and 0 < size < 1
    is_count = isinstance(size, Integral) and not isinstance(size, bool) and size >= 1
    requirement = "size to be a fraction in (0, 1) or a number of rows"
    check(is_fraction or is_count, requirement, repr(size), "0.1 is a tenth")
    n_rows = round(size * n_all) if is_fraction else int(size)
    requirement = f"size to leave some of {n_all} rows on both sides"
    way_out = "pass a smaller one; it is calibration_size or test_size in a recipe"
    check(1 <= n_rows < n_all, requirement, n_rows, way_out)
    if stratify and not has_several_labels(whole):
        labels = np.asarray(read_column(whole, "label"))
        chosen = draw_rows(labels, n_rows, rng)
    else:
        chosen = np.sort(rng.permutation(n_all)[:n_rows])
    rest = np.setdiff1d(np.arange(n_all), chosen)
    return whole.select(rest), whole.select(chosen)
