"""`hf_calib.pipeline`: transformers' pipelines with the calibrator that is saved with the model."""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import (
    ImageClassificationPipeline,
    Pipeline,
    PreTrainedConfig,
    TextClassificationPipeline,
    TokenClassificationPipeline,
)
from transformers.utils import find_adapter_config_file

from hf_calib._errors import InputValueError, check, expected
from hf_calib.models.classifier import TASKS, check_sizes, task_of
from hf_calib.models.prompts import PromptTemplate
from hf_calib.models.weights import is_in_weights
from hf_calib.scaling import FOLDABLE_SCALERS
from hf_calib.scaling._base import Scaler
from hf_calib.scaling.saved_map import (
    MAP_NAME,
    SavedMap,
    check_in_weights,
    download,
    load_map,
    method_of,
    recorded_in,
)

# The resolution of float32 in logits and their softmax.
_APART = 2.0**-22
_PIPELINES: Any = {
    "text-classification": TextClassificationPipeline,
    "image-classification": ImageClassificationPipeline,
    "token-classification": TokenClassificationPipeline,
}
_KINDS: Any = tuple(_PIPELINES.values())
_TASKS: Any = {each.pipeline: each for each in TASKS.values() if each.classifier}


def pipeline(task: str | None = None, model: Any = None, **kwargs: Any) -> Pipeline:
    """Return a `transformers.pipeline` with calibrated scores, also if they cannot be folded.

    If the model has a calibration.json with a calibrator that is not in its weights (spline,
    isotonic, ..., or a foldable one that was not folded), the scores are those of its
    `predict_proba` on the float32 logits. Otherwise, and for every model that is saved folded, the
    result is the plain pipeline. If the config has a prompt (`hf_calib.language_models`), texts are
    first rendered with it. Warn if the config names a calibrator that is neither in the weights nor
    found, for example without a network.

    The tasks are text-classification, image-classification and token-classification, in which each
    token is calibrated and aggregation strategies combine calibrated scores. Pipelines of other
    tasks do not change.

    Args:
        task: as in `transformers.pipeline`.
        model: a folder, a repository on the Hub, or a model, also with adapters, whose base model
            gets the classes of the calibrator. For a model, calibration.json is read from where it
            was loaded: a model that was trained since must be saved first, and a model of another
            branch needs its `revision`.
        **kwargs: as in `transformers.pipeline`; `revision` and `token` also apply to the
            calibrator. The only allowed `function_to_apply` is that of the calibrator: "softmax",
            or "sigmoid" for multi-label models.

    Returns:
        The pipeline; a calibrated pipeline has the attribute `scaler`.

    Raises:
        ValueError: if a folder's model is of another task; if calibration.json is damaged, or is
            for other weights, classes or another kind of problem; for another function_to_apply.

    >>> import tempfile
    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> from hf_calib.scaling import TemperatureScaling
    >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> config = BertConfig(vocab_size=50, intermediate_size=16, **sizes)
    >>> scaler = TemperatureScaling().fit([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]], [0, 1, 1])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     BertForSequenceClassification(config).save_pretrained(folder)
    ...     scaler.save_pretrained(folder)
    ...     loaded = BertForSequenceClassification.from_pretrained(folder)
    ...     classify = pipeline("text-classification", loaded, tokenizer=object())
    >>> classify.scaler
    TemperatureScaling() with temperature_=2.88539
    """
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    where: dict[str, Any] = {name: kwargs.get(name) for name in ("revision", "token")}
    place = model
    saved = None
    if isinstance(model, str):
        check_sizes(model)
    # A config that is given says what the model is, whatever its folder says.
    is_described = isinstance(model, str) and "config" not in kwargs
    if is_described and task in _TASKS and _has_adapters(model, where):
        saved = _map_beside(model, where)
        if saved is not None and saved.about.get("class_names"):
            model = _with_adapters(model, _TASKS[task].auto_class, saved, where)
            is_described = False
            is_of_images = task == "image-classification"
            processing = "image_processor" if is_of_images else "tokenizer"
            kwargs.setdefault(processing, place)
    # It is typed per task.
    load: Any = transformers.pipeline
    plain: Any = load(task, model, **kwargs)
    if not isinstance(plain, _KINDS):
        return plain
    if is_described:
        _check_task(plain, model, where)
    prompt = None
    if isinstance(plain, TextClassificationPipeline):
        prompt = PromptTemplate.of(plain.model.config)
    if prompt is not None:
        prompt.check(plain.tokenizer)
    place = place if isinstance(place, str) else plain.model.name_or_path
    scaler = calibrator_in_use(place, plain.model, saved=saved, **where)
    served = _with_methods(plain, scaler, prompt)
    if scaler is not None:
        served.check_function(kwargs.get("function_to_apply"))
    return served


