"""Train the runs of a study as tasks of a Ray cluster:

hf-calib compare-losses recipes/text_classification.py ... --output study --print-commands > lines.txt
python recipes/engines/ray_study.py lines.txt

All machines need the folder of the study, the Python environment and the data at the same paths as the machine that
printed the commands. A task that is lost with its machine restarts on another one, from its newest checkpoint.
"""

import shlex
import subprocess
import sys
from pathlib import Path

import ray


@ray.remote(max_retries=3)
def train(line: str) -> int:
    words = shlex.split(line)
    written = Path(words[words.index("--output_dir") + 1]).glob(
        "checkpoint-*/trainer_state.json"
    )
    whole = sorted(
        (path.parent for path in written),
        key=lambda path: int(path.name.partition("-")[2]),
    )
    resume = f" --resume_from_checkpoint {shlex.quote(str(whole[-1]))}" if whole else ""
    return subprocess.run(line + resume, shell=True).returncode


def train_all(lines: list[str], num_gpus: float = 1) -> list[int]:
    """The exit status of each."""
    return ray.get([train.options(num_gpus=num_gpus).remote(line) for line in lines])


if __name__ == "__main__":
    sys.exit(max(train_all(Path(sys.argv[1]).read_text().splitlines())))
