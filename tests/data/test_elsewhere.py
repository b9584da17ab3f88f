"""Inputs of none of the classes: their columns and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset
from PIL import Image

from hf_calib.data import DataArguments, choose_inputs, load_ood


def test_inputs_are_chosen_by_name_or_as_the_only_ones() -> None:
    rows = Dataset.from_dict({"text": ["a"], "title": ["b"], "n": [1]})
    assert choose_inputs(rows, name="x", text_column="title")[0] == {"text": "b"}
    assert choose_inputs(rows.remove_columns("text"), name="x", text_column="text")[
        0
    ] == {"text": "b"}
    with pytest.raises(
        ValueError, match=r"read from split 'x' to be one of text, title, n, got 'txet'"
    ):
        choose_inputs(rows, name="x", text_column="txet")
    with pytest.raises(TypeError, match="column 'n' to hold texts in split 'x'"):
        choose_inputs(rows, name="x", text_column="n")
    with pytest.raises(ValueError, match="split 'x' to have rows, got 0"):
        choose_inputs(rows.select([]), name="x", text_column="text")
    images = Dataset.from_dict({"image": [Image.new("RGB", (8, 8))], "label": [0]})
    assert choose_inputs(images, name="x", image_column="img").column_names == ["image"]


def test_sets_are_called_by_as_much_of_their_path_as_tells_them_apart(
    tmp_path: Path,
) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n')
    for first in ("one", "two"):
        (tmp_path / first / "data").mkdir(parents=True)
        (tmp_path / first / "data" / "test.csv").write_text(f"question\n{first}\n")
    files = [
        str(tmp_path / path)
        for path in ("b.jsonl", "one/data/test.csv", "two/data/test.csv")
    ]
    found = load_ood(DataArguments(ood_data=files))
    assert {name: rows["text"][:] for name, rows in found.items()} == {
        f"{tmp_path.parent.name}/{tmp_path.name}/b.jsonl": ["x"],
        "one/data/test.csv": ["one"],
        "two/data/test.csv": ["two"],
    }
    assert load_ood(DataArguments()) == {}
    with pytest.raises(
        ValueError,
        match=r"ood_data to be different data, got .*data/test\.csv twice; leave",
    ):
        load_ood(DataArguments(ood_data=[*files, files[1]]))


@pytest.mark.parametrize("name", ["missing.csv", "someone/nothing"])
def test_what_is_missing_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=f"expected ood_data to .* got {name}"):
        load_ood(DataArguments(ood_data=[name]))


@pytest.mark.parametrize(
    ("name", "text"), [("empty.csv", "text\n"), ("empty.jsonl", ""), ("empty.json", "")]
)
def test_an_empty_file_is_called_empty(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(
        ValueError, match=f"expected ood_data to have rows, got none in .*{name}; check"
    ):
        load_ood(DataArguments(ood_data=[str(tmp_path / name)]))
