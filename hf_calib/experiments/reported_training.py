"""A run from training to report, with its printed results and its files."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from hf_calib._errors import InputTypeError, check, expected
from hf_calib._files import whole_file, whole_folder
from hf_calib._text import counted
from hf_calib.cards.facts import REPORT_FOLDER
from hf_calib.export.folder import check_is_no_original, check_overwrites_no_original
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.plots import gamma_dynamics, save_figure
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.training import PREDICTIONS, TrainingPredictions
from hf_calib.report import CalibrationReport
from hf_calib.report.document import cell
from hf_calib.report.multi_label import TITLES
from hf_calib.scaling.saved_map import title_of
from hf_calib.trainer.calibration_map import in_words
from hf_calib.trainer.results import report_of, write_results

if TYPE_CHECKING:
    from hf_calib.trainer.trainer import CalibrationTrainer

CALIBRATED = "calibrated"
UNCALIBRATED = "uncalibrated"
REPORT = "report"
GAMMAS = "gammas.png"
RESULTS = "results.json"


def train_and_report(
    trainer: CalibrationTrainer,
    test_dataset: Any,
    *,
    elsewhere: Mapping[str, Any] | None = None,
    resume: bool | str | None = None,
) -> dict[str, float]:
    """Train, report the test set before and after calibration, and save the calibrated model.

    It writes to `output_dir`: `calibrated/`, the model for a plain pipeline, or `uncalibrated/` without a calibrator;
    `report/`, the calibration report with figures, also in `calibrated/calibration/` for the model card; `gammas.png`
    for a loss with gammas; `predictions.safetensors`, the logits and labels of the calibration and test rows; and last
    `results.json`, the metrics. Those of an earlier run are replaced or removed.

    Args:
        trainer: a trainer with its datasets, none of which should be the test set.
        test_dataset: the rows of the report.
        elsewhere: name -> OOD inputs, whose labels are not read. The report shows how well the model's uncertainty
            separates them from the test set, before and after calibration. Not for multi-label models.
        resume: as in `Trainer.train`, a checkpoint, or True for the newest; the default is
            `args.resume_from_checkpoint`.

    Returns:
        The test metrics with keys `test_...`, on every process, after everything is written.

    Raises:
        TypeError: if the model cannot be saved at the end; raised before the run.
        ValueError: if predictions of elsewhere would have no logits, the model was loaded from a folder that the
            run replaces, or resume and `args.resume_from_checkpoint` are both given; raised before the run.
    """
    model = trainer.unwrapped_model
    if not hasattr(model, "save_pretrained"):
        way_out = "derive it from PreTrainedModel, or call trainer.train() and trainer.evaluate()"
        raise InputTypeError(
            expected("the model", "have save_pretrained", type(model).__name__, way_out)
        )
    has_logits = not (trainer.args.prediction_loss_only and elsewhere)
    check(
        has_logits,
        "prediction_loss_only to be off with elsewhere, whose logits are read",
        True,
        "leave it out",
    )
    named = trainer.args.resume_from_checkpoint
    check(
        not (resume and named),
        "either resume or args.resume_from_checkpoint to be given",
        f"{resume!r} and {named!r}",
        "leave out resume to go on from the one that is named",
    )
    folder = Path(str(trainer.args.output_dir))
    # Both folders are written or removed at the end, which is too late for an error.
    check_overwrites_no_original(folder / CALIBRATED, trainer.originals)
    check_is_no_original(folder / UNCALIBRATED, trainer.originals)
    first_step = _FirstStep()
    trainer.add_callback(first_step)
    with warnings.catch_warnings():
        # As in the papers, the validation set also selects the checkpoint; the report is on the test set.
        warnings.filterwarnings(
            "ignore", message="The evaluation split is also the calibration split"
        )
        trained = trainer.train(
            resume_from_checkpoint=resume or trainer.args.resume_from_checkpoint
        )
    trainer.remove_callback(first_step)
    model_folder = UNCALIBRATED if trainer.calibration_map is None else CALIBRATED
    if trainer.is_world_process_zero():
        _remove_earlier(folder, model_folder)
    if trainer.calibration_map is None:
        # It must not push.
        trainer.save_model(str(folder / UNCALIBRATED), _internal_call=True)
    else:
        trainer.save_calibrated_model(folder / CALIBRATED)
    names = getattr(trainer.model_config, "id2label", None) or {}
    calibration = _calibration_rows(trainer, names)
    metrics = trainer.evaluate(test_dataset, metric_key_prefix="test", keep_logits=True)
    outside = {
        name: trainer.predict(inputs).predictions
        for name, inputs in (elsewhere or {}).items()
    }
    assert trainer.last_evaluation is not None
    if trainer.is_world_process_zero():
        report = _write_report(trainer, outside, folder)
        written = [model_folder, PREDICTIONS, RESULTS]
        if report is not None:
            written.append(REPORT)
        if any("gamma_00" in entry for entry in trainer.state.log_history):
            save_figure(gamma_dynamics(trainer.state.log_history), folder / GAMMAS)
            written.append(GAMMAS)
        test = trainer.last_evaluation.predictions(names)
        TrainingPredictions(test, calibration).save(folder / PREDICTIONS)
        entities = None if report is None else report.entities
        results = {
            "loss": trainer.calibration_loss.name,
            "hyperparameters": trainer.calibration_loss.hyperparameters,
            "calibration_map": None
            if trainer.calibration_map is None
            else title_of(trainer.calibration_map),
            "seed": trainer.args.seed,
            "metrics": {
                key: value if math.isfinite(value) else None
                for key, value in metrics.items()
            },
            "training": {
                "seconds": trained.metrics["train_runtime"],
                "steps": trainer.state.global_step - first_step.step,
                "resumed": first_step.step > 0,
            },
            "out_of_distribution": [
                each.to_dict() for each in report.out_of_distribution
            ]
            if report
            else [],
            **({} if entities is None else {"entities": entities.to_dict()}),
        }
        with whole_file(folder / RESULTS) as unfinished:
            unfinished.write_text(
                json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8"
            )
        print(f"written to {folder}: {', '.join(sorted(written))}")
    # If a process ended earlier with an error, it would end the first process, too.
    trainer.accelerator.wait_for_everyone()
    return metrics


def _remove_earlier(folder: Path, model_folder: str) -> None:
    """Remove what an earlier run wrote, so that nothing of two runs is taken for one's; its model is replaced."""
    other_model = CALIBRATED if model_folder == UNCALIBRATED else UNCALIBRATED
    for name in (RESULTS, REPORT, GAMMAS, PREDICTIONS, other_model):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class _FirstStep(TrainerCallback):
    """Callback that records the first step of a run, which is after those of its checkpoint."""

    step = 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        self.step = state.global_step


