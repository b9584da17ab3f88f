"""The papers' 20 Newsgroups: their counts, headers and noise in labels."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from papers.newsgroups import (
    StudyDataArguments,
    add_label_noise,
    load_study_data,
    strip_headers,
)

from hf_calib.data import load_splits
from tests.helpers.places import ROOT


def test_label_noise_is_uniform_over_the_other_classes_and_leaves_the_test_set() -> (
    None
):
    features = Features(
        {"text": Value("string"), "label": ClassLabel(names=list("abcd"))}
    )
    rows = Dataset.from_dict(
        {"text": ["x"] * 8000, "label": [0, 1, 2, 3] * 2000}, features=features
    )
    dataset = DatasetDict({"train": rows, "calibration": rows, "test": rows})
    noisy = add_label_noise(dataset, fraction=0.2, seed=1)
    assert noisy["test"]["label"][:] == rows["label"][:]
    assert noisy["train"].features == features
    moved = {
        name: Counter(np.subtract(noisy[name]["label"][:], rows["label"][:]) % 4)
        for name in ("train", "calibration")
    }
    for counts in moved.values():
        assert counts[0] == pytest.approx(6400, abs=4 * math.sqrt(8000 * 0.2 * 0.8))
        assert [counts[i] for i in (1, 2, 3)] == pytest.approx(
            [1600 / 3] * 3, abs=4 * math.sqrt(1600 / 3)
        )
    assert moved["train"] != moved["calibration"]
    with pytest.raises(
        ValueError, match=r"expected label_noise to be in \[0, 1\], got 20"
    ):
        add_label_noise(dataset, fraction=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "expected_counts"),
    [
        pytest.param([1000] * 19 + [997], (15_098, 900, 3_999), marks=pytest.mark.slow),
        ([799, *[973, 985, 982, 963, 988, 975, 990, 996, 994, 999, 991, 984, 990, 987, 997, 910, 940, 775, 628]],
         (14_229, 848, 3_769)),
    ],
)  # fmt: skip
def test_the_papers_counts(
    tmp_path: Path, sizes: list[int], expected_counts: tuple[int, ...]
) -> None:
    """With the sizes of the recipe's file; all posts are in one file, as the 19,997 are."""
    labels = np.repeat(np.arange(20), sizes)
    posts = [f"From: me\n\npost {i}" for i in range(len(labels))]
    Dataset.from_dict({"text": posts, "label": labels}).to_parquet(
        tmp_path / "posts.parquet"
    )
    config = yaml.safe_load(
        (ROOT / "recipes" / "configs" / "20newsgroups_cnn.yaml").read_text()
    )
    task = {
        name: config[name]
        for name in ("dataset", "strip_headers", "test_size", "calibration_size")
    }
    dataset = load_study_data(
        StudyDataArguments(**task, train_file=str(tmp_path / "posts.parquet"))
    )
    texts = [dataset[name]["text"][:] for name in ("train", "calibration", "test")]
    assert tuple(map(len, texts)) == expected_counts
    assert len({text for split in texts for text in split}) == len(
        labels
    )  # no row is in two of them
    assert texts[2][0].startswith("post ")


def test_headers_are_cut_as_scikit_learn_cuts_them(shared_data: Path) -> None:
    from sklearn.datasets._twenty_newsgroups import strip_newsgroup_header

    posts = load_splits(
        train_file=shared_data / "20newsgroups" / "test.parquet",
        test_split=None,
    )
    before = posts["train"]["text"][:]
    after = strip_headers(posts)["train"]["text"][:]
    assert after == [strip_newsgroup_header(text) for text in before]
    assert posts["train"]["text"][:] == before
