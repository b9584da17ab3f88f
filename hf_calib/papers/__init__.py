"""Reproductions of the papers: their networks, toys, gradient studies, training dynamics and test protocols.

Nothing that trains, measures or serves a model needs this. Importing it registers the networks with transformers' Auto
classes, which a program that loads one of them has to do first.
"""

from hf_calib.papers.corruptions import gaussian_noise
from hf_calib.papers.dynamics import Trace, TracedSet, learned_epoch, learned_groups, moving_average
from hf_calib.papers.gradient_factors import (
    ConfidenceRegions,
    confidence_regions,
    gradient_factors,
    reversed_range,
    simplex_grid,
    uncertainty_weights,
)
from hf_calib.papers.intervals import mean_interval
from hf_calib.papers.last_layer_gradients import last_layer_gradient_norms
from hf_calib.papers.networks import (
    IMAGE_NETWORKS,
    CifarResNetConfig,
    CifarResNetForImageClassification,
    DenseNetConfig,
    DenseNetForImageClassification,
    GlobalPoolingCNNConfig,
    GlobalPoolingCNNForSequenceClassification,
    VGGConfig,
    VGGForImageClassification,
    WideResNetConfig,
    WideResNetForImageClassification,
    load_glove,
    network_config,
    train_word_tokenizer,
)
from hf_calib.papers.ten_crops import ten_crops, write_ten_crop_report
from hf_calib.papers.toys import gaussian_posteriors, two_moons_posteriors

__all__ = [
    "IMAGE_NETWORKS",
    "CifarResNetConfig",
    "CifarResNetForImageClassification",
    "ConfidenceRegions",
    "DenseNetConfig",
    "DenseNetForImageClassification",
    "GlobalPoolingCNNConfig",
    "GlobalPoolingCNNForSequenceClassification",
    "Trace",
    "TracedSet",
    "VGGConfig",
    "VGGForImageClassification",
    "WideResNetConfig",
    "WideResNetForImageClassification",
    "confidence_regions",
    "gaussian_noise",
    "gaussian_posteriors",
    "gradient_factors",
    "last_layer_gradient_norms",
    "learned_epoch",
    "learned_groups",
    "load_glove",
    "mean_interval",
    "moving_average",
    "network_config",
    "reversed_range",
    "simplex_grid",
    "ten_crops",
    "train_word_tokenizer",
    "two_moons_posteriors",
    "uncertainty_weights",
    "write_ten_crop_report",
]
