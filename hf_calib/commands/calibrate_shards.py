"""`hf-calib calibrate` on predictions that are not held at once: fitted on a sample, applied file by file."""

from __future__ import annotations

from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hf_calib._errors import check
from hf_calib._files import whole_file
from hf_calib.commands.fitting import METHODS, fit, make_scaler, takes_weights
from hf_calib.commands.source import FileSource, Running, name_of
from hf_calib.metrics import CalibrationState
from hf_calib.predictions.one_pass import MOST_SAMPLED, Tally, draw_sample, half_of, over_parts
from hf_calib.predictions.table import File, Table
from hf_calib.report.making import report_of
from hf_calib.scaling import SCALERS

if TYPE_CHECKING:
    from hf_calib.commands.options import Calibrate

PREDICTIONS = "predictions"


def calibrate_shards(
    source: FileSource, options: Calibrate, method: str | None, running: Running
) -> tuple[str, Any, dict[str, Any]]:
    """Fit a map on a sample; write calibrated files, each whole or not at all, and report: the fields of a Calibration.

    Without test data, the map is fitted on one half of the rows, by hashes, and the report is on the other.
    """
    output, n_bins, workers = options.output, options.n_bins, options.workers
    got, way_out = "weights, or more rows than are held at once", "leave it out"
    check("target_data" not in source.sets, "--target-data to go with rows that are held", got, way_out)
    table, applied = source.tables["data"], source.tables.get("test_data", source.tables["data"])
    is_split, weighted = applied is table, table.columns.weight is not None
    method = method or ("temperature" if weighted else "auto")
    scaler = make_scaler(method, options.criterion, n_bins, METHODS)
    known = ", ".join(name for name in METHODS if takes_weights(SCALERS[name].load()))
    got = f"{method}, which has no weighted form"
    requirement = f"--weight-column to go with a method of {known}"
    check(not weighted or takes_weights(scaler), requirement, got, "name one of these")
    _check_fits(table, applied, output)
    running.stages(f"drawing up to {MOST_SAMPLED:,} rows to fit on")
    sample = draw_sample(table, half=0 if is_split else None, workers=workers)
    running.stages(f"fitting on {len(sample):,} rows")
    warned = fit(scaler, sample, sample.weights)
    scaler.save_pretrained(output)
    running.stages(f"calibrating {len(applied.files):,} files")
    work = partial(
        _calibrate_file, applied, scaler, output / PREDICTIONS, n_bins, half=1 if is_split else None
    )
    tally = Tally()
    for each in over_parts(work, applied.files, workers):
        tally.merge(each)
        running.progress(each.n_rows, applied.n_rows)
    report = report_of(tally, name_of(applied.name), applied.class_names, n_bins, len(applied.files))
    report.save(output)
    held_out = "the other half of the rows" if is_split else f"{tally.n_rows:,} rows of the test data"
    found = {"n_fitted": len(sample), "held_out": held_out, "report": report, "notes": warned}
    return method, scaler, found


def _calibrate_file(
    table: Table, scaler: Any, output: Path, n_bins: int, file: File, *, half: int | None
) -> Tally:
    """Write a file with calibrated probabilities in place of its scores; sum both, of a half of the rows or all."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    names = table.class_names
    states = {name: CalibrationState(n_classes=len(names), n_bins=n_bins) for name in ("before", "after")}
    writer, n_rows = None, 0
    with whole_file(output / _written(file.name)) as path:
        for part in (part for part in table.parts if part.file is file):
            kept = [name for name in part.fragment.physical_schema.names if name not in table.columns.scores]
            for first, batch in table.batches(part, more=kept):
                rows: Any = batch.table
                found = scaler.predict_proba(batch.as_logits())
                used: Any = slice(None)
                if half is not None:
                    used = half_of(part.hashes(first, len(rows))) == half
                weights = None if batch.weights is None else batch.weights[used]
                for state, probs in zip(states.values(), (batch.probs, found), strict=True):
                    state.update(probs[used], batch.labels[used], weights)
                columns = {f"prob_{name}": pyarrow.array(found[:, c]) for c, name in enumerate(names)}
                columns |= {name: rows.column(name) for name in kept}
                written = pyarrow.RecordBatch.from_pydict(columns)
                writer = writer or ParquetWriter(path, written.schema)
                writer.write_batch(written)
                n_rows += len(rows)
        check(writer is not None, f"{file.name} to have rows", "none", "leave it out")
        writer.close()  # type: ignore[union-attr]
    return Tally(states, n_rows=n_rows)


def _written(name: str) -> str:
    name = name.removesuffix(".gz")
    return f"{name.removesuffix(PurePosixPath(name).suffix)}.parquet"


def _check_fits(table: Table, applied: Table, output: Path) -> None:
    got = f"{len(table.class_names)} classes and {len(applied.class_names)}, or other names"
    same = table.class_names == applied.class_names
    check(same, "the test data to have the same classes", got, "use predictions of one model")
    outputs = {(output / PREDICTIONS / PurePosixPath(file.name)).resolve() for file in applied.files}
    inputs = {Path(file.path).resolve() for each in (table, applied) for file in each.files}
    way_out = "name another folder: the calibrated files have the same names"
    check(not outputs & inputs, "output to be another folder than the predictions'", output, way_out)
