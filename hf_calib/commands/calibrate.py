"""`hf-calib calibrate`: a scaler fitted on held-out rows, and a calibrated model or calibrated predictions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax
from sklearn.model_selection import train_test_split

from hf_calib._errors import InputValueError, did_you_mean, expected
from hf_calib._files import check_output, whole_folder
from hf_calib.commands.evaluate import LabelledTexts, Progress, Stages, in_silence, report_on
from hf_calib.predictions.files import Predictions, load_predictions, load_unlabelled, save_predictions
from hf_calib.report import CalibrationReport
from hf_calib.report.writing import write_report
from hf_calib.scaling import PriorEstimate, ScalerEntry, estimate_prior
from hf_calib.scaling.methods import SINGLE_LABEL_SCALERS as METHODS
from hf_calib.scaling.methods import fitted_numbers
from hf_calib.scaling.saved_map import map_title

if TYPE_CHECKING:
    from datasets import Dataset

# Those that a model's head can hold.
FOLDED = {method: entry for method, entry in METHODS.items() if entry.foldable}

_CALIBRATED = "predictions.npz"
_CORRECTED = "target.npz"
_BEFORE_CORRECTION = "before the correction of the class frequencies, as these rows have the source's"
_SERVED_TEXTS = 8
_SERVED_TOLERANCE = 1e-4  # of a probability: float32, and batches that are padded otherwise
_BEYOND_CHANCE = 2  # times as many rows in both files as coincide within them, for these to be the same
_SHARE_OF_DISTINCT_ROWS = 0.9  # below, rows of different examples coincide: scores were rounded


@dataclass(frozen=True)
class Calibration:
    """The outcome of `calibrate_model` or `calibrate_predictions`.

    Args:
        method: a key of `METHODS`.
        criterion: what a temperature minimised; None for another method.
        choice: what "auto" has chosen; None for another method.
        numbers: the fitted parameters, where these are at most a number per class.
        n_fitted: rows the scaler was fitted on.
        held_out: which rows the report is on, in words.
        report: before and after calibration, on rows that the scaler has not seen. "After" has the prior
            correction where these are test rows; other rows have the source's class frequencies.
        notes: warnings: of rows that it has seen, and of the fit.
        served_difference: largest difference between the probabilities of a pipeline with the saved model and
            the scaler's; None without a model.
        prior: the class frequencies of the unlabelled target data; None without any.
    """

    method: str
    criterion: str | None
    choice: str | None
    numbers: Mapping[str, Any]
    n_fitted: int
    held_out: str
    report: CalibrationReport
    notes: tuple[str, ...]
    served_difference: float | None = None
    prior: PriorEstimate | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types."""
        prior = None if self.prior is None else self.prior.to_dict()
        return {**vars(self), "notes": list(self.notes), "report": self.report.to_dict(), "prior": prior}


