"""Texts on disk: the ids of the text in memory, made once, safe to share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normrnn.errors import UserError
from normrnn.text import cache, large
from normrnn.text.config import TextConfig
from normrnn.text.corpus import Corpus, build_corpus, encode_texts, open_texts
from normrnn.text.files import read_texts
from tests.commands.conftest import Cli, cli

__all__ = ["cli"]

LINES = [f"w{i % 7} ä{i * i % 31}  w{i % 3}\tend" if i % 5 else "" for i in range(400)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every text is large, and its blocks are short."""
    monkeypatch.setattr(large, "LARGE", 0)
    monkeypatch.setattr(large, "BLOCK", 100)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return path


def same(a: Corpus, b: Corpus) -> None:
    assert a.vocabulary == b.vocabulary
    for split in ("train", "valid", "test"):
        assert getattr(a, split).tolist() == getattr(b, split).tolist()


@pytest.mark.parametrize("level", ["word", "char"])
@pytest.mark.parametrize("limit", [0, 12])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_ids_are_those_of_the_text_in_memory(
    level, limit: int, ends: str, last: bool, tmp_path: Path
) -> None:
    config = TextConfig(level=level, max_vocab=limit)
    file = tmp_path / "one.txt"
    file.write_bytes(b"\xef\xbb\xbf" + (ends.join(LINES) + ends * last).encode())
    folder = tmp_path / "three"
    folder.mkdir()
    for split, some in (("train", LINES[:300]), ("valid", LINES[300:]), ("test", LINES[350:])):
        (folder / f"{split}.txt").write_bytes((ends.join(some) + ends * last).encode())
    for data in (str(file), str(folder)):
        texts, found = read_texts(data), open_texts(data)
        assert isinstance(found, large.LargeTexts)
        assert (texts.sha256, texts.source) == (found.sha256, found.source)
        corpus = build_corpus(found, config)
        assert corpus.train.dtype == torch.int32
        same(build_corpus(texts, config), corpus)
        other = build_corpus(texts, TextConfig(level=level, max_vocab=5)).vocabulary
        same(encode_texts(texts, other), encode_texts(found, other, config))


def forbidden(*_: object) -> None:
    raise AssertionError("encoded again")


