"""The CrossEncoder of sentence-transformers: the classifier in it, and what it applies to the logits."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_calib._errors import InputTypeError, InputValueError, expected


def is_cross_encoder(model: Any) -> bool:
    """Whether it is a `sentence_transformers.CrossEncoder`; told by name, as that package may not be installed."""
    return _package(model) == "sentence_transformers" and any(
        kind.__name__ == "CrossEncoder" for kind in type(model).__mro__
    )


def classifier_of(model: Any) -> Any:
    """The transformers model that a CrossEncoder calls, a classifier or a language model; any other model as it is.

    Raises:
        TypeError: for another model of sentence-transformers, which has no logits.
        ValueError: if the CrossEncoder makes its scores in modules of its own behind that model, or without torch.
    """
    if not is_cross_encoder(model):
        if _package(model) == "sentence_transformers":
            way_out = "fit a scaler on the logits of the classifier that takes its embeddings"
            raise InputTypeError(expected("model", "be a classifier", type(model).__name__, way_out))
        return model
    modules = [type(module).__name__ for module in model.children()]
    classifier = model.model
    if modules[1:] not in ([], ["LogitScore"]) or not isinstance(
        classifier, nn.Module
    ):  # an ONNX session is none
        got = f"{type(classifier).__name__} in {modules}"
        way_out = "keep the scaler beside the model, and call its predict_proba on the logits"
        raise InputValueError(expected("model", "be one transformers model in torch", got, way_out))
    return classifier


def scores_tokens(model: Any) -> bool:
    """Whether it is a CrossEncoder of a language model: its score is a token's logit, or one less another."""
    return is_cross_encoder(model) and [type(module).__name__ for module in model.children()][1:] == [
        "LogitScore"
    ]


def applies_sigmoid(model: Any) -> bool:
    """Whether the probabilities are sigmoids: as a CrossEncoder's activation or a model's problem_type says.

    Raises:
        TypeError: for another model of sentence-transformers.
        ValueError: if a CrossEncoder applies something else than a sigmoid, a softmax or nothing.
    """
    config = getattr(classifier_of(model), "config", None)
    multi_label = getattr(config, "problem_type", None) == "multi_label_classification"
    if not is_cross_encoder(model):
        return multi_label
    if isinstance(model.activation_fn, nn.Sigmoid):
        return True
    if isinstance(model.activation_fn, nn.Softmax):
        return False
    if isinstance(model.activation_fn, nn.Identity):
        # A pipeline on the saved folder decides the same way.
        return multi_label or model.num_labels == 1
    way_out = "set model.activation_fn = torch.nn.Sigmoid()"
    requirement = "apply a sigmoid, a softmax or nothing to its logits"
    raise InputValueError(expected("model", requirement, f"activation_fn={model.activation_fn}", way_out))


def _package(model: Any) -> str:
    return type(model).__module__.split(".")[0]
