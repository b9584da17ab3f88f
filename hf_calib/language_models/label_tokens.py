"""Classifiers of a language model's option tokens, and the conversion back to a language model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from hf_calib._errors import InputTypeError, check, expected, few
from hf_calib.export.heads import float64_logits, synthetic_batch, undisturbed
from hf_calib.models.prompts import KEY as PROMPT_KEY
from hf_calib.models.prompts import PromptTemplate

# The entry of config.json with the tokens of the classes and their language model.
KEY = "label_tokens"

_AS_TEXTS = 'pass {"yes": " yes", "no": " no"}, or more of them'
_BY_SCORES = "score its options with option_log_likelihoods, whose rows every metric and calibrator accepts"

# Relative to the largest logit, by the model's dtype.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.bfloat16: 0.05,
    torch.float16: 0.01,
}


def label_token_classifier(
    model: Any,
    tokenizer: Any,
    labels: Mapping[str, str] | Sequence[str],
    *,
    prompt: PromptTemplate | None = None,
) -> Any:
    r"""Make a sequence classifier of a causal language model,
    with a class for each of a few next tokens.

    Use it for judges, guards and rerankers that answer "yes" or "no", or A to D: its probabilities
    are those of the answer among the options. The result is a plain transformers model, so
    training, calibration, folding, decisions and exports work as for any classifier. Score options
    of several tokens with `option_log_likelihoods`.

    $$z_k = h_{\text{last}} \cdot W_{t_k}$$

    where h is the last hidden state at a prompt's last token, and W has the rows of the head, tied
    or not.

    Args:
        model: a causal language model of any float dtype, whose architecture has a sequence
            classifier in transformers (Llama, Qwen, Mistral, Phi-3, Gemma, GPT-2, OPT, GPT-NeoX,
            SmolLM, ...).
        tokenizer: its tokenizer.
        labels: class name -> the text of its token, as it follows a prompt,
            `{"yes": " yes", "no": " no"}`; or a sequence of texts that are the names too.
        prompt: how a text becomes the model's input, written into the config; without one, texts
            are prompts already.

    Returns:
        A `...ForSequenceClassification` in evaluation mode, with the body of `model`, not a copy.
        For `to_language_model`, `config.label_tokens` records the tokens and the language model's
        name.

    Raises:
        TypeError: if model is not a causal language model, or labels are not texts.
        ValueError: if a label is not one token of the model's vocabulary, two labels are equal,
            there is no padding token, the architecture has no sequence classifier, or its logits
            differ from the language model's (Gemma 2's soft capping, heads with different biases of
            the options, GPT-2 with padding on the left).

    Notes:
        The logits of both models are compared on padded rows before the classifier is returned.
        Inputs must not end with the padding token. It can be used and trained in 16 bits; call
        `model.float()` before `fold`.

    Example::

        judge = label_token_classifier(model, tokenizer, {"yes": " yes", "no": " no"})
    """
    if not (isinstance(model, PreTrainedModel) and is_causal(model)):
        way_out = "load it with AutoModelForCausalLM; of adapters, merge them first: model.merge_and_unload()"
        raise InputTypeError(
            expected(
                "model", "be a causal language model", type(model).__name__, way_out
            )
        )
    has_one = type(model.config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    _check_classifier(has_one, model, "transformers has no sequence classifier for it")
    tokens = option_tokens(tokenizer, labels)
    ids = list(tokens.values())
    head: Any = model.get_output_embeddings()
    got = f"token {max(ids)} for a head of {len(head.weight)}"
    way_out = "model.resize_token_embeddings(len(tokenizer)), or use the tokenizer of this model"
    check(
        max(ids) < len(head.weight),
        "labels to be tokens of the model's vocabulary",
        got,
        way_out,
    )
    # A bias that all options share changes no probability, and a classifier's head has none.
    bias = (
        torch.zeros(len(ids))
        if getattr(head, "bias", None) is None
        else head.bias.detach()[ids].double()
    )
    got = f"biases from {float(bias.min()):.3g} to {float(bias.max()):.3g} in its head"
    is_shared = float((bias - bias.mean()).abs().max()) <= 1e-6
    check(
        is_shared, "model to have no bias that differs between labels", got, _BY_SCORES
    )
    # A classifier of transformers finds the end of a prompt by its padding, and refuses
    # batches without a padding token.
    known = (
        tokenizer.pad_token_id,
        model.config.get_text_config().pad_token_id,
        tokenizer.eos_token_id,
    )
    padding = next((token for token in known if token is not None), None)
    way_out = "set tokenizer.pad_token to a token that no text ends with"
    check(
        padding is not None,
        "tokenizer to have a padding token",
        "none, and no end token",
        way_out,
    )
    config = copy.deepcopy(model.config)
    # This sets num_labels.
    config.id2label = dict(enumerate(tokens))
    config.label2id = {name: number for number, name in enumerate(tokens)}
    config.problem_type = "single_label_classification"
    config.get_text_config().pad_token_id = config.pad_token_id = padding
    texts = list(labels.values() if isinstance(labels, Mapping) else labels)
    setattr(
        config,
        KEY,
        {"ids": ids, "texts": texts, "language_model": model.config.name_or_path or ""},
    )
    if prompt is not None:
        prompt.check(tokenizer)
        setattr(config, PROMPT_KEY, prompt.to_dict())
    # No weights are drawn, because those of the language model take their places.
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config)
    # Indexing copies, so that training the classifier leaves the language model's head
    # unchanged.
    rows = head.weight.detach()[ids]
    score: Any = getattr(classifier, "score", None)
    fits = (
        isinstance(score, nn.Linear)
        and score.weight.shape == rows.shape
        and score.bias is None
    )
    _check_classifier(fits, model, "its classifier has another head")
    setattr(classifier, classifier.base_model_prefix, model.base_model)
    score.weight = nn.Parameter(rows)
    # GPT-2's classifier counts its learned positions from the padding on, so that its
    # logits differ with padding on the left.
    for side in dict.fromkeys(("right", getattr(tokenizer, "padding_side", "right"))):
        _check_same_logits(model, classifier, ids, side)
    return classifier.eval()


def to_language_model(classifier: Any, language_model: Any = None) -> Any:
    """Write the rows of a `label_token_classifier` back into the head of its language model.

    Use it for servers that read the log-probabilities of option tokens: after training, or with a
    folded temperature, the language model's logits of the option tokens are those of the
    classifier. Other tokens keep their rows, so use the result for answers only, not for
    generation.

    Args:
        classifier: a result of `label_token_classifier`, possibly trained or folded.
        language_model: the original language model, whose head is needed; None loads it by the name
            in the config.

    Returns:
        A causal language model with the classifier's body and dtype, and with a head that is not
        tied to embeddings.

    Raises:
        ValueError: if the classifier's record of tokens or the language model does not fit, or its
            head has a bias.
    """
    record: Any = getattr(getattr(classifier, "config", None), KEY, None)
    is_ours = (
        isinstance(classifier, PreTrainedModel)
        and isinstance(record, Mapping)
        and "ids" in record
    )
    way_out = "make it with hf_calib.language_models.label_token_classifier"
    check(
        is_ours,
        "classifier to say which tokens its classes are",
        type(classifier).__name__,
        way_out,
    )
    if language_model is None:
        name = record.get("language_model")
        check(
            bool(name),
            "language_model to be given",
            "None, and no name in the config",
            "pass the model",
        )
        language_model = AutoModelForCausalLM.from_pretrained(name)
    ids, rows = record["ids"], classifier.score.weight.detach()
    way_out = "fold a temperature, which needs none; a bias stays with the classifier"
    check(
        classifier.score.bias is None,
        "classifier to have a head without a bias",
        "one with it",
        way_out,
    )
    # True and False are instances of int, but no ids.
    are_ids = isinstance(ids, list) and all(
        type(token) is int and token >= 0 for token in ids
    )
    requirement = f"config.label_tokens to have {len(rows)} different token ids"
    way_out = "restore it: the tokens that label_token_classifier has written into config.json"
    check(
        are_ids and len(set(ids)) == len(ids) == len(rows),
        requirement,
        repr(ids),
        way_out,
    )
    same_kind = type(getattr(language_model, "config", None)) is type(classifier.config)
    head: Any = language_model.get_output_embeddings() if same_kind else None
    size = (0, 0) if head is None else tuple(head.weight.shape)
    got = f"{type(language_model).__name__} with a head of {size}, for tokens up to {max(ids)} of {rows.shape[1]}"
    fits = size[1] == rows.shape[1] and max(ids) < size[0]
    check(fits, "language_model to be the one it was made of", got, "pass that model")
    config = copy.deepcopy(language_model.config)
    # In a tied head, the new rows would also change the embeddings of these tokens.
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
    with torch.device("meta"):
        made = type(language_model)(config)
    setattr(made, made.base_model_prefix, classifier.base_model)
    # The language model that was passed keeps its own head.
    own = copy.deepcopy(head).to(rows.device, rows.dtype)
    own.weight.data[ids] = rows
    made.set_output_embeddings(own)
    made.generation_config = copy.deepcopy(language_model.generation_config)
    return made.eval()


def option_tokens(
    tokenizer: Any, labels: Mapping[str, str] | Sequence[str]
) -> dict[str, int]:
    """Return the token of each option by class name; raise if a text is not one token,
    or two tokens are equal.
    """
    texts = list(labels.values()) if isinstance(labels, Mapping) else labels
    if not are_texts(texts):
        message = expected(
            "labels",
            "be texts by class name, or a list of texts",
            repr(labels),
            _AS_TEXTS,
        )
        raise InputTypeError(message)
    names = (
        list(labels)
        if isinstance(labels, Mapping)
        else [text.strip() for text in texts]
    )
    check(len(texts) >= 2, "labels to be at least two texts", len(texts), _AS_TEXTS)
    check(
        len(set(names)) == len(names),
        "labels to have different names",
        repr(names),
        "leave one out",
    )
    found: dict[int, str] = {}
    for name, text in zip(names, texts, strict=True):
        # The text follows a prompt, and so does not begin a sequence.
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces = tokenizer.convert_ids_to_tokens(ids)
        got = f"{len(ids)} for label {name!r}: {text!r} is {few(pieces) if pieces else 'no token'}"
        way_out = "try it with or without the space before; score longer ones with option_log_likelihoods"
        check(len(ids) == 1, "the text of a label to be one token", got, way_out)
        is_known = ids[0] != tokenizer.unk_token_id
        requirement = "the text of a label to be known to the tokenizer"
        check(
            is_known, requirement, f"the unknown token for {text!r}", "use another word"
        )
        got = f"{pieces[0]!r} for {found.get(ids[0])!r} and {name!r}"
        way_out = "give each label a token of its own"
        check(ids[0] not in found, "labels to be different tokens", got, way_out)
        found[ids[0]] = name
    return {name: token for token, name in found.items()}


def are_texts(values: Any) -> bool:
    """Whether the value is a sequence of texts rather than one text."""
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    return is_list and all(isinstance(text, str) for text in values)


def without_adapters(model: Any) -> Any:
    """Return the base model of adapters, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_causal(model: Any) -> bool:
    """Whether a model, also with adapters, predicts next tokens with the decoder that reads its
    prompt.
    """
    plain = without_adapters(model)
    return (
        # bool() is False: a model without the method generates nothing.
        bool(getattr(plain, "can_generate", bool)())
        and not plain.config.is_encoder_decoder
    )


