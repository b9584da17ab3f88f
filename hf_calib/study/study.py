"""`compare`: a study of losses and seeds in this process, from the runs to the report."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from hf_calib._errors import InputTypeError, check, expected
from hf_calib.metrics.checks import check_choice
from hf_calib.study.measured import METHODS, check_methods, measure_study
from hf_calib.study.plan import (
    LOG,
    Cell,
    Variant,
    changes_training,
    clean_up,
    is_finished,
    mark_failed,
    read_plan,
    variants,
    write_plan,
)
from hf_calib.study.results import StudyResults, Variance

if TYPE_CHECKING:
    from hf_calib.trainer import CalibrationTrainer

MakeTrainer = Callable[[str, int], "CalibrationTrainer"]


def compare(
    make_trainer: MakeTrainer,
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
    """Train losses with several seeds, one run after another, and compare them with intervals.

    The command `hf-calib compare-losses` does the same with a script, with several runs at a time in processes of
    their own. If `compare` is called again with the same output, it runs only what is missing and resumes interrupted
    runs from their newest checkpoint. A run that fails is reported with its error and does not stop the others.

    Args:
        make_trainer: a function that returns the trainer of a loss and a seed, with a new model. It passes both to
            `CalibrationTrainingArguments`, and calls `set_seed(seed)` before it makes a model with a new head.
        losses: names in `LOSSES`, or YAML files with `loss` and `loss_kwargs`.
        seeds: seeds, the same for all losses.
        test_dataset: the rows of the reported metrics, in none of the trainer's datasets.
        output: folder of the study, for the runs, report.md, .html, .json, results.csv and a figure.
        grid: hyperparameter -> values; each loss is trained with all combinations of its hyperparameters.
        methods: calibrators to fit to each run's calibration rows, names in `hf_calib.study.measured.MAPS`.
        keep_models: if False, each model is removed once its predictions are written.
        variance: variance of the differences over seeds: "own" for each pair of losses, or "pooled" over all losses,
            which has more power with few seeds and assumes that the losses vary equally.

    Returns:
        The results, which are also written to `output`; `results()` is their tidy table.

    Raises:
        ValueError: if a loss, hyperparameter or method is unknown, or make_trainer ignores its arguments.
        TypeError: if make_trainer does not return a CalibrationTrainer.

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
    check_choice("variance", variance, get_args(Variance))
    study = Path(output)
    cells: list[Cell] = []
    base: dict[str, Any] = {}
    for seed, variant in product(
        check_seeds(seeds), variants(losses, grid or {}, None)
    ):
        trainer = _made(make_trainer, variant, seed)
        own = _configuration(trainer, test_dataset)
        base = base or own
        hyperparameters = (
            trainer.args.make_loss().hyperparameters
        )  # These include defaults.
        cells.append(
            Cell(
                variant,
                seed,
                {**own, "loss": variant.loss, "loss_kwargs": hyperparameters},
            )
        )
        folder = write_plan(study, cells, methods, base)[cells[-1]]
        if not is_finished(folder):
            _train(trainer, test_dataset, folder, keep_model=keep_models)
        del trainer
        gc.collect()  # The next model and optimizer need the memory.
    return report_study(study, variance=variance)


def report_study(
    study: Path,
    *,
    methods: Sequence[str] | None = None,
    variance: Variance = "own",
    stages: Callable[[str], None] = lambda stage: None,
) -> StudyResults:
    """Measure the finished runs of a study with its calibrators or others, and write the report."""
    from hf_calib.study.report import write_study_report

    methods = methods or read_plan(study)["methods"]
    results = measure_study(study, methods=methods, variance=variance, stages=stages)
    stages("writing the report")
    write_study_report(results, study)
    return results


def check_seeds(seeds: Sequence[int]) -> Sequence[int]:
    """Raise unless there is at least one seed and all seeds differ."""
    right = len(seeds) > 0 and len(set(seeds)) == len(seeds) and min(seeds) >= 0
    check(
        right,
        "seeds to be different whole numbers, from 0",
        list(seeds),
        "write for example 0,1,2",
    )
    return seeds


def _made(make_trainer: MakeTrainer, variant: Variant, seed: int) -> CalibrationTrainer:
    from hf_calib.trainer import CalibrationTrainer

    trainer = make_trainer(variant.loss, seed)
    if not isinstance(trainer, CalibrationTrainer):
        got, way_out = type(trainer).__name__, "return the trainer from make_trainer"
        raise InputTypeError(
            expected("make_trainer", "return a CalibrationTrainer", got, way_out)
        )
    args: Any = trainer.args
    got = f"loss={args.loss!r}, seed={args.seed} for ({variant.loss!r}, {seed})"
    way_out = "write CalibrationTrainingArguments(loss=loss, seed=seed, ...)"
    same = (args.loss, args.seed) == (variant.loss, seed)
    check(same, "make_trainer to pass its loss and seed to the arguments", got, way_out)
    if variant.hyperparameters:
        args.loss_kwargs = {**(args.loss_kwargs or {}), **variant.hyperparameters}
    return trainer


def _configuration(trainer: CalibrationTrainer, test_dataset: Any) -> dict[str, Any]:
    """The configuration that all runs share, as far as arguments, config and datasets record it."""
    found = {
        name: value
        for name, value in trainer.args.to_dict().items()
        if changes_training(name)
    }
    config, train, calibration = (
        trainer.model_config,
        trainer.train_dataset,
        trainer.calibration_split,
    )
    found["model"] = None if config is None else config.to_dict()
    datasets = {"train": train, "calibration": calibration, "test": test_dataset}
    found["data"] = {
        role: getattr(rows, "_fingerprint", None) for role, rows in datasets.items()
    }
    return found


def _train(
    trainer: CalibrationTrainer, test_dataset: Any, folder: Path, *, keep_model: bool
) -> None:
    from hf_calib.experiments import train_and_report
    from hf_calib.trainer.saving import newest_checkpoint

    trainer.args.output_dir = str(folder)
    try:
        checkpoint = newest_checkpoint(folder, trainer.calibration_config.loss)
        train_and_report(trainer, test_dataset, resume=checkpoint)
    except Exception as error:
        mark_failed(folder, f"{type(error).__name__}: {error}")
        (folder / LOG).write_text(traceback.format_exc(), encoding="utf-8")
        return
    clean_up(folder, keep_model=keep_model)
