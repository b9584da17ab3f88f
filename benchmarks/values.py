"""Values of losses, metrics, calibrators, decisions and reports on fixed inputs, to find changes by a refactoring.

    python benchmarks/values.py > before.json                       # in a checkout of the old code
    python benchmarks/values.py > after.json                        # some: values.py losses metrics maps decisions
    python benchmarks/values.py before.json after.json [tolerance]  # what differs by more than 1e-12, and by how much

Both runs need the same machine and packages. An array is recorded by its shape and eight sums with
random signs.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import expit, softmax

from hf_calib import decisions, metrics
from hf_calib.losses import LOSSES, AdaptiveLoss, make_loss
from hf_calib.metrics.intervals import METRICS
from hf_calib.report import calibration_report
from hf_calib.scaling import SCALERS, PriorCorrection

SIZES = {"binary": (300, 2), "ten": (700, 10), "fifty": (1_200, 50)}
Rows = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def rows(name: str) -> Rows:
    """Over-confident logits (N, C), float64, with the labels that a third of their size would give."""
    n_rows, n_classes = SIZES[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    logits = 3 * rng.normal(size=(n_rows, n_classes))
    cumulated = softmax(logits / 3, axis=1).cumsum(axis=1)
    labels = (cumulated < rng.random((n_rows, 1))).sum(axis=1)
    return logits, labels.clip(max=n_classes - 1)


def labels_per_row() -> Rows:
    """Logits (400, 6) of several labels per row, some of which are not known."""
    rng = np.random.default_rng(6)
    logits = 2 * rng.normal(size=(400, 6)) - 1
    labels = (rng.random((400, 6)) < expit(logits / 2)).astype(np.int64)
    labels[rng.random((400, 6)) < 0.05] = -100
    return logits, labels


# A value's name, and what computes it.
Values = Iterator[tuple[str, Callable[[], Any]]]


def of_losses() -> Values:
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    for name, data, dtype in product(LOSSES, SIZES, dtypes):
        yield f"loss {name} {data} {dtype}", partial(loss, name, data, dtype)


def loss(name: str, data: str, dtype: torch.dtype) -> list[Any]:
    """The loss and its gradient; of an adaptive one after an update, too."""
    logits, labels = rows(data)
    made = make_loss(name)
    found: list[Any] = []
    for _ in range(2):
        leaf = torch.from_numpy(logits).to(dtype).requires_grad_()
        value = made(leaf, torch.from_numpy(labels))
        value.backward()
        found += [value.detach().double().numpy(), leaf.grad.double().numpy()]
        if not isinstance(made, AdaptiveLoss):
            break
        probs = softmax(logits, axis=1)
        correct = (probs.argmax(axis=1) == labels).astype(np.float64)
        frequencies = np.bincount(labels, minlength=probs.shape[1]) / len(labels)
        gaps = np.abs(probs.mean(axis=0) - frequencies)
        made.update(probs.max(axis=1), correct, class_gaps=gaps, progress=0.5)
        found.append({key: value.numpy() for key, value in made.state_dict().items()})
    return found


def of_metrics() -> Values:
    for data in SIZES:
        logits, labels = rows(data)
        probs = softmax(logits, axis=1)
        own = probs, labels
        for name, entry in METRICS.items():
            yield f"metric {name} {data}", partial(entry.function, *own)
            if entry.sums is not None:
                interval = partial(metrics.bootstrap_interval, name, *own)
                yield f"interval {name} {data}", partial(interval, n_resamples=200)
        ece = partial(metrics.expected_calibration_error, *own)
        for options in (
            {"binning": "quantile"},
            {"binning": "equal_mass", "debias": True},
            {"norm": "l2"},
        ):
            yield f"ece {options} {data}", partial(ece, **options)
        test = partial(metrics.consistency_test, *own, n_resamples=200)
        yield f"consistency {data}", test
        yield f"ood {data}", partial(detected, logits)
        yield f"streaming {data}", partial(streamed, logits, labels)
        yield f"report {data}", partial(reported, logits, labels)
    several = partial(streamed, *labels_per_row(), multi_label=True)
    yield "streaming several labels", several


def detected(logits: Any) -> tuple[Any, ...]:
    found = metrics.ood_detection(logits, logits / 2, n_resamples=100)
    return tuple(found.items())


def reported(logits: Any, labels: Any) -> dict[str, Any]:
    probs = softmax(logits, axis=1)
    softer = softmax(logits / 2, axis=1)
    report = calibration_report(probs, labels, calibrated=softer, n_resamples=200)
    return report.to_dict()


def streamed(
    logits: Any, labels: Any, *, multi_label: bool = False
) -> dict[str, float]:
    state = metrics.CalibrationState(n_classes=logits.shape[1])
    targets = torch.from_numpy(labels)
    if multi_label:
        targets = targets.double()
    state.update_logits(torch.from_numpy(logits), targets, multi_label=multi_label)
    return state.compute()


def of_maps() -> Values:
    for method, data in product(SCALERS, SIZES):
        # The choice of a map takes minutes with fifty classes.
        takes_long = data == "fifty" and method == "auto"
        if SCALERS[method].needs == "labels" and not takes_long:
            scaler = SCALERS[method].load()()
            yield f"map {method} {data}", partial(mapped, scaler, *rows(data))
    for criterion in ("ece", "adaptive_ece"):
        scaler = SCALERS["temperature"].load()(criterion)
        yield f"map temperature {criterion}", partial(mapped, scaler, *rows("ten"))
    for method in ("temperature", "auto", "per_label_temperature"):
        scaler = SCALERS[method].load()()
        if method != "per_label_temperature":
            scaler.set_params(multi_label=True)
        several = partial(mapped, scaler, *labels_per_row())
        yield f"map {method} several labels", several
    yield "prior correction", prior


def mapped(scaler: Any, logits: Any, labels: Any) -> list[Any]:
    scaler.fit(logits, labels)
    return [scaler.predict_proba(logits), scaler.predict_proba(logits[:50] * 1.5)]


def prior() -> list[Any]:
    logits, labels = rows("ten")
    scaler = SCALERS["temperature"].load()().fit(logits, labels)
    assumed = np.full(10, 10)
    correction = PriorCorrection(assumed, np.arange(1, 11), scaler)
    return [correction.predict_proba(logits)]


def of_decisions() -> Values:
    costs = np.column_stack([1.0 - np.eye(10), np.full(10, 0.4)])
    rules = {
        "abstain": decisions.AbstainRule(accuracy=0.7),
        "abstain by class": decisions.AbstainRule(accuracy=0.5, by_class=True),
        "costs": decisions.CostRule(costs),
        "sets lac": decisions.PredictionSets(alpha=0.1),
        "sets aps": decisions.PredictionSets(alpha=0.1, method="aps"),
    }
    for name, rule in rules.items():
        yield f"decisions {name}", partial(decided, rule)


def decided(rule: Any) -> list[Any]:
    logits, labels = rows("ten")
    probs = softmax(logits / 3, axis=1)
    rule.fit(probs[:350], labels[:350])
    return [rule.options(), rule.measure(probs[350:], labels[350:])]


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The names and values of arrays, numbers and words, however they are nested."""
    if hasattr(value, "__dataclass_fields__"):
        value = vars(value)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from flat(item, f"{name}/{at}")
    else:
        yield name, summary(value)


