"""The shell scripts of the studies: what they would run exists, by their own words."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from compare_losses import parse, read_loss

RECIPES = Path(__file__).parents[2] / "recipes"
STUDIES = {
    "run_language_model_study.sh": [
        "guard",
        "sentiment",
        "intents",
        "topics",
        "next_token",
    ],
    "run_text_studies.sh": [
        "20newsgroups_cnn_50_epochs",
        "20newsgroups_bert",
        "ag_news_cnn_50_epochs",
    ],
}


def printed(
    script: str, tmp_path: Path, *arguments: str, **variables: str
) -> list[list[str]]:
    """The commands that a script would give to Python: with programs of its names that write what they are told."""
    programs = tmp_path / "bin"
    programs.mkdir()
    record = tmp_path / "commands"
    for name in ("python", "make"):
        path = programs / name
        path.write_text(
            f'#!/bin/sh\n{{ printf "%s\\t" "$0" "$@"; echo; }} >> "{record}"\n'
        )
        path.chmod(0o755)
    environment = {
        **os.environ,
        **variables,
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    environment.pop("COMPARE", None)
    subprocess.run(
        ["bash", str(RECIPES / script), *arguments],
        check=True,
        env=environment,
        cwd=tmp_path,
    )
    return [line.split("\t")[:-1] for line in record.read_text().splitlines()]


@pytest.mark.parametrize("script", STUDIES)
def test_studies_name_losses_maps_and_configs_that_there_are(
    script: str, tmp_path: Path
) -> None:
    commands = printed(script, tmp_path, "out", "data", "model", "7")
    recipe = str(RECIPES / "compare_losses.py")
    compared = [parse(words[2:]) for words in commands if words[1] == recipe]
    assert [study.output.name for study in compared] == STUDIES[script]
    for study in compared:
        assert study.script.is_file()
        assert all(Path(path).is_file() for path in study.config)
        names = [read_loss(word)[0] for word in study.losses]
        assert names[0] == "cross_entropy"
        assert "temperature" in study.calibrators
        assert study.seeds == [7]


def test_each_seed_is_compared_with_those_before_it(tmp_path: Path) -> None:
    """A table is of the seeds that its command names, of which the earlier ones are finished."""
    commands = printed("run_text_studies.sh", tmp_path, "out", "data", "m", "1 2", "5")
    seeds = [parse(words[2:]).seeds for words in commands]
    assert seeds == [[1, 2]] * 3 + [[1, 2, 5]] * 3