def calibrate_model(
    source: str,
    rows: LabelledTexts,
    output: Path,
    *,
    test: LabelledTexts | None = None,
    target: LabelledTexts | None = None,
    method: str | None = None,
    criterion: str = "nll",
    n_bins: int = 15,
    seed: int = 0,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    stages: Stages = in_silence,
) -> Calibration:
    """Fit a scaler on a model's logits, fold it into the head, and save the model for a plain pipeline.

    A method that does not fold is saved beside the model, as it was, for `hf_calib.pipeline`.

    A model that has a map in its head already is unfolded first: the new map replaces that one.

    Args:
        source: a sequence classifier on the Hub or in a folder.
        rows: labelled texts that it was not trained on.
        output: the calibrated model's folder; the report is in its folder `calibration`.
        test: texts to report on; without them, the scaler is fitted on half of the rows, and the report is on
            the other half.
        target: texts where the model is to be used, whose labels are not read. The class frequencies there are
            estimated, and where they differ from those of the rows, the model is corrected for them.
        method: a key of `METHODS`, with a target of `FOLDED`; None is "auto", or a temperature where the head
            keeps no bias.
        criterion: for a temperature "nll", "ece" or "adaptive_ece".
        n_bins: M, at least 1.
        seed: of the draw of that half.
        trust_remote_code: whether code that comes with the model may run.
        progress: called with the number of rows just predicted and of all rows.
        stages: called with the name of each stage as it begins.

    Raises:
        ValueError: if model, data, method or criterion are wrong, or the scaler cannot be folded.
        TypeError: if columns are of the wrong kind.
        RuntimeError: if a pipeline with the saved model gives other probabilities; the output folder is not
            created then.
    """
    import transformers

    from hf_calib.export.card_facts import is_hub_name
    from hf_calib.export.fingerprint import fingerprint
    from hf_calib.export.fold import OF_THE_MAP, check_can_be_folded
    from hf_calib.export.heads import head_loses_bias
    from hf_calib.export.saving import (
        check_overwrites_no_original,
        replace_model,
        standalone_copy,
        write_folded,
    )
    from hf_calib.export.unfold import unfold
    from hf_calib.predictions.pipelines import pipeline
    from hf_calib.predictions.texts import encode_texts, load_classifier, predict_logits
    from hf_calib.scaling.saved_map import save_map

    scaler = make_scaler(method or "auto", criterion, n_bins, METHODS if target is None else FOLDED)
    folds = method is None or method in FOLDED
    check_output(output)
    check_overwrites_no_original(output, [source])

    stages(f"reading {rows.data}")
    data = rows.load()
    test_data: Any = None if test is None else test.load()
    target_data: Any = None if target is None else target.load()
    stages(f"loading {source}")
    classifier = load_classifier(source, trust_remote_code=trust_remote_code)
    refolded: tuple[str, ...] = ()
    record = getattr(classifier.model.config, "calibration", None) or {}
    if record.get("folded"):
        how = unfold(classifier.model).sentence()
        title = map_title(str(record.get("method", "temperature")))
        refolded = (
            f"{source} had {title} in its head, which was undone first. {how} The new map replaces it.",
        )
    recorded = check_can_be_folded(classifier.model)
    about_training = {key: value for key, value in recorded.items() if key not in OF_THE_MAP}
    if method is None and head_loses_bias(classifier.model, len(classifier.class_names)):
        scaler = make_scaler("temperature", criterion, n_bins, FOLDED)
    stages(f"tokenizing {len(data):,} texts")
    encoded = rows.encode(classifier, data)
    test_encoded = None if test is None else test.encode(classifier, test_data)
    target_tokens = []
    if target is not None:
        target_tokens = encode_texts(
            classifier, target_data, text_column=target.text_column, max_length=target.max_length
        )
    stages(f"predicting {len(data) + (0 if test is None else len(test_data)) + len(target_tokens):,} rows")
    running: dict[str, Any] = {"batch_size": rows.batch_size, "on_progress": progress}
    found = encoded.predict(**running)
    tested = None if test_encoded is None else test_encoded.predict(**running)
    target_logits = None if target is None else predict_logits(classifier, target_tokens, **running)

    fitted_on, reported, held_out = split_roles(found, tested, seed)
    n_seen = 0 if test is None else texts_in_both(data, test_data, rows, test)
    seen = _note_in_sample(n_seen, len(reported))
    stages(f"fitting on {len(fitted_on):,} rows, measuring {len(reported):,}")
    warned = fit(scaler, fitted_on)
    served, prior = scaler, None
    if target_logits is not None:
        source_rows = reported if tested is None else fitted_on
        served, prior, not_corrected = corrected(scaler, source_rows, target_logits, seed)
        warned += not_corrected
    with_correction = tested is not None or served is scaler
    report = replace(report_on(reported, source, n_bins, served if with_correction else scaler), notes=seen)

    stages(f"saving to {output}")
    minimised = getattr(scaler, "criterion", None)
    fitting = {"split": "calibration", "n_examples": len(fitted_on)}
    fitting |= {} if minimised is None else {"criterion": minimised}
    measured_on = {**(test or rows).source(), "n": len(reported)}
    about: dict[str, Any] = {
        **{key: recorded[key] for key in ("loss", "loss_kwargs") if key in recorded},
        **fitting,
        "data": {"calibration": {**rows.source(), "n": len(fitted_on)}, "test": measured_on},
        **({"base_model": source} if is_hub_name(source) else {}),
    }
    texts = list(data[:_SERVED_TEXTS][rows.text_column])
    calibrated = served.predict_proba(found.as_logits()[: len(texts)])
    with whole_folder(output, replace_model) as folder:
        plain = standalone_copy(classifier.model)
        cut = rows.max_length or classifier.longest
        serving = (folder, texts, classifier.class_names, cut, trust_remote_code)
        plain.config.calibration = {**about_training, **fitting}
        first = classifier.encode(texts[: None if classifier.can_pad else 1], rows.max_length)
        batch = classifier.batch(first)
        if folds:
            write_folded(
                plain, served, folder, batch=batch, processing_class=classifier.tokenizer, about=about
            )
        else:
            plain.config.calibration |= {"method": method, "folded": False}
            plain.save_pretrained(folder)
            classifier.tokenizer.save_pretrained(folder)
            save_map(served, folder, {**about, "folded": False, "fingerprint": fingerprint(plain)})
            # On the very logits that are served: a step turns their last bit into another probability.
            logits = _served(transformers.pipeline, *serving, function_to_apply="none")
            calibrated = served.predict_proba(logits)
        difference = _checked_difference(
            _served(transformers.pipeline if folds else pipeline, *serving), calibrated
        )
        # A half of the rows has no name, and probabilities without the prior correction are not those of the model.
        again = {} if test is None or not with_correction else {"options": test.options()}
        about_rows = {**measured_on, "seen": n_seen, **again, "fingerprint": fingerprint(plain)}
        write_report(replace(report, about=about_rows), folder / "calibration")
    return Calibration(
        method or ("auto" if hasattr(scaler, "choice_") else "temperature"),
        minimised,
        getattr(scaler, "choice_", None),
        fitted_numbers(scaler),
        len(fitted_on),
        held_out if with_correction else f"{held_out}, {_BEFORE_CORRECTION}",
        report,
        (*refolded, *seen, *warned),
        difference,
        prior,
    )


