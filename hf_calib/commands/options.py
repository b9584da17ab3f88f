"""The options of the commands: a dataclass each, which is the command line,
the Python call and the documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, dataclass, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_type_hints

from hf_calib._errors import check, did_you_mean, without_secrets
from hf_calib._text import option, short_names
from hf_calib.metrics.checks import check_type
from hf_calib.models.reading import Reading, RowSet, option_value
from hf_calib.predictions.predictions import MULTI_LABEL, SINGLE_LABEL

if TYPE_CHECKING:
    from hf_calib.commands.calibrate import Calibration
    from hf_calib.commands.decide import Decided
    from hf_calib.report import CalibrationReport

METHODS = dict.fromkeys((*SINGLE_LABEL.maps, *MULTI_LABEL.maps))
_BINS = "Bins of calibration errors."
_TRUST = "Run code that comes with the model."
_SOURCE: Any = {"default": ..., "argument": "MODEL_OR_PREDICTIONS"}
_CLASSIFIER = "A classifier of texts, tokens or images, on the Hub or in a folder"
# NumPy takes no greater one.
_GREATEST_SEED = 2**32 - 1
# The least and the greatest value of an integer.
_RANGES = {
    "n_bins": (1, 10_000),
    "seed": (0, _GREATEST_SEED),
    "fit_on": (1, 2**31),
    "max_per_class": (10, 2**20),
}
_FOR_SETS = "label_separator label_columns no_label"
_OF_COLUMNS = "text_column text_pair_column image_column"
_OF_MODELS = f"split test_split {_OF_COLUMNS} {_FOR_SETS} max_length batch_size trust_remote_code"
_OF_PREDICTIONS = "option_scores positive_class prob_prefix unlisted_at"
# Options that have an effect only with something, by what that is.
_NEEDS = {
    "a model": _OF_MODELS,
    "predictions": f"{_OF_PREDICTIONS} weight_column",
    "a log of lm-evaluation-harness": "option_scores",
    "data that is a folder or on the Hub": "split",
    "test_data that is a folder or on the Hub": "test_split",
    "a model with several labels per row": _FOR_SETS,
    "one class per row": "by weight_column soft_labels ood_data criterion",
    "one class per row, not per token": "by weight_column soft_labels",
    "a score for each class": "class_names soft_labels ood_data",
    "rows without weights": "soft_labels ood_data",
}


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a command does: `run` of the module of its name, with these options."""

    example: ClassVar[str]
    # The options that people need, in their order.
    first: ClassVar[str] = ""
    # Those of a panel below; `--help` leaves all others out.
    more: ClassVar[str] = ""
    # Fields that are no options here.
    without: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, kind in self.kinds().items():
            ends = _RANGES.get(name, (1, 2**20))
            value = option_value(name, kind, getattr(self, name), ends)
            object.__setattr__(self, name, value)

    @classmethod
    def command(cls) -> str:
        """Its name on the command line."""
        return cls.__name__.lower()

    @classmethod
    @cache
    def kinds(cls) -> dict[str, Any]:
        """The types of its fields by their names."""
        hints = get_type_hints(cls)
        return {each.name: hints[each.name] for each in fields(cls)}

    @classmethod
    def options(cls) -> list[Field[Any]]:
        """Its fields, those first that people need."""
        places = {name: place for place, name in enumerate(cls.shown())}
        left_out = cls.without.split()
        kept = [each for each in fields(cls) if each.name not in left_out]

        def place(each: Field[Any]) -> tuple[bool, int]:
            is_option = "argument" not in each.metadata
            return is_option, places.get(each.name, len(places))

        return sorted(kept, key=place)

    @classmethod
    def shown(cls) -> list[str]:
        """The options that `--help` shows; the others are for specialists."""
        return [*cls.first.split(), *cls.more.split()]

    def __call__(self, *told: Any) -> Any:
        """Do it, quietly unless somebody is told of its progress and its stages."""
        from hf_calib.commands.source import Running

        # Imported when it runs: `hf-calib --help` needs no torch.
        module = import_module(f"hf_calib.commands.{self.command()}")
        trusted = getattr(self, "trust_remote_code", False)
        return module.run(self, Running(trusted, *told))


