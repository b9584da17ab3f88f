"""Datasets for the recipes: loading, choice of columns, the three-way split, images, and the built-in default.

The recipes go through four steps, each a plain function on a `datasets.DatasetDict`:

    dataset = load_splits("ag_news")                        # from the Hub, files or an image folder
    dataset = choose_columns(dataset, text_column="text")   # -> columns "text" and "label" (a ClassLabel)
    dataset = split_calibration(dataset, size=0.1, seed=0)  # -> train, calibration, test; see also draw_test
    dataset = limit_samples(dataset, max_train_samples=1000)

Tagged sentences have `load_tagged`, which goes through the same steps, `choose_tokens` and `tokenize_words`.
With `choose_columns(..., multi_label=True)` each row has a list of labels, which `multi_hot` turns into floats for a
trainer.

`docstring_dataset()` needs no network and returns the same form in one step.
"""

from __future__ import annotations

from hf_calib.data.arguments import DataArguments, label_maps, load_data, load_ood
from hf_calib.data.columns import choose_columns, choose_inputs
from hf_calib.data.docstrings import docstring_dataset
from hf_calib.data.images import (
    ImageTransform,
    check_images,
    check_reads_rgb,
    collate_images,
    load_image_processor,
)
from hf_calib.data.labels import multi_hot
from hf_calib.data.sources import load_splits
from hf_calib.data.splits import draw_test, limit_samples, split_calibration, warn_shared_texts
from hf_calib.data.tokens import choose_tokens, load_tagged, tag_maps, tokenize_words

__all__ = [
    "DataArguments",
    "ImageTransform",
    "check_images",
    "check_reads_rgb",
    "choose_columns",
    "choose_inputs",
    "choose_tokens",
    "collate_images",
    "docstring_dataset",
    "draw_test",
    "label_maps",
    "limit_samples",
    "load_data",
    "load_image_processor",
    "load_ood",
    "load_splits",
    "load_tagged",
    "multi_hot",
    "split_calibration",
    "tag_maps",
    "tokenize_words",
    "warn_shared_texts",
]
