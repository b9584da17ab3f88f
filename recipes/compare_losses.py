"""Train several losses with several seeds by any script, and compare them with intervals.

    python recipes/compare_losses.py recipes/text_classification.py \
        --config recipes/configs/ag_news_minilm.yaml --losses cross_entropy focal focal:gamma=1 \
        --seeds 0 1 2 --output study -- --train_file train.csv --test_file test.csv

What follows `--` goes to the script, which may be yours: it takes the arguments of
`CalibrationTrainingArguments` and ends with `train_and_report`. Each run is a job of submitit with
a folder of its own, `study/runs/LOSS-seedN`. After an interruption the same command goes on:
finished runs are skipped, others resume from their newest complete checkpoint. The table compares
each loss with the baseline under the same calibrator; paired.py says what its intervals and
p-values are.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import paired
import submitit
import torch
from numpy.typing import NDArray
from pandas import DataFrame, Series

from hf_calib import InputError
from hf_calib._errors import check, did_you_mean, few, printable
from hf_calib._files import check_output, whole_file, whole_folder
from hf_calib.experiments.config_file import read_config
from hf_calib.losses import LOSSES, make_loss
from hf_calib.metrics.intervals import METRICS, resampled_metrics
from hf_calib.metrics.multi_label import UNKNOWN
from hf_calib.predictions.predictions import MULTI_LABEL, SINGLE_LABEL, Predictions
from hf_calib.predictions.training import PREDICTIONS, TrainingPredictions
from hf_calib.scaling import SCALERS

RESULTS = "results.json"
CONFIGS = Path(__file__).parent / "configs"
LOSS_FILES = {path.stem: path for path in CONFIGS.glob("losses/*.yaml")}
BINS = {"n_bins": 15}
ECE = "expected_calibration_error"
# The metrics, with their functions in `hf_calib.metrics` and the options of these.
MEASURED: dict[str, tuple[str, dict[str, Any]]] = {
    "nll": ("negative_log_likelihood", {}),
    "accuracy": ("accuracy", {}),
    "brier": ("brier_score", {}),
    "ece": (ECE, BINS),
    "ece_debiased": (ECE, {**BINS, "debias": True}),
    "adaptive_ece": (ECE, {**BINS, "binning": "quantile"}),
    "classwise_ece": ("classwise_calibration_error", BINS),
}
# Noise makes an ECE larger, and more so if it is small: differences are of the debiased one.
COMPARED = ("nll", "accuracy", "brier", "ece_debiased")
# With several labels per row, each label of a row is a decision between two classes.
OF_DECISIONS = ("nll", "accuracy", "brier", "ece", "ece_debiased")
# A resample adds the noise of each class once more.
WITHOUT_INTERVAL = ("classwise_ece",)
# The highest value of a metric; that of others is 1.
HIGHEST = {"nll": math.inf, "brier": 2.0}
KEY = ["loss", "method", "metric"]
Probs = NDArray[np.float64]

UNCALIBRATED = "none"
CALIBRATORS = (UNCALIBRATED, *SINGLE_LABEL.maps, *MULTI_LABEL.maps)
# The bootstraps of a study draw at most so many numbers, which takes a minute or two.
MOST_DRAWN = 4e8
RESAMPLES = (50, 1000)


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the arguments; those after `--` are the script's."""
    cut = argv.index("--") if "--" in argv else len(argv)
    usage = "compare_losses.py SCRIPT [options] -- [arguments of the script]"
    parser = argparse.ArgumentParser(usage=usage)
    add = parser.add_argument
    add("script", type=Path, help="a .py, or an executable, for example of torchrun")
    add("--config", action="append", default=[], help="YAML file of the script")
    of_losses = "focal, focal:gamma=1, a YAML file, or one of configs/losses by name"
    add("--losses", nargs="+", required=True, help=of_losses)
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--output", type=Path, required=True, help="folder of the study")
    add("--baseline", help="one of the losses; by default the first")
    defaults = ["temperature", "auto"]
    add("--calibrators", nargs="+", default=defaults, choices=CALIBRATORS)
    own_or_pooled = "over seeds: of each comparison, or of all losses together"
    add("--variance", default="own", choices=("own", "pooled"), help=own_or_pooled)
    add("--jobs", type=int, default=1, help="runs at a time; 0 only measures again")
    add("--slurm", nargs="+", metavar="NAME=VALUE", help="slurm_partition=gpu")
    add("--delete_models", action="store_true", help="of finished runs")
    args = parser.parse_args(argv[:cut])
    args.words = argv[cut + 1 :]
    args.calibrators = list(dict.fromkeys([UNCALIBRATED, *args.calibrators]))
    return args


