"""Networks of the paper's experiments. They take flat arguments, never a config."""
