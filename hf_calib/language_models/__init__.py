"""Language models as calibrated classifiers: option tokens, prompts, scores of longer options,
and shifted losses.
"""

from hf_calib.language_models.label_tokens import (
    label_token_classifier,
    to_language_model,
)
from hf_calib.language_models.options import option_log_likelihoods
from hf_calib.language_models.shifted import for_causal_lm
from hf_calib.models.prompts import PromptTemplate

__all__ = [
    "PromptTemplate",
    "for_causal_lm",
    "label_token_classifier",
    "option_log_likelihoods",
    "to_language_model",
]
