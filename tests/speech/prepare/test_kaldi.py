"""Kaldi's directories: features, alignments, and what is refused."""

import struct
from pathlib import Path
from typing import Any

import kaldiio
import numpy as np
import pytest

from normrnn.errors import UsageError, UserError
from normrnn.speech.corpus import SpeechCorpus, read_speech
from normrnn.speech.prepare.features import add_deltas
from normrnn.speech.prepare.job import Job
from normrnn.speech.prepare.kaldi import count_classes, kaldi_job, read_alignments
from normrnn.speech.prepare.preparation import finished, prepare

LENGTHS = {"a-1": 6, "a-2": 9, "b-1": 7, "c-1": 5}
FEATS = {k: np.random.default_rng(n).normal(size=(n, 4)).astype("f4") for k, n in LENGTHS.items()}
PDFS = {k: np.arange(n, dtype=np.int32) % 5 for k, n in LENGTHS.items()}


def write_data(folder: Path, **options: Any) -> Path:
    """feats.scp, utt2spk and text."""
    folder.mkdir()
    kaldiio.save_ark(str(folder / "raw.ark"), FEATS, scp=str(folder / "feats.scp"), **options)
    (folder / "utt2spk").write_text("".join(f"{key} {key[0]}\n" for key in FEATS))
    (folder / "text").write_text("".join(f"{key} WORDS OF {key}\n" for key in FEATS))
    return folder


def write_ali(folder: Path, labels: dict[str, np.ndarray] = PDFS, name: str = "pdf.1.ark") -> Path:
    folder.mkdir(exist_ok=True)
    kaldiio.save_ark(str(folder / name), labels)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


@pytest.fixture
def ali(tmp_path: Path) -> Path:
    return write_ali(tmp_path / "ali")


def make(
    data: Path, ali: Path, dev_data: Path | None = None, dev_ali: Path | None = None, **options: Any
) -> Job:
    defaults = {"deltas": False, "classes": 5, "dev_speakers": None, "dev_fraction": 0.1}
    return kaldi_job(data, ali, dev_data, dev_ali, **{**defaults, **options})


def prepared(job: Job, out: Path, processes: int = 1) -> tuple[SpeechCorpus, dict[str, str]]:
    prepare(job, out, processes)
    lines = (out / "skipped.tsv").read_text().splitlines()
    return read_speech(out), dict(line.split("\t") for line in lines)


