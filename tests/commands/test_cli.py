"""The command line: options, exit codes, and errors of a line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hf_calib
from hf_calib._errors import InputValueError
from hf_calib.cli import app
from hf_calib.commands.options import evaluate
from tests.helpers.commands import assert_refused, call, names_in
from tests.helpers.reports import quick_reports  # noqa: F401


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (
                "evaluate model",
                "expected --data to be given with a model, got none; name labelled texts",
            ),
            (
                "evaluate data.npz --data data.csv",
                "data to be given with a model only, got",
            ),
            (
                "evaluate model --data nothing.csv",
                "expected --data to name an existing file",
            ),
            (
                "evaluate nobody/none --data data.csv",
                "expected the model to be loadable, got nobody/none",
            ),
            (
                "evaluate model --data data.csv --text-column txt",
                "--text-column .* did you mean 'text'",
            ),
            (
                "evaluate model --data data.csv --weight-column text",
                "to hold numbers in every row, got",
            ),
            (
                "evaluate data.npz --class-names a,a,b,",
                "--class-names not to be empty, got 'a', 'a', 'b', ''",
            ),
            (
                "evaluate data.npz --ood-data=",
                "--ood-data not to be empty, got ''",
            ),
            (
                "evaluate data.npz --output=",
                "expected --output not to be empty, got ''; write one",
            ),
            (
                "evaluate data.npz --output data.csv",
                "output to be a folder, got the file",
            ),
            ("evaluate data.npz --nbins 3", "No such option: --nbins.*; see .*--help"),
            ("evaluate", "Missing argument 'MODEL_OR_PREDICTIONS'; see"),
            ("evaluate data.npz --n-bins x", "Invalid value for '--n-bins': .*; see"),
            ("evalute data.npz", "No such command 'evalute'. Did you mean 'evaluate'"),
            (
                "calibrate data.npz --output new --method vector --criterion ece",
                "expected --criterion to be given with a temperature only, got 'ece'",
            ),
        ],
    )
    def test_one_line_and_exit_code_2(
        self, words: str, message: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(workplace)
        before = names_in(workplace)
        assert_refused(call(*words.split()), message)
        assert names_in(workplace) == before

    def test_a_bug_is_no_refusal(
        self, workplace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise ValueError("operands could not be broadcast together")

        monkeypatch.setattr("hf_calib.report.making.calibration_report", broken)
        assert call("evaluate", workplace / "data.npz").exit_code == 1


@pytest.mark.slow
def test_as_a_program_and_without_torch_on_files(
    workplace: Path, tmp_path: Path
) -> None:
    file = str(workplace / "test.npz")
    out = ["--output", str(tmp_path / "out")]
    commands = [
        ["evaluate", file],
        ["calibrate", file, *out],
    ]
    code = (
        f"import sys; from hf_calib.cli import app\n"
        f"for words in {commands!r}:\n"
        "    app([*words, '--json'], standalone_mode=False)\n"
        "    print(words[0], sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)), file=sys.stderr)\n"
        f"app(['evaluate', {str(tmp_path / 'nothing.npz')!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr
    *said, last = done.stderr.splitlines()
    assert last.startswith(
        "hf-calib: expected predictions to name existing files, got "
    )
    loaded = [line for line in said if line.endswith("]")]
    assert loaded == ["evaluate []", "calibrate []"]
    assert json.loads(done.stdout.splitlines()[0])["n_examples"] == 80
    assert len(names_in(tmp_path / "out" / "figures")) == 6
    assert "data:image/" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    "command", ["", *(command.name for command in app.registered_commands)]
)
def test_help_has_an_example_and_fits_a_screen(command: str) -> None:
    page = (
        CliRunner(env={"COLUMNS": "80"})
        .invoke(app, [*command.split(), "--help"])
        .stdout
    )
    lines = page.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert f"Example: hf-calib {command} " in page or not command
    assert not re.search(r"<\w+ |\d{6}", page)


@pytest.mark.parametrize("command", ["evaluate", "calibrate", "decide"])
def test_all_options_are_shown_on_demand(command: str) -> None:
    short = call(command, "--help").stdout
    whole = call(command, "--help-all").stdout
    assert f"All options: hf-calib {command} --help-all" in short
    assert "docs/" not in short
    assert "--image-column" not in short
    assert "--image-column" in whole
    for page in (short, whole):
        assert ("--n-bins" in page) == (command != "decide")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model --data data.csv --class-names a,b", "expected --class-names to name"),
        (
            "model --data data.csv --text-column t",
            "expected --text-column to be one of",
        ),
        ("model --data data.csv --label-column t", "expected --label-column to be one"),
        ("model --data data.csv --by t", "expected --by to be one of text, label"),
        ("data.npz --ood-data=", "expected --ood-data not to be empty"),
        ("data.npz --soft-labels no.npz", "expected --soft-labels to name an existing"),
        ("data.npz --soft-labels data.npz", "to hold the array soft_labels or probs"),
        ("data.npz --n-bins 0", "expected --n-bins to be at least 1"),
        ("class_names.csv", "got class_names.csv, where"),
        ("names.npz", "expected class_names to hold 4 names"),
    ],
)
def test_errors_name_options_as_they_are_typed(
    words: str, message: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    with np.load("data.npz") as arrays:
        found = dict(arrays) | {"class_names": np.array(["a", "b"])}
    np.savez("names.npz", **found)
    assert_refused(call("evaluate", *words.split()), message)


def test_errors_in_python_name_arguments(workplace: Path) -> None:
    with pytest.raises(InputValueError, match="expected class_names to name the model"):
        evaluate(
            workplace / "model", data=workplace / "data.csv", class_names=["a", "b"]
        )


def test_what_was_there_before_is_not_said_to_be_written(
    workplace: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "figures").mkdir()
    words = ("evaluate", workplace / "data.npz", "--output", tmp_path)
    for _ in range(2):
        said = call(*words).stdout
        assert said.endswith("figures, report.html, report.json, report.md\n")
        assert "notes.txt" not in said


def test_the_command_line_is_that_of_the_package() -> None:
    command = [sys.executable, "-m", "hf_calib", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"hf-calib {hf_calib.__version__}\n"
