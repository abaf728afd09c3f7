"""One module per command, each with `run(arguments) -> exit code`. No torch at the top."""
