"""Time and memory of `hf-calib evaluate` on many rows, compared with reading the same columns by pyarrow.

python benchmarks/large_data.py [--rows 5000000] [--shards 20] [--classes 10] [--folder FOLDER] [--by country]

The files are float32 probabilities with labels and a column of 12 countries, as pyarrow writes
them. Seconds are those of the processor, in all threads of a program from its start to its end.
Memory is the peak above that of the same program on a thousand rows, which is what the interpreter
and the packages take.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
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
HOLD = """
import sys
from hf_calib.predictions import read_predictions
read_predictions(sys.argv[1])
"""
_FEW = 1_000  # Rows


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


def run(*words: str) -> tuple[float, float]:
    """The processor's seconds and the peak of memory, in GB, of a program."""
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, *words],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, used = os.wait4(child, 0)
    if status != 0:
        raise RuntimeError(f"{words} failed")
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("large_data"))
    parser.add_argument("--by", default="country")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    folder = arguments.folder / "many"
    few = arguments.folder / "few"
    for home, n_rows, n_shards in (
        (folder, arguments.rows, arguments.shards),
        (few, _FEW, 1),
    ):
        home.mkdir(parents=True, exist_ok=True)
        write(home, n_rows, n_shards, arguments.classes)
    with tempfile.TemporaryDirectory() as output:
        evaluate = ("-m", "hf_calib.cli", "evaluate")
        programs = {
            "read by pyarrow": (("-c", READ), ()),
            "read_predictions": (("-c", HOLD), ()),
            "evaluate": (evaluate, ()),
            "evaluate --output": (evaluate, ("--output", output)),
            "evaluate --by": (evaluate, ("--by", arguments.by)),
        }
        rounds = []
        for _ in range(arguments.rounds):  # In turns.
            found = {}
            for name, (words, options) in programs.items():
                seconds, peak = run(*words, str(folder), *options)
                _, floor = run(*words, str(few), *options)
                found[name] = (seconds, peak - floor)
            rounds.append(found)
            print(json.dumps(found), flush=True)
    matrix = arguments.rows * arguments.classes * 4 / 1e9
    print(f"The scores have {matrix:.2f} GB.")
    for name in programs:
        seconds, memory = np.median([each[name] for each in rounds], axis=0)
        share = memory / matrix
        print(
            f"{name:20} {seconds:6.2f} s  {memory:6.2f} GB  {share:5.2f} of the scores"
        )


if __name__ == "__main__":
    main()
