"""A preparation of features and labels that follow from the key alone.

Apart from the tests that use it, without torch: fresh processes import this.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from normrnn.speech.archive import Unusable
from normrnn.speech.prepare.job import Job, Prepared, Utterance

CLASSES, DIM = 11, 3


@dataclass(frozen=True)
class Made:
    """Does as the utterance's source says; Ctrl-C comes at one key."""

    stop_at: str = ""
    pause: float = 0.0

    def __call__(self, utterance: Utterance) -> Prepared:
        time.sleep(self.pause)
        if utterance.key == self.stop_at:
            raise KeyboardInterrupt
        if utterance.source == "bad":
            raise Unusable("it is\tmade to\nfail")
        if utterance.source == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        return made(utterance.key)


def made(key: str) -> Prepared:
    draw = np.random.default_rng(list(key.encode()))
    frames = int(draw.integers(1, 40))
    features = draw.normal(1000.0, 2.0, size=(frames, DIM)).astype(np.float32)
    labels = draw.integers(0, CLASSES - 1, size=frames).astype(np.int32)
    return Prepared(features, labels)


def job(sources: Sequence[str] = ("", "", "bad", "", "", "", "", ""), stop_at: str = "") -> Job:
    utterances = [
        Utterance(f"s{n % 3}-{n:02d}", f"s{n % 3}", "dev" if n % 3 == 1 else "train", f"W{n}", text)
        for n, text in enumerate(sources)
    ]
    utterances.sort(key=lambda u: u.key)
    return Job({"targets": "made", "seed": 1}, {"from": "here"}, utterances, Made(stop_at), CLASSES)
