"""Tools of this repository, not of the package: `results/` in, docs/results and pictures out."""
