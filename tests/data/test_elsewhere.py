"""Inputs of none of the classes: their columns and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset, Features, Value
from PIL import Image

from hf_calib.data import DataArguments, choose_inputs, load_ood


def grey(n: int = 3, value: int = 128) -> Dataset:
    return Dataset.from_dict(
        {"image": [Image.new("RGB", (64, 64), (value,) * 3) for _ in range(n)], "label": list(range(n))}
    )


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


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    nothing = Dataset.from_dict({"text": []}, features=Features({"text": Value("string")}))
    nothing.to_parquet(tmp_path / "empty.parquet")
    for name, text in (("empty.csv", "text\n"), ("empty.jsonl", ""), ("empty.json", "")):
        (tmp_path / name).write_text(text)
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(
            ValueError, match=f"expected ood_data to have rows, got none in .*{path.name}; check"
        ):
            load_ood(DataArguments(ood_data=[str(path)]))
