"""`hf-calib compare-losses` as a user types it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import typer

from hf_calib.commands import console
from tests.helpers.commands import assert_refused, call
from tests.helpers.places import ROOT

SCRIPT = ROOT / "tests" / "helpers" / "study_script.py"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "120",
}


@pytest.mark.slow
def test_a_study_from_trainings_to_the_report_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = "--losses cross_entropy,brier --seeds 0,1 --output study --jobs 2 --methods temperature -- --fails brier"
    printed = call(
        "compare-losses", SCRIPT, "--print-commands", "--json", *words.split()
    )
    assert len(json.loads(printed.stdout)["commands"]) == 4
    trained = call("compare-losses", SCRIPT, *words.split())
    assert trained.exit_code == 0, trained.output
    assert "warning" not in trained.stderr
    assert (
        "2 losses x 2 seeds, measured on 60 test rows with 3 classes" in trained.stdout
    )
    assert (
        trained.stderr.count("brier, seed 1 FAILED: exit status 1; its last lines:")
        == 1
    )
    assert "no such column" in (tmp_path / "study" / "report.md").read_text()
    rows = pandas.read_csv(tmp_path / "study" / "results.csv", keep_default_na=False)
    assert set(rows["loss"]) == {"cross_entropy"}
    assert set(rows["method"]) == {"none", "temperature"}
    first, second = rows.loc[
        (rows["method"] == "none") & (rows["metric"] == "nll"), "value"
    ]
    assert first != second
    # A report is made without torch.
    code = (
        "from hf_calib.cli import app; import sys\ntry: app()\n"
        "finally: assert not {'torch', 'transformers'} & set(sys.modules), sys.modules"
    )
    words = ["compare-losses", "study", "--methods", "temperature,vector", "--json"]
    again = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stderr
    record = json.loads(again.stdout)
    assert record["methods"] == ["none", "temperature", "vector"]
    assert record["baseline"] == {"loss": "cross_entropy", "method": "temperature"}
    assert [entry["loss"] for entry in record["missing"]] == ["brier", "brier"]
    assert record == json.loads((tmp_path / "study" / "report.json").read_text())


NEW = "SCRIPT --output s"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "missing.py --output s",
            "expected SCRIPT_OR_STUDY to be a script, or the folder of a study",
        ),
        ("SCRIPT", "expected --output to name the study's folder, got none"),
        (f"{NEW} --losses focl", "did you mean 'focal'?"),
        (f"{NEW} --methods temprature", "did you mean 'temperature'?"),
        (f"{NEW} -- --seed 1", "got --seed; list it in --seeds"),
        pytest.param(
            f"{NEW} --losses focal --seeds 0 -- --fails focal",
            "one run to end, got none of 1;",
            marks=pytest.mark.slow,
        ),
        (
            ". --output s --seeds 0",
            "given with these arguments, got a study's folder with seeds, output",
        ),
        (".", "expected the study to be readable, got study.json"),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, words: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = words.replace("SCRIPT", shlex.quote(str(SCRIPT)))
    assert_refused(call("compare-losses", *shlex.split(words)), re.escape(message))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_one_line(
    sent: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(sent)
    with pytest.raises(typer.Exit) as end, console.interruptible("Go on."):
        signal.raise_signal(sent)
    assert end.value.exit_code == 130
    assert capsys.readouterr().err == "hf-calib: interrupted. Go on.\n"
    assert signal.getsignal(sent) is before
