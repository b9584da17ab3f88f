"""Time of fitting a temperature and linear calibrators, as ratios to other libraries, in the same run.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py
    OMP_NUM_THREADS=1 python benchmarks/scaling.py --jobs nll

Negative log-likelihood: against `CalibratedClassifierCV(FrozenEstimator(...),
method="temperature")`, the public way, which also predicts the examples fold by fold; and against
the fit that it calls, alone, which is the fairer comparison. "above the optimum" is the mean NLL at
the T that was found, in float64, minus the lowest possible one, in nats.

Expected calibration error on the grid 0.1, 0.2, ..., 10: against the method of the
focal_calibration repository, reimplemented here. For each T it divides all logits, in torch, takes
the cross entropy, divides them again, takes the softmax, the largest probability of each row, and
15 masks, one per bin. Its second line leaves out the cross entropy, which a search by calibration
error does not need. A round times it on five of the 100 temperatures, unless --full-grid is given,
and multiplies.

Linear maps: `MatrixScaling` and `StructuredMatrixScaling` against the SMS of probmetrics (the maps'
authors) on 5,000 x 100, `VectorScaling` and `StructuredVectorScaling` against our own temperature
on 50,000 x 1,000. "excess" is the mean penalised NLL at the map that was found less that of a fit
that was run on until nothing more could be gained; the logits are over-confident, and their labels
were drawn from a map with wrong offsets and mixed classes. `--logits FILE.npz` (with `pool_logits`,
`pool_labels`) times them on other logits, for example of a real model.

The choice of a map: `AutoScaling`, which cross-validates a dozen of them, against one SMS of
probmetrics on 2,000 x 100 of the same kind.

Each round times every method once, so that a change of the machine's load meets all of them; the
table gives medians over the rounds, and medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import sklearn
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.calibration import CalibratedClassifierCV, _TemperatureScaling
from sklearn.frozen import FrozenEstimator

from hf_calib.metrics import expected_calibration_error
from hf_calib.scaling import (
    AutoScaling,
    MatrixScaling,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    TemperatureScaling,
    VectorScaling,
)
from hf_calib.scaling.newton import Start
from hf_calib.scaling.rows import Rows
from hf_calib.scaling.temperature import ScaledLoss

SHAPES = [(10_000, 10), (50_000, 1000)]
TRUE_TEMPERATURE = 2.5
JOBS = ["nll", "grid", "maps", "auto"]
OURS = "hf_calib"
N_BINS = 15

# It fits, and returns what was found: T, or a scaler.
Fit = Callable[[], Any]


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    versions = f"numpy {np.__version__}, scikit-learn {sklearn.__version__}, torch {torch.__version__}"
    print(f"{versions}, {args.rounds} rounds")
    if "maps" in args.jobs:
        compare_maps(args.rounds, args.logits)
    if "auto" in args.jobs:
        compare_auto(args.rounds)
    for shape in SHAPES:
        if not {"nll", "grid"} & set(args.jobs):
            break
        logits, labels = make_data(*shape, args.dtype)
        if "nll" in args.jobs:
            compare_nll(logits, labels, args.rounds)
        if "grid" in args.jobs:
            compare_grids(
                logits, labels, args.rounds, every=1 if args.full_grid else 20
            )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", default=JOBS, choices=JOBS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--logits", help="an .npz file for the job maps, instead of drawn logits"
    )
    parser.add_argument(
        "--full-grid",
        action="store_true",
        help="time the baseline on all 100 temperatures",
    )
    return parser.parse_args()


def make_data(n: int, c: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are `TRUE_TEMPERATURE` times those which the labels were drawn from."""
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2, size=(n, c)).astype(dtype)
    logits[np.arange(n), rng.integers(c, size=n)] += 4
    labels = (logits + rng.gumbel(size=(n, c))).argmax(axis=1)
    logits *= TRUE_TEMPERATURE
    return logits, labels


def compare_nll(logits: np.ndarray, labels: np.ndarray, rounds: int) -> None:
    fits: dict[str, Fit] = {
        OURS: lambda: TemperatureScaling().fit(logits, labels).temperature_,
        "scikit-learn, its fit alone": lambda: (
            1 / float(_TemperatureScaling().fit(logits, labels).beta_)
        ),
        "scikit-learn, public": partial(fit_public_scikit_learn, logits, labels),
    }
    seconds, temperatures = interleaved(fits, rounds)
    own = temperatures[OURS]
    # The mean is convex in 1 / T: an inner minimum is the minimum.
    least = minimize_scalar(
        lambda t: mean_nll(logits, labels, t),
        bounds=(0.99 * own, 1.01 * own),
        options={"xatol": 1e-6},
    ).fun
    print_table(f"NLL temperature, {shape_of(logits)}", seconds)
    for name, temperature in temperatures.items():
        excess = max(0, mean_nll(logits, labels, temperature) - least)
        above = f"{excess:.1e} nats above the optimum"
        print(f"  {name:30s} T = {temperature:.6f}, {above}")


