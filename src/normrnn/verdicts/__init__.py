"""Statistics of comparisons on plain rows: no torch, no run directories."""
