"""The command line `hf-calib`: each command is a dataclass of options, and a thin call of the library."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from hf_calib.commands import options

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"hf-calib {version('hf_calib')}")
        raise typer.Exit


_VERSION = typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)


@app.callback()
def main(version: Annotated[bool, _VERSION] = False) -> None:
    """Classifiers whose probabilities mean what they say."""


for _command in (
    *(options.Evaluate, options.Calibrate, options.Unfold, options.Decide, options.Push, options.Export),
    *(options.CompareReports, options.CompareLosses, options.Demo),
):
    options.add_to(app, _command)


if __name__ == "__main__":  # accelerate launch -m hf_calib.cli
    app()
