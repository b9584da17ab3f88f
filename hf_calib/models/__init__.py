"""Trained models: their tasks, what reads their inputs, and how they are served."""
