"""`compare`: a study of losses and seeds, from trainings to the report."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib._files import whole_file
from hf_calib.study.folder import (
    clean_up,
    is_finished,
    mark_failed,
    newest_checkpoint,
    read_plan,
    remove_cut_short,
    write_plan,
)
from hf_calib.study.grid import OWN_ARGUMENTS, Cell, Variant, is_secret, variants
from hf_calib.study.measured import Variance, check_methods, measure_study

if TYPE_CHECKING:
    from hf_calib.study.results import StudyResults
    from hf_calib.trainer import CalibrationTrainer

METHODS = ("temperature", "auto")
# Of the training arguments, what does not change the training.
_NOT_OF_THE_TRAINING = (
    "output_dir",
    "run_name",
    "logging_dir",
    "report_to",
    "disable_tqdm",
    "resume_from_checkpoint",
)


def compare(
    make_trainer: Callable[[str, int], CalibrationTrainer],
    *,
    losses: Sequence[str],
    seeds: Sequence[int],
    test_dataset: Any,
    output: str | Path,
    grid: Mapping[str, Sequence[Any]] | None = None,
    methods: Sequence[str] = METHODS,
    keep_models: bool = True,
    variance: Variance = "own",
) -> StudyResults:
    """Train losses over seeds, one after the other, and compare them with intervals.

    The command `hf-calib compare` does the same with a script, each training in a process of its own, several side by
    side. Called again with the same output, this does only what is missing, and goes on from the newest checkpoint
    of a training that was interrupted.

    Args:
        make_trainer: makes the trainer of one training, with a fresh model. It passes the loss and the seed that it is
            given on to `CalibrationTrainingArguments`, and calls `set_seed(seed)` before it makes a model whose head
            is new.
        losses: names in `LOSSES`, or YAML files with `loss` and `loss_kwargs`.
        seeds: of the trainings; the same for all losses.
        test_dataset: what is reported; none of the trainer's datasets.
        output: the study's folder: the trainings, and report.md, .html, .json, results.csv and figures.
        grid: hyperparameter -> values; each loss is trained with all combinations of those that it has.
        methods: post-hoc maps that are fitted to each training's calibration rows, names in
            `hf_calib.study.kinds.MAPS`.
        keep_models: False removes each model once its predictions are written.
        variance: over seeds, of the differences: of each pair of losses its "own", or "pooled" over all of them, which
            finds more with few seeds and needs losses that vary alike; the report tests that.

    Returns:
        The results, which are also written to `output`.

    Raises:
        ValueError: for an unknown loss, hyperparameter or method, or a make_trainer that does not pass on what it is
            given.
        TypeError: if make_trainer returns something else.

    Notes:
        A training that fails is reported with its error, and does not stop the others.

    Example::

        def make_trainer(loss, seed):
            set_seed(seed)
            args = CalibrationTrainingArguments(output_dir="unused", loss=loss, seed=seed, num_train_epochs=3)
            return CalibrationTrainer(make_model(), args, train_dataset=train, calibration_dataset=calibration)

        results = compare(
            make_trainer, losses=["cross_entropy", "focal"], seeds=[0, 1, 2], test_dataset=test, output="study"
        )
        print(*results.advice, sep="\\n")
    """
    check_methods(methods)
    study = Path(output)
    trainings = product(check_seeds(seeds), variants(losses, grid or {}, None))
    cells: list[Cell] = []
    for seed, variant in trainings:
        trainer = _made(make_trainer, variant, seed)
        cells.append(Cell(variant, seed, _configuration(trainer, test_dataset)))
        base = {name: value for name, value in cells[0].arguments.items() if name not in OWN_ARGUMENTS}
        folder = write_plan(study, cells, methods, base)[cells[-1]]
        if not is_finished(folder):
            _train(trainer, test_dataset, folder, keep_model=keep_models)
        del trainer
        gc.collect()  # a model and its optimizer: the next one needs the room
    return report_study(study, variance=variance)


def report_study(
    study: Path,
    *,
    methods: Sequence[str] | None = None,
    variance: Variance = "own",
    stages: Callable[[str], None] = lambda stage: None,
) -> StudyResults:
    """Measure what the trainings of a study have left, and write its report; trains nothing.

    Args:
        study: the folder.
        methods: post-hoc maps; by default those of the study.
        variance: see `compare`.
        stages: called with the name of each stage as it begins.

    Raises:
        ValueError: if the folder is not a study, or a method is unknown.
    """
    from hf_calib.study.report import write_study_report

    plan = read_plan(study)
    results = measure_study(study, methods=methods or plan["methods"], variance=variance, stages=stages)
    stages("writing the report")
    write_study_report(results, study)
    return results


def check_seeds(seeds: Sequence[int]) -> Sequence[int]:
    """Raise unless there is a seed, and none is there twice."""
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        requirement, way_out = "be different whole numbers, from 0", "write for example 0,1,2"
        raise InputValueError(expected("seeds", requirement, list(seeds), way_out))
    return seeds


def _made(
    make_trainer: Callable[[str, int], CalibrationTrainer], variant: Variant, seed: int
) -> CalibrationTrainer:
    from hf_calib.trainer import CalibrationTrainer

    trainer = make_trainer(variant.loss, seed)
    if not isinstance(trainer, CalibrationTrainer):
        way_out = "return the trainer that it makes"
        got = type(trainer).__name__
        raise InputTypeError(expected("make_trainer", "return a CalibrationTrainer", got, way_out))
    args: Any = trainer.args
    if (args.loss, args.seed) != (variant.loss, seed):
        got = f"loss={args.loss!r}, seed={args.seed} for ({variant.loss!r}, {seed})"
        way_out = "write CalibrationTrainingArguments(loss=loss, seed=seed, ...)"
        raise InputValueError(expected("make_trainer", "pass on its loss and its seed", got, way_out))
    if variant.hyperparameters:
        args.loss_kwargs = {**(args.loss_kwargs or {}), **variant.hyperparameters}
    return trainer


def _configuration(trainer: CalibrationTrainer, test_dataset: Any) -> dict[str, Any]:
    """The training's configuration, as far as arguments, config and datasets record it."""
    args: Any = trainer.args
    ignored = {name for name in args.to_dict() if name in _NOT_OF_THE_TRAINING or is_secret(name)}
    found = {name: value for name, value in args.to_dict().items() if name not in ignored}
    found["loss_kwargs"] = args.make_loss().hyperparameters  # with the defaults
    config = trainer.model_config
    datasets = {
        "train": trainer.train_dataset,
        "calibration": trainer.calibration_split,
        "test": test_dataset,
    }
    found["model"] = None if config is None else config.to_dict()
    found["data"] = {role: getattr(rows, "_fingerprint", None) for role, rows in datasets.items()}
    return found


def _train(trainer: CalibrationTrainer, test_dataset: Any, folder: Path, *, keep_model: bool) -> None:
    from hf_calib.experiments import train_and_report

    trainer.args.output_dir = str(folder)
    remove_cut_short(folder)
    try:
        train_and_report(trainer, test_dataset, resume=newest_checkpoint(folder))
    except Exception as error:
        mark_failed(folder, f"{type(error).__name__}: {error}")
        with suppress(OSError), whole_file(folder / "log.txt") as log:
            log.write_text(traceback.format_exc(), encoding="utf-8")
        return
    clean_up(folder, keep_model=keep_model)
