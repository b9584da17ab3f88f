"""`hf-calib calibrate` on predictions that are not held at once: fitted on a sample, applied file by file."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_calib._errors import InputValueError, check, expected
from hf_calib._files import whole_file
from hf_calib.commands.fitting import fit, make_scaler, takes_weights
from hf_calib.commands.opening import Running, name_of
from hf_calib.metrics import CalibrationState
from hf_calib.metrics.checks import check_rows
from hf_calib.predictions.kinds import SINGLE_LABEL
from hf_calib.predictions.one_pass import MOST_SAMPLED, Tally, draw_sample, half_of, over_parts
from hf_calib.predictions.table import Table
from hf_calib.report.of_predictions import report_of
from hf_calib.report.one_pass import OnePassReport
from hf_calib.report.writing import write_to
from hf_calib.scaling import SCALERS

if TYPE_CHECKING:
    from hf_calib.commands.options import Calibrate

PREDICTIONS = "predictions"


class CalibratedShards(NamedTuple):
    """The outcome of `calibrate_shards`.

    Args:
        method: of the scaler.
        scaler: fitted.
        n_fitted: rows that it was fitted on.
        held_out: which rows the report is on, in words.
        report: before and after.
        warned: warnings of the fit.
    """

    method: str
    scaler: Any
    n_fitted: int
    held_out: str
    report: OnePassReport
    warned: tuple[str, ...]


def _calibrate_file(
    table: Table, number: int, scaler: Any, output: Path, *, n_bins: int, half: int | None
) -> Tally:
    """Write a file with calibrated probabilities in place of its scores; sum both, of a half of the rows or all."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    file, names = table.files[number], table.class_names
    kept = [name for name in table.columns_of(number) if name not in table.columns.scores]
    states = {name: CalibrationState(n_classes=len(names), n_bins=n_bins) for name in ("before", "after")}
    writer, n_rows = None, 0
    name = file.name.removesuffix(".gz")
    with whole_file(output / f"{name.removesuffix(PurePosixPath(name).suffix)}.parquet") as path:
        for part in (part for part in table.parts if part.file == number):
            for first, rows in table.tables(part, [*table.columns.scores, *kept]):
                with table.naming(part, first):
                    batch = table.columns.read(rows)
                    check_rows(batch.probs, batch.labels, batch.weights, len(names))
                found = scaler.predict_proba(batch.as_logits())
                used: Any = slice(None)
                if half is not None:
                    used = half_of(table.row_hashes(part, first, len(rows))) == half
                weights = None if batch.weights is None else batch.weights[used]
                for state, probs in zip(states.values(), (batch.probs, found), strict=True):
                    state.update(probs[used], batch.labels[used], weights)
                columns = {f"prob_{name}": pyarrow.array(found[:, c]) for c, name in enumerate(names)}
                written = pyarrow.RecordBatch.from_pydict(
                    columns | {name: rows.column(name) for name in kept}
                )
                writer = writer or ParquetWriter(path, written.schema)
                writer.write_batch(written)
                n_rows += len(rows)
        check(writer is not None, f"{file.name} to have rows", "none", "leave it out")
        writer.close()  # type: ignore[union-attr]
    return Tally(states, n_rows=n_rows)


def calibrate_shards(
    table: Table, test: Table | None, options: Calibrate, method: str | None, running: Running
) -> CalibratedShards:
    """Fit a map on a sample; write calibrated files, each whole or not at all, and report.

    Without test, the map is fitted on one half of the rows, by hashes, and the report is on the other.
    """
    output, n_bins, workers = options.output, options.n_bins, options.workers
    method = method or ("auto" if table.columns.weight is None else "temperature")
    scaler = make_scaler(method, options.criterion or "nll", n_bins, SINGLE_LABEL.maps)
    if table.columns.weight is not None and not takes_weights(scaler):
        got = f"{method}, which has no weighted form"
        known = [name for name in SINGLE_LABEL.maps if takes_weights(SCALERS[name].load())]
        requirement = f"go with a method of {', '.join(known)}"
        raise InputValueError(expected("--weight-column", requirement, got, "name one of these"))
    applied = table if test is None else test
    _check_fits(table, applied, output)
    half = 0 if test is None else None
    running.stages(f"drawing up to {MOST_SAMPLED:,} rows to fit on")
    sample = draw_sample(table, half=half, workers=workers)
    running.stages(f"fitting on {len(sample):,} rows")
    warned = fit(scaler, sample, sample.weights)
    scaler.save_pretrained(output)
    running.stages(f"calibrating {len(applied.files):,} files")

    def work(number: int) -> Tally:
        half = 1 if test is None else None
        return _calibrate_file(applied, number, scaler, output / PREDICTIONS, n_bins=n_bins, half=half)

    tally = Tally()
    for each in over_parts(work, range(len(applied.files)), workers):
        tally.merge(each)
        running.rows(each.n_rows, applied.n_rows)
    held_out = "the other half of the rows" if test is None else f"{tally.n_rows:,} rows of the test data"
    report = report_of(tally, name_of(applied.name), applied.class_names, n_bins, len(applied.files))
    write_to(output, report)
    return CalibratedShards(method, scaler, len(sample), held_out, report, warned)


def _check_fits(table: Table, applied: Table, output: Path) -> None:
    if table.class_names != applied.class_names:
        got = f"{len(table.class_names)} classes and {len(applied.class_names)}, or other names"
        way_out = "use predictions of one model"
        raise InputValueError(expected("the test data", "have the same classes", got, way_out))
    names = [PurePosixPath(file.name) for file in applied.files]
    outputs = {(output / PREDICTIONS / name).resolve() for name in names}
    inputs = {Path(file.path).resolve() for each in (table, applied) for file in each.files}
    if outputs & inputs:
        way_out = "name another folder: the calibrated files have the same names"
        raise InputValueError(expected("output", "be another folder than the predictions'", output, way_out))
