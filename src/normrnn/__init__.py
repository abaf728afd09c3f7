"""Normalised recurrent networks in PyTorch (Laurent et al. 2015)."""

__version__ = "0.1.0.dev0"
