"""The command line `hf-calib`: each command is a dataclass of options, and a thin call of the library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hf_calib._errors import check
from hf_calib.commands import console, options

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False)

# Of compare, which tells them from what was typed.
_LOSSES, _SEEDS = "cross_entropy,focal,dual_focal,adafocal,bsce_gra", "0,1,2"


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"hf-calib {version('hf_calib')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Classifiers whose probabilities mean what they say."""


for _name in ("Evaluate", "Calibrate", "Unfold", "Decide", "Push", "Export", "Report"):
    options.add_to(app, getattr(options, _name))


@app.command(
    epilog="Example: hf-calib compare recipes/text_classification.py --config ag_news_minilm.yaml --losses "
    "cross_entropy,focal --output study -- --train_file train.csv"
)
def compare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT_OR_STUDY",
            help="A recipe, or a script of yours that takes its arguments and ends with train_and_report; or the "
            "folder of a study, which is measured again without training.",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENTS]", help="Of the script, such as --train_file train.csv."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(help="YAML file of the script, or the name of one in configs/ beside it; also several."),
    ] = None,
    losses: Annotated[
        str | None,
        typer.Option(
            help="Losses, a,b,c: names, YAML files, or names of files in configs/losses beside the script.",
            show_default=_LOSSES,
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds of the trainings.", show_default=_SEEDS)] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="Values of a hyperparameter, gamma=1,2,3, for the losses that have it; also several."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Post-hoc maps to compare; they cost no training.", show_default="temperature,auto"
        ),
    ] = None,
    variance: Annotated[
        Literal["own", "pooled"],
        typer.Option(
            help="Over seeds, of differences: of each pair of losses its own, or pooled over all losses, which finds "
            "more with few seeds where they vary alike."
        ),
    ] = "own",
    output: Annotated[Path | None, typer.Option(help="Folder of the study.")] = None,
    jobs: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**10,
            help="Trainings side by side; CPU threads and GPUs are shared out. 0: one on each visible GPU.",
        ),
    ] = 1,
    launcher: Annotated[
        str | None, typer.Option(help="What starts a script, such as 'torchrun --nproc_per_node 2'.")
    ] = None,
    print_commands: Annotated[
        bool,
        typer.Option("--print-commands", help="Print a line for each training that is missing, and end."),
    ] = False,
    submitit: Annotated[
        str | None,
        typer.Option(
            help='Train as jobs of Slurm, by submitit: its parameters, \'{"slurm_partition": "gpu"}\'.'
        ),
    ] = None,
    keep_models: Annotated[
        bool,
        typer.Option(help="Keep the calibrated model of each training; checkpoints go when it is finished."),
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")
    ] = False,
) -> None:
    """Train several losses over seeds, and report which is best for these data, with intervals.

    Killed at any time, the same command goes on where it was.
    """
    with console.exit_codes(), console.stages() as stages:
        from hf_calib.commands import compare as command
        from hf_calib.study.report import document_of

        chosen = methods.split(",") if methods is not None else None
        if Path(source).is_dir():
            given = (arguments, config, losses, seeds, grid, launcher, print_commands, submitit, output)
            got, way_out = "a study's folder with arguments", "pass the script to train more"
            check(not any(given), "a script to be given with these arguments", got, way_out)
            study = Path(source)
        else:
            check(output is not None, "--output to name the study's folder", "none", "write --output study")
            study = output.absolute()  # type: ignore[union-attr]
            scheduler = None if submitit is None else command.Submitit(command.parse_submitit(submitit))
            launch = command.launch_of(
                source, config or [], arguments or [], launcher, keep_models=keep_models
            )
            cells = command.plan_study(
                launch,
                losses=(_LOSSES if losses is None else losses).split(","),
                seeds=command.parse_seeds(_SEEDS if seeds is None else seeds),
                grid=command.parse_grid(grid or []),
                output=study,
                methods=chosen or command.METHODS,
            )
            if print_commands:
                command.Printed()(launch, cells, say=print)
                return
            with console.interruptible(f"The same command goes on where it was: {study}"):
                command.train(launch, cells, scheduler or command.Local(jobs), say=console.print_progress)
        results = command.report_study(study, methods=chosen, variance=variance, stages=stages)
        if as_json:
            console.print_json(results.to_dict())
        else:
            console.print_document(document_of(results, {}))
            console.print_written(study)


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
