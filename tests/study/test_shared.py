"""A study on several machines: cells that go on elsewhere, Jobs of the Hub, and places that cannot be used."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_calib.commands.compare import collect, command_lines, plan_study
from hf_calib.commands.compare import train as run
from hf_calib.study import hub_jobs
from hf_calib.study.folder import is_finished, read_plan
from hf_calib.study.grid import Cell
from hf_calib.study.hub_jobs import parse_jobs
from hf_calib.study.launch import Launch
from hf_calib.study.shared import SharedStudy
from tests.helpers.hub_server import TOKEN, Fault, Hub
from tests.helpers.places import ROOT

SCRIPT = ROOT / "tests" / "helpers" / "study_script.py"


@pytest.fixture(autouse=True)
def processes_find_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def plan(
    study: Path,
    share: object,
    *arguments: str,
    losses: str = "focal",
    script: Path = SCRIPT,
    **options: object,
) -> tuple[Launch, dict[Cell, Path]]:
    settings: dict[str, object] = {"configs": [], "grid": {}, "seeds": [0], **options}
    return plan_study(
        str(script), losses=losses.split(","), arguments=arguments, output=study, share=str(share), **settings
    )


def train(launch: Launch, cells: dict[Cell, Path]) -> list[str]:
    said: list[str] = []
    run(launch, cells, jobs=1, scheduler=None, say=said.append)
    return said


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.deep
def test_a_training_that_is_killed_goes_on_from_its_checkpoint_on_another_machine(tmp_path: Path) -> None:
    launch, cells = plan(tmp_path / "a", tmp_path / "share", "--seconds", "60")
    ((cell, folder),) = cells.items()
    (line,) = command_lines(launch, cells)
    killed = subprocess.Popen(shlex.split(line), cwd=tmp_path, start_new_session=True)
    there = tmp_path / "share" / "cells" / cell.name
    while not (there / "checkpoint-1" / "trainer_state.json").is_file():
        time.sleep(0.05)
        assert killed.poll() is None
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    shutil.rmtree(tmp_path / "a")
    launch, cells = plan(tmp_path / "b", tmp_path / "share", "--seconds", "60")
    # The same training, to its end in no time.
    quick = Launch(launch.script, (), ("--seconds", "0"), share=launch.share)
    assert train(quick, cells)[0].startswith("1 of 1: focal, seed 0 finished")
    (folder,) = cells.values()
    assert (folder / "starts.txt").read_text().split() == [str(folder / "checkpoint-1")]
    assert names_below(there) == [
        *("calibrated/model.safetensors", "cell.json", "log.txt", "predictions.safetensors", "results.json")
    ]
    # A third machine has it all without training; the model stays where it is.
    assert names_below(collect(f"file://{tmp_path}/share", tmp_path / "c")) == [
        *(
            f"cells/{cell.name}/{name}"
            for name in ("cell.json", "log.txt", "predictions.safetensors", "results.json")
        ),
        "study.json",
    ]
    launch, cells = plan(tmp_path / "c", tmp_path / "share", "--seconds", "60")
    assert train(launch, cells) == ["1 of 1 trainings are finished already"]


@pytest.mark.deep
def test_each_machine_gets_what_the_others_have_finished(tmp_path: Path) -> None:
    for machine, seed in (("a", 0), ("b", 1)):
        train(*plan(tmp_path / machine, tmp_path / "share", seeds=[seed]))
    for machine in "ab":
        study = collect(str(tmp_path / machine), None)
        found = read_plan(study)
        assert found["seeds"] == ([0] if machine == "a" else [0, 1])
    assert read_plan(tmp_path / "share")["seeds"] == [0, 1]
    launch, cells = plan(tmp_path / "a", tmp_path / "share", seeds=[0, 1])
    assert train(launch, cells) == ["2 of 2 trainings are finished already"]
    assert all(map(is_finished, cells.values()))


@pytest.mark.deep
def test_what_was_finished_before_it_was_shared_or_could_not_be_sent_is_sent(tmp_path: Path) -> None:
    launch, cells = plan_study(
        str(SCRIPT), configs=[], losses=["focal"], seeds=[0], grid={}, arguments=[], output=tmp_path / "a"
    )
    train(launch, cells)
    (cell,) = cells
    train(*plan(tmp_path / "a", tmp_path / "share"))
    assert is_finished(tmp_path / "share" / "cells" / cell.name)


@pytest.mark.deep
def test_a_place_that_holds_another_study_is_refused_before_training(tmp_path: Path) -> None:
    command_lines(*plan(tmp_path / "a", tmp_path / "share"))
    launch, cells = plan(tmp_path / "b", tmp_path / "share", "--rows", "9")
    with pytest.raises(
        ValueError, match=r"got that of another configuration, which differs in rows; name another place"
    ):
        train(launch, cells)
    assert not any(map(is_finished, cells.values()))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("share", "error"),
    [
        ("nowhere://bucket/study", "Protocol not known: nowhere"),
        ("ftp://me:hunter2@host/study", "expected --share to be an address without a password"),
        ("/proc/study", "expected /proc/study to be a place where a study can be read and written"),
    ],
)
def test_places_that_cannot_be_used(tmp_path: Path, share: str, error: str) -> None:
    with pytest.raises(ValueError, match="expected ") as raised:
        train(*plan(tmp_path / "a", share))
    assert error in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.deep
def test_results_that_were_cut_short_on_their_way_are_no_results(tmp_path: Path) -> None:
    """Of a machine that died while it sent them, and of one that died while it fetched them."""
    train(*plan(tmp_path / "a", tmp_path / "share"))
    (there,) = (tmp_path / "share" / "cells").iterdir()
    (there / "results.json").rename(there / "results.json.unfinished")
    launch, cells = plan(tmp_path / "b", tmp_path / "share")
    assert not any(map(is_finished, cells.values()))
    assert train(launch, cells)[0].startswith("1 of 1: focal, seed 0 finished")


def test_a_checkpoint_without_its_last_file_is_not_fetched(tmp_path: Path) -> None:
    share = SharedStudy(str(tmp_path / "share"))
    for step, files in ((1, ["model.bin", "trainer_state.json"]), (2, ["model.bin"])):
        checkpoint = tmp_path / "share" / "cells" / "x" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        for name in files:
            (checkpoint / name).write_text("{}")
    share.fetch_cell(tmp_path / "x")
    assert names_below(tmp_path / "x") == ["checkpoint-1/model.bin", "checkpoint-1/trainer_state.json"]
    # One as new is here.
    (tmp_path / "x" / "checkpoint-1" / "model.bin").write_text("own")
    share.fetch_cell(tmp_path / "x")
    assert (tmp_path / "x" / "checkpoint-1" / "model.bin").read_text() == "own"
    # Sent: the older ones go.
    (tmp_path / "x" / "checkpoint-1").rename(tmp_path / "x" / "checkpoint-3")
    share.send_checkpoint(tmp_path / "x" / "checkpoint-3")
    assert sorted(path.name for path in (tmp_path / "share" / "cells" / "x").iterdir()) == ["checkpoint-3"]


@pytest.mark.deep
def test_names_that_lead_out_of_the_study_are_not_fetched(tmp_path: Path) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    for name in ("checkpoint-1/trainer_state.json", "checkpoint-1/../../../../evil.txt"):
        store.store[f"/odd/cells/x/{name}"] = type(store).open(store, f"/odd/{hash(name)}", "wb")
        store.store[f"/odd/cells/x/{name}"].write(b"{}")
    SharedStudy("memory://odd").fetch_cell(tmp_path / "1" / "2" / "x")
    assert names_below(tmp_path) == ["1/2/x/checkpoint-1/trainer_state.json"]


@pytest.mark.deep
def test_seeds_of_a_loss_whose_file_has_changed_are_not_mixed(tmp_path: Path) -> None:
    loss = tmp_path / "sharp.yaml"
    for gamma, seed, machine in ((3, 0, "a"), (5, 1, "b")):
        loss.write_text(f"loss: focal\nloss_kwargs: {{gamma: {gamma}}}\n")
        command_lines(*plan(tmp_path / machine, tmp_path / "share", losses=str(loss), seeds=[seed]))
    assert read_plan(tmp_path / "share")["seeds"] == [1]
    assert read_plan(tmp_path / "b")["seeds"] == [1]


def test_a_store_in_memory(tmp_path: Path) -> None:
    """Not a folder: an address of fsspec, whose files appear whole."""
    share = SharedStudy("memory://bucket/study")
    folder = tmp_path / "x"
    (folder / "checkpoint-7").mkdir(parents=True)
    (folder / "checkpoint-7" / "trainer_state.json").write_text("{}")
    share.send_checkpoint(folder / "checkpoint-7")
    share.fetch_cell(tmp_path / "y" / "x")
    assert names_below(tmp_path / "y" / "x") == ["checkpoint-7/trainer_state.json"]
    for name in ("results.json", "predictions.safetensors"):
        (folder / name).write_text("{}")
    share.send_finished([folder], models=False)
    share.fetch_cell(tmp_path / "z" / "x")
    assert names_below(tmp_path / "z" / "x") == ["predictions.safetensors", "results.json"]


def on_machine(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs run here, with the programs of this environment and the Hub of this test."""
    hub.machine = tmp_path / "machines"
    for name, value in {
        "HF_ENDPOINT": hub.address,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hub_jobs, "_LOOK_AGAIN", 0.05)


