"""A YAML file sets defaults, and the command line wins."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hf_calib import CalibrationTrainingArguments
from hf_calib.experiments.config_file import parse_arguments


@dataclass
class DataArguments:
    dataset: str = field(metadata={"help": "Its name."})
    text_column: str | None = None
    suffix: str = ""
    shuffle: bool = True
    sizes: list[int] | None = None
    tags: list[str] | None = None


KINDS = (DataArguments, CalibrationTrainingArguments)
CONFIG = """\
dataset: ag_news
suffix: "-odd, with --dashes"
shuffle: false
text_column: null
sizes: [100, 200]
output_dir: {folder}
use_cpu: true
report_to: none
learning_rate: 2e-5
weight_decay: 1.0e-2
num_train_epochs: 2
loss: focal
loss_kwargs: {{gamma: 2}}
class_weights: [1, 2.5]
temperature_criterion: ece
load_best_model_at_end: no
"""


def written(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def parsed(folder: Path, text: str, *more: str) -> tuple[Any, ...]:
    return parse_arguments(KINDS, ["--config", str(written(folder, text)), *more])


def test_every_kind_of_value(tmp_path: Path) -> None:
    data, args = parsed(tmp_path, CONFIG.format(folder=tmp_path))
    assert data == DataArguments(
        "ag_news", None, "-odd, with --dashes", False, [100, 200]
    )
    assert (args.learning_rate, args.weight_decay, args.num_train_epochs) == (
        2e-5,
        1e-2,
        2.0,
    )
    assert (args.loss, args.loss_kwargs, args.class_weights) == (
        "focal",
        {"gamma": 2},
        [1.0, 2.5],
    )
    assert args.use_cpu is True
    assert args.load_best_model_at_end is False
    assert args.temperature_criterion == "ece"


@pytest.mark.parametrize("word", ["no", "steps", '"no"'])
def test_words_that_yaml_takes_for_truth_values_are_texts(
    word: str, tmp_path: Path
) -> None:
    text = CONFIG.format(folder=tmp_path).replace(
        "load_best_model_at_end: no\n", f"run_name: {word}\n"
    )
    text += (
        f"eval_strategy: {word}\nsave_strategy: {word}\neval_steps: 5\nsave_steps: 5\n"
    )
    _, args = parsed(tmp_path, text)
    assert (args.run_name, args.eval_strategy, args.save_strategy) == (
        word.strip('"'),
    ) * 3


def test_the_command_line_wins_and_no_file_is_needed(tmp_path: Path) -> None:
    more = [
        "--learning_rate",
        "3e-4",
        "--sizes",
        "7",
        "--shuffle",
        "--loss=dual_focal",
        "--loss_kwargs",
        "{}",
    ]
    path = written(tmp_path, CONFIG.format(folder=tmp_path))
    for words in (
        ["--config", str(path), *more],
        [*more, f"--config={path}"],
    ):  # wherever the file is named
        data, args = parse_arguments(KINDS, words)
        assert (data.sizes, data.shuffle, args.loss_kwargs) == ([7], True, {})
        assert (args.learning_rate, args.loss) == (3e-4, "dual_focal")
    words = [
        "--dataset",
        "x",
        "--output_dir",
        str(tmp_path),
        "--use_cpu",
        "--report_to",
        "none",
    ]
    data, args = parse_arguments(KINDS, words)
    assert (data.dataset, args.loss) == ("x", "cross_entropy")


def test_a_later_file_wins(tmp_path: Path) -> None:
    first = written(tmp_path, CONFIG.format(folder=tmp_path))
    second = written(tmp_path, "loss: bsce\nloss_kwargs: {gamma: 15e-1}\n", "loss.yaml")
    _, args = parse_arguments(KINDS, ["--config", str(first), "--config", str(second)])
    assert (args.loss, args.loss_kwargs) == ("bsce", {"gamma": 1.5})
    assert args.make_loss().hyperparameters == {"gamma": 1.5, "norm": 2.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "learning_rat: 1\n",
            "keys of .*yaml to be arguments of the script, got learning_rat; did you mean",
        ),
        ("- a\n- b\n", "config.yaml to hold `name: value` lines, got list"),
        ("a: [1\n", "config.yaml to be YAML, got "),
        (
            "a: !!python/object/apply:os.system ['true']\n",
            "config.yaml to be YAML, got ",
        ),
        (
            "temperature_criterion: null\n",
            "give temperature_criterion a value, got none; leave the line out",
        ),
        (
            "loss: focal\nseed: 1\nloss: brier\n",
            "be YAML, got 'loss' is there twice, of which one would",
        ),
    ],
)
def test_a_file_that_is_wrong_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(tmp_path, text)


def test_16_bits_of_a_file_are_off_where_nothing_computes_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "hf_calib.experiments.config_file.is_torch_bf16_gpu_available", lambda: False
    )
    _, args = parsed(tmp_path, "dataset: x\nbf16: true\nlearning_rate: 0.5\n")
    assert (args.bf16, args.learning_rate) == (False, 0.5)
    assert "bf16 of " in (said := capsys.readouterr().err)
    assert "is off: no accelerator here computes in it" in said
    _, args = parsed(tmp_path, "dataset: x\nbf16: false\n")
    assert not args.bf16
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(
        "hf_calib.experiments.config_file.is_torch_bf16_gpu_available", lambda: True
    )
    _, args = parsed(tmp_path, "dataset: x\nbf16: true\nuse_cpu: true\n")
    assert args.bf16


def test_a_script_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "argv", ["/scripts/train.py", "--config", "no.yaml"])
    with pytest.raises(ValueError, match="expected --config") as wrong:
        parse_arguments([CalibrationTrainingArguments])
    sys.excepthook(wrong.type, wrong.value, wrong.tb)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(
        "train.py: expected --config to name an existing YAML file, got no"
    )
    sys.excepthook(wrong.type, SystemError("a bug"), wrong.tb)
    assert "Traceback" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (str(tmp_path / "nowhere.yaml"), str(tmp_path), "a" * 5000):
        with pytest.raises(
            ValueError, match=f"--config to name an existing YAML file, got {path}"
        ):
            parse_arguments(KINDS, ["--config", path])
