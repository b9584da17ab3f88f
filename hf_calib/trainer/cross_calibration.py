"""Calibration where no rows can be spared for it: the map is fitted on out-of-fold logits."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import math
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from sklearn.base import clone
from transformers import set_seed

from hf_calib._errors import InputTypeError, InputValueError, expected, few
from hf_calib._files import check_output, whole_file
from hf_calib.losses import AdaptiveLoss
from hf_calib.metrics.streaming import StreamingCalibration
from hf_calib.trainer import preflight
from hf_calib.trainer.calibration_map import fit_once
from hf_calib.trainer.callbacks import CalibrationMapCallback, own_callback
from hf_calib.trainer.checkpoint import last_complete_checkpoint
from hf_calib.trainer.labels import has_rows, read_labels
from hf_calib.trainer.trainer import CalibrationTrainer

logger = logging.getLogger(__name__)

OUT_OF_FOLD = "out_of_fold.safetensors"
DESCRIPTION = "cross_calibration.json"

# Arguments that a re-run may change: they make no other logits.
_FREE = (
    *("output_dir", "run_name", "project", "report_to", "log", "disable_tqdm", "save_", "push_", "hub_"),
    *("dataloader_num", "dataloader_pin", "dataloader_pers", "dataloader_prefetch", "local_rank", "resume"),
    *("calibration_", "temperature_"),
)


class CrossCalibration(NamedTuple):
    """Result of `cross_calibrate`.

    Args:
        trainer: trained on all rows; evaluations and `save_calibrated_model` have the map.
        scaler: the map, fitted on the out-of-fold logits.
        logits: (N, C) float32, each row's by the training that did not see it, fold after fold. Rows are
            tokens for token classification; ignored labels are left out.
        labels: (N,) int, or (N, C) of 0 and 1 for a multi-label problem.
        metrics: of the out-of-fold rows, `out_of_fold_ece`, `out_of_fold_ece_calibrated` and so on for the
            metrics of an evaluation. The map was fitted on these rows: those after it are a little optimistic.
    """

    trainer: CalibrationTrainer
    scaler: Any
    logits: NDArray[np.float32]
    labels: NDArray[Any]
    metrics: dict[str, float]


def cross_calibrate(
    make_trainer: Callable[[Any, str], CalibrationTrainer],
    dataset: Any,
    n_folds: int = 5,
    *,
    output_dir: str | os.PathLike[str],
    seed: int = 0,
) -> CrossCalibration:
    """Train on all rows, and calibrate on the predictions of K other trainings that each left a fold out.

    For little data, where rows that are held out for calibration are missed in the training. It costs K more
    trainings. With rows to spare, pass `calibration_dataset` to one `CalibrationTrainer` instead.

    The map (`args.calibration_method`, or the trainer's `CalibrationMapCallback`) is fitted on each row's logits
    by the training that did not see it, and given to the last training, on all rows.

    A second call with the same arguments does only what is missing: finished folds are read from `output_dir`,
    and an interrupted training, the last one too, goes on from its newest complete checkpoint, if
    `args.save_strategy` made one (`save_total_limit=1` saves space). With other rows, folds, arguments or
    initial weights it is refused. Another map may be asked for: it is fitted on the logits that are there.

    Args:
        make_trainer: called as make_trainer(train_dataset, output_dir) for each training, K + 2 times in all;
            returns a CalibrationTrainer of a model that it has just made or loaded, for these rows and this
            folder, and without a `calibration_dataset`. Random states are seeded before each call, so the models
            start alike. An `eval_dataset` is evaluated as usual.
        dataset: all training rows, as the trainer takes them: a `datasets.Dataset`, a list, or a torch dataset
            with a length and an index.
        n_folds: K, from 2 to the number of rows. Folds are stratified where each row has one label.
        output_dir: `fold_0`, ... and `final` are the trainings' folders; all processes must see it.
        seed: of the folds and the initial weights.

    Returns:
        CrossCalibration; its `trainer` is trained and calibrated.

    Raises:
        TypeError: if make_trainer returns something else.
        ValueError: for a dataset without rows to index, n_folds out of range, a trainer that does not fit these
            conditions, a model that was trained before, a loss that adapts to held-out predictions while it
            trains (adafocal and its kin), or an output_dir of another cross-calibration; before any training,
            but for a trained model that is found out in a later fold.

    Notes:
        The models of the folds see (K - 1) / K of the rows, and take as many steps as the last one: with fewer they
        would be less confident, and the map would sharpen it too much. What it gained on three datasets over one
        training that holds a fifth of the rows out: docs/results/post_hoc.md, by benchmarks/cross_calibration.py.

        Rows that are copies of each other should be removed first: a copy in another fold has been seen.

    References:
        Platt 1999, "Probabilistic outputs for support vector machines", section 2.2;
        `CalibratedClassifierCV(ensemble=False)` of scikit-learn does the same for its estimators.

    Example::

        def make_trainer(train_dataset, output_dir):
            model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=4)
            args = CalibrationTrainingArguments(output_dir=output_dir, loss="cross_entropy", ...)
            return CalibrationTrainer(model, args, train_dataset=train_dataset, processing_class=tokenizer)

        result = cross_calibrate(make_trainer, rows, n_folds=5, output_dir="out")
        result.trainer.save_calibrated_model("calibrated")
    """
    if not (has_rows(dataset) and len(dataset)):
        got = f"a {type(dataset).__name__}"
        way_out = "read a stream into a datasets.Dataset first, or hold rows out as calibration_dataset"
        raise InputValueError(expected("dataset", "have rows, a length and an index", got, way_out))
    whole = isinstance(n_folds, int) and not isinstance(n_folds, bool)
    if not (whole and 2 <= n_folds <= len(dataset)):
        requirement = f"be a whole number from 2 to the {len(dataset)} rows"
        raise InputValueError(expected("n_folds", requirement, repr(n_folds), "5 is usual"))
    folder = Path(output_dir)
    check_output(folder)

    # The last training's trainer is made twice: first to be checked, before time is spent.
    trainer, scaler = _made(make_trainer, dataset, folder / "final", seed)
    preflight.check_data(trainer)
    trainer.check_goes_with(scaler)
    weights = _digest_of_weights(trainer.model)
    first_model: weakref.ref[Any] = weakref.ref(trainer.model)
    accelerator = trainer.accelerator
    n_steps = _number_of_steps(trainer)
    fold_of = _folds(dataset, trainer.label_key, n_folds, seed)
    _check_folder(folder, _description(trainer, dataset, n_folds, seed, weights), accelerator)

    for fold in range(n_folds):
        path = folder / f"fold_{fold}" / OUT_OF_FOLD
        if path.is_file():
            continue
        logger.info("Fold %d of %d", fold + 1, n_folds)
        del trainer
        _free_memory()
        trainer, _ = _made(make_trainer, _rows(dataset, fold_of != fold), path.parent, seed)
        _check_fresh(trainer.model, first_model(), weights)
        given = trainer.args.push_to_hub, trainer.args.max_steps
        # Only the last model is to be published. With fewer steps than that one, a model would be less confident.
        trainer.args.push_to_hub, trainer.args.max_steps = False, n_steps
        trainer.train(resume_from_checkpoint=_checkpoint(trainer))
        trainer.args.push_to_hub, trainer.args.max_steps = given  # the arguments may be those of all trainers
        trainer.calibration_dataset = _rows(dataset, fold_of == fold)
        logits, labels = trainer.held_out_pass(keep_logits=True).logits_and_labels()
        if trainer.is_world_process_zero():
            with whole_file(path) as unfinished:
                save_file({"logits": logits, "labels": labels}, unfinished)
        accelerator.wait_for_everyone()

    parts = [_predicted(folder / f"fold_{fold}" / OUT_OF_FOLD) for fold in range(n_folds)]
    logits, labels = (np.concatenate([part[name] for part in parts]) for name in ("logits", "labels"))
    fit_once(accelerator, scaler, logits, labels)
    logger.info("All %d rows", len(dataset))
    del trainer
    _free_memory()
    trainer, _ = _made(make_trainer, dataset, folder / "final", seed)
    _check_fresh(trainer.model, first_model(), weights)
    trainer.check_goes_with(scaler)  # fitted, it may have a bias, which some heads cannot keep
    trainer.train(resume_from_checkpoint=_checkpoint(trainer))
    trainer.use_calibration_map(scaler, split="out-of-fold", n_examples=len(labels))
    return CrossCalibration(
        trainer, scaler, logits, labels, _metrics(scaler, logits, labels, trainer.args.n_bins)
    )


# ---- The trainers ----


def _made(
    make_trainer: Callable[[Any, str], Any], rows: Any, folder: Path, seed: int
) -> tuple[CalibrationTrainer, Any]:
    """A trainer for these rows and this folder; the scaler that it would fit is taken out of it, not fitted."""
    set_seed(seed)
    trainer = make_trainer(rows, str(folder))
    if not isinstance(trainer, CalibrationTrainer):
        way_out = "return CalibrationTrainer(model, args, train_dataset=train_dataset)"
        requirement = "return a CalibrationTrainer"
        raise InputTypeError(expected("make_trainer", requirement, type(trainer).__name__, way_out))
    if Path(str(trainer.args.output_dir)) != folder:
        got = trainer.args.output_dir
        way_out = "pass make_trainer's output_dir on to the arguments"
        raise InputValueError(expected("the trainer", f"have output_dir {folder}", got, way_out))
    given: Any = trainer.train_dataset
    if not has_rows(given) or len(given) != len(rows):
        got = f"{len(given)} rows" if has_rows(given) else f"{type(given).__name__}"
        way_out = "pass make_trainer's train_dataset on to the trainer, and no other rows"
        raise InputValueError(expected("the trainer", f"train on the {len(rows)} rows", got, way_out))
    if trainer.calibration_dataset is not None:
        way_out = "leave it out, or train once with it, without cross_calibrate"
        raise InputValueError(expected("the trainer", "have no calibration_dataset", "one", way_out))
    if isinstance(trainer.calibration_loss, AdaptiveLoss):
        got = repr(trainer.calibration_loss.name)
        way_out = "use a loss with fixed gammas, or hold rows out as calibration_dataset and train once"
        requirement = "need no held-out predictions while it trains"
        raise InputValueError(expected("the loss", requirement, got, way_out))
    callback = own_callback(trainer, CalibrationMapCallback)
    if callback is None:
        way_out = "set calibration_method, or train without cross_calibrate"
        raise InputValueError(expected("the trainer", "have a calibration map to fit", "none", way_out))
    trainer.remove_callback(callback)
    return trainer, clone(callback.scaler)


def _number_of_steps(trainer: CalibrationTrainer) -> int:
    """Optimizer steps of the training on all rows."""
    args = trainer.args
    if args.max_steps > 0:
        return args.max_steps
    batches = math.ceil(len(trainer.train_dataset) / (args.train_batch_size * args.world_size))  # type: ignore[arg-type]
    if args.dataloader_drop_last:
        batches = len(trainer.train_dataset) // (args.train_batch_size * args.world_size)  # type: ignore[arg-type]
    steps = max(math.ceil(batches / args.gradient_accumulation_steps), 1)
    return math.ceil(steps * args.num_train_epochs)


def _checkpoint(trainer: CalibrationTrainer) -> str | None:
    """Where an interrupted training goes on."""
    try:
        return last_complete_checkpoint(str(trainer.args.output_dir), trainer.args.world_size)
    except InputValueError:  # there is none
        return None


def _check_fresh(model: Any, first: Any, weights: str) -> None:
    """Raise for a model that may have seen the rows that it is to predict."""
    same = model is first
    if same or _digest_of_weights(model) != weights:
        got = "the same model again" if same else "one with other weights than in the first call"
        way_out = "make or load the model in make_trainer, with no random seed of its own"
        raise InputValueError(expected("make_trainer", "return a fresh model each time", got, way_out))


def _digest_of_weights(model: Any) -> str:
    """Of what is trained: the frozen weights under adapters cannot have learnt anything."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            values = parameter.detach().cpu().contiguous().reshape(-1)
            digest.update(name.encode())
            digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _predicted(path: Path) -> dict[str, Any]:
    """Logits and labels of a fold's rows."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        way_out = "remove it: its fold is predicted again"
        raise InputValueError(expected(str(path), "be as it was written", error, way_out)) from error


def _free_memory() -> None:
    gc.collect()  # trainers and their callbacks refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- Rows, folds, and what a folder belongs to ----


def _rows(dataset: Any, chosen: NDArray[np.bool_]) -> Any:
    indices = np.flatnonzero(chosen).tolist()
    if hasattr(dataset, "select"):
        return dataset.select(indices)
    if isinstance(dataset, list | tuple):
        return [dataset[index] for index in indices]
    return torch.utils.data.Subset(dataset, indices)


def _folds(dataset: Any, label_key: str, n_folds: int, seed: int) -> NDArray[np.int64]:
    """The fold of each row: random, and where each row has one label, with its share of each class."""
    n = len(dataset)
    order = np.random.default_rng(seed).permutation(n)
    labels = read_labels(dataset, label_key)
    if labels is not None and labels.values.dtype.kind in "iu" and np.array_equal(labels.rows, np.arange(n)):
        order = order[np.argsort(labels.values[order], kind="stable")]
    folds = np.empty(n, dtype=np.int64)
    folds[order] = np.arange(n) % n_folds
    return folds


def _description(
    trainer: CalibrationTrainer, dataset: Any, n_folds: int, seed: int, weights: str
) -> dict[str, Any]:
    """Everything the out-of-fold logits depend on but the code of make_trainer, in JSON's types."""
    arguments = {k: v for k, v in trainer.args.to_dict().items() if not k.startswith(_FREE)}
    described = {
        "n_folds": n_folds,
        "seed_of_folds": seed,
        "rows": len(dataset),
        "data": _digest_of_rows(dataset, trainer.label_key),
        "model": type(trainer.model).__name__,
        "weights": weights,
        "processes": trainer.args.world_size,
        "arguments": arguments,
    }
    return json.loads(json.dumps(described, default=str))


