"""Typed settings, their JSON. No torch: `normrnn --help` reads this."""
