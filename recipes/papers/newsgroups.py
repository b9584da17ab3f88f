"""The papers' 20 Newsgroups, posts without their headers only; and label noise for studies."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import numpy as np
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    Value,
    concatenate_datasets,
)

from hf_calib._errors import InputValueError, check, expected
from hf_calib.data import (
    DataArguments,
    draw_test,
    limit_samples,
    load_data,
    split_calibration,
)

NEWSGROUPS = "sklearn/20newsgroups"
_BLANK_LINE = re.compile(
    r"\r?\n\r?\n"
)  # e-mails and files of Windows end lines with \r\n


@dataclass
class StudyDataArguments(DataArguments):
    """The dataset, and what the papers' studies do to it."""

    dataset: str | None = field(
        default=None,
        metadata={
            "help": "A dataset on the Hub, a local folder, 'docstrings', which needs no network, or "
            f"{NEWSGROUPS!r}, which scikit-learn downloads."
        },
    )
    strip_headers: bool = field(
        default=False,
        metadata={"help": "Cut posts and e-mails up to the first blank line."},
    )
    label_noise: float = field(
        default=0.0,
        metadata={
            "help": "Fraction of the train and calibration rows that get another class at random, for studies."
        },
    )


def load_study_data(args: StudyDataArguments) -> DatasetDict:
    """The splits train, calibration and test of `load_data`, headers cut and labels changed where that is asked for."""
    check(
        0 <= args.label_noise <= 1,
        "label_noise to be in [0, 1]",
        args.label_noise,
        "the default is 0, no noise",
    )
    several = args.multi_label and (args.label_noise != 0 or args.dataset == NEWSGROUPS)
    check(
        not several,
        "label_noise and 20 Newsgroups to have one label per row",
        "multi_label",
        "leave it out",
    )
    limits = {
        name: value for name, value in vars(args).items() if name.startswith("max_")
    }
    if args.dataset == NEWSGROUPS and not args.train_file:
        dataset = newsgroups_dataset()
        if args.test_size is not None:
            dataset = draw_test(
                dataset, size=_rows_or_share(args.test_size), seed=args.split_seed
            )
        size, source = _rows_or_share(args.calibration_size), args.calibration_from
        dataset = split_calibration(
            dataset, size=size, seed=args.split_seed, source=source
        )
    else:
        dataset = load_data(replace(args, **dict.fromkeys(limits)))
    if args.strip_headers:
        dataset = strip_headers(dataset)
    if args.label_noise:
        dataset = add_label_noise(
            dataset, fraction=args.label_noise, seed=args.split_seed
        )
    return limit_samples(dataset, **limits, seed=args.split_seed)


def _rows_or_share(size: float) -> float | int:
    return int(size) if size >= 1 else size


def newsgroups_dataset() -> DatasetDict:
    """Load the 18,846 posts of 20 Newsgroups, whole, in their split by date.

    scikit-learn downloads them once, to the folder that its `get_data_home` names. For the papers' task cut the
    headers and split anew.

    Returns:
        DatasetDict of `train` (11,314 rows) and `test` (7,532 rows), with the columns `text` and `label`.

    Raises:
        ValueError: if the posts are neither there nor can be downloaded.
    """
    from sklearn.datasets import fetch_20newsgroups

    try:
        loaded = {
            split: fetch_20newsgroups(subset=split, shuffle=False)
            for split in ("train", "test")
        }
    except OSError as error:
        requirement = "be in scikit-learn's data folder, or its server to be reachable"
        way_out = "name files of yours as train_file and test_file"
        raise InputValueError(
            expected("20 Newsgroups", requirement, error, way_out)
        ) from error
    names = ClassLabel(names=list(loaded["train"].target_names))
    features = Features({"text": Value("string"), "label": names})
    columns = {
        split: {"text": posts.data, "label": posts.target.tolist()}
        for split, posts in loaded.items()
    }
    return DatasetDict(
        {
            split: Dataset.from_dict(each, features=features)
            for split, each in columns.items()
        }
    )


def strip_headers(dataset: DatasetDict) -> DatasetDict:
    """Cut each text up to its first blank line: the header of a newsgroup post, or of an e-mail.

    A text without a blank line is unchanged, and a text that is only a header becomes empty: as in the code of
    Kumar, Sarawagi, Jain, Trainable Calibration Measures, 2018, whose 20 Newsgroups later papers took.

    Args:
        dataset: with the column `text`.

    Raises:
        ValueError: if no text of train has a blank line.

    >>> rows = Dataset.from_dict({"text": ["From: me\\nSubject: it\\n\\nIt works.\\n\\nMe"], "label": [0]})
    >>> strip_headers(DatasetDict({"train": rows}))["train"]["text"][0]
    'It works.\\n\\nMe'
    """
    has_header = any(map(_BLANK_LINE.search, dataset["train"]["text"][:]))
    way_out = "leave strip_headers out; they may be cut already"
    check(
        has_header,
        "texts of train to have a header and a blank line after it",
        "no blank line",
        way_out,
    )

    def cut(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        return {
            "text": [_BLANK_LINE.split(text, maxsplit=1)[-1] for text in batch["text"]]
        }

    return dataset.map(cut, batched=True, desc="Cutting headers")


def add_label_noise(
    dataset: DatasetDict, *, fraction: float, seed: int = 0
) -> DatasetDict:
    """Give a part of the rows of train and calibration another label, as annotators who guess would.

    For studies of how losses and maps stand label noise; the test split keeps its labels.

    Args:
        dataset: with one label per row.
        fraction: of the rows in [0, 1], each drawn by itself, that get one of the other C - 1 classes, each as likely.
        seed: the same seed changes the same rows.

    Returns:
        DatasetDict of the same splits and rows.

    >>> features = Features({"text": Value("string"), "label": ClassLabel(names=["even", "odd"])})
    >>> rows = Dataset.from_dict({"text": list("abcd"), "label": [0, 1, 0, 1]}, features=features)
    >>> noisy = add_label_noise(DatasetDict({"train": rows, "test": rows}), fraction=1.0)
    >>> noisy["train"]["label"][:], noisy["test"]["label"][:]
    ([1, 0, 1, 0], [0, 1, 0, 1])
    """
    check(
        0 <= fraction <= 1,
        "label_noise to be in [0, 1]",
        fraction,
        "the default is 0, no noise",
    )
    changed = dict(dataset)
    for stream, name in enumerate(("train", "calibration")):
        if name in dataset:
            rng, feature = (
                np.random.default_rng([seed, 2, stream]),
                dataset[name].features["label"],
            )
            labels = np.asarray(dataset[name]["label"][:])
            others = (
                labels + rng.integers(1, feature.num_classes, size=len(labels))
            ) % feature.num_classes
            noisy = np.where(rng.random(len(labels)) < fraction, others, labels)
            column = Dataset.from_dict(
                {"label": noisy}, features=Features({"label": feature})
            )
            changed[name] = concatenate_datasets(
                [dataset[name].remove_columns("label"), column], axis=1
            )
    return DatasetDict(changed)
