"""The recipe that compares losses: its plan, its runs as processes, its numbers and its table."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from compare_losses import (
    Study,
    measure,
    notes,
    parse,
    places,
    plan,
    read_loss,
    report,
    table_of,
    train,
)
from numpy.typing import NDArray
from paired import corrected, pooled_variance, two_level
from scipy import stats
from scipy.special import softmax

from hf_calib.metrics import CalibrationState, expected_calibration_error
from hf_calib.predictions.training import TrainingPredictions
from hf_calib.scaling import PerLabelTemperatureScaling, TemperatureScaling
from tests.helpers.places import ROOT
from tests.helpers.studies import Task, write_study
from tests.helpers.unchecked import unchecked
from tests.recipes.test_recipes import run

SCRIPT = ROOT / "tests" / "recipes" / "study_script.py"


# The plan


def planned(output: Path, *words: str, losses: str = "focal", seeds: str = "0") -> Any:
    """The runs of a command line."""
    own = ["--losses", *losses.split(), "--seeds", *seeds.split()]
    return plan(parse([str(SCRIPT), *own, "--output", str(output), *words]))


def test_losses_by_name_by_file_by_a_recipes_file_and_with_hyperparameters(
    tmp_path: Path,
) -> None:
    assert read_loss("focal") == ("focal", ["--loss", "focal", "--loss_kwargs={}"])
    name, words = read_loss("focal_calibration:gamma=1,brier_weight=0.5")
    assert name == "focal_calibration:gamma=1,brier_weight=0.5"
    assert json.loads(words[-1].partition("=")[2]) == {"gamma": 1, "brier_weight": 0.5}
    own = tmp_path / "mine.yaml"
    own.write_text("loss: focal\nloss_kwargs: {gamma: 2}\n")
    # Nothing that the script needs to read.
    assert read_loss(str(own))[1][0] == "--loss"
    own.write_text("loss: adafocal\ngamma_update_steps: 10\n")
    assert read_loss(str(own)) == (
        "mine",
        ["--config", str(own), "--loss", "adafocal", "--loss_kwargs={}"],
    )
    name, words = read_loss("adafocal_every_10_steps")
    assert name == "adafocal_every_10_steps"
    assert Path(words[1]).name == "adafocal_every_10_steps.yaml"
    name, words = read_loss("mmce.yaml")
    assert name == "mmce"
    assert json.loads(words[-1].partition("=")[2])["authors_code"] is True


REFUSED: dict[str, tuple[str, ...]] = {
    "or YAML files, got 'focl'; did you mean 'focal'?": ("--losses", "focl"),
    "expected losses to differ, got focal twice": ("--losses", "focal", "focal"),
    "gama": ("--losses", "focal:gama=1"),
    "expected a loss as focal:gamma=1, got 'focal:gamma'": ("--losses", "focal:gamma"),
    "expected seeds to differ, from 0": ("--seeds", "1", "1"),
    "expected a baseline of the losses, got brier": ("--baseline", "brier"),
    "leave this to the study, got --loss; use the study's option": (
        "--",
        "--loss",
        "focal",
    ),
    "leave this to the study, got --loss-kwargs={}": ("--", "--loss-kwargs={}"),
    "got --seed; use the study's option before the --": ("--", "--seed", "1"),
    "got --resume; use the study's option before the --; interrupted runs resume": (
        "--",
        "--resume",
        "true",
    ),
    "which jobs store, got --hub_token; set HF_TOKEN": ("--", "--hub_token", "hf_x"),
    "to hold no secret, which jobs store, got --api-key": ("--", "--api-key=x"),
    "to hold no secret, which jobs store, got HF_TOKEN": (
        *("--", "--env", "HF_TOKEN=hf_x"),
    ),
    "existing YAML file, got": ("--config", "missing.yaml"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        planned(tmp_path / "study", *REFUSED[message])
    assert not (tmp_path / "study").exists()


def test_a_script_that_is_none_and_a_folder_of_something_else_are_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="--output to be new or a study, got"):
        planned(tmp_path)
    for script in ("missing.py", str(tmp_path / "thesis.tex")):
        words = [script, "--losses", "focal", "--output", str(tmp_path / "s")]
        with pytest.raises(ValueError, match=r"to be a \.py or an executable"):
            plan(parse(words))
    config = tmp_path / "c.yaml"
    config.write_text("resume_from_checkpoint: somewhere\n")
    with pytest.raises(ValueError, match="to leave this to the study, got resume_from"):
        planned(tmp_path / "s", "--config", str(config))


def test_a_run_of_other_arguments_is_refused_and_one_of_the_same_is_not(
    tmp_path: Path,
) -> None:
    data = tmp_path / "train.csv"
    model = tmp_path / "model"
    model.mkdir()
    for path in (data, model / "model.safetensors"):
        path.write_text("1")
    words = ("--", "--train_file", str(data), f"--model={model}", "--rate", "0.1")
    (run,) = planned(tmp_path / "s", *words)
    run.folder.mkdir(parents=True)
    record = {"loss": "focal", "seed": 0, "arguments": run.arguments}
    (run.folder / "run.json").write_text(json.dumps(record))
    assert planned(tmp_path / "s", *words, losses="focal brier")[0] == run
    # What a file or a folder holds counts, and not when it was written.
    data.write_text("1")
    assert planned(tmp_path / "s", *words) == [run]
    other = "to have the same arguments, got "
    with pytest.raises(ValueError, match=other + r"0\.1, 0\.2; name another --output"):
        planned(tmp_path / "s", *words[:-1], "0.2")
    (model / "model.safetensors").write_text("2")
    with pytest.raises(ValueError, match=other + "--model=model"):
        planned(tmp_path / "s", *words)
    (model / "model.safetensors").write_text("1")
    data.write_text("2")
    with pytest.raises(ValueError, match=other + r"train\.csv"):
        planned(tmp_path / "s", *words)
    (run.folder / "run.json").unlink()
    (run.folder / "results.json").write_text("{}")
    with pytest.raises(ValueError, match=other + "no record of them"):
        planned(tmp_path / "s", *words)


@pytest.mark.parametrize(
    ("visible", "jobs", "script", "own"),
    [
        ("0,1,2,3", 2, "a.py", ["0", "1"]),
        ("4,5", 3, "a.py", ["4", "5", "4"]),
        ("", 2, "a.py", ["", ""]),
        ("0,1", 1, "torchrun.sh", ["0,1"]),
    ],
)
def test_gpus_and_threads_are_shared_out(
    visible: str,
    jobs: int,
    script: str,
    own: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = places(Namespace(slurm=None, jobs=jobs, script=Path(script)), 9)
    assert [place.get("CUDA_VISIBLE_DEVICES") for place in found] == own
    n_threads = str(max(1, (os.cpu_count() or 1) // jobs))
    assert {place["OMP_NUM_THREADS"] for place in found} == {n_threads}
    of_slurm = Namespace(slurm=["timeout_min=9"], jobs=1, script=Path(script))
    assert places(of_slurm, 3) == [{}, {}, {}]


# The runs


def words_of(output: Path, words: str, script: Path = SCRIPT) -> list[str]:
    own, _, of_script = words.partition(" -- ")
    own_words = [*own.split(), "--output", str(output)]
    own_words += ["--calibrators", "temperature"]
    return [str(script), *own_words, "--", *of_script.split()]


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes find this checkout; the recipe's signals stay in the test."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def starts(study: Path) -> dict[str, list[str]]:
    """By run: from which checkpoint each start was."""
    files = sorted(study.glob("runs/*/starts.txt"))
    return {path.parent.name: path.read_text().split() for path in files}


def started(study: Path, words: str) -> subprocess.Popen[bytes]:
    """A study in a process of its own, once its two runs have a checkpoint."""
    recipe = [sys.executable, str(ROOT / "recipes" / "compare_losses.py")]
    with open(study / "said", "wb") as said:
        command = [*recipe, *words_of(study / "s", words)]
        process = subprocess.Popen(command, stderr=said)
    while len(list(study.glob("s/runs/*/checkpoint-1/trainer_state.json"))) < 2:
        assert process.poll() is None, (study / "said").read_text()
        time.sleep(0.05)
    return process


def training_processes(study: Path) -> list[str]:
    """The scripts that a study has started and that still run."""
    pattern = f"study_script.*--output_dir {study}"
    found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, check=False)
    return found.stdout.decode().split()


@pytest.mark.slow
def test_a_study_from_its_first_minute_to_its_table_and_on_with_more_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "a study"
    words = "--losses cross_entropy focal --seeds 0 1 --jobs 2 -- --fails focal"
    run("compare_losses.py", *words_of(study, words))
    table, progress = capsys.readouterr()
    said = [re.sub(r"^\S+ ", "", line) for line in progress.splitlines()]
    assert said[0] == "0 of 4 runs are finished"
    assert said[1].startswith("cross_entropy, seed 0 started; its output is in ")
    # One that fails stops no other.
    assert progress.count("FAILED: exit status 1") == 2
    assert "focal, seed 0 is missing: exit status 1" in table
    assert "no such column" in table
    found = pandas.read_csv(study / "results.csv", keep_default_na=False)
    assert set(found["loss"]) == {"cross_entropy"}
    assert set(found["method"]) == {"none", "temperature"}
    # Its checkpoints are gone, and its model is there.
    assert not list(study.glob("runs/cross_entropy*/checkpoint-*"))
    assert list(study.glob("runs/cross_entropy*/calibrated"))
    words = words.replace("focal --seeds", "brier --delete_models --seeds")
    run("compare_losses.py", *words_of(study, words))
    table, progress = capsys.readouterr()
    assert "2 of 4 runs are finished" in progress
    assert not list(study.glob("runs/brier*/calibrated"))
    times = starts(study)
    # A run that failed is tried again only if it is asked for.
    assert set(map(len, times.values())) == {1}
    assert len(times) == 6
    record = json.loads((study / "report.json").read_text(), parse_constant=pytest.fail)
    assert record["losses"] == ["cross_entropy", "brier"]
    assert len(record["differences"]) == 2 * 4
    assert (study / "table.txt").read_text() == table
    # Other calibrators need no further run.
    own = words_of(study, words.replace("--jobs 2", "--jobs 0"))
    own[own.index("temperature")] = "vector"
    run("compare_losses.py", *own)
    assert re.search(r"^ *vector +brier ", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(SystemExit, match="expected the run in "):
        run(
            "compare_losses.py", *words_of(study, "--losses cross_entropy -- --fails x")
        )


@pytest.mark.slow
def test_an_interrupted_study_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    words = "--losses cross_entropy focal --seeds 0 --jobs 2 -- --seconds 6"
    process = started(tmp_path, words)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    said = (tmp_path / "said").read_text()
    assert said.endswith("interrupted; the same command goes on\n")
    assert training_processes(tmp_path) == []
    run("compare_losses.py", *words_of(tmp_path / "s", words))
    for first, second in starts(tmp_path / "s").values():
        assert first == "None"
        assert Path(second).name == "checkpoint-1"


@pytest.mark.slow
def test_after_a_kill_no_run_is_trained_twice(tmp_path: Path) -> None:
    words = "--losses cross_entropy focal --seeds 0 --jobs 2 -- --seconds 20"
    process = started(tmp_path, words)
    process.kill()
    process.wait()
    # The runs go on without it; the second call waits for them.
    assert len(training_processes(tmp_path)) == 2
    run("compare_losses.py", *words_of(tmp_path / "s", words))
    assert set(map(len, starts(tmp_path / "s").values())) == {1}


@pytest.mark.slow
def test_an_executable_starts_the_script_and_a_run_that_is_killed_says_so(
    tmp_path: Path,
) -> None:
    program = tmp_path / "torchrun.sh"
    program.write_text(f'#!/bin/sh\nkill -9 $$\nexec {sys.executable} {SCRIPT} "$@"\n')
    program.chmod(0o755)
    words = words_of(tmp_path / "s", "--losses focal --seeds 0", program)
    killed = r"no run could be measured:\nfocal, seed 0: killed by signal 9"
    with pytest.raises(SystemExit, match=killed):
        run("compare_losses.py", *words)
    program.write_text(program.read_text().replace("kill -9 $$\n", ""))
    run("compare_losses.py", *words)
    assert starts(tmp_path / "s") == {"focal-seed0": ["None"]}


def test_without_slurm_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    words = words_of(tmp_path / "s", "--losses focal --slurm slurm_partition=gpu")
    args = parse(words)
    with pytest.raises(ValueError, match="--slurm to hold parameters of a cluster"):
        train(args, plan(args))
    assert not (tmp_path / "s" / "runs").exists()


# The numbers

TASK = Task()
LOSSES = {"cross_entropy": 2.0, "focal": 0.6}
TRAININGS = {
    (loss, seed): TASK.train(100 * i + seed, sharpness=sharpness)
    for i, (loss, sharpness) in enumerate(LOSSES.items())
    for seed in (0, 1, 2)
}


def studied(
    folder: Path,
    trainings: Any,
    *,
    calibrators: tuple[str, ...] = ("none",),
    pooled: bool = False,
    n_asked: int = 2,
) -> tuple[Study, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compare_losses.RESAMPLES", (50, 50))
        numbers, about = measure(write_study(folder, trainings), calibrators, {})
    return Study(numbers, "cross_entropy", pooled, n_asked), about


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("study")
    return studied(folder, TRAININGS, calibrators=("none", "temperature"))[0]


def values(of: Study) -> dict[tuple[Any, ...], float]:
    """(loss, seed, calibrator, metric) -> value."""
    columns = ["loss", "seed", "method", "metric"]
    return of.numbers.set_index(columns)["value"].to_dict()


def rows(table: pandas.DataFrame) -> dict[Any, Any]:
    """(loss, calibrator, metric) -> its row."""
    by_key = table.set_index(["loss", "method", "metric"])
    return {row.Index: row for row in by_key.itertuples()}


def probabilities(loss: str, seed: int, calibrator: str) -> NDArray[np.float64]:
    training = TRAININGS[loss, seed]
    logits = training.test.logits.astype(np.float64)
    if calibrator == "none":
        return softmax(logits, axis=1)
    held_out = training.calibration
    assert held_out is not None
    fitted = TemperatureScaling().fit(held_out.logits, held_out.labels)
    return fitted.predict_proba(logits)


@pytest.mark.parametrize("calibrator", ["none", "temperature"])
def test_values_are_the_metrics_of_each_run(study: Study, calibrator: str) -> None:
    for (loss, seed), training in TRAININGS.items():
        probs = probabilities(loss, seed, calibrator)
        labels = training.test.labels
        expected = {
            "nll": -np.log(probs[np.arange(len(labels)), labels]).mean(),
            "accuracy": (probs.argmax(axis=1) == labels).mean(),
            "brier": ((probs - np.eye(3)[labels]) ** 2).sum(axis=1).mean(),
            "ece": expected_calibration_error(probs, labels, n_bins=15),
        }
        for metric, value in expected.items():
            found = values(study)[loss, seed, calibrator, metric]
            assert found == pytest.approx(value, abs=1e-9), metric


def test_means_and_differences_are_those_of_a_bootstrap_by_hand(study: Study) -> None:
    def of_rows(loss: str, calibrator: str) -> NDArray[np.float64]:
        each = [
            probabilities(loss, seed, calibrator)[np.arange(300), TASK.labels[:300]]
            for seed in (0, 1, 2)
        ]
        return -np.log(np.stack(each, axis=1))

    # The same rows for all runs.
    drawn = np.random.default_rng(0).integers(0, 300, (50, 300))

    def interval(losses: NDArray[np.float64]) -> tuple[float, float, float]:
        means = losses.mean(axis=0)
        noise = losses[drawn].mean(axis=1) - losses[drawn].mean(axis=1).mean(axis=0)
        of_rows_alone = noise.mean(axis=1).var(ddof=1)
        within = noise.var(axis=1, ddof=1).mean()
        z, t = stats.norm.isf(0.025), stats.t.isf(0.025, 2)
        of_both = (
            z**2 * max(0, of_rows_alone - within / 3) + t**2 * means.var(ddof=1) / 3
        )
        reach = np.sqrt(max(of_both, z**2 * of_rows_alone))
        return means.mean(), means.mean() - reach, means.mean() + reach

    for loss, calibrator in product(LOSSES, ("none", "temperature")):
        mean = rows(study.means())[loss, calibrator, "nll"]
        expected = interval(of_rows(loss, calibrator))
        assert mean[1:5] == pytest.approx((*expected, 3), abs=1e-8)
    for calibrator in ("none", "temperature"):
        # Under the same calibrator.
        apart = of_rows("focal", calibrator) - of_rows("cross_entropy", calibrator)
        difference = rows(study.differences())["focal", calibrator, "nll"]
        assert difference[1:4] == pytest.approx(interval(apart), abs=1e-8)
    assert {loss for loss, _, _ in rows(study.differences())} == {"focal"}


def test_p_is_corrected_for_all_that_was_asked_of_a_metric(study: Study) -> None:
    for n_asked in (2, 7):
        found = replace(study, n_asked=n_asked).differences()
        assert set(found["metric"]) == {"nll", "accuracy", "brier", "ece_debiased"}
        for _, own in found.groupby("metric"):
            expected = corrected(own["p"].tolist(), n_asked).tolist()
            assert own["p_corrected"].tolist() == expected
    # A temperature does not change the accuracy.
    accuracy = found[found["metric"] == "accuracy"]["value"]
    assert accuracy.nunique() == 1


def test_a_pooled_variance_is_that_of_all_losses(tmp_path: Path) -> None:
    brier = {("brier", seed): TASK.train(200 + seed) for seed in (0, 1, 2)}
    of, _ = studied(tmp_path, {**TRAININGS, **brier}, pooled=True)
    nll = of.numbers[of.numbers["metric"] == "nll"]
    table = nll.pivot(index="seed", columns="loss", values="value")
    draws = nll.pivot(index="seed", columns="loss", values="draws")
    pooled = pooled_variance(table)
    assert pooled is not None
    assert pooled.degrees == 4
    for loss in ("focal", "brier"):
        change = table[loss] - table["cross_entropy"]
        drawn = draws[loss] - draws["cross_entropy"]
        assert of.spreads("nll")[loss, "none"] == two_level(change, drawn, pooled)
        own = replace(of, pooled=False).spreads("nll")[loss, "none"]
        assert own == two_level(change, drawn)


def test_seeds_are_paired_where_both_losses_have_them(tmp_path: Path) -> None:
    trainings = {("focal", seed): TASK.train(seed, sharpness=0.6) for seed in (1, 2, 3)}
    trainings |= {("cross_entropy", seed): TASK.train(100 + seed) for seed in (0, 1, 2)}
    of, _ = studied(tmp_path, trainings)
    nll = values(of)
    by_hand = [
        nll["focal", s, "none", "nll"] - nll["cross_entropy", s, "none", "nll"]
        for s in (1, 2)
    ]
    difference = rows(of.differences())["focal", "none", "nll"]
    assert difference.value == pytest.approx(np.mean(by_hand))
    assert difference.n_seeds == 2


def test_one_common_seed_of_several_is_no_comparison(tmp_path: Path) -> None:
    """Its p would be of the test rows alone; the loss counts in the family as one that was asked."""
    trainings = {key: TRAININGS[key] for key in TRAININGS if key[0] == "cross_entropy"}
    trainings |= {("focal", 2): TRAININGS["focal", 2]}
    trainings |= {("brier", seed): TASK.train(300 + seed) for seed in (0, 1)}
    of, about = studied(tmp_path, trainings)
    assert set(of.differences()["loss"]) == {"brier"}
    assert set(of.means()["loss"]) == {"cross_entropy", "focal", "brier"}
    p = rows(of.differences())["brier", "none", "nll"]
    assert p.p_corrected == pytest.approx(min(1, 2 * p.p))
    table = table_of(of, of.means(), of.differences())
    assert table.set_index("loss").loc["focal"].tolist()[-1] == ""
    assert "paired over test rows and seeds" in " ".join(notes(of, about))


def test_with_one_seed_the_table_is_of_the_test_rows(tmp_path: Path) -> None:
    one = {key: TRAININGS[key] for key in TRAININGS if key[1] == 0}
    of, about = studied(tmp_path, one)
    assert len(of.differences()) == 4
    assert "over the test rows of one seed" in " ".join(notes(of, about))


def test_runs_that_cannot_be_compared_are_missing(tmp_path: Path) -> None:
    one = TRAININGS["focal", 1]
    test = one.test
    diverged = test.logits.copy()
    diverged[3, 1] = np.nan

    def with_test(logits: Any, labels: Any) -> TrainingPredictions:
        names = tuple(f"class {c}" for c in range(3))
        return TrainingPredictions(unchecked(logits, labels, class_names=names), None)

    others = "its test rows or classes are not those of most other runs"
    bad = {
        1: (with_test(diverged, test.labels), "got nan in row 3"),
        2: (with_test(test.logits, test.labels[::-1]), others),
        3: (with_test(test.logits[:-1], test.labels[:-1]), others),
        4: (None, "not finished"),
    }
    good = {("cross_entropy", s): TRAININGS["cross_entropy", s] for s in (0, 1)}
    good |= {("focal", 0): TRAININGS["focal", 0]}
    broken = {("focal", s): predictions for s, (predictions, _) in bad.items()}
    of, about = studied(tmp_path, {**good, **broken})
    assert set(about["missing"]) == {f"focal, seed {s}" for s in bad}
    for s, (_, why) in bad.items():
        assert why in about["missing"][f"focal, seed {s}"]
    assert len(of.numbers.groupby(["loss", "seed"])) == 3
    said = notes(of, about)
    assert f"focal, seed 2 is missing: {others}" in said


def test_a_file_that_is_cut_short_is_missing_and_without_any_run_there_is_no_table(
    tmp_path: Path,
) -> None:
    runs = write_study(tmp_path, {("focal", 2): TRAININGS["focal", 0]})
    (tmp_path / "runs/focal-seed2/predictions.safetensors").write_bytes(b"cut short")
    args = Namespace(calibrators=["none"])
    with pytest.raises(
        SystemExit, match=r"no run could be measured:\nfocal, seed 2: its"
    ):
        report(args, runs, {})


def test_without_calibration_rows_the_trained_networks_are_compared(
    tmp_path: Path,
) -> None:
    trainings = {
        (loss, 0): replace(TRAININGS[loss, 0], calibration=None) for loss in LOSSES
    }
    of, about = studied(tmp_path, trainings, calibrators=("none", "temperature"))
    assert set(of.numbers["method"]) == {"none"}
    (remark,) = about["remarks"]
    assert remark == "temperature: left out: the run has no calibration rows"


def drawn_study(accuracies: dict[str, tuple[float, float]]) -> Study:
    """Two seeds apart from each other, on resamples of the rows that hardly differ."""
    draws = np.linspace(-1e-3, 1e-3, 50)
    found = [
        {"loss": loss, "seed": seed, "method": "none", "metric": metric, "value": value}
        | {"draws": value + draws * (1 + seed)}
        for loss, numbers in accuracies.items()
        for seed, value in enumerate(numbers)
        for metric in ("nll", "accuracy", "ece", "ece_debiased")
    ]
    return Study(pandas.DataFrame(found), "cross_entropy", False, 1)


def test_no_interval_and_no_power_is_beyond_what_is_possible() -> None:
    of = drawn_study({"cross_entropy": (0.1, 0.9), "focal": (0.9, 0.1)})
    accuracy = rows(of.differences())["focal", "none", "accuracy"]
    assert (accuracy.low, accuracy.high) == (-1, 1)
    assert rows(of.differences())["focal", "none", "nll"].high > 5
    assert of.detectable("nll") == np.inf
    said = " ".join(notes(of, {"missing": {}, "remarks": {}}))
    for title in ("NLL", "ECE"):
        assert f"find this improvement in {title}: none that is possible." in said
    # Seeds that hardly differ find a small one.
    of = drawn_study({"cross_entropy": (0.5, 0.51), "focal": (0.4, 0.411)})
    found = of.detectable("nll")
    assert found is not None
    assert 0 < found < 0.1


def test_the_table_has_the_baseline_first_and_a_star_beyond_chance() -> None:
    of = drawn_study({"focal": (0.4, 0.4002), "cross_entropy": (0.5, 0.5002)})
    table = table_of(of, of.means(), of.differences())
    assert table["loss"].tolist() == ["cross_entropy", "focal"]
    assert table["accuracy"].tolist() == ["0.5001", "0.4001"]
    assert table["p (nll)"].tolist()[0] == ""
    assert table["p (nll)"].tolist()[1].endswith(" *")
    alone = drawn_study({"cross_entropy": (0.5, 0.51)})
    table = table_of(alone, alone.means(), alone.differences())
    assert table["nll"].tolist() == ["0.5050"]
    assert alone.detectable("nll") is None


# Tokens, and several labels per row

LENGTHS = np.array([1, 7, 2, 12, 3, 1, 9, 5, 4, 16] * 3)


def test_tokens_are_rows_and_sentences_are_drawn(tmp_path: Path) -> None:
    task = Task(n_test=int(LENGTHS.sum()))
    trainings = {}
    sums: dict[str, NDArray[np.float64]] = {}
    for i, loss in enumerate(LOSSES):
        training = task.train(i)
        test = training.test
        # The dataset may have left out numbers.
        sentences = np.repeat(3 * np.arange(len(LENGTHS)), LENGTHS)
        tokens = unchecked(test.logits, test.labels, sentences)
        trainings[loss, 0] = replace(training, test=tokens)
        log_probs = np.log(softmax(test.logits.astype(np.float64), axis=1))
        nats = -log_probs[np.arange(len(test.labels)), test.labels]
        parts = np.split(nats, LENGTHS.cumsum()[:-1])
        sums[loss] = np.array([part.sum() for part in parts])
    of, _ = studied(tmp_path, trainings)
    drawn = np.random.default_rng(0).integers(0, len(LENGTHS), (50, len(LENGTHS)))
    gaps = (sums["focal"] - sums["cross_entropy"])[drawn].sum(axis=1)
    gaps /= LENGTHS[drawn].sum(axis=1)
    difference = rows(of.differences())["focal", "none", "nll"]
    reach = stats.norm.isf(0.025) * gaps.std(ddof=1)
    assert difference.value - difference.low == pytest.approx(reach, abs=1e-9)


def of_labels(seed: int, n_rows: int = 150) -> TrainingPredictions:
    """Three labels per row, over-confident logits; one label in ten is not known. The labels are of no seed."""
    rng = np.random.default_rng(9)
    true = rng.normal(size=(2 * n_rows, 3)) + np.array([0, -1, 1])
    labels = (true + rng.logistic(size=true.shape) > 0).astype(np.float32)
    labels[rng.random(true.shape) < 0.1] = -100
    noise = 0.3 * np.random.default_rng(seed).normal(size=true.shape)
    logits = ([3.0, 2.0, 0.7] * (true + noise)).astype(np.float32)
    names = ("Mass", "Nodule", "Hernia")
    test, calibration = (
        unchecked(logits[part], labels[part], class_names=names)
        for part in (slice(n_rows), slice(n_rows, None))
    )
    return TrainingPredictions(test, calibration)


def test_several_labels_as_the_trainer_logs_them_with_calibrators(
    tmp_path: Path,
) -> None:
    trainings = {
        (loss, s): of_labels(10 * i + s)
        for i, loss in enumerate(LOSSES)
        for s in (0, 1)
    }
    calibrators = ("none", "temperature", "per_label_temperature", "vector")
    of, about = studied(tmp_path, trainings, calibrators=calibrators, n_asked=4)
    make: dict[str, Callable[[], Any]] = {
        "temperature": lambda: TemperatureScaling(multi_label=True),
        "per_label_temperature": PerLabelTemperatureScaling,
    }
    for (loss, seed), training in trainings.items():
        held_out = training.calibration
        assert held_out is not None
        logits = {"none": training.test.logits.astype(np.float64)}
        for name, scaler in make.items():
            fitted = scaler().fit(
                held_out.logits.astype(np.float64), held_out.labels.astype(np.int64)
            )
            logits[name] = fitted.transform(logits["none"])
        for name, own in logits.items():
            state = CalibrationState(n_classes=own.shape[1])
            labels = torch.from_numpy(training.test.labels)
            state.update_logits(torch.from_numpy(own), labels, multi_label=True)
            logged = state.compute()
            for metric in ("nll", "accuracy", "brier", "ece"):
                found = values(of)[loss, seed, name, metric]
                assert found == pytest.approx(logged[metric], abs=1e-6), (name, metric)
    assert of.differences()["p"].notna().all()
    (remark,) = about["remarks"]
    assert remark == "vector: left out: it is not for multi-label predictions"
