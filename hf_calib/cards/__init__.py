"""Model cards: what a model's folder says of its calibration, as README.md with metadata for the Hub."""

from hf_calib.cards.card import write_card

__all__ = ["write_card"]
