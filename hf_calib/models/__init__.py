"""Networks of the papers as transformers models; importing this registers them with the Auto classes."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForSequenceClassification

from hf_calib.models.global_pooling_cnn import (
    GlobalPoolingCNNConfig,
    GlobalPoolingCNNForSequenceClassification,
)
from hf_calib.models.words import load_glove, train_word_tokenizer

__all__ = [
    "GlobalPoolingCNNConfig",
    "GlobalPoolingCNNForSequenceClassification",
    "load_glove",
    "train_word_tokenizer",
]

AutoConfig.register(GlobalPoolingCNNConfig.model_type, GlobalPoolingCNNConfig, exist_ok=True)
AutoModelForSequenceClassification.register(
    GlobalPoolingCNNConfig, GlobalPoolingCNNForSequenceClassification, exist_ok=True
)
