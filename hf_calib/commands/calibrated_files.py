"""Files that `hf-calib calibrate` writes for predictions: calibrated probabilities, and the report on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from inspect import signature
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pyarrow
from pyarrow.parquet import ParquetWriter

from hf_calib._errors import check, few
from hf_calib._files import remove_files, report_files, whole_file, whole_folder
from hf_calib._text import counted
from hf_calib.commands.source import FileSource, name_of
from hf_calib.decisions.saved import DECISIONS
from hf_calib.metrics import CalibrationState
from hf_calib.predictions import one_pass, save_predictions
from hf_calib.predictions.predictions import SINGLE_LABEL, Predictions
from hf_calib.predictions.table import File, Table
from hf_calib.report import CalibrationReport
from hf_calib.report.making import report_of
from hf_calib.scaling import SCALERS
from hf_calib.scaling.saved_map import MAP_NAME, method_of

if TYPE_CHECKING:
    from hf_calib.commands.calibrate import Calibration
    from hf_calib.commands.options import Calibrate

_HELD = "predictions.npz"
_OF_FILES = (MAP_NAME, "predictions/**/*.parquet")  # Of rows that are not held.


def check_files(
    source: FileSource,
    applied: Table,
    options: Calibrate,
    scaler: Any,
    *,
    is_held: bool,
) -> None:
    """Raise where the files do not go with the options or each other, or one that is read would be written over."""
    read = _read_by(source)
    read |= {Path(each.data).resolve() for each in source.sets.values() if is_held}
    written = ["", *([_HELD] if is_held else map(_written, applied.files))]
    apart = not read & {(options.output / name).resolve() for name in written}
    # Through a link, files outside of the output folder would be replaced.
    target = options.output / "predictions"
    got = "a link" if target.is_symlink() else ""
    check(not got, f"{target} to be a folder of its own", got, "remove the link")
    targets = [] if is_held else [str(_written(file)) for file in applied.files]
    twice = [name for name, times in Counter(targets).items() if times > 1]
    requirement = "the calibrated files to have different names"
    way_out = "calibrate files of one name apart"
    check(not twice, requirement, f"several for {few(twice)}", way_out)
    way_out = "name another folder, so that this one stays unchanged"
    check(
        apart,
        "output to be another folder than the predictions'",
        options.output,
        way_out,
    )
    taken = {
        name: signature(SCALERS[name].load().fit).parameters
        for name in SINGLE_LABEL.maps
    }
    known = [name for name, each in taken.items() if "sample_weight" in each]
    got = f"{method_of(scaler)}, which has no weighted form"
    requirement = f"--weight-column to go with a method of {', '.join(known)}"
    check(
        options.weight_column is None or method_of(scaler) in known,
        requirement,
        got,
        "name one of these",
    )
    names = source.tables["data"].class_names
    got = f"{len(applied.class_names)} ({few(applied.class_names)}) for {len(names)} ({few(names)})"
    same = is_held or names == applied.class_names
    check(
        same,
        "the test data to have the same classes",
        got,
        "use predictions of one model",
    )


def write_held(done: Calibration, source: FileSource) -> Calibration:
    """Write the reported rows to predictions.npz."""
    report = done.report
    assert report.after is not None
    earlier = _earlier(Path(done.output), source, _OF_FILES)
    named = source.reading.class_names or source.predictions().class_names
    calibrated: Any = {"probs": report.after.probs, "class_names": named}
    with whole_folder(Path(done.output)) as folder:
        save_predictions(Predictions(report.labels, **calibrated), folder / _HELD)
        report.save(folder)
    remove_files(Path(done.output), earlier)
    return done


def write_files(
    scaler: Any,
    table: Table,
    source: FileSource,
    options: Calibrate,
    *,
    half: int | None,
) -> CalibrationReport:
    """Write every file calibrated, whole or not at all, and the scaler; report on a half of the rows, or all."""
    running = source.running
    earlier = _earlier(options.output, source, [_HELD])
    output, n_bins, n_files = options.output, options.n_bins, len(table.files)
    scaler.save_pretrained(output)
    running.stages(f"calibrating {counted(n_files, 'file')}")
    work, tally = (
        partial(_calibrate_file, table, scaler, output, n_bins, half=half),
        one_pass.Tally(),
    )
    for each in one_pass.over_parts(work, table.files, options.workers):
        tally.merge(each)
        running.progress(each.n_rows, table.n_rows)
    names = tuple(options.class_names or table.class_names)
    report = report_of(tally, name_of(table.name), names, n_bins, n_files)
    report.save(output)
    remove_files(output, earlier)
    return report


def _read_by(source: FileSource) -> set[Path]:
    """The files that are read."""
    return {
        Path(file.path).resolve()
        for each in source.tables.values()
        for file in each.files
    }


def _earlier(output: Path, source: FileSource, names: Sequence[str]) -> list[Path]:
    """The files of an earlier run that this one does not replace, and that it does not read."""
    # Next to a model, they are others' files.
    if (output / "config.json").is_file():
        return []
    found = rule_files(output)
    # Without a report, predictions are others' files, too.
    if (output / "report.json").is_file():
        found += [path for name in names for path in output.glob(name)]
    read = _read_by(source)
    return [path for path in found if path.is_file() and path.resolve() not in read]


def rule_files(output: Path) -> list[Path]:
    """The rule of an earlier `hf-calib decide` in a folder, and the report on it."""
    rule = [output / DECISIONS] if (output / DECISIONS).is_file() else []
    return [*rule, *report_files(output / "decisions")]


def _calibrate_file(
    table: Table,
    scaler: Any,
    output: Path,
    n_bins: int,
    file: File,
    *,
    half: int | None,
) -> one_pass.Tally:
    """Write a file with calibrated probabilities in place of its scores; sum both, of a half of the rows or all."""
    scores, writer = [f"prob_{name}" for name in table.class_names], None
    before, after = (
        CalibrationState(n_classes=len(scores), n_bins=n_bins) for _ in range(2)
    )
    tally = one_pass.Tally({"before": before, "after": after})
    with whole_file(output / _written(file)) as path:
        for part in (part for part in table.parts if part.file is file):
            kept = [
                name
                for name in part.fragment.physical_schema.names
                if name not in table.columns.scores
            ]
            for first, batch in table.batches(part, more=kept):
                rows: Any = batch.table
                found = scaler.predict_proba(batch.as_logits())
                used: Any = slice(None)
                if half is not None:
                    used = one_pass.half_of(part.hashes(first, len(rows))) == half
                weights = None if batch.weights is None else batch.weights[used]
                before.update(batch.probs[used], batch.labels[used], weights)
                after.update(found[used], batch.labels[used], weights)
                columns = [*map(pyarrow.array, found.T), *map(rows.column, kept)]
                written = pyarrow.RecordBatch.from_arrays(columns, [*scores, *kept])
                writer = writer or ParquetWriter(path, written.schema)
                writer.write_batch(written)
                tally.n_rows += len(rows)
        check(writer is not None, f"{file.name} to have rows", "none", "leave it out")
        writer.close()  # type: ignore[union-attr]
    return tally


def _written(file: File) -> PurePosixPath:
    """Where a calibrated file is, below the output folder."""
    return PurePosixPath("predictions", file.name.removesuffix(".gz")).with_suffix(
        ".parquet"
    )
