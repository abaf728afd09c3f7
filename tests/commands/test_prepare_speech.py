"""`prepare librispeech` and `prepare kaldi` as a user meets them."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import soundfile

from normrnn import extras
from normrnn.speech.corpus import read_speech
from tests.commands.conftest import Cli
from tests.sounds import RATE, sung, write_librispeech


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three speakers, two utterances each, and one of each kind of trouble."""
    root = tmp_path_factory.mktemp("corpus")
    folder = write_librispeech(root) / "13" / "7"
    sound = sung(130)
    troubles: dict[str, tuple[str, Callable[[Path], object]]] = {
        "rate": ("AH E OH", lambda p: soundfile.write(p, sound, 8000)),
        "silent": ("AH E OH", lambda p: soundfile.write(p, sound * 0, RATE)),
        "short": ("AH", lambda p: soundfile.write(p, sound[:300], RATE)),
        "garbage": ("AH E OH", lambda p: p.write_bytes(b"no sound")),
        "words": ("AH ZZYZX OH", lambda p: soundfile.write(p, sound, RATE)),
        "empty": ("", lambda p: soundfile.write(p, sound, RATE)),
        "toomany": ("AH E OH " * 60, lambda p: soundfile.write(p, sound, RATE)),
        "stereo": ("AH E OH", lambda p: soundfile.write(p, np.stack([sound, sound], 1), RATE)),
    }
    with (folder / "13-7.trans.txt").open("a") as file:
        for name, (text, write) in troubles.items():
            write(folder / f"13-7-{name}.flac")
            file.write(f"13-7-{name} {text}\n")
    return root


@pytest.fixture(scope="module")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The prepared directory and what was printed, in a process without a terminal."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    command = [sys.executable, "-m", "normrnn.cli", "prepare", "librispeech", str(corpus)]
    command += ["--out", str(out), "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 of 14 utterances, 0 skipped" in done.stderr
    assert not re.search("INFO|ERROR|Traceback", done.stderr)
    return out, done.stdout


def test_librispeech_end_to_end(prepared: tuple[Path, str]) -> None:
    out, printed = prepared
    speech = read_speech(out)
    assert (speech.classes, speech.dim) == (5126, 123)
    keys = [*speech.train.keys, *speech.dev.keys]
    assert sorted(keys) == [
        *(f"{speaker}-7-000{n}" for speaker in (11, 12, 13) for n in (0, 1)),
        "13-7-stereo",
    ]
    assert set(speech.train.lengths + speech.dev.lengths) == {173}
    assert len({key[:2] for key in speech.dev.keys}) == 1
    frames = 173 * len(speech.train.keys)
    assert f"{len(speech.train.keys)} utterances, {frames:,} frames, 2 speakers" in printed
    assert "skipped 7 utterances (50.0%)" in printed


def test_every_trouble_has_its_reason(prepared: tuple[Path, str]) -> None:
    lines = (prepared[0] / "skipped.tsv").read_text().splitlines()
    reasons = {key.rpartition("-")[2]: reason for key, reason in (x.split("\t") for x in lines)}
    garbage = reasons.pop("garbage")
    assert garbage.startswith("its sound cannot be read: ")
    assert reasons == {
        "rate": "its sound is FLAC at 8000 Hz; FLAC at 16000 Hz is needed",
        "silent": "it is silent: every sample is the same",
        "short": "it is shorter than one frame: 300 samples",
        "words": "no pronunciation of zzyzx: add it with --lexicon",
        "empty": "its transcript is empty, or has a zero byte",
        "toomany": "its words cannot be aligned with its sound",
    }


def test_starting_again(cli: Cli, corpus: Path, prepared: tuple[Path, str], tmp_path: Path) -> None:
    out, printed = prepared
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    code, again, err = cli("prepare", "librispeech", corpus, "--out", out)
    assert code == 0
    assert "is finished: nothing to do" in again
    assert printed.splitlines()[0] in again
    assert err == ""
    lexicon = tmp_path / "lexicon"
    lexicon.write_text("zzyzx IY\n")
    for option, said in (
        ("--targets=phone", "targets was senone"),
        (f"--lexicon={lexicon}", "now "),
    ):
        code, _, err = cli("prepare", "librispeech", corpus, "--out", out, option)
        assert code == 2
        assert said in err
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before


def test_phones_lexicon_and_dev_speakers(cli: Cli, corpus: Path, tmp_path: Path) -> None:
    lexicon, listed = tmp_path / "lexicon", tmp_path / "dev"
    lexicon.write_text("zzyzx IY\n")
    listed.write_text("12\n")
    out = tmp_path / "out"
    options = ["--targets", "phone", "--lexicon", lexicon, "--dev-speakers", listed]
    code, printed, _ = cli(
        "prepare", "librispeech", corpus, "--out", out, "--processes", "1", *options
    )
    assert code == 0
    speech = read_speech(out)
    assert speech.classes == 126
    assert speech.dev.keys == ["12-7-0000", "12-7-0001"]
    assert "13-7-words" in speech.train.keys
    assert "of 126 classes seen" in printed
    assert "skipped 6 utterances" in printed


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["librispeech"], 2, "DIR"),
        (["librispeech", "CORPUS"], 2, "--out"),
        (["librispeech", "CORPUS", "--out", "OUT", "--targets", "word"], 2, "word"),
        (["librispeech", "CORPUS", "--out", "OUT", "--dev-fraction", "2"], 2, "between 0 and 1"),
        (["librispeech", "CORPUS", "--out", "OUT", "--processes", "-1"], 2, "--processes"),
        (["librispeech", "OUT", "--out", "OUT"], 1, "OUT is not a directory"),
        (["librispeech", "HERE", "--out", "OUT"], 1, "not in LibriSpeech's layout"),
        (["librispeech", "CORPUS", "--out", "HERE"], 2, "is not empty and holds no preparation"),
        (["librispeech", "CORPUS", "--out", "OUT", "--lexicon", "NONE"], 1, "No such file"),
        (["librispeech", "CORPUS", "--out", "OUT", "--dev-speakers", "NONE"], 1, "No such file"),
        (["kaldi", "--data", "HERE", "--out", "OUT"], 2, "--ali"),
        (["kaldi", "--data", "HERE", "--ali", "OUT", "--out", "OUT"], 1, "OUT is not a directory"),
        (
            ["kaldi", "--data", "X", "--ali", "X", "--dev-data", "X", "--out", "OUT"],
            2,
            "--dev-data and --dev-ali go together",
        ),
    ],
)
def test_wrong_calls(
    cli: Cli, corpus: Path, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "thesis.txt").write_text("mine")
    places = {"CORPUS": corpus, "OUT": tmp_path / "OUT", "HERE": tmp_path / "here"}
    got, out, err = cli("prepare", *(places.get(a, a) for a in arguments))
    assert got == code
    assert said in (out + err).replace("\n", " ")
    assert not (tmp_path / "OUT").exists()
    assert (tmp_path / "here" / "thesis.txt").read_text() == "mine"


