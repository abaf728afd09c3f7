"""Small files cost little memory and time, whatever they declare; output has no control codes."""

import io
import os
import pickle
import shutil
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import soundfile
import torch

from normrnn.cli import guarded
from normrnn.errors import UserError
from normrnn.experiments.jobs import say
from normrnn.files import read_json
from normrnn.runs.records import Note, append_note, read_metrics, write_note
from normrnn.runs.store import RunDirectory, TorchFileError, load_torch_file
from normrnn.speech.archive import Unusable, write_matrix, write_vector
from normrnn.speech.prepare.features import read_sound
from normrnn.speech.prepare.librispeech import librispeech_job
from normrnn.speech.prepare.preparation import prepare
from tests.made_speech import CLASSES, work
from tests.safety.conftest import Cli
from tests.sounds import RATE, sung, write_librispeech

STEERING = "\x1b[2J\x9b1m\u202e"
ESCAPED = "\\x1b[2J\\x9b1m\\u202e"


@contextmanager
def little_memory(limit: int = 100_000_000) -> Iterator[None]:
    """Fails if Python and NumPy reserve more than `limit` bytes inside the block."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit


def torch_file(pickled: bytes, storage: bytes = b"", version: int = 20, method: int = 0) -> bytes:
    """An archive as `torch.save` writes it, with this pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in (("data.pkl", pickled), ("version", b"3\n"), ("data/0", storage)):
            archive.writestr(f"archive/{name}", content)
    content = bytearray(buffer.getvalue())
    at = 0
    while (at := content.find(b"PK\x01\x02", at)) >= 0:
        content[at + 6 : at + 8] = struct.pack("<H", version)
        at += 4
    return bytes(content)


