"""The command line `hf-calib`: each command is a thin call of the library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback()
def main() -> None:
    """Classifiers whose probabilities mean what they say."""


@app.command()
def demo(
    output_dir: Annotated[Path, typer.Option(help="Where the picture and the model go.")] = Path(
        "demo_output"
    ),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each of the three trainings.")] = 6,
    max_per_class: Annotated[
        int, typer.Option(min=10, help="Examples of each class; fewer are faster.")
    ] = 800,
    seed: Annotated[int, typer.Option(help="Seed of the data split and the trainings.")] = 0,
) -> None:
    """Train with three losses on real text, compare them, and serve the calibrated model. No network needed."""
    from hf_calib.demo import run_demo

    run_demo(output_dir, epochs=epochs, max_per_class=max_per_class, seed=seed)
