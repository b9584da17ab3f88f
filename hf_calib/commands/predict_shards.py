"""A model run over rows by one or several processes, whose predictions are written in shards as they come."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_calib._errors import InputValueError, did_you_mean, expected
from hf_calib._files import whole_file
from hf_calib.commands.opening import Opened, Running, check_kind
from hf_calib.predictions.reading import Reading, RowSet
from hf_calib.tasks import SINGLE_LABEL, TASKS, Task

if TYPE_CHECKING:
    from datasets import Dataset

_SHARD_ROWS = 4096  # what a kill costs at most, of each process
_RUN = "_run.json"  # a name that readers of folders pass over


def n_processes() -> int:
    """Processes of this run, as `accelerate launch` and torchrun tell them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def predict_shards(
    source: str,
    task: Task | None,
    rows: RowSet,
    reading: Reading,
    folder: Path,
    *,
    columns: Sequence[str],
    running: Running,
) -> Opened | None:
    """Write the logits of all rows as parquet files; those that a run before has written are not predicted again.

    Every process calls it; file k is written by process k modulo their number, and so the files do not depend on it.

    Args:
        source: a model.
        task: its row.
        rows: labelled rows.
        reading: how their columns are read.
        folder: of the files; also one that a killed run of the same model and rows has begun.
        columns: others of the rows, kept beside the logits.
        running: how the model is run.

    Returns:
        The source with its rows; None on all processes but the first, which have nothing more to do.

    Raises:
        ValueError: if model or rows are wrong, or the folder has predictions of others.
    """
    import torch
    from accelerate import PartialState

    from hf_calib.export.fingerprint import fingerprint
    from hf_calib.predictions.classifier import load_classifier

    task = task or TASKS["text"]  # whose loading says what is wrong
    is_cpu = not torch.accelerator.is_available()
    state = PartialState(cpu=is_cpu) if n_processes() > 1 else None
    rank, world = (0, 1) if state is None else (state.process_index, state.num_processes)
    running.stages(f"reading {rows.data}")
    with nullcontext() if state is None else state.main_process_first():
        dataset = rows.load()
    running.stages(f"loading {source}")
    classifier = load_classifier(
        source, task, trust_remote_code=running.trust_remote_code, class_names=reading.class_names
    )
    check_kind(task.labels, reading, {})
    if task.labels is not SINGLE_LABEL:
        got, way_out = (
            f"one of {task.labels.name} rows",
            "leave out --by, --weight-column and several processes",
        )
        raise InputValueError(expected("the model", "have one class a row", got, way_out))
    _check_columns(columns, dataset)
    labels = classifier.read_labels(dataset, reading, rows.data)  # all of them, before the model is run
    n_shards = -(-len(dataset) // _SHARD_ROWS)
    paths = [folder / f"part-{k:05d}-of-{n_shards:05d}.parquet" for k in range(n_shards)]
    facts = {
        "model": fingerprint(classifier.model),
        "rows": {**rows.source(), "n": len(dataset), "options": rows.options(reading)},
        "labels": hashlib.sha256(labels.tobytes()).hexdigest(),
        "columns": list(columns),
        "shard_rows": _SHARD_ROWS,
    }
    if rank == 0:
        _claim(folder, facts)
    if state is not None:
        state.wait_for_everyone()
    done = 0
    for k in range(rank, n_shards, world):
        part = dataset.select(range(k * _SHARD_ROWS, min((k + 1) * _SHARD_ROWS, len(dataset))))
        if not paths[k].is_file():
            encoded = classifier.encode(part, reading, name=rows.data)
            found = classifier.predict(encoded, batch_size=reading.batch_size)
            _write(
                paths[k],
                found.logits,
                found.labels,
                classifier.class_names,
                part.select_columns(list(columns)),
            )
        if running.progress is not None and rank == 0:
            more = min(len(part) * world, len(dataset) - done)
            done += more
            running.progress(more, len(dataset))
    if state is not None:
        state.wait_for_everyone()
    if rank != 0:
        return None
    opened = Opened(source, reading, running, {"data": rows}, classifier)
    opened.rows["data"] = dataset
    return opened


def _check_columns(columns: Sequence[str], dataset: Dataset) -> None:
    for name in columns:
        if name not in dataset.column_names:
            requirement = f"be one of {', '.join(dataset.column_names)}"
            way_out = did_you_mean(name, dataset.column_names)
            raise InputValueError(expected("the column", requirement, repr(name), way_out))


def _claim(folder: Path, facts: dict[str, Any]) -> None:
    """Say whose predictions a folder holds, or check that they are of the same model and rows."""
    path = folder / _RUN
    if path.is_file():
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            known = None
        if known != facts:
            got, way_out = f"those of another run in {folder}", "name another folder, or empty this one"
            raise InputValueError(
                expected("the predictions", "be of this model and these rows", got, way_out)
            )
        return
    if folder.is_dir() and any(folder.iterdir()):
        got, way_out = f"files of others in {folder}", "name a new folder"
        raise InputValueError(expected("the folder of predictions", "be new", got, way_out))
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _write(path: Path, logits: Any, labels: Any, class_names: Sequence[str], others: Dataset) -> None:
    import pyarrow
    from pyarrow import parquet

    table = {f"logit_{name}": pyarrow.array(logits[:, c]) for c, name in enumerate(class_names)}
    table["label"] = pyarrow.array(labels)
    for name in others.column_names:
        table.setdefault(name, pyarrow.array(others[name][:]))
    with whole_file(path) as unfinished:
        parquet.write_table(pyarrow.table(table), unfinished)
