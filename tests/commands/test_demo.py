"""The demo: from docstrings to the served model, and outputs that are refused before anything is trained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset
from typer.testing import CliRunner

from hf_calib import cli
from hf_calib.commands import demo
from tests.helpers.commands import assert_refused

# After fewer epochs the model is at chance, where rounding decides whether there is a temperature at all.
SMALL = ("--epochs", "5", "--max-per-class", "60")


def call(*words: str) -> Any:
    """Run `hf-calib demo` in this process, on the narrowest usual screen."""
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, ["demo", *words])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An empty folder in which the demo was run with its default output, and what it printed."""
    folder = tmp_path_factory.mktemp("empty")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = call(*SMALL)
    assert result.exit_code == 0, result.output
    return folder / "demo_output", result.output


def test_the_table_has_each_loss_before_and_after_its_temperature(done: tuple[Path, str]) -> None:
    number, interval = r"\d\.\d{3}", r"\d\.\d+ \[\d\.\d+, \d\.\d+\]"
    rows = re.findall(
        rf"^ *(\S.*?) +({number}) +{interval} +({interval}) +({number})\s*$", done[1], re.MULTILINE
    )
    names = [name.split(" = ")[0].strip() for name, *_ in rows]
    after = "after T"
    assert names == ["cross_entropy", after, "focal", after, "adafocal", after]
    accuracies = [row[1] for row in rows]
    assert accuracies[::2] == accuracies[1::2]  # a temperature changes no prediction
    for _, _, ece, chance in rows:
        value, low, high = map(float, re.findall(number, ece))
        assert low <= high
        assert 0 <= value < 1  # so short a training ends near chance, where an error can round to 0
        assert high > 0
        assert 0 < float(chance) < 0.2


def test_the_table_fits_on_80_columns(done: tuple[Path, str]) -> None:
    table = done[1][done[1].index("Test split") : done[1].index("A temperature T is the one")]
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= 80


def test_the_figure_and_the_calibrated_model_are_written_and_served(done: tuple[Path, str]) -> None:
    folder, printed = done
    assert printed.count("% sure (it is from") == 2
    assert (folder / "reliability.png").read_bytes().startswith(b"\x89PNG")
    calibration = json.loads((folder / "model" / "config.json").read_text())["calibration"]
    assert calibration["folded"] is True
    assert calibration["temperature"] > 0


def test_a_paragraph_longer_than_the_model_reads_is_shown_too(done: tuple[Path, str]) -> None:
    names = ClassLabel(names=["numpy", "scipy"])
    rows = Dataset.from_dict({"text": ["an array " * 60] * 2, "label": [0, 0]}).cast_column("label", names)
    assert "".join(demo.served(done[0] / "model", rows)).count("% sure (it is from numpy)") == 2


@pytest.mark.parametrize("in_the_way", ["a file", "a link to nothing", "a file for the model", "no rights"])
def test_an_output_that_cannot_be_written_is_refused_before_training(
    in_the_way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "docstring_dataset", lambda **_: pytest.fail("work was done"))
    output, message = tmp_path / "out", "expected output to be a folder, got "
    if in_the_way == "a file":
        output.write_text("mine")
    elif in_the_way == "a link to nothing":
        output.symlink_to(tmp_path / "nowhere")
    elif in_the_way == "a file for the model":
        output.mkdir()
        (output / "model").write_text("mine")
    else:  # where not even root may make a file
        output, message = Path("/proc/out"), "expected output to be writable, got "
    assert_refused(call("--output", str(output)), message)
