"""What `hf-calib evaluate` and `hf-calib calibrate` do with a model: it is run, scaled, folded, checked and saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from hf_calib._errors import InputValueError, expected
from hf_calib._files import check_output, whole_folder
from hf_calib.commands.fitting import FOLDED, fit, fitted_numbers, make_scaler, split_roles
from hf_calib.commands.posthoc import Calibration, report_on
from hf_calib.export.fold import check_can_be_folded, fold
from hf_calib.export.saving import replace_model, standalone_copy
from hf_calib.predictions.texts import EncodedRows, TextClassifier, encode_rows, load_classifier, load_rows
from hf_calib.report import CalibrationReport
from hf_calib.report.writing import write_report, write_to

Progress = Callable[[int, int], None]

_SERVED_TEXTS = 8
_SERVED_TOLERANCE = 1e-4  # of a probability: float32, and batches that are padded otherwise


@dataclass(frozen=True)
class Rows:
    """Which labelled texts a model runs over, and how they are read; see `load_rows` and `predict`."""

    data: str
    config_name: str | None = None
    split: str = "test"
    text_column: str = "text"
    label_column: str = "label"
    class_names: Sequence[str] | None = None
    max_length: int | None = None
    batch_size: int = 32

    def load(self) -> Dataset:
        """The rows, with the columns as they are."""
        return load_rows(self.data, config_name=self.config_name, split=self.split)

    def encode(self, classifier: TextClassifier, rows: Dataset) -> EncodedRows:
        """Check and encode them, before a model runs."""
        return encode_rows(
            classifier,
            rows,
            text_column=self.text_column,
            label_column=self.label_column,
            class_names=self.class_names,
            max_length=self.max_length,
        )


def evaluate_model(
    source: str,
    rows: Rows,
    *,
    n_bins: int = 15,
    output: Path | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> CalibrationReport:
    """Report the calibration of a model on labelled texts.

    Args:
        source: a sequence classifier on the Hub or in a folder.
        rows: labelled texts that it was not trained on.
        n_bins: M, at least 1.
        output: a folder for the report, see `write_report`.
        trust_remote_code: whether code that comes with the model may run.
        progress: called with the number of rows just done and of all rows.

    Raises:
        ValueError: if model or data cannot be loaded, or do not fit.
        TypeError: if columns are of the wrong kind.
    """
    check_output(output)
    data = rows.load()
    classifier = load_classifier(source, trust_remote_code=trust_remote_code)
    found = rows.encode(classifier, data).predict(batch_size=rows.batch_size, on_progress=progress)
    report = report_on(found, source, n_bins)
    write_to(output, report)
    return report


def calibrate_model(
    source: str,
    rows: Rows,
    output: Path,
    *,
    test: Rows | None = None,
    method: str = "temperature",
    criterion: str = "nll",
    n_bins: int = 15,
    seed: int = 0,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Calibration:
    """Fit a scaler on a model's logits, fold it into the head, and save the model for a plain pipeline.

    Args:
        source: a sequence classifier on the Hub or in a folder.
        rows: labelled texts that it was not trained on.
        output: the calibrated model's folder; the report is in its folder `calibration`.
        test: texts to report on; without them, the scaler is fitted on half of the rows, and the other half
            are reported on.
        method: a key of `FOLDED`.
        criterion: for a temperature "nll", "ece" or "adaptive_ece".
        n_bins: M, at least 1.
        seed: of the draw of that half.
        trust_remote_code: whether code that comes with the model may run.
        progress: called with the number of rows just done and of all rows.

    Raises:
        ValueError: if model, data, method or criterion are wrong, or the scaler cannot be folded.
        TypeError: if columns are of the wrong kind.
        RuntimeError: if a pipeline with the saved model gives other probabilities; nothing is left then.
    """
    scaler = make_scaler(method, criterion, n_bins, FOLDED)
    check_output(output)
    if output.resolve() == Path(source).resolve():
        way_out = "folding cannot be undone: name a new folder"
        raise InputValueError(expected("output", "be another folder than the model's", output, way_out))
    data, test_data = rows.load(), None if test is None else test.load()
    classifier = load_classifier(source, trust_remote_code=trust_remote_code)
    recorded = check_can_be_folded(classifier.model)
    encoded = rows.encode(classifier, data)
    test_encoded = None if test is None else test.encode(classifier, test_data)
    running: dict[str, Any] = {"batch_size": rows.batch_size, "on_progress": progress}
    found = encoded.predict(**running)
    tested = None if test_encoded is None else test_encoded.predict(**running)
    fitted_on, reported, held_out = split_roles(found, tested, seed)
    notes = fit(scaler, fitted_on)
    report = report_on(reported, source, n_bins, scaler)
    minimised = getattr(scaler, "criterion", None)
    fitting = {"criterion": minimised, "split": "calibration", "n_examples": len(fitted_on)}
    texts = list(data[:_SERVED_TEXTS][rows.text_column])
    wanted = scaler.predict_proba(found.as_logits()[: len(texts)])
    with whole_folder(output, replace_model) as folder:
        plain = standalone_copy(classifier.model)
        plain.config.calibration = {**recorded, **fitting}
        batch = classifier.batch(
            classifier.encode(texts[: None if classifier.can_pad else 1], rows.max_length)
        )
        fold(plain, scaler, batch=batch).save_pretrained(folder)
        classifier.tokenizer.save_pretrained(folder)
        limit = rows.max_length or classifier.longest
        names = classifier.class_names
        difference = _served_difference(folder, texts, wanted, names, limit, trust_remote_code)
        write_report(report, folder / "calibration")
    numbers = fitted_numbers(scaler)
    return Calibration(method, minimised, numbers, len(fitted_on), held_out, report, notes, difference)


def _served_difference(
    folder: Path,
    texts: list[str],
    wanted: NDArray[np.float64],
    class_names: Sequence[str],
    max_length: int | None,
    trust_remote_code: bool,
) -> float:
    """How far the probabilities of a pipeline with the saved model are off, at most."""
    from transformers import pipeline

    classify = pipeline(
        "text-classification",
        model=str(folder),
        device="cpu",
        top_k=None,
        trust_remote_code=trust_remote_code,
    )
    cut: dict[str, Any] = {"truncation": max_length is not None, "max_length": max_length}
    results: Any = classify(texts, **cut)
    served = [{row["label"]: row["score"] for row in scores} for scores in results]
    found = np.array([[scores[name] for name in class_names] for scores in served])
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
