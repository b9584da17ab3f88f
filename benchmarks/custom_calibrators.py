"""Our calibrators in the interface of probmetrics, for CalArena (probkit/CalArena, arXiv 2605.30188).

    python benchmarks/custom_calibrators.py outputs/posthoc/*.npz   # next to those of probmetrics, on our logits

`CALIBRATORS` has them by name: `AutoScaling`, and the structured maps with the penalty that
cross-validation takes and the temperature of the mapped rows out of fold on top. CalArena itself
was not at hand: that it takes a `Calibrator` is from the words of probmetrics 1.3, which implements
its methods. They read probabilities, raised to 1e-30.
"""

from __future__ import annotations

import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from choice_rules import cross_validated
from numpy.typing import NDArray
from probmetrics.calibrators import Calibrator, get_calibrator
from scipy.special import softmax

from hf_calib.metrics import expected_calibration_error, negative_log_likelihood
from hf_calib.scaling import AutoScaling

PEERS = ("ts-mix", "svs", "sms")  # of probmetrics; ts-mix: a temperature
_LEAST = 1e-30
_ROWS = 1000  # of the comparison


class HfCalib(Calibrator):  # type: ignore[misc]  # probmetrics has no types
    """`AutoScaling`, or with a method ("structured_vector", "structured_matrix") that map, its penalty chosen."""

    def __init__(self, method: str | None = None) -> None:
        super().__init__()
        self.method = method

    def _fit_impl(self, X: NDArray[Any], y: NDArray[Any]) -> None:  # noqa: N803, as there
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes without an example
            if self.method is None:
                scaler = AutoScaling().fit(_logits(X), y)
                self.map_ = scaler.transform
                return
            losses, fit = cross_validated(_logits(X), y)
            own = [name for name in losses if name.startswith(self.method)]
            # A method that was left out, such as a matrix of two classes, is the temperature.
            name = min(own or ["temperature"], key=lambda each: losses[each].mean())
            self.map_ = fit(name)

    def _predict_proba_impl(self, X: NDArray[Any]) -> NDArray[np.float64]:  # noqa: N803
        return softmax(self.map_(_logits(X)), axis=1)


CALIBRATORS = {
    "hf_calib-auto": HfCalib,
    "hf_calib-svs": partial(HfCalib, "structured_vector"),
    "hf_calib-sms": partial(HfCalib, "structured_matrix"),
}


def _logits(probs: NDArray[Any]) -> NDArray[np.float64]:
    return np.log(np.maximum(probs.astype(np.float64), _LEAST))


def main(paths: list[str]) -> None:
    made = {
        **CALIBRATORS,
        **{f"probmetrics-{name}": partial(get_calibrator, name) for name in PEERS},
    }
    print(
        f"{_ROWS:,} rows\n\n| model | {' | '.join(made)} |\n|{'---|' * (1 + len(made))}"
    )
    for path in map(Path, paths):
        with np.load(path) as saved:
            pool, pool_labels, test, labels = (
                saved[name]
                for name in ("pool_logits", "pool_labels", "test_logits", "test_labels")
            )
        if labels.ndim == 2:
            continue
        rows = np.random.default_rng(0).permutation(len(pool))[:_ROWS]
        probs = [
            softmax(each.astype(np.float64), axis=1) for each in (pool[rows], test)
        ]
        cells = []
        for make in made.values():
            start = time.perf_counter()
            found = np.asarray(
                make().fit(probs[0], pool_labels[rows]).predict_proba(probs[1])
            )
            seconds = time.perf_counter() - start
            nll, ece = (
                negative_log_likelihood(found, labels),
                expected_calibration_error(found, labels),
            )
            cells.append(f"{nll:.4f}, {ece:.4f}, {seconds:.2f} s")
        print(f"| {path.stem} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
