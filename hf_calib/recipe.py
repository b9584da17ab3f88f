"""What the recipes share: which data to load, and what a finished run reports and leaves on disk."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from hf_calib._output import whole_file
from hf_calib.data import choose_columns, docstring_dataset, limit_samples, load_splits, split_calibration
from hf_calib.losses import logits_of
from hf_calib.model_card import METRICS
from hf_calib.posthoc import write_to
from hf_calib.report import calibration_report
from hf_calib.report.text import with_interval

if TYPE_CHECKING:
    from datasets import DatasetDict
    from transformers import EvalPrediction

    from hf_calib.report import CalibrationReport
    from hf_calib.trainer import CalibrationTrainer

BUILT_IN = "docstrings"


@dataclass
class DataArguments:
    """Where the data come from, and which rows and columns are used."""

    dataset: str | None = field(
        default=None,
        metadata={"help": f"A data set on the Hub, a local folder, or {BUILT_IN!r}, which needs no network."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub data set."})
    train_file: str | None = field(
        default=None, metadata={"help": "csv, json, jsonl (also .gz) or parquet; goes before dataset."}
    )
    calibration_file: str | None = field(default=None, metadata={"help": "Drawn from train where not given."})
    test_file: str | None = field(
        default=None, metadata={"help": "Reported at the end, used for nothing else."}
    )
    test_split: str = field(default="test", metadata={"help": "'validation' where test labels are withheld."})
    text_column: str = field(default="text", metadata={"help": "Column of texts."})
    image_column: str = field(default="image", metadata={"help": "Column of images."})
    label_column: str = field(default="label", metadata={"help": "Column of classes."})
    class_names: list[str] | None = field(default=None, metadata={"help": "Names of the classes, in order."})
    calibration_size: float = field(
        default=0.1, metadata={"help": "Share of train, or (from 1 on) number of its rows, to hold out."}
    )
    split_seed: int = field(
        default=0, metadata={"help": "Seed of the splits; the same for all compared runs."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Use so many random rows."})
    max_calibration_samples: int | None = field(default=None, metadata={"help": "Use so many random rows."})
    max_test_samples: int | None = field(default=None, metadata={"help": "Use so many random rows."})


def load_data(args: DataArguments, *, images: bool = False) -> DatasetDict:
    """The splits train, calibration and test, with columns `text` (or `image`) and `label`."""
    if args.dataset == BUILT_IN and not images:
        dataset = docstring_dataset(seed=args.split_seed)
    else:
        dataset = load_splits(
            None if args.train_file else args.dataset,  # a file on the command line, a name in the config
            config_name=args.dataset_config,
            test_split=args.test_split,
            train_file=args.train_file,
            calibration_file=args.calibration_file,
            test_file=args.test_file,
        )
        column = {"image_column": args.image_column} if images else {"text_column": args.text_column}
        names = args.class_names
        dataset = choose_columns(dataset, label_column=args.label_column, label_names=names, **column)
    size = args.calibration_size
    dataset = split_calibration(dataset, size=int(size) if size >= 1 else size, seed=args.split_seed)
    return limit_samples(
        dataset,
        max_train_samples=args.max_train_samples,
        max_calibration_samples=args.max_calibration_samples,
        max_test_samples=args.max_test_samples,
        seed=args.split_seed,
    )


def label_maps(dataset: DatasetDict) -> dict[str, Any]:
    """`num_labels`, `id2label` and `label2id` for `from_pretrained`."""
    names = dataset["train"].features["label"].names
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
    }


def run(
    trainer: CalibrationTrainer, test_dataset: Any, *, resume: bool | str | None = None
) -> dict[str, float]:
    """Train, report the test set before and after the temperature, and save the calibrated model.

    In `output_dir`: `calibrated/`, the model for a plain pipeline; `results.json`, the numbers; `report/`, the
    calibration report with its figures; for a loss with gammas, `gammas.png`.

    Returns:
        The test metrics, keys `test_...`.
    """
    # As in the papers, the validation set chooses the checkpoint as well; what is reported is the test set.
    warnings.filterwarnings("ignore", message="the evaluation split is also the calibration split")
    trainer.train(resume_from_checkpoint=resume)
    trainer.compute_metrics = kept = _KeepPredictions()
    trainer.preprocess_logits_for_metrics = lambda outputs, labels: logits_of(outputs)
    trainer.args.prediction_loss_only = False
    metrics = trainer.evaluate(test_dataset, metric_key_prefix="test")
    folder = Path(str(trainer.args.output_dir))
    if trainer.temperature is not None:
        trainer.save_calibrated_model(folder / "calibrated")
    if trainer.is_world_process_zero():
        _write_results(trainer, metrics, folder)
        report = _report(trainer, kept)
        write_to(folder / "report", report)
        print(results_table(report, trainer.temperature))
        print(
            "95% bootstrap intervals over the test rows; those of binned errors sit high, see report/report.md"
        )
        print(f"written to {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return metrics


class _KeepPredictions:
    """A `compute_metrics` for which the Trainer gathers all logits and labels."""

    logits: NDArray[Any]
    labels: NDArray[Any]

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        self.logits, self.labels = map(np.asarray, (prediction.predictions, prediction.label_ids))
        return {}


def _report(trainer: CalibrationTrainer, kept: _KeepPredictions) -> CalibrationReport:
    logits = kept.logits.astype(np.float64)
    temperature, model = trainer.temperature, cast(Any, trainer.model)
    return calibration_report(
        softmax(logits, axis=1),
        kept.labels,
        calibrated=None if temperature is None else softmax(logits / temperature, axis=1),
        n_bins=trainer.args.n_bins,
        class_names=[str(model.config.id2label[i]) for i in range(logits.shape[1])],
        name=trainer.calibration_loss.name,
    )


def results_table(report: CalibrationReport, temperature: float | None) -> str:
    """The trainer's metrics with their 95% intervals, before and after the temperature, as plain text.

    >>> probs = np.tile([[0.9, 0.1], [0.2, 0.8]], (50, 1))
    >>> report = calibration_report(probs, np.tile([0, 0], 50), n_resamples=100)
    >>> print(results_table(report, None).splitlines()[1])
    Accuracy                       0.5000 [0.4100, 0.6000]
    """
    after = "" if temperature is None else f"after T = {temperature:.3f}"
    lines = [f"{'':<31}{'before':<26}{after}".rstrip()]
    states = [state.metrics for state in (report.before, report.after) if state is not None]
    for name, title in METRICS.items():
        found = [state[name] for state in states]
        cells = [with_interval(metric.value, metric.low, metric.high) for metric in found]
        lines.append(f"{title:<31}" + "".join(f"{cell:<26}" for cell in cells).rstrip())
    return "\n".join(lines)


def _write_results(trainer: CalibrationTrainer, metrics: Mapping[str, float], folder: Path) -> None:
    from hf_calib.plots import gamma_dynamics, save_figure

    args = trainer.args
    results = {
        "loss": trainer.calibration_loss.name,
        "hyperparameters": trainer.calibration_loss.hyperparameters,
        "seed": args.seed,
        "metrics": {key: value if math.isfinite(value) else None for key, value in metrics.items()},
    }
    with whole_file(folder / "results.json") as unfinished:
        unfinished.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if any("gamma_00" in entry for entry in trainer.state.log_history):
        save_figure(gamma_dynamics(trainer.state.log_history), folder / "gammas.png")
