"""The CrossEncoder of sentence-transformers: the classifier in it, and what it applies to the logits."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_calib._errors import check
from hf_calib.metrics.checks import check_type


def _kinds(model: Any) -> set[str]:
    """Classes of sentence-transformers that it is of, told by name, as that package may not be installed."""
    return {
        kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("sentence_transformers.")
    }


def is_cross_encoder(model: Any) -> bool:
    """Whether it is a `sentence_transformers.CrossEncoder`."""
    return "CrossEncoder" in _kinds(model)


def classifier_of(model: Any) -> Any:
    """The transformers model that a CrossEncoder calls, a classifier or a language model; any other model as it is."""
    if not is_cross_encoder(model):
        way_out = "fit a scaler on the logits of the classifier that takes its embeddings"
        check_type(not _kinds(model), "model to be a classifier", type(model).__name__, way_out)
        return model
    modules = [type(module).__name__ for module in model.children()]
    # Scores must not be made in modules of its own behind that model; an ONNX session is no module.
    plain = modules[1:] in ([], ["LogitScore"]) and isinstance(model.model, nn.Module)
    got = f"{type(model.model).__name__} in {modules}"
    way_out = "keep the scaler beside the model, and call its predict_proba on the logits"
    check(plain, "model to be one transformers model in torch", got, way_out)
    return model.model


def scores_tokens(model: Any) -> bool:
    """Whether it is a CrossEncoder of a language model: its score is a token's logit, or one less another."""
    return is_cross_encoder(model) and type([*model.children()][-1]).__name__ == "LogitScore"


def applies_sigmoid(model: Any) -> bool:
    """Whether the probabilities are sigmoids: as a CrossEncoder's activation or a model's problem_type says."""
    config = getattr(classifier_of(model), "config", None)
    multi_label = getattr(config, "problem_type", None) == "multi_label_classification"
    if not is_cross_encoder(model):
        return multi_label
    # Where it applies nothing, a pipeline on the saved folder decides.
    answers = {nn.Sigmoid: True, nn.Softmax: False, nn.Identity: multi_label or model.num_labels == 1}
    found = [answer for kind, answer in answers.items() if isinstance(model.activation_fn, kind)]
    requirement = "model to apply a sigmoid, a softmax or nothing to its logits"
    got = f"activation_fn={model.activation_fn}"
    check(bool(found), requirement, got, "set model.activation_fn = torch.nn.Sigmoid()")
    return found[0]
