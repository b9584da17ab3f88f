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

from hf_calib._errors import check
from hf_calib._files import whole_file, whole_folder
from hf_calib._text import counted
from hf_calib.cards.facts import REPORT_FOLDER
from hf_calib.export.folder import check_is_no_original, check_overwrites_no_original
from hf_calib.metrics.checks import check_type
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

    It writes to `output_dir`: `calibrated/`, the model for a plain pipeline, or `uncalibrated/`
    without a calibrator; `report/`, the calibration report with figures, also in
    `calibrated/calibration/` for the model card; `gammas.png` for a loss with gammas;
    `predictions.safetensors`, the logits and labels of the calibration and test rows; and last
    `results.json`, the metrics. Those of an earlier run are replaced or removed.

    Args:
        trainer: a trainer with its datasets, none of which should be the test set.
        test_dataset: the rows of the report.
        elsewhere: name -> OOD inputs, whose labels are not read. The report shows how well the
            model's uncertainty separates them from the test set, before and after calibration. Not
            for multi-label models.
        resume: as in `Trainer.train`, a checkpoint, or True for the newest; the default is
            `args.resume_from_checkpoint`.

    Returns:
        The test metrics with keys `test_...`, on every process, after everything is written.

    Raises:
        TypeError: if the model cannot be saved at the end; raised before the run.
        ValueError: if predictions of elsewhere would have no logits, the model was loaded from a
            folder that the run replaces, or resume and `args.resume_from_checkpoint` are both
            given; raised before the run.
    """
    folder = Path(str(trainer.args.output_dir))
    _check_run(trainer, folder, elsewhere=elsewhere, resume=resume)
    first_step = _FirstStep()
    trainer.add_callback(first_step)
    with warnings.catch_warnings():
        # As in the papers, the validation set also selects the checkpoint;
        # the report is on the test set.
        message = "The evaluation split is also the calibration split"
        warnings.filterwarnings("ignore", message=message)
        checkpoint = resume or trainer.args.resume_from_checkpoint
        trained = trainer.train(resume_from_checkpoint=checkpoint)
    # The caller's trainer has no callback of ours afterwards.
    trainer.remove_callback(first_step)
    # The model is saved before it is measured, so that an error there loses no
    # training.
    written = [_save_model(trainer, folder)]
    names = getattr(trainer.model_config, "id2label", None) or {}
    # This comes before the evaluation of the test rows, which replaces the last one.
    calibration = _calibration_rows(trainer, names)
    metrics = trainer.evaluate(test_dataset, metric_key_prefix="test", keep_logits=True)
    outside = {}
    for name, inputs in (elsewhere or {}).items():
        outside[name] = trainer.predict(inputs).predictions
    assert trainer.last_evaluation is not None
    if trainer.is_world_process_zero():
        report = _write_report(trainer, outside, folder)
        if report is not None:
            written.append(REPORT)
        history = trainer.state.log_history
        if any("gamma_00" in entry for entry in history):
            save_figure(gamma_dynamics(history), folder / GAMMAS)
            written.append(GAMMAS)
        test = trainer.last_evaluation.predictions(names)
        TrainingPredictions(test, calibration).save(folder / PREDICTIONS)
        results = _results(trainer, metrics, report)
        results["training"] = {
            "seconds": trained.metrics["train_runtime"],
            # The seconds are those since the checkpoint, and so are the steps.
            "steps": trainer.state.global_step - first_step.step,
            "resumed": first_step.step > 0,
        }
        text = json.dumps(results, indent=2, allow_nan=False)
        with whole_file(folder / RESULTS) as unfinished:
            unfinished.write_text(text + "\n", encoding="utf-8")
        written += [PREDICTIONS, RESULTS]
        print(f"written to {folder}: {', '.join(sorted(written))}")
    # If a process ended earlier with an error, it would end the first process, too.
    trainer.accelerator.wait_for_everyone()
    return metrics


def _check_run(
    trainer: CalibrationTrainer,
    folder: Path,
    *,
    elsewhere: Mapping[str, Any] | None,
    resume: bool | str | None,
) -> None:
    """Raise for what would fail after the training."""
    model = trainer.unwrapped_model
    can_be_saved = hasattr(model, "save_pretrained")
    requirement = "the model to have save_pretrained"
    way_out = (
        "derive it from PreTrainedModel, or call trainer.train() and trainer.evaluate()"
    )
    check_type(can_be_saved, requirement, type(model).__name__, way_out)
    has_logits = not (trainer.args.prediction_loss_only and elsewhere)
    requirement = "prediction_loss_only to be off with elsewhere, whose logits are read"
    check(has_logits, requirement, True, "leave it out")
    named = trainer.args.resume_from_checkpoint
    requirement = "either resume or args.resume_from_checkpoint to be given"
    way_out = "leave out resume to go on from the one that is named"
    check(not (resume and named), requirement, f"{resume!r} and {named!r}", way_out)
    # Both folders are written or removed at the end, which is too late for an error.
    check_overwrites_no_original(folder / CALIBRATED, trainer.originals)
    check_is_no_original(folder / UNCALIBRATED, trainer.originals)


def _save_model(trainer: CalibrationTrainer, folder: Path) -> str:
    """Save the model, calibrated if it can be, without what an earlier run wrote;
    return the folder's name.
    """
    is_calibrated = trainer.calibration_map is not None
    name = CALIBRATED if is_calibrated else UNCALIBRATED
    if trainer.is_world_process_zero():
        _remove_earlier(folder, name)
    if is_calibrated:
        trainer.save_calibrated_model(folder / name)
    else:
        # It must not push.
        trainer.save_model(str(folder / name), _internal_call=True)
    return name


def _results(
    trainer: CalibrationTrainer,
    metrics: Mapping[str, float],
    report: CalibrationReport | None,
) -> dict[str, Any]:
    """What results.json says of the run and of the test rows; it has no number for NaN."""
    scaler = trainer.calibration_map
    loss = trainer.calibration_loss
    found: dict[str, Any] = {
        "loss": loss.name,
        "hyperparameters": loss.hyperparameters,
        "calibration_map": None if scaler is None else title_of(scaler),
        "seed": trainer.args.seed,
        "metrics": {
            key: value if math.isfinite(value) else None
            for key, value in metrics.items()
        },
        "out_of_distribution": [],
    }
    if report is not None:
        sections = report.out_of_distribution
        found["out_of_distribution"] = [each.to_dict() for each in sections]
        if report.entities is not None:
            found["entities"] = report.entities.to_dict()
    return found


def _remove_earlier(folder: Path, model_folder: str) -> None:
    """Remove what an earlier run wrote, so that nothing of two runs is taken for one's;
    its model is replaced.
    """
    other_model = CALIBRATED if model_folder == UNCALIBRATED else UNCALIBRATED
    for name in (RESULTS, REPORT, GAMMAS, PREDICTIONS, other_model):
        path = folder / name
        # Of a link only the link is removed, and not what it leads to.
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
    found = trainer.last_evaluation
    is_of_split = found is not None and found.dataset is trainer.calibration_split
    # The last evaluation may be of other rows, or have kept no logits.
    if found is None or not is_of_split or not found.rows:
        found = trainer.held_out_pass(keep_logits=True)
    return found.predictions(names)


def _write_report(
    trainer: CalibrationTrainer, outside: Mapping[str, Any], folder: Path
) -> CalibrationReport | None:
    """Write and print the report; None, with a warning, where the rows have none."""
    scaler = trainer.calibration_map
    calibrated = folder / CALIBRATED
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
    """Return a table of the trainer's metrics with 95% intervals, before and after calibration;
    labels are averaged.
    """
    titles = TITLES if report.multi_label else LOGGED_METRICS
    states = [report.before.metrics]
    header = ["", "before"]
    if report.after is not None:
        states.append(report.after.metrics)
        header.append(f"after {calibration_map}")
    rows = [header]
    for name, title in titles.items():
        found = [state[name] for state in states]
        rows.append([title, *(cell(each) for each in found)])
    if report.entities is not None:
        n_sentences = counted(report.entities.n_sentences, "sentence")
        rows.append([f"True entities: {report.entities.n_true:,} in {n_sentences}:"])
        short = ("F1", "Precision", "Recall", "ECE, product", "ECE, minimum")
        for name, (_, *cells) in zip(short, report.entities.table()[1], strict=True):
            rows.append([name, *cells])
    for section in report.out_of_distribution:
        n_rows = counted(section.n_examples, "row")
        rows.append([f"OOD detection, {section.name}, {n_rows}:"])
        rows += section.table()[1]
    width = max(map(len, titles.values())) + 1
    lines = []
    for name, *cells in rows:
        line = f"{name:<{width}}" + "".join(f"{text:<26}" for text in cells)
        lines.append(line.rstrip())
    return "\n".join(lines)
