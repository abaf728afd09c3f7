"""One module per command, imported when it is called; no torch at the top.

A module has a function `command`, whose arguments are the options; or, where the options depend on
the first argument, `run(arguments) -> exit code`.
"""
