"""Tools of this repository, not of the package: `results/` in, RESULTS.md and pictures out."""
