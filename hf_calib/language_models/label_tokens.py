"""A language model's option tokens as a classifier, and the classifier's rows back in the language model's head."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from hf_calib._errors import InputTypeError, InputValueError, expected, few
from hf_calib.export.heads import float64_logits, synthetic_batch, undisturbed
from hf_calib.predictions.prompts import KEY as PROMPT_KEY
from hf_calib.predictions.prompts import PromptTemplate

KEY = "label_tokens"  # of a classifier's config.json: which tokens of which language model its classes are

# Of the largest logit, by the model's dtype.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def label_token_classifier(
    model: Any,
    tokenizer: Any,
    labels: Mapping[str, str] | Sequence[str],
    *,
    prompt: PromptTemplate | None = None,
) -> Any:
    r"""Make a sequence classifier of a causal language model: a class for each of a few next tokens.

    For judges, guards and rerankers, that answer "yes" or "no", or A to D: the classifier's logits are the language
    model's at these tokens, so its probabilities are those of the answer among the options. It is a plain transformers
    model: it trains, calibrates, folds, decides, serves and exports as every other one here. Options of several tokens
    are scored with `option_log_likelihoods`.

    $$z_k = h_{\text{last}} \cdot W_{t_k}$$

    with h the last hidden state at a prompt's last token and W the rows of the head, tied to the embeddings or not.

    Args:
        model: a causal language model of an architecture that transformers has a sequence classifier for (Llama, Qwen,
            Mistral, Phi-3, Gemma, GPT-2, OPT, GPT-NeoX, SmolLM, ...), any float dtype.
        tokenizer: its tokenizer.
        labels: class name -> the text of its token, as it follows a prompt, `{"yes": " yes", "no": " no"}`; or a
            sequence of texts that are the names too.
        prompt: how a text becomes the model's input. It is written into the config, and used by `hf-calib` and by
            `hf_calib.pipeline`; without one the texts have to be prompts already.

    Returns:
        A `...ForSequenceClassification` in evaluation mode. Its body is that of `model`, not a copy; its head is its
        own. `config.label_tokens` records the tokens and the language model's name, for `to_language_model`.

    Raises:
        TypeError: if model is not a causal language model, or labels are not texts.
        ValueError: if a label is several tokens or none, two labels are one token, a token is not in the model's
            vocabulary, there is no padding token, the architecture has no sequence classifier, or its classifier
            cannot give the language model's logits (Gemma 2's soft capping, heads whose biases differ between the
            options), or not where the tokenizer pads on the left (GPT-2's learned positions).

    Notes:
        The logits of the two models are compared before it is returned, on rows that are padded on the right, and on
        the left if the tokenizer pads there. Inputs must not end with the padding token. In 16 bits it can be used and
        trained; `fold` wants `model.float()` first.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    >>> words = {"[PAD]": 0, "good": 1, "bad": 2, "it": 3, "was": 4}
    >>> made = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    >>> made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]")
    >>> config = LlamaConfig(
    ...     vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> classifier = label_token_classifier(LlamaForCausalLM(config), tokenizer, ["good", "bad"])
    >>> type(classifier).__name__, classifier.config.id2label
    ('LlamaForSequenceClassification', {0: 'good', 1: 'bad'})
    """
    classifier_class = _classifier_class(model)
    _check_texts(labels)
    texts = dict(labels) if isinstance(labels, Mapping) else {text.strip(): text for text in labels}
    tokens = label_token_ids(tokenizer, texts)
    head = model.get_output_embeddings()
    if max(tokens) >= len(head.weight):
        got = f"token {max(tokens)} for a head of {len(head.weight)}"
        way_out = "model.resize_token_embeddings(len(tokenizer)), or take the tokenizer of this model"
        raise InputValueError(expected("labels", "be tokens of the model's vocabulary", got, way_out))
    rows = head.weight.detach()[tokens].clone()
    _check_bias(head, tokens)
    config = copy.deepcopy(model.config)
    config.num_labels = len(tokens)
    config.id2label = dict(enumerate(texts))
    config.label2id = {name: number for number, name in enumerate(texts)}
    config.problem_type = "single_label_classification"
    config.get_text_config().pad_token_id = config.pad_token_id = _padding(tokenizer, model.config)
    name = getattr(model.config, "_name_or_path", "") or ""
    setattr(config, KEY, {"ids": tokens, "texts": list(texts.values()), "language_model": name})
    if prompt is not None:
        prompt.check(tokenizer)
        setattr(config, PROMPT_KEY, prompt.to_dict())
    with torch.device("meta"):
        classifier = classifier_class(config)
    score = getattr(classifier, "score", None)
    if not isinstance(score, nn.Linear) or score.in_features != rows.shape[1]:
        raise _no_classifier(model, "its classifier has another head")
    setattr(classifier, classifier.base_model_prefix, getattr(model, model.base_model_prefix))
    made = nn.Linear(rows.shape[1], len(tokens), bias=False, device=rows.device, dtype=rows.dtype)
    with torch.no_grad():
        made.weight.copy_(rows)
    classifier.score = made
    classifier.eval()
    _check_same_logits(model, classifier, tokens)
    if getattr(tokenizer, "padding_side", "right") == "left":
        _check_same_logits(model, classifier, tokens, left=True)
    return classifier


def to_language_model(classifier: Any, language_model: Any = None) -> Any:
    """Write the rows of a `label_token_classifier` back into the head of its language model.

    For servers that read the log-probabilities of option tokens: after a training, or with a temperature folded in,
    the language model's logits at the option tokens are the classifier's. Other tokens keep their rows, so use it for
    the answer only, not to generate.

    Args:
        classifier: made by `label_token_classifier`, trained or folded since.
        language_model: the one that it was made of, whose head is needed; None loads it by the name in the config.

    Returns:
        A causal language model with the classifier's body, in its dtype, and a head of its own: tied embeddings are
        untied, `config.tie_word_embeddings` is False.

    Raises:
        ValueError: if the classifier has no record of its tokens, or one that does not fit, its head has a bias, or the
            language model does not fit.
    """
    record = getattr(getattr(classifier, "config", None), KEY, None)
    if not isinstance(record, Mapping) or "ids" not in record:
        way_out = "make it with hf_calib.language_models.label_token_classifier"
        raise InputValueError(
            expected("classifier", "say which tokens its classes are", type(classifier).__name__, way_out)
        )
    if language_model is None:
        name = record.get("language_model")
        if not name:
            raise InputValueError(
                expected("language_model", "be given", "None, and no name in the config", "pass the model")
            )
        language_model = AutoModelForCausalLM.from_pretrained(name)
    if classifier.score.bias is not None:
        way_out = "fold a temperature, which needs none; a bias stays with the classifier"
        raise InputValueError(expected("classifier", "have a head without a bias", "one with it", way_out))
    rows = classifier.score.weight.detach()
    ids = record["ids"]
    if not (isinstance(ids, list) and all(map(_is_id, ids)) and len(set(ids)) == len(ids) == len(rows)):
        way_out = "restore it: the tokens that label_token_classifier has written into config.json"
        raise InputValueError(
            expected("config.label_tokens", f"have {len(rows)} different token ids", repr(ids), way_out)
        )
    head = None
    if type(getattr(language_model, "config", None)) is type(classifier.config):
        head = language_model.get_output_embeddings()
    if head is None or head.weight.shape[1] != rows.shape[1] or max(ids) >= len(head.weight):
        got = type(language_model).__name__
        if head is not None:
            got = f"a head of {tuple(head.weight.shape)} for rows of {rows.shape[1]} and tokens up to {max(ids)}"
        raise InputValueError(expected("language_model", "be the one it was made of", got, "pass that model"))
    config = copy.deepcopy(language_model.config)
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
    with torch.device("meta"):
        made = type(language_model)(config)
    setattr(made, made.base_model_prefix, getattr(classifier, classifier.base_model_prefix))
    own = nn.Linear(
        rows.shape[1], len(head.weight), bias=head.bias is not None, device=rows.device, dtype=rows.dtype
    )
    with torch.no_grad():
        own.weight.copy_(head.weight)
        own.weight[ids] = rows
        if head.bias is not None:
            own.bias.copy_(head.bias)
    made.set_output_embeddings(own)
    made.generation_config = copy.deepcopy(language_model.generation_config)
    return made.eval()


def label_token_ids(tokenizer: Any, texts: Mapping[str, str]) -> list[int]:
    """The token of each label's text.

    Raises:
        ValueError: if there are fewer than two, one is not a single token, or two are the same.
    """
    if len(texts) < 2:
        way_out = 'name at least two, such as {"yes": " yes", "no": " no"}'
        raise InputValueError(expected("labels", "be at least two texts", len(texts), way_out))
    found: dict[int, str] = {}
    for name, text in texts.items():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            pieces = tokenizer.convert_ids_to_tokens(ids)
            got = f"{len(ids)} for label {name!r}: {text!r} is {few(pieces) if pieces else 'no token'}"
            way_out = (
                "try it with or without the space before it; score longer options with option_log_likelihoods"
            )
            raise InputValueError(expected("the text of a label", "be one token", got, way_out))
        if ids[0] == tokenizer.unk_token_id:
            got = f"the unknown token for {text!r}"
            raise InputValueError(
                expected("the text of a label", "be known to the tokenizer", got, "take another word")
            )
        if ids[0] in found:
            got = f"{tokenizer.convert_ids_to_tokens(ids[0])!r} for {found[ids[0]]!r} and {name!r}"
            raise InputValueError(
                expected("labels", "be different tokens", got, "give each label a token of its own")
            )
        found[ids[0]] = name
    return list(found)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_texts(labels: Any) -> None:
    texts = labels.values() if isinstance(labels, Mapping) else labels
    is_list = isinstance(labels, Mapping | Sequence) and not isinstance(labels, str)
    if not is_list or not all(isinstance(text, str) for text in texts):
        way_out = 'pass {"yes": " yes", "no": " no"}'
        raise InputTypeError(
            expected("labels", "be texts by class name, or a list of texts", repr(labels), way_out)
        )


def _classifier_class(model: Any) -> Any:
    causal: Any = ()
    if isinstance(model, PreTrainedModel) and type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        causal = MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]
    if not isinstance(model, causal):
        way_out = "load it with AutoModelForCausalLM; of adapters, merge them first: model.merge_and_unload()"
        raise InputTypeError(expected("model", "be a causal language model", type(model).__name__, way_out))
    if type(model.config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise _no_classifier(model, "transformers has no sequence classifier for it")
    found = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(model.config)]
    return found[0] if isinstance(found, tuple) else found


def _no_classifier(model: Any, reason: str) -> InputValueError:
    way_out = "score its options with option_log_likelihoods, whose rows every metric and map takes"
    got = f"{type(model).__name__}: {reason}"
    return InputValueError(expected("model", "have a sequence classifier with the same logits", got, way_out))


def _padding(tokenizer: Any, config: Any) -> int:
    """The padding token; the end token, which no prompt ends with, where there is none."""
    known = (tokenizer.pad_token_id, config.get_text_config().pad_token_id, tokenizer.eos_token_id)
    found = next((token for token in known if token is not None), None)
    if found is None:
        way_out = "set tokenizer.pad_token to a token that no text ends with"
        raise InputValueError(
            expected("tokenizer", "have a padding token", "none, and no end token", way_out)
        )
    return int(found)


def _check_bias(head: nn.Module, tokens: Sequence[int]) -> None:
    """A bias that all options share changes no probability; one that differs has no place in a classifier's head."""
    bias = getattr(head, "bias", None)
    if bias is not None:
        own = bias.detach()[list(tokens)].double()
        if float((own - own.mean()).abs().max()) > 1e-6:
            got = f"biases from {float(own.min()):.3g} to {float(own.max()):.3g} in its head"
            way_out = "score its options with option_log_likelihoods, whose rows every metric and map takes"
            raise InputValueError(expected("model", "have no bias that differs between labels", got, way_out))


def _check_same_logits(model: Any, classifier: Any, tokens: Sequence[int], left: bool = False) -> None:
    """Raise where the classifier of padded rows does not give the language model's logits, up to a constant a row."""
    (ids,) = synthetic_batch(classifier).values()
    padding = classifier.config.get_text_config().pad_token_id
    other = int(padding == 0)  # the end token may be the padding, which is not the last of a prompt
    ids = ids.masked_fill(ids == padding, other)
    places = (3, 0) if left else (0, 3)
    padded = {
        "input_ids": nn.functional.pad(ids, places, value=padding),
        "attention_mask": nn.functional.pad(torch.ones_like(ids), places),
    }
    with undisturbed(model), undisturbed(classifier):
        ours = float64_logits(classifier, padded)
        theirs = float64_logits(model, {"input_ids": ids})[:, -1, :][:, list(tokens)]
    difference = (ours - ours.mean(axis=1, keepdims=True)) - (theirs - theirs.mean(axis=1, keepdims=True))
    tolerance = _TOLERANCE.get(classifier.score.weight.dtype, 1e-5)
    if not abs(difference).max() <= tolerance * max(abs(theirs).max(), 1e-6):
        if left:
            got = f"'left', where the logits of {type(classifier).__name__} differ by {abs(difference).max():.2g}"
            way_out = 'set tokenizer.padding_side = "right": these positions would start at the padding'
            raise InputValueError(expected("tokenizer.padding_side", "be 'right'", got, way_out))
        text = model.config.get_text_config()
        reason = f"its logits differ by {abs(difference).max():.2g} from the language model's"
        if getattr(text, "final_logit_softcapping", None):
            reason += (
                f" (they are capped at {text.final_logit_softcapping:g}; with "
                "model.config.final_logit_softcapping = None they are not, in the same order)"
            )
        raise _no_classifier(model, reason)
