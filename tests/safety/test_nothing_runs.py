"""Nothing in a data file is executed, whichever command reads it."""

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import torch

from normrnn.engine.ranks import Ranks
from normrnn.runs.store import TorchFileError
from normrnn.speech.archive import read_table
from tests.safety.conftest import Cli

COMMANDS = ["posteriors", "prepare"]
"""They read Kaldi's tables."""


def pairs(*cases: str) -> list[tuple[str, str]]:
    """Every case under every command."""
    return [(command, case) for command in COMMANDS for case in cases]


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


def hostile(kind: str, canary: Path) -> bytes:
    """An object that some reader of archives would run."""
    evil = pickle.dumps(Evil(canary))
    bare = {"PKL": b"PKL" + evil, "pickle": evil}
    return bare.get(kind, b"NPY\x02\x00\x01" + evil)


def spoil(data: Path, entry: Callable[[str, Path], str]) -> None:
    """Point the features of every utterance at what `entry` says for its key."""
    for split in ("train", "dev"):
        scp = data / split / "feats.scp"
        scp.write_text("".join(f"{key} {entry(key, data / split)}\n" for key in read_table(scp)))


def spoil_archive(data: Path, content: bytes) -> None:
    """Every utterance's features become that object."""

    def entry(key: str, folder: Path) -> str:
        path = folder / f"{key}.evil"
        path.write_bytes(f"{key} ".encode() + content)
        return f"{path}:{len(key) + 1}"

    spoil(data, entry)


@pytest.mark.parametrize(
    ("command", "what"),
    pairs("PKL", "pickle", "NPY", "touch {} |", "| touch {}", "x;touch {};|:2", "touch {}|:0", "p"),
)
def test_objects_commands_and_pipes(
    command: str, what: str, speech: Cli, speech_dir: Path, canary: Path, tmp_path: Path
) -> None:
    if what == "p":
        os.mkfifo(tmp_path / what)
        spoil(speech_dir, lambda *_: str(tmp_path / what))
    elif "touch" in what:
        spoil(speech_dir, lambda *_: what.format(canary))
    else:
        spoil_archive(speech_dir, hostile(what, canary))
    code, _, err = speech(command)
    assert (code, "normrnn: " in err) == (1, True)
    assert not canary.exists()


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("kind", ["PKL", "pickle", "NPY"])
def test_objects_in_a_prepared_directory(
    command: str, kind: str, speech: Cli, speech_dir: Path, canary: Path
) -> None:
    for path in speech_dir.glob("*/feats.ark"):
        path.write_bytes(path.read_bytes().partition(b" ")[0] + b" " + hostile(kind, canary))
    code, _, err = speech(command)
    assert (code, "normrnn: " in err) == (1, True)
    assert not canary.exists()


def test_the_planted_object_executes_when_unpickled(canary: Path, tmp_path: Path) -> None:
    """What these tests plant does run where a reader lets it."""
    (tmp_path / "evil").write_bytes(hostile("PKL", canary))
    with pytest.raises(Exception):  # noqa: B017  it is no array
        np.asarray(kaldiio.load_mat(str(tmp_path / "evil"))).reshape(2, 2)
    assert canary.exists()


@pytest.mark.parametrize(("command", "kind"), pairs("text", "binary"))
def test_no_message_repeats_a_file_that_a_table_names(
    command: str, kind: str, speech: Cli, speech_dir: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "private"
    secret.write_bytes((b"\0B" if kind == "binary" else b"") + b"hunter2 is the password\n")
    spoil(speech_dir, lambda *_: str(secret))
    code, out, err = speech(command)
    assert code == 1
    skipped = tmp_path / "out" / "skipped.tsv"  # `prepare` keeps the reason in a file
    said = out + err + (skipped.read_text() if skipped.exists() else "")
    assert not any(word in said for word in ("hunter2", "password"))


def test_what_other_processes_of_a_run_send(canary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    torch.save(Evil(canary), file)
    sent = iter([torch.tensor(len(file.getvalue())), torch.tensor([*file.getvalue()])])
    monkeypatch.setattr("torch.distributed.broadcast", lambda into, _: into.copy_(next(sent)))
    with pytest.raises(TorchFileError):
        Ranks(1, 2).from_first(lambda: None)
    assert next(sent, None) is None
    assert not canary.exists()


def test_settings_of_pictures_in_the_current_directory(tmp_path: Path) -> None:
    """A pipe would keep matplotlib waiting: it is not even opened."""
    os.mkfifo(tmp_path / "matplotlibrc")
    code = "from normrnn.reporting import pictures; import os; pictures.require_matplotlib();"
    code += " print(os.getcwd())"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n"), done.stderr
