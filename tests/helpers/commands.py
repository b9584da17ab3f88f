"""The command line, called in this process, and what a refusal looks like."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from hf_calib.cli import app

NAMES = ("art", "law", "film", "sport")
TEMPERATURE = (
    "--method",
    "temperature",
)  # faster than auto, where the map does not matter
REPORT = {"report.md", "report.html", "report.json", "figures"}


def call(*words: object) -> Any:
    """Run a command in this process, on a screen wide enough for its tables."""
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, [str(word) for word in words])


def called_for_json(*words: object) -> Any:
    """Run a command with --json; its stdout holds one object and nothing else."""
    result = call(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def assert_refused(result: Any, message: str) -> None:
    """Exit code 2 with one line on stderr, and nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [
        line for line in result.stderr.splitlines() if line.startswith("hf-calib: ")
    ]
    assert len(lines) == 1, result.stderr
    assert re.search(message, lines[0]), lines[0]
    assert "Traceback" not in result.stderr


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def one_line(text: str) -> str:
    return " ".join(text.split())
