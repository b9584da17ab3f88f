"""Time and memory of the losses, forward and backward, against `F.cross_entropy` in the same run.

    python benchmarks/losses.py --threads 1
    python benchmarks/losses.py --device cuda --losses focal dual_focal

Each round times every loss once, cross entropy first, so that a change of the machine's load meets all of
them; the table gives medians over the rounds. Memory is the peak in addition to the logits, in units of
the logits.

On the CPU much of the time is spent on allocating large buffers, page by page. Cross entropy needs three of them,
these losses one. To time only the arithmetic, let the process keep freed memory: MALLOC_TRIM_THRESHOLD_=4000000000
MALLOC_MMAP_THRESHOLD_=2000000000 (glibc).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_calib.losses import LOSSES, AdaptiveLoss, make_loss

SHAPES = {
    "cpu": [(128, 10), (4096, 1000), (1024, 32000)],
    "cuda": [(128, 10), (4096, 1000), (8192, 32000), (4096, 128256)],
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BASELINE = "F.cross_entropy"
LEAST_SECONDS = 0.005  # of one measurement: shorter runs are repeated

Loss = Callable[[Tensor, Tensor], Tensor]
Run = Callable[[], None]


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {args.device}, {args.threads} threads, {args.rounds} rounds"
    )
    columns = [
        (shape, dtype)
        for shape in SHAPES.get(args.device, SHAPES["cpu"])
        for dtype in args.dtypes
    ]
    times, memory = {}, {}
    for shape, dtype in columns:
        runs = make_runs(args.losses, shape, DTYPES[dtype], args.device)
        column = f"{shape[0]}x{shape[1]} {dtype}"
        seconds = interleaved(runs, args.rounds, args.device)
        times[column] = ratios(seconds)
        nbytes = shape[0] * shape[1] * DTYPES[dtype].itemsize
        memory[column] = {
            name: peak_memory(run, args.device) / nbytes for name, run in runs.items()
        }
        print(
            f"{column}: {BASELINE} takes {1e3 * median(seconds[BASELINE]):.3f} ms",
            flush=True,
        )
    print_table(f"time / {BASELINE}", times)
    print_table("peak memory / logits", memory)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--losses", nargs="+", default=list(LOSSES), choices=LOSSES, metavar="LOSS"
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


def make_runs(
    names: list[str], shape: tuple[int, int], dtype: torch.dtype, device: str
) -> dict[str, Run]:
    """A forward and backward of each loss, on the same logits."""
    torch.manual_seed(0)
    logits = torch.randn(shape, device=device).to(dtype).requires_grad_()
    labels = torch.randint(shape[1], shape[:1], device=device)
    losses: dict[str, Loss] = {BASELINE: F.cross_entropy} | {
        name: trained(name, shape[1]) for name in names
    }
    if device == "cuda":
        losses["F.cross_entropy, compiled"] = torch.compile(F.cross_entropy)
        losses |= liger()

    def run(loss: Loss) -> None:
        loss(logits, labels).backward()
        logits.grad = None

    return {name: partial(run, loss) for name, loss in losses.items()}


def liger() -> dict[str, Loss]:
    """Its cross entropy kernel, where it is installed."""
    try:
        from liger_kernel.transformers import LigerCrossEntropyLoss
    except ImportError:
        return {}
    return {"Liger's cross entropy": LigerCrossEntropyLoss()}


def trained(name: str, n_classes: int) -> Loss:
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


def interleaved(
    runs: dict[str, Run], rounds: int, device: str
) -> dict[str, list[float]]:
    """Seconds of each run in each round; a round more comes first, to warm up."""
    repeats = {
        name: max(1, int(LEAST_SECONDS / timed(run, 3, device)))
        for name, run in runs.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            seconds[name].append(timed(run, repeats[name], device))
    return {name: values[1:] for name, values in seconds.items()}


def timed(run: Run, repeats: int, device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the rounds of each run's time by that of cross entropy in the same round."""
    return {
        name: median(
            value / base for value, base in zip(values, seconds[BASELINE], strict=True)
        )
        for name, values in seconds.items()
    }


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


def print_table(title: str, columns: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}")
    print(" " * 20, *columns, sep="  ")
    for name in next(iter(columns.values())):
        cells = [
            f"{column[name]:.2f}".rjust(len(header))
            for header, column in columns.items()
        ]
        print(name.ljust(20), *cells, sep="  ")


if __name__ == "__main__":
    main()
