"""Code to reproduce the five papers: networks, toy problems, gradients, training dynamics, protocols, figures.

The recipes are next to this package, so `python recipes/RECIPE.py` puts it on the path. The library
never imports it.
"""