# The runs


@dataclass(frozen=True)
class Run:
    """A training, called in a job; its arguments have to be the same when it is resumed."""

    loss: str
    seed: int
    folder: Path
    command: tuple[str, ...]
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.loss}, seed {self.seed}"

    @property
    def log(self) -> Path:
        """The output of its script."""
        return self.folder / "log.txt"

    @property
    def is_finished(self) -> bool:
        """Whether it has written its results, which are written last."""
        return all((self.folder / name).is_file() for name in (PREDICTIONS, RESULTS))

    def __call__(self, environment: Mapping[str, str]) -> str | None:
        """Train in a job, from the newest complete checkpoint; return why that failed, or None."""
        command = list(self.command)
        with open(self.folder / ".lock", "wb") as lock, open(self.log, "ab") as log:
            # The script of an earlier study that was killed may still be training, and holds this
            # lock. Some file systems of clusters have no locks.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if self.is_finished:
                return None
            if any(self.folder.glob("checkpoint-*")):
                from hf_calib.trainer.saving import newest_checkpoint

                loss = command[command.index("--loss") + 1]
                newest = newest_checkpoint(self.folder, loss)
                command += ["--resume_from_checkpoint", newest] if newest else []
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
            try:
                code = process.wait()
            except BaseException:
                # The job is cancelled; another signal must not keep the script alive.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if self.is_finished:
            return None
        how = f"exit status {code}" if code >= 0 else f"killed by signal {-code}"
        lines = "\n".join(last_lines(self.log, 12))
        return f"{how}, without {RESULTS} and {PREDICTIONS}; its last lines:\n{lines}"

    def checkpoint(self, environment: Mapping[str, str]) -> Any:
        """The job that follows where Slurm preempts this one, from its newest checkpoint."""
        return submitit.helpers.DelayedSubmission(self, environment)


# Why runs failed, or cannot be measured.
Reasons = dict[Run, str]


def read_loss(word: str) -> tuple[str, list[str]]:
    """The name of a loss in the table, and the words that tell a script to train with it."""
    base, colon, changes = word.partition(":")
    loss = base
    name = base
    hyperparameters = {}
    config = []
    if base not in LOSSES:
        path = Path(base)
        if not path.is_file():
            path = LOSS_FILES.get(base.removesuffix(".yaml"), path)
        way_out = did_you_mean(base, [*LOSSES, *LOSS_FILES])
        check(path.is_file(), "losses to be names or YAML files", repr(base), way_out)
        given = read_config(path)
        loss = str(given.get("loss"))
        names = did_you_mean(loss, LOSSES)
        check(loss in LOSSES, f"{path} to name its loss", repr(loss), names)
        name = path.stem
        hyperparameters = dict(given.get("loss_kwargs") or {})
        # A script that reads no YAML files needs one for further arguments only.
        if given.keys() - {"loss", "loss_kwargs"}:
            config = ["--config", str(path.absolute())]
    for change in filter(None, changes.split(",")):
        key, _, value = change.partition("=")
        check(value != "", "a loss as focal:gamma=1", repr(word), "add the value")
        hyperparameters[key] = json_or_text(value)
    # A wrong hyperparameter raises here, and not when its run starts.
    make_loss(loss, **hyperparameters)
    words = ["--loss", loss, f"--loss_kwargs={json.dumps(hyperparameters)}"]
    return name + colon + changes, config + words


def json_or_text(text: str) -> Any:
    """A number, true, false or a list; anything else is a text."""
    with suppress(ValueError):
        return json.loads(text)
    return text


