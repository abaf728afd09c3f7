"""Commands, in modules that are imported when one is called; no torch at the top."""
