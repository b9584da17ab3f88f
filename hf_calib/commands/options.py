"""The options of the commands: a dataclass each, which is the command line, the Python call and the documentation."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

import typer

from hf_calib.commands import console
from hf_calib.predictions.kinds import MULTI_LABEL, SINGLE_LABEL
from hf_calib.scaling import SINGLE_LABEL_SCALERS

if TYPE_CHECKING:
    from hf_calib.commands.opening import Running
    from hf_calib.models.reading import Reading, RowSet

Kind = TypeVar("Kind", bound="type[Command]")

_FOLDED = ", ".join(method for method, entry in SINGLE_LABEL_SCALERS.items() if entry.foldable)
METHODS = tuple(dict.fromkeys((*SINGLE_LABEL.maps, *MULTI_LABEL.maps)))
Method = Literal[METHODS]  # type: ignore[valid-type]

Bins = Annotated[
    int, typer.Option(min=1, max=10_000, help="Number of bins of the binned calibration errors.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed for drawing halves of the data.")]
TestSplit = Annotated[str, typer.Option(help="Split of the test data.")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
WeightColumn = Annotated[str | None, typer.Option(help="Column of the rows' weights.")]
LabelColumn = Annotated[
    str, typer.Option(help="Column of labels, or of lists of tags: class names, or the model's class ids.")
]
Names = str | list[str] | None  # of columns or classes, in Python also as a list
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")]
Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_OR_PREDICTIONS",
        help="A classifier of texts, tokens or images, on the Hub or in a folder; or a .npz, .csv, .tsv or .parquet "
        "file of logits or probabilities with labels.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=2**10,
        help="Threads, for predictions of more rows than are held at once.",
        show_default="as many as CPUs, 8 at most",
    ),
]


class Command:
    """What a command does: `run` with its options, and `show` what that returned."""

    example: ClassVar[str]
    first: ClassVar[str] = ""  # the options that people need; --help has the others in a panel "More"

    def __post_init__(self) -> None:
        for name in ("output", "costs", "soft_labels", "folder"):
            if isinstance(getattr(self, name, None), str):
                object.__setattr__(self, name, Path(getattr(self, name)))

    def run(self, running: Running) -> Any:
        """Do it."""
        raise NotImplementedError

    def show(self, done: Any) -> None:
        """Print it for people."""
        raise NotImplementedError

    def warnings(self, done: Any) -> Sequence[str]:
        """What a reader of stdout must not miss."""
        return getattr(done, "notes", ())

    def record(self, done: Any) -> dict[str, Any]:
        """The same for machines, of JSON's own types."""
        found: dict[str, Any] = done.to_dict()
        return found

    @contextmanager
    def running(self) -> Iterator[Running]:
        """Whom it tells of its progress: stderr."""
        from hf_calib.commands.opening import Running

        with console.stages() as stages:
            yield Running(stages=stages)

    def __call__(self) -> Any:
        """Do it quietly, for Python."""
        from hf_calib.commands.opening import Running

        return self.run(Running(trust_remote_code=getattr(self, "trust_remote_code", False)))


def add_to(app: typer.Typer, kind: type[Command]) -> None:
    """Make a dataclass of options the command of its name."""
    hints = get_type_hints(kind, include_extras=True) | {"as_json": AsJson}
    given = [
        Parameter(
            each.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if each.default is MISSING else each.default,
        )
        for each in fields(kind)  # type: ignore[arg-type]
    ]
    given.append(Parameter("as_json", Parameter.KEYWORD_ONLY, default=False))
    annotated = [
        each.replace(
            annotation=_on_the_command_line(hints[each.name], each.name in (*kind.first.split(), "as_json"))
        )
        for each in given
    ]

    def run(as_json: bool, **options: Any) -> None:
        chosen = kind(**options)
        with console.exit_codes(), chosen.running() as running:
            done = chosen.run(replace(running, as_json=as_json))
        console.print_warnings(chosen.warnings(done))
        if as_json:
            console.print_json(chosen.record(done))
        else:
            chosen.show(done)
            console.print_written(getattr(chosen, "output", None))

    run.__signature__ = Signature(annotated)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in annotated}
    run.__name__ = name = kind.__name__.lower()
    run.__doc__ = kind.__doc__
    epilog = f"Example: hf-calib {name} {kind.example}"
    app.command(name, help=kind.__doc__, epilog=epilog)(run)


