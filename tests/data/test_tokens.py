"""Tagged sentences: what is refused, with its row, and which sub-words count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    DatasetInfo,
    Features,
    List,
    Value,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_calib.data import (
    DataArguments,
    choose_tokens,
    load_tagged,
    tag_maps,
    tokenize_words,
)

NAMES = ["O", "B-person", "I-person"]
GOOD: dict[str, list[Any]] = {
    "tokens": [["Ada", "Lovelace", "slept"], ["so", "did", "Bob"], ["no"]],
    "ner_tags": [["B-person", "I-person", "O"], ["O", "O", "B-person"], ["O"]],
}


def with_row(column: str, row: int, value: Any) -> dict[str, list[Any]]:
    rows = {name: list(values) for name, values in GOOD.items()}
    rows[column][row] = value
    return rows


def splits(rows: dict[str, list[Any]], **others: dict[str, list[Any]]) -> DatasetDict:
    return DatasetDict(
        {
            name: Dataset.from_dict(each)
            for name, each in {"train": rows, **others}.items()
        }
    )


def labelled(names: list[str]) -> Dataset:
    features = Features(
        {"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=names))}
    )
    ids = [[names.index(tag) for tag in row] for row in GOOD["ner_tags"]]
    return Dataset.from_dict(
        {"tokens": GOOD["tokens"], "ner_tags": ids}, features=features
    )


def test_names_ids_and_class_labels_whatever_their_order_give_the_same() -> None:
    ids = [[NAMES.index(tag) for tag in row] for row in GOOD["ner_tags"]]
    for dataset in (
        choose_tokens(splits(GOOD)),
        choose_tokens(splits({**GOOD, "ner_tags": ids}), tag_names=NAMES),
        choose_tokens(
            DatasetDict({"train": labelled(NAMES), "test": labelled(NAMES[::-1])})
        ),
    ):
        assert [split["tags"][:] for split in dataset.values()] == [ids] * len(dataset)
        assert dataset["train"]["tokens"][:] == GOOD["tokens"]
        assert tag_maps(dataset)["id2label"] == dict(enumerate(NAMES))


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (with_row("ner_tags", 1, ["O", "O"]), ValueError, "got 3 and 2 in row 1"),
        (
            with_row("tokens", 0, ["Ada", None, "slept"]),
            ValueError,
            "got 3 and 3, one of which is missing, in row 0",
        ),
        (
            {"tokens": GOOD["tokens"]},
            ValueError,
            "label_column of split 'train' to be one of tokens, got 'ner_tags'",
        ),
        (
            {"tokens": ["a"], "ner_tags": [["O"]]},
            TypeError,
            "'tokens' of split 'train' to hold lists",
        ),
        (
            {"tokens": [["a"]], "ner_tags": [[0.5]]},
            TypeError,
            "'ner_tags' of split 'train' to hold lists of tags",
        ),
        (
            {"tokens": [["a"]], "ner_tags": [[0]]},
            ValueError,
            "to have names for its tags, got ids only",
        ),
        (
            {"tokens": [], "ner_tags": []},
            ValueError,
            "split 'train' to have rows, got 0",
        ),
    ],
)
def test_what_is_refused(
    rows: dict[str, list[Any]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        choose_tokens(splits(rows))


@pytest.mark.parametrize(
    ("good", "bad"), [("O", "B-place"), (0, 7), (0, -1)]
)  # the Hub marks tags that are withheld by -1
def test_a_tag_outside_the_names(good: str | int, bad: str | int) -> None:
    dataset = splits(
        {"tokens": [["a"], ["b"]], "ner_tags": [[good], [good]]},
        test={
            "tokens": [["a"], ["b"], ["c", "d"], ["e"]],
            "ner_tags": [[good], [good], [good, bad], [bad]],
        },
    )
    known = r"the classes \(O, B-person, I-person\)"
    if isinstance(bad, int):
        known = r"ids in 0\.\.2"
    message = rf"tags of split 'test' to hold {known}, got {bad!r} in row 2;"
    with pytest.raises(ValueError, match=message):
        choose_tokens(dataset, tag_names=NAMES)


@pytest.mark.parametrize("bad", [-1, 3, 7])
def test_an_id_outside_the_names_of_its_class_label(bad: int) -> None:
    """The names of another split may have this id."""
    ids = with_row("ner_tags", 0, [1, 2, 0])
    ids["ner_tags"][1:] = [[0, bad, bad], [bad]]
    good = labelled(NAMES)
    features = Features({**good.features})
    stored = Dataset(Dataset.from_dict(ids).data, DatasetInfo(features=features))
    more = labelled([*NAMES, *"abcdef"])
    message = rf"tags of split 'test' to hold ids in 0..2, got {bad} in row 1;"
    for train in (good, more):
        with pytest.raises(ValueError, match=message):
            choose_tokens(DatasetDict({"train": train, "test": stored}))


def tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """Pieces of words between [CLS] and [SEP]; a character that stands for nothing is dropped."""
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "Ada",
        "Love",
        "##lace",
        "slept",
        "so",
        "did",
        "Bob",
        "no",
    ]
    made = Tokenizer(
        models.WordPiece(
            {piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"
        )
    )
    made.normalizer = normalizers.Replace("\ufe0f", "")
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", **settings
    )


def test_labels_of_sub_words() -> None:
    encoded = tokenize_words(choose_tokens(splits(GOOD))["train"], tokenizer())
    assert encoded["input_ids"][0] == [2, 4, 5, 6, 7, 3]
    assert encoded["labels"][:] == [
        [-100, 1, 2, -100, 0, -100],
        [-100, 0, 0, 1, -100],
        [-100, 0, -100],
    ]


def test_tokens_that_the_model_does_not_read_are_counted() -> None:
    rows = choose_tokens(splits(with_row("tokens", 1, ["so", "\ufe0f", "Bob"])))[
        "train"
    ]
    message = "2 of 7 tokens are beyond max_length=5, or of no character that the tokenizer knows"
    with pytest.warns(UserWarning, match=message):
        encoded = tokenize_words(rows, tokenizer(), max_length=5)
    assert encoded["labels"][:] == [
        [-100, 1, 2, -100, -100],
        [-100, 0, 1, -100],
        [-100, 0, -100],
    ]


@pytest.fixture
def args(tmp_path: Path) -> dict[str, Any]:
    files = {
        name: str(tmp_path / f"{name}.jsonl") for name in ("train_file", "test_file")
    }
    for path in files.values():
        Dataset.from_dict(GOOD).to_json(path)
    return {
        **files,
        "text_column": "tokens",
        "label_column": "ner_tags",
        "calibration_size": 0.34,
    }


def test_calibration_rows_are_held_out(args: dict[str, Any]) -> None:
    dataset = load_tagged(DataArguments(**args, max_test_samples=2))
    assert {name: len(rows) for name, rows in dataset.items()} == {
        "train": 2,
        "calibration": 1,
        "test": 2,
    }
    told = [*dataset["train"]["tokens"][:], *dataset["calibration"]["tokens"][:]]
    assert sorted(told) == sorted(GOOD["tokens"])
