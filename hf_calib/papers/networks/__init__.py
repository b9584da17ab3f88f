"""Networks of the papers as transformers models; importing this registers them with the Auto classes."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForSequenceClassification

from hf_calib.papers.networks.cifar_resnet import CifarResNetConfig, CifarResNetForImageClassification
from hf_calib.papers.networks.densenet import DenseNetConfig, DenseNetForImageClassification
from hf_calib.papers.networks.global_pooling_cnn import (
    GlobalPoolingCNNConfig,
    GlobalPoolingCNNForSequenceClassification,
)
from hf_calib.papers.networks.settings import network_config
from hf_calib.papers.networks.vgg import VGGConfig, VGGForImageClassification
from hf_calib.papers.networks.wide_resnet import WideResNetConfig, WideResNetForImageClassification
from hf_calib.papers.networks.words import load_glove, train_word_tokenizer

__all__ = [
    "IMAGE_NETWORKS",
    "CifarResNetConfig",
    "CifarResNetForImageClassification",
    "DenseNetConfig",
    "DenseNetForImageClassification",
    "GlobalPoolingCNNConfig",
    "GlobalPoolingCNNForSequenceClassification",
    "VGGConfig",
    "VGGForImageClassification",
    "WideResNetConfig",
    "WideResNetForImageClassification",
    "load_glove",
    "network_config",
    "train_word_tokenizer",
]

AutoConfig.register(GlobalPoolingCNNConfig.model_type, GlobalPoolingCNNConfig, exist_ok=True)
AutoModelForSequenceClassification.register(
    GlobalPoolingCNNConfig, GlobalPoolingCNNForSequenceClassification, exist_ok=True
)
#: The image networks, which are trained from scratch: model type -> configuration class.
IMAGE_NETWORKS = {
    model.config_class.model_type: model
    for model in (
        CifarResNetForImageClassification,
        WideResNetForImageClassification,
        DenseNetForImageClassification,
        VGGForImageClassification,
    )
}
for _model_type, _model in IMAGE_NETWORKS.items():
    AutoConfig.register(_model_type, _model.config_class, exist_ok=True)
    AutoModelForImageClassification.register(_model.config_class, _model, exist_ok=True)
