"""The options of the commands: a dataclass each, which is the command line, the Python call and the documentation."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields
from importlib import import_module
from inspect import Parameter, Signature
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

import typer

from hf_calib._errors import InputTypeError, did_you_mean, expected
from hf_calib.commands import console
from hf_calib.models.reading import Names, Reading, RowSet
from hf_calib.predictions.predictions import MULTI_LABEL, SINGLE_LABEL

if TYPE_CHECKING:
    from hf_calib.commands.calibrate import Calibration
    from hf_calib.commands.decide import Decided
    from hf_calib.commands.source import Running
    from hf_calib.report import CalibrationReport

METHODS = tuple(dict.fromkeys((*SINGLE_LABEL.maps, *MULTI_LABEL.maps)))
Method = Literal[METHODS]  # type: ignore[valid-type]
_OF_SETS_AND_TABLES = "label_separator label_columns no_label option_scores weight_column n_bins workers"

# What a field needs beside its type, its default and its documentation.
_COUNT = {"min": 1, "max": 2**20}
_TYPER: dict[str, dict[str, Any]] = {
    "n_bins": {"min": 1, "max": 10_000},
    "workers": {"min": 1, "max": 2**10, "show_default": "as many as CPUs, 8 at most"},
    "max_length": _COUNT,
    "batch_size": _COUNT,
    "seed": {"min": 0, "max": 2**32 - 1},
    "criterion": {"show_default": "nll"},
    "revision": {"show_default": "main"},
    "methods": {"show_default": "temperature,auto"},
    "jobs": {"min": 0, "max": 2**10},
    "epochs": {"min": 1},
    "max_per_class": {"min": 10},
}


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a command does: `run` and `show` of the module of its name, with these options."""

    example: ClassVar[str]
    arguments: ClassVar[dict[str, str]]  # that are given without a name, and what stands for them in --help
    first: ClassVar[str] = ""  # the options that people need; --help has the others in a panel "More"
    hidden: ClassVar[str] = ""  # fields that are no options here
    names: ClassVar[dict[str, str]] = {}  # of options, where they differ from the fields

    def __post_init__(self) -> None:
        for each in fields(self):
            if "Path" in str(each.type) and isinstance(getattr(self, each.name), str):
                object.__setattr__(self, each.name, Path(getattr(self, each.name)))

    @classmethod
    def options(cls) -> list[Field[Any]]:
        """Its fields, those first that people need."""
        first, hidden = cls.first.split(), cls.hidden.split()
        shown = [each for each in fields(cls) if each.name not in hidden]
        return sorted(shown, key=lambda each: first.index(each.name) if each.name in first else len(first))

    @classmethod
    def command(cls) -> str:
        """Its name on the command line."""
        return re.sub(r"\B([A-Z])", r"-\1", cls.__name__).lower()

    @property
    def module(self) -> Any:
        """Where the command is, imported when it runs: `hf-calib --help` needs no torch."""
        return import_module(f"hf_calib.commands.{self.command().replace('-', '_')}")

    def __call__(self) -> Any:
        """Do it quietly, for Python."""
        from hf_calib.commands.source import Running

        return self.module.run(self, Running(trust_remote_code=getattr(self, "trust_remote_code", False)))

    @contextmanager
    def running(self) -> Iterator[Running]:
        """Whom it tells of its progress: stderr."""
        from hf_calib.commands.source import Running

        trusted = getattr(self, "trust_remote_code", False)
        with console.stages() as stages, console.progress() as progress:
            yield Running(trusted, progress, stages)


