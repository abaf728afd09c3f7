"""Finding utterances, and splitting speakers."""

from pathlib import Path

import pytest

from normrnn.errors import UsageError, UserError
from normrnn.speech.prepare.job import Utterance, split_speakers
from normrnn.speech.prepare.librispeech import find_utterances, librispeech_job
from tests.sounds import TEXT, write_librispeech

KEYS = ["11-7-0000", "11-7-0001", "12-7-0000", "12-7-0001", "13-7-0000", "13-7-0001"]


@pytest.fixture
def subset(tmp_path: Path) -> Path:
    return write_librispeech(tmp_path / "data")


def test_all_three_layouts(subset: Path) -> None:
    for directory in (subset, subset.parent, subset.parent.parent):
        found = find_utterances(directory)
        assert [item.key for item in found] == KEYS
        assert [item.speaker for item in found] == [key[:2] for key in KEYS]
        assert {item.text for item in found} == {TEXT}
        assert all(item.path.is_file() for item in found)


def test_other_directories(tmp_path: Path, subset: Path) -> None:
    with pytest.raises(UserError, match="is not in LibriSpeech's layout"):
        find_utterances(subset / "11")
    with pytest.raises(UserError, match="is not a directory"):
        find_utterances(tmp_path / "none")


def test_the_same_utterance_twice(subset: Path) -> None:
    other = subset.parent / "dev-tiny" / "11" / "7"
    other.mkdir(parents=True)
    (other / "11-7.trans.txt").write_text("11-7-0001 AGAIN\n")
    with pytest.raises(UserError, match="11-7-0001 is twice"):
        find_utterances(subset.parent)
    assert len(find_utterances(subset)) == 6


def problems(directory: Path) -> dict[str, str]:
    job = librispeech_job(directory, "senone", None, None, 0.1)
    return {u.key: u.problem for u in job.utterances if u.problem}


def test_missing_halves(subset: Path) -> None:
    assert problems(subset) == {}
    folder = subset / "12" / "7"
    (folder / "12-7-0000.flac").unlink()
    (folder / "12-7.trans.txt").write_text("12-7-0000 AH\n\n")
    assert problems(subset) == {
        "12-7-0000": "it has no sound file (.flac)",
        "12-7-0001": "it has no transcript",
    }


def test_folders_as_people_have_them(subset: Path) -> None:
    """A tab behind the key, capital endings, what other systems leave behind, a line separator in
    the words, and a chapter without transcript, which is not one."""
    folder = subset / "12" / "7"
    (folder / "12-7.trans.txt").write_text("12-7-0000\tONE\u2028TWO\n12-7-0001  THREE \r\n")
    (folder / "12-7-0001.flac").rename(folder / "12-7-0001.FLAC")
    (folder / "._12-7.trans.txt").write_bytes(b"\xff\xfe")
    (folder / "._12-7-0000.flac").write_bytes(b"\0")
    (subset / "13" / "7" / "13-7.trans.txt").unlink()
    found = {item.key: item for item in find_utterances(subset)}
    assert list(found) == KEYS[:4]
    assert (found["12-7-0000"].text, found["12-7-0001"].text) == ("ONE TWO", "THREE")
    assert problems(subset) == {}


def test_settings_name_what_decides_the_bytes(subset: Path, tmp_path: Path) -> None:
    lexicon, listed = tmp_path / "lexicon", tmp_path / "dev"
    lexicon.write_text("aahh AA\n")
    listed.write_text("12\n")
    first = librispeech_job(subset, "senone", None, None, 0.1)
    assert first.classes == 5126
    assert first.settings == librispeech_job(subset.parent, "senone", None, None, 0.1).settings
    second = librispeech_job(subset, "phone", lexicon, listed, 0.1)
    assert second.classes == 126
    changed = {n for n in first.settings if first.settings[n] != second.settings.get(n)}
    assert changed == {"targets", "lexicon", "data"}
    assert {u.speaker for u in second.utterances if u.split == "dev"} == {"12"}
    sound = subset / "11" / "7" / "11-7-0000.flac"
    sound.write_bytes(sound.read_bytes() + b"x")
    third = librispeech_job(subset, "senone", None, None, 0.1)
    assert third.settings["data"] != first.settings["data"]
    # Other sound of the same size.
    sound.write_bytes(bytes(byte ^ 1 for byte in sound.read_bytes()))
    fourth = librispeech_job(subset, "senone", None, None, 0.1)
    assert fourth.settings["data"] != third.settings["data"]


def chosen(speakers: set[str], listed: Path | None, fraction: float) -> set[str]:
    utterances = [Utterance(name, name, "") for name in sorted(speakers)]
    return {u.speaker for u in split_speakers(utterances, listed, fraction) if u.split == "dev"}


@pytest.mark.parametrize(
    ("speakers", "fraction", "count"),
    [(2, 0.1, 1), (2, 0.9, 1), (10, 0.1, 1), (25, 0.1, 2), (40, 0.5, 20), (5, 0.99, 4)],
)
def test_fraction_of_the_speakers(speakers: int, fraction: float, count: int) -> None:
    assert len(chosen({str(n) for n in range(speakers)}, None, fraction)) == count


def test_the_choice_is_the_same_everywhere() -> None:
    """Smallest sha256 first: 3 is 4e07…, 2 is d473…, 1 is 6b86…."""
    assert chosen({"1", "2", "3"}, None, 0.1) == {"3"}
    assert chosen({"1", "2", "3"}, None, 0.6) == {"3", "1"}


def test_impossible_splits(tmp_path: Path) -> None:
    for names in ({"a"}, set()):
        with pytest.raises(UserError, match=f"of {len(names)} speakers"):
            chosen(names, None, 0.5)
    for fraction in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="--dev-fraction"):
            chosen({"a", "b"}, None, fraction)
    listed = tmp_path / "dev"
    for content, said in (("", "0 of 2"), ("a\nx\ny\n", "x, y"), ("a\nb\n", "2 of 2")):
        listed.write_text(content)
        with pytest.raises(UserError, match=said):
            chosen({"a", "b"}, listed, 0.1)
    listed.write_text(" b \n\n")
    assert chosen({"a", "b"}, listed, 0.1) == {"b"}
