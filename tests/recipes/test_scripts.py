"""The shell scripts of the studies: what they would run exists, by their own words."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from hf_calib.losses import LOSSES
from hf_calib.study.measured import MAPS

RECIPES = Path(__file__).parents[2] / "recipes"
SCRIPTS = sorted(RECIPES.glob("run_*.sh"))
STUDIES = {
    "run_language_model_study.sh": ["guard", "sentiment", "intents", "topics", "next_token"],
    "run_text_studies.sh": ["20newsgroups_cnn_50_epochs", "20newsgroups_bert", "ag_news_cnn_50_epochs"],
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_is_read_by_bash_and_says_how_it_is_called(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert f"#   bash recipes/{script.name} OUTPUT" in script.read_text()


def printed(script: str, tmp_path: Path, *arguments: str, **variables: str) -> list[list[str]]:
    """The commands that a script would give to Python: with programs of its names that write what they are told."""
    programs = tmp_path / "bin"
    programs.mkdir()
    record = tmp_path / "commands"
    for name in ("hf-calib", "python", "make"):
        path = programs / name
        path.write_text(f'#!/bin/sh\n{{ printf "%s\\t" "$0" "$@"; echo; }} >> "{record}"\n')
        path.chmod(0o755)
    environment = {**os.environ, **variables, "PATH": f"{programs}:{os.environ['PATH']}"}
    environment.pop("COMPARE", None)
    subprocess.run(["bash", str(RECIPES / script), *arguments], check=True, env=environment, cwd=tmp_path)
    return [line.split("\t")[:-1] for line in record.read_text().splitlines()]


@pytest.mark.parametrize("script", STUDIES)
def test_studies_name_losses_maps_and_configs_that_there_are(script: str, tmp_path: Path) -> None:
    commands = printed(script, tmp_path, "out", "data", "model", "7")
    compared = [words for words in commands if words[1] == "compare"]
    assert [Path(words[words.index("--output") + 1]).name for words in compared] == STUDIES[script]
    for words in compared:
        assert Path(words[2]).is_file()
        assert words[words.index("--seeds") + 1] == "7"
        for loss in words[words.index("--losses") + 1].split(","):
            file = RECIPES / "configs" / "losses" / (loss if loss.endswith(".yaml") else f"{loss}.yaml")
            assert loss in LOSSES or file.is_file(), loss
        if "--methods" in words:
            assert set(words[words.index("--methods") + 1].split(",")) <= set(MAPS)
        for i in (i for i, word in enumerate(words) if word == "--config"):
            assert (RECIPES / "configs" / words[i + 1]).is_file()


def test_text_studies_take_word_vectors_and_all_rows_of_ag_news(tmp_path: Path) -> None:
    for folder, variables in (("without", {}), ("with", {"GLOVE": "my vectors.txt", "AG_NEWS": "few.csv"})):
        (tmp_path / folder).mkdir()
        commands = printed("run_text_studies.sh", tmp_path / folder, "out", "data", "bert", "1", **variables)
        cnn, bert, ag_news = commands
        assert "--glove_file" not in bert
        for words in (cnn, ag_news):
            assert ("--glove_file" in words) == bool(variables)
            assert ("my vectors.txt" in words) == bool(variables)
        rows = ag_news[ag_news.index("--train_file") + 1]
        assert rows == variables.get("AG_NEWS", "data/ag_news/train.csv.gz")


def test_without_a_model_the_language_model_study_makes_one(tmp_path: Path) -> None:
    commands = printed("run_language_model_study.sh", tmp_path, "out", "data")
    made = [Path(words[1]).name for words in commands if words[1].endswith(".py")]
    assert made == ["language_model_tasks.py", "small_decoder.py", "next_token.py"]
    models = {words[words.index("--model") + 1] for words in commands if words[1] == "compare"}
    assert models == {"out/pretrained"}


def test_the_gpu_script_runs_all_steps_in_its_order_though_one_fails(tmp_path: Path) -> None:
    script = (RECIPES / "run_on_gpu.sh").read_text()
    steps = re.findall(r"^step (\w+) ", script, re.MULTILINE)
    assert steps == [
        "kernel_tests",
        "kernel_times",
        "language_model_heads",
        "text",
        "images",
        "language_models",
    ]
    printed("run_on_gpu.sh", tmp_path, "out", "data")
    assert {path.stem for path in (tmp_path / "out").glob("*.log")} == set(steps)


@pytest.mark.parametrize("task", ["topics", "guard", "sentiment", "intents"])
def test_a_small_decoder_has_a_token_for_each_answer(task: str) -> None:
    """Those that are not learnt as one are added: `small_decoder.py --words`."""
    answers = yaml.safe_load((RECIPES / "configs" / f"judge_{task}.yaml").read_text())["answers"]
    words = re.search(r"--words (.*)\n", (RECIPES / "run_language_model_study.sh").read_text())
    assert words is not None
    assert {answer.strip() for answer in answers.values()} <= set(words[1].split())
