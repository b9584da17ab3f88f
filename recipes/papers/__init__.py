"""What reproduces the five papers: networks, toys, studies of gradients, dynamics of a training, protocols, figures.

Recipes import it from beside them: `python recipes/RECIPE.py` puts their folder on the path. The library never does.
"""
