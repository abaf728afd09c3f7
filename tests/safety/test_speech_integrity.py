"""Nothing damaged is believed: prepared speech."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from normrnn.engine.loop import Interrupted
from normrnn.errors import UserError
from normrnn.speech.config import SpeechConfig
from normrnn.speech.corpus import SpeechCorpus, read_speech
from tests.safety.test_run_integrity import flip
from tests.tiny_runs import run_tiny
from tests.tiny_speech import write_speech


def everything(corpus: SpeechCorpus) -> list[np.ndarray]:
    return [
        read(i).numpy()
        for split in (corpus.train, corpus.dev)
        for read in (split.features, split.labels)
        for i in range(len(split.keys))
    ]


ARCHIVES = [f"{split}/{kind}.ark" for split in ("train", "dev") for kind in ("feats", "labels")]


@pytest.mark.parametrize("name", [*ARCHIVES, "dev/index", "summary.json"])
def test_a_flipped_bit_anywhere(name: str, speech_dir: Path) -> None:
    """It is found, or it is where nothing depends on it: the numbers are the same."""
    expected = everything(read_speech(speech_dir))
    sha256, good = read_speech(speech_dir).sha256, (speech_dir / name).read_bytes()
    noticed = 0
    for seed in range(15):
        flip(speech_dir / name, random.Random(seed))
        try:
            corpus = read_speech(speech_dir)
            found = everything(corpus)
        except UserError:
            noticed += 1
        else:
            assert corpus.sha256 == sha256
            for ours, right in zip(found, expected, strict=True):
                np.testing.assert_array_equal(ours, right)
        (speech_dir / name).write_bytes(good)
    # Keys in archives are not read.
    assert noticed >= (15 if name.endswith((".json", "index")) else 1)


def test_features_that_change_after_their_first_read(speech_dir: Path) -> None:
    split, path = read_speech(speech_dir).train, speech_dir / "train" / "feats.ark"
    last, good = len(split.keys) - 1, path.read_bytes()
    split.features(last, 2, 4)
    for content, said in ((good[:-1] + b"x", "is damaged"), (None, "No such file")):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(UserError, match=said):
            split.features(last, 2, 4)


def test_other_features_are_other_data(tiny_speech: SpeechConfig, tmp_path: Path) -> None:
    """Same labels, same lengths, same statistics: only one number of one frame differs."""
    data, run = Path(tiny_speech.data), tmp_path / "run"
    with pytest.raises(Interrupted):
        run_tiny(tiny_speech, run, stop_at=3)
    other = tmp_path / "other"
    write_speech(other, change=1e-3)
    for name in ("train/index", "train/labels.ark", "dev/labels.ark"):
        assert (other / name).read_bytes() == (data / name).read_bytes()
    shutil.rmtree(data)
    shutil.move(other, data)
    with pytest.raises(UserError, match="data has changed"):
        run_tiny(tiny_speech, run)
