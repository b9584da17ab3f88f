"""What a command runs a model over, texts, tokens or images: chosen here, by the model's architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_calib._errors import InputError, InputValueError, expected

# A model needs torch and transformers: they are imported where one is named.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hf_calib.predictions.images import LabelledImages
    from hf_calib.predictions.texts import LabelledTexts
    from hf_calib.predictions.tokens import LabelledTokens

    Labelled = LabelledTexts | LabelledTokens | LabelledImages


def labelled_rows(
    source: str,
    text_column: str = "text",
    image_column: str = "image",
    label_column: str = "label",
    class_names: Sequence[str] | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
    *,
    trust_remote_code: bool = False,
) -> Callable[[str, str | None, str], Labelled]:
    """The rows of data that a model reads, and how: a function of the data's name, its configuration and its split.

    Args:
        source: a classifier of sequences, tokens or images, on the Hub or in a folder.
        text_column: of texts, or of lists of tokens.
        image_column: of images.
        label_column: of labels, or of lists of tags.
        class_names: the data's names of the model's classes, in the model's order, if they differ.
        max_length: tokens per text.
        batch_size: rows at a time.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        ValueError: if max_length is given for images.
    """
    config = config_of(source, trust_remote_code)
    if config is None or not _reads_images(config):
        from hf_calib.predictions.texts import LabelledTexts
        from hf_calib.predictions.tokens import LabelledTokens

        kind: Any = LabelledTokens if config is not None and tags_tokens(config) else LabelledTexts
        return partial(
            kind,
            text_column=text_column,
            label_column=label_column,
            class_names=class_names,
            max_length=max_length,
            batch_size=batch_size,
        )
    from hf_calib.predictions.images import LabelledImages

    if max_length is not None:
        way_out = "leave it out: the model's image processor says how large images are"
        raise InputValueError(expected("max_length", "be given for texts only", max_length, way_out))
    return partial(
        LabelledImages,
        image_column=image_column,
        label_column=label_column,
        class_names=class_names,
        batch_size=batch_size,
    )


def config_of(source: str, trust_remote_code: bool) -> PreTrainedConfig | None:
    """A model's configuration; None for one that cannot be read, which is left to the loading."""
    from transformers import AutoConfig

    import hf_calib.papers.networks  # noqa: F401  # the papers' networks, for the Auto classes
    from hf_calib.predictions.loading import refusals

    try:
        with refusals("the model", "be loadable", source, "name a fine-tuned classifier"):
            return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except InputError:
        return None


def tags_tokens(config: PreTrainedConfig) -> bool:
    """Whether a configuration is that of a token classifier."""
    return any(name.endswith("ForTokenClassification") for name in config.architectures or ())


def _reads_images(config: PreTrainedConfig) -> bool:
    """Whether a configuration is that of an image classifier."""
    from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

    if "AutoModelForImageClassification" in (getattr(config, "auto_map", None) or {}):
        return True
    if type(config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return False
    made: Any = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[type(config)]
    names = {model.__name__ for model in (made if isinstance(made, tuple) else (made,))}
    return not config.architectures or not names.isdisjoint(config.architectures)
