"""`hf_calib.pipeline`: transformers' pipelines, with the scaler that lies beside the model."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    ImageClassificationPipeline,
    Pipeline,
    PreTrainedConfig,
    TextClassificationPipeline,
    TokenClassificationPipeline,
)
from transformers.utils.peft_utils import find_adapter_config_file

from hf_calib._errors import InputValueError, expected
from hf_calib.models.prompts import PromptTemplate
from hf_calib.models.tasks import TASKS
from hf_calib.scaling import FOLDABLE_SCALERS
from hf_calib.scaling._base import Scaler
from hf_calib.scaling.grouped import GroupedScaling
from hf_calib.scaling.saved_map import (
    MAP_NAME,
    SavedMap,
    download,
    is_multi_label,
    load_map,
    method_of,
    recorded_in,
)


def pipeline(task: str | None = None, model: Any = None, **kwargs: Any) -> Pipeline:
    """A `transformers.pipeline` whose scores are calibrated, also by a scaler that cannot be folded into the model.

    Where a calibration.json lies beside the model, with a map that is not in its weights (spline, isotonic, ..., or
    one that folds, of a model that was saved without it), the scores are those of the scaler's `predict_proba` on
    the logits. Otherwise, and so for every model that is saved folded, this is the plain pipeline itself; but where the
    config has a prompt (`hf_calib.language_models`), texts are made into it first.

    Tasks: text-classification, image-classification and token-classification, where each token is calibrated and
    aggregation strategies combine the calibrated scores. Others are left as they are.

    With a map for groups of rows (`GroupedScaling`), a call names the group of its texts or images:
    `classify(texts, group="law")`. Without it, and for a group that was not fitted, the common map holds.

    Args:
        task: as for `transformers.pipeline`.
        model: a folder, a repository on the Hub, or a model; one with adapters too, whose base model gets the classes
            that the map is for. Of a model the place that it was loaded from is looked at: one that was trained since
            has to be saved first, and one of another branch needs its `revision`.
        **kwargs: as for `transformers.pipeline`; `revision` and `token` hold for the scaler, too. Of
            `function_to_apply` only what the scaler stands for is taken: "softmax", or "sigmoid" for a multi-label
            one.

    Returns:
        The pipeline; a calibrated one has the scaler as its attribute `scaler`.

    Raises:
        ValueError: if calibration.json is no whole map, or is one for other classes or another kind of problem; for
            another function_to_apply; for a `pipeline_class` of one's own.

    Notes:
        Without a network, or where there is no such file, the pipeline is plain; it warns if the model's config says
        that there is a map, which is not in the weights. Scores are float32, as those of plain pipelines.

    >>> import tempfile
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> from hf_calib.scaling import TemperatureScaling
    >>> config = BertConfig(
    ...     vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    ... )
    >>> scaler = TemperatureScaling().fit([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]], [0, 1, 1])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     BertForSequenceClassification(config).save_pretrained(folder)
    ...     scaler.save_pretrained(folder)
    ...     loaded = BertForSequenceClassification.from_pretrained(folder)
    ...     classify = pipeline("text-classification", loaded, tokenizer=object())
    >>> classify.scaler
    TemperatureScaling()
    """
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    load: Any = transformers.pipeline  # typed task by task
    place, revision, token = model, kwargs.get("revision"), kwargs.get("token")
    kind_of_task = next((each for each in TASKS.values() if each.classifier and each.pipeline == task), None)
    saved: SavedMap | None = None
    if isinstance(model, str) and kind_of_task is not None and "config" not in kwargs:
        if find_adapter_config_file(model, revision=revision, token=token) is not None:
            saved = _map_beside(model, revision, token)
        if saved is not None and _has_class_names(saved):
            model = _model_with_adapters(model, kind_of_task.auto_class, saved, revision, token)
            kwargs.setdefault("image_processor" if task == "image-classification" else "tokenizer", place)
    plain: Any = load(task, model, **kwargs)
    if not any(isinstance(plain, kind) for kind in _CALIBRATED):
        return plain
    config = plain.model.config
    prompt = PromptTemplate.of(config) if isinstance(plain, TextClassificationPipeline) else None
    if prompt is not None:
        prompt.check(plain.tokenizer)
        plain = _of_another_class(plain, PromptedTextClassificationPipeline, prompt=prompt)
    place = place if isinstance(place, str) else plain.model.name_or_path
    saved = saved or _map_beside(place, revision, token)
    recorded = recorded_in(config)
    if saved is None:
        if recorded.get("folded") is False:
            warnings.warn(
                f"The config of {place} says that its {recorded.get('method')} map is not in the weights, and "
                f"{MAP_NAME} was not found. The pipeline is not calibrated. Look for that file.",
                UserWarning,
                stacklevel=2,
            )
        return plain
    # The config goes with the weights; calibration.json may be from before they were folded, or unfolded.
    if recorded.get("folded") and method_of(saved.scaler) in FOLDABLE_SCALERS:
        return plain
    _check_goes_with(saved.scaler, config, place)
    if type(plain) not in _CALIBRATED:
        got = type(plain).__name__
        way_out = "leave it out, or use transformers.pipeline and the scaler's predict_proba"
        raise InputValueError(expected("pipeline_class", "be one of transformers' own", got, way_out))
    calibrated = _of_another_class(plain, _CALIBRATED[type(plain)], scaler=saved.scaler)
    calibrated.check_function(calibrated._postprocess_params.pop("function_to_apply", None))
    return calibrated


def _of_another_class(plain: Any, kind: Any, **more: Any) -> Any:
    """All else is as transformers has loaded it."""
    made = kind.__new__(kind)
    vars(made).update(vars(plain), **more)
    return made


class _Prompted:
    prompt: PromptTemplate | None = None

    def preprocess(self, inputs: Any, **tokenizer_kwargs: Any) -> Any:
        if self.prompt is None:
            return super().preprocess(inputs, **tokenizer_kwargs)  # type: ignore[misc]
        limit = tokenizer_kwargs.pop("max_length", None)
        limit = limit if tokenizer_kwargs.pop("truncation", False) else None
        parts = (inputs["text"], inputs.get("text_pair")) if isinstance(inputs, dict) else (inputs, None)
        text, _ = self.prompt.fitting(*parts, tokenizer=self.tokenizer, max_length=limit)  # type: ignore[attr-defined]
        tokenizer_kwargs["add_special_tokens"] = not self.prompt.chat
        return super().preprocess(text, **tokenizer_kwargs)  # type: ignore[misc]


class _Calibrated:
    scaler: Scaler

    def check_function(self, function_to_apply: Any) -> None:
        """Raise for a function that would be applied in the place of the scaler."""
        own = "sigmoid" if is_multi_label(self.scaler) else "softmax"
        given = str(getattr(function_to_apply, "value", function_to_apply)).lower()
        if function_to_apply is not None and given != own:
            way_out = "leave it out; for other scores use transformers.pipeline"
            requirement = f"be {own!r}, which the scaler calibrates"
            raise InputValueError(expected("function_to_apply", requirement, repr(given), way_out))

    def probabilities(self, logits: torch.Tensor, group: str | int | None = None) -> torch.Tensor:
        """Of logits (..., C), in float32, the predicted class ahead of the others there, too."""
        groups = {} if group is None else {"groups": [group] * len(logits)}
        exact = self.scaler.predict_proba(logits, **groups)
        probs = exact.astype(np.float32)
        if not is_multi_label(self.scaler):
            best = exact.argmax(axis=-1, keepdims=True)
            others = probs.copy()
            np.put_along_axis(others, best, 0, axis=-1)
            ahead = np.nextafter(others.max(axis=-1, keepdims=True), np.float32(1))
            own = np.take_along_axis(probs, best, axis=-1)
            np.put_along_axis(probs, best, np.maximum(own, ahead), axis=-1)
        return torch.from_numpy(probs)


class _CalibratedClassification(_Calibrated):
    def _sanitize_parameters(
        self, function_to_apply: Any = None, group: str | int | None = None, **kwargs: Any
    ) -> Any:
        self.check_function(function_to_apply)
        before, forward, after = super()._sanitize_parameters(**kwargs)  # type: ignore[misc]
        if group is not None:
            if not isinstance(self.scaler, GroupedScaling):
                way_out = "leave it out, or save a GroupedScaling beside the model"
                got = f"{group!r} for a {type(self.scaler).__name__}"
                requirement = "be left out where the map is one for all rows"
                raise InputValueError(expected("group", requirement, got, way_out))
            if not isinstance(group, str | int):
                requirement = "be one name, a word or an integer, for all that is given in the call"
                way_out = "call the pipeline once for each group"
                raise InputValueError(expected("group", requirement, repr(group), way_out))
            after["group"] = group
        return before, forward, after

    def postprocess(self, model_outputs: Any, group: str | int | None = None, **kwargs: Any) -> Any:
        probs = self.probabilities(model_outputs["logits"], group)
        return super().postprocess({"logits": probs}, function_to_apply="none", **kwargs)  # type: ignore[misc]


class PromptedTextClassificationPipeline(_Prompted, TextClassificationPipeline):  # type: ignore[misc]
    """The pipeline that `pipeline` returns for the option tokens of a language model with a prompt."""


class CalibratedTextClassificationPipeline(_Prompted, _CalibratedClassification, TextClassificationPipeline):  # type: ignore[misc]
    """The pipeline that `pipeline` returns for texts."""


class CalibratedImageClassificationPipeline(_CalibratedClassification, ImageClassificationPipeline):  # type: ignore[misc]
    """The pipeline that `pipeline` returns for images."""


class CalibratedTokenClassificationPipeline(_Calibrated, TokenClassificationPipeline):
    """The pipeline that `pipeline` returns for tokens."""

    def postprocess(self, all_outputs: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        # The softmax that follows gives the probabilities back.
        mapped = [
            {**outputs, "logits": self.probabilities(outputs["logits"]).double().log()}
            for outputs in all_outputs
        ]
        return super().postprocess(mapped, **kwargs)


_CALIBRATED: dict[Any, Any] = {
    TextClassificationPipeline: CalibratedTextClassificationPipeline,
    PromptedTextClassificationPipeline: CalibratedTextClassificationPipeline,
    ImageClassificationPipeline: CalibratedImageClassificationPipeline,
    TokenClassificationPipeline: CalibratedTokenClassificationPipeline,
}


def _has_class_names(saved: SavedMap) -> bool:
    names = saved.about.get("class_names")
    return isinstance(names, list) and bool(names) and all(isinstance(name, str) for name in names)


def _model_with_adapters(
    place: str, auto_class: Any, saved: SavedMap, revision: str | None, token: str | bool | None
) -> Any:
    """The base model with the classes of the map beside the adapters, and these on top.

    Adapters do not say how many classes their head has, and transformers would make two.
    """
    names = saved.about["class_names"]
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(place, revision=revision, token=token).base_model_name_or_path
    about = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": "multi_label_classification" if is_multi_label(saved.scaler) else None,
    }
    model = auto_class.from_pretrained(base, num_labels=len(names), token=token, **about)
    adapted = PeftModel.from_pretrained(model, place, revision=revision, token=token)
    merged = adapted.merge_and_unload() if hasattr(adapted.base_model, "merge_and_unload") else adapted
    return merged.eval()


def _map_beside(place: str, revision: str | None, token: str | bool | None) -> SavedMap | None:
    """The map in a model's folder or repository; None where there is none, or no network to look.

    Raises:
        ValueError: if its file is not a whole map.
    """
    if not place:  # a model that was made here, and not the working directory
        return None
    if Path(place).is_dir():
        return load_map(place) if (Path(place) / MAP_NAME).exists() else None
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return download(place, revision=revision, token=token)
    except (HFValidationError, RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        return None
    except LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, HfHubHTTPError):  # the server is there, but does not say
            raise
        return None


def _check_goes_with(scaler: Any, config: PreTrainedConfig, place: str) -> None:
    """Raise for a scaler that is not for this model's logits."""
    sigmoid = config.problem_type == "multi_label_classification" or config.num_labels == 1
    way_out = "fit the scaler again, on this model's logits"
    if is_multi_label(scaler) != sigmoid:
        requirement = f"be fitted with multi_label={sigmoid}, as the model's problem_type says"
        got = f"multi_label={is_multi_label(scaler)}"
        raise InputValueError(expected(f"the scaler in {place}", requirement, got, way_out))
    try:
        scaler.predict_proba(np.zeros((1, config.num_labels or 0)))
    except InputValueError as error:
        requirement = f"be fitted on the model's {config.num_labels} classes"
        raise InputValueError(expected(f"the scaler in {place}", requirement, str(error), way_out)) from error
