"""The prepared directory: its bytes, going on after a stop, and what is refused."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import torch

from normrnn.errors import UsageError, UserError
from normrnn.files import exclusive, sealed_json
from normrnn.speech.corpus import FORMAT, read_speech
from normrnn.speech.prepare.job import Prepared, Utterance
from normrnn.speech.prepare.preparation import PARTS, SETTINGS, finished, prepare
from tests.made_speech import CLASSES, DIM, job, made

OTHER = {"mean": [1], "variance": [1], "label_counts": [1]}


def quiet(done: int, total: int, skipped: int) -> None:
    assert 0 <= skipped <= done <= total


def contents(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    prepare(job(), tmp_path / "out", 1, quiet)
    return tmp_path / "out"


def test_the_files_are_kaldis(out: Path) -> None:
    names = {"feats.ark", "feats.scp", "labels.ark", "labels.scp"}
    names |= {"utt2spk", "text", "utt2num_frames", "checksums"}
    expected = {f"{split}/{name}" for split in ("train", "dev") for name in names}
    expected |= {"summary.json", "statistics.json", "skipped.tsv", ".lock"}
    assert contents(out).keys() == expected
    for split, keys in (
        ("train", ["s0-00", "s0-03", "s0-06", "s2-05"]),
        ("dev", ["s1-01", "s1-04", "s1-07"]),
    ):
        feats = kaldiio.load_scp(str(out / split / "feats.scp"))
        labels = kaldiio.load_scp(str(out / split / "labels.scp"))
        assert list(feats) == list(labels) == keys
        for key in keys:
            np.testing.assert_array_equal(feats[key], made(key).features)
            np.testing.assert_array_equal(labels[key], made(key).labels)
        spoken = "".join(f"{key} {key[:2]}\n" for key in keys)
        assert (out / split / "utt2spk").read_text() == spoken
        assert (out / split / "text").read_text() == "".join(f"{k} W{int(k[3:])}\n" for k in keys)
        lengths = "".join(f"{key} {len(made(key).labels)}\n" for key in keys)
        assert (out / split / "utt2num_frames").read_text() == lengths
    assert (out / "skipped.tsv").read_text() == "s2-02\tit is made to fail\n"


def test_the_reader_gives_back_what_was_prepared(out: Path) -> None:
    corpus = read_speech(out)
    assert (corpus.classes, corpus.dim) == (CLASSES, DIM)
    for split in (corpus.train, corpus.dev):
        assert split.keys == sorted(split.keys)
        for index, key in enumerate(split.keys):
            x, y = torch.from_numpy(made(key).features), torch.from_numpy(made(key).labels).long()
            assert split.lengths[index] == len(y)
            for start, stop in ((0, None), (2, 9), (2, 1)):
                assert torch.equal(split.features(index, start, stop), x[start:stop])
                assert torch.equal(split.labels(index, start, stop), y[start:stop])


def test_statistics_are_those_of_all_training_frames(out: Path) -> None:
    keys = ["s0-00", "s0-03", "s0-06", "s2-05"]
    frames = np.concatenate([made(key).features for key in keys]).astype(np.float64)
    labels = np.concatenate([made(key).labels for key in keys])
    stored = json.loads((out / "statistics.json").read_text())
    assert stored["frames"] == len(frames)
    np.testing.assert_allclose(stored["mean"], frames.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(stored["variance"], frames.var(axis=0), rtol=1e-9)
    assert stored["label_counts"] == np.bincount(labels, minlength=CLASSES).tolist()
    corpus = read_speech(out)
    np.testing.assert_allclose(corpus.mean, frames.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(corpus.variance, frames.var(axis=0), rtol=1e-6)
    assert corpus.label_counts.tolist() == stored["label_counts"]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["format"], summary["targets"]) == ("normrnn speech 1", "made")
    assert (summary["classes"], summary["dim"], summary["frame_shift"]) == (CLASSES, DIM, 0.01)
    assert summary["train"] == {
        "utterances": 4,
        "frames": len(frames),
        "hours": pytest.approx(len(frames) / 360_000),
        "speakers": 2,
        "classes_seen": len(set(labels.tolist())),
    }
    assert summary["skipped"] == {"utterances": 1, "share": 1 / 8}
    assert summary["settings"] == job().settings


@pytest.mark.parametrize("stop_at", ["s0-00", "s0-06", "s1-04", "s2-05"])
def test_a_stopped_preparation_goes_on_to_the_same_bytes(out: Path, stop_at: str) -> None:
    expected = contents(out)
    shutil.rmtree(out)
    with pytest.raises(KeyboardInterrupt):
        prepare(job(stop_at=stop_at), out, 1, quiet)
    assert not (out / "summary.json").exists()
    with pytest.raises(UserError, match=r"summary\.json"):
        read_speech(out)
    assert finished(out, job().settings) is None
    reported = []
    prepare(job(), out, 1, lambda done, *_: reported.append(done))
    assert reported[0] == [u.key for u in job().utterances].index(stop_at)
    assert contents(out) == expected


@pytest.mark.parametrize("seed", range(6))
def test_damaged_parts_are_prepared_again(out: Path, seed: int) -> None:
    """Parts cut, grown or changed at random, as after a power failure, or of other utterances."""
    expected = contents(out)
    shutil.rmtree(out)
    with pytest.raises(KeyboardInterrupt):
        prepare(job(stop_at="s2-05"), out, 1, quiet)
    draw = np.random.default_rng(seed)
    first, *others = sorted((out / PARTS).iterdir())
    first.write_bytes(others[-1].read_bytes())
    damaged = 1
    for path in others:
        raw = bytearray(path.read_bytes())
        if (kind := draw.integers(0, 4)) == 0:
            raw = raw[: int(draw.integers(0, len(raw)))]
        elif kind == 1:
            raw += b"x"
        elif kind == 2:
            raw[int(draw.integers(0, len(raw)))] ^= 4
        damaged += int(kind < 3)
        path.write_bytes(raw)
    reported = []
    prepare(job(), out, 1, lambda done, *_: reported.append(done))
    assert reported[0] == len(others) + 1 - damaged
    assert contents(out) == expected


def test_several_processes_give_the_same_bytes(out: Path) -> None:
    expected = contents(out)
    shutil.rmtree(out)
    prepare(job(), out, 2, quiet)
    assert contents(out) == expected


def test_a_crashing_utterance_is_skipped_and_tried_again_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes import nothing from the current directory."""
    here, out = tmp_path / "here", tmp_path / "out"
    here.mkdir()
    for name in ("struct", "filelock", "selectors"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    monkeypatch.chdir(here)
    sources = ("", "", "crash", "", "", "", "", "")
    prepare(job(sources), out, 2, quiet)
    assert not (tmp_path / "canary").exists()
    assert (out / "skipped.tsv").read_text().startswith("s2-02\t")
    assert len(read_speech(out).train.keys) == 4
    settings = job().settings
    assert finished(out, settings) is None
    prepare(job([""] * 8), out, 1, quiet)  # this time there is enough memory
    assert finished(out, settings) is not None
    assert (out / "skipped.tsv").read_text() == ""
    prepare(job([""] * 8), tmp_path / "whole", 1, quiet)
    assert read_speech(out).sha256 == read_speech(tmp_path / "whole").sha256


def test_the_lock_of_a_preparation_is_never_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with exclusive(out / ".lock", AssertionError()), pytest.raises(UserError, match="preparing"):
        prepare(job(), out, 1, quiet)  # another process is about to begin
    assert [path.name for path in out.iterdir()] == [".lock"]
    inode = (out / ".lock").stat().st_ino
    prepare(job(), out, 1, quiet)
    assert (out / ".lock").stat().st_ino == inode


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda p: replace(p, labels=p.labels[:-1]), r"alignment has \d+ frames, its features"),
        (lambda p: replace(p, features=p.features * np.float32("nan")), "not finite"),
        (lambda p: replace(p, features=p.features[:0], labels=p.labels[:0]), "no frames"),
    ],
)
def test_what_does_not_fit_is_skipped(
    tmp_path: Path, spoil: Callable[[Prepared], Prepared], said: str
) -> None:
    def work(utterance: Utterance) -> Prepared:
        result = made(utterance.key)
        return spoil(result) if utterance.key == "s0-03" else result

    prepare(replace(job(), work=work), tmp_path / "out", 1, quiet)
    (line,) = (tmp_path / "out" / "skipped.tsv").read_text().splitlines()
    key, reason = line.split("\t")
    assert key == "s0-03"
    assert re.search(said, reason)