def test_missing_extra_is_named(
    cli: Cli, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kaldi_native_fbank", "soundfile", "pocketsphinx"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            code, _, err = cli("prepare", "librispeech", corpus, "--out", tmp_path / "out")
        assert code == 1
        assert f"this needs {name.replace('_', '-')}" in err
        assert extras.install_command("speech") in err
    assert not (tmp_path / "out").exists()


def test_kaldi_end_to_end(cli: Cli, tmp_path: Path) -> None:
    data, ali = tmp_path / "data", tmp_path / "ali"
    data.mkdir()
    ali.mkdir()
    feats = {f"u{n}": np.full((10 + n, 2), n, dtype=np.float32) for n in range(4)}
    kaldiio.save_ark(str(data / "raw.ark"), feats, scp=str(data / "feats.scp"))
    labels = {key: np.arange(len(values), dtype=np.int32) % 4 for key, values in feats.items()}
    kaldiio.save_ark(str(ali / "pdf.ark"), labels)
    (ali / "final.mdl").write_text("<NUMPDFS> 4 ")
    call = ["kaldi", "--data", data, "--ali", ali, "--deltas", "--processes", "1"]
    code, printed, _ = cli("prepare", *call, "--out", tmp_path / "out")
    assert code == 0
    assert "3 utterances" in printed
    assert "of 4 classes seen" in printed
    assert read_speech(tmp_path / "out").dim == 6


@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_on_a_terminal_keeps_what_is_done(tmp_path: Path, processes: str) -> None:
    """Progress is shown, Ctrl-C reaches every process, and no stack trace is seen."""
    corpus = write_librispeech(tmp_path / "corpus", [f"s{n}" for n in range(6)], each=4).parent
    out = tmp_path / "out"
    command = [sys.executable, "-m", "normrnn.cli", "prepare", "librispeech", str(corpus)]
    command += ["--out", str(out), "--processes", processes]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, command)
    shown, sent = b"", False
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if not sent and kept(out) > 1:
            os.write(terminal, b"\x03")
            sent = True
        if not select.select([terminal], [], [], 0.05)[0]:
            continue
        try:
            chunk = os.read(terminal, 4096)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        shown += chunk
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    text = shown.decode("utf-8", "replace")
    assert os.waitstatus_to_exitcode(status) == 130, text
    assert "Traceback" not in text
    assert "the same command resumes" in text
    assert " of 24 utterances" in text
    assert 0 < kept(out) < 24
    assert_resumes(command, out)


def kept(out: Path) -> int:
    """The number of utterances that are done."""
    return sum(len(path.read_bytes().splitlines()) for path in out.glob("*/index"))


def assert_resumes(command: list[str], out: Path) -> None:
    before = kept(out)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{before} of 24 utterances" in done.stderr
    assert len(read_speech(out).train.keys) == 20


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    corpus = write_librispeech(tmp_path / "corpus", [f"s{n}" for n in range(6)], each=4)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "normrnn.cli", "prepare", "librispeech", str(corpus)]
    command += ["--out", str(out), "--processes", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 120
    while not kept(out) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stderr is not None
    process.stderr.close()
    while _group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _group_lives(process.pid)
    assert kept(out) < 24
    assert_resumes(command, out)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
