"""Texts from directories and files, and clear words for what is no text."""

from pathlib import Path

import pytest

from normrnn.errors import UserError
from normrnn.text.config import TextConfig
from normrnn.text.corpus import build_corpus, open_texts
from normrnn.text.files import BUILTIN, read_texts


@pytest.mark.parametrize("pattern", ["{}.txt", "ptb.{}.txt"])
def test_directory_of_three_texts(tmp_path: Path, pattern: str) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / pattern.format(split)).write_text(f"a {split}\n\nb\n")
    texts = read_texts(str(tmp_path))
    assert texts.train == ["a train", "", "b"]
    assert texts.valid == ["a valid", "", "b"]
    assert texts.test == ["a test", "", "b"]


def test_one_file_is_split_by_lines_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("".join(f"line {i}\n" for i in range(200)))
    texts = read_texts(str(file))
    assert [len(texts.train), len(texts.valid), len(texts.test)] == [180, 10, 10]
    assert texts.train[-1] == "line 179"
    assert texts.valid[0] == "line 180"
    assert texts.test[0] == "line 190"
    assert "90/5/5" in texts.source


def test_windows_line_ends_and_byte_order_mark_are_not_words(tmp_path: Path) -> None:
    file = tmp_path / "dos.txt"
    file.write_bytes(b"\xef\xbb\xbf" + b"a b\r\n" * 40)
    assert set(read_texts(str(file)).train) == {"a b"}


def test_hash_tells_contents_apart(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x y\n" * 30)
    first = read_texts(str(file)).sha256
    assert read_texts(str(file)).sha256 == first
    file.write_text("x z\n" * 30)
    assert read_texts(str(file)).sha256 != first


def test_builtin_text_is_there() -> None:
    texts = read_texts(BUILTIN)
    assert sum(len(line.split()) for line in texts.train) > 20_000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\n ", "is empty"),
        (b"a\0b\n" * 30, "binary"),
        (b"caf\xe9\n" * 30, "not UTF-8 text: byte 0xe9 at offset 3"),
        (b"only\n" * 3, "3 lines"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    with pytest.raises(UserError, match=said) as raised:
        read_texts(str(file))
    assert str(file) in str(raised.value)


def test_missing_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_texts(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"~no-such-user/text\.txt does not exist"):
        read_texts("~no-such-user/text.txt")
    with pytest.raises(UserError, match=r"expected ptb\.train\.txt or train\.txt"):
        read_texts(str(tmp_path))
    (tmp_path / "train.txt").write_text("a b\n")
    with pytest.raises(UserError, match=r"no valid\.txt and no test\.txt"):
        read_texts(str(tmp_path))
    with pytest.raises(UserError, match="--data"):
        read_texts("")


def test_text_with_one_word_has_nothing_to_predict(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("word\n" * 100)
    with pytest.raises(UserError, match="nothing to predict"):
        build_corpus(read_texts(str(file)), TextConfig())
    file.write_text("some more words\n" * 100)
    with pytest.raises(UserError, match=r"only word within text\.max_vocab 3 is 'more'"):
        build_corpus(read_texts(str(file)), TextConfig(max_vocab=3))


def test_corpus_uses_the_training_vocabulary(tmp_path: Path) -> None:
    for split, text in (("train", "a b b\n"), ("valid", "b c\n"), ("test", "d a\n")):
        (tmp_path / f"{split}.txt").write_text(text)
    corpus = build_corpus(read_texts(str(tmp_path)), TextConfig())
    symbols = corpus.vocabulary.symbols
    assert [symbols[i] for i in corpus.valid] == ["b", "<unk>", "<eos>"]
    assert [symbols[i] for i in corpus.test] == ["<unk>", "a", "<eos>"]


def test_symbols_that_the_training_text_lacks(tmp_path: Path) -> None:
    for name, text in (("train", "abab\nab\n"), ("valid", "abé\n"), ("test", "ab\n")):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    texts = read_texts(str(tmp_path))
    with pytest.raises(UserError, match=r"'é', which the vocabulary lacks.*--text\.unknown"):
        build_corpus(texts, TextConfig(level="char", unknown=False))
    assert "<unk>" in build_corpus(texts, TextConfig(level="char")).vocabulary.symbols


def test_a_stray_text_hides_no_complete_three(tmp_path: Path) -> None:
    (tmp_path / "ptb.train.txt").write_text("stray\n")
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(f"{split} text\n")
    assert read_texts(str(tmp_path)).train == ["train text"]
    (tmp_path / "test.txt").unlink()
    with pytest.raises(UserError, match=r"has no ptb\.valid\.txt and no ptb\.test\.txt"):
        read_texts(str(tmp_path))


INDENTED = ["def f(x):", "\treturn x ", "", "    y = 1", "  "] * 8


@pytest.mark.parametrize("size", ["small", "large"])
def test_characters_keep_indentation_and_blank_lines(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if size == "large":
        monkeypatch.setattr("normrnn.text.large.LARGE", 10)
    text = "".join(f"{line}\n" for line in INDENTED)
    (tmp_path / "code.txt").write_text(text)
    texts = open_texts(str(tmp_path / "code.txt"))
    corpus = build_corpus(texts, TextConfig(level="char"))
    parts = [
        corpus.vocabulary.decode(ids.tolist()) for ids in (corpus.train, corpus.valid, corpus.test)
    ]
    assert "".join(parts) == text
    words = build_corpus(texts, TextConfig())
    assert len(words.train) == sum(len(line.split()) + 1 for line in INDENTED[:36])


@pytest.mark.parametrize("size", ["small", "large"])
def test_blanks_around_the_lines_of_penn_treebank_are_no_text(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if size == "large":
        monkeypatch.setattr("normrnn.text.large.LARGE", 10)
    for split in ("train", "valid", "test"):
        (tmp_path / f"ptb.{split}.txt").write_text(" a b \n b a \n")
    corpus = build_corpus(open_texts(str(tmp_path)), TextConfig(level="char"))
    assert corpus.vocabulary.decode(corpus.train.tolist()) == "a b\nb a\n"