def test_features_of_other_sizes(tmp_path: Path) -> None:
    def work(utterance: Utterance) -> Prepared:
        result = made(utterance.key)
        columns = 2 if utterance.key == "s0-03" else 3
        return replace(result, features=result.features[:, :columns])

    with pytest.raises(UserError, match="s0-03 has 2 features a frame, not 3"):
        prepare(replace(job(), work=work), tmp_path / "out", 1, quiet)


def test_nothing_left_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no utterance of the train set.*skipped\.tsv"):
        prepare(job(["bad", "", "bad"]), tmp_path / "out", 1, quiet)
    assert "s0-00\t" in (tmp_path / "out" / "skipped.tsv").read_text()
    assert not (tmp_path / "out" / "summary.json").exists()


def test_whose_directory_it_is(tmp_path: Path, out: Path) -> None:
    settings = job().settings
    summary = finished(out, settings)
    assert summary is not None
    assert summary["train"]["utterances"] == 4
    begun = tmp_path / "begun"
    with pytest.raises(KeyboardInterrupt):
        prepare(job(stop_at="s1-04"), begun, 1, quiet)
    assert (begun / SETTINGS).is_file()
    for path in (out, begun):
        with pytest.raises(UsageError, match="other settings: seed was 1, is now 2;"):
            finished(path, {**settings, "seed": 2})
    assert finished(tmp_path / "new", settings) is None
    (tmp_path / "empty").mkdir()
    assert finished(tmp_path / "empty", settings) is None
    (tmp_path / "empty" / "thesis.txt").write_text("mine")
    for path in (tmp_path / "empty", tmp_path / "empty" / "thesis.txt"):
        with pytest.raises(UsageError, match="--out"):
            finished(path, settings)


