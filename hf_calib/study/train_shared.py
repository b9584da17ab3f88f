"""One training of a shared study, on any machine: `python -m hf_calib.study.train_shared ADDRESS FOLDER -- COMMAND`.

Results that are at the address are fetched, and nothing is trained. Otherwise the command goes on from the newest
checkpoint, that of another machine too; new checkpoints are sent while it runs, and the results in the end.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_calib._errors import InputError
from hf_calib.study.folder import is_finished, newest_checkpoint, resume_words
from hf_calib.study.shared import SharedStudy

_LOOK_AGAIN = 5.0  # seconds
# Of several processes the others write their random states at any time.
_SETTLED = 2.0  # seconds without a change


def main(words: Sequence[str]) -> int:
    """Train, and return the exit status of the command; 1 if the results could not be sent."""
    parser = argparse.ArgumentParser(prog="python -m hf_calib.study.train_shared", description=__doc__)
    parser.add_argument("address")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", action="store_true", help="send the calibrated model, too")
    parser.add_argument("--inputs", action="store_true", help="fetch the study's files into inputs/ first")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(words)
    try:
        share = SharedStudy(args.address)
        if args.inputs:
            share.fetch_inputs(Path.cwd())
        args.folder.mkdir(parents=True, exist_ok=True)
        share.fetch_cell(args.folder)
        status = 0 if is_finished(args.folder) else _train(args.command, args.folder, share)
        share.send_finished([args.folder], models=args.models)
    except InputError as error:
        print(error, file=sys.stderr)
        return 1
    return status


def _train(command: list[str], folder: Path, share: SharedStudy) -> int:
    sent = newest_checkpoint(folder)
    process = subprocess.Popen([*command, *resume_words(folder)])
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # of a preempted machine; it may save first
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the training, too
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_AGAIN)
        sent = _send_newest(folder, share, sent, settled=_SETTLED)
    if not is_finished(folder):
        _send_newest(folder, share, sent, settled=0.0)
    return process.returncode


def _send_newest(folder: Path, share: SharedStudy, sent: str | None, *, settled: float) -> str | None:
    """Send the newest complete checkpoint if it is another one; return what has been sent."""
    with suppress(FileNotFoundError, shutil.Error):  # the training removes it just now
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one is being written
            newest = newest_checkpoint(folder)
        if newest is None or newest == sent:
            return sent
        if settled and time.time() - max(path.stat().st_mtime for path in Path(newest).iterdir()) < settled:
            return sent
        try:
            share.send_checkpoint(Path(newest))
        except InputError as error:
            print(f"{newest} was not sent; the training goes on. {error}", file=sys.stderr, flush=True)
        return newest
    return sent


def _exit_status(code: int) -> Any:
    return code if code >= 0 else 128 - code  # of a signal, as shells say it


if __name__ == "__main__":
    sys.exit(_exit_status(main(sys.argv[1:])))
