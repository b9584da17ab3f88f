"""Print the Markdown tables of RESULTS.md from what run_results.sh left: python recipes/results_table.py OUTPUT_DIR"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

COLUMNS = (
    "accuracy",
    "ece",
    "ece_calibrated",
    "adaptive_ece",
    "adaptive_ece_calibrated",
    "nll",
    "nll_calibrated",
)
HEADER = ("loss", "seeds", "accuracy", "ECE", "ECE after T", "adaptive ECE", "after T", "NLL", "after T", "T")


def cell(values: list[float]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


folder = Path(sys.argv[1])
for setup in sorted(path for path in folder.iterdir() if path.is_dir()):
    runs = defaultdict(list)
    for file in sorted(setup.glob("*/results.json")):
        runs[file.parent.name.rpartition("-")[0]].append(json.loads(file.read_text())["metrics"])
    print(f"## {setup.name}\n\n| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for loss, metrics in runs.items():
        cells = [cell([m[f"test_{name}"] for m in metrics]) for name in COLUMNS]
        print(
            f"| {loss} | {len(metrics)} | {' | '.join(cells)} | {cell([m['temperature'] for m in metrics])} |"
        )
    print()
