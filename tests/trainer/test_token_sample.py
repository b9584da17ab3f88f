"""The sample of tokens that a temperature of a language model is fitted on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from hf_calib.trainer import token_sample
from hf_calib.trainer.token_sample import TokenSample, random_numbers
from tests.helpers.gloo_pair import run_on_two

N, LENGTH, VOCABULARY = 120, 24, 30


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    """Labels with padding; each logit says where it is from."""
    labels = torch.randint(VOCABULARY, (N, LENGTH), generator=torch.Generator().manual_seed(0))
    lengths = torch.randint(4, LENGTH + 1, (N, 1), generator=torch.Generator().manual_seed(1))
    labels[torch.arange(LENGTH) >= lengths] = -100
    logits = torch.arange(N * LENGTH, dtype=torch.float32).reshape(N, LENGTH, 1).repeat(1, 1, VOCABULARY)
    return logits, labels


def sampled(logits: torch.Tensor, labels: torch.Tensor, batch: int) -> list[int]:
    """Where the sampled tokens are from, in order."""
    sample = TokenSample(Accelerator(cpu=True))
    for part, of_part in zip(logits.split(batch), labels.split(batch), strict=True):
        sample.add(part, of_part)
    rows = sample.finish()
    places = torch.cat([part[:, 0] for part, _ in rows]).long()
    assert torch.equal(torch.cat([of_part for _, of_part in rows]), sequences()[1].flatten()[places])
    return places.tolist()


def test_all_tokens_are_kept_where_they_are_few() -> None:
    logits, labels = sequences()
    assert sampled(logits, labels, 7) == torch.nonzero(labels.flatten() != -100).flatten().tolist()


@pytest.mark.parametrize(("constant", "value"), [("MOST_TOKENS", 300), ("MOST_LOGITS", 300 * VOCABULARY)])
def test_the_sample_is_bounded_and_the_same_for_every_batch_size(
    constant: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_sample, constant, value)
    logits, labels = sequences()
    whole = sampled(logits, labels, N)
    assert 100 < len(whole) <= 300
    assert sampled(logits, labels, 1) == sampled(logits, labels, 7) == whole
    order = torch.randperm(N, generator=torch.Generator().manual_seed(2))
    assert sorted(sampled(logits[order], labels[order], 7)) == whole


def test_padding_on_the_left_changes_no_number() -> None:
    labels = torch.tensor([[4, 5, 6, -100, -100], [-100, -100, 4, 5, 6]])
    right, left = random_numbers(labels)
    assert torch.equal(right[:3], left[2:])


def test_the_numbers_are_uniform_and_unrelated() -> None:
    for labels in (
        torch.randint(128_256, (400, 500), generator=torch.Generator().manual_seed(3)),
        torch.arange(400)[:, None].repeat(1, 500),
        torch.arange(200_000).reshape(400, 500),
    ):
        numbers = random_numbers(labels).double()
        counts = torch.histc(numbers, 50, 0, 1)
        assert float(((counts - 4000) ** 2 / 4000).sum()) < 95  # chi squared, 49 degrees: 1e-4 beyond
        for one, other in ((numbers[:, 1:], numbers[:, :-1]), (numbers[1:], numbers[:-1])):
            correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
            assert abs(float(correlation)) < 0.01


def sample_in_process(rank: int, folder: Path) -> None:
    token_sample.MOST_TOKENS = 300
    logits, labels = sequences()
    first = 90  # uneven: the first process has to halve more often
    own = slice(None, first) if rank == 0 else slice(first, None)
    (folder / f"{rank}.json").write_text(json.dumps(sampled(logits[own], labels[own], 16)))


@pytest.mark.slow
def test_two_processes_keep_the_sample_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_two(sample_in_process, tmp_path)
    both = [place for rank in range(2) for place in json.loads((tmp_path / f"{rank}.json").read_text())]
    monkeypatch.setattr(token_sample, "MOST_TOKENS", 300)
    assert both == sampled(*sequences(), N)


def test_a_process_without_a_batch_takes_part_in_what_all_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three processes two have more together than each alone may; the third has not seen how large a row is."""
    monkeypatch.setattr(token_sample, "MOST_LOGITS", 300 * VOCABULARY)
    given, together = [torch.empty(0)] * 3, Barrier(3, timeout=10)
    logits, labels = sequences()
    shares = [(logits[:60], labels[:60]), (logits[60:], labels[60:]), None]

    def finished(rank: int) -> int:
        def gather(value: torch.Tensor) -> torch.Tensor:
            given[rank] = value
            together.wait()
            found = torch.cat(given)
            together.wait()
            return found

        sample = TokenSample(SimpleNamespace(gather=gather, device="cpu"))  # type: ignore[arg-type]
        if shares[rank] is not None:
            sample.add(*shares[rank])
        return sum(len(of_part) for _, of_part in sample.finish())

    with ThreadPoolExecutor(3) as processes:
        *seen, nothing = processes.map(finished, range(3))
    assert sum(seen) == len(sampled(logits, labels, N))
    assert nothing == 0
