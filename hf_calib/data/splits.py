"""Splits: train, calibration and test. Every draw is reproducible from a seed."""

from __future__ import annotations

import warnings

import numpy as np
from datasets import Dataset, DatasetDict, concatenate_datasets

from hf_calib._errors import check
from hf_calib.data.labels import has_several_labels, read_column


def split_calibration(
    dataset: DatasetDict,
    *,
    size: float | int = 0.1,
    seed: int = 0,
    stratify: bool = True,
    source: str = "train",
) -> DatasetDict:
    """Give a dataset a calibration split: the one that it has, or else a part of train or of test.

    Gammas and the temperature are fitted on these rows, so they are in neither train nor test.

    Args:
        dataset: as `choose_columns` returns it. One that has a `calibration` split comes back as it is.
        size: a fraction of `source` in (0, 1), or a number of rows (int >= 1).
        seed: the same seed draws the same rows, which keep their order.
        stratify: keep the class frequencies of `source`, to the nearest row, and a row of each class there. Rows with
            several labels are drawn at random.
        source: the split that gives the rows: "train", or "test", as where ImageNet's validation images are halved.

    Raises:
        ValueError: if `size` leaves no row, or with `stratify` less than one row of each class, for `source`.

    >>> rows = Dataset.from_dict({"text": list("abcdefgh"), "label": [0, 1] * 4})
    >>> splits = split_calibration(DatasetDict({"train": rows, "test": rows}), size=0.25)
    >>> {name: sorted(split["label"][:]) for name, split in splits.items()}
    {'train': [0, 0, 0, 1, 1, 1], 'calibration': [0, 1], 'test': [0, 0, 0, 0, 1, 1, 1, 1]}
    """
    if "calibration" in dataset:
        return dataset
    known = f"source to name a split ({', '.join(dataset)})"
    check(source in dataset, known, repr(source), "the default is train")
    rest, drawn = _drawn(dataset[source], size, np.random.default_rng(seed), stratify=stratify)
    parts = {"train": dataset["train"], source: rest, "calibration": drawn}
    return DatasetDict(parts | {name: split for name, split in dataset.items() if name not in parts})


def draw_test(dataset: DatasetDict, *, size: float | int, seed: int = 0) -> DatasetDict:
    """Merge train and test, where there is one, and draw another test split from them at random, by class.

    For datasets without a test split, and for those whose papers split at random what the Hub splits by date: 20
    Newsgroups. A text that stands in the data twice may now be in both splits; a `calibration` split stays. `size` is
    of all rows, as in `split_calibration`.

    >>> rows = Dataset.from_dict({"text": list("abcdefgh"), "label": [0, 1] * 4})
    >>> splits = draw_test(DatasetDict({"train": rows.select(range(6)), "test": rows.select([6, 7])}), size=0.5)
    >>> {name: sorted(split["label"][:]) for name, split in splits.items()}
    {'train': [0, 0, 1, 1], 'test': [0, 0, 1, 1]}
    """
    merged = concatenate_datasets([dataset[name] for name in ("train", "test") if name in dataset])
    # Not the stream of `split_calibration`, which draws from what this one leaves.
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

    Each limit is an int >= 1, or None for all rows. The same seed keeps the same rows, in their order, and a smaller
    subset lies within a larger one.

    >>> rows = Dataset.from_dict({"text": list("abcdefgh"), "label": [0, 1] * 4})
    >>> limit_samples(DatasetDict({"train": rows}), max_train_samples=3)["train"].num_rows
    3
    """
    limits = {"train": max_train_samples, "calibration": max_calibration_samples, "test": max_test_samples}
    for name, limit in limits.items():
        check(
            limit is None or limit >= 1, f"max_{name}_samples to be at least 1", limit, "leave it out for all"
        )

    def shorten(split: Dataset, limit: int | None) -> Dataset:
        if limit is None or limit >= len(split):
            return split
        return split.select(np.sort(np.random.default_rng(seed).permutation(len(split))[:limit]))

    return DatasetDict({name: shorten(split, limits.get(name)) for name, split in dataset.items()})


def warn_shared_texts(dataset: DatasetDict) -> dict[str, int]:
    """Warn of rows whose exact text is also in train, and count them by split: results on them are optimistic.

    >>> rows = Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    >>> warn_shared_texts(DatasetDict({"train": rows.select([0]), "test": rows.select([1])}))
    {'test': 0}
    """
    known = {hash(text) for text in read_column(dataset["train"], "text").to_pylist()}
    shared = {
        name: sum(hash(text) in known for text in read_column(split, "text").to_pylist())
        for name, split in dataset.items()
        if name != "train"
    }
    if any(shared.values()):
        counts = ", ".join(f"{count} of {len(dataset[name])} in {name}" for name, count in shared.items())
        warnings.warn(
            f"Texts are also in train: {counts}. Results on these splits are optimistic. Remove those rows.",
            stacklevel=2,
        )
    return shared


def draw_rows(labels: np.ndarray, n_rows: int, rng: np.random.Generator) -> np.ndarray:
    """Draw rows by class frequency, leaving at least one row of every class; sorted indices."""
    classes, counts = np.unique(labels, return_counts=True)
    requirement = f"size to leave at least one of {len(labels)} rows for each of {len(classes)} classes"
    check(1 <= n_rows <= len(labels) - len(classes), requirement, f"{n_rows} rows", "ask for fewer rows")
    quotas = counts * n_rows / len(labels)
    taken = np.floor(quotas).astype(int)
    while taken.sum() < n_rows:  # largest remainders first
        taken[np.argmax(np.where(taken < counts - 1, quotas - taken, -np.inf))] += 1
    drawn = [rng.permutation(np.flatnonzero(labels == c))[:k] for c, k in zip(classes, taken, strict=True)]
    return np.sort(np.concatenate(drawn))


def _drawn(
    whole: Dataset, size: float | int, rng: np.random.Generator, *, stratify: bool = True
) -> tuple[Dataset, Dataset]:
    """What is left of the rows, and those drawn, by class where each has one."""
    is_fraction = isinstance(size, float) and 0 < size < 1
    is_count = isinstance(size, int) and not isinstance(size, bool) and size >= 1
    requirement = "size to be a fraction in (0, 1) or a number of rows"
    check(is_fraction or is_count, requirement, repr(size), "0.1 is a tenth")
    n_rows = round(size * len(whole)) if is_fraction else int(size)
    requirement = f"size to leave some of {len(whole)} rows on both sides"
    way_out = "pass a smaller one; it is calibration_size or test_size in a recipe"
    check(1 <= n_rows < len(whole), requirement, f"{n_rows} rows", way_out)
    if stratify and not has_several_labels(whole):
        chosen = draw_rows(np.asarray(read_column(whole, "label").to_pylist()), n_rows, rng)
    else:
        chosen = np.sort(rng.permutation(len(whole))[:n_rows])
    return whole.select(np.setdiff1d(np.arange(len(whole)), chosen)), whole.select(chosen)
