"""A preparation of features and labels that follow from the key alone.

Apart from the tests that use it, without torch: fresh processes import this.
"""

import os
import signal
from collections.abc import Sequence
from functools import partial

import numpy as np

from normrnn.speech.archive import Unusable
from normrnn.speech.prepare.job import Job, Prepared, Utterance

CLASSES, DIM = 11, 3


def work(utterance: Utterance, stop_at: str = "") -> Prepared:
    """Do as the utterance's text says; Ctrl-C comes at one key."""
    if utterance.key == stop_at:
        raise KeyboardInterrupt
    if utterance.text == "bad":
        raise Unusable("it is\tmade to\nfail")
    if utterance.text == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    return made(utterance.key)


def made(key: str) -> Prepared:
    draw = np.random.default_rng(list(key.encode()))
    frames = int(draw.integers(1, 40))
    features = draw.normal(1000.0, 2.0, size=(frames, DIM)).astype(np.float32)
    labels = draw.integers(0, CLASSES - 1, size=frames).astype(np.int32)
    return features, labels


def job(texts: Sequence[str] = ("W0", "W1", "bad", "W3", "W4", "W5", "W6", ""), stop_at="") -> Job:
    utterances = [
        Utterance(f"s{n % 3}-{n:02d}", f"s{n % 3}", text, split="dev" if n % 3 == 1 else "train")
        for n, text in enumerate(texts)
    ]
    utterances.sort(key=lambda u: u.key)
    settings = {"targets": "made", "seed": 1}
    return Job(settings, utterances, partial(work, stop_at=stop_at), CLASSES)