def _calibration_rows(
    trainer: CalibrationTrainer, names: Mapping[int, str]
) -> Predictions | None:
    """Logits and labels of the calibration split; all processes call it."""
    if trainer.calibration_split is None:
        return None
    last = trainer.last_evaluation
    is_there = (
        last is not None and last.rows and last.dataset is trainer.calibration_split
    )
    found = (
        last
        if is_there and last is not None
        else trainer.held_out_pass(keep_logits=True)
    )
    return found.predictions(names)


def _write_report(
    trainer: CalibrationTrainer, outside: Mapping[str, Any], folder: Path
) -> CalibrationReport | None:
    scaler, calibrated = trainer.calibration_map, folder / CALIBRATED
    if scaler is None:
        report = report_of(trainer.results, outside)
    else:
        report = write_results(trainer.results, calibrated, outside)
    if report is None:
        warnings.warn(
            "Some of the model's logits are NaN or infinite on the test set, or several labels per row are soft. There "
            "is no report on them; results.json has the numbers. Train with a smaller learning rate, or in higher "
            "precision.",
            stacklevel=3,
        )
        return None
    if scaler is None:
        report.save(folder / REPORT)
    else:
        with whole_folder(folder / REPORT) as copied:
            shutil.copytree(calibrated / REPORT_FOLDER, copied, dirs_exist_ok=True)
    print(results_table(report, None if scaler is None else in_words(scaler)))
    print(
        "95% intervals over the test rows; how each is made, and why some have none: report/report.md"
    )
    return report


def results_table(report: CalibrationReport, calibration_map: str | None) -> str:
    """Return a table of the trainer's metrics with 95% intervals, before and after calibration; labels are averaged."""
    titles = TITLES if report.multi_label else LOGGED_METRICS
    states = [
        state.metrics for state in (report.before, report.after) if state is not None
    ]
    rows = [
        ["", "before"]
        if calibration_map is None
        else ["", "before", f"after {calibration_map}"]
    ]
    for name, title in titles.items():
        found = [state[name] for state in states]
        rows.append([title, *(cell(each) for each in found)])
    if report.entities is not None:
        n_sentences = counted(report.entities.n_sentences, "sentence")
        rows.append([f"True entities: {report.entities.n_true:,} in {n_sentences}:"])
        short = ("F1", "Precision", "Recall", "ECE, product", "ECE, minimum")
        table = zip(short, report.entities.table()[1], strict=True)
        rows += [[name, *cells] for name, (_, *cells) in table]
    for section in report.out_of_distribution:
        rows.append(
            [f"OOD detection, {section.name}, {counted(section.n_examples, 'row')}:"]
        )
        rows += section.table()[1]
    width = max(map(len, titles.values())) + 1
    lines = (
        f"{name:<{width}}" + "".join(f"{cell:<26}" for cell in cells)
        for name, *cells in rows
    )
    return "\n".join(line.rstrip() for line in lines)