@dataclass(frozen=True, kw_only=True)
class Rows(Command, Reading):
    """Rows that a model is run over, or predictions: the options that several commands share."""

    needs: ClassVar = _NEEDS
    data: str | None = option(
        "Labelled rows for a model: a csv, json or parquet file, folder or Hub name."
    )
    trust_remote_code: bool = option(_TRUST, False)
    n_bins: int = option(_BINS, 15)

    def row_sets(self) -> dict[str, RowSet]:
        """The sets of rows that the options name, by their option;
        out-of-distribution ones also by their own names.
        """
        found = {}
        for name in ("data", "test_data"):
            data = getattr(self, name, None)
            if data is not None:
                split = getattr(self, name.replace("data", "split"))
                found[name] = RowSet(data, split, name)
        others = getattr(self, "ood_data", None) or []
        for name, data in zip(short_names(others), others, strict=True):
            rows = RowSet(data, argument="ood_data", labelled=False)
            # The name is in the report, and an address may hold a password.
            found[f"ood_data {without_secrets(name)}"] = rows
        return found

    def check_unused(self, need: str) -> None:
        """Raise if an option is given that has an effect only with what the rows,
        or the other options, are not.
        """
        names = self.needs[need].split()
        for each in fields(self):
            given = getattr(self, each.name)
            check(
                each.name not in names or given == each.default,
                f"{each.name} to be given with {need} only",
                repr(given),
                "leave it out, as it has no effect here",
            )


@dataclass(frozen=True, kw_only=True)
class Evaluate(Rows):
    """Report the calibration of a model on labelled texts, tokens or images,
    or of a file of predictions.
    """

    example = "me/model --data test.csv --output measured"
    first = "data text_column label_column split output by ood_data soft_labels"
    more = (
        "text_pair_column class_names label_separator max_length batch_size "
        "n_bins trust_remote_code"
    )
    # The rows of a model may have weights in its report.
    needs = _NEEDS | {"predictions": _OF_PREDICTIONS}
    source: list[str] = option(
        f"{_CLASSIFIER}; or predictions, logits or probabilities with labels: .npz, .csv, .tsv or .parquet files, "
        "a folder of these, a glob or an address (s3://, gs://, hf://), or a .jsonl log of lm-evaluation-harness.",
        **_SOURCE,
    )
    split: str = option("Split of a Hub dataset or folder.", "test")
    output: Path | None = option("Folder for report.md, .html, .json and the figures.")
    ood_data: list[str] | None = option(
        "Inputs of none of the classes: reports how well they are separated."
    )
    soft_labels: Path | None = option(
        "A .npz file of soft_labels, annotators' shares by row and class."
    )


@dataclass(frozen=True, kw_only=True)
class Measured(Rows):
    """Rows to fit on, and others to measure on."""

    source: list[str] = option(
        f"{_CLASSIFIER}; or predictions, see evaluate.", **_SOURCE
    )
    split: str = option(
        "Split to fit on, not the training split.",
        "validation",
    )
    test_data: str | None = option(
        "Other labelled rows to measure on; without, half of the data, or all for a rule."
    )
    test_split: str = option("Split of the test data.", "test")


@dataclass(frozen=True, kw_only=True)
class Calibrate(Measured):
    """Fit a calibrator and fold it into the model, for a plain pipeline;
    or calibrate a file of predictions.
    """

    example = "me/model --data validation.csv --test-data test.csv --output calibrated"
    first = "data text_column label_column split output test_data method"
    more = f"{Evaluate.more} seed"
    without = "by"
    needs = _NEEDS | {"rows that are drawn": "seed", "a temperature": "criterion"}
    output: Path = option("Folder for the calibrated model or predictions.", ...)
    method: str | None = option(
        f"One of {', '.join(METHODS)}; default: auto, or temperature with a criterion, weights or a head without bias."
    )
    criterion: Literal["nll", "ece", "adaptive_ece"] | None = option(
        "What a temperature minimises."
    )
    seed: int = option("Seed of the draw of rows.", 0)
    fit_on: int = option(
        "The most rows to fit on; of more, so many are drawn.", 200_000
    )


@dataclass(frozen=True, kw_only=True)
class Decide(Measured):
    """Fit and measure a rule that decides: with a promised accuracy, by costs,
    or in sets of classes.
    """

    example = "calibrated --data more.csv --accuracy 0.95 --output calibrated"
    first = "data text_column label_column output test_data accuracy costs alpha"
    more = "by_class sets delta split trust_remote_code"
    without = f"{_FOR_SETS} option_scores weight_column n_bins by"
    needs = _NEEDS | {
        "accuracy": "delta",
        "accuracy or alpha": "by_class",
        "alpha": "sets",
    }
    accuracy: float | None = option(
        "Promised share of right answers, default 0.95; other inputs get none."
    )
    delta: float = option("Chance that the promised accuracy fails.", 0.05)
    by_class: bool = option(
        "Promise the accuracy, or the coverage of sets, for every class.", False
    )
    costs: Path | None = option(
        "A csv file of costs, true classes by decisions, instead of an accuracy."
    )
    alpha: float | None = option(
        "For sets of classes: share of inputs whose set misses the true class."
    )
    sets: Literal["lac", "aps"] = option("How sets are made, for alpha.", "lac")
    output: Path | None = option(
        "Folder for decisions.json and a report; it may be the model's folder."
    )