GIGABYTES = b"\x80\x02cbuiltins\nbytearray\n(J" + struct.pack("<i", 2**31 - 1) + b"tR."
HOSTILE = {
    "bytearray": torch_file(GIGABYTES),
    "Tensor": torch_file(GIGABYTES.replace(b"builtins\nbytearray", b"torch\nTensor")),
    "compressed": torch_file(b"\x80\x02." + b"\0" * 10**8, method=zipfile.ZIP_DEFLATED),
    "version 99": torch_file(b"\x80\x02." + b"\0" * 10**8, version=99, method=zipfile.ZIP_DEFLATED),
    "no archive": pickle.dumps({"format": "normrnn export 1"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_torch_files(name: str, tmp_path: Path) -> None:
    archive = io.BytesIO(HOSTILE[name])
    append_note(archive, Note({}))
    (tmp_path / "checkpoint.pt").write_bytes(archive.getvalue())
    with little_memory(), pytest.raises(UserError, match=r"checkpoint\.pt"):
        RunDirectory(tmp_path).read_checkpoint()


def test_what_torch_saves_is_read() -> None:
    shared, lstm = torch.arange(6.0).view(2, 3), torch.nn.LSTM(3, 4)
    plain = [1, -2, 2**40, 0.5, None, True, "é", (1, (2, 3)), (), {"a": {}}]
    tensors = [torch.ones(2, dtype=t) for t in (torch.int64, torch.bool, torch.bfloat16)]
    tensors += [shared, shared, shared.t(), torch.empty(0), *lstm.state_dict().values()]
    buffer = io.BytesIO()
    torch.save([plain, tensors, lstm.state_dict()], buffer)
    read = load_torch_file(buffer)
    assert read[0] == plain
    torch.testing.assert_close(read[1:], [tensors, lstm.state_dict()])
    buffer = io.BytesIO()
    torch.save({"model": torch.nn.Linear(1, 1)}, buffer)
    with pytest.raises(TorchFileError):
        load_torch_file(buffer)


def sparse(path: Path, start: bytes = b"") -> None:
    """A file of 3 GB that takes no room on the disk."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(3 * 10**9)


@pytest.mark.parametrize("name", ["config.json", "environment.json", "text"])
def test_sparse_files_are_not_read_whole(name: str, cli: Cli, run: Path) -> None:
    sparse(run / name, b"[")
    with little_memory():
        if name == "environment.json":
            with pytest.raises(UserError, match=name):
                read_json(run / name, list)
        else:
            code, _, err = cli(*(["score", run, run / name] if name == "text" else ["info", run]))
            assert (code, name in err) == (1, True)


def test_a_checkpoint_does_not_say_how_much_is_read(run: Path) -> None:
    write_note(run, Note({}, metrics_bytes=2**60, metrics_sha256="0" * 64))
    with little_memory():
        assert not read_metrics(run).verified


def test_score_and_evaluate_print_no_control_codes(
    cli: Cli, run: Path, text_dir: Path, tmp_path: Path
) -> None:
    data = text_dir.rename(tmp_path / f"data{STEERING}")
    (data / "valid.txt").write_text(f"a {STEERING} b\n" * 40)
    for command in (
        ["score", run, data / "valid.txt", "--lines"],
        ["evaluate", run, "--data", data, "--no-one-stream"],
    ):
        code, out, _ = cli(*command)
        assert code == 0
        assert f"data{ESCAPED}" in out
        assert not set(out) & set("\x1b\x9b\u202e")
        assert (f"a {ESCAPED} b\n" in out) == (command[0] == "score")


def test_whatever_a_command_prints_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    def command(_: list[str]) -> int:
        print(STEERING)
        print(STEERING, file=sys.stderr)
        raise UserError(STEERING)

    assert guarded(command, []) == 1
    assert capsys.readouterr() == (f"{ESCAPED}\n", f"{ESCAPED}\nnormrnn: {ESCAPED}\n")
    say(STEERING)  # the progress of `normrnn.compare`, where no command runs
    assert capsys.readouterr().out == f"{ESCAPED}\n"


def kaldi(folder: Path, *more: str | Path) -> list[str | Path]:
    """The arguments of `prepare kaldi` for a folder with data and alignments of two speakers."""
    data, ali = folder / "data", folder / "ali"
    data.mkdir()
    ali.mkdir()
    with (data / "f.ark").open("wb") as feats, (ali / "pdf.1.ark").open("wb") as labels:
        values = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
        offsets = {key: write_matrix(feats, key, values) for key in ("a-1", "b-1")}
        for key in offsets:
            write_vector(labels, key, np.arange(5) % 3)
    scp = "".join(f"{key} {data / 'f.ark'}:{at}\n" for key, at in offsets.items())
    (data / "feats.scp").write_text(scp)
    (data / "utt2spk").write_text("a-1 a\nb-1 b\n")
    out = folder / "out"
    more = (*more, "--processes", "1")
    return ["prepare", "kaldi", "--data", data, "--ali", ali, "--out", out, *more]


@pytest.mark.parametrize("pdfs", ["400000000", "0", "9" * 5000])
def test_numbers_of_classes(pdfs: str, cli: Cli, tmp_path: Path) -> None:
    command = kaldi(tmp_path)
    (tmp_path / "ali" / "final.mdl").write_text(f"<NUMPDFS> {pdfs} ")
    with little_memory():
        code, _, err = cli(*command)
    assert code == 2
    assert "--classes" in err


def flac(path: Path, samples: np.ndarray, total: int | None = None) -> Path:
    """A FLAC file whose header declares `total` samples."""
    soundfile.write(path, samples, RATE)
    if total is not None:
        content = bytearray(path.read_bytes())
        content[21] = content[21] & 0xF0 | total >> 32
        content[22:26] = (total & 0xFFFFFFFF).to_bytes(4, "big")
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("total", [None, 0, 2**33])
def test_flac_that_declares_or_holds_too_much(total: int | None, tmp_path: Path) -> None:
    samples = sung() if total else np.zeros(RATE * 1500, np.int16)
    path = flac(tmp_path / "a.flac", samples, total)
    with little_memory(300_000_000), pytest.raises(Unusable):
        read_sound(path)


def test_names_that_would_forge_a_line(tmp_path: Path) -> None:
    subset = write_librispeech(tmp_path / "data", ("11", "12", "13"), each=1)
    (subset / "13").rename(subset / "13\n11-7-0000 12")
    odd = subset / os.fsdecode(b"\xff\xfe") / "7"
    odd.mkdir(parents=True)
    (odd / "o.trans.txt").write_text("")
    shutil.copy(subset / "11" / "7" / "11-7-0000.flac", odd / "x\ny.flac")
    job = librispeech_job(subset, "senone", None, None, 0.1)
    job = replace(job, work=work, classes=CLASSES)
    prepare(job, tmp_path / "out", 1)
    tables = [tmp_path / "out" / split / "utt2spk" for split in ("train", "dev")]
    lines = "".join(path.read_text() for path in tables).splitlines()
    assert sorted(lines) == ["11-7-0000 11", "12-7-0000 12"]
    assert len((tmp_path / "out" / "skipped.tsv").read_text().splitlines()) == 2


def test_too_little_memory_is_no_unexpected_error(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        assert guarded(Mock(side_effect=error), []) == 1
        err = capsys.readouterr().err
        assert "memory" in err
        assert "normrnn-error" not in err
