"""Scores of options of any length: log-likelihoods of what may follow a prompt."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_calib._errors import InputTypeError, InputValueError, expected


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

    For answers of several tokens, or language models that have no sequence classifier: the scores (N, K) are logits to
    every metric and map here. Options of one token each are cheaper as a `label_token_classifier`, which is also served
    by others.

    $$s_{ik} = \sum_t \log p(o_{k,t} \mid \text{prompt}_i, o_{k,<t})$$

    Args:
        model: a causal language model, any float dtype; left as it is.
        tokenizer: its tokenizer.
        prompts: N texts.
        options: K texts, as they follow a prompt: mostly with a space before them.
        batch_size: of sequences, at least 1; at a time their logits at the options' tokens are held.
        per_token: the mean over the option's tokens, so that short options have no advantage.

    Returns:
        (N, K) float64, in nats; at most 0.

    Raises:
        TypeError: if model is not a causal language model, or prompts or options are not texts.
        ValueError: if there are none, fewer than two options, one without a token, a token is not in the model's
            vocabulary, or a sequence is longer than the model reads.

    Notes:
        Prompts and options are tokenized apart, and the tokens joined. Where the joint text would be tokenized
        otherwise, move the space to the other side.

    References:
        Brown et al. 2020, "Language models are few-shot learners", 2.4 (scores per token).

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    >>> words = {"[PAD]": 0, "good": 1, "bad": 2, "not": 3, "was": 4}
    >>> made = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    >>> made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]")
    >>> config = LlamaConfig(
    ...     vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> scores = option_log_likelihoods(LlamaForCausalLM(config), tokenizer, ["was"], ["good", "not bad"])
    >>> scores.shape
    (1, 2)
    """
    if not getattr(model, "can_generate", bool)() or model.config.is_encoder_decoder:
        way_out = "load it with AutoModelForCausalLM"
        raise InputTypeError(expected("model", "be a causal language model", type(model).__name__, way_out))
    for name, texts in (("prompts", prompts), ("options", options)):
        is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
        if not is_list or not all(isinstance(text, str) for text in texts):
            got = f"{type(texts).__name__}"
            raise InputTypeError(expected(name, "be a sequence of texts", got, "pass a list of str"))
    if not isinstance(batch_size, int) or batch_size < 1:
        way_out = "pass how many sequences fit into memory"
        raise InputValueError(expected("batch_size", "be a whole number >= 1", repr(batch_size), way_out))
    if not prompts or len(options) < 2:
        got = f"{len(prompts)} prompts and {len(options)} options"
        raise InputValueError(expected("prompts and options", "be at least one and two", got, "pass more"))
    answers = [tokenizer(option, add_special_tokens=False)["input_ids"] for option in options]
    empty = [option for option, ids in zip(options, answers, strict=True) if not ids]
    if empty:
        raise InputValueError(expected("options", "have at least one token", repr(empty[0]), "leave it out"))
    asked = tokenizer(list(prompts))["input_ids"]
    _check_lengths(model, asked, answers)
    pairs = [(i, k) for i in range(len(prompts)) for k in range(len(options))]
    pairs.sort(key=lambda pair: -(len(asked[pair[0]]) + len(answers[pair[1]])))
    scores = np.empty((len(prompts), len(options)))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for start in range(0, len(pairs), batch_size):
                chunk = pairs[start : start + batch_size]
                found = _scores(model, [(asked[i], answers[k]) for i, k in chunk])
                for (i, k), score in zip(chunk, found, strict=True):
                    scores[i, k] = score / (len(answers[k]) if per_token else 1)
    finally:
        model.train(was_training)
    return scores


def _scores(model: Any, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
    """Log-likelihoods of the second parts.

    Padded on the right, where neither the positions nor the state of a recurrent model know of the padding.
    """
    rows = [torch.tensor(asked + answer) for asked, answer in pairs]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    # The logits of an answer's token stand at the token before it.
    places = [torch.arange(len(asked) - 1, len(asked) - 1 + len(answer)) for asked, answer in pairs]
    kept = torch.cat(places).unique()
    device = model.device
    inputs: dict[str, Any] = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits = model(**inputs, logits_to_keep=kept.to(device)).logits
    else:
        logits = model(**inputs).logits[:, kept.to(device)]
    logits = logits.float().log_softmax(dim=-1).cpu()
    found = []
    for scored, own, (_, answer) in zip(logits, places, pairs, strict=True):
        found.append(float(scored[torch.searchsorted(kept, own), torch.tensor(answer)].double().sum()))
    return found


def _check_lengths(model: Any, asked: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
    vocabulary = len(model.get_input_embeddings().weight)
    largest = max(max(ids, default=0) for ids in [*asked, *answers])
    if largest >= vocabulary:
        got = f"token {largest} for a vocabulary of {vocabulary}"
        way_out = "model.resize_token_embeddings(len(tokenizer)), or take the tokenizer of this model"
        raise InputValueError(expected("tokenizer", "have the model's vocabulary", got, way_out))
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    lengths = [len(ids) for ids in asked]
    longest = max(lengths) + max(len(ids) for ids in answers)
    if min(lengths) == 0:
        got = f"none in prompt {lengths.index(0)}"
        raise InputValueError(expected("prompts", "have at least one token", got, "leave empty ones out"))
    if limit is not None and longest > limit:
        got = f"{longest} tokens in prompt {lengths.index(max(lengths))} and an option"
        raise InputValueError(
            expected("prompts", f"fit into the model's {limit} positions", got, "shorten the prompts")
        )
