"""`hf-calib compare` as a user types it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas
import pytest
import typer
from typer.testing import CliRunner

from hf_calib.cli import app
from hf_calib.commands import console
from hf_calib.predictions.training import TrainingPredictions
from tests.helpers.commands import assert_refused, call
from tests.helpers.places import ROOT

SCRIPT = ROOT / "tests" / "helpers" / "study_script.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
COMMAND = [sys.executable, "-c", "from hf_calib.cli import app; app()", "compare"]


def compare(folder: Path, *words: str) -> str:
    where = {"cwd": folder, "env": ENVIRONMENT, "timeout": 900}
    done = subprocess.run([*COMMAND, *words], **where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_study_from_trainings_to_the_report_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = "--losses cross_entropy,brier --seeds 0,1 --output study --jobs 2 --methods temperature -- --fails brier"
    trained = call("compare", SCRIPT, *words.split())
    assert trained.exit_code == 0, trained.output
    assert "warning" not in trained.stderr
    assert "2 losses x 2 seeds, measured on 60 test rows with 3 classes" in trained.stdout
    assert trained.stderr.count("brier, seed 1 FAILED: exit status 1; its last lines:") == 1
    assert "no such column" in (tmp_path / "study" / "report.md").read_text()
    rows = pandas.read_csv(tmp_path / "study" / "results.csv", keep_default_na=False)
    assert set(rows["loss"]) == {"cross_entropy"}
    assert set(rows["method"]) == {"none", "temperature"}
    first, second = rows.loc[(rows["method"] == "none") & (rows["metric"] == "nll"), "value"]
    assert first != second
    # A report is made without torch.
    code = (
        "from hf_calib.cli import app; import sys\ntry: app()\n"
        "finally: assert not {'torch', 'transformers'} & set(sys.modules), sys.modules"
    )
    words = "compare study --methods temperature,vector --json"
    again = subprocess.run(
        [sys.executable, "-c", code, *words.split()], env=ENVIRONMENT, capture_output=True, text=True
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
        ("missing.py --output s", "expected SCRIPT_OR_STUDY to be a script, or the folder of a study"),
        ("SCRIPT", "expected --output to name the study's folder, got none"),
        (f"{NEW} --losses focl", "did you mean 'focal'?"),
        (f"{NEW} --config no.yaml", "expected --config to name an existing YAML file"),
        (f"{NEW} --launcher 'torch-run 2'", "expected --launcher to begin with a program, got 'torch-run 2'"),
        (f"""{NEW} --launcher "torchrun 'x" """, "expected --launcher to begin with"),
        (f"{NEW} --methods temprature", "did you mean 'temperature'?"),
        (f"{NEW} --submitit gpu", "expected --submitit to be a JSON object"),
        (f"{NEW} --seeds 0,x", "expected --seeds to be whole numbers, got '0,x'"),
        (f"{NEW} -- --seed 1", "got --seed; list it in --seeds"),
        pytest.param(
            f"{NEW} --losses focal --seeds 0 -- --fails focal", "got 1 failures of 1", marks=pytest.mark.slow
        ),
        (". --output s --seeds 0", "given with these arguments, got a study's folder with seeds, output"),
        (".", "expected the study to be readable, got study.json"),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, words: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = words.replace("SCRIPT", shlex.quote(str(SCRIPT)))
    assert_refused(call("compare", *shlex.split(words)), re.escape(message))


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
    compare(tmp_path, *words, "--output", "whole", "--jobs", "2")
    for _ in range(2):
        process = subprocess.Popen([*COMMAND, *words, "--output", "cut"], cwd=tmp_path, env=ENVIRONMENT)
        before = set(tmp_path.glob("cut/cells/*/checkpoint-*/trainer_state.json"))
        while not set(tmp_path.glob("cut/cells/*/checkpoint-*/trainer_state.json")) - before:
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
        process.wait()
        subprocess.run(["pkill", "-KILL", "-f", f"[-]-output_dir {tmp_path}/cut"], check=True)
    compare(tmp_path, *words, "--output", "cut")
    assert logits(tmp_path / "cut") == logits(tmp_path / "whole")
    found = [json.loads(path.read_text()) for path in tmp_path.glob("cut/cells/*/results.json")]
    assert any(each["training"]["resumed"] for each in found)


@pytest.mark.deep
def test_each_training_on_two_processes(tmp_path: Path) -> None:
    launcher = f"{shlex.quote(sys.executable)} -m torch.distributed.run --nproc_per_node 2"
    sizes = "--max_train_samples 64 --max_calibration_samples 60 --max_test_samples 60 --max_length 16"
    settings = (
        "--dataset docstrings --model global_pooling_cnn --num_train_epochs 1 --use_cpu true --report_to none"
    )
    words = [str(ROOT / "recipes" / "text_classification.py"), "--launcher", launcher, "--output", "s"]
    words += f"--losses focal --seeds 0,1 --jobs 2 -- {sizes} {settings}".split()
    compare(tmp_path, *words)
    assert not [path for path in tmp_path.glob("s/cells/*/log.txt") if "FAILED" in path.read_text()]
    found = [TrainingPredictions.load(path) for path in tmp_path.glob("s/cells/*/predictions.safetensors")]
    assert [len(each.test.labels) for each in found] == [60, 60]


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
