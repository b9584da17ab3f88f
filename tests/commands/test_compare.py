"""`hf-calib compare` as a user types it."""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hf_calib.cli import app
from hf_calib.commands import console
from hf_calib.predictions.training import TrainingPredictions
from tests.helpers.places import ROOT

SCRIPT = ROOT / "tests" / "helpers" / "study_script.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
COMMAND = [sys.executable, "-c", "from hf_calib.cli import app; app()", "compare"]


def compare(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=900
    )


@pytest.mark.slow
def test_a_study_from_trainings_to_the_report_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["compare", str(SCRIPT), "--losses", "cross_entropy,brier", "--seeds", "0,1", "--output", "study"]
    words += ["--jobs", "2", "--methods", "temperature", "--", "--fails", "brier"]
    trained = CliRunner(env={"COLUMNS": "120"}).invoke(app, words)
    assert trained.exit_code == 0, trained.output
    assert "2 losses x 2 seeds, measured on 60 test rows with 3 classes" in trained.stdout
    assert trained.stderr.count("brier, seed 1 FAILED: exit status 1; its last lines:") == 1
    study = tmp_path / "study"
    report = (study / "report.md").read_text()
    assert "no such column" in report
    with (study / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["loss"] for row in rows} == {"cross_entropy"}
    assert {row["method"] for row in rows} == {"none", "temperature"}
    nll = {
        (row["loss"], row["seed"]): row["value"]
        for row in rows
        if (row["method"], row["metric"]) == ("none", "nll")
    }
    assert nll["cross_entropy", "1"] != nll["cross_entropy", "0"]

    # A report is made without torch.
    code = (
        "from hf_calib.cli import app; import sys\ntry: app()\n"
        "finally: assert not {'torch', 'transformers'} & set(sys.modules), sys.modules"
    )
    again = subprocess.run(
        [sys.executable, "-c", code, "compare", str(study), "--methods", "temperature,vector", "--json"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stderr
    record = json.loads(again.stdout)
    assert record["methods"] == ["none", "temperature", "vector"]
    assert record["baseline"] == {"loss": "cross_entropy", "method": "temperature"}
    assert [entry["loss"] for entry in record["missing"]] == ["brier", "brier"]
    assert record == json.loads((study / "report.json").read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["missing.py", "--output", "s"],
            "expected SCRIPT_OR_STUDY to be a script, or the folder of a study",
        ),
        ([str(SCRIPT)], "expected --output to name the study's folder, got none"),
        ([str(SCRIPT), "--output", "s", "--losses", "focl"], "did you mean 'focal'?"),
        (
            [str(SCRIPT), "--output", "s", "--config", "no.yaml"],
            "expected --config to name an existing YAML file",
        ),
        (
            [str(SCRIPT), "--output", "s", "--launcher", "torch-run 2"],
            "expected --launcher to begin with a program, got 'torch-run 2'",
        ),
        ([str(SCRIPT), "--output", "s", "--launcher", "torchrun 'x"], "expected --launcher to begin with"),
        ([str(SCRIPT), "--output", "s", "--methods", "temprature"], "did you mean 'temperature'?"),
        ([str(SCRIPT), "--output", "s", "--submitit", "gpu"], "expected --submitit to be a JSON object"),
        ([str(SCRIPT), "--output", "s", "--", "--seed", "1"], "got --seed; list it in --seeds"),
        pytest.param(
            [str(SCRIPT), "--output", "s", "--losses", "focal", "--seeds", "0", "--", "--fails", "focal"],
            "got 1 failures of 1",
            marks=pytest.mark.slow,
        ),
        ([".", "--output", "s"], "expected a script to be given with these arguments"),
        ([str(SCRIPT), "--output", "s", "--seeds", "0,x"], "expected --seeds to be whole numbers, got '0,x'"),
        ([".", "--losses", "focal"], "expected a script to be given with these arguments"),
        ([".", "--seeds", "0"], "expected a script to be given with these arguments"),
        (["."], "expected the study to be readable, got study.json"),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = CliRunner().invoke(app, ["compare", *words])
    assert done.exit_code == 2, done.output
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_one_line(sent: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(sent)
    with pytest.raises(typer.Exit) as end, console.interruptible("Go on."):
        signal.raise_signal(sent)
    assert end.value.exit_code == 130
    assert capsys.readouterr().err == "hf-calib: interrupted. Go on.\n"
    assert signal.getsignal(sent) is before


@pytest.mark.deep
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_ends_the_trainings_and_says_how_it_goes_on(
    tmp_path: Path, sent: signal.Signals
) -> None:
    words = [str(SCRIPT), "--losses", "focal", "--seeds", "0", "--output", "s", "--", "--seconds", "60"]
    process = subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    while not list(tmp_path.glob("s/cells/*/checkpoint-1")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(sent)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("hf-calib: interrupted. The same command goes on where it was: ")
    assert not subprocess.run(["pgrep", "-f", f"[-]-output_dir {tmp_path}"], capture_output=True).stdout


def logits(study: Path) -> dict[str, Any]:
    return {
        path.parent.name: TrainingPredictions.load(path).test.logits.tobytes()
        for path in study.glob("cells/*/predictions.safetensors")
    }


@pytest.mark.deep
def test_a_recipe_that_is_killed_twice_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(
        "dataset: docstrings\nmodel: global_pooling_cnn\nvocab_size: 2000\nmax_length: 32\nmax_train_samples: 600\n"
        "max_calibration_samples: 200\nmax_test_samples: 400\nper_device_train_batch_size: 16\nlearning_rate: 1e-3\n"
        "num_train_epochs: 3\nsave_strategy: steps\nsave_steps: 10\nreport_to: none\nuse_cpu: true\nmax_grad_norm: 0\n"
    )
    words = [str(ROOT / "recipes" / "text_classification.py"), "--config", "task.yaml", "--seeds", "0"]
    words += ["--losses", "cross_entropy,adafocal_every_10_steps"]
    done = compare(tmp_path, *words, "--output", "whole", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    for _ in range(2):
        process = subprocess.Popen([*COMMAND, *words, "--output", "cut"], cwd=tmp_path, env=ENVIRONMENT)
        before = set(tmp_path.glob("cut/cells/*/checkpoint-*/trainer_state.json"))
        while not set(tmp_path.glob("cut/cells/*/checkpoint-*/trainer_state.json")) - before:
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
        process.wait()
        subprocess.run(["pkill", "-KILL", "-f", f"[-]-output_dir {tmp_path}/cut"], check=True)
    done = compare(tmp_path, *words, "--output", "cut")
    assert done.returncode == 0, done.stderr
    assert logits(tmp_path / "cut") == logits(tmp_path / "whole")
    resumed = [
        json.loads(p.read_text())["training"]["resumed"] for p in tmp_path.glob("cut/cells/*/results.json")
    ]
    assert any(resumed)


@pytest.mark.deep
def test_each_training_on_two_processes(tmp_path: Path) -> None:
    words = [
        str(ROOT / "recipes" / "text_classification.py"),
        "--losses",
        "focal",
        "--seeds",
        "0,1",
        "--jobs",
        "2",
    ]
    words += [
        "--launcher",
        f"{shlex.quote(sys.executable)} -m torch.distributed.run --nproc_per_node 2",
        "--output",
        "s",
        "--",
    ]
    sizes = {"max_train_samples": 64, "max_calibration_samples": 60, "max_test_samples": 60, "max_length": 16}
    settings = {
        "dataset": "docstrings",
        "model": "global_pooling_cnn",
        "num_train_epochs": 1,
        "use_cpu": "true",
    }
    for name, value in {**sizes, **settings}.items():
        words += [f"--{name}", str(value)]
    done = compare(tmp_path, *words, "--report_to", "none")
    assert done.returncode == 0, done.stderr
    for path in tmp_path.glob("s/cells/*/log.txt"):
        assert "FAILED" not in path.read_text()
    (n_rows,) = {
        len(TrainingPredictions.load(p).test.labels)
        for p in tmp_path.glob("s/cells/*/predictions.safetensors")
    }
    assert n_rows == 60


def test_printed_commands_are_a_line_each_however_narrow_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["compare", str(SCRIPT), "--losses", "focal", "--seeds", "0,1", "--output", "a study"]
    rest = ["--print-commands", "--", "--rows", "[red] and two  spaces " + 20 * "long "]
    done = CliRunner(env={"COLUMNS": "40"}).invoke(app, [*words, *rest])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert Path(shlex.split(line)[-1]).parent == tmp_path / "a study" / "cells"