def summary(value: Any) -> Any:
    """A number or a word unchanged; for an array its shape, its scale and eight sums with random signs."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int | float):
        return value
    if not isinstance(value, np.ndarray):
        return repr(value)
    numbers = np.asarray(value, dtype=np.float64).ravel()
    sound = np.isfinite(numbers)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (8, len(numbers)))
    sums = (signs[:, sound] @ numbers[sound]).tolist()
    return {
        "shape": list(value.shape),
        "finite": int(sound.sum()),
        "scale": float(np.abs(numbers[sound]).sum()),
        "sums": sums,
    }


def difference(before: Any, after: Any) -> float:
    """How far two summaries are apart, relative to their scale; infinite where they cannot be compared."""
    are_nan = before != before and after != after
    if before == after or are_nan:
        return 0.0
    if isinstance(before, int | float) and isinstance(after, int | float):
        return abs(before - after) / max(1.0, abs(before))
    are_arrays = isinstance(before, dict) and isinstance(after, dict)
    if not are_arrays or any(before[key] != after[key] for key in ("shape", "finite")):
        return float("inf")
    apart = np.abs(np.subtract(before["sums"], after["sums"])).max()
    return float(apart / max(before["scale"], 1e-300))


PARTS = {
    "losses": of_losses,
    "metrics": of_metrics,
    "maps": of_maps,
    "decisions": of_decisions,
}


def compare(before: dict[str, Any], after: dict[str, Any], tolerance: float) -> None:
    """Print what differs by more than the tolerance, what is new and what is gone."""
    of_parts = {name.split()[0] for name in after}
    compared = [name for name in before | after if name.split()[0] in of_parts]
    changes = []
    for name in sorted(compared):
        if name not in after:
            changes.append(f"{name} is gone")
        elif name not in before:
            changes.append(f"{name} is new")
        else:
            apart = difference(before[name], after[name])
            if apart > tolerance:
                changes.append(f"{name} differs by {apart:.1e}")
    print(*changes, f"{len(after)} values compared", sep="\n")
    if not changes:
        print(f"none differs by more than {tolerance:g}")
    raise SystemExit(bool(changes))


def main(given: list[str]) -> None:
    if given and given[0] not in PARTS:
        before, after = (json.loads(Path(path).read_text()) for path in given[:2])
        compare(before, after, float(given[2]) if len(given) > 2 else 1e-12)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for part in given or PARTS:
        for name, compute in PARTS[part]():
            try:
                found |= {name + path: value for path, value in flat(compute())}
            except ValueError as error:
                # Of a metric that these rows do not have.
                found[name] = f"ValueError: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
