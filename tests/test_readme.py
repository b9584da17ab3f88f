"""Everything the README names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax
from transformers import AutoModelForSequenceClassification

import hf_calib
from hf_calib import cli, evaluate_modules, metrics, scaling
from hf_calib.losses import LOSSES, LossEntry
from tests.helpers.places import ROOT
from tests.helpers.tiny import N_LABELS, tiny_bert

README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def row_of(name: str, entry: LossEntry) -> str:
    """The row of the README's table that an entry of `LOSSES` asks for."""
    defaults = [f"`{key}={h.default!r}`" for key, h in entry.hyperparameters.items()]
    cells = [f"`{name}`", entry.summary.replace("|", r"\|"), ", ".join(defaults) or "-", entry.source or "-"]
    return f"| {' | '.join(cells)} | {'yes |' if entry.multi_label else '|'}"


def test_table_of_losses_is_that_of_the_code() -> None:
    table = README[README.index("| name | loss |") : README.index("m-l: has a multi-label form")]
    assert table.split("\n")[2:-2] == [row_of(name, entry) for name, entry in LOSSES.items()]


def test_first_example_uses_real_names() -> None:
    imported = [node for node in ast.walk(ast.parse(EXAMPLES[0])) if isinstance(node, ast.ImportFrom)]
    assert {alias.name for node in imported for alias in node.names} <= set(hf_calib.__all__)


def test_second_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2, size=(2, 300, N_LABELS))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=-1)
    names: dict[str, Any] = {
        "model": tiny_bert(),
        "calibration_logits": 2 * logits[0],
        "calibration_labels": labels[0],
        "test_logits": 2 * logits[1],
        "test_probs": softmax(2 * logits[1], axis=-1),
        "test_labels": labels[1],
    }
    exec(EXAMPLES[1], names)
    assert capsys.readouterr().out.startswith("# Calibration of model")
    assert names["low"] <= names["value"] <= names["high"]
    loaded = AutoModelForSequenceClassification.from_pretrained("calibrated")
    assert loaded.config.calibration["choice"] == names["scaler"].choice_


def test_every_metric_scaler_and_command_is_named() -> None:
    functions = {name for name in metrics.__all__ if name.islower()}
    scalers = {entry.name for entry in scaling.SCALERS.values()}
    for name in functions | scalers | set(evaluate_modules.MODULES):
        assert f"`{name}`" in README or f'"{name}"' in README, name
    for command in cli.app.registered_commands:
        assert command.callback is not None
        assert f"hf-calib {command.callback.__name__}" in README


def test_commands_and_files_exist() -> None:
    targets = set(re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"make (\S+?)[\s`]", README)) <= targets
    for path in re.findall(r"recipes/[\w/.]+\.(?:yaml|py|md)", README):
        assert (ROOT / path).is_file(), path
