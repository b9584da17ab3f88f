"""20 Newsgroups, as scikit-learn keeps it."""

from __future__ import annotations

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from hf_calib._errors import InputValueError, expected


def newsgroups_dataset() -> DatasetDict:
    """Load the 18,846 posts of 20 Newsgroups, whole, in their split by date.

    scikit-learn downloads them once, to the folder that its `get_data_home` names. For the papers' task cut the
    headers and split anew: `DataArguments(dataset="sklearn/20newsgroups", strip_headers=True, test_size=0.2)`.

    Returns:
        DatasetDict of `train` (11,314 rows) and `test` (7,532 rows), with the columns `text` and `label`.

    Raises:
        ValueError: if the posts are neither there nor can be downloaded.
    """
    from sklearn.datasets import fetch_20newsgroups

    try:
        loaded = {split: fetch_20newsgroups(subset=split, shuffle=False) for split in ("train", "test")}
    except OSError as error:
        raise InputValueError(
            expected(
                "20 Newsgroups",
                "be in scikit-learn's data folder, or its server to be reachable",
                error,
                "name files of yours as train_file and test_file",
            )
        ) from error
    features = Features(
        {"text": Value("string"), "label": ClassLabel(names=list(loaded["train"].target_names))}
    )
    return DatasetDict(
        {
            split: Dataset.from_dict({"text": posts.data, "label": posts.target.tolist()}, features=features)
            for split, posts in loaded.items()
        }
    )