def features(corpus: SpeechCorpus) -> dict[str, np.ndarray]:
    return {
        key: split.features(index).numpy()
        for split in (corpus.train, corpus.dev)
        for index, key in enumerate(split.keys)
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_features_as_they_are(data: Path, ali: Path, tmp_path: Path, processes: int) -> None:
    corpus, skipped = prepared(make(data, ali), tmp_path / "out", processes)
    assert skipped == {}
    assert (corpus.classes, corpus.dim) == (5, 4)
    assert features(corpus).keys() == FEATS.keys()
    for key, values in features(corpus).items():
        np.testing.assert_array_equal(values, FEATS[key])
    for split in (corpus.train, corpus.dev):
        for index, key in enumerate(split.keys):
            assert split.labels(index).tolist() == PDFS[key].tolist()
    assert not {key[0] for key in corpus.train.keys} & {key[0] for key in corpus.dev.keys}
    assert "b-1 WORDS OF b-1\n" in "".join(
        (tmp_path / "out" / split / "text").read_text() for split in ("train", "dev")
    )


def test_compressed_features_with_deltas(ali: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", compression_method=2)
    corpus, _ = prepared(make(data, ali, deltas=True), tmp_path / "out")
    assert corpus.dim == 12
    for key, values in features(corpus).items():
        np.testing.assert_allclose(values, add_deltas(FEATS[key]), atol=0.05)


def test_a_development_set_with_the_same_alignments(data: Path, tmp_path: Path) -> None:
    extra = tmp_path / "dev"
    extra.mkdir()
    kaldiio.save_ark(str(extra / "raw.ark"), {"z-1": FEATS["a-1"]}, scp=str(extra / "feats.scp"))
    both = write_ali(tmp_path / "both", {**PDFS, "z-1": PDFS["a-1"], "y-1": PDFS["a-1"]})
    corpus, skipped = prepared(make(data, both, extra, both), tmp_path / "out")
    assert corpus.dev.keys == ["z-1"]
    assert corpus.train.keys == list(FEATS)
    assert skipped == {}
    with pytest.raises(UserError, match="in common"):
        make(data, both, data, both)


def test_keys_that_the_archive_does_not_have(data: Path, ali: Path, tmp_path: Path) -> None:
    """As after copy_data_dir.sh --utt-prefix. Offsets that are off lead to no object."""
    other = tmp_path / "normalised"
    other.mkdir()
    values = {f"x-{key}": matrix * 2 for key, matrix in FEATS.items()}
    kaldiio.save_ark(str(other / "raw.ark"), values, scp=str(other / "feats.scp"))
    table = (other / "feats.scp").read_text().replace("x-", "")
    (data / "feats.scp").write_text(table)
    corpus, skipped = prepared(make(data, ali), tmp_path / "out")
    assert skipped == {}
    for key, found in features(corpus).items():
        np.testing.assert_array_equal(found, 2 * FEATS[key])
    wrong = [line[:-1] + str((int(line[-1]) + 3) % 10) for line in table.splitlines()]
    (data / "feats.scp").write_text("\n".join(wrong))
    with pytest.raises(UserError, match="no utterance of the train set"):
        prepared(make(data, ali), tmp_path / "off")


def test_without_utt2spk_each_utterance_is_a_speaker(data: Path, tmp_path: Path) -> None:
    """Those without alignments are not chosen for development."""
    (data / "utt2spk").unlink()
    (data / "text").unlink()
    ali = write_ali(tmp_path / "ali", {k: v for k, v in PDFS.items() if k != "a-1"})
    corpus, skipped = prepared(make(data, ali), tmp_path / "out")
    assert {*skipped} == {"a-1"}
    assert sorted((len(corpus.train.keys), len(corpus.dev.keys))) == [1, 2]
    first = corpus.train.keys[0]
    assert (tmp_path / "out" / "train" / "text").read_text().splitlines()[0] == first
    with pytest.raises(UserError, match="0 of 0 speakers"):
        make(data, write_ali(tmp_path / "other", {"x": PDFS["a-1"]}))


def test_what_does_not_fit_is_reported(data: Path, tmp_path: Path) -> None:
    other = {**PDFS, "c-1": PDFS["a-1"], "d-9": PDFS["a-1"]}
    del other["a-2"]
    ali = write_ali(tmp_path / "ali", other)
    scp = (data / "feats.scp").read_text()
    (data / "feats.scp").write_text(scp + f"e-1 {data}/gone.ark:4\nf-1 {data}/raw.ark:4\n")
    (data / "utt2spk").write_text("a-1 a\na-2 a\nb-1 b\nc-1 a\ne-1 a\n")
    write_ali(tmp_path / "ali", {"e-1": PDFS["a-1"]}, "pdf.2.ark")
    listed = tmp_path / "dev-speakers"
    listed.write_text("b\n")
    corpus, skipped = prepared(make(data, ali, dev_speakers=listed), tmp_path / "out")
    assert (corpus.train.keys, corpus.dev.keys) == (["a-1"], ["b-1"])
    assert skipped == {
        "a-2": f"it has no alignment in {ali}",
        "c-1": "its alignment has 6 frames, its features have 5",
        "e-1": f"{data}/gone.ark cannot be read: No such file or directory",
        "f-1": f"it is not in {data / 'utt2spk'}",
    }


@pytest.mark.parametrize(
    ("model", "classes"),
    [
        (b"\0B<TransitionModel> ..<NUMPDFS> \x04" + struct.pack("<i", 77), 77),
        (b"<TransitionModel> .. <DIMENSION> 39 <NUMPDFS> 78 <DIAGGMM>", 78),
        (b"<TransitionModel> .. <NUMPDFS> 0 ", 0),
        (b"<Nnet3>", 0),
        (b"", 0),
    ],
)
def test_number_of_classes(ali: Path, model: bytes, classes: int) -> None:
    if model:
        (ali / "final.mdl").write_bytes(model)
    if classes:
        assert count_classes(ali, None) == classes
    else:
        with pytest.raises(UsageError, match="--classes"):
            count_classes(ali, None)
    assert count_classes(ali, 9) == 9


def test_alignments_in_several_archives(tmp_path: Path) -> None:
    for number, key in enumerate(PDFS, 8):
        write_ali(tmp_path, {key: PDFS[key]}, f"ali.{number}.ark")
    assert {*read_alignments(tmp_path, 5)} == {*PDFS}
    with pytest.raises(UserError, match="from 0 to 4"):  # or transition-ids
        read_alignments(tmp_path, 4)
    write_ali(tmp_path, {"a-1": PDFS["a-1"]}, "ali.99.ark")
    with pytest.raises(UserError, match="a-1 a second time"):
        read_alignments(tmp_path, 5)
    # The output of ali-to-pdf is taken, although the transition-ids are still there.
    write_ali(tmp_path, {"u3": np.array([0, 4], dtype=np.int32)}, "pdf.ark")
    assert [*read_alignments(tmp_path, 5)] == ["u3"]


def test_no_alignments(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a directory"):
        make(data, tmp_path / "none")
    (tmp_path / "ali").mkdir()
    for _ in range(2):
        with pytest.raises(UserError, match="no archive of alignments"):
            make(data, tmp_path / "ali")
        (tmp_path / "ali" / "ali.1.ark").write_bytes(b"")


def test_settings_change_with_the_data(data: Path, ali: Path, tmp_path: Path) -> None:
    before = make(data, ali).settings
    assert make(data, ali).settings == before
    assert make(data, ali, deltas=True).settings["deltas"] is True
    write_ali(tmp_path / "other", {**PDFS, "a-1": PDFS["a-1"][::-1].copy()})
    assert make(data, tmp_path / "other").settings["data"] != before["data"]
    # Other values of the same size in the place of the old ones.
    kaldiio.save_ark(str(data / "raw.ark"), {key: 2 * matrix for key, matrix in FEATS.items()})
    after = make(data, ali).settings
    assert after["data"] != before["data"]
    prepare(make(data, ali), tmp_path / "out", 1)
    with pytest.raises(UsageError, match="data was"):
        finished(tmp_path / "out", before)
    assert finished(tmp_path / "out", after)
