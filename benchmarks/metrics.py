"""Time and memory of the metrics, as ratios to other packages, in the same run.

    pip install "hf_calib[bench]"
    OMP_NUM_THREADS=1 python benchmarks/metrics.py
    OMP_NUM_THREADS=1 python benchmarks/metrics.py --jobs ece smooth

Each round times every package once, ours first, so that a change of the machine's load meets all of
them; the table gives medians over the rounds, and medians of the ratios within a round. Functions
that take longer than `--patience` seconds are timed in the first round only. The values are printed
next to the times, since a fast function may be wrong. Each package gets the data in the form that
it is fastest with (torchmetrics float32 tensors).

Values that differ for a reason: torchmetrics has bins [lower, upper) and adds up in float32.

Memory is the peak in addition to the input, in units of the input: allocations of numpy as
tracemalloc sees them, of torch as its profiler does.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
import tracemalloc
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from scipy import stats

from hf_calib.metrics import (
    bootstrap_interval,
    classwise_calibration_error,
    consistency_test,
    expected_calibration_error,
)
from hf_calib.metrics.smooth import smooth_error
from hf_calib.metrics.sums import TopLabel, top_label_error

# The distributions of the packages.
PEERS = ("torchmetrics", "netcal", "relplot", "uncertainty-calibration")
OURS = "hf_calib"
N_BINS = 15

Run = Callable[[], float]


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    refuse_without_peers()
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("numpy", "scipy", "torch", *PEERS)
    ]
    print(f"{', '.join(versions)}; {args.rounds} rounds")
    for job in args.jobs:
        title, runs, nbytes = JOBS[job]()
        seconds, values = interleaved(runs, args.rounds, args.patience)
        memory = {}
        if nbytes:
            memory = {name: peak_memory(run) / nbytes for name, run in runs.items()}
        print_table(title, seconds, values, memory)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--patience", type=float, default=2.0)
    return parser.parse_args()


def refuse_without_peers() -> None:
    found = {dist.name for dist in importlib.metadata.distributions()}
    missing = [name for name in PEERS if name not in found]
    if missing:
        raise SystemExit(
            f'not installed: {", ".join(missing)}; pip install "hf_calib[bench]"'
        )


# The jobs: a title, what to time, and the size of the input where memory is measured


def confidences_job() -> tuple[str, dict[str, Run], int]:
    import calibration
    from netcal.metrics import ECE
    from torchmetrics.functional.classification import binary_calibration_error

    confidences, correct = make_confidences(1_000_000)
    tensors = (
        torch.from_numpy(confidences.astype(np.float32)),
        torch.from_numpy(correct.astype(np.int64)),
    )
    ints = correct.astype(int)
    netcal = ECE(N_BINS)
    runs: dict[str, Run] = {
        OURS: lambda: top_label_error(TopLabel(confidences, correct), n_bins=N_BINS),
        "torchmetrics": lambda: binary_calibration_error(
            *tensors, n_bins=N_BINS
        ).item(),
        "torchmetrics, no checks": lambda: binary_calibration_error(
            *tensors, n_bins=N_BINS, validate_args=False
        ).item(),
        "netcal": lambda: float(netcal.measure(confidences, ints)),
        "uncertainty-calibration": lambda: float(
            calibration.get_ece(confidences, ints, num_bins=N_BINS)
        ),
    }
    return "ECE of 1e6 confidences", runs, 0


def classwise_job() -> tuple[str, dict[str, Run], int]:
    import calibration
    from torchmetrics.functional.classification import binary_calibration_error

    probs, labels = make_probs(100_000, 100)
    columns = torch.from_numpy(probs).T.contiguous()
    targets = torch.from_numpy(labels)
    options = {"n_bins": N_BINS, "validate_args": False}

    def loop() -> float:
        gaps = []
        for c, column in enumerate(columns):
            is_class = (targets == c).long()
            gaps.append(binary_calibration_error(column, is_class, **options))
        return torch.stack(gaps).mean().item()

    runs: dict[str, Run] = {
        OURS: lambda: classwise_calibration_error(probs, labels, n_bins=N_BINS),
        "torchmetrics, class by class": loop,
        "uncertainty-calibration": lambda: float(
            calibration.get_ece(probs, labels, num_bins=N_BINS, mode="marginal")
        ),
    }
    return "classwise ECE, (100000, 100) float32", runs, 0


def smooth_job() -> tuple[str, dict[str, Run], int]:
    import relplot

    confidences, correct = make_confidences(1_000_000)
    runs: dict[str, Run] = {
        OURS: lambda: smooth_error(TopLabel(confidences, correct)),
        "relplot": lambda: float(relplot.smECE(confidences, correct)),
    }
    return "smooth ECE of 1e6 confidences", runs, 0


def probs_job() -> tuple[str, dict[str, Run], int]:
    from netcal.metrics import ECE
    from torchmetrics.functional.classification import multiclass_calibration_error

    probs, labels = make_probs(100_000, 1000)
    tensor = torch.from_numpy(probs)
    targets = torch.from_numpy(labels)
    netcal = ECE(N_BINS)

    def theirs(validate: bool) -> float:
        options = {"num_classes": 1000, "n_bins": N_BINS, "validate_args": validate}
        return multiclass_calibration_error(tensor, targets, **options).item()

    runs: dict[str, Run] = {
        OURS: lambda: expected_calibration_error(probs, labels, n_bins=N_BINS),
        "torchmetrics": lambda: theirs(True),
        "torchmetrics, no checks": lambda: theirs(False),
        "netcal": lambda: float(netcal.measure(probs, labels)),
    }
    return "ECE of (100000, 1000) float32 probabilities", runs, probs.nbytes


def bootstrap_job() -> tuple[str, dict[str, Run], int]:
    probs, labels = make_probs(100_000, 10)

    def interval(**options: str) -> Run:
        return lambda: (
            bootstrap_interval(
                "expected_calibration_error", probs, labels, **options
            ).low
        )

    def theirs() -> float:

        def metric(rows: np.ndarray) -> float:
            return expected_calibration_error(probs[rows], labels[rows])

        found = stats.bootstrap(
            (np.arange(100_000),),
            metric,
            vectorized=False,
            method="percentile",
            n_resamples=1000,
            batch=1,
            rng=np.random.default_rng(0),
        )
        return float(found.confidence_interval.low)

    runs: dict[str, Run] = {
        OURS: interval(),
        "hf_calib, equal-mass bins": interval(binning="equal_mass"),
        "hf_calib, consistency_test": lambda: consistency_test(probs, labels).p_value,
        "scipy.stats.bootstrap of our ECE": theirs,
    }
    return "1000 resamples of the ECE, (100000, 10); low end, or p-value", runs, 0


JOBS = {
    "ece": confidences_job,
    "classwise": classwise_job,
    "smooth": smooth_job,
    "probs": probs_job,
    "bootstrap": bootstrap_job,
}


def make_confidences(n_examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Confidences, most of them high, that are 0.05 too high on average."""
    rng = np.random.default_rng(0)
    confidences = 1 - 0.9 * rng.random(n_examples) ** 2
    drawn = rng.random(n_examples)
    correct = drawn < confidences - 0.1 * rng.random(n_examples)
    return confidences, correct.astype(float)


