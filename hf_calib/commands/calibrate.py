"""`hf-calib calibrate`: a scaler fitted on held-out rows, and a calibrated model or calibrated predictions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from hf_calib._errors import InputValueError, check, did_you_mean, expected
from hf_calib._files import check_output, whole_file, whole_folder
from hf_calib.commands import console
from hf_calib.commands.source import FileSource, ModelSource, Running, check_kind, name_of, open_source
from hf_calib.metrics import CalibrationState
from hf_calib.predictions import one_pass, save_predictions
from hf_calib.predictions.predictions import SINGLE_LABEL, LabelKind, Predictions, check_same_classes
from hf_calib.predictions.table import File, Table
from hf_calib.report import CalibrationReport, report_on_predictions
from hf_calib.report.making import report_of
from hf_calib.report.rows import with_interval
from hf_calib.scaling import FOLDABLE_SCALERS, SCALERS, PriorEstimate, estimate_prior
from hf_calib.scaling.saved_map import fitted_numbers, method_of

if TYPE_CHECKING:
    from hf_calib.commands.options import Calibrate

METHODS = SINGLE_LABEL.maps
FOLDED = tuple(method for method in METHODS if method in FOLDABLE_SCALERS)  # that a model's head can hold
_MOST_MOVED = 5  # classes whose frequencies are shown


@dataclass(kw_only=True)
class Calibration:
    """The outcome of `calibrate`."""

    scaler: Any = field(repr=False)  # fitted
    served: Any = field(repr=False)  # the scaler, or its correction to other class frequencies
    n_fitted: int  # rows
    held_out: str  # which rows the report is on, in words
    # Before and after, on rows that the scaler has not seen. "After" has the prior correction where these are test
    # rows; other rows have the source's class frequencies.
    report: CalibrationReport
    notes: tuple[str, ...]
    output: str
    n_shared: int = 0  # rows of the report that the scaler was fitted on
    prior: PriorEstimate | None = None  # the class frequencies of the target data
    # The largest difference from the probabilities of a pipeline with the saved model.
    served_difference: float | None = None
    folded: bool = False

    @property
    def method(self) -> str:
        """A key of `SCALERS`."""
        return method_of(self.scaler)

    @property
    def numbers(self) -> dict[str, Any]:
        """The fitted parameters, where these are at most a number per class."""
        return fitted_numbers(self.scaler)

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        found = {
            name: value for name, value in vars(self).items() if name not in ("scaler", "served", "n_shared")
        }
        found |= {"method": self.method, "numbers": self.numbers, "notes": list(self.notes)}
        found |= {"criterion": getattr(self.scaler, "criterion", None)}
        found |= {"choice": getattr(self.scaler, "choice_", None), "report": self.report.to_dict()}
        return found | {"prior": self.prior and self.prior.to_dict()}


def run(options: Calibrate, running: Running) -> Calibration:
    """Fit a scaler on held-out rows; fold it into the model's head for a plain pipeline, or calibrate predictions.

    A map that does not fold, or whose bias the head would lose, is saved beside the model, as it was, for
    `hf_calib.pipeline`. A model that has a map in its head already is unfolded first.
    """
    check_output(options.output)
    rows = options.rows()
    requirement = "--weight-column to go with predictions"
    check(rows is None or options.weight_column is None, requirement, options.source, "leave it out")

    def make(kind: LabelKind, default: str = "auto") -> Any:
        # A pipeline gives tokens the score of their tag only, which is too little to check another map by.
        folds_only = options.target_data or (rows is not None and kind is not SINGLE_LABEL)
        known = kind.maps if kind.sigmoid else FOLDED if folds_only else METHODS
        method = options.method or ("temperature" if options.criterion else default)
        return make_scaler(method, options.criterion, options.n_bins, known)

    def check_labels(kind: LabelKind) -> None:
        single_only = {"--target-data": options.target_data, "--criterion": options.criterion}
        check_kind(kind, options, single_only)
        make(kind)

    sets = {
        "data": rows,
        "test_data": options.rows("test_data"),
        "target_data": options.rows("target_data"),
    }
    source = open_source(options.source, sets, options, running, check_labels=check_labels)
    if isinstance(source, ModelSource):
        from hf_calib.commands.calibrate_model import calibrate_model

        return calibrate_model(
            source,
            options.output,
            lambda default: fit_and_report(make(source.predictions().kind, default), source, options),
        )
    if source.is_held and options.weight_column is None:
        return _calibrate_held(source, options, make)
    return _calibrate_shards(source, options, make)


def show(done: Calibration) -> None:
    """The report before and after, the fitted parameters, and the rows that they were fitted on."""
    numbers = {name: value for name, value in done.numbers.items() if isinstance(value, float)}
    if "weight" in numbers:  # one number for all logits: people know it as a temperature
        numbers = {"T": 1 / numbers["weight"]}
    details = [getattr(done.scaler, name, None) for name in ("criterion", "choice_")]
    details += [f"{name} {value:.4g}" for name, value in numbers.items()]
    of = f" ({', '.join(filter(None, details))})" if any(details) else ""
    lines = [
        "",
        f"Method {done.method}, fitted on {done.n_fitted:,} rows{of}.",
        f"Reported on {done.held_out}.",
    ]
    lines += [f"Note: {note}" for note in done.notes if note not in done.report.warnings]
    if done.prior is not None:
        lines += _moved(done.prior, done.report.class_names)
    if done.served_difference is not None:
        gives = f"gives the calibrated probabilities (largest difference {done.served_difference:.1g})."
        no_bias = "its head keeps no bias, which the map has"
        why = no_bias if SCALERS[done.method].foldable else f"{done.method} does not fold"
        lines.append(
            f"Folded into the model's head: a plain pipeline with the saved model {gives}"
            if done.folded
            else f"Saved beside the model, as {why}: hf_calib.pipeline with the saved model {gives} A plain "
            "pipeline is not calibrated by it."
        )
    console.show(done.report, *lines)


def _moved(prior: PriorEstimate, names: Sequence[str]) -> list[str]:
    """The shares that differ most from those that the calibrated probabilities assume."""
    order = np.argsort(-np.abs(prior.prior - prior.train_prior), kind="stable")[:_MOST_MOVED]
    shares = [
        f"{names[k]} {prior.train_prior[k]:.4f} to {with_interval(prior.prior[k], *prior.interval[k])}"
        for k in order
    ]
    found = "corrected for" if prior.corrects else "not corrected for"
    return [
        f"Class frequencies of {prior.n_rows:,} target rows, {found} (p = {prior.p_value:.3f}).",
        f"Those that differ most from the source's: {'; '.join(shares)}.",
    ]


# ---- Scalers: chosen by name, fitted on some rows and measured on others ----


def make_scaler(method: str, criterion: str | None, n_bins: int, known: Sequence[str]) -> Any:
    """The unfitted scaler of a known method; a criterion is for a temperature only."""
    if method not in known:
        requirement = f"be one of {', '.join(known)}"
        way_out = did_you_mean(method, known)
        if method in METHODS:
            way_out = (
                f"{method} cannot be folded into a model's head: calibrate a file of predictions with it, "
                "without target data"
            )
        if "per_label_temperature" in known:
            requirement, way_out = f"{requirement} for several labels a row", "auto is the default"
        raise InputValueError(expected("method", requirement, repr(method), way_out))
    if method == "temperature":
        return SCALERS[method].load()(criterion or "nll", n_bins=n_bins)
    way_out = f"leave it out: {method} minimises a criterion of its own"
    requirement = "criterion to be given for a temperature only"
    check(criterion in (None, "nll"), requirement, repr(criterion), way_out)
    return SCALERS[method].load()()


def split_roles(
    found: Predictions, tested: Predictions | None, seed: int
) -> tuple[Predictions, Predictions, str]:
    """The rows to fit on, the rows to report on, and which the latter are, in words.

    Without test data these are halves, of whole sentences, whose tokens are not independent of each other.
    """
    if tested is not None:
        check_same_classes("the test data", found, tested)
        return found, tested, f"all {len(tested):,} rows of the test data"
    sentences = found.sentences
    units = np.arange(len(found)) if sentences is None else np.unique(sentences)
    what = "rows" if sentences is None else "sentences"
    check(len(units) > 1, f"the {what} to be at least 2, to be split in half", len(units), "pass more rows")
    is_single = found.labels.ndim == 1 and sentences is None
    half = units[half_of(found.labels if is_single else np.zeros(len(units), np.int64), seed)]
    chosen = np.isin(np.arange(len(found)) if sentences is None else sentences, half)
    n_rest = np.count_nonzero(~chosen)
    held_out = f"the other {n_rest:,} of {len(found):,} rows, drawn with seed {seed}"
    return found.select(chosen), found.select(~chosen), held_out


def half_of(labels: NDArray[np.int64], seed: int) -> NDArray[Any]:
    """Row numbers (N // 2,) of a random half; stratified by class where each class has enough rows.

    >>> labels = np.array([0, 0, 1, 1, 1, 1])
    >>> np.bincount(labels[half_of(labels, seed=0)])
    array([1, 2])
    """
    n_rows = len(labels) // 2
    counts = np.unique(labels, return_counts=True)[1]
    stratify = labels if counts.min() >= 2 and len(counts) <= n_rows else None
    numbers = np.arange(len(labels))
    return np.sort(train_test_split(numbers, train_size=n_rows, stratify=stratify, random_state=seed)[0])


def fit(scaler: Any, rows: Predictions) -> tuple[str, ...]:
    """Fit in place, with the rows' weights where they have some; return its warnings."""
    if rows.kind.sigmoid and "multi_label" in scaler.get_params():
        scaler.set_params(multi_label=True)
    weights = {} if rows.weights is None else {"sample_weight": rows.weights}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.fit(rows.as_logits(), rows.labels, **weights)
    return tuple(str(warning.message) for warning in caught)


def fit_and_report(scaler: Any, source: FileSource | ModelSource, options: Calibrate) -> Calibration:
    """Fit a scaler in place, correct it to the target's class frequencies, and report on rows that it has not seen."""
    tested = source.tested()
    fitted_on, reported, held_out = split_roles(source.predictions(), tested, options.seed)
    source.running.stages(f"fitting on {len(fitted_on):,} rows, measuring {len(reported):,}")
    warned = fit(scaler, fitted_on)
    prior, served, measured = None, scaler, scaler
    if "target_data" in source.sets:
        corrected_on = reported if tested is None else fitted_on
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prior = estimate_prior(
                scaler.predict_proba(source.logits("target_data")),
                source_probs=scaler.predict_proba(corrected_on.as_logits()),
                source_labels=corrected_on.labels,
                seed=options.seed,
            )
            correction = prior.correction(scaler)
        warned += tuple(str(each.message) for each in caught)
        if prior.corrects:
            served = correction
            if tested is None:
                held_out += (
                    ", before the correction of the class frequencies, as these rows have the source's"
                )
            else:
                measured = served
    names = {"class_names": options.class_names}
    report = report_on_predictions(reported, source.name, options.n_bins, measured, **names)
    n_shared, notes = source.n_shared(), list(report.notes)
    if n_shared:
        is_all = n_shared == len(reported)
        of, part = ("all", "") if is_all else (f"{n_shared:,} of the", "in part ")
        notes.append(
            f"The scaler was fitted on {of} {len(reported):,} rows of this report. The errors after calibration are "
            f"{part}in-sample, and lower than on new rows. Report on other test data, or leave them out: half of the "
            "rows is then held out."
        )
    report = replace(report, notes=(*notes, *source.notes))
    return Calibration(
        scaler=scaler,
        served=served,
        n_fitted=len(fitted_on),
        held_out=held_out,
        report=report,
        notes=(*report.notes, *warned),
        output=str(options.output),
        n_shared=n_shared,
        prior=prior,
    )


# ---- Files of predictions ----


def _calibrate_held(source: FileSource, options: Calibrate, make: Callable[..., Any]) -> Calibration:
    """Write the reported rows to predictions.npz, and those of the target data to target.npz."""
    names = ("predictions.npz", "target.npz")
    _check_apart(source, options.output, names)
    done = fit_and_report(make(source.predictions().kind), source, options)
    report = done.report
    assert report.after is not None
    about: Any = {"class_names": source.predictions().class_names}
    with whole_folder(options.output) as folder:
        save_predictions(Predictions(report.labels, probs=report.after.probs, **about), folder / names[0])
        if done.prior is not None:
            probs = done.served.predict_proba(source.logits("target_data"))
            np.savez(folder / names[1], probs=probs, class_names=np.array(report.class_names, dtype=np.str_))
        report.save(folder)
    return done


def _calibrate_shards(source: FileSource, options: Calibrate, make: Callable[..., Any]) -> Calibration:
    """Fit a map on a sample; write every file calibrated, whole or not at all.

    Without test data, the map is fitted on one half of the rows, by hashes, and the report is on the other.
    """
    output, n_bins, running, workers = options.output, options.n_bins, source.running, options.workers
    got = "weights, or more rows than are held at once"
    requirement = "--target-data to go with rows that are held"
    check("target_data" not in source.sets, requirement, got, "leave it out")
    table, applied = source.tables["data"], source.tables.get("test_data", source.tables["data"])
    is_split, weighted = applied is table, options.weight_column is not None
    scaler = make(SINGLE_LABEL, "temperature" if weighted else "auto")
    known = ", ".join(name for name in METHODS if _takes_weights(SCALERS[name].load()))
    got = f"{method_of(scaler)}, which has no weighted form"
    requirement = f"--weight-column to go with a method of {known}"
    check(not weighted or _takes_weights(scaler), requirement, got, "name one of these")
    got = f"{len(table.class_names)} classes and {len(applied.class_names)}, or other names"
    same = table.class_names == applied.class_names
    check(same, "the test data to have the same classes", got, "use predictions of one model")
    _check_apart(source, output, [_written(file) for file in applied.files])
    running.stages(f"drawing up to {one_pass.MOST_SAMPLED:,} rows to fit on")
    sample = one_pass.draw_sample(table, half=0 if is_split else None, workers=workers)
    running.stages(f"fitting on {len(sample):,} rows")
    warned = fit(scaler, sample)
    scaler.save_pretrained(output)
    running.stages(f"calibrating {len(applied.files):,} files")
    work = partial(_calibrate_file, applied, scaler, output, n_bins, half=1 if is_split else None)
    tally = one_pass.Tally()
    for each in one_pass.over_parts(work, applied.files, workers):
        tally.merge(each)
        running.progress(each.n_rows, applied.n_rows)
    report = report_of(tally, name_of(applied.name), applied.class_names, n_bins, len(applied.files))
    report.save(output)
    held_out = "the other half of the rows" if is_split else f"{tally.n_rows:,} rows of the test data"
    told: Any = {"held_out": held_out, "report": report, "notes": warned, "output": str(output)}
    return Calibration(scaler=scaler, served=scaler, n_fitted=len(sample), **told)


def _takes_weights(scaler: Any) -> bool:
    return "sample_weight" in signature(scaler.fit).parameters


def _calibrate_file(
    table: Table, scaler: Any, output: Path, n_bins: int, file: File, *, half: int | None
) -> one_pass.Tally:
    """Write a file with calibrated probabilities in place of its scores; sum both, of a half of the rows or all."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    names = table.class_names
    states = {name: CalibrationState(n_classes=len(names), n_bins=n_bins) for name in ("before", "after")}
    writer, n_rows = None, 0
    with whole_file(output / _written(file)) as path:
        for part in (part for part in table.parts if part.file is file):
            kept = [name for name in part.fragment.physical_schema.names if name not in table.columns.scores]
            for first, batch in table.batches(part, more=kept):
                rows: Any = batch.table
                found = scaler.predict_proba(batch.as_logits())
                used: Any = slice(None)
                if half is not None:
                    used = one_pass.half_of(part.hashes(first, len(rows))) == half
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
    return one_pass.Tally(states, n_rows=n_rows)


def _written(file: File) -> str:
    """Where a calibrated file is, below the output folder."""
    name = PurePosixPath("predictions", file.name.removesuffix(".gz"))
    return str(name.with_suffix(".parquet"))


def _check_apart(source: FileSource, output: Path, written: Iterable[str]) -> None:
    """Refuse to write over predictions that are read."""
    read = {Path(file.path).resolve() for table in source.tables.values() for file in table.files}
    way_out = "name another folder: the calibrated files have the same names"
    apart = not read & {(output / name).resolve() for name in written}
    check(apart, "output to be another folder than the predictions'", output, way_out)
