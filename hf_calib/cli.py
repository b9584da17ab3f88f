"""The command line `hf-calib`: each command is a thin call of the library."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_calib.commands import console

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False)


class Method(str, Enum):
    """The scalers that can be fitted from here; temperature, vector and matrix can be folded into a model."""

    temperature = "temperature"
    vector = "vector"
    matrix = "matrix"
    dirichlet = "dirichlet"
    ensemble_temperature = "ensemble_temperature"
    histogram = "histogram"
    isotonic = "isotonic"
    spline = "spline"


class Criterion(str, Enum):
    """What a temperature minimises."""

    nll = "nll"
    ece = "ece"
    adaptive_ece = "adaptive_ece"


Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_PREDICTIONS",
        help="A sequence classifier on the Hub or in a folder; or a .npz, .csv, .tsv or .parquet file of "
        "logits or probabilities with labels.",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(help="For a model: a csv, tsv, json or parquet file, a folder, or a data set on the Hub."),
]
ConfigName = Annotated[str | None, typer.Option(help="Configuration of a Hub data set.")]
TextColumn = Annotated[str, typer.Option(help="Column of texts.")]
LabelColumn = Annotated[str, typer.Option(help="Column of classes: their names, or the model's numbers.")]
ClassNames = Annotated[
    str | None,
    typer.Option(help="The data's names of the classes, a,b,c in the model's order, where they differ."),
]
MaxLength = Annotated[int | None, typer.Option(min=1, help="Tokens to cut texts to.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Texts in one forward.")]
Bins = Annotated[int, typer.Option(min=1, help="Bins of the calibration errors.")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")]


@app.callback()
def main() -> None:
    """Classifiers whose probabilities mean what they say."""


@app.command()
def evaluate(
    source: Source,
    data: Data = None,
    config_name: ConfigName = None,
    split: Annotated[str, typer.Option(help="Split of a Hub data set or folder.")] = "test",
    text_column: TextColumn = "text",
    label_column: LabelColumn = "label",
    class_names: ClassNames = None,
    max_length: MaxLength = None,
    batch_size: BatchSize = 32,
    n_bins: Bins = 15,
    output: Annotated[
        Path | None, typer.Option(help="Folder for report.md, .html, .json and the figures.")
    ] = None,
    trust_remote_code: Remote = False,
    as_json: AsJson = False,
) -> None:
    """Report the calibration of a model on labelled texts, or of a file of predictions."""
    with console.exit_codes():
        from hf_calib.commands import posthoc

        posthoc.check_data(source, data)
        names = class_names.split(",") if class_names else None
        if data is None:
            report = posthoc.evaluate_predictions(
                source, label_column=label_column, n_bins=n_bins, output=output
            )
        else:
            from hf_calib.commands import posthoc_models

            rows = posthoc_models.Rows(
                data, config_name, split, text_column, label_column, names, max_length, batch_size
            )
            with console.progress() as progress:
                report = posthoc_models.evaluate_model(
                    source,
                    rows,
                    n_bins=n_bins,
                    output=output,
                    trust_remote_code=trust_remote_code,
                    progress=progress,
                )
        if as_json:
            console.print_json(report.to_dict())
        else:
            console.print_report(report)
            console.print_written(output)


@app.command()
def calibrate(
    source: Source,
    output: Annotated[
        Path, typer.Option(help="Folder for the calibrated model, or for calibrated predictions.npz.")
    ],
    data: Data = None,
    config_name: ConfigName = None,
    split: Annotated[
        str, typer.Option(help="Split to fit on, of a Hub data set or folder; not one trained on.")
    ] = "validation",
    test_data: Annotated[
        str | None,
        typer.Option(help="Report on these; without, fit on one half of the data, report on the other."),
    ] = None,
    test_split: Annotated[str, typer.Option(help="Split of the test data.")] = "test",
    method: Annotated[
        Method, typer.Option(help="For a model: temperature, vector or matrix.")
    ] = Method.temperature,
    criterion: Annotated[Criterion, typer.Option(help="What a temperature minimises.")] = Criterion.nll,
    text_column: TextColumn = "text",
    label_column: LabelColumn = "label",
    class_names: ClassNames = None,
    max_length: MaxLength = None,
    batch_size: BatchSize = 32,
    n_bins: Bins = 15,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw of the half to fit on.")] = 0,
    trust_remote_code: Remote = False,
    as_json: AsJson = False,
) -> None:
    """Fit a scaler and fold it into the model, for a plain pipeline; or calibrate a file of predictions."""
    with console.exit_codes():
        from hf_calib.commands import posthoc

        posthoc.check_data(source, data)
        names = class_names.split(",") if class_names else None
        options: dict[str, Any] = {
            "method": method.value,
            "criterion": criterion.value,
            "n_bins": n_bins,
            "seed": seed,
        }
        if data is None:
            done = posthoc.calibrate_predictions(
                source, output, test=test_data, label_column=label_column, **options
            )
        else:
            from hf_calib.commands import posthoc_models

            reading = (text_column, label_column, names, max_length, batch_size)
            rows = posthoc_models.Rows(data, config_name, split, *reading)
            test = (
                None
                if test_data is None
                else posthoc_models.Rows(test_data, config_name, test_split, *reading)
            )
            with console.progress() as progress:
                done = posthoc_models.calibrate_model(
                    source,
                    rows,
                    output,
                    test=test,
                    trust_remote_code=trust_remote_code,
                    progress=progress,
                    **options,
                )
        if as_json:
            console.print_json({**done.to_dict(), "output": str(output)})
        else:
            console.print_calibration(done)
            console.print_written(output)


@app.command()
def report(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="FILES", help="Files of predictions, report.json files, or folders with one."),
    ],
    label_column: LabelColumn = "label",
    n_bins: Bins = 15,
    output: Annotated[
        Path | None, typer.Option(help="Folder for comparison.md, .json and the picture.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare several files of predictions or saved reports, in one table and one picture."""
    with console.exit_codes():
        from hf_calib.commands.report import compare

        comparison = compare(sources, label_column=label_column, n_bins=n_bins, output=output)
        if as_json:
            console.print_json(comparison.to_dict())
        else:
            console.print_table("Calibration compared", *comparison.table())
            console.print_lines(comparison.notes)
            console.print_written(output)


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
    from hf_calib.commands.demo import run_demo

    run_demo(output_dir, epochs=epochs, max_per_class=max_per_class, seed=seed)
