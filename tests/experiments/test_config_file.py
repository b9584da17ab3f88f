"""A YAML file sets defaults, and the command line wins."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_calib import CalibrationTrainingArguments
from hf_calib._errors import InputError
from hf_calib.experiments.config_file import (
    parse_arguments,
    print_input_errors,
    read_config,
)


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
    before = sys.excepthook
    monkeypatch.setattr(sys, "argv", ["/scripts/train.py", "--config", "no.yaml"])
    with pytest.raises(ValueError, match="expected --config") as wrong:
        parse_arguments([CalibrationTrainingArguments])
    assert sys.excepthook is before
    print_input_errors(wrong.type, wrong.value, wrong.tb)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(
        "train.py: expected --config to name an existing YAML file, got no"
    )
    print_input_errors(wrong.type, SystemError("a bug"), wrong.tb)
    assert "Traceback" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (str(tmp_path / "nowhere.yaml"), str(tmp_path), "a" * 5000):
        with pytest.raises(
            ValueError,
            match=f"--config to name an existing YAML file, got {path[:500]}",
        ):
            parse_arguments(KINDS, ["--config", path])


# ---- Files that are damaged, or made to do harm ----


def aliases_of(first: str, n_levels: int) -> str:
    """Lines of which each names the one before it twice."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, n_levels)]
    return "\n".join(lines)


HARMFUL = {
    "aliases of mappings": (aliases_of("{x: 1}", 30), "got an alias, \\*a0: write its"),
    "aliases of lists": ("a: &a [1]\nb: [*a, *a]", "got an alias, \\*a: write its"),
    "an alias of a word": ("suffix: &l x\nrun_name: *l", "got an alias, \\*l: write"),
    "itself": ("a: &a [*a]", "got an alias, \\*a: write its value instead"),
    "nested lists": (
        "suffix: " + "[" * 10_000,
        "got lists or mappings in more than 20",
    ),
    "nested mappings": (
        "suffix: " + "{a: " * 5000,
        "lists or mappings in more than 20",
    ),
    "large": ("# " + "x" * 100_000, "to have at most 32,768 bytes, got 100,002"),
    "names that are lists": ("? [a, b]\n: 1", "got a name that is a list or a mapping"),
    "nested repeats": ("loss_kwargs: {a: 1, a: 2}", "'a' is there twice"),
    "two documents": ("suffix: a\n---\nsuffix: b", "got expected a single document"),
    "a long number": ("seed: " + "9" * 5000, "to be YAML, got Exceeds the limit"),
    "a name in lines": ('"a\\nb\\e[2J": 1', "got a b \\[2J; known: "),
    "lists in lists": (
        "sizes: [[1], [2]]",
        r"numbers or words, got \[\['1'\], \['2'\]\]",
    ),
    "mappings in lists": (
        "sizes: [{a: 1}]",
        "list of numbers or words, got .*'a': '1'",
    ),
    "several for one": (
        "loss: [focal, brier]",
        "to be one value, got a list of 2; wri",
    ),
    "options in a list": ("tags: ['--loss', focal]", "numbers or words, got .*--loss"),
    "an empty list": ("tags: []", "to be a list of numbers or words, got"),
}


@pytest.mark.parametrize("case", HARMFUL)
def test_a_file_made_to_do_harm_is_refused_in_a_line(case: str, tmp_path: Path) -> None:
    text, message = HARMFUL[case]
    started = time.process_time()
    with pytest.raises(ValueError, match=message) as told:
        parsed(tmp_path, text)
    assert time.process_time() - started < 1
    assert str(told.value).isprintable()


@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    place=st.integers(0, len(CONFIG)),
    length=st.integers(0, 40),
    other=st.text("a:*&[]{}!|>?-'\"# \n\t\x00\u202e0", max_size=8)
    | st.text(max_size=4),
)
def test_a_damaged_file_is_read_or_refused_in_a_line(
    place: int, length: int, other: str, tmp_path: Path
) -> None:
    text = CONFIG.format(folder="out")
    path = tmp_path / "config.yaml"
    damaged = text[:place] + other + text[place + length :]
    path.write_text(damaged, encoding="utf-8", errors="replace")
    said = ""
    try:
        read_config(path)
    except InputError as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["n_bin=3"], "got n_bin=3; did you mean 'n_bins'"),
        (["--nbins", "3"], "got --nbins; did you mean 'n_bins'"),
        (["--n_bins", "x"], "got argument --n_bins.*: invalid int value: 'x'; --help"),
        (["--n_bins"], "got argument --n_bins.*: expected one argument; --help lists"),
        (["--loss", "focal", "brier"], "be those of the script, got brier; "),
        (["--config"], "argument --config: expected one argument; --help lists them"),
    ],
)
def test_typed_arguments_that_are_wrong_are_refused_in_a_line(
    words: list[str], message: str, tmp_path: Path
) -> None:
    needed = ["--dataset", "x", "--output_dir", str(tmp_path), "--report_to", "none"]
    with pytest.raises(InputError, match=message) as told:
        parse_arguments(KINDS, [*needed, *words])
    assert str(told.value).isprintable()