def make_probs(n_examples: int, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 probabilities that are sharper than those which the labels were drawn from."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((n_examples, n_classes), dtype=np.float32)
    top = rng.integers(n_classes, size=n_examples)
    logits[np.arange(n_examples), top] += 2 + np.log(n_classes)
    noise = rng.standard_exponential(logits.shape, dtype=np.float32)
    positive = np.maximum(noise, np.finfo(np.float32).tiny)
    labels = (logits - np.log(positive)).argmax(axis=1)
    np.exp(1.3 * (logits - logits.max(axis=1, keepdims=True)), out=logits)
    logits /= logits.sum(axis=1, keepdims=True)
    return logits, labels


def interleaved(
    runs: dict[str, Run], rounds: int, patience: float
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each run in each round, and its value; a round more comes first, to warm up what is quick."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    values: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, run in runs.items():
            if number and seconds[name][0] > patience:
                continue
            start = time.perf_counter()
            values[name] = run()
            seconds[name].append(time.perf_counter() - start)
    return {name: taken[1:] or taken for name, taken in seconds.items()}, values


def peak_memory(run: Run) -> int:
    """Peak memory in bytes, in addition to what is held before."""
    tracemalloc.start()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        run()
        by_numpy = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    events = profiler.profiler.kineto_results.events()
    by_torch = torch.tensor(
        [0, *(event.nbytes() for event in events if event.name() == "[memory]")]
    )
    return by_numpy + int(by_torch.cumsum(0).max())


def print_table(
    title: str,
    seconds: dict[str, list[float]],
    values: dict[str, float],
    memory: dict[str, float],
) -> None:
    print(f"\n{title}")
    ours = seconds[OURS]
    for name, taken in seconds.items():
        ratio = taken[0] / median(ours)
        if len(taken) == len(ours):
            # It was timed in each round, not once.
            ratio = median(np.divide(taken, ours).tolist())
        times = (
            f"{1e3 * median(taken):9.1f} ms  x {ratio:7.2f}  value {values[name]:.8f}"
        )
        held = f"  memory {memory[name]:.3f} of the input" if memory else ""
        print(f"  {name:32s} {times}{held}", flush=True)


if __name__ == "__main__":
    main()
