"""Time and memory of `hf-calib evaluate` on many rows, compared with reading the same columns by pyarrow.

python benchmarks/large_data.py [--rows 100000000] [--shards 200] [--folder FOLDER] [--by country]

The files are float32 probabilities of 4 classes with labels and a column of 12 countries, as pyarrow writes them.
The time of the command includes its start and the report; the time of a pass is that of the pass only.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.dataset
import pyarrow.parquet as pq

N_CLASSES = 4
COLUMNS = [*(f"prob_{c}" for c in range(N_CLASSES)), "label"]


def write(folder: Path, rows: int, shards: int) -> None:
    """Over-confident predictions; files that are there stay."""
    countries = [f"c{i}" for i in range(12)]
    for shard in range(shards):
        path = folder / f"part-{shard:05d}.parquet"
        if path.is_file():
            continue
        rng = np.random.default_rng(shard)
        n = rows // shards
        logits = 2 * rng.normal(size=(n, N_CLASSES)).astype(np.float32)
        probs = np.exp(logits)
        probs /= probs.sum(axis=1, keepdims=True)
        labels = (0.7 * logits + rng.gumbel(size=logits.shape)).argmax(axis=1).astype(np.int8)
        table = {f"prob_{c}": probs[:, c] for c in range(N_CLASSES)} | {"label": labels}
        table["country"] = pyarrow.DictionaryArray.from_arrays(
            rng.integers(0, 12, n).astype(np.int8), countries
        )
        pq.write_table(pyarrow.table(table), path)


def plain_read(folder: Path) -> float:
    """Seconds."""
    start = time.perf_counter()
    for _ in pyarrow.dataset.dataset(folder).to_batches(columns=COLUMNS):
        pass
    return time.perf_counter() - start


def one_pass(folder: Path, workers: int | None) -> float:
    """Seconds of the pass alone, in a process of its own."""
    code = (
        "import sys, time; from hf_calib.predictions import open_predictions; "
        "from hf_calib.predictions.one_pass import measure_in_one_pass; start = time.perf_counter(); "
        "measure_in_one_pass(open_predictions(sys.argv[1]), 15, workers=eval(sys.argv[2])); "
        "print(time.perf_counter() - start)"
    )
    words = [sys.executable, "-c", code, str(folder), repr(workers)]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def command(folder: Path, by: str | None) -> dict[str, float]:
    """The whole command: seconds, and the largest memory of any of its processes in GB."""
    with tempfile.TemporaryDirectory() as output:
        words = [sys.executable, "-m", "hf_calib.cli", "evaluate", str(folder), "--output", output]
        start = time.perf_counter()
        subprocess.run([*words, *(["--by", by] if by else [])], check=True, capture_output=True)
        seconds = time.perf_counter() - start
    # Of children and theirs; the system counts kilobytes.
    return {
        "seconds": seconds,
        "peak_gb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path("large_data"))
    parser.add_argument("--by", default="country")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write(arguments.folder, arguments.rows, arguments.shards)
    plain_read(arguments.folder)  # into the system's cache
    rounds = []
    for _ in range(3):  # in turns
        read = plain_read(arguments.folder)
        found = {
            "read": read,
            "one worker": one_pass(arguments.folder, 1),
            "workers": one_pass(arguments.folder, None),
        }
        rounds.append(found)
        print(json.dumps(found), flush=True)
    medians = {name: float(np.median([each[name] for each in rounds])) for name in rounds[0]}
    for name, seconds in medians.items():
        print(f"{name:12} {seconds:6.2f} s  {seconds / medians['read']:5.2f} of the read")
    for by in (None, arguments.by):
        found = command(arguments.folder, by)
        print(
            f"evaluate {f'--by {by}' if by else '':14} {found['seconds']:6.1f} s, peak {found['peak_gb']:.2f} GB"
        )


if __name__ == "__main__":
    main()