def test_a_moved_directory_reads_its_own_archives(tmp_path: Path, out: Path) -> None:
    before = read_speech(out)
    moved = tmp_path / "elsewhere" / "speech"
    shutil.copytree(out, moved)
    shutil.rmtree(out)
    corpus = read_speech(moved)
    assert corpus.sha256 == before.sha256
    np.testing.assert_array_equal(corpus.train.features(0), made("s0-00").features)


def test_the_hash_stands_for_the_data(tmp_path: Path, out: Path) -> None:
    before = read_speech(out).sha256
    other = replace(job(), source={"from": "there"})
    prepare(other, tmp_path / "same", 1, quiet)
    assert read_speech(tmp_path / "same").sha256 == before
    prepare(job([""] * 8), tmp_path / "more", 1, quiet)
    assert read_speech(tmp_path / "more").sha256 != before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", None),
        ("summary.json", "{"),
        ("summary.json", "[]"),
        ("summary.json", sealed_json({"format": "other"}).decode()),
        ("summary.json", '{"format": "normrnn speech 1"}'),
        ("summary.json", sealed_json({"format": FORMAT}).decode()),
        ("statistics.json", None),
        ("statistics.json", "{}"),
        ("statistics.json", sealed_json(OTHER).decode()),
        ("dev/checksums", None),
        ("dev/checksums", "s1-01 0 0\n"),
        ("train/feats.ark", None),
        ("dev/labels.ark", None),
        ("dev/feats.scp", None),
        ("dev/feats.scp", "s1-01 touch ran |\ns1-04 touch ran |\ns1-07 |\n"),
        ("dev/utt2num_frames", None),
        ("dev/utt2num_frames", ""),
        ("dev/utt2num_frames", "s1-01 many\ns1-04 2\ns1-07 2\n"),
        ("dev/utt2num_frames", "s1-01 3\n"),
    ],
)
def test_damaged_directories(out: Path, name: str, content: str | None) -> None:
    (out / name).unlink()
    if content is not None:
        (out / name).write_text(content)
    with pytest.raises(UserError, match=name.partition("/")[0]):
        read_speech(out)
    assert not Path("ran").exists()


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_speech(tmp_path / "none")


@pytest.mark.parametrize("frames", ["11", "99999999", "999999999999"])
def test_damage_found_while_reading(out: Path, frames: str) -> None:
    lengths = (out / "dev" / "utt2num_frames").read_text().splitlines()
    (out / "dev" / "utt2num_frames").write_text("\n".join([f"s1-01 {frames}", *lengths[1:]]))
    corpus = read_speech(out)
    for read in (corpus.dev.features, corpus.dev.labels):
        with pytest.raises(UserError, match=r"\.ark"):
            read(0)
    for name in ("feats.ark", "labels.ark"):
        archive = out / "train" / name
        archive.write_bytes(archive.read_bytes()[:-1])
    narrow = replace(corpus.train, classes=2)
    for read, index in ((narrow.features, 3), (narrow.labels, 3), (narrow.labels, 0)):
        with pytest.raises(UserError, match=r"\.ark"):
            read(index)
    (out / "train" / "feats.ark").unlink()
    with pytest.raises(UserError, match="No such file"):
        narrow.features(0)