SHARE = "hf://datasets/me/study"


@pytest.mark.deep
def test_jobs_of_the_hub_train_and_leave_their_results(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(hub, tmp_path, monkeypatch)
    script = tmp_path / "recipe.py"
    shutil.copy(SCRIPT, script)
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n")
    loss = tmp_path / "sharp.yaml"
    loss.write_text("loss: focal\nloss_kwargs: {gamma: 5}\ngamma_update_steps: 10\n")
    launch, cells = plan(
        tmp_path / "a", SHARE, "--rows", str(rows), "--fails", "brier", losses=f"{loss},brier", script=script
    )
    said: list[str] = []
    run(launch, cells, jobs=1, scheduler=None, hub={"flavor": "t4-small"}, say=said.append)
    sharp, brier = cells.values()
    assert is_finished(sharp), said
    assert not is_finished(brier)
    assert said[0] == "submitted 2 Jobs: job0, job1"
    assert "brier, seed 0 FAILED: http" in "".join(said)
    assert "ended as ERROR; its last lines:" in "".join(said)
    assert "no such column" in "".join(said)
    # In a repository that nobody else sees, and without the token.
    assert [(each["name"], each["type"], each["visibility"]) for each in hub.created] == [
        ("study", "dataset", "private")
    ]
    spec = hub.jobs["job0"].spec
    assert (spec["flavor"], spec["timeoutSeconds"]) == ("t4-small", 12 * 3600)
    assert spec["secrets"] == {"HF_TOKEN": TOKEN}
    assert TOKEN not in json.dumps({**spec, "secrets": None})
    # The files of this machine went there.
    (started,) = (hub.machine or tmp_path).glob("job0/inputs/*/rows.csv")
    assert started.read_text() == rows.read_text()
    # Again: what failed is tried again, the rest is there.
    said.clear()
    run(launch, cells, jobs=1, scheduler=None, hub={"flavor": "t4-small"}, say=said.append)
    assert said[0] == "submitted 1 Jobs: job2"
    assert hub.unknown == []


@pytest.mark.deep
def test_jobs_that_run_are_waited_for_and_not_started_twice(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(hub, tmp_path, monkeypatch)
    launch, cells = plan(tmp_path / "a", SHARE, "--seconds", "4")

    class StoppedError(Exception):
        pass

    def interrupted(_: str) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        run(launch, cells, jobs=1, scheduler=None, hub={"flavor": "cpu-basic"}, say=interrupted)
    said: list[str] = []
    run(launch, cells, jobs=1, scheduler=None, hub={"flavor": "cpu-basic"}, say=said.append)
    assert said[0] == "1 Jobs of an earlier call run still; waiting for them"
    assert len(hub.jobs) == 1
    assert all(map(is_finished, cells.values()))


@pytest.mark.deep
def test_what_would_be_started_is_printed_and_nothing_is_sent(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, cells = plan(tmp_path / "a", SHARE, "--hub_token", "hf_secret")
    (line,) = command_lines(launch, cells, {"flavor": "a10g-small", "attempts": 3})
    words = shlex.split(line)
    assert words[:7] == ["hf", "jobs", "run", "--flavor", "a10g-small", "--timeout", "12h"]
    assert words[7:11] == ["--attempts", "3", "--secrets", "HF_TOKEN"]
    assert words[-4:-1] == ["python:3.12", "bash", "-c"]
    assert words[-1].startswith("pip install --quiet hf_calib==")
    assert '"$HF_TOKEN"' in words[-1]
    assert "hf_secret" not in line
    assert not hub.created
    assert not hub.jobs


@pytest.mark.deep
def test_a_file_of_this_machine_in_a_yaml_file_is_named_before_a_job_starts(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\n")
    config = tmp_path / "mine.yaml"
    config.write_text(f"train_file: {tmp_path}/rows.csv\n")
    launch, cells = plan(tmp_path / "a", SHARE, configs=[str(config)])
    with pytest.raises(
        ValueError, match=r"mine\.yaml to name no files of this machine, got train_file: .*rows\.csv"
    ):
        run(launch, cells, jobs=1, scheduler=None, hub={"flavor": "t4-small"}, say=print)
    assert not hub.jobs


@pytest.mark.deep
def test_a_flavor_that_the_hub_refuses(hub: Hub, tmp_path: Path) -> None:
    launch, cells = plan(tmp_path / "a", SHARE)
    hub.fault = lambda number, method, path: (
        Fault(402, json.dumps({"error": "Pre-paid credit balance is insufficient"}))
        if path.startswith("/api/jobs") and method == "POST"
        else None
    )
    with pytest.raises(ValueError, match=r"expected --hf-jobs to start Jobs on the Hub, got .*insufficient"):
        run(launch, cells, jobs=1, scheduler=None, hub={"flavor": "t4-small"}, say=print)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "be a flavor or a JSON object"),
        ('{"timeout": "3h"}', "name a flavor"),
        ('{"flavour": "t4-small"}', "did you mean 'flavor'"),
    ],
)
def test_parameters_of_jobs(text: str, error: str) -> None:
    with pytest.raises(ValueError, match="--hf-jobs") as raised:
        parse_jobs(text)
    assert error in str(raised.value)
