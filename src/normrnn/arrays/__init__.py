"""Any sequences of numbers with a target per sequence or per step."""
