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

from hf_calib._errors import InputValueError, check, expected, few
from hf_calib.models.tasks import TASKS, Task, task_of
from hf_calib.predictions.labels import TOKENS

# What broken or missing files of a model raise; a RuntimeError is of weights of another shape.
_UNLOADABLE = (
    *(OSError, ValueError, KeyError, ImportError, EOFError, RuntimeError),
    *(SafetensorError, pickle.UnpicklingError),
)


def load_trained(name: str | Path, model_class: Any, *, trust_remote_code: bool = False) -> Any:
    """Load a model in float32; a ValueError if it cannot be loaded, or some of its weights are new."""
    way_out = "name a fine-tuned classifier on the Hub or in a folder; check that its files are complete"
    with refusals("the model", "be loadable", name, way_out):
        model, report = model_class.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    new = sorted(report["missing_keys"])
    check(not new, "the model to be a fine-tuned classifier", f"no {few(new)} in {name}", "train it first")
    return model


def check_problem(config: Any, task: Task) -> None:
    """Refuse the configuration of a model with several labels a row where one is wanted, or the other way round."""
    problem = config.problem_type
    if task.labels is TOKENS:
        return
    if task.n_logits == 1:
        fits = problem in (None, "multi_label_classification")
        requirement, way_out = "be a classifier", "a regression has no probabilities to calibrate"
    elif task.labels.sigmoid:
        fits = problem == "multi_label_classification"
        requirement, way_out = "have several labels", "set its problem_type to multi_label_classification"
    else:
        fits = problem in (None, "single_label_classification") and config.num_labels > 1
        requirement, what = "choose one of several classes", task.inputs.removesuffix("s")
        way_out = f"several labels per {what} can be scaled with PerLabelTemperatureScaling in Python"
    got = f"problem_type={problem!r} and {config.num_labels} outputs"
    check(fits, f"the model to {requirement}", got, way_out)


def find_task(source: str | Path, *, trust_remote_code: bool = False) -> Task | None:
    """The task of a model by its config; None if the config cannot be read, which is left to the loading."""
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except _UNLOADABLE:
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