def _on_the_command_line(hint: Any, is_first: bool) -> Any:
    """An option's type: names are one text there, and what few people need stands in a panel of its own."""
    kind, info = hint.__origin__, copy.copy(hint.__metadata__[0])
    if not is_first and isinstance(info, typer.models.OptionInfo):
        info.rich_help_panel = "More"
    return Annotated[str | None if kind == Names else kind, info]


def names_of(given: Names) -> list[str] | None:
    """Names that a command line separates by commas."""
    return given.split(",") if isinstance(given, str) and given else given or None


@dataclass(frozen=True, kw_only=True)
class TextOptions(Command):
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
        Names,
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

    @property
    def reading(self) -> Reading:
        """How columns are read."""
        from hf_calib.models.reading import Reading

        given = {each.name: getattr(self, each.name) for each in fields(Reading) if hasattr(self, each.name)}
        for name in given.keys() & {"class_names", "label_columns", "by"}:
            given[name] = names_of(given[name])
        return Reading(**given | ({"by": tuple(given["by"] or ())} if "by" in given else {}))

    def rows(self, data: str | None, split: str, argument: str = "data", **options: Any) -> RowSet | None:
        """One set of rows; None where there are none."""
        from hf_calib.models.reading import RowSet

        if data is None:
            return None
        return RowSet(data, options.pop("dataset_config", self.dataset_config), split, argument, **options)

    @contextmanager
    def running(self) -> Iterator[Running]:
        """With a bar on stderr, and the names of slow stages."""
        from hf_calib.commands.opening import Running

        with console.stages() as stages, console.progress() as progress:
            yield Running(self.trust_remote_code, progress, stages, progress)


@dataclass(frozen=True, kw_only=True)
class ImageOptions(TextOptions):
    """The same for models that may read images."""

    image_column: Annotated[str, typer.Option(help="Column of images, for a model that reads them.")] = (
        "image"
    )


@dataclass(frozen=True, kw_only=True)
class RowOptions(ImageOptions):
    """The same for models that may have several labels a row."""

    label_separator: Annotated[
        str | None,
        typer.Option(help="For a model with several labels a row: what stands between them, such as '|'."),
    ] = None
    label_columns: Annotated[
        Names, typer.Option(help="For such a model: columns of 0 and 1, a,b,c, one for each label.")
    ] = None
    no_label: Annotated[
        str | None, typer.Option(help="For such a model: what stands in rows without a label.")
    ] = None
    option_scores: Annotated[
        Literal["sum", "per_character", "per_byte"],
        typer.Option(
            help="For a log of lm-evaluation-harness: log-likelihoods of whole answers (acc), of their characters "
            "(acc_norm) or bytes (acc_bytes)."
        ),
    ] = "sum"
    label_tokens: Annotated[
        str | None,
        typer.Option(
            help='For a log of next-token probabilities: the tokens of each label, \'{"yes": ["Yes"], "no": ["No"]}\'.'
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Evaluate(RowOptions):
    """Report the calibration of a model on labelled texts, tokens or images, or of a file of predictions."""

    example: ClassVar[str] = "me/model --data test.csv --output measured; hf-calib evaluate predictions.npz"
    first: ClassVar[str] = "data text_column label_column split output by soft_labels ood_data"
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL_OR_PREDICTIONS",
            help="A classifier of texts, tokens or images, on the Hub or in a folder; or predictions: .npz, .csv, .tsv "
            "or .parquet files of logits or probabilities with labels, a folder of them, a glob, or an address (s3://, "
            "gs://, hf://); or a .jsonl log of another tool.",
        ),
    ]
    split: Annotated[str, typer.Option(help="Split of a Hub dataset or folder.")] = "test"
    n_bins: Bins = 15
    output: Annotated[
        Path | None, typer.Option(help="Folder for report.md, .html, .json and the figures.")
    ] = None
    ood_data: Annotated[
        list[str] | None,
        typer.Option(
            help="Inputs from elsewhere, of none of the classes: rows like --data, whose labels are not read, or a "
            "file of predictions beside one; also several. Reports how well the model's uncertainty separates them."
        ),
    ] = None
    ood_split: Annotated[
        str,
        typer.Option(
            help="Split of these, of a Hub dataset or folder; a folder of nothing but images is train."
        ),
    ] = "test"
    soft_labels: Annotated[
        Path | None,
        typer.Option(
            help="A .npz file with the array soft_labels (or probs): the share of annotators that named each class, "
            "for each row. Reports the calibration against these, too."
        ),
    ] = None
    by: Annotated[
        Names,
        typer.Option(help="Columns a,b,c: measures the rows of each of their values, and says which differ."),
    ] = None
    weight_column: WeightColumn = None
    workers: Workers = None

    def run(self, running: Running) -> Any:
        from hf_calib.commands.evaluate import evaluate

        return evaluate(self, running)

    def warnings(self, done: Any) -> Sequence[str]:
        return ()  # the report has them

    def show(self, done: Any) -> None:
        console.print_report(done)


