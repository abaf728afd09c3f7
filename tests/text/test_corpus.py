"""Texts from directories and files, as ids, against plain Python."""

import hashlib
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from normrnn.commands import prepare
from normrnn.errors import UserError
from normrnn.text import corpus as module
from normrnn.text.config import TextConfig
from normrnn.text.corpus import BUILTIN, Corpus, Vocabulary, read_corpus
from tests.commands.conftest import Cli, cli

__all__ = ["cli"]

SPLITS = ("train", "valid", "test")
LINES = [f"w{i % 7} ä{i * i % 31}  w{i % 3}\tend" if i % 5 else "" for i in range(400)]
LINES[390] = "a literal <eos> inside a line"


def symbols(lines: list[str], level: str) -> list[str]:
    return [s for line in lines for s in [*(line.split() if level == "word" else line), "<eos>"]]


def decoded(corpus: Corpus) -> dict[str, list[str]]:
    names = corpus.vocabulary.symbols
    return {split: [names[i] for i in getattr(corpus, split).tolist()] for split in SPLITS}


def read(path: Path, **options) -> Corpus:
    return read_corpus(str(path), TextConfig(**options))


def write(folder: Path, *texts: str, name: str = "{}.txt") -> Path:
    folder.mkdir(exist_ok=True)
    for split, text in zip(SPLITS, texts, strict=False):
        (folder / name.format(split)).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("level", ["word", "char"])
@pytest.mark.parametrize("limit", [0, 12])
@pytest.mark.parametrize(("ends", "last"), [("\n", True), ("\r\n", True), ("\n", False)])
def test_against_plain_python(
    level, limit: int, ends: str, last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 100)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    opened: list[Path] = []
    real = module.open_regular
    monkeypatch.setattr(module, "open_regular", lambda path: opened.append(path) or real(path))
    file, folder = tmp_path / "one.txt", tmp_path / "three"
    raw = b"\xef\xbb\xbf" + (ends.join(LINES) + ends * last).encode()
    file.write_bytes(raw)
    folder.mkdir()
    three = {"train": LINES[:302], "valid": LINES[302:], "test": LINES[352:]}
    hashes = ""
    for split, some in three.items():
        content = (ends.join(some) + ends * last).encode()
        (folder / f"{split}.txt").write_bytes(content)
        hashes += hashlib.sha256(content).hexdigest()
    one = {"train": LINES[:360], "valid": LINES[360:380], "test": LINES[380:]}
    cases = [(file, one, hashlib.sha256(raw).hexdigest())]
    cases.append((folder, three, hashlib.sha256(hashes.encode()).hexdigest()))
    for data, lines, sha256 in cases:
        opened.clear()
        corpus = read(data, level=level, max_vocab=limit)
        assert opened == ([file] if data == file else [folder / f"{s}.txt" for s in SPLITS])
        counts = Counter(symbols(lines["train"], level))
        ranked = sorted(counts, key=lambda s: (-counts[s], s))
        known = set(corpus.vocabulary.symbols)
        if limit:
            kept = [s for s in ranked if s != "<eos>"][: limit - 2]
            assert known == {"<eos>", "<unk>", *kept}
        else:
            assert corpus.vocabulary.symbols == (*ranked, "<unk>")
        for split, found in decoded(corpus).items():
            wanted = symbols(lines[split], level)
            if level == "char":
                wanted = [part for s in wanted for part in ([s] if len(s) == 1 else ["<eos>"])]
            assert found == [s if s in known else "<unk>" for s in wanted]
        assert corpus.train.dtype == torch.int32
        assert corpus.sha256 == sha256
        assert corpus.where == str(data)
        other = Vocabulary(("w1", "<eos>", "<unk>", "w"), level)
        again = read_corpus(str(data), TextConfig(), other)
        assert again.vocabulary is other
        wanted = symbols(lines["test"], level)
        assert decoded(again)["test"] == [s if s in other.symbols else "<unk>" for s in wanted]
    # The mapped file has no name, so that nothing is left behind by a process that is killed.
    assert not list((tmp_path / "temporary").iterdir())


def test_builtin_text_is_there() -> None:
    corpus = read_corpus(BUILTIN, TextConfig())
    assert len(corpus.train) > 20_000
    assert corpus.where == BUILTIN
    assert f"{len(corpus.vocabulary):,}" in corpus.summary