def documented(kind: type[Command]) -> dict[str, str]:
    """Field -> the text below it, also in the classes that a command extends."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        (described,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(described, ast.ClassDef)
        for node, text in pairwise(described.body):
            match node, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(said))):
                    found[name] = " ".join(said.split())
    return found


def add_to(app: typer.Typer, kind: type[Command]) -> None:
    """Make a dataclass of options the command of its name."""
    hints, texts = get_type_hints(kind), documented(kind)
    given = []
    for each in kind.options():
        settings = {"help": texts[each.name], **_TYPER.get(each.name, {})}
        if each.name in kind.arguments:
            info = typer.Argument(metavar=kind.arguments[each.name], **settings)
        else:
            settings["rich_help_panel"] = None if each.name in kind.first.split() else "More"
            name = kind.names.get(each.name, each.name.replace("_", "-"))
            info = typer.Option(f"--{name}", **settings)
        default = Parameter.empty if each.default is MISSING else each.default
        typed = str | None if hints[each.name] == Names else hints[each.name]  # a,b,c on a command line
        given.append(
            Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[typed, info])
        )
    as_json = typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")
    given.append(
        Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, as_json])
    )

    def run(as_json: bool, **options: Any) -> None:
        chosen = kind(**options)
        with console.exit_codes(), chosen.running() as running:
            done = chosen.module.run(chosen, running)
        if kind not in (Evaluate, CompareReports, CompareLosses):  # whose documents have them
            console.print_warnings(getattr(getattr(done, "report", done), "notes", ()))
        if as_json:
            console.print_json(done.to_dict())
        else:
            getattr(chosen.module, "show", console.show)(done)
            console.print_written(options.get("output"))

    run.__signature__ = Signature(given)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in given}
    name = kind.command()
    app.command(name, help=kind.__doc__, epilog=f"Example: hf-calib {name} {kind.example}")(run)


@dataclass(frozen=True, kw_only=True)
class Rows(Reading, Command):
    """Rows that a model is run over, or predictions: the options that several commands share."""

    data: str | None = None
    """Labelled texts, tagged sentences or images, for a model: a csv, tsv, json or parquet file, a folder, also of
    images, or a dataset on the Hub."""
    dataset_config: str | None = None
    """Configuration of a Hub dataset."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    n_bins: int = 15
    """Number of bins of the binned calibration errors."""
    workers: int | None = None
    """Threads, for predictions of more rows than are held at once."""

    def __post_init__(self) -> None:
        Reading.__post_init__(self)
        Command.__post_init__(self)

    def rows(self, name: str = "data", split: str = "split", *, labelled: bool = True) -> RowSet | None:
        """The set of rows that an option names; None where there are none."""
        data = getattr(self, name)
        if data is None:
            return None
        return RowSet(data, self.dataset_config, getattr(self, split), name, labelled)


@dataclass(frozen=True, kw_only=True)
class Evaluate(Rows):
    """Report the calibration of a model on labelled texts, tokens or images, or of a file of predictions."""

    example = "me/model --data test.csv --output measured; hf-calib evaluate predictions.npz"
    arguments: ClassVar = {"source": "MODEL_OR_PREDICTIONS"}
    first = "data text_column label_column split output by soft_labels ood_data"
    source: list[str]
    """A classifier of texts, tokens or images, on the Hub or in a folder; or predictions: .npz, .csv, .tsv or .parquet
    files of logits or probabilities with labels, a folder of them, a glob, or an address (s3://, gs://, hf://); or a
    .jsonl log of lm-evaluation-harness."""
    split: str = "test"
    """Split of a Hub dataset or folder."""
    output: Path | None = None
    """Folder for report.md, .html, .json and the figures."""
    ood_data: list[str] | None = None
    """Inputs from elsewhere, of none of the classes: rows like --data, whose labels are not read, or a file of
    predictions beside one; also several. Reports how well the model's uncertainty separates them."""
    ood_split: str = "test"
    """Split of these, of a Hub dataset or folder; a folder of nothing but images is train."""
    soft_labels: Path | None = None
    """A .npz file with the array soft_labels (or probs): the share of annotators that named each class, for each row.
    Reports the calibration against these, too."""


@dataclass(frozen=True, kw_only=True)
class Calibrate(Rows):
    """Fit a scaler and fold it into the model, for a plain pipeline; or calibrate a file of predictions."""

    example = "me/model --data validation.csv --test-data test.csv --output calibrated"
    arguments: ClassVar = {"source": "MODEL_OR_PREDICTIONS"}
    first = "data text_column label_column split output test_data target_data method"
    hidden = "by"
    source: str
    """A classifier of texts, tokens or images, on the Hub or in a folder; or a .npz, .csv, .tsv or .parquet file of
    logits or probabilities with labels."""
    output: Path
    """Folder for the calibrated model, or for calibrated predictions.npz."""
    split: str = "validation"
    """Split to fit on, of a Hub dataset or folder; not the training split."""
    test_data: str | None = None
    """Other labelled rows to report on. Without them, the scaler is fitted on half of the data, and the report is on
    the other half."""
    test_split: str = "test"
    """Split of the test data."""
    target_data: str | None = None
    """Rows as they come where the model is used; labels are not read. Their class frequencies are estimated, and
    corrected for unless they are the data's. Test data should then be such rows, too."""
    target_split: str = "test"
    """Split of the target data."""
    method: Method | None = None
    """Post-hoc scaler, auto by default; temperature where a criterion is given, and for heads that keep no bias. Linear
    ones are folded into a model's head; others are saved beside it, for hf_calib.pipeline."""
    criterion: Literal["nll", "ece", "adaptive_ece"] | None = None
    """The criterion that a temperature minimises."""
    seed: int = 0
    """Seed for drawing halves of the data."""


