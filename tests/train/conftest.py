"""Fixtures of small runs."""

from tests.tiny_runs import text_dir, tiny, tiny_frame
from tests.tiny_speech import speech_dir, tiny_baseline, tiny_speech

__all__ = ["speech_dir", "text_dir", "tiny", "tiny_baseline", "tiny_frame", "tiny_speech"]
