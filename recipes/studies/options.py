"""Types of the options of the studies, which report a wrong value before anything is trained."""

import argparse
import sys
import tempfile
from pathlib import Path

# `papers` lies above the studies, each of which imports this module before it.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))


def count(text):
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least 1, got {text}"
        )
    return number


def at_least_0(text):
    """A number, at least 0."""
    number = float(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"expected a number, at least 0, got {text}")
    return number


def output_folder(text):
    """A folder that can be written, or made."""
    folder = Path(text)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"expected a folder that can be written, got {text} ({error.strerror})"
        ) from error
    return folder


def check_seeds(parser, seeds, *, at_least=1):
    """At least two, where every number has an interval over them."""
    if len(seeds) < at_least or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        got = " ".join(map(str, seeds))
        parser.error(
            f"argument --seeds: expected at least {at_least}, all different, none below 0, got {got}"
        )