def calibrator_in_use(
    place: str,
    model: Any,
    *,
    saved: SavedMap | None = None,
    **where: Any,
) -> Scaler | None:
    """The calibrator that a model's folder or repository serves and its weights do not have.

    None if there is none. Warn if the config names one that is not found; raise ValueError if it is
    damaged or does not fit the model.
    """
    saved = saved or _map_beside(place, where)
    config = model.config
    recorded = recorded_in(config)
    if saved is None:
        if recorded.get("folded") is False:
            warnings.warn(
                f"The config of {place} says that its {recorded.get('method')} calibrator is not "
                f"in the weights, and {MAP_NAME} was not found. The model is not calibrated. "
                "Look for that file.",
                UserWarning,
                stacklevel=3,
            )
        return None
    # The config belongs to the weights; calibration.json may be from before folding or unfolding.
    if recorded.get("folded") and method_of(saved.scaler) in FOLDABLE_SCALERS:
        check_in_weights(saved, recorded, place)
        return None
    if is_in_weights(saved, model, place):
        return None
    _check_goes_with(saved.scaler, config, place)
    return saved.scaler


def _check_task(plain: Any, place: str, where: dict[str, Any]) -> None:
    """Raise for a model of another task, whose head would be a new one of random weights."""
    found = task_of(plain.model.config.to_dict())
    if found is None or isinstance(plain, _PIPELINES.get(found.pipeline, ())):
        return
    requirement = f"the model in {place} to be trained for {plain.task}"
    way_out = "name the task of the model, or a model of this task"
    # Adapters may have the head.
    has_head = _has_adapters(place, where)
    check(has_head, requirement, f"one for {found.pipeline}", way_out)


def _has_adapters(place: str, where: dict[str, Any]) -> bool:
    return find_adapter_config_file(place, **where) is not None


def _with_methods(
    plain: Any, scaler: Scaler | None, prompt: PromptTemplate | None
) -> Any:
    """The pipeline with the methods of a calibrator and of a prompt, where there is one."""
    # A `pipeline_class` is chosen before the model is loaded, which alone says whether it has a
    # prompt or a calibrator. So the pipeline gets its methods afterwards, also one of the user's.
    overriding: list[type] = []
    if scaler is not None:
        overriding.append(_Calibrated)
        plain.scaler = scaler
    if prompt is not None:
        overriding.append(_Prompted)
        plain.prompt = prompt
    if not overriding:
        return plain
    served = _without_attributes(*overriding, type(plain))
    vars(served).update(vars(plain))
    return served


@cache
def _class_of(*bases: type) -> type:
    """A class with these bases, the same one whenever it is asked for."""
    name = "".join(base.__name__.lstrip("_") for base in bases)
    return type(name, bases, {})


def _without_attributes(*bases: type) -> Any:
    """A pipeline whose class has these bases, to which its attributes are added."""
    kind: Any = _class_of(*bases)
    return kind.__new__(kind)


