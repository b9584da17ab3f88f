"""Inputs of none of the classes: their columns, the noise of CIFAR-10-C, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, Features, Value
from papers.images import gaussian_noise
from PIL import Image

from hf_calib.data import DataArguments, choose_inputs, load_ood


def pixels(dataset: Dataset) -> np.ndarray:
    return np.stack([np.asarray(row["image"]) for row in dataset])


def grey(n: int = 3, value: int = 128) -> Dataset:
    return Dataset.from_dict(
        {"image": [Image.new("RGB", (64, 64), (value,) * 3) for _ in range(n)], "label": list(range(n))}
    )


@pytest.mark.parametrize(("severity", "deviation"), [(1, 0.04), (2, 0.06), (3, 0.08), (4, 0.09), (5, 0.10)])
def test_the_noise_is_that_of_cifar_10_c(severity: int, deviation: float) -> None:
    noisy = pixels(gaussian_noise(grey(), severity=severity))
    assert noisy.dtype == np.uint8
    # The mean falls by half a level, which is cut off; 36,864 values.
    assert noisy.mean() == pytest.approx(127.5, abs=0.6)
    assert noisy.std() / 255 == pytest.approx(deviation, rel=0.02)


def test_noise_is_cut_to_the_range_and_drawn_for_each_image_by_its_seed() -> None:
    white = pixels(gaussian_noise(grey(value=255)))
    assert white.max() == 255
    assert (white == 255).mean() == pytest.approx(0.5, abs=0.02)  # the upper half of the noise
    first = pixels(gaussian_noise(grey()))
    assert (first == pixels(gaussian_noise(grey()))).all()
    assert not (first[0] == first[1]).all()
    assert not (first == pixels(gaussian_noise(grey(), seed=1))).all()


def test_noise_keeps_the_other_columns_and_refuses_other_severities() -> None:
    assert gaussian_noise(grey())["label"][:] == [0, 1, 2]
    for severity in (0, 6, 2.5):
        with pytest.raises(ValueError, match="expected severity to be a whole number from 1 to 5"):
            gaussian_noise(grey(), severity=severity)  # type: ignore[arg-type]


def test_inputs_are_chosen_by_name_or_as_the_only_ones() -> None:
    rows = Dataset.from_dict({"text": ["a"], "title": ["b"], "n": [1]})
    assert choose_inputs(rows, name="x", text_column="title")[0] == {"text": "b"}
    assert choose_inputs(rows.remove_columns("text"), name="x", text_column="text")[0] == {"text": "b"}
    with pytest.raises(ValueError, match=r"read from split 'x' to be one of text, title, n, got 'txet'"):
        choose_inputs(rows, name="x", text_column="txet")
    with pytest.raises(TypeError, match="column 'n' to hold texts in split 'x'"):
        choose_inputs(rows, name="x", text_column="n")
    with pytest.raises(ValueError, match="split 'x' to have rows, got 0"):
        choose_inputs(rows.select([]), name="x", text_column="text")
    assert choose_inputs(grey(), name="x", image_column="img").column_names == ["image"]


def test_several_sets_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question\nwho?\nwhat?\n")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n')
    args = DataArguments(ood_data=[str(tmp_path / "a.csv"), str(tmp_path / "b.jsonl")])
    found = load_ood(args)
    assert {name: rows["text"][:] for name, rows in found.items()} == {
        f"{tmp_path.name}/a.csv": ["who?", "what?"],
        f"{tmp_path.name}/b.jsonl": ["x"],
    }
    assert load_ood(DataArguments()) == {}


def test_sets_of_one_folder_and_file_name_have_longer_names(tmp_path: Path) -> None:
    for first in ("one", "two"):
        (tmp_path / first / "data").mkdir(parents=True)
        (tmp_path / first / "data" / "test.csv").write_text(f"text\n{first}\n")
    files = [str(tmp_path / first / "data" / "test.csv") for first in ("one", "two")]
    found = load_ood(DataArguments(ood_data=files))
    assert {name: rows["text"][:] for name, rows in found.items()} == {
        "one/data/test.csv": ["one"],
        "two/data/test.csv": ["two"],
    }
    with pytest.raises(
        ValueError, match=r"ood_data to be different data, got .*one/data/test\.csv twice; leave"
    ):
        load_ood(DataArguments(ood_data=[files[0], files[1], files[0]]))


@pytest.mark.parametrize("name", ["missing.csv", "someone/nothing"])
def test_what_is_missing_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=f"expected ood_data to .* got {name}"):
        load_ood(DataArguments(ood_data=[name]))


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.json"])
def test_an_empty_json_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    args = DataArguments(ood_data=[str(tmp_path / name)])
    with pytest.raises(ValueError, match=f"expected ood_data to have rows, got none in .*{name}"):
        load_ood(args)


def test_an_empty_file_of_inputs_from_elsewhere_is_called_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty.parquet"
    Dataset.from_dict({"text": []}, features=Features({"text": Value("string")})).to_parquet(path)
    (tmp_path / "empty.csv").write_text("text\n")
    for name in ("empty.parquet", "empty.csv"):
        with pytest.raises(ValueError, match=f"expected ood_data to have rows, got none in .*{name}; check"):
            load_ood(DataArguments(ood_data=[str(tmp_path / name)]))
