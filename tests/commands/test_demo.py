"""The demo: from docstrings to the served model, and outputs that are refused before anything is trained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
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
        # The small run ends before AdaFocal's first update, and says so.
        with pytest.warns(UserWarning, match="The loss will never adapt"):
            result = call(*SMALL)
    assert result.exit_code == 0, result.output
    return folder / "demo_output", result.output


@pytest.mark.slow
def test_the_table_has_each_loss_before_and_after_its_temperature(
    done: tuple[Path, str],
) -> None:
    number, interval = r"\d\.\d{3}", r"\d\.\d+ \[\d\.\d+, \d\.\d+\]"
    rows = re.findall(
        rf"^ *(\S.*?) +({number}) +{interval} +({interval}) +({number})\s*$",
        done[1],
        re.MULTILINE,
    )
    names = [name.split(" = ")[0].strip() for name, *_ in rows]
    after = "after T"
    assert names == ["cross_entropy", after, "focal", after, "adafocal", after]
    accuracies = [row[1] for row in rows]
    assert accuracies[::2] == accuracies[1::2]  # a temperature changes no prediction
    assert all(0 < float(chance) < 0.2 for *_, chance in rows)


@pytest.mark.slow
def test_the_figure_and_the_calibrated_model_are_written_and_served(
    done: tuple[Path, str],
) -> None:
    folder, printed = done
    assert printed.count("% sure (it is from") == 2
    assert (folder / "reliability.png").read_bytes().startswith(b"\x89PNG")
    calibration = json.loads((folder / "model" / "config.json").read_text())[
        "calibration"
    ]
    assert calibration["folded"] is True
    assert calibration["temperature"] > 0


def test_an_output_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        demo, "docstring_dataset", lambda **_: pytest.fail("work was done")
    )
    (tmp_path / "model").write_text("mine")
    assert_refused(
        call("--output", str(tmp_path)), "expected --output to be a folder, got "
    )
