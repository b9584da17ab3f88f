"""Datasets for the recipes: loading, columns, the three-way split, images, and a built-in dataset.

Each step is a function of a `datasets.DatasetDict`. `docstring_dataset()` returns the same form
without a network:

    # From the Hub, files or an image folder; then the columns "text" and "label", a ClassLabel;
    # then train, calibration and test, see also `draw_test`.
    dataset = load_splits("ag_news")
    dataset = choose_columns(dataset, text_column="text")
    dataset = split_calibration(dataset, size=0.1, seed=0)
    dataset = limit_samples(dataset, max_train_samples=1000)

For tagged sentences use `load_tagged`, `choose_tokens` and `tokenize_words`. With
`choose_columns(..., multi_label=True)` each row has a list of labels, which `multi_hot` converts to
floats for a trainer.
"""

from hf_calib.data.arguments import DataArguments as DataArguments
from hf_calib.data.arguments import label_maps as label_maps
from hf_calib.data.arguments import load_data as load_data
from hf_calib.data.arguments import load_ood as load_ood
from hf_calib.data.columns import choose_columns as choose_columns
from hf_calib.data.columns import choose_inputs as choose_inputs
from hf_calib.data.docstrings import docstring_dataset as docstring_dataset
from hf_calib.data.images import ImageTransform as ImageTransform
from hf_calib.data.images import check_images as check_images
from hf_calib.data.images import check_reads_rgb as check_reads_rgb
from hf_calib.data.images import collate_images as collate_images
from hf_calib.data.images import load_image_processor as load_image_processor
from hf_calib.data.labels import multi_hot as multi_hot
from hf_calib.data.sources import load_splits as load_splits
from hf_calib.data.splits import draw_test as draw_test
from hf_calib.data.splits import limit_samples as limit_samples
from hf_calib.data.splits import split_calibration as split_calibration
from hf_calib.data.tokens import choose_tokens as choose_tokens
from hf_calib.data.tokens import load_tagged as load_tagged
from hf_calib.data.tokens import tag_maps as tag_maps
from hf_calib.data.tokens import tokenize_words as tokenize_words

__all__ = [name for name in dir() if callable(globals()[name]) and name[0] != "_"]
