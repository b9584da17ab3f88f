"""The shell scripts of the studies: what they would run exists, by their own words."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hf_calib.losses import LOSSES
from hf_calib.study.measured import MAPS

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
    for name in ("hf-calib", "python", "make"):
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
    compared = [words for words in commands if words[1] == "compare-losses"]
    assert [
        Path(words[words.index("--output") + 1]).name for words in compared
    ] == STUDIES[script]
    for words in compared:
        assert Path(words[2]).is_file()
        for loss in words[words.index("--losses") + 1].split(","):
            file = (
                RECIPES
                / "configs"
                / "losses"
                / (loss if loss.endswith(".yaml") else f"{loss}.yaml")
            )
            assert loss in LOSSES or file.is_file(), loss
        if "--methods" in words:
            assert set(words[words.index("--methods") + 1].split(",")) <= set(MAPS)
        for i in (i for i, word in enumerate(words) if word == "--config"):
            assert (RECIPES / "configs" / words[i + 1]).is_file()
