"""Time and memory of the losses, forward and backward, against `F.cross_entropy` in the same run.

    python benchmarks/losses.py --threads 1
    python benchmarks/losses.py --device cuda --output benchmarks/results/losses_h100.json
    python benchmarks/gpu_tables.py                      # the tables of docs/results/speed.md from that file

The columns are

* by hand: the formula as a user would write it, in the dtype of the logits; and the same under `torch.compile`;
* definition: our loss by autograd alone, which is its definition;
* plain: our loss by PyTorch's operations;
* kernels: our loss by Triton's kernels, for logits of any size, on a GPU.

Each round times every case once, cross entropy first, so that a change of the machine's load meets
all of them; the tables give medians over the rounds. Memory is the peak in addition to the logits,
in units of the logits. On a GPU there is also the time of the device alone, without the host, by
the replay of a CUDA graph.

On the CPU much of the time is spent on allocating large buffers, page by page. Cross entropy needs
three of them, these losses one. To time only the arithmetic, let the process keep freed memory:
MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=2000000000 (glibc).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_calib.losses import LOSSES, AdaptiveLoss, make_loss
from hf_calib.losses.engine import plain
from hf_calib.losses.statistics import fused

SHAPES = {
    "cpu": ["32x4", "128x10", "4096x1000", "1024x32000"],
    "cuda": ["128x10", "4096x1000", "8192x32000", "4096x128256"],
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BASELINE = "F.cross_entropy"
# Those of the page; a call for all on a GPU takes more than a quarter of an hour.
ON_A_GPU = ["cross_entropy", "focal", "dual_focal", "bsce_gra", "adafocal"]
ON_A_GPU += ["focal_calibration", "brier", "mmce"]
# To compile one takes 10 seconds and more for each shape and dtype.
COMPILED = ["focal", "dual_focal"]
# Shorter runs are repeated within one measurement.
LEAST_SECONDS = 0.005
KINDS = ("by hand", "compiled", "definition", "plain", "kernels")

Loss = Callable[[Tensor, Tensor], Tensor]
Run = Callable[[], None]


# ---- The formulas as a user would write them ----


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    ce = F.cross_entropy(logits, labels, reduction="none")
    p = torch.exp(-ce)
    return ((1 - p) ** 3 * ce).mean()


def dual_focal(logits: Tensor, labels: Tensor) -> Tensor:
    log_probs = F.log_softmax(logits, dim=1)
    probs = log_probs.exp()
    log_p = log_probs.gather(1, labels[:, None]).squeeze(1)
    p = log_p.exp()
    below = torch.where(probs < p[:, None], probs, torch.zeros_like(probs))
    q = below.max(dim=1).values
    return (-((1 - p + q) ** 5) * log_p).mean()


def distance_to_label(logits: Tensor, labels: Tensor) -> Tensor:
    probs = logits.softmax(dim=1)
    return (probs - F.one_hot(labels, logits.shape[1])).square().sum(dim=1)


def brier(logits: Tensor, labels: Tensor) -> Tensor:
    return distance_to_label(logits, labels).mean()


def label_smoothing(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=0.05)


def bsce_gra(logits: Tensor, labels: Tensor) -> Tensor:
    ce = F.cross_entropy(logits, labels, reduction="none")
    return (distance_to_label(logits, labels).detach() * ce).mean()


def focal_calibration(logits: Tensor, labels: Tensor) -> Tensor:
    return focal(logits, labels) + 0.5 * brier(logits, labels)


def mmce(logits: Tensor, labels: Tensor) -> Tensor:
    confidence, predicted = logits.softmax(dim=1).max(dim=1)
    correct = (predicted == labels).to(confidence)
    n_correct = correct.sum().clamp_min(1)
    n_wrong = (1 - correct).sum().clamp_min(1)
    weights = correct / n_correct + (1 - correct) / n_wrong
    errors = weights * (correct - confidence)
    kernel = torch.exp(-(confidence[:, None] - confidence).abs() / 0.4)
    squared = errors @ kernel @ errors
    ce = F.cross_entropy(logits, labels)
    return ce + 0.5 * (squared.clamp_min(0) + 1e-10).sqrt()


def adafocal_by_hand(loss: Any, device: str) -> Loss:
    """The formula with the table of our loss."""
    edges = loss.edges[1:-1].float().to(device)
    gammas = loss.gammas.float().to(device)

    def adafocal(logits: Tensor, labels: Tensor) -> Tensor:
        ce = F.cross_entropy(logits, labels, reduction="none")
        p = torch.exp(-ce)
        gamma = gammas[torch.bucketize(p.detach().float(), edges, right=True)]
        base = torch.where(gamma < 0, 1 + p, 1 - p)
        return (base ** gamma.abs() * ce).mean()

    return adafocal


BY_HAND: dict[str, Loss] = {
    "focal": focal,
    "dual_focal": dual_focal,
    "brier": brier,
    "label_smoothing": label_smoothing,
    "bsce_gra": bsce_gra,
    "focal_calibration": focal_calibration,
    "mmce": mmce,
}


# ---- What is timed ----


@dataclass
class Case:
    """A loss in one of its kinds, and the context in which it is of this kind."""

    loss: Loss
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def without_kernels() -> AbstractContextManager[Any]:
    return mock.patch.dict(os.environ, {fused.SWITCH: "0"})


def with_kernels() -> AbstractContextManager[Any]:
    return mock.patch.object(fused, "LEAST_ELEMENTS", 0)


def by_autograd() -> AbstractContextManager[Any]:
    return mock.patch("hf_calib.losses.loss.reduced", plain)


def trained(name: str, n_classes: int) -> Any:
    """The loss; with a table as after an update, if it has one."""
    loss = make_loss(name)
    if isinstance(loss, AdaptiveLoss):
        confidences = torch.linspace(0.01, 0.99, 99)
        loss.update(
            confidences,
            torch.arange(99) % 2,
            class_gaps=torch.full((n_classes,), 0.1),
            progress=0.5,
        )
    return loss


def make_cases(
    names: Sequence[str], compiled: Sequence[str], n_classes: int, device: str
) -> dict[tuple[str, str], Case]:
    """The cases by loss and kind; the baseline is the first."""
    cases = {(BASELINE, "by hand"): Case(F.cross_entropy)}
    if compiled:
        torch.compiler.reset()
        cases[BASELINE, "compiled"] = Case(torch.compile(F.cross_entropy))
    for name in names:
        loss = trained(name, n_classes)
        by_hand = BY_HAND.get(name)
        if name == "adafocal":
            by_hand = adafocal_by_hand(loss, device)
        if by_hand is not None:
            cases[name, "by hand"] = Case(by_hand)
            if name in compiled:
                cases[name, "compiled"] = Case(torch.compile(by_hand))
        cases[name, "definition"] = Case(loss, by_autograd)
        cases[name, "plain"] = Case(loss, without_kernels)
        if device == "cuda":
            cases[name, "kernels"] = Case(loss, with_kernels)
    return cases | liger()


def liger() -> dict[tuple[str, str], Case]:
    """Its cross entropy kernel, where it is installed."""
    try:
        from liger_kernel.transformers import LigerCrossEntropyLoss
    except ImportError:
        return {}
    return {("Liger's cross entropy", "by hand"): Case(LigerCrossEntropyLoss())}


# ---- Measurements ----


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_args(arguments)
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {args.device}, {args.threads} threads, {args.rounds} rounds"
    )
    records = []
    for shape in args.shapes:
        for dtype in args.dtypes:
            found = measured(args, shape, dtype)
            print_tables(found, args.device)
            records += found
            if args.output:
                # After each shape, so that what is measured stays if the machine is gone.
                text = json.dumps([in_file(each) for each in records], indent=1)
                args.output.write_text(text, encoding="utf-8")


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, metavar="LOSS")
    parser.add_argument("--compiled", nargs="*", choices=BY_HAND, metavar="LOSS")
    parser.add_argument("--shapes", nargs="+", metavar="NxC")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="a JSON file for the records")
    args = parser.parse_args(arguments)
    on_gpu = args.device == "cuda"
    args.losses = args.losses or (ON_A_GPU if on_gpu else list(LOSSES))
    args.shapes = args.shapes or SHAPES.get(args.device, SHAPES["cpu"])
    if args.compiled is None:
        args.compiled = COMPILED if on_gpu else []
    return args


def measured(args: argparse.Namespace, shape: str, dtype: str) -> list[dict[str, Any]]:
    """A record for each case: its times in milliseconds, its memory, and the seconds of its first call."""
    n_rows, n_classes = map(int, shape.split("x"))
    torch.manual_seed(0)
    logits = torch.randn(n_rows, n_classes, device=args.device)
    logits = logits.to(DTYPES[dtype]).requires_grad_()
    labels = torch.randint(n_classes, (n_rows,), device=args.device)
    cases = make_cases(args.losses, args.compiled, n_classes, args.device)

    def run_of(loss: Loss) -> Run:
        def run() -> None:
            loss(logits, labels).backward()
            logits.grad = None

        return run

    runs = {key: run_of(case.loss) for key, case in cases.items()}
    first = {}
    repeats = {}
    for key, run in runs.items():
        with cases[key].context():
            first[key] = timed(run, 1, args.device)
            once = timed(run, 3, args.device)
        repeats[key] = max(1, int(LEAST_SECONDS / once))
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(args.rounds):
        for key, run in runs.items():
            with cases[key].context():
                seconds[key].append(timed(run, repeats[key], args.device))
    records = []
    for (name, kind), run in runs.items():
        with cases[name, kind].context():
            peak = peak_memory(run, args.device) / logits.nbytes
            device_ms = None
            if args.device == "cuda":
                device_ms = replayed_ms(lambda run=run: run(), repeats[name, kind])
        records.append(
            {
                "loss": name,
                "kind": kind,
                "shape": [n_rows, n_classes],
                "dtype": dtype,
                "ms": 1e3 * median(seconds[name, kind]),
                "graph_ms": device_ms,
                "peak": peak,
                "first_s": first[name, kind],
            }
        )
    return records


def in_file(record: dict[str, Any]) -> dict[str, Any]:
    """The record as `gpu_tables.py` reads it, in which a loss by hand has a name of its own."""
    name = record["loss"]
    kind = record["kind"]
    if kind not in ("by hand", "compiled"):
        return record
    if name in BY_HAND or name == "adafocal":
        name = f"hand {name.replace('_', ' ')}"
    return record | {"loss": name, "kind": "torch" if kind == "by hand" else kind}


def timed(run: Run, repeats: int, device: str) -> float:
    """The seconds of one run."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def replayed_ms(run: Run, repeats: int) -> float | None:
    """The time of the device alone, by the replay of a CUDA graph; None if the run cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        print(f"not captured: {str(error).splitlines()[0]}")
        return None
    times = []
    for _ in range(5):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return median(times)


def peak_memory(run: Run, device: str) -> int:
    """Peak memory in bytes, in addition to what is held before."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    sizes = torch.tensor(
        [event.nbytes() for event in events if event.name() == "[memory]"]
    )
    return int(sizes.cumsum(0).max())