@dataclass(frozen=True, kw_only=True)
class Unfold(Command):
    """Undo the folding: write the model without the calibrator that was folded into its head."""

    example = "calibrated plain"
    first = "trust_remote_code"
    source: str = option(
        "A folded classifier on the Hub or in a folder.", ..., argument="MODEL"
    )
    output: Path = option(
        "Folder for the model from before the fold.", ..., argument="OUT"
    )
    trust_remote_code: bool = option(_TRUST, False)


@dataclass(frozen=True, kw_only=True)
class Push(Command):
    """Push a calibrated model to the Hub, in one commit, with its card,
    which is the folder's README.md.

    The token is HF_TOKEN, or that of `hf auth login`. To see the card first:
    hf_calib.cards.write_card(folder).
    """

    example = "calibrated me/my-model"
    first = "private revision no_fold create_pr"
    folder: Path = option(
        "Folder of a calibrated model, or output folder of a run.",
        ...,
        argument="FOLDER",
    )
    repo: str = option(
        "Repository on the Hub, owner/name or a name of yours.", ..., argument="REPO"
    )
    private: bool = option("Make a new repository private.", False)
    revision: str | None = option(
        "Branch, main by default; created from main if it does not exist."
    )
    no_fold: bool = option("Push the folder unchanged, calibrated or not.", False)
    create_pr: bool = option(
        "Open a pull request instead of changing the branch.", False
    )


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Train with three losses on real text, compare them, and serve the calibrated model.
    No network needed.
    """

    example = "--output demo_output"
    first = "output epochs max_per_class"
    output: Path = option("Folder for the figure and the model.", Path("demo_output"))
    epochs: int = option("Epochs of each of the three runs.", 10)
    max_per_class: int = option("Examples per class; fewer are faster.", 1500)


COMMANDS = (Evaluate, Calibrate, Unfold, Decide, Push, Demo)


def evaluate(source: str | Path | Sequence[str], **options: Any) -> CalibrationReport:
    """Report the calibration of a model on labelled rows, or of predictions: `hf-calib evaluate`.

    Args:
        source: a classifier, on the Hub or in a folder; or files of predictions, a folder, a glob
            or an address.
        **options: those of `hf-calib evaluate`, such as data="test.csv", by=["country"],
            output="measured".

    Raises:
        InputError: a ValueError or TypeError where source or data are missing, unreadable or do not
            fit.

    >>> evaluate("missing.csv")
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputValueError: expected predictions to name existing files, got missing.csv, where there are ...
    """
    return _done(Evaluate, source=source, **options)


def calibrate(
    source: str | Path | Sequence[str], output: str | Path, **options: Any
) -> Calibration:
    """Fit a calibrator on held-out rows, and fold it into a model or calibrate predictions:
    `hf-calib calibrate`.

    Args:
        source: a classifier, on the Hub or in a folder; or files of predictions, a folder, a glob
            or an address.
        output: the folder for the calibrated model, or for calibrated predictions.
        **options: those of `hf-calib calibrate`, such as data="validation.csv",
            method="temperature".

    Raises:
        InputError: a ValueError or TypeError where model, data or options are wrong.
        RuntimeError: if a pipeline with the saved model gives other probabilities; output is then
            not made.
    """
    return _done(Calibrate, source=source, output=output, **options)


def decide(source: str | Path | Sequence[str], **options: Any) -> Decided:
    """Fit a rule, a promised accuracy, costs or sets, and measure it on other rows:
    `hf-calib decide`.

    Args:
        source: a classifier of sequences or images, on the Hub or in a folder; or files of
            predictions.
        **options: those of `hf-calib decide`, such as data="more.csv", accuracy=0.95,
            output="calibrated".

    Raises:
        InputError: a ValueError or TypeError where source, data or options are wrong, or the rows
            too few.
    """
    return _done(Decide, source=source, **options)


def _done(kind: type[Command], **options: Any) -> Any:
    known = [each.name for each in kind.options()]
    requirement = f"each option to be one of {kind.command()}'s"
    for name in options:
        check_type(name in known, requirement, repr(name), did_you_mean(name, known))
    return kind(**options)()
