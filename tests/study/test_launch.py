"""The trainings of a study as processes: side by side, killed, resumed, failed, and never trained twice."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from hf_calib.commands.compare_losses import planned
from hf_calib.commands.compare_losses import train as run
from hf_calib.commands.options import CompareLosses
from hf_calib.study.launch import Launch, Local, Submitit, environments, printed
from hf_calib.study.plan import Cell, is_finished, mark_failed, read_plan, recorded
from hf_calib.trainer.saving import newest_checkpoint
from tests.helpers.places import ROOT

SCRIPT = ROOT / "tests" / "helpers" / "study_script.py"
# hf_calib from this checkout, in the processes of a study too.
HERE = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def processes_find_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HERE.items():
        monkeypatch.setenv(name, value)


def plan(
    study: Path,
    *arguments: str,
    losses: str = "cross_entropy,focal",
    seeds: tuple[int, ...] = (0,),
    launcher: str | None = None,
) -> tuple[Launch, dict[Cell, Path]]:
    own: Any = {
        "losses": losses,
        "seeds": ",".join(map(str, seeds)),
        "launcher": launcher,
    }
    return planned(
        CompareLosses(source=str(SCRIPT), words=[*arguments], output=study, **own)
    )


def train(
    study: Path, *arguments: str, jobs: int = 1, **options: Any
) -> tuple[list[str], dict[str, str]]:
    """Standard output, and the reasons of failures."""
    said: list[str] = []
    launch, cells = plan(study, *arguments, **options)
    failed = Local(jobs)(launch, cells, said.append)
    return said, {cell.variant.label: reason for cell, reason in failed.items()}


def command_lines(launch: Launch, cells: dict[Cell, Path]) -> list[str]:
    said: list[str] = []
    assert printed(launch, cells, said.append) == {}
    return said


def starts(study: Path) -> dict[str, list[str]]:
    """How often each cell was started, and from which checkpoint."""
    files = sorted(study.glob("cells/*/starts.txt"))
    return {
        path.parent.name.rpartition("-")[0]: path.read_text().split() for path in files
    }


@pytest.mark.slow
def test_what_is_finished_is_not_trained_again_and_losses_and_seeds_are_added(
    tmp_path: Path,
) -> None:
    said, failed = train(tmp_path / "s", jobs=2)
    assert not failed
    assert [re.sub(r"in .*", "in", line) for line in said[:2]] == [
        "cross_entropy, seed 0 started; its output is in",
        "focal, seed 0 started; its output is in",
    ]
    assert said[2].startswith("1 of 2: ")
    assert said[3].startswith("2 of 2: ")
    said, _ = train(tmp_path / "s", losses="focal,brier", seeds=(0, 1), jobs=3)
    assert said[0] == "1 of 4 runs finished earlier"
    names = [
        "brier-seed0",
        "brier-seed1",
        "cross_entropy-seed0",
        "focal-seed0",
        "focal-seed1",
    ]
    assert starts(tmp_path / "s") == {name: ["None"] for name in names}
    recorded = read_plan(tmp_path / "s")
    assert (recorded["losses"], recorded["seeds"]) == (
        ["cross_entropy", "focal", "brier"],
        [0, 1],
    )
    assert len(recorded["cells"]) == 5


def test_a_printed_command_shows_no_token(tmp_path: Path) -> None:
    words = (
        "--hub_token",
        "hf_secret",
        "--push-token=hf_other",
        "--env",
        "HF_TOKEN=hf_third",
    )
    launch, cells = plan(tmp_path / "s", *words, losses="focal")
    (line,) = command_lines(launch, cells)
    assert (
        '--hub_token "$HF_TOKEN" --push-token="$HF_TOKEN" --env HF_TOKEN="$HF_TOKEN" --loss'
        in line
    )
    written = "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    for token in (
        "hf_secret",
        "hf_other",
        "hf_third",
    ):  # of the clone's path, "hf_" is a part, too
        assert token not in line + written
    assert launch.command(*next(iter(cells.items()))).count("hf_secret") == 1


def test_a_study_speaks_before_its_first_run_ends(tmp_path: Path) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        raise KeyboardInterrupt  # The first run has only begun.

    launch, cells = plan(tmp_path / "s", "--seconds", "60")
    with pytest.raises(KeyboardInterrupt):
        Local(1)(launch, cells, say)
    log = next(iter(cells.values())) / "log.txt"
    assert said == [f"cross_entropy, seed 0 started; its output is in {log}"]


@pytest.mark.slow
def test_a_failure_is_reported_and_stops_no_other(tmp_path: Path) -> None:
    arguments = ("--fails", "focal", "--silent", "brier")
    said, failed = train(tmp_path, *arguments, losses="focal,brier,cross_entropy")
    assert set(failed) == {"focal", "brier"}
    assert (
        failed["focal"]
        == "exit status 1; its last lines:\nstep 1\nstep 2\nno such column, threads 1"
    )
    assert (
        "ended without results.json and predictions.safetensors. Let it end with"
        in failed["brier"]
    )
    assert said[-1].startswith("1 of 3, 2 failed: cross_entropy, seed 0 finished in ")
    folders = {
        path.name.rpartition("-")[0]: path for path in (tmp_path / "cells").iterdir()
    }
    assert recorded(folders["focal-seed0"] / "failed.json", "reason") == failed["focal"]
    _, failed = train(
        tmp_path, *arguments, losses="focal"
    )  # tried again, from its checkpoint
    assert starts(tmp_path)["focal-seed0"][1].endswith("checkpoint-2")


@pytest.mark.slow
def test_a_killed_training_says_so(tmp_path: Path) -> None:
    launch, cells = plan(tmp_path, "--seconds", "60", losses="focal")
    ((cell, folder),) = cells.items()
    process = launch.start(cell, folder, {})
    assert process is not None
    assert launch.start(cell, folder, {}) is None  # another study waits
    while not (folder / "log.txt").read_text():
        time.sleep(0.05)
    process.kill()
    reason = launch.finish(folder, process.wait())
    assert reason == "killed by signal 9; its last lines:\nstep 1"
    assert recorded(folder / "failed.json", "reason") == reason


def study_process(study: Path, seconds: str) -> subprocess.Popen[bytes]:
    """A study in a process of its own, as the command runs it."""
    code = (
        "import sys; from pathlib import Path; from tests.study.test_launch import train; "
        "train(Path(sys.argv[1]), '--seconds', sys.argv[2], jobs=2)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, study, seconds], cwd=ROOT, stderr=subprocess.PIPE
    )
    while len(starts(study)) < 2:
        assert process.poll() is None, process.stderr.read()  # type: ignore[union-attr]
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_ctrl_c_ends_the_trainings_and_they_go_on_from_their_checkpoints(
    tmp_path: Path,
) -> None:
    process = study_process(tmp_path, "60")
    process.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in process.communicate(timeout=30)[1]
    _, cells = plan(tmp_path, "--seconds", "60")
    assert [
        Path(newest_checkpoint(folder, cell.variant.loss) or "").name
        for cell, folder in cells.items()
    ] == ["checkpoint-1"] * 2
    assert not any(is_finished(folder) for folder in cells.values())
    assert not subprocess.run(
        ["pgrep", "-f", f"[-]-output_dir.{tmp_path}"], capture_output=True
    ).stdout


def test_a_command_has_the_launchers_words_and_the_newest_whole_checkpoint(
    tmp_path: Path,
) -> None:
    launch, cells = plan(tmp_path, losses="focal", launcher="true --name 'a b'")
    ((cell, folder),) = cells.items()
    assert launch.command(cell, folder)[:4] == ["true", "--name", "a b", str(SCRIPT)]
    for name in ("checkpoint-5", "checkpoint-10"):
        (folder / name).mkdir()
    assert "--resume_from_checkpoint" not in launch.command(cell, folder)
    state = TrainerState(stateful_callbacks=[TrainerControl()])
    state.global_step = 5
    state.max_steps = 5
    state.save_to_json(str(folder / "checkpoint-5" / "trainer_state.json"))
    assert launch.command(cell, folder)[-1] == str(folder / "checkpoint-5")
    mark_failed(folder, "of an earlier try")
    process = launch.start(cell, folder, {})
    assert process is not None
    assert not (folder / "failed.json").exists()
    assert process.wait() == 0


@pytest.mark.slow
def test_the_printed_commands_train_the_study(tmp_path: Path) -> None:
    python = f"{shlex.quote(sys.executable)} -X dev"
    launch, cells = plan(tmp_path / "a study", launcher=python)
    lines = command_lines(launch, cells)
    assert all(
        line.startswith(f"{python} {shlex.quote(str(SCRIPT))} --loss ")
        for line in lines
    )
    for line in lines:
        subprocess.run(line, shell=True, check=True, env={**os.environ, **HERE})
    assert command_lines(launch, cells) == []
    assert list(tmp_path.glob("a study/cells/*/checkpoint-*"))
    assert Local()(launch, cells, lambda line: None) == {}
    assert not list(tmp_path.glob("a study/cells/*/checkpoint-*"))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(
        ValueError, match=r"to be new, or have a study.json, got .* name a new folder"
    ):
        plan(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("visible", "jobs", "launcher", "own"),
    [
        ("0,1,2,3", 2, None, ["0", "1"]),
        ("4,5", 3, None, ["4", "5", "4"]),
        ("0,1", 1, None, [None]),
        ("", 2, None, [None, None]),
        ("0,1,2,3", 2, "torchrun --nproc_per_node 2", ["0,2", "1,3"]),
    ],
)
def test_gpus_threads_and_ports_are_shared_out(
    visible: str,
    jobs: int,
    launcher: str | None,
    own: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("OMP_NUM_THREADS")
    made: list[Mapping[str, str]] = [
        *environments(jobs, Launch(SCRIPT, launcher=launcher))
    ]
    assert [environment.get("CUDA_VISIBLE_DEVICES") for environment in made] == own
    n_threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    assert {environment["OMP_NUM_THREADS"] for environment in made} == {str(n_threads)}
    ports = {
        environment["MASTER_PORT"]
        for environment in made
        if "MASTER_PORT" in environment
    }
    assert len(ports) == (0 if launcher is None else jobs)
    # Outside of what systems give to connections, which would take them before a training begins.
    assert all(20_000 <= int(port) < 30_000 for port in ports)


@pytest.mark.slow
# submitit does not wait for the processes of its local executor.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function Popen:pytest.PytestUnraisableExceptionWarning"
)
def test_jobs_of_submitit(tmp_path: Path) -> None:
    said: list[str] = []
    launch, cells = plan(tmp_path, "--fails", "focal")
    failed = Submitit({"cluster": "local", "timeout_min": 2})(
        launch, cells, said.append
    )
    assert [reason.splitlines()[-1] for reason in failed.values()] == [
        "no such column, threads 1"
    ]
    assert said[0].startswith("submitted 2 jobs: ")
    assert said[-1].startswith("1 of 2, 1 failed")
    with pytest.raises(
        ValueError, match="expected --submitit to hold parameters of submitit"
    ):
        Submitit({"cluster": "local", "gpus": 3})(launch, cells, said.append)


def test_a_script_that_has_changed_is_named_and_trains_nothing_again(
    tmp_path: Path,
) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT.read_text())
    said: list[str] = []
    for _ in range(2):
        launch, cells = planned(
            CompareLosses(
                source=str(script), losses="focal", seeds="0", output=tmp_path / "s"
            )
        )
        run(launch, cells, Local(), say=said.append)
        script.write_text(SCRIPT.read_text() + "# edited\n")
    assert said[1].startswith("1 of 1: focal, seed 0 finished")
    assert said[2].startswith(
        "mine.py has changed since it trained 1 of these 1. Finished runs are not"
    )
    assert said[3] == "1 of 1 run finished earlier"
    assert starts(tmp_path / "s") == {"focal-seed0": ["None"]}
