"""The settings of a network from scratch, as a recipe is given them."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedConfig

from hf_calib._errors import InputValueError, did_you_mean, expected


def network_config(config_class: type[PreTrainedConfig], settings: str, **labels: Any) -> PreTrainedConfig:
    """The configuration of a network; a misspelt setting, which transformers would keep unread, is refused.

    Args:
        config_class: of one of `IMAGE_NETWORKS`.
        settings: a JSON object of the class's own settings.
        **labels: num_labels, id2label and so on.

    Raises:
        ValueError: if the settings are none of the class's, or no JSON object.

    >>> from hf_calib.papers.networks import CifarResNetConfig
    >>> network_config(CifarResNetConfig, '{"depth": 110}', num_labels=10).depth
    110
    """
    way_out = """write for example '{"depth": 18}'"""
    try:
        given = dict(**json.loads(settings))
    except (ValueError, TypeError) as error:
        raise InputValueError(
            expected("model_kwargs", "be a JSON object", repr(settings), way_out)
        ) from error
    known = [name for name in vars(config_class)["__annotations__"] if not name.startswith("_")]
    for name in given:
        if name not in known:
            requirement = f"name settings of {config_class.model_type} ({', '.join(known)})"
            raise InputValueError(
                expected("model_kwargs", requirement, repr(name), did_you_mean(name, known))
            )
    return config_class(**given, **labels)
