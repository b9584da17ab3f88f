"""Wrong lines, made by mutmut in a copy of the project: does a test notice each?

    python tests/mutants.py hf_calib/decisions.promise.py hf_calib/losses --sample 40

Prints the share that is killed, and each survivor as a diff. A survivor asks for a test, or changes nothing that
anybody could see: look. The tests are the quick ones of the folder of the same name.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MUTMUT = [sys.executable, "-m", "mutmut"]
CONFIG = """
[tool.mutmut]
source_paths = ["hf_calib"]
only_mutate = {modules}
also_copy = ["recipes", "README.md", "docs", "Makefile", "pyproject.toml"]
pytest_add_cli_args = ["-n0", "-p", "no:cacheprovider", "-q", "-o", "filterwarnings="]
pytest_add_cli_args_test_selection = {tests}
process_isolation = "forkserver"
"""
KILLED, SURVIVED = {1, 3}, {0, 33}  # exit codes of pytest; no test reaches a line: 33


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="+", help="files or folders of hf_calib")
    parser.add_argument(
        "--sample",
        type=int,
        default=100,
        help="wrong lines, drawn at random; 0 for all",
    )
    args = parser.parse_args()
    if wrong := [
        each
        for each in args.modules
        if not (ROOT / each).exists() or "hf_calib" not in each
    ]:
        parser.error(f"expected files or folders of hf_calib, got {', '.join(wrong)}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        _copy(copy)
        patterns = [
            f"{each}/*" if (ROOT / each).is_dir() else each for each in args.modules
        ]
        rooms = sorted({Path(each).parts[1] for each in args.modules})
        tests = [
            f"tests/{room}" for room in rooms if (ROOT / "tests" / room).is_dir()
        ] or ["tests"]
        with (copy / "pyproject.toml").open("a", encoding="utf-8") as file:
            file.write(
                CONFIG.format(modules=json.dumps(patterns), tests=json.dumps(tests))
            )
        _mutmut(copy, "run", "nothing of this name")  # makes them all, and runs none
        names = [name for name, _ in _results(copy)]
        chosen = random.Random(0).sample(
            names, min(args.sample or len(names), len(names))
        )
        if not chosen:
            parser.error(f"nothing to change in {', '.join(args.modules)}")
        _mutmut(copy, "run", *chosen)
        _report(copy, dict(_results(copy)), chosen)


def _copy(copy: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def _mutmut(copy: Path, *words: str) -> str:
    shared = os.environ.get("HF_CALIB_SHARED", str(ROOT.parent / "shared"))
    environment = {**os.environ, "HF_CALIB_SHARED": shared, "PYTHONPATH": ""}
    found = subprocess.run(
        [*MUTMUT, *words], cwd=copy, env=environment, capture_output=True, text=True
    )
    if (
        "run" in words
        and "Running mutation testing" not in found.stdout
        and "nothing of" not in words[-1]
    ):
        sys.exit(
            f"mutmut could not run the tests:\n{found.stdout[-3000:]}{found.stderr[-3000:]}"
        )
    return found.stdout


def _results(copy: Path) -> Iterator[tuple[str, int | None]]:
    """Each wrong line by its name, and how the tests ended with it."""
    for path in sorted(copy.glob("mutants/**/*.meta")):
        yield from json.loads(path.read_text())["exit_code_by_key"].items()


def _report(copy: Path, ended: dict[str, int | None], chosen: list[str]) -> None:
    killed = [name for name in chosen if ended[name] in KILLED]
    survived = [name for name in chosen if ended[name] in SURVIVED]
    for name in survived:
        diff = [
            line
            for line in _mutmut(copy, "show", name).splitlines()
            if line[:2] in ("- ", "+ ")
        ]
        print(name, *diff, sep="\n", flush=True)
    print(
        f"\n{len(killed)} of {len(chosen)} killed, {len(survived)} survived, the others broke the run or took long"
    )


if __name__ == "__main__":
    main()
