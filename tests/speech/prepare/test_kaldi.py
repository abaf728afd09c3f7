"""Kaldi's directories: features or sound, alignments of all kinds, and what is refused."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kaldiio
import numpy as np
import pytest
import soundfile

from normrnn.errors import UsageError, UserError
from normrnn.speech.corpus import SpeechCorpus, read_speech
from normrnn.speech.prepare.features import add_deltas, fbank
from normrnn.speech.prepare.job import Job
from normrnn.speech.prepare.kaldi import Side, kaldi_job
from normrnn.speech.prepare.pdfs import class_count, read_alignments
from normrnn.speech.prepare.preparation import finished, prepare
from normrnn.speech.prepare.speakers import choose_dev
from tests.sounds import RATE, sung

LENGTHS = {"a-1": 6, "a-2": 9, "b-1": 7, "c-1": 5}
FEATS = {k: np.random.default_rng(n).normal(size=(n, 4)).astype("f4") for k, n in LENGTHS.items()}
PDFS = {k: np.arange(n, dtype=np.int32) % 5 for k, n in LENGTHS.items()}


def quiet(*_: int) -> None:
    pass


def write_data(folder: Path, **options: Any) -> Path:
    """feats.scp, utt2spk and text."""
    folder.mkdir()
    kaldiio.save_ark(str(folder / "raw.ark"), FEATS, scp=str(folder / "feats.scp"), **options)
    (folder / "utt2spk").write_text("".join(f"{key} {key[0]}\n" for key in FEATS))
    (folder / "text").write_text("".join(f"{key} WORDS OF {key}\n" for key in FEATS))
    return folder


def write_ali(folder: Path, labels: dict[str, np.ndarray] = PDFS, name: str = "ali.1.ark") -> Path:
    folder.mkdir(exist_ok=True)
    kaldiio.save_ark(str(folder / name), labels)
    return folder


def write_text(path: Path, labels: dict[str, np.ndarray]) -> None:
    lines = [f"{key} {' '.join(map(str, v.tolist()))} \n" for key, v in labels.items()]
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write("".join(lines))  # type: ignore[arg-type]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


@pytest.fixture
def ali(tmp_path: Path) -> Path:
    return write_ali(tmp_path / "ali")


def make(train: Side, dev: Side | None = None, **changes: object) -> Job:
    options: dict = {"deltas": False, "allow_pipes": False, "classes": None, "sample_rate": RATE}
    options |= {"dev_speakers": None, "dev_fraction": 0.1, **changes}
    return kaldi_job(train, dev, **options)


def prepared(job: Job, out: Path, processes: int = 1) -> tuple[SpeechCorpus, dict[str, str]]:
    prepare(job, out, processes, quiet)
    lines = (out / "skipped.tsv").read_text().splitlines()
    return read_speech(out), dict(line.split("\t") for line in lines)


def features(corpus: SpeechCorpus) -> dict[str, np.ndarray]:
    return {
        key: split.features(index).numpy()
        for split in (corpus.train, corpus.dev)
        for index, key in enumerate(split.keys)
    }


def labels(corpus: SpeechCorpus) -> dict[str, list[int]]:
    return {
        key: split.labels(index).tolist()
        for split in (corpus.train, corpus.dev)
        for index, key in enumerate(split.keys)
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_features_as_they_are(data: Path, ali: Path, tmp_path: Path, processes: int) -> None:
    corpus, skipped = prepared(make(Side(data, ali)), tmp_path / "out", processes)
    assert skipped == {}
    assert (corpus.classes, corpus.dim) == (5, 4)
    assert features(corpus).keys() == FEATS.keys()
    for key, values in features(corpus).items():
        np.testing.assert_array_equal(values, FEATS[key])
    assert labels(corpus) == {key: values.tolist() for key, values in PDFS.items()}
    speakers = {key[0] for key in corpus.train.keys} & {key[0] for key in corpus.dev.keys}
    assert speakers == set()
    assert "b-1 WORDS OF b-1\n" in "".join(
        (tmp_path / "out" / split / "text").read_text() for split in ("train", "dev")
    )


def test_deltas_on_request(data: Path, ali: Path, tmp_path: Path) -> None:
    corpus, _ = prepared(make(Side(data, ali), deltas=True), tmp_path / "out")
    assert corpus.dim == 12
    for key, values in features(corpus).items():
        np.testing.assert_array_equal(values, add_deltas(FEATS[key]))


def test_compressed_features(ali: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", compression_method=2)
    corpus, _ = prepared(make(Side(data, ali)), tmp_path / "out")
    for key, values in features(corpus).items():
        np.testing.assert_allclose(values, FEATS[key], atol=0.05)


def test_one_alignment_of_both_sides(data: Path, tmp_path: Path) -> None:
    extra = tmp_path / "dev"
    extra.mkdir()
    kaldiio.save_ark(str(extra / "raw.ark"), {"z-1": FEATS["a-1"]}, scp=str(extra / "feats.scp"))
    both = write_ali(tmp_path / "both", {**PDFS, "z-1": PDFS["a-1"], "y-1": PDFS["a-1"]})
    corpus, skipped = prepared(make(Side(data, both), Side(extra, both)), tmp_path / "out")
    assert corpus.dev.keys == ["z-1"]
    assert corpus.train.keys == list(FEATS)
    assert skipped == {"y-1": f"it has an alignment, but is not in {data}"}


def test_the_file_that_the_table_names(data: Path, ali: Path, tmp_path: Path) -> None:
    """Not one of the same name beside the table; and with the keys that the table has, as after
    copy_data_dir.sh --utt-prefix."""
    other = tmp_path / "normalised"
    other.mkdir()
    values = {f"x-{key}": matrix * 2 for key, matrix in FEATS.items()}
    kaldiio.save_ark(str(other / "raw.ark"), values, scp=str(other / "feats.scp"))
    table = (other / "feats.scp").read_text()
    (data / "feats.scp").write_text(table.replace("x-", "", 1).replace("\nx-", "\n"))
    corpus, skipped = prepared(make(Side(data, ali)), tmp_path / "out")
    assert skipped == {}
    for key, found in features(corpus).items():
        np.testing.assert_array_equal(found, 2 * FEATS[key])
    # Offsets that are off lead to no object.
    wrong = [line[:-1] + str((int(line[-1]) + 3) % 10) for line in table.splitlines()]
    (data / "feats.scp").write_text("\n".join(wrong).replace("x-", ""))
    with pytest.raises(UserError, match="no utterance of the train set could be prepared"):
        prepared(make(Side(data, ali)), tmp_path / "off")


def test_alignments_of_other_keys(data: Path, tmp_path: Path) -> None:
    other = write_ali(tmp_path / "other", {f"x-{key}": pdfs for key, pdfs in PDFS.items()})
    with pytest.raises(UserError, match=r"no speakers \(8 utterances .*: a-1: it has no alignment"):
        make(Side(data, other))


def test_without_utt2spk_each_utterance_is_a_speaker(data: Path, ali: Path, tmp_path: Path) -> None:
    (data / "utt2spk").unlink()
    (data / "text").unlink()
    corpus, _ = prepared(make(Side(data, ali), dev_fraction=0.5), tmp_path / "out")
    assert (len(corpus.train.keys), len(corpus.dev.keys)) == (2, 2)
    first = corpus.train.keys[0]
    assert (tmp_path / "out" / "train" / "text").read_text().splitlines()[0] == first


def test_speakers_without_alignments_are_not_chosen_for_development(
    data: Path, tmp_path: Path
) -> None:
    (data / "utt2spk").unlink()
    first = choose_dev(PDFS, None, 0.1)
    ali = write_ali(tmp_path / "ali", {k: v for k, v in PDFS.items() if k not in first})
    corpus, skipped = prepared(make(Side(data, ali)), tmp_path / "out")
    assert {*skipped} == first
    assert (len(corpus.train.keys), len(corpus.dev.keys)) == (2, 1)


def test_what_does_not_fit_is_reported(data: Path, tmp_path: Path) -> None:
    other = {**PDFS, "c-1": PDFS["a-1"], "d-9": PDFS["a-1"]}
    del other["a-2"]
    ali = write_ali(tmp_path / "ali", other)
    scp = (data / "feats.scp").read_text()
    (data / "feats.scp").write_text(scp + f"e-1 {data}/gone.ark:4\n")
    (data / "utt2spk").write_text("a-1 a\na-2 a\nb-1 b\nc-1 a\ne-1 a\n")
    write_ali(tmp_path / "ali", {"e-1": PDFS["a-1"], "b-2": PDFS["a-1"]}, "ali.2.ark")
    listed = tmp_path / "dev-speakers"
    listed.write_text("b\n")
    corpus, skipped = prepared(make(Side(data, ali), dev_speakers=listed), tmp_path / "out")
    assert (corpus.train.keys, corpus.dev.keys) == (["a-1"], ["b-1"])
    assert skipped == {
        "a-2": f"it has no alignment in {ali}",
        "b-2": f"it has an alignment, but is not in {data}",
        "c-1": "its alignment has 6 frames, its features have 5",
        "d-9": f"it has an alignment, but is not in {data}",
        "e-1": f"{data}/gone.ark cannot be read: No such file or directory",
    }


def test_number_of_classes(data: Path, ali: Path, tmp_path: Path) -> None:
    assert class_count(None, {ali: PDFS}) == (5, "the largest label")
    assert class_count(9, {ali: PDFS})[0] == 9
    (ali / "final.mdl").write_bytes(
        b"\0B<TransitionModel> ..<NUMPDFS> \x04" + struct.pack("<i", 77)
    )
    assert class_count(None, {ali: PDFS})[0] == 77
    (ali / "final.mdl").write_bytes(b"<TransitionModel> .. <DIMENSION> 39 <NUMPDFS> 78 <DIAGGMM>")
    assert class_count(None, {ali: PDFS})[0] == 78
    (ali / "num_pdfs").write_text("79\n")
    assert class_count(None, {ali: PDFS})[0] == 79
    with pytest.raises(UserError, match="--classes"):
        class_count(0, {ali: PDFS})
    corpus, skipped = prepared(make(Side(data, ali)), tmp_path / "out")
    assert corpus.classes == 79
    assert corpus.label_counts.shape == (79,)
    assert skipped == {}
    job = make(Side(data, ali), classes=4)
    with pytest.raises(UserError, match="no utterance"):
        prepare(job, tmp_path / "few", 1, quiet)
    reason = "its label 4 is outside the 4 classes, numbered from 0"
    assert (tmp_path / "few" / "skipped.tsv").read_text() == "".join(
        f"{key}\t{reason}\n" for key in PDFS
    )


@pytest.mark.parametrize("name", ["ali.1.gz", "ali.1.ark", "pdf.ark", "labels.ark"])
def test_text_and_zipped_alignments(tmp_path: Path, name: str) -> None:
    write_text(tmp_path / name, PDFS)
    for path in (tmp_path, tmp_path / name):
        got = read_alignments(path)
        assert {k: v.tolist() for k, v in got.items()} == {k: v.tolist() for k, v in PDFS.items()}


def test_alignments_in_several_archives(tmp_path: Path) -> None:
    for number, key in enumerate(PDFS, 8):
        write_ali(tmp_path, {key: PDFS[key]}, f"ali.{number}.ark")
    assert list(read_alignments(tmp_path)) == list(PDFS)
    write_ali(tmp_path, {"a-1": PDFS["a-1"]}, "ali.99.ark")
    with pytest.raises(UserError, match="a-1 a second time"):
        read_alignments(tmp_path)


def test_no_alignments(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_alignments(tmp_path / "none")
    with pytest.raises(UserError, match=r"none of pdf\*\.ark"):
        read_alignments(tmp_path)
    (tmp_path / "ali.1.ark").write_bytes(b"")
    with pytest.raises(UserError, match=r"ali\.1\.ark is empty"):
        read_alignments(tmp_path)


def test_transition_ids_are_refused(tmp_path: Path) -> None:
    """They count from 1 and exceed the number of pdfs."""
    write_text(tmp_path / "ali.1.gz", {"u1": np.array([7, 120, 3]), "u2": np.array([1])})
    with pytest.raises(UserError, match=rf"ali-to-pdf {tmp_path}/final\.mdl .*--classes"):
        read_alignments(tmp_path)
    assert [*read_alignments(tmp_path, classes=121)] == ["u1", "u2"]
    (tmp_path / "num_pdfs").write_text("120")
    with pytest.raises(UserError, match="transition-ids"):
        read_alignments(tmp_path, classes=121)
    # What that command writes is taken, although the transition-ids are still there.
    write_text(tmp_path / "pdf.ark", {"u3": np.array([0, 5])})
    assert [*read_alignments(tmp_path)] == ["u3"]


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    """Two recordings in wav.scp."""
    data = tmp_path / "sounds"
    data.mkdir()
    for number, name in enumerate(("rec1", "rec2")):
        soundfile.write(data / f"{name}.wav", sung(100 + 20 * number), RATE)
    (data / "wav.scp").write_text(f"rec1 {data}/rec1.wav\nrec2 {data}/rec2.wav\n")
    return data


def zeros(**lengths: int) -> dict[str, np.ndarray]:
    return {key: np.zeros(n, dtype=np.int32) for key, n in lengths.items()}


def test_features_of_whole_recordings(sounds: Path, tmp_path: Path) -> None:
    ali = write_ali(tmp_path / "ali", zeros(rec1=173, rec2=173))
    corpus, skipped = prepared(make(Side(sounds, ali)), tmp_path / "out")
    assert skipped == {}
    assert corpus.dim == 123
    got = features(corpus)
    np.testing.assert_array_equal(got["rec1"], add_deltas(fbank(sung(100), RATE)))
    np.testing.assert_array_equal(got["rec2"], add_deltas(fbank(sung(120), RATE)))


def test_segments(sounds: Path, tmp_path: Path) -> None:
    (sounds / "segments").write_text(
        "s1 rec1 0.25 0.75\ns2 rec2 0.5 -1\ns3 rec1 1.0 2.1\ns4 rec1 1 9\ns5 rec1 0.5 0.4\n"
        "s6 rec2 0.5 0.51\n"
    )
    ali = write_ali(tmp_path / "ali", zeros(s1=48, s2=123, s3=73, s4=1, s5=1, s6=1))
    corpus, skipped = prepared(make(Side(sounds, ali), dev_fraction=0.3), tmp_path / "out")
    got = features(corpus)
    assert got.keys() == {"s1", "s2", "s3"}
    np.testing.assert_array_equal(got["s1"], add_deltas(fbank(sung(100)[4000:12000], RATE)))
    np.testing.assert_array_equal(got["s2"], add_deltas(fbank(sung(120)[8000:], RATE)))
    np.testing.assert_array_equal(got["s3"], add_deltas(fbank(sung(100)[16000:], RATE)))
    assert skipped == {
        "s4": "its segment 1-9 s does not fit a sound of 1.75 s",
        "s5": "its segment 0.5-0.4 s does not fit a sound of 1.75 s",
        "s6": "it is shorter than one frame: 10.0 ms of 25",
    }


def test_commands_run_only_when_allowed(sounds: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (sounds / "wav.scp").write_text(
        f"rec1 touch {mark}; cat {sounds}/rec1.wav |\nrec2 {sounds}/rec2.wav\nrec3 false |\n"
    )
    ali = write_ali(tmp_path / "ali", zeros(rec1=173, rec2=173, rec3=173))
    with pytest.raises(UserError, match=r"runs commands \(for rec1: .*--allow-pipes"):
        make(Side(sounds, ali))
    assert not mark.exists()
    corpus, skipped = prepared(make(Side(sounds, ali), allow_pipes=True), tmp_path / "out")
    assert mark.exists()
    np.testing.assert_array_equal(features(corpus)["rec1"], add_deltas(fbank(sung(100), RATE)))
    assert skipped == {"rec3": "its command failed (false |): exit code 1, no output"}


def test_features_from_a_command(data: Path, ali: Path, tmp_path: Path) -> None:
    kaldiio.save_mat(str(tmp_path / "one.mat"), FEATS["b-1"])
    scp = (data / "feats.scp").read_text().splitlines()
    scp[2] = f"b-1 cat {tmp_path}/one.mat |"
    scp[3] = "c-1 echo nonsense |"
    (data / "feats.scp").write_text("\n".join(scp) + "\n")
    with pytest.raises(UserError, match="--allow-pipes"):
        make(Side(data, ali))
    listed = tmp_path / "dev-speakers"
    listed.write_text("b\n")
    job = make(Side(data, ali), allow_pipes=True, dev_speakers=listed)
    corpus, skipped = prepared(job, tmp_path / "out")
    np.testing.assert_array_equal(features(corpus)["b-1"], FEATS["b-1"])
    assert skipped == {"c-1": "its command writes no matrix: echo nonsense |"}


def without(name: str) -> Callable[[Path], None]:
    return lambda data: (data / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without("feats.scp"), "neither feats.scp nor wav.scp"),
        (lambda data: (data / "feats.scp").write_text("a-1 x:1\na-1 y:2\n"), "a second time"),
        (lambda data: (data / "utt2spk").write_bytes(b"\xff\n"), "not UTF-8 text"),
    ],
)
def test_broken_directories(
    data: Path, ali: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(data)
    with pytest.raises(UserError, match=said):
        make(Side(data, ali))


@pytest.mark.parametrize(
    ("line", "said"),
    [("s1 rec1 0.1", "needs a recording, a start and an end"), ("s1 rec9 0 1", "rec9 of s1")],
)
def test_broken_segments(sounds: Path, tmp_path: Path, line: str, said: str) -> None:
    (sounds / "segments").write_text(f"{line}\n")
    ali = write_ali(tmp_path / "ali", zeros(s1=10))
    with pytest.raises(UserError, match=said):
        make(Side(sounds, ali))


def test_settings_change_with_the_data(data: Path, ali: Path, tmp_path: Path) -> None:
    before = make(Side(data, ali)).settings
    assert make(Side(data, ali)).settings == before
    assert make(Side(data, ali), deltas=True).settings["deltas"] is True
    write_ali(tmp_path / "other", {**PDFS, "a-1": PDFS["a-1"][::-1].copy()})
    assert make(Side(data, tmp_path / "other")).settings["data"] != before["data"]
    # Other values of the same size in the place of the old ones.
    kaldiio.save_ark(str(data / "raw.ark"), {key: 2 * matrix for key, matrix in FEATS.items()})
    after = make(Side(data, ali)).settings
    assert after["data"] != before["data"]
    prepare(make(Side(data, ali)), tmp_path / "out", 1, quiet)
    with pytest.raises(UsageError, match="holds data prepared from other data, or by an older"):
        finished(tmp_path / "out", before)
    assert finished(tmp_path / "out", after)