@dataclass(frozen=True, kw_only=True)
class Calibrate(RowOptions):
    """Fit a scaler and fold it into the model, for a plain pipeline; or calibrate a file of predictions."""

    example: ClassVar[str] = "me/model --data validation.csv --test-data test.csv --output calibrated"
    first: ClassVar[str] = "data text_column label_column split output test_data target_data method"
    source: Source
    output: Annotated[
        Path, typer.Option(help="Folder for the calibrated model, or for calibrated predictions.npz.")
    ]
    split: Annotated[
        str, typer.Option(help="Split to fit on, of a Hub dataset or folder; not the training split.")
    ] = "validation"
    test_data: Annotated[
        str | None,
        typer.Option(
            help="Other labelled rows to report on. Without them, the scaler is fitted on half of the data, and "
            "the report is on the other half."
        ),
    ] = None
    test_split: TestSplit = "test"
    target_data: Annotated[
        str | None,
        typer.Option(
            help="Rows as they come where the model is used; labels are not read. Their class frequencies are "
            "estimated, and corrected for unless they are the data's. Test data should then be such rows, too."
        ),
    ] = None
    target_split: Annotated[str, typer.Option(help="Split of the target data.")] = "test"
    method: Annotated[
        Method | None,
        typer.Option(
            help=f"Post-hoc scaler. For a model {_FOLDED} are folded into the head; others are saved beside it, for "
            "hf_calib.pipeline.",
            show_default="auto; temperature where a criterion is given, and for heads that keep no bias",
        ),
    ] = None
    criterion: Annotated[
        Literal["nll", "ece", "adaptive_ece"] | None,
        typer.Option(help="The criterion that a temperature minimises.", show_default="nll"),
    ] = None
    n_bins: Bins = 15
    seed: Seed = 0
    weight_column: WeightColumn = None
    workers: Workers = None

    def run(self, running: Running) -> Any:
        from hf_calib.commands.calibrate import calibrate

        return calibrate(self, running)

    def warnings(self, done: Any) -> Sequence[str]:
        found: Sequence[str] = done.report.notes
        return found

    def show(self, done: Any) -> None:
        console.print_calibration(done)

    def record(self, done: Any) -> dict[str, Any]:
        return {**done.to_dict(), "output": str(self.output)}


@dataclass(frozen=True, kw_only=True)
class Unfold(Command):
    """Undo the folding: write the model as it was before a scaler was folded into its head."""

    example: ClassVar[str] = "calibrated plain"
    first: ClassVar[str] = "trust_remote_code"
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folded classifier on the Hub or in a folder.")
    ]
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the model from before the fold.")]
    trust_remote_code: Remote = False

    def run(self, running: Running) -> Any:
        from hf_calib.commands.unfold import run

        return run(self, running)

    def show(self, done: Any) -> None:
        console.show(done)


