"""The table of what the trainer overrides of transformers' says what the code does, whatever the version."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from transformers import Trainer

import hf_calib.trainer
from hf_calib import CalibrationTrainer

ROOM = Path(hf_calib.trainer.__file__).parent
LINES = [
    line.strip()
    for line in (hf_calib.trainer.__doc__ or "").splitlines()
    if line.strip().startswith("| `")
]
TABLE = {
    cells[0].strip("`"): cells[1:]
    for cells in ([c.strip() for c in line[1:-1].split("|")] for line in LINES)
}


def our_classes() -> list[type]:
    return [
        each
        for each in CalibrationTrainer.__mro__
        if each.__module__.startswith("hf_calib")
    ]


def test_every_override_is_in_the_table() -> None:
    theirs = set(dir(Trainer))
    overridden = {
        name
        for each in our_classes()
        for name in vars(each)
        if name in theirs and not name.startswith("__")
    }
    assert overridden == {
        name for name in TABLE if any(name in vars(each) for each in our_classes())
    }
    assert len(TABLE) <= 8


def test_every_private_name_of_the_trainer_is_in_the_table() -> None:
    own = {name for each in our_classes() for name in vars(each)}
    assigned: set[str] = set()
    read: set[str] = set()
    for path in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
            ):
                of_trainer = ast.unparse(node.value) in (
                    "self",
                    "trainer",
                    "super()",
                    "self.trainer",
                )
                if of_trainer:
                    (assigned if isinstance(node.ctx, ast.Store) else read).add(
                        node.attr
                    )
    source = inspect.getsource(Trainer)
    private = {
        name for name in read | assigned if f"self.{name}" in source and name not in own
    }
    assert private <= set(TABLE), private - set(TABLE)


def test_every_name_of_the_table_is_there_and_used_and_its_test_exists() -> None:
    source = inspect.getsource(Trainer)
    code = "".join(path.read_text() for path in ROOM.glob("*.py"))
    for name, (why, test) in TABLE.items():
        assert name in source, name
        assert code.count(name) > 1, name
        assert why
        assert (Path(__file__).parent / test).is_file(), test
