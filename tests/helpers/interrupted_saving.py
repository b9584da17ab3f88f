"""Work that is stopped: in a fork of this process, killed before any of its file operations."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE_OPERATIONS = {"os.mkdir", "os.remove", "os.rename", "os.rmdir"}


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