def calibrate_predictions(
    source: str,
    output: Path,
    *,
    test: str | None = None,
    target: str | None = None,
    label_column: str = "label",
    method: str | None = None,
    criterion: str = "nll",
    n_bins: int = 15,
    seed: int = 0,
    stages: Stages = in_silence,
) -> Calibration:
    """Fit a scaler on predictions, and write calibrated probabilities of rows that it has not seen.

    Args:
        source: a file of predictions.
        output: a folder for the report and predictions.npz.
        test: another file of predictions, whose rows are calibrated and reported; without one, the scaler is
            fitted on half of the rows, and the other half are.
        target: a file of predictions where the model is to be used, whose labels are not read. The class
            frequencies there are estimated; where they differ from those of the source, probabilities are
            corrected for them, and target.npz holds those of the target.
        label_column: of the files, where they are tables.
        method: a key of `METHODS`, with a target of `FOLDED`; None is "auto".
        criterion: for a temperature "nll", "ece" or "adaptive_ece".
        n_bins: M, at least 1.
        seed: of the draw of that half.
        stages: called with the name of each stage as it begins.

    Raises:
        ValueError: if a file, the method or the criterion is wrong.
        TypeError: if columns or arrays are of the wrong kind.
    """
    scaler = make_scaler(method or "auto", criterion, n_bins, METHODS if target is None else FOLDED)
    check_output(output)
    given = {Path(name).resolve() for name in (source, test, target) if name is not None}
    if given & {(output / name).resolve() for name in (_CALIBRATED, _CORRECTED)}:
        way_out = "name another folder: the calibrated ones are written there under the same name"
        raise InputValueError(expected("output", "be another folder than the predictions'", output, way_out))

    stages(f"reading {source}")
    found = load_predictions(source, label_column=label_column)
    tested = None if test is None else load_predictions(test, label_column=label_column)
    target_logits = None
    if target is not None:
        target_logits, target_names = load_unlabelled(target, label_column=label_column)
        check_same_classes("the target data", found, target_logits.shape[1], target_names)
    fitted_on, reported, held_out = split_roles(found, tested, seed)
    seen = () if tested is None else _note_in_sample(rows_in_both(found, tested), len(tested))
    stages(f"fitting on {len(fitted_on):,} rows, measuring {len(reported):,}")
    warned = fit(scaler, fitted_on)
    served, prior = scaler, None
    if target_logits is not None:
        source_rows = reported if tested is None else fitted_on
        served, prior, not_corrected = corrected(scaler, source_rows, target_logits, seed)
        warned += not_corrected
    with_correction = tested is not None or served is scaler
    report = replace(report_on(reported, source, n_bins, served if with_correction else scaler), notes=seen)
    assert report.after is not None
    calibrated = Predictions(reported.labels, probs=report.after.probs, class_names=reported.class_names)
    with whole_folder(output) as folder:
        save_predictions(calibrated, folder / _CALIBRATED)
        if target_logits is not None:
            names = np.array(report.class_names, dtype=np.str_)
            np.savez(folder / _CORRECTED, probs=served.predict_proba(target_logits), class_names=names)
        write_report(report, folder)
    return Calibration(
        method or "auto",
        getattr(scaler, "criterion", None),
        getattr(scaler, "choice_", None),
        fitted_numbers(scaler),
        len(fitted_on),
        held_out if with_correction else f"{held_out}, {_BEFORE_CORRECTION}",
        report,
        (*seen, *warned),
        prior=prior,
    )


