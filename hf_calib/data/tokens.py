"""Tagged sentences: columns `tokens` and `tags`, and labels of a tokenizer's sub-words."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from hf_calib._errors import (
    InputTypeError,
    InputValueError,
    check,
    did_you_mean,
    expected,
    few,
)
from hf_calib.data.arguments import (
    BUILT_IN,
    DataArguments,
    check_left_out,
    held_out,
    maps_of,
    splits_of,
)
from hf_calib.data.columns import check_is_no_label
from hf_calib.data.labels import INTEGERS, TEXTS, ClassNames, is_of, names_of_ids
from hf_calib.data.sources import read_column
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.metrics.checks import check_integer, check_names


def load_tagged(args: DataArguments) -> DatasetDict:
    """Load the splits train, calibration and test of tagged sentences, with columns `tokens` and `tags`.

    `text_column` has the tokens of a sentence, and `label_column` its tags. Raise the errors of `choose_tokens`, and a
    ValueError if an argument does not apply to sentences.
    """
    for name in (
        "ood_data",
        "test_size",
        "multi_label",
        "label_separator",
        "label_columns",
        "no_label",
    ):
        got, way_out = (
            getattr(args, name),
            "leave it out: it is for labels of whole texts or images",
        )
        check(not got, f"{name} to be left out for tokens", got, way_out)
    check_left_out(args, ["image_column"], "for tokens")
    way_out = "pass train_file and test_file, or name a dataset with tags"
    is_read = args.train_file is not None or args.dataset != BUILT_IN
    check(is_read, "dataset to have tagged sentences", repr(args.dataset), way_out)
    columns = {"tokens_column": args.text_column, "tags_column": args.label_column}
    dataset = choose_tokens(
        splits_of(args, args.test_split), **columns, tag_names=args.class_names
    )
    return held_out(dataset, args, stratify=False)


def choose_tokens(
    dataset: DatasetDict,
    *,
    tokens_column: str = "tokens",
    tags_column: str = "ner_tags",
    tag_names: Sequence[str] | None = None,
) -> DatasetDict:
    """Keep the tokens and the tags of every sentence of every split, under fixed names, and check them.

    Args:
        dataset: splits with any columns, one of them named `train`.
        tokens_column: the column of lists of str, which becomes `tokens`.
        tags_column: the column of lists of tags, one per token: names, a ClassLabel, or ids of `tag_names`. It becomes
            `tags`, the same ClassLabel in every split.
        tag_names: tags in the order of their ids; by default those of the ClassLabel, or the sorted tags of train with
            "O" first.

    Raises:
        ValueError: if a column is missing, a split is empty, a sentence has no token or not one tag per token, a tag is
            not among the names, or ids have no names.

    >>> rows = Dataset.from_dict({"words": [["Ada", "sleeps"]], "tags": [["B-person", "O"]]})
    >>> chosen = choose_tokens(DatasetDict({"train": rows}), tokens_column="words", tags_column="tags")
    >>> chosen["train"].features["tags"].feature.names, chosen["train"][0]
    (['O', 'B-person'], {'tokens': ['Ada', 'sleeps'], 'tags': [1, 0]})
    """
    check_names("tag_names", tag_names)
    check_is_no_label("tokens_column", tokens_column, [tags_column])
    columns = tokens_column, tags_column
    read = {
        name: read_sentences(rows, *columns, name=f"split {name!r}")
        for name, rows in dataset.items()
    }
    names = list(
        tag_names or _names_in(dataset["train"], tags_column, read["train"][1])
    )
    differ = len(set(names)) == len(names) >= 2
    check(
        differ, "the tags to be at least two, and differ", few(names), "check the tags"
    )
    features = Features(
        {"tokens": List(Value("string")), "tags": List(ClassLabel(names=names))}
    )
    found = DatasetDict()
    for name, (tokens, tags) in read.items():
        ids = tag_ids(tags, names, name=f"split {name!r}")
        found[name] = Dataset.from_dict(
            {"tokens": tokens, "tags": ids}, features=features
        )
    return found


def read_sentences(
    rows: Dataset, tokens_column: str, tags_column: str, *, name: str
) -> tuple[list[list[str]], list[list[Any]]]:
    """Return the checked tokens and tags of each sentence; tags of a ClassLabel are returned as names."""
    check(
        len(rows) > 0, f"{name} to have rows", 0, "check the file or the split's name"
    )
    found = []
    for argument, column, what, kinds in (
        ("text_column", tokens_column, "tokens", TEXTS),
        ("label_column", tags_column, "tags", (*TEXTS, *INTEGERS)),
    ):
        requirement = (
            f"{argument} to be one of {', '.join(rows.column_names)} in {name}"
        )
        check(
            column in rows.column_names,
            requirement,
            repr(column),
            did_you_mean(column, rows.column_names),
        )
        feature = rows.features[column]
        if not is_of(getattr(feature, "feature", None), *kinds):
            argument_of, way_out = (
                f"column {column!r} of {name}",
                f"choose another {argument}",
            )
            raise InputTypeError(
                expected(argument_of, f"hold lists of {what}", feature, way_out)
            )
        found.append(read_column(rows, column).to_pylist())
    tokens, tags = found
    for i, (own, of_own) in enumerate(zip(tokens, tags, strict=True)):
        if (
            not own
            or not of_own
            or len(own) != len(of_own)
            or None in own
            or None in of_own
        ):
            requirement = "have at least one token, and a tag for each, without gaps"
            got = f"{len(own or ())} and {len(of_own or ())} in row {i}, or one that is missing"
            raise InputValueError(
                expected(
                    f"each row of {name}", requirement, got, "correct or remove it"
                )
            )
    inner = rows.features[tags_column].feature
    if isinstance(inner, ClassLabel):  # The Hub marks withheld tags by -1.
        way_out = "choose another split or label_column, or remove these rows"
        tags = names_of_ids(tags, inner.names, f"the tags of {name}", way_out)
    return tokens, tags


def tag_ids(
    tags: Sequence[Sequence[Any]], names: Sequence[str], *, name: str
) -> list[list[int]]:
    """Return the ids of tags that are names or ids; raise ValueError with the row if a tag is unknown."""
    way_out = "choose another split or label_column, or name all tags, in order of their id, as class_names"
    return ClassNames(names).ids(tags, f"the tags of {name}", way_out)


def _names_in(rows: Dataset, column: str, tags: list[list[Any]]) -> list[str]:
    inner = rows.features[column].feature
    if isinstance(inner, ClassLabel):
        return list(inner.names)
    way_out = "name them all, in order of their id, as class_names"
    are_names = not isinstance(tags[0][0], int)
    check(
        are_names, f"column {column!r} to have names for its tags", "ids only", way_out
    )
    return sorted(
        {tag for row in tags for tag in row}, key=lambda tag: (tag != "O", tag)
    )


def tag_maps(dataset: DatasetDict) -> dict[str, Any]:
    """Return `num_labels`, `id2label` and `label2id` of the tags, for `from_pretrained`."""
    return maps_of(dataset["train"].features["tags"].feature.names)


def tokenize_words(
    rows: Dataset, tokenizer: Any, *, max_length: int | None = None
) -> Dataset:
    """Tokenize sentences into sub-words; the first sub-word of a token has its tag as label, the others -100.

    Warn of tokens that the model does not read. Raise ValueError if the tokenizer has no map from sub-words to words.

    Args:
        rows: a split from `choose_tokens`.
        tokenizer: a fast tokenizer; a byte-level one (RoBERTa, GPT-2) must be loaded with `add_prefix_space=True`.
        max_length: the largest number of sub-words of a sentence, which is truncated; None for no limit.

    Returns:
        A dataset with the tokenizer's outputs, such as `input_ids`, and `labels` of the same length.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "Ada": 1, "sleep": 2, "##s": 3}, unk_token="[UNK]"))
    >>> pieces.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    >>> rows = Dataset.from_dict({"tokens": [["Ada", "sleeps"]], "tags": [[1, 0]]})
    >>> tokenize_words(rows, PreTrainedTokenizerFast(tokenizer_object=pieces))["labels"][:]
    [[1, 0, -100]]
    """
    if max_length is not None:
        check_integer("max_length", max_length, 1, "leave it out for no limit")
    encoded, note = encode_words(rows, tokenizer, max_length)
    if note:
        warnings.warn(note, stacklevel=2)
    return encoded


def encode_words(
    rows: Dataset, tokenizer: Any, max_length: int | None
) -> tuple[Dataset, str | None]:
    """Return the result of `tokenize_words`, and a sentence on words that the model does not read, if any."""
    got, way_out = type(tokenizer).__name__, "load a fast one: it has tokenizer.json"
    check(
        tokenizer.is_fast,
        "the tokenizer to know the word of each sub-word",
        got,
        way_out,
    )

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        cut = {"truncation": max_length is not None, "max_length": max_length}
        encoded = tokenizer(batch["tokens"], is_split_into_words=True, **cut)
        labels = []
        for i, tags in enumerate(batch["tags"]):
            words = encoded.word_ids(i)
            pairs = zip([None, *words[:-1]], words, strict=True)
            labels.append(
                [
                    IGNORE_INDEX if word in (None, before) else tags[word]
                    for before, word in pairs
                ]
            )
        return {**encoded, "labels": labels}

    encoded = rows.map(
        encode, batched=True, remove_columns=rows.column_names, desc="Tokenizing"
    )
    n_words = sum(map(len, rows["tokens"][:]))
    n_read = sum(
        label != IGNORE_INDEX for labels in encoded["labels"][:] for label in labels
    )
    if n_read == n_words:
        return encoded, None
    limit = "" if max_length is None else f" beyond max_length={max_length}, or"
    return encoded, (
        f"{n_words - n_read:,} of {n_words:,} tokens are{limit} of no character that the tokenizer knows. They count "
        "nowhere. Raise max_length if they are many."
    )
