"""Fixtures of small runs."""

from tests.tiny_runs import text_dir, tiny, tiny_frame

__all__ = ["text_dir", "tiny", "tiny_frame"]