def mean_nll(logits: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    def scaled(rows: np.ndarray) -> np.ndarray:
        return rows.astype(np.float64) / temperature

    return total_nll(scaled, logits, labels) / len(logits)


def total_nll(
    mapped: Callable[[np.ndarray], np.ndarray], logits: np.ndarray, labels: np.ndarray
) -> float:
    """The NLL of mapped logits, in blocks of a million numbers."""
    loss = 0.0
    n_blocks = max(1, logits.size // 10**6)
    for rows in np.array_split(np.arange(len(logits)), n_blocks):
        log_probs = log_softmax(mapped(logits[rows]), axis=1)
        loss -= log_probs[np.arange(len(rows)), labels[rows]].sum()
    return loss


def compare_maps(rounds: int, file: str | None) -> None:
    if file:
        with np.load(file) as saved:
            small = saved["pool_logits"], saved["pool_labels"].astype(np.int64)
        large = small
    else:
        small = make_mixed_data(5000, 100)
        large = make_mixed_data(50_000, 1000)
    matrices: dict[str, Fit] = {
        "probmetrics SMS": sms_fit(*small),
        "StructuredMatrixScaling": lambda: StructuredMatrixScaling().fit(*small),
        "MatrixScaling": lambda: MatrixScaling().fit(*small),
    }
    report_maps(small, matrices, rounds)
    vectors: dict[str, Fit] = {
        "TemperatureScaling": lambda: TemperatureScaling().fit(*large),
        "StructuredVectorScaling": lambda: StructuredVectorScaling().fit(*large),
        "VectorScaling": lambda: VectorScaling().fit(*large),
    }
    report_maps(large, vectors, rounds)


def sms_fit(logits: np.ndarray, labels: np.ndarray) -> Fit:
    """The fit of probmetrics' SMS, without the softmax that it takes."""
    from probmetrics.calibrators import get_calibrator  # of the bench environment alone

    probs = torch.softmax(torch.from_numpy(logits).double(), dim=1).numpy()
    return lambda: get_calibrator("sms").fit(probs, labels)


def compare_auto(rounds: int) -> None:
    logits, labels = make_mixed_data(2000, 100)
    fits: dict[str, Fit] = {
        "probmetrics SMS": sms_fit(logits, labels),
        "AutoScaling": lambda: AutoScaling().fit(logits, labels),
    }
    seconds, found = interleaved(fits, rounds)
    print_table(f"The choice of a map, {shape_of(logits)}", seconds, "probmetrics SMS")
    print(f"  chosen: {found['AutoScaling'].choice_}", flush=True)


def report_maps(
    data: tuple[np.ndarray, np.ndarray], fits: dict[str, Fit], rounds: int
) -> None:
    baseline = next(iter(fits))
    seconds, found = interleaved(fits, rounds)
    print_table(f"Linear maps, {shape_of(data[0])}", seconds, baseline)
    for name, scaler in found.items():
        if name.endswith("Scaling") and name != baseline:
            least = penalised_loss(fitted_on(scaler, *data), *data)
            excess = penalised_loss(scaler, *data) - least
            print(f"  {name:30s} {excess:.1e} nats in excess", flush=True)


def fitted_on(
    scaler: BaseEstimator, logits: np.ndarray, labels: np.ndarray
) -> BaseEstimator:
    """The same map, fitted until a step would gain less than 1e-13 nats."""
    further = clone(scaler)
    rows = Rows.checked(logits, labels)
    start = Start(ScaledLoss(rows).best_temperature(), nats=1e-13)
    further.weight_, further.bias_ = scaler.solve(rows, start)
    return further


def penalised_loss(scaler: Any, logits: np.ndarray, labels: np.ndarray) -> float:
    """The objective in its documented form, written down again."""
    n, c = logits.shape
    loss = total_nll(scaler.transform, logits, labels)
    # The penalties are on the weights after the temperature.
    weight = scaler.weight_ * TemperatureScaling().fit(logits, labels).temperature_
    own = weight
    between = 0.0
    if weight.ndim == 2:
        own = weight.diagonal()
        between = np.square(weight).sum() - np.square(own).sum()
    bias = np.square(scaler.bias_).sum()
    if isinstance(scaler, StructuredMatrixScaling | StructuredVectorScaling):
        loss += c * (np.square(own - 1).sum() + bias) + c * (c - 1) * between
    elif isinstance(scaler, MatrixScaling):
        loss += 10 * c * between + bias / 2
    return loss / n


def make_mixed_data(n: int, c: int) -> tuple[np.ndarray, np.ndarray]:
    """Over-confident logits, with labels of which no temperature gives the probabilities."""
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=1.5, size=(n, c)).astype(np.float32)
    logits[np.arange(n), rng.integers(c, size=n)] += 8
    mixing = np.eye(c) + 0.4 * rng.normal(size=(c, c)) / np.sqrt(c)
    offsets = rng.normal(size=c).astype(np.float32)
    true = logits @ mixing.astype(np.float32) + 0.5 * offsets
    noise = rng.gumbel(size=(n, c)).astype(np.float32)
    labels = (true + noise).argmax(axis=1)
    logits *= TRUE_TEMPERATURE
    return logits, labels


class Identity(ClassifierMixin, BaseEstimator):
    """A classifier whose decision values are its inputs."""

    def __init__(self, n_classes: int) -> None:
        self.n_classes = n_classes
        self.classes_ = np.arange(n_classes)

    def fit(self, logits: np.ndarray, labels: np.ndarray) -> Identity:
        return self

    def decision_function(self, logits: np.ndarray) -> np.ndarray:
        return logits

    def predict(self, logits: np.ndarray) -> np.ndarray:
        return logits.argmax(axis=1)


def fit_public_scikit_learn(logits: np.ndarray, labels: np.ndarray) -> float:
    frozen = FrozenEstimator(Identity(logits.shape[1]))
    fitted = CalibratedClassifierCV(frozen, method="temperature").fit(logits, labels)
    return 1 / float(fitted.calibrated_classifiers_[0].calibrators[0].beta_)


def compare_grids(
    logits: np.ndarray, labels: np.ndarray, rounds: int, every: int
) -> None:
    grid = np.arange(1, 101) / 10
    tensors = torch.from_numpy(logits), torch.from_numpy(labels)

    def search(with_nll: bool) -> float:
        part = grid[::every].tolist()
        return min(part, key=partial(step, *tensors, with_nll=with_nll))

    seconds, temperatures = interleaved(
        {
            OURS: lambda: TemperatureScaling("ece").fit(logits, labels).temperature_,
            "focal_calibration's way": partial(search, with_nll=True),
            "without its cross entropy": partial(search, with_nll=False),
        },
        rounds,
    )
    for name in set(seconds) - {OURS}:
        seconds[name] = [value * every for value in seconds[name]]
    print_table(f"ECE on 100 temperatures, {shape_of(logits)}", seconds)
    found = temperatures[OURS]
    probs = torch.softmax(tensors[0] / found, dim=1).numpy()
    error = step(*tensors, found, with_nll=False)
    difference = abs(expected_calibration_error(probs, labels) - error)
    differ = f"where the two errors differ by {difference:.1e}"
    print(f"  {OURS:30s} T = {found}, {differ}")


def step(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, *, with_nll: bool
) -> float:
    """Expected calibration error at one temperature, with one mask over all examples for each bin."""
    if with_nll:
        F.cross_entropy(logits / temperature, labels).item()
    confidences, predicted = torch.softmax(logits / temperature, dim=1).max(dim=1)
    correct = (predicted == labels).float()
    edges = torch.linspace(0, 1, N_BINS + 1)
    error = torch.zeros(())
    for lower, upper in pairwise(edges):
        inside = (confidences > lower) & (confidences <= upper)
        if inside.any():
            gap = (confidences[inside].mean() - correct[inside].mean()).abs()
            error += gap * inside.float().mean()
    return error.item()


def interleaved(
    fits: dict[str, Fit], rounds: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of each fit in each round, and what it finds; a round more comes first, to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in fits}
    temperatures = {}
    for _ in range(rounds + 1):
        for name, fit in fits.items():
            start = time.perf_counter()
            temperatures[name] = fit()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}, temperatures


def shape_of(logits: np.ndarray) -> str:
    return f"{logits.shape[0]} x {logits.shape[1]} {logits.dtype}"


def print_table(
    title: str, seconds: dict[str, list[float]], baseline: str = OURS
) -> None:
    print(f"\n{title}")
    for name, values in seconds.items():
        ratio = median(np.divide(values, seconds[baseline]).tolist())
        milliseconds = 1e3 * median(values)
        print(f"  {name:30s} {milliseconds:10.1f} ms {ratio:8.1f} x", flush=True)


if __name__ == "__main__":
    main()
