"""Options of the studies, which report a wrong value before anything is trained."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

# `papers` lies above the studies, each of which imports this module before it.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))


def study_parser(description, *, seeds=None, data=None):
    """The options that studies share; one without runs has no seeds, one without a dataset no data."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--output", type=output_folder, default="outputs/studies")
    if seeds is not None:
        parser.add_argument(
            "--seeds", type=int, nargs="+", default=list(seeds), help="A run each."
        )
    if data is not None:
        parser.add_argument("--data", default=data, help="Of the Hub, or a folder.")
    return parser


def parse(parser, *, fewest_seeds=1):
    """The options, and when the study began; at least two seeds where every number has an interval over them."""
    args = parser.parse_args()
    if "seeds" in args:
        check_different(parser, "seeds", args.seeds, fewest_seeds)
    args.started = time.perf_counter()
    return args


def check_different(parser, name, values, at_least):
    is_enough = len(values) >= at_least
    are_different = len(set(values)) == len(values)
    if not (is_enough and are_different and min(values) >= 0):
        got = " ".join(f"{value:g}" for value in values)
        parser.error(
            f"argument --{name}: expected at least {at_least}, all different, none below 0, got {got}"
        )


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
