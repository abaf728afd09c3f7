"""Damage files one at a time and run the command that reads them.

    python -m benchmarks.damage --files 1000 [--seed 1] [--only NUMBER]

A file of a run, of prepared or given data, of a study or of an export is flipped, cut, garbled,
edited, replaced or forged. No command may print a stack trace, hang or crash, and nothing in a file
may be executed. A command that succeeds leaves what it leaves of the undamaged file, or prints a
further line on stderr. Files without a checksum (texts, Kaldi tables, exports, forged ones) may
change numbers; everything else holds for them too. Exits with 1 on any failure; `--only` repeats
one case and shows its output.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import pickle
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import kaldiio
import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.faults import FLAGS, same
from normrnn.cli import COMMANDS
from normrnn.cli import main as command_line
from normrnn.deploy.export import SUFFIXES, export
from normrnn.reporting.study import RecordedStudy, write
from normrnn.seal import BLANK, seal
from tests.tiny_runs import rows_of, write_texts
from tests.tiny_speech import write_speech

SECONDS = 60
"""A command that takes longer hangs."""
MEMORY = 3 << 30
"""More than any of these commands needs on top of what is loaded."""
STRANGE: tuple[Any, ...] = (
    None, True, 0, -1, 10**400, 1e308, -0.5, float("nan"), float("inf"), "", "x" * 5000, "\ud800",
    "../../etc/passwd", "rm -rf |", [], {}, [[]], {"a": {"b": []}},
)  # fmt: skip
Damage = Callable[[Path, random.Random, Path], bool]


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


def garble(path: Path, draw: random.Random, canary: Path) -> bool:  # noqa: ARG001
    """Flip a bit, or replace, zero, drop or repeat some bytes."""
    content = path.read_bytes()
    if not content:
        return False
    at, length = draw.randrange(len(content)), draw.choice((1, 16, 512))
    old = content[at : at + length]
    new = draw.choice((bytes([old[0] ^ 1 << draw.randrange(8)]) + old[1:], draw.randbytes(length),
                       bytes(length), b"", old * 2))  # fmt: skip
    path.write_bytes(content[:at] + new + content[at + length :])
    return new != old


def cut(path: Path, draw: random.Random, canary: Path) -> bool:  # noqa: ARG001
    """Remove the end, perhaps everything."""
    size = path.stat().st_size
    os.truncate(path, draw.choice((0, draw.randrange(size), size - 1)) if size else 0)
    return bool(size)


def edit(path: Path, draw: random.Random, canary: Path) -> bool:  # noqa: ARG001
    """Replace one value of a JSON file or line by one of another type or size."""
    before, line, after = _json_part(path, draw)
    if not line:
        return False
    path.write_text(before + json.dumps(_with_strange_value(json.loads(line), draw)) + after)
    return True


def forge(path: Path, draw: random.Random, canary: Path) -> bool:
    """Edit a value and compute the checksum anew."""
    content = bytearray(path.read_bytes())
    if path.suffix == ".safetensors":
        size = int.from_bytes(content[:8], "little")
        text = json.dumps(_with_strange_value(json.loads(content[8 : 8 + size]), draw)).encode()
        content[: 8 + size] = len(text).to_bytes(8, "little") + text
        path.write_bytes(content)
    elif b'"sha256"' not in content or not edit(path, draw, canary):
        return False
    content = bytearray(path.read_bytes())
    if found := re.search(rb'"sha256": ?"([0-9a-f]{64})"', content):
        content[found.start(1) : found.end(1)] = BLANK.encode()
        seal(content)
        path.write_bytes(content)
    return True


def point_elsewhere(path: Path, draw: random.Random, canary: Path) -> bool:
    """Let a line of a Kaldi table name a command, a device or another place."""
    if path.suffix != ".scp":
        return False
    lines = path.read_text().splitlines()
    at = draw.randrange(len(lines))
    key, _, rest = lines[at].partition(" ")
    places = f"touch {canary} |", f"| touch {canary}", f"`touch {canary}`", "/dev/zero", "-", ""
    lines[at] = f"{key} {draw.choice((*places, f'{rest}9', f'{rest}[0:1]', 'x' * 5000))}"
    path.write_text("\n".join(lines) + "\n")
    return True


def pickled(path: Path, draw: random.Random, canary: Path) -> bool:
    """Replace the file by a pickle that makes a file, bare, by torch.save or in an archive."""
    evil, saved = pickle.dumps(Evil(canary)), io.BytesIO()
    torch.save({"format": "normrnn checkpoint 2", "model": Evil(canary)}, saved)
    key = path.read_bytes().split(b" ", 1)[0][:40] + b" "
    path.write_bytes(draw.choice((evil, saved.getvalue(), key + b"PKL" + evil)))
    return True


def swap(path: Path, draw: random.Random, canary: Path) -> bool:  # noqa: ARG001
    """Give it the content of a file beside it."""
    others = [one for one in sorted(path.parent.iterdir()) if one.is_file() and one != path]
    content = draw.choice(others).read_bytes() if others else path.read_bytes()
    changed = content != path.read_bytes()
    path.write_bytes(content)
    return changed


def remove(path: Path, draw: random.Random, canary: Path) -> bool:  # noqa: ARG001
    """Remove it, or put a directory, a pipe, a device or a broken link in its place."""
    path.unlink()
    kind = draw.choice(("nothing", "directory", "pipe", "/dev/zero", "/no/such", path.name))
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "nothing":
        path.symlink_to(kind)
    return True


DAMAGES: tuple[Damage, ...] = (
    garble, garble, garble, cut, edit, forge, point_elsewhere, pickled, swap, remove,
)  # fmt: skip


def _json_part(path: Path, draw: random.Random) -> tuple[str, str, str]:
    """The text before a JSON value, the value, and the text after it."""
    lines = path.read_bytes().decode(errors="replace").splitlines(True)
    if path.suffix == ".json":
        lines = ["".join(lines)]
    elif path.suffix != ".jsonl":
        lines = []
    at = draw.randrange(len(lines)) if lines else 0
    try:
        json.loads(lines[at])
    except (ValueError, IndexError):
        return "", "", ""
    return "".join(lines[:at]), lines[at], "\n" + "".join(lines[at + 1 :])


def _with_strange_value(values: Any, draw: random.Random) -> Any:
    parent: Any = None
    place: Any = None
    at = values
    while isinstance(at, dict | list) and at and (parent is None or draw.random() < 0.8):
        parent, place = at, draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
        at = parent[place]
    if parent is None:
        return draw.choice(STRANGE)
    if draw.random() < 0.2:
        del parent[place]
    else:
        parent[place] = draw.choice(STRANGE)
    return values


def train(kind: str, out: str, epochs: int) -> list[str]:
    """The command that trains, or resumes, a run on text or speech."""
    flags = ["--data", kind, "--out", out, "--epochs", str(epochs)]
    return ["train", *FLAGS[kind].split(), *flags]


def run(command: list[str]) -> None:
    """Run a command that must succeed."""
    with contextlib.suppress(SystemExit):  # what it left out is missed later
        command_line(command)


def make_everything(root: Path) -> None:
    """Texts, speech and runs on them, a Kaldi directory, a study, exports."""
    os.chdir(root)
    Path("text").mkdir()
    write_texts(Path("text"))
    write_speech(Path("speech"))
    for kind in FLAGS:
        run(train(kind, f"{kind}-run", 2))
        run(train(kind, f"{kind}-run-stopped", 1))
    run([*train("text", "baseline", 2), "--norm", "none"])
    _kaldi(Path("kaldi"))
    arms = {norm: {"diverged": False, "loss": 1.0, "train": 1.0} for norm in ("none", "hidden")}
    settings = {"optimizer.lr": 0.1, "train.batch": 8}
    trial = {"state": "complete", "value": 1.0, "settings": settings, "arms": arms}
    plan = {"study": "s", "trials": 2, "config": {"recipe": "ptb-char"}, "space": {}}
    write(RecordedStudy(Path("study"), [{"trial": n, **trial} for n in range(2)], plan))
    for name in SUFFIXES:
        export(Path("text-run"), Path("exports") / name, name)


def _kaldi(root: Path) -> None:
    draw = np.random.default_rng(1)
    lengths = {f"{speaker}-{n}": int(draw.integers(4, 12)) for speaker in "ab" for n in (1, 2)}
    (root / "data").mkdir(parents=True)
    (root / "ali").mkdir()
    features = {key: draw.normal(size=(n, 4)).astype("f4") for key, n in lengths.items()}
    table = str(root / "data" / "feats.scp")
    kaldiio.save_ark(str(root / "data" / "raw.ark"), features, scp=table, compression_method=2)
    (root / "data" / "utt2spk").write_text("".join(f"{key} {key[0]}\n" for key in lengths))
    labels = {key: np.arange(n, dtype=np.int32) % 5 for key, n in lengths.items()}
    kaldiio.save_ark(str(root / "ali" / "pdf.ark"), labels)
    (root / "ali" / "num_pdfs").write_text("5\n")


def tensors(run: str) -> Callable[[], Any]:
    """Rows, weights and checkpoint of a run; seconds aside."""

    def read() -> Any:
        payload = torch.load(Path(run) / "checkpoint.pt", weights_only=True)
        weights = {path.name: load_file(path) for path in Path(run).glob("*.safetensors")}
        return {"rows": rows_of(Path(run)), "model": payload["model"], **weights}

    return read


def content(path: str) -> Callable[[], Any]:
    """The bytes of a file."""
    return Path(path).read_bytes


@dataclass(frozen=True)
class Scene:
    """A command, the files that it reads, and what it leaves."""

    command: list[str]
    reads: tuple[str, ...]
    """Patterns of the files that are damaged."""
    leaves: Callable[[], Any] = dict
    given: tuple[str, ...] = ()
    """Patterns of files that carry no checksum."""
    printed: bool = True
    """Whether the output is compared too."""


KALDI = ["prepare", "kaldi", "--data", "kaldi/data", "--ali", "kaldi/ali", "--processes", "1"]
KALDI += ["--dev-fraction", "0.5"]
SCENES = {
    **{
        f"resume {kind}": Scene(
            train(kind, f"{kind}-run-stopped", 2),
            (f"{kind}-run-stopped/*", f"{kind}/**/*"),
            tensors(f"{kind}-run-stopped"),
            printed=False,
        )
        for kind in FLAGS
    },
    **{
        f"evaluate {kind}": Scene(
            ["evaluate", f"{kind}-run", "--threads", "1"],
            (f"{kind}-run/*", f"{kind}/**/*"),
            content(f"{kind}-run/evaluation.json"),
        )
        for kind in FLAGS
    },
    "posteriors": Scene(
        ["posteriors", "speech-run", "--data", "speech/dev", "--out", "p", "--priors"],
        ("speech-run/*", "speech/dev/*"),
        lambda: [Path(name).read_bytes() for name in ("p.ark", "p.scp")],
        given=("feats.scp", "labels.*"),
    ),
    "score": Scene(
        ["score", "text-run", "text/valid.txt"], ("text-run/*", "text/*"), given=("*.txt",)
    ),
    "sample": Scene(["sample", "text-run", "--seed", "1"], ("text-run/*",)),
    "report": Scene(
        ["report", "text-run", "baseline", "text-run-stopped", "study", "--markdown"],
        ("text-run/*", "baseline/*", "text-run-stopped/*", "study/*"),
    ),
    "prepare": Scene([*KALDI, "--out", "out"], ("kaldi/*/*",), given=("*",)),
    "info of a run": Scene(["info", "text-run"], ("text-run/*",)),
    **{
        f"info of {name}": Scene(
            ["info", f"exports/{name}/model{suffix}"], (f"exports/{name}/*",), given=("*",)
        )
        for name, suffix in SUFFIXES.items()
    },
}  # fmt: skip


class Outcome(NamedTuple):
    """Exit code (None: it hung), output, and what was left."""

    code: int | None
    out: str
    err: str
    left: Any = None


class Workshop:
    """A directory with everything to damage, restored before each command."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pristine, self.work = folder, folder / "pristine", folder / "work"
        self.canary = folder / "canary"
        self.pristine.mkdir()
        code = self._forked(lambda: make_everything(self.pristine))
        assert code == 0, self._output()
        self.expected: dict[str, Outcome] = {}

    def restore(self) -> None:
        """Everything as it was."""
        os.chdir(self.folder)
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.pristine, self.work, symlinks=True)
        os.chdir(self.work)

    def run(self, scene: Scene) -> Outcome:
        """Run the command of a scene on what is there."""
        code = self._forked(lambda: command_line(scene.command))
        left = None
        if code == 0:
            try:
                left = scene.leaves()
            except Exception as error:
                left = repr(error)
        return Outcome(code, *self._output(), left)

    def undamaged(self, name: str) -> Outcome:
        """The outcome without damage."""
        if name not in self.expected:
            self.restore()
            self.expected[name] = self.run(SCENES[name])
            assert self.expected[name].code == 0, self.expected[name]
        return self.expected[name]

    def _forked(self, function: Callable[[], None]) -> int | None:
        sys.stdout.flush()
        process = os.fork()
        if not process:
            os.setsid()
            for stream, name in ((1, "out"), (2, "err")):
                file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, stream)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            code = 0
            try:
                function()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
                code = 99
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        handle = os.pidfd_open(process)
        ended = select.select([handle], [], [], SECONDS)[0]
        os.close(handle)
        if not ended:
            os.killpg(process, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        return code if ended else None

    def _output(self) -> tuple[str, str]:
        out, err = ((self.folder / name).read_text(errors="replace") for name in ("out", "err"))
        return out, err


def judge(scene: Scene, expected: Outcome, found: Outcome, given: bool) -> str:
    """What is wrong with an outcome; empty if nothing is."""
    if found.code is None:
        return "it hung"
    if "Traceback" in found.out + found.err or "unexpected error" in found.err:
        return "a stack trace"
    if found.code not in (0, 1, 2):
        return f"exit code {found.code}"
    if found.code:
        said = [line for line in found.err.splitlines() if line.startswith("normrnn: ")]
        return "" if len(said) == 1 else f"{len(said)} error messages instead of one"
    equal = same(found.left, expected.left) and (not scene.printed or found.out == expected.out)
    told = set(found.err.splitlines()) - set(expected.err.splitlines())
    return "" if given or equal or told else "something changed in silence"


def attempt(shop: Workshop, number: int, seed: int, show: bool = False) -> str:
    """Damage a file and run its command; what went wrong, or nothing."""
    draw = random.Random(f"{seed}/{number}")
    name = draw.choice(list(SCENES))
    scene, expected = SCENES[name], shop.undamaged(name)
    shop.restore()
    files = sorted({p for pattern in scene.reads for p in Path().glob(pattern) if p.is_file()})
    file, damage = draw.choice(files), draw.choice(DAMAGES)
    while not damage(file, draw, shop.canary):
        damage = draw.choice(DAMAGES)
    found = shop.run(scene)
    given = damage is forge or any(file.match(pattern) for pattern in scene.given)
    problem = judge(scene, expected, found, given)
    if shop.canary.exists():
        shop.canary.unlink()
        problem = "a command was run"
    if show or problem:
        print(f"{number}: {name}, {file}, {damage.__name__}: {problem}\n{found.err[-600:]}")
    return problem


def main() -> None:
    """Damage files and count failures."""
    parser = argparse.ArgumentParser(description="No damaged file may do harm or be believed.")
    parser.add_argument("--files", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="repeat this case alone")
    options = parser.parse_args()
    for name in COMMANDS:  # forked processes find everything loaded
        importlib.import_module(f"normrnn.commands.{name}")
    torch.set_num_threads(1)
    numbers = range(options.files) if options.only is None else [options.only]
    with tempfile.TemporaryDirectory(prefix="normrnn-damage-") as folder:
        os.environ["TMPDIR"] = folder
        shop = Workshop(Path(folder))
        show = options.only is not None
        failures = sum(bool(attempt(shop, n, options.seed, show)) for n in numbers)
        os.chdir("/")
    print(f"{len(numbers)} damaged files, seed {options.seed}: {failures} failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
