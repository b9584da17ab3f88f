"""The base of the configurations of the papers' networks."""

from __future__ import annotations

from transformers import PreTrainedConfig


class PaperNetworkConfig(PreTrainedConfig):
    """A configuration whose config.json names the module that registers its network with transformers."""

    needs_import: str = "hf_calib.papers"
