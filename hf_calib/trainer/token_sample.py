"""A random sample of the labelled tokens of a pass: a vocabulary's logits of all of them would fill the memory."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor

from hf_calib.losses.statistics.definitions import IGNORE_INDEX

# A temperature's standard error is below 1% with so many tokens, and so many logits take half a GiB in float32.
MOST_TOKENS = 20_000
MOST_LOGITS = 2**27


class TokenSample:
    """Keeps logits and labels of the tokens whose random number is below a share, halved when they are too many."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.share = 1.0
        self.most = MOST_TOKENS
        self.rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Take a batch: logits (N, L, C), labels (N, L)."""
        self.most = min(MOST_TOKENS, max(1, MOST_LOGITS // logits.shape[-1]))
        numbers = random_numbers(labels)
        keep = (labels != IGNORE_INDEX) & (numbers < self.share)
        self.rows.append((logits[keep].float(), labels[keep], numbers[keep]))
        while self._n_tokens() > self.most:
            self._halve()

    def finish(self) -> list[tuple[Tensor, Tensor]]:
        """This process's part of the sample, batch by batch; called by all of them, after the last batch."""
        least = self._of_all(self.share).min()
        most = self._of_all(self.most).min()
        while self.share > least:
            self._halve()
        while self._of_all(self._n_tokens()).sum() > most:
            self._halve()
        return [(logits, labels) for logits, labels, _ in self.rows]

    def _halve(self) -> None:
        self.share /= 2
        self.rows = [tuple(part[row[2] < self.share] for part in row) for row in self.rows]  # type: ignore[misc]

    def _n_tokens(self) -> int:
        return sum(len(labels) for _, labels, _ in self.rows)

    def _of_all(self, number: float) -> Tensor:
        return self.accelerator.gather(torch.tensor([number], device=self.accelerator.device))


def random_numbers(labels: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float32 (N, L): a hash of labels (N, L) and places, whatever the padding.

    >>> numbers = random_numbers(torch.tensor([[5, 6, -100], [5, 6, 7]]))
    >>> bool((numbers[0, :2] == random_numbers(torch.tensor([[-100, 5, 6]]))[0, 1:]).all())
    True
    """
    counted = labels != IGNORE_INDEX
    place = counted.long().cumsum(dim=1)
    own = _mixed(labels.masked_fill(~counted, 0) + 2**32 * place).masked_fill(~counted, 0)
    whole = _mixed(own.sum(dim=1, keepdim=True))  # int64 wraps around
    return (_mixed(own ^ whole) & (2**24 - 1)).float() / 2**24


def _mixed(values: Tensor) -> Tensor:
    """Each int64 with its bits well mixed (the finaliser of SplitMix64)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        # torch shifts the sign in from the left: the mask takes it out.
        values = (values ^ ((values >> shift) & (2 ** (64 - shift) - 1))) * factor
    return values ^ ((values >> 31) & (2**33 - 1))
