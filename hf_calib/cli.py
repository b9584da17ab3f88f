"""The command line `hf-calib`: each command is a dataclass of options, and a thin call of the library."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from hf_calib.commands import console, options

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
    *(options.Report, options.Compare),
):
    options.add_to(app, _command)


@app.command()
def demo(
    output_dir: Annotated[Path, typer.Option(help="Folder for the figure and the model.")] = Path(
        "demo_output"
    ),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each of the three trainings.")] = 10,
    max_per_class: Annotated[int, typer.Option(min=10, help="Examples per class; fewer are faster.")] = 1500,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of the data split and the trainings.")
    ] = 0,
) -> None:
    """Train with three losses on real text, compare them, and serve the calibrated model. No network needed."""
    with console.exit_codes():
        from hf_calib.commands.demo import run_demo

        run_demo(output_dir, epochs=epochs, max_per_class=max_per_class, seed=seed)


if __name__ == "__main__":  # accelerate launch -m hf_calib.cli
    app()
