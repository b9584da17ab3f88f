"""The command line `hf-calib`: each command is a thin call of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import Enum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from hf_calib._errors import check
from hf_calib.commands import console
from hf_calib.scaling.methods import SINGLE_LABEL_SCALERS
from hf_calib.tasks import MULTI_LABEL, SINGLE_LABEL

if TYPE_CHECKING:
    from hf_calib.commands.opening import Running
    from hf_calib.predictions.reading import Reading, RowSet

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False)

_FOLDED = ", ".join(method for method, entry in SINGLE_LABEL_SCALERS.items() if entry.foldable)
# Of compare, which tells them from what was typed.
_LOSSES, _SEEDS = "cross_entropy,focal,dual_focal,adafocal,bsce_gra", "0,1,2"
_METHODS = tuple(dict.fromkeys((*SINGLE_LABEL.maps, *MULTI_LABEL.maps)))
Method = Enum("Method", {method: method for method in _METHODS}, type=str)  # type: ignore[misc]


class Criterion(str, Enum):
    """The criterion that a temperature minimises."""

    nll = "nll"
    ece = "ece"
    adaptive_ece = "adaptive_ece"


class Format(str, Enum):
    """Formats that a model can be exported to."""

    onnx = "onnx"
    torch = "torch"


class OptionScore(str, Enum):
    """How answers of several tokens are scored; see `hf_calib.predictions.load_log`."""

    sum = "sum"
    per_character = "per_character"
    per_byte = "per_byte"


class Variance(str, Enum):
    """The variance over seeds that a study's differences are judged by; see `hf_calib.compare`."""

    own = "own"
    pooled = "pooled"


class SetMethod(str, Enum):
    """How prediction sets are made; see `hf_calib.decisions.PredictionSets`."""

    lac = "lac"
    aps = "aps"


Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_PREDICTIONS",
        help="A classifier of texts, tokens or images, on the Hub or in a folder; or a .npz, .csv, .tsv or .parquet "
        "file of logits or probabilities with labels.",
    ),
]
Bins = Annotated[
    int, typer.Option(min=1, max=10_000, help="Number of bins of the binned calibration errors.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed for drawing halves of the data.")]
TestSplit = Annotated[str, typer.Option(help="Split of the test data.")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")]
WeightColumn = Annotated[str | None, typer.Option(help="Column of the rows' weights.")]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=2**10,
        help="Processes, for predictions of more rows than are held at once.",
        show_default="as many as CPUs, 8 at most",
    ),
]
LabelColumn = Annotated[
    str, typer.Option(help="Column of labels, or of lists of tags: class names, or the model's class ids.")
]


@dataclass(frozen=True)
class TextOptions:
    """Rows that a model is run over: the options that every command which runs one shares."""

    data: Annotated[
        str | None,
        typer.Option(
            help="Labelled texts, tagged sentences or images, for a model: a csv, tsv, json or parquet file, a "
            "folder, also of images, or a dataset on the Hub."
        ),
    ] = None
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of a Hub dataset.")] = None
    text_column: Annotated[str, typer.Option(help="Column of texts, or of lists of tokens.")] = "text"
    text_pair_column: Annotated[
        str | None, typer.Option(help="Column of second texts, for a model of pairs: hypotheses, answers.")
    ] = None
    label_column: LabelColumn = "label"
    class_names: Annotated[
        str | None,
        typer.Option(
            help="The class names in the data, a,b,c in the model's order, if they differ. A model without names "
            "takes them as its own."
        ),
    ] = None
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**20,
            help="Tokens per text, by default as many as the model reads; longer texts are truncated.",
        ),
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, max=2**20, help="Batch size.")] = 32
    trust_remote_code: Remote = False

    def reading(self) -> Reading:
        """How columns are read."""
        from hf_calib.predictions.reading import Reading

        given = {each.name: getattr(self, each.name) for each in fields(Reading) if hasattr(self, each.name)}
        given = {name: value.value if isinstance(value, Enum) else value for name, value in given.items()}
        return Reading(**given | {name: _names(given[name]) for name in given.keys() & _LISTS})

    def rows(self, data: str | None, split: str, *, dataset_config: bool = True) -> RowSet | None:
        """One set of rows; None where there are none."""
        from hf_calib.predictions.reading import RowSet

        return None if data is None else RowSet(data, self.dataset_config if dataset_config else None, split)


