"""Tagged sentences: columns `tokens` and `tags`, and labels of a tokenizer's sub-words."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from hf_calib._errors import InputTypeError, check, expected, few
from hf_calib.data.arguments import (
    BUILT_IN,
    DataArguments,
    check_left_out,
    held_out,
    maps_of,
    splits_of,
)
from hf_calib.data.columns import check_is_no_label
from hf_calib.data.labels import INTEGERS, TEXTS, ids_of, in_lists, is_of, names_of
from hf_calib.data.sources import column_of
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.metrics.checks import RowError, check_integer, check_names

_OF_WHOLE_TEXTS = (
    "ood_data",
    "test_size",
    "multi_label",
    "label_separator",
    "label_columns",
    "no_label",
)


def load_tagged(args: DataArguments) -> DatasetDict:
    """Load the splits train, calibration and test of tagged sentences, as `choose_tokens` does.

    `text_column` has the tokens of a sentence, and `label_column` its tags. Raise the errors of
    `choose_tokens`, and a ValueError if an argument does not apply to sentences.
    """
    way_out = "leave it out: it is for labels of whole texts or images"
    for name in _OF_WHOLE_TEXTS:
        got = getattr(args, name)
        check(not got, f"{name} to be left out for tokens", got, way_out)
    check_left_out(args, ["image_column"], "for tokens")
    way_out = "pass train_file and test_file, or name a dataset with tags"
    is_read = args.train_file is not None or args.dataset != BUILT_IN
    check(is_read, "dataset to have tagged sentences", repr(args.dataset), way_out)
    dataset = choose_tokens(
        splits_of(args, args.test_split),
        tokens_column=args.text_column,
        tags_column=args.label_column,
        tag_names=args.class_names,
    )
    # A sentence has several tags, so no class has its share of the sentences.
    return held_out(dataset, args, stratify=False)


def choose_tokens(
    dataset: DatasetDict,
    *,
    tokens_column: str = "tokens",
    tags_column: str = "ner_tags",
    tag_names: Sequence[str] | None = None,
) -> DatasetDict:
    """Keep the tokens and the tags of every sentence of every split, under fixed names.

    Args:
        dataset: splits with any columns, one of them named `train`.
        tokens_column: the column of lists of str, which becomes `tokens`.
        tags_column: the column of lists of tags, one per token: names, a ClassLabel, or ids of
            `tag_names`. It becomes `tags`, the same ClassLabel in every split.
        tag_names: tags in the order of their ids; by default those of the ClassLabel, or the sorted
            tags of train with "O" first.

    Raises:
        ValueError: if a column is missing, a split is empty, a sentence has no token or not one tag
            per token, a tag is not among the names, or ids have no names.

    >>> rows = Dataset.from_dict({"words": [["Ada", "sleeps"]], "tags": [["B-person", "O"]]})
    >>> splits = DatasetDict({"train": rows})
    >>> chosen = choose_tokens(splits, tokens_column="words", tags_column="tags")
    >>> chosen["train"].features["tags"].feature.names, chosen["train"][0]
    (['O', 'B-person'], {'tokens': ['Ada', 'sleeps'], 'tags': [1, 0]})
    """
    check_names("tag_names", tag_names)
    check_is_no_label("tokens_column", tokens_column, [tags_column])
    read = {}
    for split, rows in dataset.items():
        where = f"split {split!r}"
        read[split] = read_sentences(rows, tokens_column, tags_column, name=where)
    names = list(tag_names or [])
    if not names:
        _, tags_of_train = read["train"]
        names = _names_in(dataset["train"], tags_column, tags_of_train)
    differ = len(set(names)) == len(names) >= 2
    requirement = "the tags to be at least two, and differ"
    check(differ, requirement, few(names), "check the tags")
    found = DatasetDict()
    for split, (tokens, tags) in read.items():
        found[split] = tagged_sentences(tokens, tags, names, name=f"split {split!r}")
    return found


def read_sentences(
    rows: Dataset, tokens_column: str, tags_column: str, *, name: str
) -> tuple[list[list[str]], list[list[Any]]]:
    """Return the tokens and tags of each sentence, checked; tags of a ClassLabel as names."""
    way_out = "check the file or the split's name"
    check(len(rows) > 0, f"{name} to have rows", 0, way_out)
    tokens = _lists_of(rows, "text_column", tokens_column, TEXTS, name)
    tags = _lists_of(rows, "label_column", tags_column, (*TEXTS, *INTEGERS), name)
    # A tag too few would shift all tags behind it to other tokens.
    for i, (own, of_own) in enumerate(zip(tokens, tags, strict=True)):
        is_whole = None not in own and None not in of_own
        if not own or len(own) != len(of_own) or not is_whole:
            requirement = "have at least one token, and a tag for each, without gaps"
            got = f"{len(own)} and {len(of_own)}"
            if not is_whole:
                got += ", one of which is missing,"
            way_out = "correct or remove it"
            raise RowError(i, f"each row of {name}", requirement, got, way_out)
    kind = rows.features[tags_column].feature
    if isinstance(kind, ClassLabel):
        # The Hub marks withheld tags by -1.
        way_out = "choose another split or label_column, or remove these rows"
        argument = f"the tags of {name}"
        named = partial(names_of, names=kind.names, argument=argument, way_out=way_out)
        tags = in_lists(named, tags)
    return tokens, tags


def _lists_of(
    rows: Dataset, argument: str, column: str, kinds: Sequence[str], name: str
) -> list[list[Any]]:
    """The lists of a column, whose elements have one of these types."""
    where = f" of {name}"
    stored = column_of(rows, f"{argument}{where}", column, where=where)
    feature = rows.features[column]
    if not is_of(getattr(feature, "feature", None), *kinds):
        what = "tokens" if argument == "text_column" else "tags"
        way_out = f"choose another {argument}"
        requirement = f"hold lists of {what}"
        raise InputTypeError(
            expected(f"column {column!r}{where}", requirement, feature, way_out)
        )
    return stored.to_pylist()


def tagged_sentences(
    tokens: Sequence[Sequence[str]],
    tags: Sequence[Sequence[Any]],
    names: Sequence[str],
    *,
    name: str,
) -> Dataset:
    """Return sentences with tags, names or ids, as ids; errors have the name of the data."""
    way_out = (
        "choose another split or label_column, or name all tags, in order of their id, "
    )
    way_out += "as class_names"
    argument = f"the tags of {name}"
    as_ids = partial(ids_of, names=names, argument=argument, way_out=way_out)
    columns = {"tokens": tokens, "tags": in_lists(as_ids, tags)}
    of_tags = List(ClassLabel(names=list(names)))
    features = Features({"tokens": List(Value("string")), "tags": of_tags})
    return Dataset.from_dict(columns, features=features)


def _names_in(rows: Dataset, column: str, tags: list[list[Any]]) -> list[str]:
    """The names of the tags, "O" first where no ClassLabel gives an order."""
    kind = rows.features[column].feature
    if isinstance(kind, ClassLabel):
        return list(kind.names)
    way_out = "name them all, in order of their id, as class_names"
    requirement = f"column {column!r} to have names for its tags"
    # Each sentence has a tag, as was checked when it was read.
    check(not isinstance(tags[0][0], int), requirement, "ids only", way_out)
    return sorted(set(chain.from_iterable(tags)), key=lambda name: (name != "O", name))


def tag_maps(dataset: DatasetDict) -> dict[str, Any]:
    """Return `num_labels`, `id2label` and `label2id` of the tags, for `from_pretrained`."""
    return maps_of(dataset["train"].features["tags"].feature.names)


def tokenize_words(
    rows: Dataset, tokenizer: Any, *, max_length: int | None = None
) -> Dataset:
    """Tokenize sentences into sub-words; the first one of a token has its tag, the others -100.

    Warn of tokens that the model does not read. Raise ValueError if the tokenizer has no map from
    sub-words to words.

    Args:
        rows: a split from `choose_tokens`.
        tokenizer: a fast tokenizer; a byte-level one (RoBERTa, GPT-2) must be loaded with
            `add_prefix_space=True`.
        max_length: the largest number of sub-words of a sentence, which is truncated; None for no
            limit.

    Returns:
        A dataset with the tokenizer's outputs, such as `input_ids`, and `labels` of the same
        length.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> vocabulary = {"[UNK]": 0, "Ada": 1, "sleep": 2, "##s": 3}
    >>> pieces = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
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
    """Return the result of `tokenize_words`, and a sentence on words that are not read, if any."""
    requirement = "the tokenizer to know the word of each sub-word"
    way_out = "load a fast one: it has tokenizer.json"
    # Without the map a tag would be given to the wrong sub-word.
    check(tokenizer.is_fast, requirement, type(tokenizer).__name__, way_out)

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer(
            batch["tokens"],
            is_split_into_words=True,
            truncation=max_length is not None,
            max_length=max_length,
        )
        labels = [
            _labels_of_sub_words(encoded.word_ids(i), tags)
            for i, tags in enumerate(batch["tags"])
        ]
        return {**encoded, "labels": labels}

    # Words without a sub-word, such as a variation selector, have no label, and are counted below.
    encoded = rows.map(
        encode, batched=True, remove_columns=rows.column_names, desc="Tokenizing"
    )
    n_words = sum(len(tokens) for tokens in rows["tokens"][:])
    labels = chain.from_iterable(encoded["labels"][:])
    # Every token that is read has one label, at its first sub-word.
    n_read = sum(label != IGNORE_INDEX for label in labels)
    if n_read == n_words:
        return encoded, None
    limit = "" if max_length is None else f" beyond max_length={max_length}, or"
    note = f"{n_words - n_read:,} of {n_words:,} tokens are{limit} of no character that the "
    note += "tokenizer knows. They count nowhere. Raise max_length if they are many."
    return encoded, note


def _labels_of_sub_words(words: Sequence[int | None], tags: Sequence[int]) -> list[int]:
    """The tag of each word at its first sub-word; other sub-words and the ends are ignored."""
    labels = []
    before = None
    for word in words:
        if word is None or word == before:
            labels.append(IGNORE_INDEX)
        else:
            labels.append(tags[word])
        before = word
    return labels
