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


def test_a_paragraph_longer_than_the_model_reads_is_shown_too(
    done: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ClassLabel(names=["numpy", "scipy"])
    rows = Dataset.from_dict({"text": ["an array " * 60] * 2, "label": [0, 0]}).cast_column("label", names)
    demo.serve(done[0] / "model", rows)
    assert capsys.readouterr().out.count("% sure (it is from numpy)") == 2


def a_file(path: Path) -> None:
    path.write_text("mine")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def a_file_for_the_model(path: Path) -> None:
    path.mkdir()
    (path / "model").write_text("mine")


@pytest.mark.parametrize("put", [a_file, a_link_to_nothing, a_file_for_the_model])
def test_an_output_in_the_way_is_refused_before_training(
    put: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "docstring_dataset", lambda **_: pytest.fail("work was done"))
    put(tmp_path / "out")
    assert_refused(call("--output-dir", str(tmp_path / "out")), "expected output to be a folder, got ")


def test_a_folder_that_cannot_be_written_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "docstring_dataset", lambda **_: pytest.fail("work was done"))
    # Where not even root may make a file.
    assert_refused(call("--output-dir", "/proc/out"), "expected output to be writable, got ")


def assert_refused(result: Any, message: str) -> None:
    """Exit code 2 with one line on stderr."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr
