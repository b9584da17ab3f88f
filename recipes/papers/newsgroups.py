"""The papers' 20 Newsgroups, posts without their headers only; and label noise for studies."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    Value,
    concatenate_datasets,
)
from transformers.hf_argparser import HfArg

from hf_calib._errors import InputValueError, check, expected
from hf_calib.data import (
    DataArguments,
    draw_test,
    limit_samples,
    load_data,
    split_calibration,
)

NEWSGROUPS = "sklearn/20newsgroups"
# E-mails and files of Windows end lines with \r\n.
_BLANK_LINE = re.compile(r"\r?\n\r?\n")


@dataclass
class StudyDataArguments(DataArguments):
    """The dataset, and what the papers' studies do to it."""

    dataset: str | None = HfArg(
        default=None,
        help=(
            "A dataset on the Hub, a local folder, 'docstrings', which needs no network, or "
            f"{NEWSGROUPS!r}, which scikit-learn downloads."
        ),
    )
    strip_headers: bool = HfArg(
        default=False, help="Cut posts and e-mails up to the first blank line."
    )
    label_noise: float = HfArg(
        default=0.0,
        help="Fraction of the train and calibration rows that get another class at random, for studies.",
    )


def load_study_data(args: StudyDataArguments) -> DatasetDict:
    """The splits train, calibration and test of `load_data`, headers cut and labels changed where that is asked for."""
    _check_fraction(args.label_noise)
    of_one_label = args.label_noise != 0 or args.dataset == NEWSGROUPS
    fits = not (args.multi_label and of_one_label)
    requirement = "label_noise and 20 Newsgroups to have one label per row"
    check(fits, requirement, "multi_label", "leave it out")
    limits = {
        name: value for name, value in vars(args).items() if name.startswith("max_")
    }
    if args.dataset == NEWSGROUPS and not args.train_file:
        dataset = newsgroups_dataset()
        seed = args.split_seed
        if args.test_size is not None:
            test_size = _rows_or_share(args.test_size)
            dataset = draw_test(dataset, size=test_size, seed=seed)
        size = _rows_or_share(args.calibration_size)
        source = args.calibration_from
        dataset = split_calibration(dataset, size=size, seed=seed, source=source)
    else:
        dataset = load_data(replace(args, **dict.fromkeys(limits)))
    if args.strip_headers:
        dataset = strip_headers(dataset)
    noise = args.label_noise
    if noise:
        dataset = add_label_noise(dataset, fraction=noise, seed=args.split_seed)
    return limit_samples(dataset, **limits, seed=args.split_seed)


def _rows_or_share(size: float) -> float | int:
    return int(size) if size >= 1 else size


def _check_fraction(noise: float) -> None:
    way_out = "the default is 0, no noise"
    check(0 <= noise <= 1, "label_noise to be in [0, 1]", noise, way_out)


def newsgroups_dataset() -> DatasetDict:
    """Load the 18,846 posts of 20 Newsgroups, whole, in their split by date.

    scikit-learn downloads them once, to the folder that its `get_data_home` names. For the papers'
    task cut the headers and split anew.

    Returns:
        DatasetDict of `train` (11,314 rows) and `test` (7,532 rows), with the columns `text` and
        `label`.

    Raises:
        ValueError: if the posts are neither there nor can be downloaded.
    """
    from sklearn.datasets import fetch_20newsgroups

    try:
        train = fetch_20newsgroups(subset="train", shuffle=False)
        test = fetch_20newsgroups(subset="test", shuffle=False)
    except OSError as error:
        requirement = "be in scikit-learn's data folder, or its server to be reachable"
        way_out = "name files of yours as train_file and test_file"
        raise InputValueError(
            expected("20 Newsgroups", requirement, error, way_out)
        ) from error
    names = ClassLabel(names=list(train.target_names))
    features = Features({"text": Value("string"), "label": names})
    splits = DatasetDict()
    for split, posts in (("train", train), ("test", test)):
        columns = {"text": posts.data, "label": posts.target.tolist()}
        splits[split] = Dataset.from_dict(columns, features=features)
    return splits


def strip_headers(dataset: DatasetDict) -> DatasetDict:
    """Cut each text up to its first blank line: the header of a newsgroup post, or of an e-mail.

    A text without a blank line is unchanged, and a text that is only a header becomes empty: as in
    the code of Kumar, Sarawagi, Jain, Trainable Calibration Measures, 2018, whose 20 Newsgroups
    later papers took.

    Args:
        dataset: with the column `text`.

    Raises:
        ValueError: if no text of train has a blank line.

    >>> rows = Dataset.from_dict({"text": ["From: me\\nSubject: it\\n\\nIt works.\\n\\nMe"], "label": [0]})
    >>> strip_headers(DatasetDict({"train": rows}))["train"]["text"][0]
    'It works.\\n\\nMe'
    """
    has_header = any(map(_BLANK_LINE.search, dataset["train"]["text"][:]))
    requirement = "texts of train to have a header and a blank line after it"
    way_out = "leave strip_headers out; they may be cut already"
    check(has_header, requirement, "no blank line", way_out)

    def cut(row: dict[str, str]) -> dict[str, str]:
        *_, body = _BLANK_LINE.split(row["text"], maxsplit=1)
        return {"text": body}

    return dataset.map(cut, desc="Cutting headers")


def add_label_noise(
    dataset: DatasetDict, *, fraction: float, seed: int = 0
) -> DatasetDict:
    """Give a part of the rows of train and calibration another label, as annotators who guess would.

    For studies of how losses and maps stand label noise; the test split keeps its labels.

    Args:
        dataset: with one label per row.
        fraction: of the rows in [0, 1], each drawn by itself, that get one of the other C - 1
            classes, each as likely.
        seed: the same seed changes the same rows.

    Returns:
        DatasetDict of the same splits and rows.

    >>> features = Features({"text": Value("string"), "label": ClassLabel(names=["even", "odd"])})
    >>> rows = Dataset.from_dict({"text": list("abcd"), "label": [0, 1, 0, 1]}, features=features)
    >>> noisy = add_label_noise(DatasetDict({"train": rows, "test": rows}), fraction=1.0)
    >>> noisy["train"]["label"][:], noisy["test"]["label"][:]
    ([1, 0, 1, 0], [0, 1, 0, 1])
    """
    _check_fraction(fraction)
    changed = DatasetDict(dataset)
    for stream, name in enumerate(("train", "calibration")):
        if name not in dataset:
            continue
        rng = np.random.default_rng([seed, 2, stream])
        feature = dataset[name].features["label"]
        n_classes = feature.num_classes
        labels = np.asarray(dataset[name]["label"][:])
        # Each of the C - 1 other classes is a number of steps ahead.
        others = (labels + rng.integers(1, n_classes, size=len(labels))) % n_classes
        noisy = np.where(rng.random(len(labels)) < fraction, others, labels)
        features = Features({"label": feature})
        column = Dataset.from_dict({"label": noisy}, features=features)
        rest = dataset[name].remove_columns("label")
        changed[name] = concatenate_datasets([rest, column], axis=1)
    return changed
