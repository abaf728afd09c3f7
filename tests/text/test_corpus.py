"""Texts from directories and files, as ids, against plain Python."""

import hashlib
from collections import Counter
from pathlib import Path

import pytest
import torch

from normrnn.errors import UserError
from normrnn.text import corpus as module
from normrnn.text import files
from normrnn.text.config import TextConfig
from normrnn.text.corpus import Corpus, read_corpus
from normrnn.text.files import BUILTIN
from normrnn.text.vocabulary import Vocabulary
from tests.commands.conftest import Cli, cli

__all__ = ["cli"]

LINES = [f"w{i % 7} ä{i * i % 31}  w{i % 3}\tend" if i % 5 else "" for i in range(400)]
LINES[3] = "a literal <eos> inside a line"


@pytest.fixture(params=["whole", "small blocks"], autouse=True)
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small blocks":
        monkeypatch.setattr(files, "BLOCK", 100)
        monkeypatch.setattr(module, "BLOCK", 100)


def symbols(lines: list[str], level: str) -> list[str]:
    return [s for line in lines for s in [*(line.split() if level == "word" else line), "<eos>"]]


def decoded(corpus: Corpus) -> dict[str, list[str]]:
    return {
        split: [corpus.vocabulary.symbols[i] for i in getattr(corpus, split).tolist()]
        for split in ("train", "valid", "test")
    }


def read(path: Path, **options) -> Corpus:
    return read_corpus(str(path), TextConfig(**options))


@pytest.mark.parametrize("level", ["word", "char"])
@pytest.mark.parametrize("limit", [0, 12])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_against_plain_python(level, limit: int, ends: str, last: bool, tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    raw = b"\xef\xbb\xbf" + (ends.join(LINES) + ends * last).encode()
    file.write_bytes(raw)
    folder = tmp_path / "three"
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
        corpus = read(data, level=level, max_vocab=limit)
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
            assert found == [s if s in known else "<unk>" for s in wanted]
        assert corpus.train.dtype == torch.int32
        assert corpus.sha256 == sha256
        assert corpus.where == str(data)
        assert ("90/5/5" in corpus.source) == (data is file)
        other = Vocabulary(("w1", "<eos>", "<unk>", "w"), level)
        again = read_corpus(str(data), TextConfig(), other)
        assert again.vocabulary is other
        wanted = symbols(lines["test"], level)
        assert decoded(again)["test"] == [s if s in other.symbols else "<unk>" for s in wanted]


def test_the_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "book.txt").write_text("\n".join(LINES))
    opened = []
    real = files.open_regular
    monkeypatch.setattr(files, "open_regular", lambda path: opened.append(path) or real(path))
    read(tmp_path / "book.txt")
    assert opened == [tmp_path / "book.txt"]


def test_ids_stay_when_the_temporary_file_is_gone(tmp_path: Path, monkeypatch) -> None:
    """It has no name, so that nothing is left behind by a process that is killed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "book.txt").write_text("\n".join(LINES))
    corpus = read(tmp_path / "book.txt")
    assert not list((tmp_path / "temporary").iterdir())
    assert len(decoded(corpus)["train"]) == len(symbols(LINES[:360], "word"))


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "book.txt").write_text("\n".join(LINES))
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: full.open("wb", buffering=0))
    with pytest.raises(UserError, match="TMPDIR"):
        read(tmp_path / "book.txt")


def test_builtin_text_is_there() -> None:
    corpus = read_corpus(BUILTIN, TextConfig())
    assert len(corpus.train) > 20_000
    assert corpus.where == BUILTIN
    assert f"{len(corpus.vocabulary):,}" in corpus.summary


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\n " * 60, "is empty"),
        (b"a b\n" * 30 + b"a\0b\n", "binary"),
        (b"\xff\xfea\0b\0", "UTF-16"),
        (b"good line\n" * 30 + b"caf\xe9\n", "0xe9 at offset 303"),
        (b"only\n" * 3, "3 lines"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    with pytest.raises(UserError, match=said) as raised:
        read(file)
    assert str(file) in str(raised.value)


def test_a_sparse_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    """It would take hours."""
    with (tmp_path / "image").open("wb") as file:
        file.write(b"a b\n")
        file.truncate(2**44 - 2**20)
    with pytest.raises(UserError, match="binary"):
        read(tmp_path / "image")


def test_missing_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"~no-such-user/text\.txt does not exist"):
        read_corpus("~no-such-user/text.txt", TextConfig())
    with pytest.raises(UserError, match=r"ptb\.train\.txt or train\.txt"):
        read(tmp_path)
    (tmp_path / "train.txt").write_text("a b\n")
    with pytest.raises(UserError, match=r"valid\.txt and no test\.txt"):
        read(tmp_path)
    with pytest.raises(UserError, match="--data"):
        read_corpus("", TextConfig())


def test_text_with_one_word_has_nothing_to_predict(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("word\n" * 100)
    with pytest.raises(UserError, match="'word'"):
        read(file)
    file.write_text("some more words\n" * 100)
    with pytest.raises(UserError, match=r"max_vocab 3 is 'more'"):
        read(file, max_vocab=3)


def test_symbols_that_the_training_text_lacks(tmp_path: Path) -> None:
    for name, text in (("train", "abab\nab\n"), ("valid", "abé\n"), ("test", "ab\n")):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    for level, symbol in (("char", "é"), ("word", "abé")):
        with pytest.raises(UserError, match=rf"'{symbol}'.*--text\.unknown"):
            read(tmp_path, level=level, unknown=False)
    assert "<unk>" in read(tmp_path, level="char").vocabulary.symbols


def test_a_stray_text_does_not_hide_three_complete_ones(tmp_path: Path) -> None:
    (tmp_path / "ptb.train.txt").write_text("stray\n")
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(f"{split} text\n")
    assert decoded(read(tmp_path))["train"] == ["train", "text", "<eos>"]
    (tmp_path / "test.txt").unlink()
    with pytest.raises(UserError, match=r"ptb\.valid\.txt and no ptb\.test\.txt"):
        read(tmp_path)


def test_characters_keep_indentation_and_blank_lines(tmp_path: Path) -> None:
    lines = ["def f(x):", "\treturn x ", "", "    y = 1", "  "] * 8
    text = "".join(f"{line}\n" for line in lines)
    (tmp_path / "code.txt").write_text(text)
    corpus = read(tmp_path / "code.txt", level="char")
    parts = [corpus.vocabulary.decode(getattr(corpus, s)) for s in ("train", "valid", "test")]
    assert "".join(parts) == text


def test_blanks_around_the_lines_of_penn_treebank_are_not_text(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"ptb.{split}.txt").write_text(" a b \n b a \n")
    corpus = read(tmp_path, level="char")
    assert corpus.vocabulary.decode(corpus.train.tolist()) == "a b\nb a\n"


def test_other_data_is_read_with_the_vocabulary_of_the_run(cli: Cli, tmp_path: Path) -> None:
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
