"""Experiments: comparisons of recipes, arrays and training functions, and searches."""