def make_scaler(method: str, criterion: str, n_bins: int, known: Mapping[str, ScalerEntry]) -> Any:
    """The unfitted scaler; an option that does not go with it is refused."""
    if method not in known:
        requirement = f"be one of {', '.join(known)}"
        way_out = did_you_mean(method, known)
        if method in METHODS:
            way_out = (
                f"{method} cannot be folded into a model's head: calibrate a file of predictions with it, "
                "without target data"
            )
        raise InputValueError(expected("method", requirement, repr(method), way_out))
    scaler = known[method].load()
    if method == "temperature":
        return scaler(criterion, n_bins=n_bins)
    if criterion != "nll":
        way_out = f"leave it out: {method} minimises a criterion of its own"
        raise InputValueError(
            expected("criterion", "be given for a temperature only", repr(criterion), way_out)
        )
    return scaler()


def split_roles(
    found: Predictions, tested: Predictions | None, seed: int
) -> tuple[Predictions, Predictions, str]:
    """The rows to fit on, the rows to report on, and which the latter are, in words."""
    if tested is not None:
        check_same_classes("the test data", found, tested.n_classes, tested.class_names)
        return found, tested, f"all {len(tested):,} rows of the test data"
    if len(found) < 2:
        way_out = "pass more rows, or test data"
        raise InputValueError(expected("the rows", "be at least 2, to be split in half", len(found), way_out))
    chosen = half_of(found.labels, seed)
    rest = np.setdiff1d(np.arange(len(found)), chosen)
    held_out = f"the other {len(rest):,} of {len(found):,} rows, drawn with seed {seed}"
    return found.select(chosen), found.select(rest), held_out


def check_same_classes(
    argument: str, found: Predictions, n_classes: int, class_names: Sequence[str] | None
) -> None:
    """Raise where other rows have other classes than those to fit on, or the same by other names."""
    if n_classes != found.n_classes or (
        None not in (class_names, found.class_names) and class_names != found.class_names
    ):
        got = f"{n_classes} classes and {found.n_classes}, or other names"
        raise InputValueError(
            expected(argument, "have the same classes", got, "use predictions of one model")
        )