class _Overriding:
    """Methods over those of a pipeline of transformers, or of a `pipeline_class` of the user's."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The class has no name in a module, by which pickle would find it in another process.
        return _without_attributes, type(self).__bases__, vars(self)


class _Prompted(_Overriding):
    """Methods that render prompts in a pipeline of texts."""

    prompt: PromptTemplate
    tokenizer: Any

    def preprocess(self, inputs: Any, **options: Any) -> Any:
        limit = options.pop("max_length", None)
        if not options.pop("truncation", False):
            limit = None
        text = inputs
        text_pair = None
        if isinstance(inputs, dict):
            text = inputs["text"]
            text_pair = inputs.get("text_pair")
        prompt, _ = self.prompt.fitting(
            text, text_pair, tokenizer=self.tokenizer, max_length=limit
        )
        # The chat template has written the special tokens already.
        options["add_special_tokens"] = not self.prompt.chat
        return super().preprocess(prompt, **options)  # type: ignore[misc]


class _Calibrated(_Overriding):
    """Methods that replace a pipeline's logits by those of the calibrated probabilities."""

    scaler: Scaler

    def check_function(self, function_to_apply: Any) -> None:
        """Raise for a function that would replace the calibrator's."""
        if function_to_apply is None:
            return
        own = "sigmoid" if self.scaler.multi_label else "softmax"
        given = str(getattr(function_to_apply, "value", function_to_apply)).lower()
        requirement = f"function_to_apply to be {own!r}, which the scaler calibrates"
        way_out = "leave it out; for other scores use transformers.pipeline"
        check(given == own, requirement, repr(given), way_out)

    def _sanitize_parameters(
        self, function_to_apply: Any = None, **options: Any
    ) -> Any:
        self.check_function(function_to_apply)
        return super()._sanitize_parameters(**options)  # type: ignore[misc]

    def _forward(self, inputs: Any, **options: Any) -> Any:
        outputs = super()._forward(inputs, **options)  # type: ignore[misc]
        logits = outputs["logits"]
        rows = logits.cpu().double().numpy().reshape(-1, logits.shape[-1])
        probs = self.scaler.predict_proba(rows)
        found = _as_logits(probs, sigmoid=self.scaler.multi_label)
        outputs["logits"] = torch.from_numpy(found.reshape(logits.shape))
        return outputs


def _as_logits(probs: NDArray[Any], *, sigmoid: bool) -> NDArray[np.float32]:
    """Float32 logits (N, C) of which a pipeline makes these probs; the largest stays first."""
    with np.errstate(divide="ignore"):
        logits = np.log(probs)
        if sigmoid:
            return np.asarray(logits - np.log1p(-probs), np.float32)
    found = logits.astype(np.float32)
    # Rounding could make two probabilities equal, and a pipeline would then name the first class.
    largest = found.max(axis=1, keepdims=True)
    ahead = np.nextafter(largest + np.float32(_APART), np.float32(np.inf))
    np.put_along_axis(found, probs.argmax(axis=1)[:, None], ahead, axis=1)
    return found


def _with_adapters(
    place: str, auto_class: Any, saved: SavedMap, where: dict[str, Any]
) -> Any:
    """The base model with its adapters, and the calibrator's classes, which adapters lack."""
    from peft import PeftConfig, PeftModel

    names = saved.about["class_names"]
    base = PeftConfig.from_pretrained(place, **where).base_model_name_or_path
    model = auto_class.from_pretrained(
        base,
        token=where["token"],
        problem_type="multi_label_classification" if saved.scaler.multi_label else None,
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
    )
    adapted = PeftModel.from_pretrained(model, place, **where)
    # Prompt tuning, for one, has nothing to merge.
    if hasattr(adapted.base_model, "merge_and_unload"):
        adapted = adapted.merge_and_unload()
    return adapted.eval()


def _map_beside(place: str, where: dict[str, Any]) -> SavedMap | None:
    """The calibrator in a model's folder or repository; None without one, or without a network."""
    # A model that was made in this process has no place, which is not the working directory.
    if not place:
        return None
    if Path(place).is_dir():
        return load_map(place) if os.path.lexists(Path(place, MAP_NAME)) else None
    from huggingface_hub import errors

    missing = (
        errors.HFValidationError,
        errors.EntryNotFoundError,
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
    )
    try:
        return download(place, **where)
    except missing as error:
        # A server that answers with an error does not say that there is no calibrator.
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            raise
        return None


def _check_goes_with(scaler: Any, config: PreTrainedConfig, place: str) -> None:
    """Raise if a calibrator does not fit this model's logits."""
    has_several = config.problem_type == "multi_label_classification"
    sigmoid = has_several or config.num_labels == 1
    argument = f"the scaler in {place}"
    requirement = f"{argument} to be fitted with multi_label={sigmoid}, "
    requirement += "as the model's problem_type says"
    got = f"multi_label={scaler.multi_label}"
    way_out = "fit the scaler again, on this model's logits"
    check(scaler.multi_label == sigmoid, requirement, got, way_out)
    try:
        scaler.predict_proba(np.zeros((1, config.num_labels or 0)))
    except InputValueError as error:
        requirement = f"be fitted on the model's {config.num_labels} classes"
        raise InputValueError(
            expected(argument, requirement, str(error), way_out)
        ) from error
