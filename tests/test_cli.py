"""The command line, and the demo from its first line to the served model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_calib.cli import app


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from hf_calib.cli import app; app()", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_demo_compares_the_losses_and_serves_the_calibrated_model(tmp_path: Path) -> None:
    done = run("demo", "--output-dir", str(tmp_path), "--epochs", "1", "--max-per-class", "60")
    assert done.returncode == 0, done.stderr
    for loss in ("cross_entropy", "focal", "adafocal"):
        assert re.search(rf"{loss}\s+0\.\d{{3}}\s+\d+\.\d{{2}}\s+\d\.\d{{3}}→\d\.\d{{3}}", done.stdout), (
            done.stdout
        )
    assert done.stdout.count("% sure (it is from") == 2
    assert (tmp_path / "reliability.png").read_bytes().startswith(b"\x89PNG")
    calibration = json.loads((tmp_path / "model" / "config.json").read_text())["calibration"]
    assert calibration["folded"] is True
    assert calibration["temperature"] > 0


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output


@pytest.mark.parametrize("option", [("--epochs", "0"), ("--max-per-class", "1"), ("--nonsense", "1")])
def test_bad_options_are_refused_with_exit_code_2(option: tuple[str, str]) -> None:
    assert CliRunner().invoke(app, ["demo", *option]).exit_code == 2
