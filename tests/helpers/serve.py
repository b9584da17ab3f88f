"""Plain pipelines on saved models; `python -m tests.helpers.serve FOLDER` is a server in which hf_calib is missing.

FOLDER/requests.json maps the name of a saved directory to a task and its inputs. Answers are printed as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


class Blocked:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "hf_calib":
            raise ImportError(f"{name} is not installed on a server")


def answers_of(folder: Path, requests: dict[str, Any]) -> dict[str, Any]:
    """What the pipelines answer, by the names of the requests."""
    from transformers import pipeline

    answers = {}
    for name, (task, inputs) in requests.items():
        options = {"image-classification": {"top_k": 100}, "text-classification": {"top_k": None}}.get(
            task, {}
        )
        serve = pipeline(task, model=str(folder / name))
        if task == "image-classification":
            from PIL import Image

            inputs = [Image.open(path) for path in inputs]
        answers[name] = serve(inputs, **options)
    return answers


def main(folder: Path) -> None:
    answers = answers_of(folder, json.loads((folder / "requests.json").read_text()))
    try:
        import hf_calib  # noqa: F401
    except ImportError:
        print(json.dumps(answers, default=float))


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocked())  # type: ignore[arg-type]
    main(Path(sys.argv[1]))