def plan(args: argparse.Namespace) -> list[Run]:
    """Return the runs, seed by seed; raise for what cannot be trained, before anything is written."""
    is_python = args.script.suffix == ".py"
    is_program = is_python or os.access(args.script, os.X_OK)
    is_file = args.script.is_file() and is_program
    check(is_file, "the script to be a .py or an executable", args.script, "check it")
    differ = len(set(args.seeds)) == len(args.seeds) and min(args.seeds) >= 0
    check(differ, "seeds to differ, from 0", args.seeds, "write --seeds 0 1 2")
    losses = [read_loss(word) for word in args.losses]
    folders = [re.sub(r"[^\w.=-]+", "_", name) for name, _ in losses]
    (most, n_times), *_ = Counter(folders).most_common()
    check(n_times == 1, "losses to differ", f"{most} twice", "give each another name")
    names = [name for name, _ in losses]
    args.baseline = args.baseline or names[0]
    way_out = f"use one of {few(names)}"
    check(args.baseline in names, "a baseline of the losses", args.baseline, way_out)
    check_words(args.config, args.words)
    program = [sys.executable] if is_python else []
    program.append(str(args.script.absolute()))
    shared: list[str] = []
    for path in args.config:
        shared += ["--config", str(Path(path).absolute())]
    shared += args.words
    recorded = [args.script.name, *map(content_of, shared)]
    runs = []
    for seed in args.seeds:
        for (name, words), own in zip(losses, folders, strict=True):
            folder = args.output.absolute() / "runs" / f"{own}-seed{seed}"
            place = ["--seed", str(seed), "--output_dir", str(folder)]
            command = (*program, *shared, *words, *place)
            arguments = (*recorded, *map(content_of, words))
            runs.append(Run(name, seed, folder, command, arguments))
    check_folders(args.output, runs)
    return runs


def check_words(configs: Sequence[str], words: Sequence[str]) -> None:
    """Raise for arguments of the script that the study sets, and for secrets, which jobs store."""
    ours = r"--(loss([-_]kwargs)?|seed|output[-_]dir|config|resume[-\w]*)(=|$)"
    secret = r"(?i)(^|[-_=])(token|secret|password|api[-_]key)(=|$)"
    keep_out = "the script's arguments to leave this to the study"
    no_secret = "the script's arguments to hold no secret, which jobs store"
    for word in words:
        way_out = "use the study's option before the --; interrupted runs resume"
        check(re.match(ours, word) is None, keep_out, word, way_out)
        name = word.partition("=")[0]
        is_public = re.search(secret, word) is None
        check(is_public, no_secret, name, "set HF_TOKEN in the environment")
    for path, name in product(configs, ("resume", "resume_from_checkpoint")):
        is_there = name in read_config(Path(path))
        check(not is_there, f"{path} to leave this to the study", name, "remove it")


def content_of(word: str) -> str:
    """The word, with a hash of the file or folder that it names: files may move, or change."""
    name, equals, value = word.rpartition("=") if word[:2] == "--" else ("", "", word)
    path = Path(value)
    if not value or not path.exists():
        return word
    digest = hashlib.sha256()
    for file in sorted(each for each in (path, *path.rglob("*")) if each.is_file()):
        digest.update(f"{file.relative_to(path)} {file.stat().st_size} ".encode())
        with open(file, "rb") as opened:
            while block := opened.read(2**20):
                digest.update(block)
    return f"{name}{equals}{path.name} {digest.hexdigest()[:16]}"


def check_folders(output: Path, runs: Sequence[Run]) -> None:
    """Raise if the output is something else, or has a run of other arguments."""
    check_output(output)
    is_new = not output.is_dir() or not any(output.iterdir())
    is_study = is_new or (output / "runs").is_dir()
    check(is_study, "--output to be new or a study", output, "name a new folder")
    for run in runs:
        if not run.folder.is_dir() or not any(run.folder.iterdir()):
            continue
        try:
            record = json.loads((run.folder / "run.json").read_text())
            earlier = tuple(record["arguments"])
        except (OSError, ValueError, LookupError, TypeError):
            earlier = ("no record of them",)
        differ = [word for word in earlier if word not in run.arguments]
        differ += [word for word in run.arguments if word not in earlier]
        got = printable(", ".join(differ) or "another order")
        way_out = "name another --output, or remove the folder to train it again"
        same = earlier == run.arguments
        check(same, f"the run in {run.folder} to have the same arguments", got, way_out)


