"""The trainings of a shared study as tasks of a Ray cluster:

hf-calib compare recipes/text_classification.py ... --share s3://bucket/study --print-commands > lines.txt
python recipes/engines/ray_study.py lines.txt

A task that is lost with its machine begins again on another one, from the checkpoint at the address. The lines name the
Python and the folders of the machine that printed them, which all machines need at the same place.
"""

import subprocess
import sys
from pathlib import Path

import ray


@ray.remote(max_retries=3)
def train(line: str) -> int:
    return subprocess.run(line, shell=True).returncode


def train_all(lines: list[str], num_gpus: float = 1) -> list[int]:
    """The exit status of each."""
    return ray.get([train.options(num_gpus=num_gpus).remote(line) for line in lines])


if __name__ == "__main__":
    sys.exit(max(train_all(Path(sys.argv[1]).read_text().splitlines())))
