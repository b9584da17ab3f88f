"""`hf-calib calibrate`: a calibrator fitted on held-out rows, and a calibrated model or calibrated predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from hf_calib._errors import check, did_you_mean, expected
from hf_calib._files import check_output, remove_files, report_files, whole_folder
from hf_calib._text import counted, is_hub_name
from hf_calib.commands.source import (
    FileSource,
    ModelSource,
    Running,
    check_kind,
    open_source,
)
from hf_calib.decisions.saved import DECISIONS
from hf_calib.predictions.formats import write_calibrated
from hf_calib.predictions.predictions import (
    SINGLE_LABEL,
    TOKENS,
    TOP_LABELS,
    LabelKind,
    check_same_classes,
    holds_model,
)
from hf_calib.report import CalibrationReport, report_on_predictions
from hf_calib.scaling import (
    FOLDABLE_SCALERS,
    SCALERS,
    saved_map,
)
from hf_calib.scaling.saved_map import fitted_numbers, method_of

if TYPE_CHECKING:
    from hf_calib.commands.options import Calibrate

METHODS = SINGLE_LABEL.maps
_SERVED = 8  # rows that the saved model is checked with
_SERVED_TOLERANCE = (
    1e-4  # of a probability: float32, and batches that are padded otherwise
)
_WRITTEN = (
    "predictions.npz",
    "predictions.parquet",
)  # one of them, of arrays or tables
_IN_PYTHON = ("scaler", "n_shared", "rows")  # what JSON does not have
_CHOSEN = ("criterion", "choice_")  # attributes of some calibrators


@dataclass(kw_only=True)
class Calibration:
    """The outcome of `calibrate`."""

    scaler: Any = field(repr=False)  # The fitted calibrator.
    n_fitted: int  # rows
    held_out: str  # which rows the report is on, in words
    report: CalibrationReport  # before and after, on rows that the scaler has not seen
    notes: list[str]
    output: str
    n_shared: int = 0  # rows of the report that the scaler was fitted on
    # The rows of the report, a mask of the data or all of the test data.
    rows: Any = field(default=None, repr=False)
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
            name: value for name, value in vars(self).items() if name not in _IN_PYTHON
        }
        found |= {
            "method": self.method,
            "numbers": self.numbers,
            "report": self.report.to_dict(),
        }
        found |= {
            each.rstrip("_"): getattr(self.scaler, each, None) for each in _CHOSEN
        }
        return found


def run(options: Calibrate, running: Running) -> Calibration:
    """Fit a calibrator on held-out rows; fold it into the model's head for a plain pipeline, or calibrate predictions.

    A calibrator that does not fold, or whose bias the head would lose, is saved next to the unchanged model, for
    `hf_calib.pipeline`. A model that has a calibrator in its head already is unfolded first.
    """
    check_output(options.output)

    def check_labels(kind: LabelKind) -> None:
        check_kind(kind, options, {"--criterion": options.criterion})
        make_scaler(options, kind)

    source = open_source(options, running, check_labels, all_columns=True)
    earlier_rule = rule_files(options.output)
    if isinstance(source, ModelSource):
        done = calibrate_model(source, options)
    else:
        done = calibrate_files(source, options)
    if any(not path.exists() for path in earlier_rule):
        done.notes.insert(
            0,
            f"The rule of {DECISIONS} in {options.output}, and the report on it, are removed, as they are for "
            "other probabilities. Run hf-calib decide again.",
        )
    return done


def shown(done: Calibration) -> list[Any]:
    """The report before and after, the fitted parameters, and the rows that they were fitted on."""
    numbers = {
        name: value for name, value in done.numbers.items() if isinstance(value, float)
    }
    if (
        "weight" in numbers
    ):  # one number for all logits: people know it as a temperature
        numbers = {"T": 1 / numbers["weight"]}
    details = [getattr(done.scaler, name, None) for name in _CHOSEN]
    details += [f"{name} {value:.4g}" for name, value in numbers.items()]
    of = f" ({', '.join(filter(None, details))})" if any(details) else ""
    rows = counted(done.n_fitted, "row")
    lines = [
        f"Method {done.method}, fitted on {rows}{of}.",
        f"Reported on {done.held_out}.",
    ]
    lines += [
        f"Note: {note}" for note in done.notes if note not in done.report.warnings
    ]
    if done.served_difference is not None:
        gives = f"gives the calibrated probabilities (largest difference {done.served_difference:.1g})."
        no_bias = "its head keeps no bias, which the calibrator has"
        why = (
            no_bias if SCALERS[done.method].foldable else f"{done.method} does not fold"
        )
        beside = f"Saved next to the model, as {why}: hf_calib.pipeline with the saved model {gives}"
        folded = f"Folded into the model's head: a plain pipeline with the saved model {gives}"
        lines.append(
            folded
            if done.folded
            else f"{beside} A plain pipeline is not calibrated by it."
        )
    return [done.report, "", *lines]


# ---- Scalers: chosen by name, fitted on some rows and measured on others ----


def make_scaler(options: Calibrate, kind: LabelKind, default: str = "auto") -> Any:
    """The unfitted scaler of a method that goes with such labels, and with a model or predictions."""
    # A pipeline gives tokens the score of their tag only, which is too little to check another calibrator by.
    folds_only = options.data is not None and kind is not SINGLE_LABEL
    known = [name for name in kind.maps if name in FOLDABLE_SCALERS or not folds_only]
    criterion = options.criterion
    method = options.method or ("temperature" if criterion else default)
    requirement, way_out = (
        f"method to be one of {', '.join(known)}",
        "auto is the default",
    )
    if kind.sigmoid:
        requirement += " for several labels per row"
    elif method in METHODS:
        file = "calibrate a file of predictions with it"
        way_out = f"{method} cannot be folded into a model's head: {file}"
    else:
        requirement, way_out = (
            "method to name a calibrator",
            did_you_mean(method, known),
        )
    check(method in known, requirement, repr(method), way_out)
    requirement = "criterion to be nll for top labels"
    is_nll = criterion in (None, "nll")
    way_out = "leave it out, as the other criteria need the scores of all classes"
    check(is_nll or kind is not TOP_LABELS, requirement, repr(criterion), way_out)
    scaler = SCALERS[method].load()
    if method == "temperature":
        return scaler(criterion or "nll", n_bins=options.n_bins)
    requirement = "criterion to be given for a temperature only"
    way_out = f"leave it out: {method} minimises a criterion of its own"
    check(is_nll, requirement, repr(criterion), way_out)
    return scaler()


@dataclass(frozen=True)
class Roles:
    """The rows to fit on, and those to report on."""

    fitted_on: Any
    reported: Any
    rows: Any  # The places of the reported ones in the data, or in the test data.
    held_out: str  # Which these are, in words.
    notes: list[str]


def split_roles(found: Any, tested: Any, options: Calibrate) -> Roles:
    """Split rows in halves if there are no test data, and draw those to fit on if they are many.

    Halves are of whole sentences, whose tokens are not independent of each other.
    """
    if tested is not None:
        check_same_classes("the test data", found, tested)
        fitted_on = found
        reported = tested
        rows: Any = slice(None)
        held_out = f"all {counted(len(tested), 'row')} of the test data"
    else:
        chosen = _half(found, options.seed)
        fitted_on = found.select(chosen)
        rows = ~chosen
        reported = found.select(rows)
        held_out = f"the other {len(reported):,} of {len(found):,} rows, drawn with seed {options.seed}"
    n_all = len(fitted_on)
    if n_all <= options.fit_on:
        return Roles(fitted_on, reported, rows, held_out, [])
    drawn = _draw(_strata(fitted_on), options.fit_on, options.seed)
    note = f"The calibrator was fitted on {options.fit_on:,} of {n_all:,} rows, "
    note += f"drawn with seed {options.seed}. --fit-on changes the number."
    return Roles(fitted_on.select(np.sort(drawn)), reported, rows, held_out, [note])


def _half(found: Any, seed: int) -> NDArray[np.bool_]:
    """The rows (N,) of one half: of whole sentences, or of rows in which each class has its share."""
    if found.sentences is None:
        units = np.arange(len(found))
        strata = _strata(found)
        what = "rows"
    else:
        units = np.unique(found.sentences)
        strata = np.zeros(len(units), np.int64)
        what = "sentences"
    requirement = f"the {what} to be at least 2, to be split in half"
    check(len(units) > 1, requirement, len(units), "pass more rows")
    half = units[_draw(strata, len(units) // 2, seed)]
    if found.sentences is not None:
        return np.isin(found.sentences, half)
    chosen = np.zeros(len(found), bool)
    chosen[half] = True
    return chosen


def _strata(found: Any) -> NDArray[np.int64]:
    """The classes (N,) of rows; one for all rows with several labels."""
    is_single = found.labels.ndim == 1
    return found.labels if is_single else np.zeros(len(found), np.int64)


def _draw(strata: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """Draw n of the places of strata (N,), of each stratum its share if all have enough rows."""
    counts = np.unique(strata, return_counts=True)[1]
    fewest = min(n, len(strata) - n)
    by = strata if counts.min() >= 2 and len(counts) <= fewest else None
    places = np.arange(len(strata))
    drawn, _ = train_test_split(places, train_size=n, stratify=by, random_state=seed)
    return np.asarray(drawn)


def fit_and_report(
    scaler: Any, source: FileSource | ModelSource, options: Calibrate
) -> Calibration:
    """Fit a scaler in place, and report on rows that it has not seen."""
    roles = split_roles(source.predictions(), source.tested(), options)
    n_fitted = len(roles.fitted_on)
    n_reported = len(roles.reported)
    source.running.stages(
        f"fitting on {counted(n_fitted, 'row')}, measuring {n_reported:,}"
    )
    warned = roles.fitted_on.fit_calibrator(scaler)
    report = report_on_predictions(
        roles.reported,
        source.name,
        options.n_bins,
        scaler,
        class_names=options.class_names,
    )
    n_shared = source.n_shared()
    notes = [*report.notes, *roles.notes]
    if n_shared:
        is_all = n_shared == n_reported
        of = "all" if is_all else f"{n_shared:,} of the"
        part = "" if is_all else "in part "
        notes.append(
            f"The calibrator was fitted on {of} {n_reported:,} rows of this report. The errors after calibration "
            f"are {part}in-sample, and lower than on new rows. Report on other test data, or leave them out: half of "
            "the rows is then held out."
        )
    report = replace(report, notes=(*notes, *source.notes))
    return Calibration(
        scaler=scaler,
        report=report,
        notes=[*report.notes, *warned],
        held_out=roles.held_out,
        n_fitted=n_fitted,
        n_shared=n_shared,
        rows=roles.rows,
        output=str(options.output),
    )


# ---- Files of predictions ----


def calibrate_files(source: FileSource, options: Calibrate) -> Calibration:
    """Fit a scaler, and write it, the report, and the reported rows with calibrated probabilities."""
    weighted = options.weight_column is not None
    kind = source.predictions().kind
    scaler = make_scaler(options, kind, "temperature" if weighted else "auto")
    _check_files(source, options, scaler)
    done = fit_and_report(scaler, source, options)
    name = "test_data" if "test_data" in source.sets else "data"
    done.report = replace(done.report, n_files=source.n_files(name))
    source.running.stages(f"writing to {options.output}")
    applied = source.read[name]
    earlier = _earlier(options.output, applied.ending)
    with whole_folder(options.output) as folder:
        scaler.save_pretrained(folder)
        names = options.class_names
        write_calibrated(applied, done.rows, scaler, folder / "predictions", names)
        done.report.save(folder)
    remove_files(options.output, earlier)
    return done


def _check_files(source: FileSource, options: Calibrate, scaler: Any) -> None:
    """Raise where options do not go with the calibrator, or a file that is read or a model would be written over."""
    read = {
        Path(file.path).resolve()
        for each in source.read.values()
        for file in each.files
    }
    read |= {Path(each.data).resolve() for each in source.sets.values()}
    written = {(options.output / name).resolve() for name in ("", *_WRITTEN)}
    way_out = "name another folder, so that this one stays unchanged"
    requirement = "output to be another folder than the predictions'"
    check(not read & written, requirement, options.output, way_out)
    # The calibrator of a model has the same file name, and would be replaced.
    has_model = holds_model(str(options.output))
    requirement = "output to be another folder than a model's"
    check(not has_model, requirement, options.output, way_out)
    if options.weight_column is None:
        return
    taken = {
        name: signature(SCALERS[name].load().fit).parameters
        for name in SINGLE_LABEL.maps
    }
    known = [name for name, each in taken.items() if "sample_weight" in each]
    method = method_of(scaler)
    requirement = f"--weight-column to go with a method of {', '.join(known)}"
    got = f"{method}, which has no weighted form"
    check(method in known, requirement, got, "name one of these")


def _earlier(output: Path, ending: str) -> list[Path]:
    """The files of an earlier run that one with predictions of this ending does not replace."""
    found = rule_files(output)
    # Without a report, predictions are others' files.
    if (output / "report.json").is_file():
        found += [output / name for name in _WRITTEN if not name.endswith(ending)]
    return [path for path in found if path.is_file()]


def rule_files(output: Path) -> list[Path]:
    """The rule of an earlier `hf-calib decide` in a folder, and the report on it."""
    rule = [output / DECISIONS] if (output / DECISIONS).is_file() else []
    return [*rule, *report_files(output / "decisions")]


# ---- Models ----


def calibrate_model(source: ModelSource, options: Calibrate) -> Calibration:
    """Fit a scaler, and save the model with it and the report, if a pipeline then gives the calibrated probabilities.

    Raises:
        ValueError: if a calibrator in the head cannot be undone, or the model or the scaler cannot be folded.
        RuntimeError: if the difference is more than rounding; the folder is then unchanged.
    """
    from hf_calib.export.fold import OF_THE_MAP, check_can_be_folded
    from hf_calib.export.folder import (
        check_overwrites_no_original,
        replace_model,
        standalone_copy,
    )
    from hf_calib.export.heads import head_loses_bias
    from hf_calib.export.unfold import unfold

    check_overwrites_no_original(options.output, [source.model])
    model, undone = source.classifier.model, []
    record = saved_map.recorded_in(model.config)
    if record.get("folded"):
        unfold(model)
        title = saved_map.map_title(str(record.get("method", "temperature")))
        how = "was undone first, bit for bit. The new calibrator replaces it."
        undone.append(f"{source.model} had {title} in its head, which {how}")
    training = {
        key: each
        for key, each in check_can_be_folded(model).items()
        if key not in OF_THE_MAP
    }
    loses_bias = head_loses_bias(model, len(source.classifier.class_names))
    scaler = make_scaler(
        options, source.predictions().kind, "temperature" if loses_bias else "auto"
    )
    done = fit_and_report(scaler, source, options)
    source.running.stages(f"saving to {options.output}")

    fitting = {"split": "calibration", "n_examples": done.n_fitted}
    if hasattr(done.scaler, "criterion"):
        fitting["criterion"] = done.scaler.criterion
    data, test = source.sets["data"], source.sets.get("test_data")
    calibration: dict[str, Any] = {**data.source(), "n": done.n_fitted}
    reported: dict[str, Any] = {**(test or data).source(), "n": done.report.n_examples}
    if test is None:
        calibration["part"], reported["part"] = "one half", "the other half"
    about = {
        key: training[key] for key in ("loss", "loss_kwargs") if key in training
    } | fitting
    about["data"] = {"calibration": calibration, "test": reported}
    if is_hub_name(source.model):
        about["base_model"] = source.model
    plain = standalone_copy(model)
    plain.config.calibration = {**training, **fitting}
    # Of tokens a pipeline gives the score of the tag only, by which no calibrator next to the model can be checked.
    is_lost = (
        loses_bias
        and source.predictions().kind is not TOKENS
        and saved_map.has_bias(scaler)
    )
    done.folded = done.method in FOLDABLE_SCALERS and not is_lost
    with whole_folder(options.output, replace_model) as folder:
        weights, difference = _write(
            folder, source, plain, scaler, about, folds=done.folded
        )
        if not difference <= _SERVED_TOLERANCE:
            requirement = (
                f"give the calibrated probabilities within {_SERVED_TOLERANCE}"
            )
            got, way_out = (
                f"a difference of {difference:.2g}",
                "nothing was saved; please report this model",
            )
            raise RuntimeError(
                expected("a pipeline with the saved model", requirement, got, way_out)
            )
        # A half of the rows has no name to read it again by.
        again = {} if test is None else {"options": test.options(source.reading)}
        on = {**reported, "seen": done.n_shared, **again, "fingerprint": weights}
        replace(done.report, about=on).save(folder / "calibration")
    done.served_difference, done.notes = difference, [*undone, *done.notes]
    return done


def _write(
    folder: Path,
    source: ModelSource,
    model: Any,
    scaler: Any,
    about: dict[str, Any],
    *,
    folds: bool,
) -> tuple[str, float]:
    """The fingerprint of the saved weights, and the largest difference of a served probability of the first rows."""
    import transformers

    from hf_calib.export.folder import write_folded
    from hf_calib.models.pipeline import pipeline
    from hf_calib.models.weights import fingerprint

    classifier, rows, processing = (
        source.classifier,
        source.rows["data"],
        source.classifier.processing_class,
    )
    rows = rows.select(range(min(_SERVED, len(rows))))
    first = classifier.served(rows, source.reading, name=source.sets["data"].data)

    def scores(pipeline: Callable[..., Any], **settings: Any) -> NDArray[np.float64]:
        """(N, C), NaN where a pipeline gives none."""
        settings |= {
            "trust_remote_code": source.running.trust_remote_code,
            "device": "cpu",
            **first.options,
        }
        classify = pipeline(classifier.task.pipeline, model=str(folder), **settings)
        inputs = first.plain if pipeline is transformers.pipeline else first.inputs
        found = classifier.scores_of_served(classify(inputs, **first.call))
        return np.array(
            [
                [each.get(name, np.nan) for name in classifier.class_names]
                for each in found
            ]
        )

    if folds:
        inputs: Any = {"batch": first.batch, "processing_class": processing}
        weights = write_folded(model, scaler, folder, **inputs, about=about)
        logits = classifier.served_logits(
            first.inputs, source.predictions().as_logits()
        )
    else:
        model.config.calibration |= {
            "method": saved_map.method_of(scaler),
            "folded": False,
        }
        model.save_pretrained(folder)
        processing.save_pretrained(folder)
        weights, told = fingerprint(model), saved_map.pooler_config(scaler)
        vllm = {} if told is None else {saved_map.POOLER_CONFIG: told}
        saved_map.save_map(
            scaler, folder, {**about, **vllm, "folded": False, "fingerprint": weights}
        )
        # On the very logits that are served: a step turns their last bit into another probability.
        logits = scores(transformers.pipeline, function_to_apply="none")
    given = scores(transformers.pipeline if folds else pipeline)
    return weights, float(np.nanmax(np.abs(given - scaler.predict_proba(logits))))