@dataclass(frozen=True)
class ImageOptions(TextOptions):
    """The same for models that may read images."""

    image_column: Annotated[str, typer.Option(help="Column of images, for a model that reads them.")] = (
        "image"
    )


@dataclass(frozen=True)
class RowOptions(ImageOptions):
    """The same for models that may have several labels a row."""

    label_separator: Annotated[
        str | None,
        typer.Option(help="For a model with several labels a row: what stands between them, such as '|'."),
    ] = None
    label_columns: Annotated[
        str | None, typer.Option(help="For such a model: columns of 0 and 1, a,b,c, one for each label.")
    ] = None
    no_label: Annotated[
        str | None, typer.Option(help="For such a model: what stands in rows without a label.")
    ] = None
    option_scores: Annotated[
        OptionScore,
        typer.Option(
            help="For a log of lm-evaluation-harness: log-likelihoods of whole answers (acc), of their characters "
            "(acc_norm) or bytes (acc_bytes)."
        ),
    ] = OptionScore.sum
    label_tokens: Annotated[
        str | None,
        typer.Option(
            help='For a log of next-token probabilities: the tokens of each label, \'{"yes": ["Yes"], "no": ["No"]}\'.'
        ),
    ] = None


_LISTS = {"class_names", "label_columns"}  # of names, separated by commas


def _names(given: str | None) -> list[str] | None:
    return given.split(",") if given else None


def with_rows(options: type[TextOptions]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take the fields of a class of options as its own, in place of its parameter `rows`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = {each.name for each in fields(options)}
        hints = get_type_hints(command, include_extras=True) | get_type_hints(options, include_extras=True)
        given = list(signature(command).parameters.values())
        place = next(i for i, each in enumerate(given) if each.name == "rows")
        taken = [
            Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default) for each in fields(options)
        ]
        parameters = [*given[:place], *taken, *given[place + 1 :]]

        @wraps(command)
        def run(**arguments: Any) -> None:
            chosen = {name: arguments.pop(name) for name in own}
            command(rows=options(**chosen), **arguments)

        keyword = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters]
        annotated = [each.replace(annotation=hints[each.name]) for each in keyword]
        run.__signature__ = Signature(annotated)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in annotated}
        return run

    return decorate


_EXAMPLES = {
    "calibrate": "me/model --data validation.csv --test-data test.csv --output calibrated",
    "compare": "recipes/text_classification.py --config ag_news_minilm.yaml --losses cross_entropy,focal "
    "--output study -- --train_file train.csv",
    "decide": "calibrated --data more.csv --accuracy 0.95 --output calibrated",
    "evaluate": "me/model --data test.csv --output measured; hf-calib evaluate predictions.npz",
    "export": "calibrated exported --data test.csv",
    "push": "calibrated me/my-model",
    "report": "measured calibrated other_predictions.npz",
    "unfold": "calibrated plain",
}


def _example(command: str) -> str:
    """The last part of a command's help."""
    return f"Example: hf-calib {command} {_EXAMPLES[command]}"


@contextmanager
def running(rows: TextOptions) -> Iterator[Running]:
    """How a model is run: with a bar on stderr, and the names of slow stages."""
    from hf_calib.commands.opening import Running

    with console.exit_codes(), console.stages() as stages:
        if rows.data is None:
            with console.rows() as of_rows:
                yield Running(rows.trust_remote_code, None, stages, of_rows)
            return
        with console.progress() as progress:
            yield Running(rows.trust_remote_code, progress, stages)


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


