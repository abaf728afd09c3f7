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
from normrnn.speech.prepare.preparation import finished, prepare
from tests.made_speech import CLASSES, DIM, job, made

TRAIN, DEV = ["s0-00", "s0-03", "s0-06", "s2-05"], ["s1-01", "s1-04", "s1-07"]
OTHER = {"mean": [1], "variance": [1], "label_counts": [1]}


def contents(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    prepare(job(), tmp_path / "out", 1)
    return tmp_path / "out"


def test_the_files_are_kaldis_and_the_reader_gives_the_same(out: Path) -> None:
    names = {"feats.ark", "feats.scp", "labels.ark", "labels.scp", "utt2spk", "text", "index"}
    expected = {f"{split}/{name}" for split in ("train", "dev") for name in names}
    expected |= {"summary.json", "settings.json", "skipped.tsv", ".lock"}
    assert contents(out).keys() == expected
    assert (out / "skipped.tsv").read_text() == "s2-02\tit is made to fail\n"
    corpus = read_speech(out)
    assert (corpus.classes, corpus.dim) == (CLASSES, DIM)
    texts = {u.key: u.text for u in job().utterances}
    for name, keys, split in (("train", TRAIN, corpus.train), ("dev", DEV, corpus.dev)):
        feats = kaldiio.load_scp(str(out / name / "feats.scp"))
        labels = kaldiio.load_scp(str(out / name / "labels.scp"))
        assert list(feats) == list(labels) == split.keys == keys
        for table, values in (("utt2spk", {key: key[:2] for key in keys}), ("text", texts)):
            lines = "".join(f"{key} {values[key]}".rstrip() + "\n" for key in keys)
            assert (out / name / table).read_text() == lines
        for index, key in enumerate(keys):
            x, y = made(key)
            np.testing.assert_array_equal(feats[key], x)
            np.testing.assert_array_equal(labels[key], y)
            assert split.lengths[index] == len(y)
            for some in (slice(0, None), slice(2, 9), slice(2, 1)):
                read = split.features(index, some.start, some.stop)
                assert torch.equal(read, torch.from_numpy(x[some]))
                read = split.labels(index, some.start, some.stop)
                assert torch.equal(read, torch.from_numpy(y[some]).long())


def test_statistics_are_those_of_all_training_frames(out: Path) -> None:
    frames = np.concatenate([made(key)[0] for key in TRAIN]).astype(np.float64)
    labels = np.concatenate([made(key)[1] for key in TRAIN])
    summary = json.loads((out / "summary.json").read_text())
    stored = summary["statistics"]
    assert stored["frames"] == len(frames)
    np.testing.assert_allclose(stored["mean"], frames.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(stored["variance"], frames.var(axis=0), rtol=1e-9)
    assert stored["label_counts"] == np.bincount(labels, minlength=CLASSES).tolist()
    corpus = read_speech(out)
    np.testing.assert_allclose(corpus.mean, frames.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(corpus.variance, frames.var(axis=0), rtol=1e-6)
    assert corpus.label_counts.tolist() == stored["label_counts"]
    assert (summary["classes"], summary["dim"]) == (CLASSES, DIM)
    del summary["train"]["index"]
    assert summary["train"] == {
        "utterances": 4,
        "frames": len(frames),
        "hours": pytest.approx(len(frames) / 360_000),
        "speakers": 2,
        "classes_seen": len(set(labels.tolist())),
    }
    assert summary["skipped"] == {"utterances": 1, "share": 1 / 8}


@pytest.mark.parametrize("stop_at", ["s0-00", "s0-06", "s1-04", "s2-05"])
def test_a_stopped_preparation_resumes_to_the_same_bytes(
    out: Path, stop_at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = contents(out)
    shutil.rmtree(out)
    with pytest.raises(KeyboardInterrupt):
        prepare(job(stop_at=stop_at), out, 1)
    with pytest.raises(UserError, match=r"summary\.json"):
        read_speech(out)
    assert finished(out, job().settings) is None
    capsys.readouterr()
    prepare(job(), out, 1)
    kept = [*sorted(TRAIN + DEV), ""].index(stop_at)
    assert capsys.readouterr().err == f"{kept} of 8 utterances, 0 skipped\n"
    assert contents(out) == expected


@pytest.mark.parametrize("name", ["feats.ark", "labels.ark", "index"])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_damaged_is_prepared_again(
    out: Path, name: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut, grown or changed at random, as after a power failure."""
    expected = contents(out)
    shutil.rmtree(out)
    with pytest.raises(KeyboardInterrupt):
        prepare(job(stop_at="s2-05"), out, 1)
    draw, path = np.random.default_rng(seed), out / "train" / name
    raw = bytearray(path.read_bytes())
    if seed < 2:
        raw[int(draw.integers(20, len(raw)))] ^= 4
    path.write_bytes(raw[: int(draw.integers(0, len(raw)))] if seed == 2 else raw + b"x")
    capsys.readouterr()
    prepare(job(), out, 1)
    kept = int(capsys.readouterr().err.split()[0])
    assert kept == 6 if seed == 3 else 3 <= kept < 6
    assert contents(out) == expected


def test_several_processes_and_crashes(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes. The processes import nothing from the current directory."""
    expected, here = contents(out), tmp_path / "here"
    here.mkdir()
    for name in ("struct", "filelock", "selectors"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    monkeypatch.chdir(here)
    shutil.rmtree(out)
    crashing = [("crash" if u.text == "bad" else u.text) for u in job().utterances]
    utterances = [replace(u, text=t) for u, t in zip(job().utterances, crashing, strict=True)]
    prepare(replace(job(), utterances=utterances), out, 2)
    assert not (tmp_path / "canary").exists()
    assert (out / "skipped.tsv").read_text().startswith("s2-02\tthe process that worked on it")
    prepare(job(), out, 1)  # the crashed one is tried again
    assert contents(out) == expected


def test_the_lock_of_a_preparation_is_never_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with exclusive(out / ".lock", AssertionError()), pytest.raises(UserError, match="preparing"):
        prepare(job(), out, 1)  # another process is about to begin
    assert [path.name for path in out.iterdir()] == [".lock"]
    inode = (out / ".lock").stat().st_ino
    prepare(job(), out, 1)
    assert (out / ".lock").stat().st_ino == inode


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda x, y: (x, y[:-1]), r"alignment has \d+ frames, its features"),
        (lambda x, y: (x * np.float32("nan"), y), "not finite"),
        (lambda x, y: (x[:0], y[:0]), "no frames"),
    ],
)
def test_what_does_not_fit_is_skipped(
    tmp_path: Path, spoil: Callable[..., Prepared], said: str
) -> None:
    def work(utterance: Utterance) -> Prepared:
        result = made(utterance.key)
        return spoil(*result) if utterance.key == "s0-03" else result

    prepare(replace(job(), work=work), tmp_path / "out", 1)
    (line,) = (tmp_path / "out" / "skipped.tsv").read_text().splitlines()
    key, reason = line.split("\t")
    assert key == "s0-03"
    assert re.search(said, reason)


@pytest.mark.parametrize(("narrow", "said"), [("s0-03", "s0-03"), ("s1", "the dev set")])
def test_features_of_other_sizes(tmp_path: Path, narrow: str, said: str) -> None:
    def work(utterance: Utterance) -> Prepared:
        x, y = made(utterance.key)
        return x[:, : 2 if utterance.key.startswith(narrow) else 3], y

    with pytest.raises(UserError, match=f"{said} has 2 features a frame, not 3"):
        prepare(replace(job(), work=work), tmp_path / "out", 1)


def test_nothing_left_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no utterance of the train set.*skipped\.tsv"):
        prepare(job(["bad", "", "bad"]), tmp_path / "out", 1)
    assert "s0-00\t" in (tmp_path / "out" / "skipped.tsv").read_text()
    assert not (tmp_path / "out" / "summary.json").exists()


def test_whose_directory_it_is(tmp_path: Path, out: Path) -> None:
    settings, begun = job().settings, tmp_path / "begun"
    summary = finished(out, settings)
    assert summary is not None
    assert prepare(job(), out, 1) == summary  # by another process, just now
    with pytest.raises(KeyboardInterrupt):
        prepare(job(stop_at="s1-04"), begun, 1)
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


def test_the_hash_stands_for_the_data_wherever_it_is(tmp_path: Path, out: Path) -> None:
    before = read_speech(out).sha256
    moved = tmp_path / "elsewhere" / "speech"
    shutil.copytree(out, moved)
    shutil.rmtree(out)
    corpus = read_speech(moved)
    assert corpus.sha256 == before
    np.testing.assert_array_equal(corpus.train.features(0), made("s0-00")[0])
    prepare(job([""] * 8), tmp_path / "more", 1)
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
        (
            "summary.json",
            sealed_json({"format": FORMAT, "classes": 9, "dim": 1, "statistics": OTHER}).decode(),
        ),
        ("dev/index", None),
        ("dev/index", "s1-01 0 0\n"),
        ("", None),
    ],
)
def test_damaged_directories(out: Path, name: str, content: str | None) -> None:
    if content is not None:
        (out / name).write_text(content)
    elif name:
        (out / name).unlink()
    else:
        shutil.rmtree(out)
    with pytest.raises(UserError, match=name or "is not a directory"):
        read_speech(out)
