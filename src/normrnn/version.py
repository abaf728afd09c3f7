"""The version, for whoever must not import the package's door."""

__version__ = "0.1.0"
