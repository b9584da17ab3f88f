"""Trained models from the Hub or a folder, checked; what is wrong with one is said in a line."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hf_calib._errors import InputValueError, expected, few

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


def check_problem(config: Any, what: str, *, multi_label: bool) -> None:
    """Refuse the configuration of a model with several labels a row where one is wanted, or the other way round."""
    if multi_label:
        fits = config.problem_type == "multi_label_classification"
        requirement, way_out = "have several labels", "set its problem_type to multi_label_classification"
    else:
        fits = config.problem_type in (None, "single_label_classification") and config.num_labels > 1
        requirement = "choose one of several classes"
        way_out = f"several labels per {what} can be scaled with PerLabelTemperatureScaling in Python"
    if not fits:
        got = f"problem_type={config.problem_type!r} and {config.num_labels} outputs"
        raise InputValueError(expected("the model", requirement, got, way_out))


@contextmanager
def refusals(argument: str, requirement: str, got: object, way_out: str) -> Iterator[None]:
    """Turn the libraries' errors about a name into one line that says what to do."""
    try:
        yield
    except _UNLOADABLE as error:
        cause = " ".join(str(error).split())
        raise InputValueError(expected(argument, requirement, f"{got} ({cause})", way_out)) from error
