"""The commands in Python: the same options, the same results, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import hf_calib
from hf_calib._errors import InputTypeError, InputValueError
from tests.helpers.commands import called_for_json
from tests.helpers.reports import quick_reports  # noqa: F401


def test_they_give_what_the_command_line_gives(workplace: Path, tmp_path: Path) -> None:
    predictions = workplace / "data.npz"
    wanted = called_for_json("evaluate", predictions)
    report = hf_calib.evaluate(predictions, output=str(tmp_path / "report"))
    assert report.to_dict() == wanted
    assert (tmp_path / "report" / "report.json").is_file()
    wanted = called_for_json(
        "calibrate", predictions, "--method", "temperature", "--output", tmp_path / "a"
    )
    done = hf_calib.calibrate(predictions, str(tmp_path / "b"), method="temperature")
    assert done.numbers == wanted["numbers"]
    wanted = called_for_json("decide", predictions, "--accuracy", 0.8)
    assert hf_calib.decide(str(predictions), accuracy=0.8).to_dict() == wanted


def test_an_option_that_is_not_there_or_out_of_range() -> None:
    with pytest.raises(
        InputValueError, match="n_bins to be at least 1, got 0; leave it out"
    ):
        hf_calib.evaluate("predictions.npz", n_bins=0)
    with pytest.raises(
        InputTypeError,
        match="to be one of evaluate's, got 'outputs'; did you mean 'output'",
    ):
        hf_calib.evaluate("predictions.npz", outputs="out")
    with pytest.raises(
        InputTypeError,
        match=r"to be one of calibrate's, got 'by'; known: batch_size, class_names,",
    ):
        hf_calib.calibrate("predictions.npz", "out", by=["country"])
