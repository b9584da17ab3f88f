"""What the studies' options accept, so that a wrong one is said before anything is trained."""

import argparse
from pathlib import Path


def count(text):
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return number


def output_folder(text):
    """A folder, made where there is none."""
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".unfinished"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"expected a folder that can be written, got {text} ({error.strerror})"
        ) from error
    return folder


def check_seeds(parser, seeds, *, at_least=1):
    """At least two, where every number has an interval over them."""
    if len(seeds) < at_least or len(set(seeds)) < len(seeds):
        got = " ".join(map(str, seeds))
        parser.error(f"argument --seeds: expected at least {at_least}, all different, got {got}")
