"""What several commands are tested on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from hf_calib.predictions import save_predictions
from hf_calib.predictions.predictions import Predictions
from tests.helpers.commands import NAMES
from tests.helpers.reports import quick_reports  # noqa: F401
from tests.helpers.tiny import sequences, text_of, tiny_bert, tokenizer


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four named classes, over-confident by TRUE_TEMPERATURE, labelled texts, and its predictions."""
    folder = tmp_path_factory.mktemp("work")
    names = dict(enumerate(NAMES))
    model = tiny_bert(id2label=names, label2id={name: i for i, name in names.items()})
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    for name, n, seed in (("data", 240, 1), ("test", 80, 2)):
        rows = sequences(model, n, seed=seed)
        texts = [text_of(ids) for ids in rows["input_ids"]]
        labels = np.array(rows["label"])
        table = pandas.DataFrame(
            {"text": texts, "label": [NAMES[label] for label in labels]}
        )
        table.to_csv(folder / f"{name}.csv", index=False)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(rows["input_ids"])).logits.numpy()
        save_predictions(
            Predictions(labels, logits=logits, class_names=NAMES),
            folder / f"{name}.npz",
        )
    return folder