@pytest.mark.parametrize(
    ("content", "said", "options"),
    [
        (b"", "is empty", {}),
        (b" \n\n " * 60, "is empty", {}),
        (b"a b\n" * 30 + b"a\0b\n", "zero byte", {}),
        (b"\xff\xfea\0b\0", "UTF-16", {}),
        (b"good line\n" * 30 + b"caf\xe9\n", "line 31 .*0xe9", {}),
        (b"only\n" * 3, "3 lines", {}),
        (b"a b\n" * 30 + b"c" * 1000, "line 31 .*1,000", {}),
        (b"word\n" * 100, "one word", {}),
        (b"some more words\n" * 100, "one word", {"max_vocab": 3}),
        (b"a b\n" * 100, "max_vocab 2", {"max_vocab": 2}),
        (b"a b\n" * 100 + b"c\n", "'c'.*--text.unknown", {"unknown": False}),
        (b"ab\n" * 100 + "é\n".encode(), "'é'", {"unknown": False, "level": "char"}),
    ],
)
def test_bad_files(
    content: bytes, said: str, options: dict[str, object], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(module, "_LONGEST_LINE", 1000)
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(UserError, match=said):
        read(tmp_path / "bad.txt", **options)


def test_a_sparse_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    """It would take hours."""
    with (tmp_path / "image").open("wb") as file:
        file.write(b"a b\n")
        file.truncate(2**44 - 2**20)
    with pytest.raises(UserError, match="zero byte"):
        read(tmp_path / "image")


def test_missing_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"~no-such-user/text\.txt does not exist"):
        read_corpus("~no-such-user/text.txt", TextConfig())
    with pytest.raises(UserError, match="--data"):
        read_corpus("", TextConfig())
    with pytest.raises(UserError, match=r"ptb\.train\.txt"):
        read(tmp_path)
    write(tmp_path, "train text\n", "valid text\n")
    with pytest.raises(UserError, match=r"no test\.txt"):
        read(tmp_path)
    write(tmp_path, "stray\n", name="ptb.{}.txt")  # does not hide three complete ones
    write(tmp_path, "train text\n", "valid text\n", "test text\n")
    assert decoded(read(tmp_path))["train"] == ["train", "text", "<eos>"]


def test_characters_keep_indentation_and_blank_lines(tmp_path: Path) -> None:
    lines = ["def f(x):", "\treturn x ", "", "    y = 1", "  "] * 8
    text = "".join(f"{line}\n" for line in lines)
    (tmp_path / "code.txt").write_text(text)
    corpus = read(tmp_path / "code.txt", level="char")
    parts = [corpus.vocabulary.decode(getattr(corpus, s)) for s in SPLITS]
    assert "".join(parts) == text


def test_blanks_around_the_lines_of_penn_treebank_are_not_text(tmp_path: Path) -> None:
    ptb, plain = (
        write(tmp_path / name, *[" a b \n b a \n"] * 3, name=name)
        for name in ("ptb.{}.txt", "{}.txt")
    )
    corpus = read(ptb, level="char")
    assert corpus.vocabulary.decode(corpus.train.tolist()) == "a b\nb a\n"
    assert corpus.sha256 != read(plain, level="char").sha256
    assert read(ptb).sha256 == read(plain).sha256 == read(plain, level="char").sha256


def test_other_data_is_read_with_the_vocabulary_of_the_run(cli: Cli, tmp_path: Path) -> None:
    """Its training text lacks a character of its validation text, which the run knows."""
    words = ["the cab", "a zoo", "big fox", "dog hut"]
    every, few = ("\n".join(some * 60) + "\n" for some in (words, words[:1]))
    own, other = write(tmp_path / "own", *[every] * 3), write(tmp_path / "other", few, every, every)
    small = ["--model.hidden", 6, "--model.layers", 1, "--train.batch", 4, "--train.steps", 10]
    small += ["--evaluation.train-tokens", 0, "--epochs", 1, "--optimizer.lr", 0.01]
    run = tmp_path / "run"
    assert cli("train", "ptb-char", "--data", own, "--out", run, *small)[0] == 0
    code, said, err = cli("evaluate", run, "--data", other)
    assert (code, err) == (0, "")
    assert "is not what" in said


def test_files_of_penn_treebank_are_counted_and_missing_or_changed_ones_named(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = b" a b\n c <unk> d \n"
    hashes = dict.fromkeys(prepare.PTB_SHA256, hashlib.sha256(raw).hexdigest())
    monkeypatch.setattr(prepare, "PTB_SHA256", hashes)
    for name in hashes:
        (tmp_path / name).write_bytes(raw)
    code, said, _ = cli("prepare", "ptb", tmp_path)
    assert (code, said.count(": 7 tokens")) == (0, 3)
    (tmp_path / "ptb.test.txt").write_bytes(b"other words\n")
    for part in (r"ptb\.test\.txt.* 3 tokens", r"no ptb\.valid\.txt.*simple-examples\.tgz"):
        code, _, err = cli("prepare", "ptb", tmp_path)
        assert code == 1
        assert re.search(part, err)
        (tmp_path / "ptb.valid.txt").unlink(missing_ok=True)
