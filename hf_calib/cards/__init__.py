"""Model cards: README.md of a model's folder, with its calibration and metadata for the Hub."""

from hf_calib.cards.card import write_card

__all__ = ["write_card"]
