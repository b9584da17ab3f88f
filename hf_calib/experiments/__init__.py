"""Experiments: YAML arguments with command-line overrides, and a run from data to report."""

from hf_calib.experiments.config_file import parse_arguments, print_input_errors
from hf_calib.experiments.reported_training import train_and_report

__all__ = ["parse_arguments", "print_input_errors", "train_and_report"]