def corrected(
    scaler: Any, source_rows: Predictions, target_logits: NDArray[Any], seed: int
) -> tuple[Any, PriorEstimate, tuple[str, ...]]:
    """The fitted scaler with a correction to the target's class frequencies, their estimate, and its warnings.

    Where the frequencies cannot be told from the source's, it is the scaler itself that is returned.
    """
    found = estimate_prior(
        scaler.predict_proba(target_logits),
        source_probs=scaler.predict_proba(source_rows.as_logits()),
        seed=seed,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        correction = found.correction(scaler)
    return correction if found.shifted else scaler, found, tuple(str(each.message) for each in caught)


def half_of(labels: NDArray[np.int64], seed: int) -> NDArray[Any]:
    """Row numbers (N // 2,) of a random half; stratified by class where each class has enough rows.

    >>> labels = np.array([0, 0, 1, 1, 1, 1])
    >>> np.bincount(labels[half_of(labels, seed=0)])
    array([1, 2])
    """
    n_rows = len(labels) // 2
    counts = np.unique(labels, return_counts=True)[1]
    enough = counts.min() >= 2 and len(counts) <= n_rows
    chosen, _ = train_test_split(
        np.arange(len(labels)), train_size=n_rows, stratify=labels if enough else None, random_state=seed
    )
    return np.sort(chosen)


def fit(scaler: Any, predictions: Predictions) -> tuple[str, ...]:
    """Fit in place; return its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.fit(predictions.as_logits(), predictions.labels)
    return tuple(str(warning.message) for warning in caught)


def _note_in_sample(n_seen: int, n_reported: int) -> tuple[str, ...]:
    """The warning that the report is on rows that the scaler was fitted on."""
    if n_seen == 0:
        return ()
    way_out = "Report on other test data, or leave them out: half of the rows is then held out."
    if n_seen == n_reported:
        consequence = "The errors after calibration are in-sample, and lower than on new rows."
        return (f"The scaler was fitted on all {n_reported:,} rows of this report. {consequence} {way_out}",)
    consequence = "The errors after calibration are in part in-sample, and lower than on new rows."
    return (
        f"The scaler was fitted on {n_seen:,} of the {n_reported:,} rows of this report. {consequence} {way_out}",
    )


def rows_in_both(found: Predictions, tested: Predictions) -> int:
    """How many of the tested rows are also among those to fit on: the same label and the same probabilities.

    Where scores were rounded, different examples coincide. Of 16-bit logits some do: no more in both files than
    within them. Where it is many, only the very same rows count.
    """
    keys = [_row_keys(predictions) for predictions in (found, tested)]
    (fitted, n_fitted), (reported, n_reported) = (np.unique(key, return_counts=True) for key in keys)
    _, i, j = np.intersect1d(fitted, reported, assume_unique=True, return_indices=True)
    shared = int(np.minimum(n_fitted[i], n_reported[j]).sum())
    if shared == len(found) == len(tested):
        return shared
    distinct = len(reported) >= _SHARE_OF_DISTINCT_ROWS * len(tested)
    twins_of_fitted, twins_of_reported = (n[n > 1].sum() for n in (n_fitted, n_reported))
    by_chance = max(twins_of_fitted * len(tested) / len(found), twins_of_reported * len(found) / len(tested))
    return shared if distinct and shared > _BEYOND_CHANCE * by_chance else 0


def _row_keys(predictions: Predictions) -> NDArray[np.uint64]:
    """(N,) a hash of each row's label and log-probabilities, to four decimals: logits and probabilities agree."""
    log_probs = log_softmax(predictions.as_logits().astype(np.float64), axis=1)
    # Below, a probability read from float32 is not that of the logits.
    digits = np.rint(np.maximum(log_probs, -15.0) * 1e4).astype(np.int64).view(np.uint64)
    rng = np.random.default_rng(0)
    factors = rng.integers(2**63, size=digits.shape[1] + 1, dtype=np.uint64) | np.uint64(1)
    return digits @ factors[1:] + predictions.labels.astype(np.uint64) * factors[0]


def texts_in_both(data: Dataset, test_data: Any, rows: LabelledTexts, test: LabelledTexts) -> int:
    """How many of the test texts are also among those to fit on."""
    fitted = set(data[rows.text_column])
    return sum(text in fitted for text in test_data[test.text_column])


def _served(
    pipeline: Callable[..., Any],
    folder: Path,
    texts: list[str],
    class_names: Sequence[str],
    max_length: int | None,
    trust_remote_code: bool,
    **settings: Any,
) -> NDArray[np.float64]:
    """(N, C) the scores that a pipeline with the saved model gives."""
    classify = pipeline(
        "text-classification",
        model=str(folder),
        device="cpu",
        top_k=None,
        trust_remote_code=trust_remote_code,
        **settings,
    )
    cut: dict[str, Any] = {"truncation": max_length is not None, "max_length": max_length}
    results: Any = classify(texts, **cut)
    served = [{row["label"]: row["score"] for row in scores} for scores in results]
    return np.array([[scores[name] for name in class_names] for scores in served])


def _checked_difference(found: NDArray[np.float64], wanted: NDArray[np.float64]) -> float:
    """The largest difference between the probabilities that are served and the wanted ones."""
    difference = float(np.abs(found - wanted).max())
    if not difference <= _SERVED_TOLERANCE:
        raise RuntimeError(
            expected(
                "a pipeline with the saved model",
                f"give the calibrated probabilities within {_SERVED_TOLERANCE}",
                f"a difference of {difference:.2g}",
                "nothing was saved; please report this model",
            )
        )
    return difference