def test_it_is_encoded_once(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_corpus(open_texts(str(book)), TextConfig())
    monkeypatch.setattr(large, "_encode", forbidden)
    same(first, build_corpus(open_texts(str(book)), TextConfig()))
    same(first, encode_texts(open_texts(str(book)), first.vocabulary, TextConfig()))
    with pytest.raises(AssertionError, match="again"):
        build_corpus(open_texts(str(book)), TextConfig(max_vocab=5))
    book.write_text("other words\n" * 300)
    with pytest.raises(AssertionError, match="again"):
        build_corpus(open_texts(str(book)), TextConfig())


def test_a_text_that_changes_while_it_is_read_is_refused(book: Path) -> None:
    before, config = book.read_bytes(), TextConfig()
    found = open_texts(str(book))
    book.write_text("other words\n" * 300)
    with pytest.raises(UserError, match="changed while it was read"):
        build_corpus(found, config)
    book.write_bytes(before)  # nothing is kept under its hash that was not made of it
    same(build_corpus(read_texts(str(book)), config), build_corpus(open_texts(str(book)), config))


def test_a_damaged_entry_is_made_again(book: Path) -> None:
    def corpus() -> Corpus:
        return build_corpus(open_texts(str(book)), TextConfig())

    first = corpus()
    (found,) = (path for path in cache.folder().iterdir() if path.is_dir())
    for name in sorted(path.name for path in found.iterdir()):
        content = (found / name).read_bytes()
        (found / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
        same(first, corpus())
        assert (found / name).read_bytes() == content
        (found / name).unlink()
        same(first, corpus())
        (found / name).chmod(0o666)
        same(first, corpus())
        assert not (found / name).stat().st_mode & 0o22
    (found / "stranger").write_text("")
    same(first, corpus())


def test_what_a_killed_one_left_goes(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_seal", forbidden)
    monkeypatch.setattr(cache.shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(AssertionError):
        build_corpus(open_texts(str(book)), TextConfig())
    monkeypatch.undo()
    monkeypatch.setattr(large, "LARGE", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(book.parent / "cache"))
    assert list(cache.folder().glob(".*.tmp"))
    build_corpus(open_texts(str(book)), TextConfig())
    assert not list(cache.folder().glob(".*.tmp"))


def test_the_oldest_go_when_there_is_no_room(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LARGEST", 20_000)
    corpora = []
    for limit in range(4, 12):
        corpora.append(build_corpus(open_texts(str(book)), TextConfig(max_vocab=limit)))
        entries = [path for path in cache.folder().iterdir() if path.is_dir()]
        assert sum(f.stat().st_size for path in entries for f in path.iterdir()) <= 20_000
    # Who had mapped one that has gone still reads it.
    same(corpora[0], build_corpus(read_texts(str(book)), TextConfig(max_vocab=4)))


def test_a_folder_that_others_can_write_to_is_not_used(
    book: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.folder().mkdir(parents=True)
    cache.folder().chmod(0o777)
    same(
        build_corpus(read_texts(str(book)), TextConfig()),
        build_corpus(open_texts(str(book)), TextConfig()),
    )
    assert "others can write to" in caplog.text
    assert not list(cache.folder().iterdir())


def test_mistakes_are_named_as_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    cases = {
        b"good line\n" * 30 + b"caf\xe9\n": r"byte 0xe9 at offset 303",
        b"a b\n" * 30 + b"\0\n": "binary",
        b" \n" * 30: "is empty",
        b"one\n" * 3: "3 lines",
    }
    for content, said in cases.items():
        path.write_bytes(content)
        with pytest.raises(UserError, match=said):
            build_corpus(open_texts(str(path)), TextConfig())
    path.write_text("ab\n" * 100 + "é\n" * 5)
    with pytest.raises(UserError, match=r"'é', which the vocabulary lacks.*--text\.unknown"):
        build_corpus(open_texts(str(path)), TextConfig(level="char", unknown=False))


def test_processes_at_once_make_one_entry(book: Path) -> None:
    code = (
        "import sys; from normrnn.text import large, corpus, config\n"
        "large.LARGE = 0\n"
        "found = corpus.build_corpus(corpus.open_texts(sys.argv[1]), config.TextConfig())\n"
        "print(len(found.train))"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(book)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(3)
    ]
    assert len({process.communicate(timeout=120)[0] for process in started}) == 1
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len([path for path in cache.folder().iterdir() if path.is_dir()]) == 1


def test_a_sparse_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    """It would take hours."""
    with (tmp_path / "image").open("wb") as file:
        file.write(b"a b\n")
        file.truncate(2**44 - 2**20)
    with pytest.raises(UserError, match="binary"):
        open_texts(str(tmp_path / "image"))


@pytest.mark.parametrize("contents", ["[" * 100_000, "3", '{"format": "normrnn text 1"}', "[]"])
def test_a_damaged_list_of_contents(contents: str, book: Path) -> None:
    expected = build_corpus(read_texts(str(book)), TextConfig())
    build_corpus(open_texts(str(book)), TextConfig())
    (listed,) = cache.folder().glob("*/contents.json")
    listed.write_text(contents)
    same(expected, build_corpus(open_texts(str(book)), TextConfig()))
    assert "sha256" in listed.read_text()


def test_a_cache_that_cannot_be_written_to(
    book: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is there, and has become read-only: encoded for this time."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache.FileLock, "acquire", refuse)
    texts = open_texts(str(book))
    same(build_corpus(read_texts(str(book)), TextConfig()), build_corpus(texts, TextConfig()))
    assert "cannot be used (Permission denied): the text is encoded for this" in caplog.text


def test_other_data_is_read_with_the_runs_vocabulary_alone(cli: Cli, tmp_path: Path) -> None:
    """Its training text lacks a character of its validation text, which the run knows."""
    words = ["the cab", "a zoo", "big fox", "dog hut"]
    for name, train in (("own", words), ("other", words[:1])):
        for split, some in (("train", train), ("valid", words), ("test", words)):
            file = tmp_path / name / f"{split}.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_text("\n".join(some * 60) + "\n")
    small = ["--model.hidden", 6, "--model.layers", 1, "--train.batch", 4, "--train.steps", 10]
    small += ["--evaluation.train-tokens", 0, "--epochs", 1, "--optimizer.lr", 0.01]
    run = tmp_path / "run"
    assert cli("train", "ptb-char", "--data", tmp_path / "own", "--out", run, *small)[0] == 0
    code, said, err = cli("evaluate", run, "--data", tmp_path / "other")
    assert (code, err) == (0, "")
    assert "is not what" in said
