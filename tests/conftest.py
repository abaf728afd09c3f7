"""Settings for every test: one thread per worker, reproducible draws; fixtures of small runs."""

import os
import signal
from collections.abc import Generator, Iterator, Sequence
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import settings

from normrnn.errors import notice
from normrnn.nn.base import Normalised
from tests.tiny_runs import saved_with_running, text_dir, tiny, tiny_frame
from tests.tiny_speech import speech_dir, tiny_baseline, tiny_speech

__all__ = [
    "saved_with_running",
    "speech_dir",
    "text_dir",
    "tiny",
    "tiny_baseline",
    "tiny_frame",
    "tiny_speech",
]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

settings.register_profile("normrnn", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("normrnn")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Of a `matrix(N)` one case in N, drawn by its name, is among the fast tests."""
    for item in items:
        matrix = item.get_closest_marker("matrix")
        if matrix and crc32(item.name.encode()) % matrix.args[0]:
            item.add_marker("slow")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and workers would fight over the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c() -> None:
    """A shell that starts us in the background has Ctrl-C ignored, also in what tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> None:
    """What is said once is said once in every test."""
    notice.cache_clear()
    Normalised.looks_ahead_warned = False


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """A worker that has to send half a character, as some tests handle them, would end."""
    return _encodable((yield))


def _encodable(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode(errors="backslashreplace").decode()
    if isinstance(data, dict):
        return {_encodable(k): _encodable(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(map(_encodable, data))
    return data
