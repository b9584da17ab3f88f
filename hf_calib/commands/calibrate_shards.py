"""`hf-calib calibrate` on predictions that are not held at once: fitted on a sample, applied file by file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from hf_calib._errors import InputValueError, expected
from hf_calib._files import whole_file
from hf_calib.commands.fit_on_all import fit_on_all
from hf_calib.commands.fitting import fit, make_scaler, takes_weights
from hf_calib.commands.in_shards import report_of
from hf_calib.commands.opening import Running
from hf_calib.metrics import CalibrationState
from hf_calib.metrics.checks import check_rows
from hf_calib.predictions.passes import Tally, keep, read_kept, run_pass
from hf_calib.predictions.samples import MOST_SAMPLED, draw_sample, half_of
from hf_calib.predictions.shard_formats import Piece, suffix_of
from hf_calib.predictions.shards import Shards
from hf_calib.report.one_pass import OnePassReport
from hf_calib.report.writing import write_to
from hf_calib.scaling.methods import SCALERS
from hf_calib.tasks import SINGLE_LABEL

PREDICTIONS = "predictions"
_TALLIES = "_tallies"  # of the files that are written; a name that readers of folders pass over


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


@dataclass(frozen=True)
class Calibrating:
    """Writes a file with calibrated probabilities in place of its scores, and sums both.

    Args:
        scaler: fitted.
        output: the folder of the files.
        n_bins: M.
        half: the half of the rows that is summed, see `half_of`; None for all.
        options: what else the file depends on.
    """

    scaler: Any
    output: Path
    n_bins: int
    half: int | None
    options: str

    def __call__(self, shards: Shards, number: int, piece: Piece) -> Tally:
        shard = shards.files[number]
        target = self.output / f"{shard.name.removesuffix(suffix_of(shard.name) or '')}.parquet"
        kept = self.output / _TALLIES / f"{hashlib.sha256(shard.name.encode()).hexdigest()[:32]}.npz"
        header = [shard.name, shard.identity, self.options]
        done = _read_tally(kept, header) if target.is_file() else None
        if done is not None:
            return done
        with whole_file(target) as path:
            tally = self._write(shards, number, piece, path)
        keep(kept, header, tally.to_arrays())
        return tally

    def _write(self, shards: Shards, number: int, piece: Piece, path: Path) -> Tally:
        import pyarrow
        from pyarrow.parquet import ParquetWriter

        names = shards.class_names
        states = {
            name: CalibrationState(n_classes=len(names), n_bins=self.n_bins) for name in ("before", "after")
        }
        kept = [name for name in shards.contents[number].schema.names if name not in shards.columns.scores]
        columns = [*shards.columns.scores, *kept]
        writer, n_rows = None, 0
        for first, table in shards.tables(number, piece, columns, (shards.columns.label, *shards.columns.by)):
            with shards.naming(number, first):
                batch = shards.columns.read(table)
                check_rows(batch.probs, batch.labels, batch.weights, len(names))
            found = self.scaler.predict_proba(batch.as_logits())
            rows: Any = slice(None)
            if self.half is not None:
                rows = half_of(shards.row_hashes(number, first, len(table))) == self.half
            weights = None if batch.weights is None else batch.weights[rows]
            for state, probs in zip(states.values(), (batch.probs, found), strict=True):
                state.update(probs[rows], batch.labels[rows], weights)
            columns_out = {f"prob_{name}": pyarrow.array(found[:, c]) for c, name in enumerate(names)}
            columns_out |= {name: table.column(name) for name in kept}
            out = pyarrow.RecordBatch.from_pydict(columns_out)
            writer = writer or ParquetWriter(path, out.schema)
            writer.write_batch(out)
            n_rows += len(table)
        if writer is None:
            way_out = "leave it out"
            raise InputValueError(expected(shards.files[number].name, "have rows", "none", way_out))
        writer.close()
        return Tally(states, n_rows=n_rows)


def calibrate_shards(
    shards: Shards,
    output: Path,
    *,
    test: Shards | None,
    method: str | None,
    criterion: str | None,
    all_rows: bool,
    n_bins: int,
    workers: int | None,
    running: Running,
) -> CalibratedShards:
    """Fit a map on a sample, or a temperature or vector scaling on all rows; write calibrated files, and report.

    Killed, the same call goes on: files that are written are not done again.

    Args:
        shards: to fit on; without test, one half of them, by hashes of the rows.
        output: for predictions/ with a file for each, calibration.json and the report.
        test: other predictions of the same model, to calibrate and report on.
        method: a post-hoc method; None is "auto", or a temperature where rows have weights.
        criterion: of a temperature.
        all_rows: whether a temperature or vector scaling is fitted on all rows, in some more passes.
        n_bins: M.
        workers: processes.
        running: whom to tell.

    Raises:
        ValueError: if files, rows or the method are wrong.
    """
    method = method or ("auto" if shards.columns.weight is None else "temperature")
    scaler = make_scaler(method, criterion or "nll", n_bins, SINGLE_LABEL.maps)
    if all_rows and (method not in ("temperature", "vector") or (criterion or "nll") != "nll"):
        got, way_out = f"{method} by {criterion or 'nll'}", "leave it out: other maps are fitted on a sample"
        requirement = "go with temperature or vector, by nll"
        raise InputValueError(expected("--all-rows", requirement, got, way_out))
    if shards.columns.weight is not None and not takes_weights(scaler):
        got = f"{method}, which has no weighted form"
        known = [name for name in SINGLE_LABEL.maps if takes_weights(SCALERS[name].load())]
        requirement = f"go with a method of {', '.join(known)}"
        raise InputValueError(expected("--weight-column", requirement, got, "name one of these"))
    applied = shards if test is None else test
    _check_fits(shards, applied, output)
    half = 0 if test is None else None
    running.stages(f"drawing up to {MOST_SAMPLED:,} rows to fit on")
    sample, weights = draw_sample(shards, half=half, workers=workers)
    running.stages(f"fitting on {len(sample):,} rows")
    warned, n_fitted = fit(scaler, sample, weights), len(sample)
    if all_rows:
        running.stages("fitting on all rows")
        n_fitted = fit_on_all(scaler, shards, half=half, workers=workers)
    scaler.save_pretrained(output)
    calibrating = Calibrating(
        scaler,
        output / PREDICTIONS,
        n_bins,
        1 if test is None else None,
        json.dumps([_fingerprint(output), n_bins, test is None]),
    )
    running.stages(f"calibrating {len(applied.files):,} files")
    tally = Tally()
    whole = [(number, contents.whole) for number, contents in enumerate(applied.contents)]
    run_pass(applied, calibrating, tally, pieces=whole, workers=workers, on_rows=running.rows)
    held_out = "the other half of the rows" if test is None else f"{tally.n_rows:,} rows of the test data"
    report = report_of(tally, applied, n_bins=n_bins)
    write_to(output, report)
    _remove_tallies(output / PREDICTIONS / _TALLIES)
    return CalibratedShards(method, scaler, n_fitted, held_out, report, warned)


def _check_fits(shards: Shards, applied: Shards, output: Path) -> None:
    if shards.class_names != applied.class_names:
        got = f"{len(shards.class_names)} classes and {len(applied.class_names)}, or other names"
        way_out = "use predictions of one model"
        raise InputValueError(expected("the test data", "have the same classes", got, way_out))
    names = [PurePosixPath(shard.name) for shard in applied.files]
    outputs = {(output / PREDICTIONS / name).resolve() for name in names}
    inputs = {Path(shard.path).resolve() for each in (shards, applied) for shard in each.files}
    if outputs & inputs:
        way_out = "name another folder: the calibrated files have the same names"
        raise InputValueError(expected("output", "be another folder than the predictions'", output, way_out))


def _fingerprint(output: Path) -> str:
    """Of the saved map."""
    paths: Sequence[Path] = sorted([output / "calibration.json", *output.glob("calibration/*.safetensors")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths if path.is_file())).hexdigest()


def _read_tally(path: Path, header: list[str]) -> Tally | None:
    try:
        found, arrays = read_kept(path)
        if found == header:
            return Tally.from_arrays(arrays)
    except (OSError, ValueError, KeyError, EOFError):
        pass
    return None


def _remove_tallies(folder: Path) -> None:
    for path in folder.glob("*.npz"):
        path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
