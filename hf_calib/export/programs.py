"""Exports of a classifier as an ONNX graph or a torch ExportedProgram, which need no Python code of the model."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_calib._compat import program_of
from hf_calib._errors import InputValueError, check, expected

FORMATS = {"onnx": "model.onnx", "torch": "model.pt2"}

_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
# A protobuf file has at most 2 GiB; larger weights are in a separate file.
_MOST_IN_ONE_FILE = 2**30
_AXES = ("batch", "sequence")


def check_packages() -> None:
    """Raise unless the packages for ONNX are installed."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    check(
        not missing,
        "onnx to be installed",
        f"no {' and no '.join(missing)}",
        "pip install 'hf_calib[onnx]'",
    )


def write_program(model: Any, batch: Mapping[str, Tensor], path: Path) -> None:
    """Export a model on the CPU in evaluation mode, with variable batch and, for tokens, sequence axes.

    The batch needs at least two rows and, for tokens, two columns, because axes of size one count as fixed.
    """
    from transformers import exporters

    to_onnx = path.suffix == ".onnx"
    kind = "Onnx" if to_onnx else "Dynamo"
    exporter, config = (
        getattr(exporters, f"{kind}Exporter"),
        getattr(exporters, f"{kind}Config"),
    )
    # In this form, an axis that cannot vary is an error instead of being fixed silently.
    varies = torch.export.Dim.DYNAMIC
    shapes = {
        name: dict.fromkeys((0,) if name == "pixel_values" else (0, 1), varies)
        for name in batch
    }
    try:
        with _quietly(), _only_logits(model):
            program = program_of(
                exporter().export(
                    model, dict(batch), config=config(dynamic_shapes=shapes)
                )
            )
            if to_onnx:
                _save_onnx(program, path)
            else:
                torch.export.save(program, path)
    except Exception as error:  # Tracing may raise any error.
        got = f"{type(error).__name__} ({' '.join(str(error).split())[:300]})"
        way_out = (
            "serve it with transformers, or report this architecture to transformers"
        )
        raise InputValueError(
            expected("the model", "be exportable by transformers", got, way_out)
        ) from error


def _save_onnx(program: Any, path: Path) -> None:
    """Save a graph that returns only the logits, with axes named "batch" and "sequence"."""
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    graph = program.graph
    # The outputs of decoders include their cache.
    graph.outputs[:] = [value for value in graph.outputs if value.name == "logits"]
    RemoveUnusedNodesPass()(program)
    symbols = {
        str(dim): _AXES[axis]
        for value in graph.inputs
        for axis, dim in enumerate(value.shape)
        if isinstance(dim, onnx_ir.SymbolicDim)
    }
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    for value in values:
        for axis, dim in enumerate(value.shape or ()):
            if str(dim) in symbols:
                value.shape[axis] = symbols[str(dim)]
    n_bytes = sum(value.const_value.nbytes for value in graph.initializers.values())
    external = f"{path.name}.data" if n_bytes > _MOST_IN_ONE_FILE else None
    onnx_ir.save(program, path, external_data=external)


@contextmanager
def _only_logits(model: Any) -> Iterator[None]:
    """A context in which a model returns only {"logits": ...}, without a cache or classes of transformers.

    torch cannot load a program whose outputs have a class that was not imported.
    """
    whole = model.forward
    model.forward = lambda **inputs: {"logits": whole(**inputs).logits}
    try:
        yield
    finally:
        del model.forward


@contextmanager
def _quietly() -> Iterator[None]:
    """A context without the progress output and version warnings of exporters, because the result is checked."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            # The tree specs of torch 2.13 cause it in copyreg.
            warnings.filterwarnings(
                "ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning
            )
            yield
    finally:
        logging.disable(disabled)


def load_program(path: Path) -> Any:
    """Load a program of `write_program` as a function of a batch of any size, whose result has logits."""
    if path.suffix != ".onnx":
        program = torch.export.load(path).module()
        return lambda **batch: SimpleNamespace(**program(**batch))
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # Errors only.
    session = onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"]
    )
    names = {value.name for value in session.get_inputs()}

    def run(**batch: Tensor) -> SimpleNamespace:
        inputs = {name: value.numpy() for name, value in batch.items() if name in names}
        return SimpleNamespace(
            logits=torch.from_numpy(session.run(["logits"], inputs)[0])
        )

    return run


@torch.no_grad()
def logits_of(
    program: Any, batches: Sequence[Mapping[str, Tensor]]
) -> list[np.ndarray]:
    """The logits of each batch in float64; for tokens, one row for each that is not padding."""
    found = []
    for batch in batches:
        logits = program(**batch).logits.double().numpy()
        found.append(
            logits[batch["attention_mask"].bool().numpy()]
            if logits.ndim == 3
            else logits
        )
    return found
