"""Networks of the papers as transformers models. A saved model contains its code, as the Hub expects of custom models.

`from_pretrained(folder, trust_remote_code=True)` loads it where neither this package nor hf_calib
is installed. Therefore a module imports only torch, transformers and, relatively, its neighbours,
which are copied with it. If this package is imported, the networks are registered and the copies
are not used.
"""

from __future__ import annotations

import json
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    ViTForImageClassification,
)
from transformers import PreTrainedConfig as Config

from hf_calib._errors import InputValueError, check, did_you_mean, expected

from .densenet import DenseNetForImageClassification
from .global_pooling_cnn import GlobalPoolingCNNForSequenceClassification
from .resnet import CifarResNetForImageClassification, WideResNetForImageClassification
from .vgg import VGGForImageClassification

_IMAGE = (
    CifarResNetForImageClassification,
    WideResNetForImageClassification,
    DenseNetForImageClassification,
    VGGForImageClassification,
)
#: The image networks, which are trained from scratch: model type -> class. The ViT is transformers' own.
IMAGE_NETWORKS = {
    model.config_class.model_type: model
    for model in (*_IMAGE, ViTForImageClassification)
}
for _model in (*_IMAGE, GlobalPoolingCNNForSequenceClassification):
    _auto = (
        AutoModelForImageClassification
        if _model in _IMAGE
        else AutoModelForSequenceClassification
    )
    AutoConfig.register(
        _model.config_class.model_type, _model.config_class, exist_ok=True
    )
    _auto.register(_model.config_class, _model, exist_ok=True)
    _model.config_class.register_for_auto_class()
    _model.register_for_auto_class(_auto.__name__)


def network_config(config_class: type[Config], settings: str, **labels: Any) -> Config:
    """The configuration of a network; a misspelt setting, which transformers would keep unread, is refused.

    Args:
        config_class: of one of `IMAGE_NETWORKS`.
        settings: a JSON object of the class's own settings.
        **labels: num_labels, id2label and so on.

    >>> network_config(IMAGE_NETWORKS["cifar_resnet"].config_class, '{"depth": 110}', num_labels=10).depth
    110
    """
    way_out = """write for example '{"depth": 18}'"""
    try:
        given = dict(**json.loads(settings))
    except (ValueError, TypeError) as error:
        raise InputValueError(
            expected("model_kwargs", "be a JSON object", repr(settings), way_out)
        ) from error
    known = [
        name
        for name in vars(config_class)["__annotations__"]
        if not name.startswith("_")
    ]
    requirement = f"model_kwargs to name settings of {config_class.model_type} ({', '.join(known)})"
    for name in given:
        check(name in known, requirement, repr(name), did_you_mean(name, known))
    return config_class(**given, **labels)
