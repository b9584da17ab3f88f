"""`hf-calib calibrate`: a calibrator fitted on held-out rows,
and a calibrated model or calibrated predictions.
"""

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
from hf_calib._files import check_output, remove_files, whole_folder
from hf_calib._text import counted, is_hub_name
from hf_calib.commands.output import (
    check_holds_no_others,
    check_holds_no_results,
    earlier_results,
    on_removed,
    refresh_card,
    results,
)
from hf_calib.commands.source import (
    FileSource,
    ModelSource,
    Running,
    check_kind,
    open_source,
)
from hf_calib.predictions.formats import write_calibrated
from hf_calib.predictions.predictions import (
    SINGLE_LABEL,
    TOKENS,
    TOP_LABELS,
    LabelKind,
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
# The first rows, with which the saved model is checked.
_SERVED = 8
# Of a probability: float32, and batches that are padded otherwise.
_SERVED_TOLERANCE = 1e-4


@dataclass(kw_only=True)
class Calibration:
    """The outcome of `calibrate`."""

    # The fitted calibrator.
    scaler: Any = field(repr=False)
    # How many rows it was fitted on.
    n_fitted: int
    # Which rows the report is on, in words.
    held_out: str
    # Before and after, on rows that the scaler has not seen.
    report: CalibrationReport
    notes: list[str]
    output: str
    # How many rows of the report the scaler was fitted on.
    n_shared: int = 0
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

    @property
    def chosen(self) -> dict[str, str | None]:
        """What a temperature minimises, and which calibrator `auto` chose."""
        return {
            "criterion": getattr(self.scaler, "criterion", None),
            "choice": getattr(self.scaler, "choice_", None),
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        kept = (
            "n_fitted",
            "held_out",
            "notes",
            "output",
            "served_difference",
            "folded",
        )
        found = {name: getattr(self, name) for name in (*kept, "method", "numbers")}
        return {**found, **self.chosen, "report": self.report.to_dict()}

    @property
    def lines(self) -> list[Any]:
        """The report before and after, the fitted parameters,
        and the rows that they were fitted on.
        """
        details = [each for each in self.chosen.values() if each is not None]
        for name, value in self.numbers.items():
            if isinstance(value, float):
                # One number for all logits: people know it as a temperature.
                is_weight = name == "weight"
                shown = f"T {1 / value:.4g}" if is_weight else f"{name} {value:.4g}"
                details.append(shown)
        of = f" ({', '.join(details)})" if details else ""
        rows = counted(self.n_fitted, "row")
        lines = [
            f"Method {self.method}, fitted on {rows}{of}.",
            f"Reported on {self.held_out}.",
        ]
        in_report = self.report.warnings
        lines += [f"Note: {note}" for note in self.notes if note not in in_report]
        if self.served_difference is not None:
            lines.append(self._served())
        return [self.report, "", *lines]

    def _served(self) -> str:
        """How the saved model is served."""
        gives = f"gives the calibrated probabilities (largest difference {self.served_difference:.1g})"
        cut_at = self.report.about.get("cut_at")
        gives += "." if cut_at is None else f" of texts of up to {cut_at} tokens."
        if self.folded:
            return f"Folded into the model's head: a plain pipeline with the saved model {gives}"
        why = f"{self.method} does not fold"
        if SCALERS[self.method].foldable:
            why = "its head keeps no bias, which the calibrator has"
        return (
            f"Saved next to the model, as {why}: hf_calib.pipeline with the saved model {gives} "
            "A plain pipeline is not calibrated by it."
        )


def run(options: Calibrate, running: Running) -> Calibration:
    """Fit a calibrator on held-out rows; fold it into the model's head for a plain pipeline,
    or calibrate predictions.

    A calibrator that does not fold, or whose bias the head would lose, is saved next to the
    unchanged model, for `hf_calib.pipeline`. A model that has a calibrator in its head already is
    unfolded first.
    """
    check_output(options.output)

    def check_labels(kind: LabelKind) -> None:
        check_kind(kind, options)
        # A method that does not go with the labels is refused before any row is
        # predicted.
        make_scaler(options, kind)

    source = open_source(options, running, check_labels, all_columns=True)
    # Rows are drawn to be halved, or where they are too many. A row may have several tokens.
    are_few = source.size()[1] <= options.fit_on and source.kind is not TOKENS
    if options.test_data is not None and are_few:
        options.check_unused("rows that are drawn")
    earlier = earlier_results(options.output)
    if isinstance(source, ModelSource):
        done = calibrate_model(source, options)
    else:
        done = calibrate_files(source, options)
    done.notes[:0] = on_removed(options.output, earlier)
    return done


# ---- Scalers: chosen by name, fitted on some rows and measured on others ----


def make_scaler(options: Calibrate, kind: LabelKind, default: str = "auto") -> Any:
    """The unfitted scaler of a method that goes with such labels, and with a model or predictions."""
    # A pipeline gives tokens the score of their tag only,
    # which is too little to check another calibrator by.
    folds_only = options.data is not None and kind is not SINGLE_LABEL
    known = [name for name in kind.maps if name in FOLDABLE_SCALERS or not folds_only]
    criterion = options.criterion
    # Only a temperature has a criterion, and `auto` has no weighted form.
    if criterion or options.weight_column:
        default = "temperature"
    method = options.method or default
    requirement = f"method to be one of {', '.join(known)} for {kind.name} rows"
    way_out = did_you_mean(method, known)
    # The name of a method that exists is not misspelt.
    if method in SCALERS:
        way_out = "auto is the default; files of predictions go with more"
    check(method in known, requirement, repr(method), way_out)
    scaler = SCALERS[method].load()
    if method != "temperature":
        options.check_unused("a temperature")
        return scaler()
    requirement = "criterion to be nll for top labels"
    is_nll = criterion in (None, "nll")
    way_out = "leave it out, as the other criteria need the scores of all classes"
    check(is_nll or kind is not TOP_LABELS, requirement, repr(criterion), way_out)
    return scaler(criterion or "nll", n_bins=options.n_bins)


@dataclass(frozen=True)
class Roles:
    """The rows to fit on, and those to report on."""

    fitted_on: Any
    reported: Any
    # The places of the reported ones in the data, or in the test data.
    rows: Any
    # Which these are, in words.
    held_out: str
    notes: list[str]


def split_roles(found: Any, tested: Any, options: Calibrate) -> Roles:
    """Split rows in halves if there are no test data, and draw those to fit on if they are many.

    Halves are of whole sentences, whose tokens are not independent of each other.
    """
    if tested is not None:
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
    notes = []
    if n_all > options.fit_on:
        drawn = _draw(_strata(fitted_on), options.fit_on, options.seed)
        fitted_on = fitted_on.select(np.sort(drawn))
        note = f"The calibrator was fitted on {options.fit_on:,} of {n_all:,} rows, "
        note += f"drawn with seed {options.seed}. --fit-on changes the number."
        notes.append(note)
    return Roles(fitted_on, reported, rows, held_out, notes)


def _half(found: Any, seed: int) -> NDArray[np.bool_]:
    """The rows (N,) of one half: of whole sentences, or of rows in which each class has its share."""
    what = "rows"
    units = np.arange(len(found))
    strata = _strata(found)
    if found.sentences is not None:
        what = "sentences"
        units = np.unique(found.sentences)
        strata = np.zeros(len(units), np.int64)
    requirement = f"the {what} to be at least 2, to be split in half"
    check(len(units) > 1, requirement, len(units), "pass more rows")
    drawn = units[_draw(strata, len(units) // 2, seed)]
    if found.sentences is not None:
        return np.isin(found.sentences, drawn)
    chosen = np.zeros(len(found), bool)
    chosen[drawn] = True
    return chosen


def _strata(found: Any) -> NDArray[np.int64]:
    """The classes (N,) of rows; one for all rows with several labels."""
    is_single = found.labels.ndim == 1
    return found.labels if is_single else np.zeros(len(found), np.int64)


def _draw(strata: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """Draw n of the places of strata (N,), of each stratum its share if all have enough rows."""
    counts = np.unique(strata, return_counts=True)[1]
    fewest = min(n, len(strata) - n)
    # scikit-learn refuses strata of one row, and more strata than rows on one side.
    by = strata if counts.min() >= 2 and len(counts) <= fewest else None
    places = np.arange(len(strata))
    drawn, _ = train_test_split(places, train_size=n, stratify=by, random_state=seed)
    return np.asarray(drawn)


def fit_and_report(
    scaler: Any, source: FileSource | ModelSource, options: Calibrate
) -> Calibration:
    """Fit a scaler in place, and report on rows that it has not seen."""
    roles = split_roles(source.predictions(), source.tested(), options)
    reported = roles.reported
    n_fitted = len(roles.fitted_on)
    rows = counted(n_fitted, "row")
    # The numbers that stand for 0 differ before and after a map,
    # and would be the change of the NLL.
    reported.check_labels_are_possible("report on")
    source.running.stages(f"fitting on {rows}, measuring {len(reported):,}")
    warned = roles.fitted_on.fit_calibrator(scaler)
    names = options.class_names
    report = report_on_predictions(
        reported, source.name, options.n_bins, scaler, class_names=names
    )
    notes = [*report.notes, *roles.notes]
    n_shared = source.n_shared()
    if n_shared:
        shared = f"{n_shared:,} of the {len(reported):,} rows of this report"
        fitted_on = f"The calibrator was fitted on {shared}."
        # Which of the shared rows were drawn is not known.
        if roles.notes:
            fitted_on = f"The rows of the fit were drawn from data with {shared}."
        notes.append(
            f"{fitted_on} For these, the "
            "errors after calibration are in-sample, and lower than on new rows. Report on other test data, or leave "
            "them out: half of the rows is then held out."
        )
    notes += source.notes
    return Calibration(
        scaler=scaler,
        report=replace(report, notes=tuple(notes)),
        notes=[*notes, *warned],
        held_out=roles.held_out,
        n_fitted=n_fitted,
        n_shared=n_shared,
        rows=roles.rows,
        output=str(options.output),
    )


# ---- Files of predictions ----


def calibrate_files(source: FileSource, options: Calibrate) -> Calibration:
    """Fit a scaler, and write it, the report, and the reported rows with calibrated probabilities."""
    scaler = make_scaler(options, source.kind)
    _check_files(source, options, scaler)
    done = fit_and_report(scaler, source, options)
    name = "test_data" if "test_data" in source.sets else "data"
    done.report = replace(done.report, n_files=source.n_files(name))
    source.running.stages(f"writing to {options.output}")
    applied = source.read[name]
    output = options.output
    with whole_folder(output) as folder:
        scaler.save_pretrained(folder)
        names = options.class_names
        write_calibrated(applied, done.rows, scaler, folder / "predictions", names)
        done.report.save(folder)
        # An earlier run may have written predictions in the other format, and a rule
        # for them.
        outdated = [
            path
            for path in results(output)
            if not (folder / path.relative_to(output)).exists()
        ]
    remove_files(output, outdated)
    return done


def _check_files(source: FileSource, options: Calibrate, scaler: Any) -> None:
    """Raise where options do not go with the calibrator,
    or a file that is read or a model would be written over.
    """
    output = options.output
    # Whoever reads that folder later would read the calibrated rows as further ones.
    place = output.resolve()
    read = [file.path for each in source.read.values() for file in each.files]
    is_apart = all(place not in Path(path).resolve().parents for path in read)
    way_out = "name another folder, so that this one stays unchanged"
    requirement = "output to be another folder than the predictions'"
    check(is_apart, requirement, output, way_out)
    # The calibrator of a model has the same file name, and would be replaced.
    requirement = "output to be another folder than a model's"
    check(not holds_model(str(output)), requirement, output, way_out)
    check_holds_no_others(output)
    is_weighted = "sample_weight" in signature(scaler.fit).parameters
    requirement = "--weight-column to go with a method that has a weighted form"
    fits = is_weighted or options.weight_column is None
    check(fits, requirement, method_of(scaler), "use temperature")


# ---- Models ----


def calibrate_model(source: ModelSource, options: Calibrate) -> Calibration:
    """Fit a scaler, and save the model with it and the report,
    if a pipeline then gives the calibrated probabilities.

    Raises:
        ValueError: if a calibrator in the head cannot be undone, or the model or the scaler cannot
            be folded.
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
    check_holds_no_results(options.output)
    model = source.classifier.model
    undone = []
    record = saved_map.recorded_in(model.config)
    if record.get("folded"):
        unfold(model)
        title = saved_map.map_title(str(record.get("method", "temperature")))
        how = "was undone first, bit for bit. The new calibrator replaces it."
        undone.append(f"{source.model} had {title} in its head, which {how}")
    # It is cheap, and comes before rows are predicted.
    recorded = check_can_be_folded(model)
    training = {key: recorded[key] for key in recorded if key not in OF_THE_MAP}
    loses_bias = head_loses_bias(model, len(source.classifier.class_names))
    kind = source.kind
    # A temperature has no bias to lose, so a plain pipeline serves it.
    scaler = make_scaler(options, kind, "temperature" if loses_bias else "auto")
    done = fit_and_report(scaler, source, options)
    source.running.stages(f"saving to {options.output}")

    fitting = {"split": "calibration", "n_examples": done.n_fitted}
    if hasattr(scaler, "criterion"):
        fitting["criterion"] = scaler.criterion
    data = source.sets["data"]
    test = source.sets.get("test_data", data)
    calibration: dict[str, Any] = {**data.source(), "n": done.n_fitted}
    reported: dict[str, Any] = {**test.source(), "n": done.report.n_examples}
    # Rows to report on that another command can read again.
    again: dict[str, Any] = {"options": test.options(source.reading)}
    if test is data:
        calibration["part"] = "one half"
        reported["part"] = "the other half"
        # A half of the rows has no name to read it again by.
        again = {}
    if source.cut_at is not None:
        reported["cut_at"] = source.cut_at
    of_loss = ("loss", "loss_kwargs")
    about = {key: each for key, each in training.items() if key in of_loss}
    about |= fitting
    about["data"] = {"calibration": calibration, "test": reported}
    if is_hub_name(source.model):
        # A folder of this machine would be no name for the reader of a card.
        about["base_model"] = source.model
    # The source's own model is not folded, because its logits are compared with what is
    # served.
    plain = standalone_copy(model)
    plain.config.calibration = {**training, **fitting}
    # Of tokens a pipeline gives the score of the tag only,
    # by which no calibrator next to the model can be checked.
    is_lost = loses_bias and kind is not TOKENS and saved_map.has_bias(scaler)
    done.folded = done.method in FOLDABLE_SCALERS and not is_lost
    with whole_folder(options.output, replace_model) as folder:
        weights, difference = _write(
            folder, source, plain, scaler, about, folds=done.folded
        )
        # The comparison is negated, because NaN is no agreement.
        if not difference <= _SERVED_TOLERANCE:
            what = "a pipeline with the saved model"
            requirement = (
                f"give the calibrated probabilities within {_SERVED_TOLERANCE}"
            )
            got = f"a difference of {difference:.2g}"
            way_out = "nothing was saved; please report this model"
            raise RuntimeError(expected(what, requirement, got, way_out))
        on = {**reported, "seen": done.n_shared, **again, "fingerprint": weights}
        done.report = replace(done.report, about=on)
        done.report.save(folder / "calibration")
    done.served_difference = difference
    done.notes = [*undone, *done.notes, *refresh_card(options.output)]
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
    """The fingerprint of the saved weights, and the largest difference of a served probability of
    the first rows.
    """
    import transformers

    from hf_calib.export.folder import write_folded
    from hf_calib.models.pipeline import pipeline
    from hf_calib.models.weights import fingerprint

    classifier = source.classifier
    processing = classifier.processing_class
    rows = source.rows["data"]
    rows = rows.select(range(min(_SERVED, len(rows))))
    first = classifier.served(rows, source.reading, name=source.sets["data"].data)

    def scores(pipeline: Callable[..., Any], **settings: Any) -> NDArray[np.float64]:
        """(N, C), NaN where a pipeline gives none."""
        classify = pipeline(
            classifier.task.pipeline,
            model=str(folder),
            trust_remote_code=source.running.trust_remote_code,
            device="cpu",
            **first.options,
            **settings,
        )
        inputs = first.plain if pipeline is transformers.pipeline else first.inputs
        found = classifier.scores_of_served(classify(inputs, **first.call))
        names = classifier.class_names
        return np.array([[each.get(name, np.nan) for name in names] for each in found])

    if folds:
        weights = write_folded(
            model,
            scaler,
            folder,
            batch=first.batch,
            processing_class=processing,
            about=about,
        )
        own = source.predictions().as_logits()
        logits = classifier.served_logits(first.inputs, own)
    else:
        how = {"method": saved_map.method_of(scaler), "folded": False}
        model.config.calibration |= how
        model.save_pretrained(folder)
        processing.save_pretrained(folder)
        weights = fingerprint(model)
        record = {**about, "folded": False, "fingerprint": weights}
        told = saved_map.pooler_config(scaler)
        if told is not None:
            record[saved_map.POOLER_CONFIG] = told
        saved_map.save_map(scaler, folder, record)
        # On the very logits that are served: a step turns their last bit into another probability.
        logits = scores(transformers.pipeline, function_to_apply="none")
    given = scores(transformers.pipeline if folds else pipeline)
    return weights, float(np.nanmax(np.abs(given - scaler.predict_proba(logits))))
