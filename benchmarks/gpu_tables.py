"""Print the tables of docs/results/speed.md of the losses on an H100, from results/losses_h100.json.

    python benchmarks/gpu_tables.py

A record of the file has a loss, its kind and its shape, `ms` (wall time of forward and backward,
the median of 7), `graph_ms` (the device's own time, by the replay of a CUDA graph), `peak` (memory
in addition to the logits, in units of the logits) and `first_s` (the first call). The kinds are
"kernels", the fused kernels; "plain", the same loss without them; and "compiled", the latter under
`torch.compile`. The losses "hand focal" and "hand dual focal" are what a user writes, by
`F.cross_entropy(reduction="none")` and by a softmax.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from markdown_lines import table_lines

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
DTYPES = ("float32", "bfloat16")
Shape = tuple[int, int]
Records = dict[tuple[str, str, Shape, str], dict[str, Any]]


def read(path: Path) -> Records:
    """The records by loss, kind, shape and dtype."""
    records = {}
    for each in json.loads(path.read_text(encoding="utf-8")):
        shape = tuple(each["shape"])
        records[each["loss"], each["kind"], shape, each["dtype"]] = each
    return records


def shown(shape: Shape) -> str:
    n_rows, n_classes = shape
    return f"{n_rows:,} x {n_classes:,}"


def ratio(value: float) -> str:
    """A ratio of times to two significant digits."""
    if value >= 9.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"


def times(records: Records, dtype: str) -> list[str]:
    """Wall times as ratios to `F.cross_entropy`; a kind that was not timed is "-"."""
    of_baseline = {
        shape: records["F.cross_entropy", "torch", shape, dtype]["ms"]
        for shape in SHAPES
    }
    header = [f"{shown(shape)} ({ms:.2f} ms)" for shape, ms in of_baseline.items()]

    def row(title: str, loss: str, *kinds: str) -> list[str]:
        cells = [title]
        for shape, baseline in of_baseline.items():
            ratios = []
            for kind in kinds:
                found = records.get((loss, kind, shape, dtype))
                ratios.append("-" if found is None else ratio(found["ms"] / baseline))
            cells.append("; ".join(ratios))
        return cells

    rows = [
        row("`F.cross_entropy`; compiled", "F.cross_entropy", "torch", "compiled"),
        row("focal by hand; compiled", "hand focal", "torch", "compiled"),
        row("dual focal by hand; compiled", "hand dual focal", "torch", "compiled"),
    ]
    rows += [row(f"`{name}`", name, "kernels", "plain", "compiled") for name in LOSSES]
    return table_lines([dtype, *header], rows)


def columns() -> list[tuple[Shape, str]]:
    return [(shape, dtype) for dtype in DTYPES for shape in SHAPES]


def device_times(records: Records) -> list[str]:
    """The device's own times in milliseconds."""
    rows = []
    for title, loss, kind in (
        ("`F.cross_entropy`", "F.cross_entropy", "torch"),
        ("focal by hand", "hand focal", "torch"),
        ("`focal`, kernels", "focal", "kernels"),
        ("`focal` without them", "focal", "plain"),
        ("`dual_focal`, kernels", "dual_focal", "kernels"),
        ("`dual_focal` without them", "dual_focal", "plain"),
        ("`mmce`, kernels", "mmce", "kernels"),
        ("`mmce` without them", "mmce", "plain"),
    ):
        found = [records[(loss, kind, *column)]["graph_ms"] for column in columns()]
        rows.append([title, *(f"{ms:.3f}" for ms in found)])
    titles = [f"{shown(shape)}, {dtype}" for shape, dtype in columns()]
    return table_lines(["ms", *titles], rows)


def memory(records: Records) -> list[str]:
    """The peak memory in units of the logits; a range over the losses but mmce."""
    row_wise = [name for name in LOSSES if name != "mmce"]
    rows = []
    for title, losses, kind in (
        ("`F.cross_entropy`", ["F.cross_entropy"], "torch"),
        ("focal by hand", ["hand focal"], "torch"),
        ("dual focal by hand", ["hand dual focal"], "torch"),
        ("kernels", row_wise, "kernels"),
        ("without them", row_wise, "plain"),
        ("`mmce`, kernels", ["mmce"], "kernels"),
    ):
        cells = [title]
        for column in columns():
            peaks = [records[(loss, kind, *column)]["peak"] for loss in losses]
            least = f"{min(peaks):.1f}"
            most = f"{max(peaks):.1f}"
            cells.append(least if least == most else f"{least}-{most}")
        rows.append(cells)
    titles = [f"{shown(shape)}, {dtype}" for shape, dtype in columns()]
    return table_lines(["peak / logits", *titles], rows)


def tables(path: Path = RESULTS / "losses_h100.json") -> list[str]:
    """The lines of all tables."""
    records = read(path)
    lines = []
    for dtype in DTYPES:
        lines += [*times(records, dtype), ""]
    return [*lines, *device_times(records), "", *memory(records)]


if __name__ == "__main__":
    print("\n".join(tables()))