def _digest_of_rows(dataset: Any, label_key: str) -> str:
    """Of the labels, and of all else where reading it is cheap and draws no random numbers."""
    digest = hashlib.blake2b(digest_size=16)
    labels = read_labels(dataset, label_key)
    if labels is not None:
        digest.update(repr(labels.values.tolist()).encode())
    if isinstance(dataset, datasets.Dataset):
        for batch in dataset.with_format("arrow").iter(1000):
            digest.update(repr(batch.to_pydict()).encode())
    return digest.hexdigest()


def _check_folder(folder: Path, description: dict[str, Any], accelerator: Any) -> None:
    """Record what is done here; raise if it was something else."""
    path = folder / DESCRIPTION
    if path.is_file():
        recorded = json.loads(path.read_text(encoding="utf-8"))
        ours, theirs = ({**each, **each["arguments"]} for each in (description, recorded))
        other = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
        if other:
            got = f"{folder}, which was made with other {few([k for k in other if k != 'arguments'])}"
            way_out = "name a new folder, or delete this one"
            raise InputValueError(expected("output_dir", "hold this cross-calibration", got, way_out))
    elif accelerator.is_main_process:
        with whole_file(path) as unfinished:
            unfinished.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    accelerator.wait_for_everyone()


def _metrics(scaler: Any, logits: NDArray[np.float32], labels: NDArray[Any], n_bins: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for suffix, rows in (("", logits), ("_calibrated", scaler.transform(logits))):
        state = StreamingCalibration(n_bins=n_bins, multi_label=labels.ndim == 2)
        state.update(torch.from_numpy(rows), torch.from_numpy(labels))
        metrics |= {f"out_of_fold_{name}{suffix}": value for name, value in state.compute().items()}
    return metrics