@dataclass(frozen=True, kw_only=True)
class Unfold(Command):
    """Undo the folding: write the model as it was before a scaler was folded into its head."""

    example = "calibrated plain"
    arguments: ClassVar = {"source": "MODEL", "output": "OUT"}
    first = "trust_remote_code"
    source: str
    """A folded classifier on the Hub or in a folder."""
    output: Path
    """Folder for the model from before the fold."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""


@dataclass(frozen=True, kw_only=True)
class Decide(Rows):
    """Promise an accuracy and hand over the rest, or decide by costs or in sets: what is answered, how right."""

    example = "calibrated --data more.csv --accuracy 0.95 --output calibrated"
    arguments: ClassVar = {"source": "MODEL_OR_PREDICTIONS"}
    first = "data text_column label_column output test_data accuracy costs alpha"
    hidden = f"{_OF_SETS_AND_TABLES} by"
    source: str
    """A classifier of texts or images, on the Hub or in a folder; or a .npz, .csv, .tsv or .parquet file of logits or
    probabilities with labels."""
    split: str = "validation"
    """Split to fit on, of a Hub dataset or folder; neither the training split nor the rows that the model was
    calibrated on."""
    test_data: str | None = None
    """Other labelled rows to measure on. Without them, the rule is measured by cross-fitting in five folds."""
    test_split: str = "test"
    """Split of the test data."""
    accuracy: float | None = None
    """Answer where this share of the answers is right; hand over the rest. 0.95 by default."""
    delta: float = 0.05
    """Chance that the promised accuracy fails."""
    by_class: bool = False
    """Promise the accuracy, or the coverage of sets, for every class."""
    costs: Path | None = None
    """Instead of an accuracy: a csv file of costs, true classes in the first column, decisions in the header, the last
    one perhaps 'abstain'."""
    alpha: float | None = None
    """Instead of an accuracy: sets of classes that miss the true one for this share at most."""
    sets: Literal["lac", "aps"] = "lac"
    """How sets are made, for alpha."""
    seed: int = 0
    """Seed for drawing the folds."""
    output: Path | None = None
    """Folder, of the model perhaps, for decisions.json and a report in its folder decisions."""


@dataclass(frozen=True, kw_only=True)
class Push(Command):
    """Push a calibrated model to the Hub, in one commit, with its card, which is the folder's README.md.

    The token is HF_TOKEN, or that of `hf auth login`. To see the card first: hf_calib.cards.write_card(folder).
    """

    example = "calibrated me/my-model"
    arguments: ClassVar = {"folder": "FOLDER", "repo": "REPO"}
    first = "private revision no_fold create_pr"
    folder: Path
    """Of a calibrated model, or the output folder of a training."""
    repo: str
    """On the Hub: owner/name, or name for your own. Made where there is none."""
    private: bool = False
    """Make a new repository private."""
    revision: str | None = None
    """Branch; made from main where there is none."""
    no_fold: bool = False
    """Push the folder as it lies, calibrated or not."""
    create_pr: bool = False
    """Open a pull request instead of changing the branch."""


@dataclass(frozen=True, kw_only=True)
class Export(Rows):
    """Export a model with its calibration to ONNX or torch.export, checked against the model itself."""

    example = "calibrated exported --data test.csv"
    arguments: ClassVar = {"model": "MODEL", "output": "OUT"}
    first = "data form text_column"
    hidden = f"{_OF_SETS_AND_TABLES} by image_column"
    names: ClassVar = {"form": "format"}
    data: str | None = None
    """Texts to check the export on, beside synthetic ones."""
    model: str
    """A classifier of texts, tokens or images, on the Hub or in a folder."""
    output: Path
    """A new folder, for the program and what goes with it."""
    form: Literal["onnx", "torch"] = "onnx"
    """An ONNX graph, or an ExportedProgram of torch.export."""
    split: str = "validation"
    """Split of a Hub dataset or folder; not the training split."""


@dataclass(frozen=True, kw_only=True)
class CompareReports(Command):
    """Compare several files of predictions or saved reports, in one table and one figure."""

    example = "measured calibrated other_predictions.npz"
    arguments: ClassVar = {"sources": "FILES"}
    first = "label_column n_bins output"
    sources: list[str]
    """Files of predictions, report.json files, or folders with one."""
    label_column: str = "label"
    """Column of the labels of predictions that are tables."""
    n_bins: int = 15
    """Number of bins of the binned calibration errors."""
    output: Path | None = None
    """Folder for comparison.md, .html, .json and the figure."""


@dataclass(frozen=True, kw_only=True)
class CompareLosses(Command):
    """Train several losses over seeds, and report which is best for these data, with intervals.

    Killed at any time, the same command goes on where it was.
    """

    example = (
        "recipes/text_classification.py --config ag_news_minilm.yaml --losses cross_entropy,focal --output study -- "
        "--train_file train.csv"
    )
    arguments: ClassVar = {"source": "SCRIPT_OR_STUDY", "words": "[-- ARGUMENTS]"}
    first = "config losses seeds grid methods output jobs"
    names: ClassVar = {"keep_models": "keep-models/--no-keep-models"}
    source: str
    """A recipe, or a script of yours that takes its arguments and ends with train_and_report; or the folder of a study,
    which is measured again without training."""
    words: list[str] | None = None
    """Of the script, such as --train_file train.csv."""
    config: list[str] | None = None
    """YAML file of the script, or the name of one in configs/ beside it; also several."""
    losses: Names = "cross_entropy,focal,dual_focal,adafocal,bsce_gra"
    """Losses, a,b,c: names, YAML files, or names of files in configs/losses beside the script."""
    seeds: str = "0,1,2"
    """Seeds of the trainings."""
    grid: list[str] | None = None
    """Values of a hyperparameter, gamma=1,2,3, for the losses that have it; also several."""
    methods: Names = None
    """Post-hoc maps to compare; they cost no training."""
    variance: Literal["own", "pooled"] = "own"
    """Over seeds, of differences: of each pair of losses its own, or pooled over all losses, which finds more with few
    seeds where they vary alike."""
    output: Path | None = None
    """Folder of the study."""
    jobs: int = 1
    """Trainings side by side; CPU threads and GPUs are shared out. 0: one on each visible GPU."""
    launcher: str | None = None
    """What starts a script, such as 'torchrun --nproc_per_node 2'."""
    print_commands: bool = False
    """Print a line for each training that is missing, and end."""
    submitit: str | None = None
    """Train as jobs of Slurm, by submitit: its parameters, '{"slurm_partition": "gpu"}'."""
    keep_models: bool = True
    """Keep the calibrated model of each training; checkpoints go when it is finished."""


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Train with three losses on real text, compare them, and serve the calibrated model. No network needed."""

    example = "--output demo_output"
    arguments: ClassVar = {}
    first = "output epochs max_per_class seed"
    output: Path = Path("demo_output")
    """Folder for the figure and the model."""
    epochs: int = 10
    """Epochs of each of the three trainings."""
    max_per_class: int = 1500
    """Examples per class; fewer are faster."""
    seed: int = 0
    """Seed of the data split and the trainings."""


