"""Run directories: their files, written whole and read in whatever state they are."""
