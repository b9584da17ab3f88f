"""Word tokenizer, and GloVe vectors for its words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_calib._errors import InputTypeError, InputValueError, expected

_PAD, _UNKNOWN = "[PAD]", "[UNK]"


def train_word_tokenizer(
    texts: Iterable[str], *, vocab_size: int = 20_000, max_length: int = 1000
) -> PreTrainedTokenizerFast:
    """Build a tokenizer of the most frequent words, for the global-pooling CNN.

    Texts are lower-cased and split into runs of letters, digits and underscores; everything between them
    is dropped. Words outside the vocabulary become `[UNK]`.

    Args:
        texts: the training texts, and only these.
        vocab_size: int >= 3; `[PAD]` (id 0) and `[UNK]` (id 1) count.
        max_length: int >= 1; `truncation=True` keeps this many words, the last ones: as the papers' code does.

    Returns:
        A tokenizer that gives `input_ids` and `attention_mask`; `save_pretrained` works as usual.

    Raises:
        TypeError: if `texts` is one str.
        ValueError: if a size is out of range, or there is no word in the texts.

    >>> tokenizer = train_word_tokenizer(["The cat sat.", "The dog!"], vocab_size=10)
    >>> tokenizer.tokenize("The bird, the dog")
    ['the', '[UNK]', 'the', 'dog']
    """
    if isinstance(texts, str):
        raise InputTypeError(expected("texts", "be a collection of texts", "one str", "pass [text]"))
    if vocab_size < 3:
        raise InputValueError(expected("vocab_size", "be at least 3", vocab_size, "the default is 20000"))
    if max_length < 1:
        raise InputValueError(expected("max_length", "be at least 1", max_length, "the default is 1000"))
    tokenizer = Tokenizer(models.WordLevel(unk_token=_UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+"), behavior="removed", invert=True)
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, special_tokens=[_PAD, _UNKNOWN], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    if tokenizer.get_vocab_size() < 3:
        raise InputValueError(
            expected("texts", "hold words", "none", "check that they are the training texts")
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        unk_token=_UNKNOWN,
        model_max_length=max_length,
        truncation_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def load_glove(path: str | PathLike[str], tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, float]:
    """Read the vectors of a tokenizer's words from a GloVe text file, such as glove.6B.100d.txt.

    The file is read line by line, and only the vectors that are needed are kept. Give them to
    `GlobalPoolingCNNForSequenceClassification.set_word_vectors`.

    Args:
        path: lines of a word and its numbers, separated by single spaces, UTF-8.
        tokenizer: as `train_word_tokenizer` returns it.

    Returns:
        The vectors (vocab_size, D) float32, zero for words that are not in the file, and the coverage:
        the fraction of the vocabulary, without special tokens, that was found.

    Raises:
        ValueError: if a line has another length or anything but finite numbers, or no word of the
            vocabulary is in the file.

    References:
        Pennington, Socher, Manning, GloVe: Global Vectors for Word Representation, 2014.

    >>> import tempfile
    >>> tokenizer = train_word_tokenizer(["the cat", "the dog"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "vectors.txt")
    ...     _ = path.write_text("the 0.1 0.2\\ncat 0.3 0.4\\nhorse 0.5 0.6\\n")
    ...     vectors, coverage = load_glove(path, tokenizer)
    >>> vectors.shape, round(coverage, 2)
    (torch.Size([5, 2]), 0.67)
    """
    special = set(tokenizer.all_special_tokens)
    wanted = {word.encode(): i for word, i in tokenizer.get_vocab().items() if word not in special}
    found: dict[int, np.ndarray] = {}
    for where, word, numbers in _glove_lines(Path(path)):
        row = wanted.get(word)
        if row is not None and row not in found:
            found[row] = _parse(numbers, where)
    if not found:
        raise InputValueError(
            expected(str(path), "have vectors for some of the words", "none", "check that it is a GloVe file")
        )
    vectors = np.zeros((len(tokenizer), len(next(iter(found.values())))), dtype=np.float32)
    vectors[list(found)] = list(found.values())
    return torch.from_numpy(vectors), len(found) / len(wanted)


def _glove_lines(path: Path) -> Iterator[tuple[str, bytes, list[bytes]]]:
    """Place, word and numbers of each line; every line has as many numbers as the first."""
    n_numbers = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            n_numbers = n_numbers or line.rstrip().count(b" ")
            where = f"line {number} of {path}"
            word, *numbers = line.rstrip().rsplit(b" ", max(n_numbers, 2))
            # A few words of the larger GloVe files contain spaces; none of these ends in a number.
            if len(numbers) < 2 or len(numbers) < n_numbers or _is_number(word.partition(b" ")[2]):
                raise InputValueError(
                    expected(
                        where,
                        f"be a word and {max(n_numbers, 2)} numbers",
                        f"{line.rstrip().count(b' ')} numbers",
                        "check the download; a file in word2vec form must lose its first line",
                    )
                )
            yield where, word, numbers


def _parse(numbers: list[bytes], where: str) -> np.ndarray:
    with np.errstate(over="ignore"):  # a number that float32 cannot hold is refused below, as infinite
        vector = np.array([float(n) if _is_number(n) else math.nan for n in numbers]).astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(vector))
    if len(bad):
        got = numbers[bad[0]].decode(errors="replace")
        raise InputValueError(expected(where, "hold finite numbers", got, "check the download"))
    return vector


def _is_number(text: bytes) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
