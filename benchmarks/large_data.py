"""Time and memory of `hf-calib evaluate` on many rows, compared with reading the same columns by pyarrow.

python benchmarks/large_data.py [--rows 100000000] [--shards 200] [--classes 4] [--folder FOLDER] [--by country]

The files are float32 probabilities with labels and a column of 12 countries, as pyarrow writes them. The time of a
program includes its start; the time of a pass is that of the pass only.
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

READ = """
import sys, pyarrow.dataset as ds
names = [name for name in ds.dataset(sys.argv[1]).schema.names if name != "country"]
for _ in ds.dataset(sys.argv[1]).to_batches(columns=names):
    pass
"""


def write(folder: Path, rows: int, shards: int, n_classes: int) -> None:
    """Over-confident predictions; files that are there stay."""
    countries = [f"c{i}" for i in range(12)]
    for shard in range(shards):
        path = folder / f"part-{shard:05d}.parquet"
        if path.is_file():
            continue
        rng = np.random.default_rng(shard)
        n = rows // shards
        logits = 2 * rng.normal(size=(n, n_classes)).astype(np.float32)
        probs = np.exp(logits)
        probs /= probs.sum(axis=1, keepdims=True)
        labels = (
            (0.7 * logits + rng.gumbel(size=logits.shape))
            .argmax(axis=1)
            .astype(np.int8)
        )
        table = {f"prob_{c}": probs[:, c] for c in range(n_classes)} | {"label": labels}
        table["country"] = pyarrow.DictionaryArray.from_arrays(
            rng.integers(0, 12, n).astype(np.int8), countries
        )
        pq.write_table(pyarrow.table(table), path)


def plain_read(folder: Path) -> float:
    """Seconds of a read in this process."""
    sys.argv[1:2] = [str(folder)]
    start = time.perf_counter()
    exec(READ)
    return time.perf_counter() - start


def program(*words: str) -> float:
    """Seconds of a program from its start to its end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
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
    return float(
        subprocess.run(words, check=True, capture_output=True, text=True).stdout
    )


def command(folder: Path, *words: str) -> float:
    """Seconds of the whole command."""
    return program("-m", "hf_calib.cli", "evaluate", str(folder), *words)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("large_data"))
    parser.add_argument("--by", default="country")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write(arguments.folder, arguments.rows, arguments.shards, arguments.classes)
    plain_read(arguments.folder)  # into the system's cache
    rounds = []
    for _ in range(3):  # in turns
        with tempfile.TemporaryDirectory() as output:
            found = {
                "read": plain_read(arguments.folder),
                "one worker": one_pass(arguments.folder, 1),
                "workers": one_pass(arguments.folder, None),
                "program that reads": program("-c", READ, str(arguments.folder)),
                "evaluate": command(arguments.folder),
                "evaluate --output": command(arguments.folder, "--output", output),
                "evaluate --by": command(arguments.folder, "--by", arguments.by),
            }
        rounds.append(found)
        print(json.dumps(found), flush=True)
    medians = {
        name: float(np.median([each[name] for each in rounds])) for name in rounds[0]
    }
    for name, seconds in medians.items():
        read = medians["program that reads" if name.startswith("eval") else "read"]
        print(f"{name:20} {seconds:6.2f} s  {seconds / read:5.2f} of the read")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    print(f"the largest process: {peak:.2f} GB")


if __name__ == "__main__":
    main()