@app.command(epilog=_example("evaluate"))
@with_rows(RowOptions)
def evaluate(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL_OR_PREDICTIONS",
            help="A classifier of texts, tokens or images, on the Hub or in a folder; or predictions: .npz, .csv, .tsv "
            "or .parquet files of logits or probabilities with labels, a folder of them, a glob, or an address (s3://, "
            "gs://, hf://); or a .jsonl log of another tool.",
        ),
    ],
    rows: RowOptions,
    split: Annotated[str, typer.Option(help="Split of a Hub dataset or folder.")] = "test",
    n_bins: Bins = 15,
    output: Annotated[
        Path | None, typer.Option(help="Folder for report.md, .html, .json and the figures.")
    ] = None,
    ood_data: Annotated[
        list[str] | None,
        typer.Option(
            help="Inputs from elsewhere, of none of the classes: rows like --data, whose labels are not read, or a "
            "file of predictions beside one; also several. Reports how well the model's uncertainty separates them."
        ),
    ] = None,
    ood_split: Annotated[
        str,
        typer.Option(
            help="Split of these, of a Hub dataset or folder; a folder of nothing but images is train."
        ),
    ] = "test",
    soft_labels: Annotated[
        Path | None,
        typer.Option(
            help="A .npz file with the array soft_labels (or probs): the share of annotators that named each class, "
            "for each row. Reports the calibration against these, too."
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(help="Columns a,b,c: measures the rows of each of their values, and says which differ."),
    ] = None,
    weight_column: WeightColumn = None,
    workers: Workers = None,
    predictions: Annotated[
        Path | None,
        typer.Option(
            help="Folder for a model's predictions, as parquet files that are written while it runs: a killed run goes "
            "on from them.",
            show_default="predictions in the output where accelerate launch starts several processes",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report the calibration of a model on labelled texts, tokens or images, or of a file of predictions."""
    with running(rows) as how:
        from hf_calib.commands import evaluate as command

        report = command.evaluate(
            source,
            rows.rows(rows.data, split),
            rows.reading(),
            n_bins=n_bins,
            output=output,
            ood=[
                found
                for each in ood_data or ()
                if (found := rows.rows(each, ood_split, dataset_config=False))
            ],
            soft_labels=soft_labels,
            by=_names(by) or (),
            weight_column=weight_column,
            workers=workers,
            predictions=predictions,
            running=how,
        )
    if report is None:  # another process has it
        return
    if as_json:
        console.print_json(report.to_dict())
    else:
        console.print_report(report)
        console.print_written(output)


@app.command(epilog=_example("calibrate"))
@with_rows(RowOptions)
def calibrate(
    source: Source,
    output: Annotated[
        Path, typer.Option(help="Folder for the calibrated model, or for calibrated predictions.npz.")
    ],
    rows: RowOptions,
    split: Annotated[
        str, typer.Option(help="Split to fit on, of a Hub dataset or folder; not the training split.")
    ] = "validation",
    test_data: Annotated[
        str | None,
        typer.Option(
            help="Other labelled rows to report on. Without them, the scaler is fitted on half of the data, and "
            "the report is on the other half."
        ),
    ] = None,
    test_split: TestSplit = "test",
    target_data: Annotated[
        str | None,
        typer.Option(
            help="Rows as they come where the model is used; labels are not read. Their class frequencies are "
            "estimated, and corrected for unless they are the data's. Test data should then be such rows, too."
        ),
    ] = None,
    target_split: Annotated[str, typer.Option(help="Split of the target data.")] = "test",
    method: Annotated[
        Method | None,
        typer.Option(
            help=f"Post-hoc scaler. For a model {_FOLDED} are folded into the head; others are saved beside it, for "
            "hf_calib.pipeline.",
            show_default="auto; temperature where a criterion is given, and for heads that keep no bias",
        ),
    ] = None,
    criterion: Annotated[
        Criterion | None,
        typer.Option(help="The criterion that a temperature minimises.", show_default="nll"),
    ] = None,
    n_bins: Bins = 15,
    seed: Seed = 0,
    all_rows: Annotated[
        bool,
        typer.Option(
            "--all-rows",
            help="Of predictions of more rows than are held at once: fit a temperature or vector scaling on all of "
            "them, in some more passes, rather than on a sample of 200,000.",
        ),
    ] = False,
    weight_column: WeightColumn = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Fit a scaler and fold it into the model, for a plain pipeline; or calibrate a file of predictions."""
    with running(rows) as how:
        from hf_calib.commands import calibrate as command

        done = command.calibrate(
            source,
            output,
            rows.rows(rows.data, split),
            rows.reading(),
            test=rows.rows(test_data, test_split),
            target=rows.rows(target_data, target_split),
            method=method.value if method else "temperature" if criterion else None,
            criterion=criterion.value if criterion else None,
            n_bins=n_bins,
            seed=seed,
            all_rows=all_rows,
            weight_column=weight_column,
            workers=workers,
            running=how,
        )
    console.print_warnings(done.report.notes)
    if as_json:
        console.print_json({**done.to_dict(), "output": str(output)})
    else:
        console.print_calibration(done)
        console.print_written(output)


@app.command(epilog=_example("unfold"))
def unfold(
    source: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A folded classifier on the Hub or in a folder."),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the model from before the fold.")],
    trust_remote_code: Remote = False,
    as_json: AsJson = False,
) -> None:
    """Undo the folding: write the model as it was before a scaler was folded into its head."""
    with console.exit_codes(), console.stages() as stages:
        from hf_calib.commands import unfold as command

        done = command.unfold_model(source, output, trust_remote_code=trust_remote_code, stages=stages)
        if as_json:
            console.print_json({**vars(done), "output": str(output)})
        else:
            console.print_lines(["The map is no longer in the model's head.", done.said])
            console.print_written(output)


@app.command(epilog=_example("decide"))
@with_rows(ImageOptions)
def decide(
    source: Source,
    rows: ImageOptions,
    split: Annotated[
        str,
        typer.Option(
            help="Split to fit on, of a Hub dataset or folder; neither the training split nor the rows that the "
            "model was calibrated on."
        ),
    ] = "validation",
    test_data: Annotated[
        str | None,
        typer.Option(
            help="Other labelled rows to measure on. Without them, the rule is measured by cross-fitting in five folds."
        ),
    ] = None,
    test_split: TestSplit = "test",
    accuracy: Annotated[
        float | None,
        typer.Option(
            help="Answer where this share of the answers is right; hand over the rest. 0.95 by default."
        ),
    ] = None,
    delta: Annotated[float, typer.Option(help="Chance that the promised accuracy fails.")] = 0.05,
    by_class: Annotated[
        bool,
        typer.Option("--by-class", help="Promise the accuracy, or the coverage of sets, for every class."),
    ] = False,
    costs: Annotated[
        Path | None,
        typer.Option(
            help="Instead of an accuracy: a csv file of costs, true classes in the first column, decisions in the "
            "header, the last one perhaps 'abstain'."
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Instead of an accuracy: sets of classes that miss the true one for this share at most."
        ),
    ] = None,
    sets: Annotated[SetMethod, typer.Option(help="How sets are made, for alpha.")] = SetMethod.lac,
    method: Annotated[
        Method,
        typer.Option(
            help=f"Post-hoc scaler for the figures after calibration; for a model one of {_FOLDED}."
        ),
    ] = Method["auto"],
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed for drawing halves of the data.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder, of the model perhaps, for decisions.json and a report in its folder decisions."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Promise an accuracy and hand over the rest, or decide by costs or in sets: what is answered, how right."""
    with running(rows) as how:
        from hf_calib.commands import decide as command

        rule = command.choose_rule(
            accuracy=accuracy, delta=delta, by_class=by_class, costs=costs, alpha=alpha, sets=sets.value
        )
        decided = command.decide(
            source,
            rule,
            rows.rows(rows.data, split),
            rows.reading(),
            output=output,
            test=rows.rows(test_data, test_split),
            method=method.value,
            seed=seed,
            running=how,
        )
    console.print_warnings(decided.notes)
    if as_json:
        console.print_json(decided.to_dict())
    else:
        console.print_decided(decided)
        console.print_written(output)


@app.command(epilog=_example("push"))
def push(
    folder: Annotated[
        Path, typer.Argument(help="Of a calibrated model, or the output folder of a training.")
    ],
    repo: Annotated[
        str, typer.Argument(help="On the Hub: owner/name, or name for your own. Made where there is none.")
    ],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch; made from main where there is none.", show_default="main")
    ] = None,
    no_fold: Annotated[
        bool, typer.Option("--no-fold", help="Push the folder as it lies, calibrated or not.")
    ] = False,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request instead of changing the branch.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Push a calibrated model to the Hub, in one commit, with its card, which is the folder's README.md.

    The token is HF_TOKEN, or that of `hf auth login`. To see the card first: hf_calib.cards.write_card(folder).
    """
    with console.exit_codes(), console.stages() as stages:
        from hf_calib.commands import push as command

        pushed = command.push(
            folder,
            repo,
            private=private,
            revision=revision,
            no_fold=no_fold,
            create_pr=create_pr,
            announce=console.print_removed if as_json else console.print_changes,
            stages=stages,
        )
        console.print_warnings(pushed.notes)
        if as_json:
            console.print_json(pushed.to_dict())
        else:
            console.print_pushed(pushed)


@dataclass(frozen=True)
class ExportOptions(TextOptions):
    """The same, of which an export needs none."""

    data: Annotated[
        str | None,
        typer.Option(
            help="Texts to check the export on, beside synthetic ones; to quantise, labelled ones to fit the map on."
        ),
    ] = None


@app.command(epilog=_example("export"))
@with_rows(ExportOptions)
def export(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A classifier of texts, tokens or images, on the Hub or in a folder."
        ),
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="A new folder, for the program and what goes with it.")
    ],
    rows: ExportOptions,
    form: Annotated[
        Format, typer.Option("--format", help="An ONNX graph, or an ExportedProgram of torch.export.")
    ] = Format.onnx,
    quantize: Annotated[
        bool,
        typer.Option(
            "--quantize",
            help="ONNX in 8 bits (dynamic), with a map fitted on the quantised model's own logits; needs labels.",
        ),
    ] = False,
    split: Annotated[
        str, typer.Option(help="Split of a Hub dataset or folder; not the training split.")
    ] = "validation",
    test_data: Annotated[
        str | None,
        typer.Option(
            help="To quantise: other labelled rows to compare on. Without them, half of the data is held out for that."
        ),
    ] = None,
    test_split: TestSplit = "test",
    n_bins: Bins = 15,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Export a model with its calibration to ONNX or torch.export, checked against the model itself."""
    with running(rows) as how:
        from hf_calib.commands import export as command

        command.check_options(form.value, quantize=quantize, data=rows.data, test_data=test_data)
        texts, reading = rows.rows(rows.data, split), rows.reading()
        if texts is not None and quantize:
            test = rows.rows(test_data, test_split)
            done = command.export_quantized(
                model, texts, output, reading, test=test, n_bins=n_bins, seed=seed, running=how
            )
        else:
            done = command.export_model(
                model, output, form=form.value, rows=texts, reading=reading, running=how
            )
    console.print_warnings(done.notes)
    if as_json:
        console.print_json({**done.to_dict(), "output": str(output)})
    else:
        console.print_exported(done)
        console.print_written(output)


@app.command(epilog=_example("report"))
def report(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="FILES", help="Files of predictions, report.json files, or folders with one."),
    ],
    label_column: LabelColumn = "label",
    n_bins: Bins = 15,
    output: Annotated[
        Path | None, typer.Option(help="Folder for comparison.md, .html, .json and the figure.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare several files of predictions or saved reports, in one table and one figure."""
    with console.exit_codes(), console.stages() as stages:
        from hf_calib.commands.report import compare_reports

        comparison = compare_reports(
            sources, label_column=label_column, n_bins=n_bins, output=output, stages=stages
        )
        if as_json:
            console.print_json(comparison.to_dict())
        else:
            console.print_document(comparison.document())
            console.print_written(output)


@app.command(epilog=_example("compare"))
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
        Variance,
        typer.Option(
            help="Over seeds, of differences: of each pair of losses its own, or pooled over all losses, which finds "
            "more with few seeds where they vary alike."
        ),
    ] = Variance.own,
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
    as_json: AsJson = False,
) -> None:
    """Train several losses over seeds, and report which is best for these data, with intervals.

    Killed at any time, the same command goes on where it was.
    """
    with console.exit_codes(), console.stages() as stages:
        from hf_calib.commands import compare as command

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
        results = command.report_study(study, methods=chosen, variance=variance.value, stages=stages)
        if as_json:
            console.print_json(results.to_dict())
        else:
            console.print_study(results)
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