@dataclass(frozen=True, kw_only=True)
class Decide(ImageOptions):
    """Promise an accuracy and hand over the rest, or decide by costs or in sets: what is answered, how right."""

    example: ClassVar[str] = "calibrated --data more.csv --accuracy 0.95 --output calibrated"
    first: ClassVar[str] = "data text_column label_column output test_data accuracy costs alpha"
    source: Source
    split: Annotated[
        str,
        typer.Option(
            help="Split to fit on, of a Hub dataset or folder; neither the training split nor the rows that the "
            "model was calibrated on."
        ),
    ] = "validation"
    test_data: Annotated[
        str | None,
        typer.Option(
            help="Other labelled rows to measure on. Without them, the rule is measured by cross-fitting in five folds."
        ),
    ] = None
    test_split: TestSplit = "test"
    accuracy: Annotated[
        float | None,
        typer.Option(
            help="Answer where this share of the answers is right; hand over the rest. 0.95 by default."
        ),
    ] = None
    delta: Annotated[float, typer.Option(help="Chance that the promised accuracy fails.")] = 0.05
    by_class: Annotated[
        bool,
        typer.Option("--by-class", help="Promise the accuracy, or the coverage of sets, for every class."),
    ] = False
    costs: Annotated[
        Path | None,
        typer.Option(
            help="Instead of an accuracy: a csv file of costs, true classes in the first column, decisions in the "
            "header, the last one perhaps 'abstain'."
        ),
    ] = None
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Instead of an accuracy: sets of classes that miss the true one for this share at most."
        ),
    ] = None
    sets: Annotated[Literal["lac", "aps"], typer.Option(help="How sets are made, for alpha.")] = "lac"
    method: Annotated[
        Method,
        typer.Option(
            help=f"Post-hoc scaler for the figures after calibration; for a model one of {_FOLDED}."
        ),
    ] = "auto"
    seed: Seed = 0
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder, of the model perhaps, for decisions.json and a report in its folder decisions."
        ),
    ] = None

    def run(self, running: Running) -> Any:
        from hf_calib.commands.decide import decide

        return decide(self, running)

    def show(self, done: Any) -> None:
        console.print_decided(done)


@dataclass(frozen=True, kw_only=True)
class Push(Command):
    """Push a calibrated model to the Hub, in one commit, with its card, which is the folder's README.md.

    The token is HF_TOKEN, or that of `hf auth login`. To see the card first: hf_calib.cards.write_card(folder).
    """

    example: ClassVar[str] = "calibrated me/my-model"
    first: ClassVar[str] = "private revision no_fold create_pr"
    folder: Annotated[Path, typer.Argument(help="Of a calibrated model, or the output folder of a training.")]
    repo: Annotated[
        str, typer.Argument(help="On the Hub: owner/name, or name for your own. Made where there is none.")
    ]
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False
    revision: Annotated[
        str | None, typer.Option(help="Branch; made from main where there is none.", show_default="main")
    ] = None
    no_fold: Annotated[
        bool, typer.Option("--no-fold", help="Push the folder as it lies, calibrated or not.")
    ] = False
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request instead of changing the branch.")
    ] = False

    def run(self, running: Running) -> Any:
        from hf_calib.commands.push import run

        return run(self, running)

    def show(self, done: Any) -> None:
        from hf_calib.commands.push import show

        show(done)


@dataclass(frozen=True, kw_only=True)
class Export(TextOptions):
    """Export a model with its calibration to ONNX or torch.export, checked against the model itself."""

    example: ClassVar[str] = "calibrated exported --data test.csv"
    first: ClassVar[str] = "data form text_column"
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A classifier of texts, tokens or images, on the Hub or in a folder."
        ),
    ]
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="A new folder, for the program and what goes with it.")
    ]
    data: Annotated[str | None, typer.Option(help="Texts to check the export on, beside synthetic ones.")] = (
        None
    )
    form: Annotated[
        Literal["onnx", "torch"],
        typer.Option("--format", help="An ONNX graph, or an ExportedProgram of torch.export."),
    ] = "onnx"
    split: Annotated[str, typer.Option(help="Split of a Hub dataset or folder; not the training split.")] = (
        "validation"
    )

    def run(self, running: Running) -> Any:
        from hf_calib.commands.export import run

        return run(self, running)

    def show(self, done: Any) -> None:
        console.show(done)


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """Compare several files of predictions or saved reports, in one table and one figure."""

    example: ClassVar[str] = "measured calibrated other_predictions.npz"
    first: ClassVar[str] = "label_column n_bins output"
    sources: Annotated[
        list[str],
        typer.Argument(metavar="FILES", help="Files of predictions, report.json files, or folders with one."),
    ]
    label_column: LabelColumn = "label"
    n_bins: Bins = 15
    output: Annotated[
        Path | None, typer.Option(help="Folder for comparison.md, .html, .json and the figure.")
    ] = None

    def run(self, running: Running) -> Any:
        from hf_calib.commands.report import compare_reports

        options: Any = {"label_column": self.label_column, "n_bins": self.n_bins, "output": self.output}
        return compare_reports(self.sources, stages=running.stages, **options)

    def warnings(self, done: Any) -> Sequence[str]:
        return ()  # the document has them

    def show(self, done: Any) -> None:
        console.print_document(done.document())
