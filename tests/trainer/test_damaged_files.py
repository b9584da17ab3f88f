"""Files of a checkpoint that are damaged or of another program: one line, at once, or a table that works."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_calib._errors import InputValueError
from hf_calib.losses import make_loss
from hf_calib.scaling import TemperatureScaling
from hf_calib.scaling.saved_map import MAP_NAME, save_map
from hf_calib.trainer.calibration_map import map_of_checkpoint
from hf_calib.trainer.saving import LOSS_STATE_NAME, load_loss_state, save_loss_state
from tests.helpers.tiny import tiny_trainer

drawn = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
DAMAGES = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["change", "cut", "drop"]), st.binary()),
    min_size=1,
    max_size=3,
)
PLAIN = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=10))
NAMES = st.sampled_from(["n_bins", "gamma_max", "x"])
JSON = st.one_of(PLAIN, st.lists(PLAIN), st.dictionaries(NAMES, PLAIN))


def damaged(content: bytes, damages: list[tuple[float, str, bytes]]) -> bytes:
    for place, kind, other in damages:
        at = int(place * len(content))
        if kind == "cut":
            content = content[:at]
        elif kind == "drop":
            content = content[:at] + content[at + len(other) + 1 :]
        else:
            content = content[:at] + other + content[at + len(other) :]
    return content


def loads_or_says_why(load: Any) -> None:
    """A file is read, or refused in one line of a readable length."""
    said = ""
    try:
        load()
    except InputValueError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 2000


def table(folder: Path) -> bytes:
    loss = make_loss("adafocal", n_bins=3)
    loss.update([0.5, 0.6, 0.7, 0.9], [1, 0, 1, 1])
    save_loss_state(loss, folder)
    return (folder / LOSS_STATE_NAME).read_bytes()


@drawn
@given(damages=DAMAGES)
def test_a_damaged_table(damages: Any, tmp_path: Path) -> None:
    (tmp_path / LOSS_STATE_NAME).write_bytes(damaged(table(tmp_path), damages))
    loss = make_loss("adafocal", n_bins=3)
    loads_or_says_why(lambda: load_loss_state(loss, tmp_path))


@drawn
@given(name=st.sampled_from(["adafocal", "focal", ""]) | st.text(max_size=5), said=JSON)
def test_a_table_that_says_something_else_of_its_loss(
    name: str, said: Any, tmp_path: Path
) -> None:
    loss = make_loss("adafocal", n_bins=3)
    metadata = {"loss": name, "hyperparameters": json.dumps(said)}
    save_file(loss.state_dict(), tmp_path / LOSS_STATE_NAME, metadata)
    loads_or_says_why(lambda: load_loss_state(loss, tmp_path))


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"loss": "adafocal"},
        {"loss": "adafocal", "hyperparameters": "[" * 100_000},
        {"loss": "adafocal", "hyperparameters": "1" * 100_000},
        {"loss": "\x1b[2J\n" * 1000, "hyperparameters": "{}"},
    ],
)
def test_a_table_without_a_usable_record(
    metadata: dict[str, str], tmp_path: Path
) -> None:
    loss = make_loss("adafocal", n_bins=3)
    save_file(loss.state_dict(), tmp_path / LOSS_STATE_NAME, metadata or None)
    with pytest.raises(InputValueError, match="to hold the table of") as told:
        load_loss_state(loss, tmp_path)
    text = str(told.value)
    assert text.isprintable()
    assert len(text) < 2000


def test_a_file_too_large_for_a_table_is_not_read(tmp_path: Path) -> None:
    header = b'{"gammas":{"dtype":"F64","shape":[8],"data_offsets":[0,64]}}'
    with (tmp_path / LOSS_STATE_NAME).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(2**33)  # It takes no place on the disk.
    with pytest.raises(InputValueError, match="got a file of 8,589,934,592 bytes; res"):
        load_loss_state(make_loss("adafocal"), tmp_path)


@drawn
@given(damages=DAMAGES)
def test_a_damaged_calibrator(damages: Any, tmp_path: Path) -> None:
    scaler = TemperatureScaling().fit([[2.0, 0], [1, 0], [0, 1]], [0, 1, 1])
    save_map(scaler, tmp_path)
    file = tmp_path / MAP_NAME
    file.write_bytes(damaged(file.read_bytes(), damages))
    loads_or_says_why(lambda: map_of_checkpoint(tmp_path, TemperatureScaling()))


def test_a_calibrator_of_another_model_is_not_resumed(tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps"}
    saved |= {"eval_steps": 2, "calibration_strategy": "evaluate"}
    vectors = {**saved, "calibration_method": "vector"}
    tiny_trainer(tmp_path, **vectors).train()
    checkpoint = tmp_path / "checkpoint-2"
    record = json.loads((checkpoint / MAP_NAME).read_text())
    for entry in (record, record["parameters"]):
        for name in ("weight", "bias"):
            if entry.get(name) is not None:
                entry[name] = entry[name][:3]
    (checkpoint / MAP_NAME).write_text(json.dumps(record))
    trainer = tiny_trainer(tmp_path, **vectors)
    with pytest.raises(ValueError, match="scaler to be fitted on 4 classes, got 3"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 0


def test_a_table_is_of_the_type_that_it_was(tmp_path: Path) -> None:
    loss = make_loss("adafocal", n_bins=3)
    content = table(tmp_path)
    load_loss_state(loss, tmp_path)
    assert content == (tmp_path / LOSS_STATE_NAME).read_bytes()
    assert {value.dtype for value in loss.state_dict().values()} == {torch.float64}
