"""Print the tables of docs/results/speed.md of the losses on an H100, from results/losses_h100.json.

    python benchmarks/gpu_tables.py

A record of the file has a loss, its kind and its shape, `ms` (wall time of forward and backward, the median of 7),
`graph_ms` (the device's own time, by the replay of a CUDA graph), `peak` (memory in addition to the logits, in units
of the logits) and `first_s` (the first call). The kinds are "kernels", the fused kernels; "plain", the same loss
without them; and "compiled", the latter under `torch.compile`. The losses "hand focal" and "hand dual focal" are what a
user writes, by `F.cross_entropy(reduction="none")` and by a softmax.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SHAPES = ((128, 10), (4096, 1000), (8192, 32_000), (4096, 128_256))
LOSSES = (
    "cross_entropy",
    "focal",
    "dual_focal",
    "bsce_gra",
    "adafocal",
    "focal_calibration",
    "brier",
    "mmce",
)
Records = dict[tuple[str, str, tuple[int, ...], str], dict[str, Any]]


def read(path: Path) -> Records:
    """The records by loss, kind, shape and dtype."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return {
        (each["loss"], each["kind"], tuple(each["shape"]), each["dtype"]): each
        for each in found
    }


def shown(shape: Sequence[int]) -> str:
    return f"{shape[0]:,} x {shape[1]:,}"


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def ratio(value: float) -> str:
    """A ratio of times to two significant digits."""
    return (
        f"{value:.0f}" if value >= 9.95 else f"{value:.{1 if value >= 0.995 else 2}f}"
    )


def times(records: Records, dtype: str) -> Iterator[str]:
    """Wall times as ratios to `F.cross_entropy`, line by line; a kind that was not timed is "-"."""
    of_baseline = {
        shape: records["F.cross_entropy", "torch", shape, dtype]["ms"]
        for shape in SHAPES
    }
    header = [f"{shown(shape)} ({of_baseline[shape]:.2f} ms)" for shape in SHAPES]
    yield line([dtype, *header])
    yield f"|{'---|' * (len(SHAPES) + 1)}"
    by_hand = ("torch", "compiled")
    rows = [(f"`{name}`", name, ("kernels", "plain", "compiled")) for name in LOSSES]
    rows = [
        ("`F.cross_entropy`; compiled", "F.cross_entropy", by_hand),
        ("focal by hand; compiled", "hand focal", by_hand),
        ("dual focal by hand; compiled", "hand dual focal", by_hand),
        *rows,
    ]
    for title, loss, kinds in rows:
        cells = [title]
        for shape in SHAPES:
            found = [records.get((loss, kind, shape, dtype)) for kind in kinds]
            ratios = [
                "-" if each is None else ratio(each["ms"] / of_baseline[shape])
                for each in found
            ]
            cells.append("; ".join(ratios))
        yield line(cells)


def device_times(records: Records) -> Iterator[str]:
    """The device's own times in milliseconds, line by line."""
    columns = [(shape, dtype) for dtype in ("float32", "bfloat16") for shape in SHAPES]
    yield line(["ms", *(f"{shown(shape)}, {dtype}" for shape, dtype in columns)])
    yield f"|{'---|' * (len(columns) + 1)}"
    rows = [
        ("`F.cross_entropy`", "F.cross_entropy", "torch"),
        ("focal by hand", "hand focal", "torch"),
        ("`focal`, kernels", "focal", "kernels"),
        ("`focal` without them", "focal", "plain"),
        ("`dual_focal`, kernels", "dual_focal", "kernels"),
        ("`dual_focal` without them", "dual_focal", "plain"),
        ("`mmce`, kernels", "mmce", "kernels"),
        ("`mmce` without them", "mmce", "plain"),
    ]
    for title, loss, kind in rows:
        found = [records[(loss, kind, *column)]["graph_ms"] for column in columns]
        yield line([title, *(f"{ms:.3f}" for ms in found)])


def memory(records: Records) -> Iterator[str]:
    """The peak memory in units of the logits, line by line; a range over the losses but mmce."""
    columns = [(shape, dtype) for dtype in ("float32", "bfloat16") for shape in SHAPES]
    yield line(["peak / logits", *(f"{shown(each[0])}, {each[1]}" for each in columns)])
    yield f"|{'---|' * (len(columns) + 1)}"
    row_wise = [name for name in LOSSES if name != "mmce"]
    rows = [
        ("`F.cross_entropy`", ["F.cross_entropy"], "torch"),
        ("focal by hand", ["hand focal"], "torch"),
        ("dual focal by hand", ["hand dual focal"], "torch"),
        ("kernels", row_wise, "kernels"),
        ("without them", row_wise, "plain"),
        ("`mmce`, kernels", ["mmce"], "kernels"),
    ]
    for title, losses, kind in rows:
        cells = [title]
        for column in columns:
            peaks = [records[(loss, kind, *column)]["peak"] for loss in losses]
            ends = [f"{min(peaks):.1f}", f"{max(peaks):.1f}"]
            cells.append("-".join(dict.fromkeys(ends)))
        yield line(cells)


def tables(path: Path = RESULTS / "losses_h100.json") -> list[str]:
    """The lines of all tables."""
    records = read(path)
    return [
        *times(records, "float32"),
        "",
        *times(records, "bfloat16"),
        "",
        *device_times(records),
        "",
        *memory(records),
    ]


if __name__ == "__main__":
    print("\n".join(tables()))
