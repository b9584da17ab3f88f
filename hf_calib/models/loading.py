"""Trained models from the Hub or a folder, checked; what is wrong with one is said in a line."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, AutoConfig

from hf_calib._errors import InputValueError, expected, few
from hf_calib.models.tasks import TASKS, Task, task_of
from hf_calib.predictions.kinds import TOKENS

# What broken or missing files of a model raise.
_UNLOADABLE = (
    OSError,
    ValueError,
    KeyError,
    ImportError,
    EOFError,
    RuntimeError,  # weights of another shape
    SafetensorError,
    pickle.UnpicklingError,
)


def load_trained(name: str | Path, model_class: Any, *, trust_remote_code: bool = False) -> Any:
    """Load a model in float32, and check that none of its weights are new.

    Raises:
        ValueError: if it cannot be loaded, or has no trained head.
    """
    way_out = "name a fine-tuned classifier on the Hub or in a folder; check that its files are complete"
    with refusals("the model", "be loadable", name, way_out):
        model, report = model_class.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    if report["missing_keys"]:
        got = f"no {few(sorted(report['missing_keys']))} in {name}"
        raise InputValueError(expected("the model", "be a fine-tuned classifier", got, "train it first"))
    return model


def check_problem(config: Any, task: Task) -> None:
    """Refuse the configuration of a model with several labels a row where one is wanted, or the other way round."""
    if task.n_logits == 1:
        fits = config.problem_type in (None, "multi_label_classification")
        requirement, way_out = "be a classifier", "a regression has no probabilities to calibrate"
    elif task.labels.sigmoid:
        fits = config.problem_type == "multi_label_classification"
        requirement, way_out = "have several labels", "set its problem_type to multi_label_classification"
    elif task.labels is TOKENS:
        return
    else:
        fits = config.problem_type in (None, "single_label_classification") and config.num_labels > 1
        requirement = "choose one of several classes"
        what = task.inputs.removesuffix("s")
        way_out = f"several labels per {what} can be scaled with PerLabelTemperatureScaling in Python"
    if not fits:
        got = f"problem_type={config.problem_type!r} and {config.num_labels} outputs"
        raise InputValueError(expected("the model", requirement, got, way_out))


def find_task(source: str | Path, *, trust_remote_code: bool = False) -> Task | None:
    """The task of a model by its config; None if the config cannot be read, which is left to the loading."""
    try:
        with refusals("the model", "be loadable", source, "name a fine-tuned classifier"):
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except InputValueError:
        return None
    task = task_of(config.to_dict())
    if task is None and type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING and not config.architectures:
        return TASKS["image"]
    return task


@contextmanager
def refusals(argument: str, requirement: str, got: object, way_out: str) -> Iterator[None]:
    """Turn the libraries' errors about a name into one line that says what to do."""
    try:
        yield
    except _UNLOADABLE as error:
        cause = " ".join(str(error).split())
        if "trust_remote_code" in cause:
            way_out = "--trust-remote-code runs the code that comes with it, if you trust its author"
        raise InputValueError(expected(argument, requirement, f"{got} ({cause})", way_out)) from error
