"""Trained models: their tasks, their tokenizers and image processors, and pipelines."""