# Training


def last_lines(log: Path, n: int) -> list[str]:
    """The end of a run's output, with the last state of its progress bars."""
    text = log.read_bytes()[-(2**14) :].decode(errors="replace")
    lines = [line.strip().rpartition("\r")[2] for line in text.split("\n")]
    return [printable(line) for line in lines if line][-n:]


def say(line: str) -> None:
    """Print progress with the time of day: a study takes hours, and its output goes to a file."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def make_executor(args: argparse.Namespace) -> submitit.AutoExecutor:
    """The executor of submitit, here or on Slurm, with its parameters."""
    # A job of this machine is limited to a year, where Slurm's need a limit of their own.
    given = args.slurm or [f"timeout_min={365 * 24 * 60}"]
    pairs = [word.partition("=") for word in given]
    parameters = {name: json_or_text(value) for name, _, value in pairs}
    cluster = "slurm" if args.slurm else "local"
    try:
        executor = submitit.AutoExecutor(args.output / "submitit", cluster=cluster)
        executor.update_parameters(**parameters)
    except (NameError, TypeError, ValueError, RuntimeError) as error:
        way_out = "see submitit.AutoExecutor.update_parameters"
        check(False, "--slurm to hold parameters of a cluster", error, way_out)
    return executor


def places(args: argparse.Namespace, n_runs: int) -> list[dict[str, str]]:
    """The variables of each run that can be trained at a time: its share of threads and GPUs."""
    if args.slurm:
        # Slurm starts each job when what it asks for is free.
        return [{} for _ in range(n_runs)]
    n_threads = str(max(1, (os.cpu_count() or 1) // args.jobs))
    shared = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", n_threads)}
    of_machine = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", of_machine)
    found = [{**shared, "CUDA_VISIBLE_DEVICES": gpus} for _ in range(args.jobs)]
    if args.script.suffix == ".py":
        # A Trainer that sees several GPUs enlarges the batch, where torchrun splits it.
        each = gpus.split(",")
        for number, place in enumerate(found):
            place["CUDA_VISIBLE_DEVICES"] = each[number % len(each)]
    return found


def train(args: argparse.Namespace, runs: Sequence[Run]) -> Reasons:
    """Train what is not finished; return the runs that failed, with the reasons."""
    waiting = [run for run in runs if not run.is_finished]
    say(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished")
    if not waiting or args.jobs < 1:
        return {}
    executor = make_executor(args)
    for run in waiting:
        run.folder.mkdir(parents=True, exist_ok=True)
        entries = {"loss": run.loss, "seed": run.seed, "arguments": run.arguments}
        with whole_file(run.folder / "run.json") as unfinished:
            unfinished.write_text(json.dumps(entries, indent=1))
    free = places(args, len(waiting))
    running: dict[Run, tuple[Any, dict[str, str]]] = {}
    failed: Reasons = {}
    last_said = time.monotonic()
    try:
        while waiting or running:
            while waiting and free:
                run = waiting.pop(0)
                place = free.pop(0)
                running[run] = executor.submit(run, place), place
                say(f"{run} started; its output is in {run.log}")
            for run, (job, place) in list(running.items()):
                if not job.done():
                    continue
                del running[run]
                free.append(place)
                try:
                    reason = job.result()
                except Exception as error:  # A scheduler may cause any.
                    reason = f"the job failed: {error}"
                n_ended = len(runs) - len(waiting) - len(running)
                end = "finished" if reason is None else f"FAILED: {reason}"
                say(f"{n_ended} of {len(runs)}: {run} {end}")
                failed |= {} if reason is None else {run: reason}
            if time.monotonic() - last_said > 60:
                last_said = time.monotonic()
                for run in [run for run in running if run.log.is_file()]:
                    say(f"{run}: {''.join(last_lines(run.log, 1))[:100]}")
            time.sleep(0.2)
    except BaseException:
        jobs = [job for job, _ in running.values()]
        for job in jobs:
            job.cancel()
        # Each needs a moment to end its script.
        for _ in range(100):
            if not all(job.done() for job in jobs):
                time.sleep(0.1)
        raise
    return failed


def clean_up(runs: Sequence[Run], *, delete_models: bool) -> None:
    """Remove the checkpoints of finished runs and, if asked, their models."""
    models = ["calibrated", "uncalibrated"] if delete_models else []
    for run in runs:
        for pattern in ["checkpoint-*", *models] if run.is_finished else []:
            for path in run.folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)


# Measuring


def read_runs(runs: Sequence[Run], failed: Reasons) -> tuple[dict[Run, Any], Reasons]:
    """Return the predictions that can be compared, and why the other runs cannot be."""
    found: dict[Run, TrainingPredictions] = {}
    rows: dict[Run, int] = {}
    missing: Reasons = {}
    for run in runs:
        if not run.is_finished:
            missing[run] = failed.get(run, "not finished")
            continue
        try:
            predictions = TrainingPredictions.load(run.folder / PREDICTIONS)
            # This checks the rows: those of a run that diverged are NaN.
            test = replace(predictions.test)
        except InputError as error:
            missing[run] = f"its predictions cannot be measured: {error}"
            continue
        found[run] = predictions
        sentences = b"" if test.sentences is None else test.sentences.tobytes()
        rows[run] = hash((test.names, test.labels.tobytes(), sentences))
    most = Counter(rows.values()).most_common(1)
    for run in [run for run in rows if rows[run] != most[0][0]]:
        missing[run] = "its test rows or classes are not those of most other runs"
        del found[run]
    return found, missing


def probabilities(of: TrainingPredictions, calibrator: str) -> tuple[Probs, list[str]]:
    """The probabilities of the test rows, and the warnings of the fit to the calibration rows."""
    test = of.test
    if calibrator == UNCALIBRATED:
        return test.probabilities(), []
    if calibrator not in test.kind.maps:
        raise InputError(f"it is not for {test.kind.name} predictions")
    if of.calibration is None:
        raise InputError("the run has no calibration rows")
    scaler = SCALERS[calibrator].load()()
    logits = of.calibration.as_logits().astype(np.float64)
    warned = replace(of.calibration, logits=logits).fit_calibrator(scaler)
    return scaler.predict_proba(test.as_logits().astype(np.float64)), warned


def measured(test: Predictions, probs: Probs, n_resamples: int) -> Iterator[Any]:
    """The metrics, each with its values (R,) on resamples of the rows, or NaN."""
    labels = test.labels.astype(np.int64)
    groups = None
    if test.sentences is not None:
        # The tokens of a sentence are drawn together.
        groups = np.unique(test.sentences, return_inverse=True)[1]
    if test.kind.sigmoid:
        # The decisions of a row are drawn together.
        is_known = labels != UNKNOWN
        groups = np.unique(np.nonzero(is_known)[0], return_inverse=True)[1]
        labels = labels[is_known]
        probs = np.stack([1 - probs[is_known], probs[is_known]], axis=1)
    drawing: Any = {"n_resamples": n_resamples, "seed": 0, "groups": groups}
    for metric in OF_DECISIONS if test.kind.sigmoid else MEASURED:
        name, options = MEASURED[metric]
        # The Brier score of a decision, (p - y)^2, is half of that of two classes.
        scale = 0.5 if metric == "brier" and test.kind.sigmoid else 1.0
        value = scale * float(METRICS[name].function(probs, labels, **options))
        if not math.isfinite(value):
            continue
        draws: Any = np.full(1, np.nan)
        if metric not in WITHOUT_INTERVAL:
            draws = resampled_metrics([(name, options)], probs, labels, **drawing)[0]
        yield {"metric": metric, "value": value, "draws": scale * draws}


def measure(
    runs: Sequence[Run], calibrators: Sequence[str], failed: Reasons
) -> tuple[DataFrame, dict[str, Any]]:
    """Return a row for each metric of a run and a calibrator, and what is to be said of them."""
    found, missing = read_runs(runs, failed)
    about: dict[str, Any] = {"missing": {str(run): missing[run] for run in missing}}
    remarks: dict[str, list[str]] = {}
    rows = []
    for run, predictions in found.items():
        say(f"measuring {run}")
        n_rows, n_classes = predictions.test.as_logits().shape
        about |= {"n_test": n_rows, "n_classes": n_classes}
        about["n_calibration"] = len(predictions.calibration or ())
        numbers = predictions.test.labels.size * (1 + n_classes / 100)
        n_resamples = int(MOST_DRAWN / (numbers * len(found) * len(calibrators)))
        about["n_resamples"] = int(np.clip(n_resamples, *RESAMPLES))
        for calibrator in calibrators:
            key = {"loss": run.loss, "seed": run.seed, "method": calibrator}
            try:
                probs, said = probabilities(predictions, calibrator)
                found_here = measured(predictions.test, probs, about["n_resamples"])
                rows += [{**key, **each} for each in found_here]
            except InputError as error:
                said = [f"left out: {error}"]
            for remark in said:
                remarks.setdefault(f"{calibrator}: {remark}", []).append(str(run))
    about["remarks"] = {remark: few(of) for remark, of in remarks.items()}
    return DataFrame(rows), about


# Comparing


@dataclass(frozen=True)
class Study:
    """The numbers of the runs, and the comparisons that were asked: the family of each p."""

    numbers: DataFrame
    baseline: str
    pooled: bool
    n_asked: int

    @property
    def fewest_seeds(self) -> int:
        """Of a comparison; one seed among several would be a comparison of the rows alone."""
        return min(2, self.numbers["seed"].nunique())

    def means(self) -> DataFrame:
        """The means over the seeds with their intervals."""
        rows = []
        for key, own in self.numbers.groupby(KEY, sort=False):
            spread = paired.two_level(own["value"], own["draws"])
            ends = np.clip(spread.interval(), 0, HIGHEST.get(key[2], 1))
            rows.append((*key, spread.value, *ends, spread.n_seeds))
        return DataFrame(rows, columns=[*KEY, "value", "low", "high", "n_seeds"])

    def spreads(self, metric: str) -> dict[tuple[str, str], paired.TwoLevel]:
        """By loss and calibrator, the paired differences over the seeds that both losses have."""
        found = {}
        of_metric = self.numbers[self.numbers["metric"] == metric]
        for calibrator, rows in of_metric.groupby("method", sort=False):
            values = rows.pivot(index="seed", columns="loss", values="value")
            draws = rows.pivot(index="seed", columns="loss", values="draws")
            if self.baseline not in values:
                continue
            variance = paired.pooled_variance(values) if self.pooled else None
            for loss in values.columns.drop(self.baseline):
                change = (values[loss] - values[self.baseline]).dropna()
                drawn = draws[loss][change.index] - draws[self.baseline][change.index]
                if len(change) >= self.fewest_seeds:
                    found[loss, calibrator] = paired.two_level(change, drawn, variance)
        return found

    def differences(self) -> DataFrame:
        """The differences with their intervals, and their corrected p-values."""
        rows = []
        for metric in COMPARED:
            spreads = self.spreads(metric)
            p_values = [spread.p_value() for spread in spreads.values()]
            own_p = zip(p_values, paired.corrected(p_values, self.n_asked), strict=True)
            highest = HIGHEST.get(metric, 1)
            for (pair, spread), p in zip(spreads.items(), own_p, strict=True):
                ends = np.clip(spread.interval(), -highest, highest)
                rows.append((*pair, metric, spread.value, *ends, *p, spread.n_seeds))
        columns = ["value", "low", "high", "p", "p_corrected", "n_seeds"]
        return DataFrame(rows, columns=[*KEY, *columns])

    def detectable(self, metric: str) -> float | None:
        """The improvement that 80% of such studies find; infinite if none that is possible."""
        spreads = self.spreads(metric)
        if not spreads:
            return None
        n_losses = len({loss for loss, _ in spreads})
        spread, degrees = paired.typical(spreads.values(), n_losses)
        size = paired.detectable(spread, paired.LEVEL / self.n_asked, degrees)
        of_metric = self.numbers[self.numbers["metric"] == metric]
        # No loss lowers a metric by more than all of it.
        possible = of_metric["value"][of_metric["loss"] == self.baseline].max()
        return size if size <= possible else math.inf


# The table


def table_of(study: Study, means: DataFrame, differences: DataFrame) -> DataFrame:
    """For each calibrator, the losses and their differences from the baseline, in words."""
    rows = ["method", "loss"]
    values = means.pivot(index=rows, columns="metric", values="value")
    calibrators = dict.fromkeys(means["method"])
    losses = dict.fromkeys([study.baseline, *means["loss"]])
    order = [row for row in product(calibrators, losses) if row in values.index]
    table = values.loc[order, ["accuracy", "nll", "ece"]].map("{:.4f}".format)
    for metric in ("nll", "ece_debiased"):
        own = differences[differences["metric"] == metric].set_index(rows)
        differs = own["p_corrected"].lt(paired.LEVEL)
        in_words = "{0.value:+.4f} [{0.low:+.4f}, {0.high:+.4f}]".format
        found = [in_words(row) for row in own.itertuples()]
        table[f"{metric} - baseline"] = Series(found, own.index, dtype=str)
        stars = differs.map({True: " *", False: ""})
        table[f"p ({metric})"] = own["p_corrected"].map("{:.3f}".format) + stars
    return table.fillna("").reset_index()


def notes(study: Study, about: Mapping[str, Any]) -> list[str]:
    """What the numbers mean, what the study could have found, and what is missing."""
    over = "test rows and seeds"
    if study.fewest_seeds == 1:
        over = "the test rows of one seed"
    said = [
        f"Differences are from {study.baseline} under the same calibrator, paired over {over}, with",
        "95% intervals; those in ECE are of the debiased ECE. p is corrected by Holm for the",
        f"{study.n_asked} comparisons of a metric that were asked; an asterisk: below {paired.LEVEL}.",
    ]
    for metric, title in (("nll", "NLL"), ("ece_debiased", "ECE")):
        size = study.detectable(metric)
        if size is not None:
            found = f"one of {size:.2g}" if size < math.inf else "none that is possible"
            said.append(
                f"80% of such studies find this improvement in {title}: {found}."
            )
    if study.pooled:
        said.append("The variance over seeds is that of all losses together.")
    said += [f"{run} is missing: {reason}" for run, reason in about["missing"].items()]
    return said + [f"{remark} ({of})" for remark, of in about["remarks"].items()]


def report(args: argparse.Namespace, runs: Sequence[Run], failed: Any) -> str:
    """Write table.txt, report.json and results.csv; return the text of the table."""
    numbers, about = measure(runs, args.calibrators, failed)
    reasons = "\n".join(f"{run}: {why}" for run, why in about["missing"].items())
    if numbers.empty:
        raise SystemExit(f"no run could be measured:\n{reasons}")
    losses = list(dict.fromkeys(run.loss for run in runs))
    n_asked = (len(losses) - 1) * len(args.calibrators)
    study = Study(numbers, args.baseline, args.variance == "pooled", n_asked)
    tables = {"means": study.means(), "differences": study.differences()}
    rows = f"{about['n_test']:,} test rows, {about['n_calibration']:,} calibration rows"
    head = f"{len(losses)} losses x {len(args.seeds)} seeds, {rows}"
    table = table_of(study, **tables).to_string(index=False)
    said = notes(study, about)
    text = "\n".join([head, "", table, "", *said])
    record = {"losses": losses, "seeds": args.seeds, "methods": args.calibrators}
    record |= {
        "baseline": args.baseline,
        "variance": args.variance,
        "notes": said,
        **about,
    }
    for name, found in tables.items():
        # pandas writes numbers that are not defined as null.
        records = found.to_json(orient="records", double_precision=15)
        record[name] = json.loads(records)
    with whole_folder(args.output) as made:
        (made / "table.txt").write_text(text + "\n", encoding="utf-8")
        (made / "report.json").write_text(json.dumps(record, indent=1))
        numbers.drop(columns="draws").to_csv(made / "results.csv", index=False)
    return text


def main(argv: list[str] | None = None) -> None:
    args = parse(sys.argv[1:] if argv is None else argv)
    # A scheduler ends the study as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        runs = plan(args)
        failed = train(args, runs)
        clean_up(runs, delete_models=args.delete_models)
        print(report(args, runs, failed))
    except InputError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
