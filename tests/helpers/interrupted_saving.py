"""A model that is saved over another one, and is stopped.

It is killed before each file operation in turn, and finds the disk full when a file reaches each of several sizes.
Each try runs in a fork of this process.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import BertForSequenceClassification

from hf_calib.export.saving import save_folded
from hf_calib.scaling import TemperatureScaling
from tests.helpers.tiny import tiny_bert, tokenizer

TEMPERATURE = 2.5
SCALER = TemperatureScaling(grid=[TEMPERATURE]).fit([[1.0, 0.0]] * 3, [0, 0, 1])
FILE_OPERATIONS = {"os.mkdir", "os.remove", "os.rename", "os.rmdir"}
SIZES = (
    0,
    100,
    1_000,
    3_000,
    10_000,
)  # bytes; the weights are about 18,000, most of the other files are smaller


def save(target: Path) -> None:
    save_folded(tiny_bert(seed=1), SCALER, target, batch=None, processing_class=tokenizer())


def kill_before(operation: int, target: Path) -> None:
    """End this process before its n-th file operation below a folder."""
    done = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal done
        if event in FILE_OPERATIONS and str(target) in str(arguments[0]):
            done += 1
            if done == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def in_a_fork(work: Callable[[], None]) -> tuple[int, str]:
    """The status that it ends with, and the error if it raises one."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 0
        try:
            work()
        except BaseException as error:
            status = 1
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as message:
        told = message.read()
    return os.waitpid(child, 0)[1], told


OLD, NEW = tiny_bert().eval(), tiny_bert(seed=1).eval()


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model(input_ids=torch.arange(5, 13)[None]).logits


def state_of(target: Path) -> str:
    """Which model a folder holds: the old one, the new one with its tokenizer, none, or parts of both."""
    try:
        model = BertForSequenceClassification.from_pretrained(target).eval()
    except OSError:
        return "none"
    folded = (getattr(model.config, "calibration", None) or {}).get("folded", False)
    tokenizer_files = {"tokenizer.json", "tokenizer_config.json"} & {path.name for path in target.iterdir()}
    logits, old, new = map(logits_of, (model, OLD, NEW))
    if torch.allclose(logits, old, atol=1e-4) and not folded and not tokenizer_files:
        return "old"
    if torch.allclose(logits, new / TEMPERATURE, atol=1e-4) and folded and len(tokenizer_files) == 2:
        return "new"
    return "mixture"


def leftovers(folder: Path) -> int:
    return len(list(folder.rglob("_saving*")))


def killed(folder: Path) -> list[dict[str, Any]]:
    found = []
    for name, most in (("whole", "1GB"), ("shards", "5KB")):
        old = folder / name
        tiny_bert().save_pretrained(old, max_shard_size=most)
        for operation in range(1, 1000):
            target = folder / f"{name}-{operation}"
            shutil.copytree(old, target)

            def work(operation: int = operation, target: Path = target) -> None:
                kill_before(operation, target)
                save(target)

            status, told = in_a_fork(work)
            left = {"old": name, "status": status, "told": told, "state": state_of(target)}
            save(target)
            found.append({**left, "again": state_of(target)})
            if status != signal.SIGKILL:
                break
    return found


def full(folder: Path) -> list[dict[str, Any]]:
    old = folder / "old"
    tiny_bert().save_pretrained(old)
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    found = []
    for size in SIZES:
        for target in (old, folder / "new"):

            def work(size: int = size, target: Path = target) -> None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
                save(target)

            status, told = in_a_fork(work)
            same = before == {path.name: path.read_bytes() for path in old.iterdir()}
            left = {"status": status, "told": told, "same": same, "new": (folder / "new").exists()}
            found.append({**left, "leftovers": leftovers(folder)})
    return found