def evaluate(source: str | Sequence[str], **options: Any) -> CalibrationReport:
    """Report the calibration of a model on labelled rows, or of predictions: `hf-calib evaluate`.

    Args:
        source: a classifier, on the Hub or in a folder; or files of predictions, a folder, a glob or an address.
        **options: those of `hf-calib evaluate --help`, such as data="test.csv", by=["country"], output="measured".

    Raises:
        InputError: a ValueError or TypeError where source or data are missing, unreadable or do not fit.

    >>> evaluate("missing.csv")
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputValueError: expected predictions to name existing files, got missing.csv, where there are ...
    """
    return _done(Evaluate, source=[source] if isinstance(source, str) else list(source), **options)


def calibrate(source: str, output: str, **options: Any) -> Calibration:
    """Fit a scaler on held-out rows, and fold it into a model or calibrate predictions: `hf-calib calibrate`.

    Args:
        source: a classifier, on the Hub or in a folder; or predictions.
        output: the folder for the calibrated model, or for predictions.npz.
        **options: those of `hf-calib calibrate --help`, such as data="validation.csv", method="temperature".

    Raises:
        InputError: a ValueError or TypeError where model, data or options are wrong.
        RuntimeError: if a pipeline with the saved model gives other probabilities; output is then not made.

    >>> calibrate("missing.csv", "out", methd="vector")
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputTypeError: expected option to be one of calibrate, got methd; did you mean 'method'?
    """
    return _done(Calibrate, source=source, output=output, **options)


def decide(source: str, **options: Any) -> Decided:
    """Fit a rule, a promised accuracy, costs or sets, and measure it on other rows: `hf-calib decide`.

    Args:
        source: a classifier of sequences or images, on the Hub or in a folder; or predictions.
        **options: those of `hf-calib decide --help`, such as data="more.csv", accuracy=0.95, output="calibrated".

    Raises:
        InputError: a ValueError or TypeError where source, data or options are wrong, or the rows too few.
    """
    return _done(Decide, source=source, **options)


def _done(kind: type[Command], **options: Any) -> Any:
    known = [each.name for each in kind.options()]
    for name in options.keys() - known:
        requirement, way_out = f"be one of {kind.command()}", did_you_mean(name, known)
        raise InputTypeError(expected("option", requirement, name, way_out))
    return kind(**options)()
