"""Word tokenizer, and GloVe vectors for its words."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_calib._errors import check

_PAD, _UNKNOWN = "[PAD]", "[UNK]"


def train_word_tokenizer(
    texts: Iterable[str], *, vocab_size: int = 20_000, max_length: int = 1000
) -> PreTrainedTokenizerFast:
    """Build a tokenizer of the most frequent words, for the global-pooling CNN.

    Texts are lower-cased and split into runs of letters, digits and underscores; everything between
    them is dropped. Words outside the vocabulary become `[UNK]`.

    Args:
        texts: the training texts, and only these.
        vocab_size: at least 3; `[PAD]` (id 0) and `[UNK]` (id 1) count.
        max_length: `truncation=True` keeps this many words, the last ones: as the papers' code
            does.

    >>> tokenizer = train_word_tokenizer(["The cat sat.", "The dog!"], vocab_size=10)
    >>> tokenizer.tokenize("The bird, the dog")
    ['the', '[UNK]', 'the', 'dog']
    """
    are_several = not isinstance(texts, str)
    check(are_several, "texts to be a collection of texts", "one str", "pass [text]")
    way_out = "the default is 20000"
    check(vocab_size >= 3, "vocab_size to be at least 3", vocab_size, way_out)
    tokenizer = Tokenizer(models.WordLevel(unk_token=_UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    words = Regex(r"\w+")
    between = pre_tokenizers.Split(words, behavior="removed", invert=True)
    tokenizer.pre_tokenizer = between
    special = [_PAD, _UNKNOWN]
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    way_out = "check that they are the training texts"
    check(tokenizer.get_vocab_size() >= 3, "texts to hold words", "none", way_out)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        unk_token=_UNKNOWN,
        model_max_length=max_length,
        truncation_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def load_glove(
    path: str | PathLike[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[torch.Tensor, float]:
    """Read the vectors of a tokenizer's words from a GloVe text file, such as glove.6B.100d.txt.

    Returns:
        The vectors (vocab_size, D) float32 for the CNN's `set_word_vectors`, zero for words that
        are not in the file, and the coverage: the fraction of the vocabulary, without special
        tokens, that was found.

    References:
        Pennington, Socher, Manning, GloVe: Global Vectors for Word Representation, 2014.
    """
    vocabulary = tokenizer.get_vocab()
    for special in tokenizer.all_special_tokens:
        vocabulary.pop(special, None)
    wanted = {word.encode(): i for word, i in vocabulary.items()}
    found: dict[int, np.ndarray] = {}
    size = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            size = size or line.rstrip().count(b" ")
            # A few words of the larger GloVe files contain spaces.
            word, *numbers = line.rstrip().rsplit(b" ", max(size, 2))
            if number > 1 and (word not in wanted or wanted[word] in found):
                continue
            try:
                vector = np.array(numbers).astype(float)
            except ValueError:
                vector = np.empty(0)
            holds = len(vector) == size >= 2 and bool((abs(vector) < 1e38).all())
            requirement = f"line {number} of {path} to be a word and {max(size, 2)} finite numbers"
            way_out = (
                "check the download; a file in word2vec form must lose its first line"
            )
            check(holds, requirement, line.decode(errors="replace").strip(), way_out)
            if word in wanted:
                found[wanted[word]] = vector
    way_out = "check that it is a GloVe file"
    check(bool(found), f"{path} to have vectors for some of the words", "none", way_out)
    vectors = np.zeros((len(tokenizer), size), dtype=np.float32)
    vectors[list(found)] = list(found.values())
    return torch.from_numpy(vectors), len(found) / len(wanted)
