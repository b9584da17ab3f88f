"""The ways of a training through the library: files of `hf_calib` that are entered, and hops
between them.

    python benchmarks/ways.py
    python benchmarks/ways.py --calls  # which function calls which one in another file

A hop is a call from a function of one file to one of another, also if code of PyTorch or
transformers is in between. Each is something that a reader has to look up. One micro-batch is a
forward and a backward pass of AdaFocal; one evaluation reads five batches, without a fitted
calibrator.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback

import hf_calib
from hf_calib import CalibrationTrainer, CalibrationTrainingArguments

ROOT = Path(hf_calib.__file__).parent
BATCH = 8
N_ROWS = 5 * BATCH


class Way(NamedTuple):
    """What a piece of work has called."""

    files: Counter[str]  # How often each file was entered from another one.
    hops: Counter[tuple[str, str]]  # The caller, and the function that it called.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", action="store_true", help="list the hops, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, way in ways(folder).items():
            print(f"{name}: {len(way.files)} files, {way.hops.total()} hops")
            for file, n in way.files.most_common():
                print(f"{n:6} {file}")
            if args.calls:
                for (caller, called), n in way.hops.most_common():
                    print(f"{n:6} {caller} -> {called}")


def ways(folder: str) -> dict[str, Way]:
    """The ways of one micro-batch and of one evaluation, whose imports and tables were made before."""
    trainer = small_trainer(folder)
    trainer.train()
    model: Any = trainer.model
    rows = [trainer.train_dataset[index] for index in range(BATCH)]
    batch = trainer.data_collator(rows)
    n_items = torch.tensor(float(BATCH))

    def micro_batch() -> None:
        model.train()
        trainer.training_step(model, dict(batch), n_items)

    def evaluation() -> None:
        trainer.evaluate()

    found = {}
    for work in (micro_batch, evaluation):
        work()
        found[work.__name__.replace("_", "-")] = followed(work)
    return found


def followed(work: Callable[[], None]) -> Way:
    """Do some work, and count its calls from file to file."""
    way = Way(Counter(), Counter())

    def see(frame: Any, event: str, _: Any) -> None:
        if event != "call" or not is_ours(frame):
            return
        caller = frame.f_back
        while caller is not None and not is_ours(caller):
            caller = caller.f_back
        file = file_of(frame)
        if caller is None:
            way.files[file] += 1
        elif file_of(caller) != file:
            way.files[file] += 1
            way.hops[named(caller), named(frame)] += 1

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return way


def is_ours(frame: Any) -> bool:
    return frame.f_code.co_filename.startswith(str(ROOT))


def file_of(frame: Any) -> str:
    return Path(frame.f_code.co_filename).relative_to(ROOT).as_posix()


def named(frame: Any) -> str:
    return f"{file_of(frame)}:{frame.f_code.co_name}"


def small_trainer(folder: str) -> CalibrationTrainer:
    """A trainer of a tiny network with random tokens."""
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=4,
    )
    args = CalibrationTrainingArguments(
        folder,
        loss="adafocal",
        calibration_method="none",
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        num_train_epochs=2,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
    )
    generator = torch.Generator().manual_seed(0)
    rows = Dataset.from_dict(
        {
            "input_ids": torch.randint(64, (N_ROWS, 8), generator=generator).tolist(),
            "labels": torch.randint(4, (N_ROWS,), generator=generator).tolist(),
        }
    )
    trainer = CalibrationTrainer(
        BertForSequenceClassification(config),
        args,
        train_dataset=rows,
        calibration_dataset=rows.select(range(N_ROWS // 2)),
        eval_dataset=rows.select(range(N_ROWS)),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


if __name__ == "__main__":
    main()
