"""The commands in Python: the same options by their names, with underscores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_calib._errors import InputTypeError, did_you_mean, expected

if TYPE_CHECKING:
    from hf_calib.commands.calibrate import Calibration
    from hf_calib.commands.decide import Decided
    from hf_calib.report import CalibrationReport


def evaluate(source: str | Sequence[str], **options: Any) -> CalibrationReport:
    """Report the calibration of a model on labelled rows, or of predictions: `hf-calib evaluate`.

    Args:
        source: a classifier, on the Hub or in a folder; or files of predictions, a folder, a glob or an address.
        **options: those of `hf-calib evaluate --help`, such as data="test.csv", by=["country"], output="measured".

    Raises:
        InputError: a ValueError or TypeError where source or data are missing, unreadable or do not fit.

    >>> evaluate("missing.csv")
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputValueError: expected predictions to name existing files, got missing.csv, where there are ...
    """
    return _done("Evaluate", source=[source] if isinstance(source, str) else list(source), **options)


def calibrate(source: str, output: str, **options: Any) -> Calibration:
    """Fit a scaler on held-out rows, and fold it into a model or calibrate predictions: `hf-calib calibrate`.

    Args:
        source: a classifier, on the Hub or in a folder; or predictions.
        output: the folder for the calibrated model, or for predictions.npz.
        **options: those of `hf-calib calibrate --help`, such as data="validation.csv", method="temperature".

    Raises:
        InputError: a ValueError or TypeError where model, data or options are wrong.
        RuntimeError: if a pipeline with the saved model gives other probabilities; output is then not made.

    >>> calibrate("missing.csv", "out", methd="vector")
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputTypeError: expected option to be one of calibrate, got methd; did you mean 'method'?
    """
    return _done("Calibrate", source=source, output=output, **options)


def decide(source: str, **options: Any) -> Decided:
    """Fit a rule, a promised accuracy, costs or sets, and measure it on other rows: `hf-calib decide`.

    Args:
        source: a classifier of sequences or images, on the Hub or in a folder; or predictions.
        **options: those of `hf-calib decide --help`, such as data="more.csv", accuracy=0.95, output="calibrated".

    Raises:
        InputError: a ValueError or TypeError where source, data or options are wrong, or the rows too few.
    """
    return _done("Decide", source=source, **options)


def _done(command: str, **options: Any) -> Any:
    from hf_calib.commands import options as of_commands

    kind = getattr(of_commands, command)
    known = [each.name for each in kind.options()]
    for name in options.keys() - known:
        way_out = did_you_mean(name, known)
        raise InputTypeError(expected("option", f"be one of {command.lower()}", name, way_out))
    return kind(**options)()