def keeps_positions(model: Any) -> bool:
    """Whether a model, also with adapters, can compute the logits of selected positions only."""
    return (
        "logits_to_keep"
        in inspect.signature(without_adapters(model).forward).parameters
    )


def _check_classifier(holds: bool, model: Any, reason: str) -> None:
    requirement = "model to have a sequence classifier with the same logits"
    check(holds, requirement, f"{type(model).__name__}: {reason}", _BY_SCORES)


def _check_same_logits(
    model: Any, classifier: Any, tokens: list[int], side: str
) -> None:
    """Raise unless the classifier's logits of padded rows equal the language model's up to a
    constant per row.
    """
    (ids,) = synthetic_batch(classifier).values()
    padding = classifier.config.get_text_config().pad_token_id
    # The end token may be the padding token, which must not end a prompt.
    ids = ids.masked_fill(ids == padding, int(padding == 0))
    places = (3, 0) if side == "left" else (0, 3)
    padded = {
        "input_ids": nn.functional.pad(ids, places, value=padding),
        "attention_mask": nn.functional.pad(torch.ones_like(ids), places),
    }
    with undisturbed(model), undisturbed(classifier):
        ours = float64_logits(classifier, padded)
        theirs = float64_logits(model, {"input_ids": ids})[:, -1, tokens]
    apart = abs(
        (ours - ours.mean(1, keepdims=True)) - (theirs - theirs.mean(1, keepdims=True))
    ).max()
    tolerance = _TOLERANCE.get(classifier.score.weight.dtype, 1e-5) * max(
        abs(theirs).max(), 1e-6
    )
    same = bool(apart <= tolerance)
    got = (
        f"'left', where the logits of {type(classifier).__name__} differ by {apart:.2g}"
    )
    way_out = 'set tokenizer.padding_side = "right": these positions would start at the padding'
    check(same or side != "left", "tokenizer.padding_side to be 'right'", got, way_out)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None) or 0
    capped = f" (they are capped at {cap:g}; model.config.final_logit_softcapping = None leaves their order)"
    reason = f"its logits differ by {apart:.2g} from the language model's{capped if cap else ''}"
    _check_classifier(same, model, reason)
