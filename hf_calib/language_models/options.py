"""Scores of options of any length: log-likelihoods of possible continuations of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from hf_calib._errors import InputTypeError, check, expected
from hf_calib.language_models.label_tokens import are_texts, is_causal, keeps_positions
from hf_calib.losses.statistics.definitions import IGNORE_INDEX


def option_log_likelihoods(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    options: Sequence[str],
    *,
    batch_size: int = 8,
    per_token: bool = False,
) -> NDArray[np.float64]:
    r"""Score each option by its log-likelihood after each prompt.

    Use it for answers of several tokens, or for language models without a sequence classifier. All
    metrics and calibrators accept the scores (N, K) as logits. For options of one token,
    `label_token_classifier` is cheaper.

    $$s_{ik} = \sum_t \log p(o_{k,t} \mid \text{prompt}_i, o_{k,<t})$$

    Args:
        model: a causal language model of any float dtype, which does not change.
        tokenizer: its tokenizer.
        prompts: N texts.
        options: K texts that follow a prompt, usually beginning with a space.
        batch_size: number of sequences per batch, at least 1.
        per_token: whether to use the mean over an option's tokens, so that short options have no
            advantage.

    Returns:
        Scores (N, K), float64, in nats, at most 0.

    Raises:
        TypeError: if model is not a causal language model, or prompts or options are not texts.
        ValueError: if there are too few texts, or a text has no tokens, unknown tokens, or too many
            tokens.

    Notes:
        Prompts and options are tokenized separately, and the tokens are concatenated. If the joint
        text has other tokens, move the space from one side to the other.

    References:
        Brown et al. 2020, "Language models are few-shot learners", 2.4 (scores per token).

    Example::

        scores = option_log_likelihoods(model, tokenizer, prompts, [" yes", " not at all"])
        probs = TemperatureScaling().fit(scores, labels).predict_proba(scores)
    """
    if not is_causal(model):
        way_out = "load it with AutoModelForCausalLM"
        raise InputTypeError(
            expected(
                "model", "be a causal language model", type(model).__name__, way_out
            )
        )
    for name, texts in (("prompts", prompts), ("options", options)):
        if not are_texts(texts):
            message = expected(
                name,
                "be a sequence of texts",
                type(texts).__name__,
                "pass a list of str",
            )
            raise InputTypeError(message)
    is_whole = isinstance(batch_size, int) and batch_size >= 1
    way_out = "pass how many sequences fit into memory"
    check(is_whole, "batch_size to be a whole number >= 1", repr(batch_size), way_out)
    got = f"{len(prompts)} and {len(options)}"
    enough = len(prompts) >= 1 and len(options) >= 2
    check(enough, "prompts and options to be at least one and two", got, "pass more")
    asked = tokenizer(list(prompts))["input_ids"]
    answers = tokenizer(list(options), add_special_tokens=False)["input_ids"]
    empty = [option for option, ids in zip(options, answers, strict=True) if not ids]
    check(
        not empty,
        "options to have at least one token",
        repr("".join(empty[:1])),
        "leave it out",
    )
    _check_tokens(model, asked, answers)
    pairs = [(i, k) for i in range(len(prompts)) for k in range(len(options))]
    # Batches are of similar lengths, with little padding. The longest come first, so
    # that memory that is too small shows at once.
    pairs.sort(key=lambda pair: -(len(asked[pair[0]]) + len(answers[pair[1]])))
    scores = np.empty((len(prompts), len(options)))
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(pairs), batch_size):
            chunk = pairs[start : start + batch_size]
            found = _scores(model, [(asked[i], answers[k]) for i, k in chunk])
            scores[tuple(zip(*chunk, strict=True))] = found
    finally:
        model.train(was_training)
    return scores / [len(ids) for ids in answers] if per_token else scores


@torch.no_grad()
def _scores(
    model: Any, pairs: Sequence[tuple[list[int], list[int]]]
) -> NDArray[np.float64]:
    """The log-likelihoods (N,) of the second parts, with padding on the right,
    which does not affect the others.
    """
    padded = partial(pad_sequence, batch_first=True)
    ids = padded([torch.tensor(asked + answer) for asked, answer in pairs])
    mask = padded(
        [torch.ones(len(asked + answer), dtype=torch.long) for asked, answer in pairs]
    )
    marked = [
        torch.tensor([IGNORE_INDEX] * len(asked) + answer) for asked, answer in pairs
    ]
    labels = padded(marked, padding_value=IGNORE_INDEX)
    # Only some positions need logits, which take the most memory with a large
    # vocabulary.
    places = (labels != IGNORE_INDEX).any(dim=0).nonzero()[:, 0]
    # A token's logits are at the position before it.
    kept = (places - 1).to(model.device)
    inputs = {
        "input_ids": ids.to(model.device),
        "attention_mask": mask.to(model.device),
    }
    only_these = keeps_positions(model)
    logits = model(**inputs, **({"logits_to_keep": kept} if only_these else {})).logits
    logits = logits if only_these else logits[:, kept]
    wanted = labels[:, places].to(model.device)
    losses = F.cross_entropy(
        # bfloat16 has only two to three digits.
        logits.float().flatten(0, 1),
        wanted.flatten(),
        reduction="none",
    )
    return -losses.view_as(wanted).cpu().double().sum(dim=1).numpy()


def _check_tokens(
    model: Any, asked: Sequence[list[int]], answers: Sequence[list[int]]
) -> None:
    """Raise for prompts without tokens, with unknown tokens,
    or with more tokens than the model can read.
    """
    lengths = [len(ids) for ids in asked]
    got = f"none in prompt {lengths.index(min(lengths))}"
    check(
        min(lengths) > 0,
        "prompts to have at least one token",
        got,
        "leave empty ones out",
    )
    vocabulary = len(model.get_input_embeddings().weight)
    # On a GPU, a token without an embedding makes the device unusable until the process
    # ends.
    largest = max(max(ids) for ids in [*asked, *answers])
    got = f"token {largest} for a vocabulary of {vocabulary}"
    way_out = "model.resize_token_embeddings(len(tokenizer)), or use the tokenizer of this model"
    check(
        largest < vocabulary, "tokenizer to have the model's vocabulary", got, way_out
    )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(lengths) + max(len(ids) for ids in answers)
    got = f"{longest} tokens in prompt {lengths.index(max(lengths))} and an option"
    fits = limit is None or longest <= limit
    check(
        fits,
        f"prompts to fit into the model's {limit} positions",
        got,
        "shorten the prompts",
    )