def print_tables(records: Sequence[dict[str, Any]], device: str) -> None:
    """The tables of one shape and dtype: a row for each loss, a column for each kind."""
    baseline = records[0]["ms"]
    shape = "x".join(map(str, records[0]["shape"]))
    title = f"{shape} {records[0]['dtype']}"
    print(f"\n{title}: {BASELINE} takes {baseline:.3f} ms")
    of_time = {}
    of_device = {}
    of_memory = {}
    for each in records:
        key = each["loss"], each["kind"]
        of_time[key] = each["ms"] / baseline
        of_device[key] = each["graph_ms"]
        of_memory[key] = each["peak"]
    print_table(f"time / {BASELINE}", of_time)
    if device == "cuda":
        print_table("the device's own time, ms", of_device)
    print_table("peak memory / logits", of_memory)


def print_table(title: str, values: dict[tuple[str, str], float | None]) -> None:
    used = {kind for _, kind in values}
    kinds = [kind for kind in KINDS if kind in used]
    print(title.ljust(26), *(kind.rjust(10) for kind in kinds))
    for name in dict.fromkeys(name for name, _ in values):
        cells = []
        for kind in kinds:
            value = values.get((name, kind))
            cells.append("-" if value is None else f"{value:.3g}")
        print(name.ljust(26), *(cell.rjust(10) for cell in cells), flush=True)


if __name__ == "__main__":
    main()
