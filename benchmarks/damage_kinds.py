"""What can happen to a file: by accident, by a careless edit, and on purpose.

A kind takes a file, a random generator and a canary (a path that appears if anything is run),
changes the file, and says where. It returns None where it does not apply.
"""

import io
import json
import os
import pickle
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from normrnn.runs.note import START
from normrnn.seal import BLANK, is_sealed, seal

Kind = Callable[[Path, random.Random, Path], str | None]
STRANGE: tuple[Any, ...] = (
    None, True, 0, -1, 3, 10**400, 1e308, -0.5, float("nan"), float("inf"), "", "x" * 5000,
    "\ud800", "../../etc/passwd", "rm -rf |", [], {}, [[]], {"a": {"b": []}}, [1, "two", None],
)  # fmt: skip
SIZES = (-(2**31), -1, 0, 1, 255, 2**24, 2**31 - 1)


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


def flip(path: Path, draw: random.Random, _: Path) -> str | None:
    """One bit."""
    return _edited(path, draw, lambda content, at: [content[at] ^ 1 << draw.randrange(8)], 1)


def garble(path: Path, draw: random.Random, _: Path) -> str | None:
    """Some bytes are others."""
    length = draw.randint(1, 16)
    return _edited(path, draw, lambda *_: draw.randbytes(length), length)


def blank(path: Path, draw: random.Random, _: Path) -> str | None:
    """A block that never reached the disk."""
    length = draw.choice((8, 512, 4096))
    return _edited(path, draw, lambda *_: bytes(length), length)


def drop(path: Path, draw: random.Random, _: Path) -> str | None:
    """Some bytes are missing."""
    return _edited(path, draw, lambda *_: b"", draw.randint(1, 64))


def repeat(path: Path, draw: random.Random, _: Path) -> str | None:
    """Some bytes are there twice."""
    length = draw.randint(1, 64)
    return _edited(path, draw, lambda content, at: content[at : at + length] * 2, length)


def cut(path: Path, draw: random.Random, _: Path) -> str | None:
    """The end is missing, perhaps all."""
    size = path.stat().st_size
    at = draw.choice((0, draw.randrange(size), max(size - 1, 0))) if size else 0
    os.truncate(path, at)
    return f"at byte {at} of {size}" if size else None


def lines(path: Path, draw: random.Random, _: Path) -> str | None:
    """A line is missing, there twice, or in another place."""
    content = path.read_bytes()
    every = content.splitlines(True)
    if len(every) < 2 or b"\0" in content:
        return None
    at, to = draw.randrange(len(every)), draw.randrange(len(every))
    what = draw.choice(("missing", "twice", "elsewhere"))
    line = every[at] if what == "twice" else every.pop(at)
    if what != "missing":
        every.insert(to, line)
    path.write_bytes(b"".join(every))
    return f"line {at + 1} {what}"


def value(path: Path, draw: random.Random, _: Path) -> str | None:
    """One value of a JSON file, or of a line of it, is of another kind or beyond reason."""
    text = path.read_text(encoding="utf-8", errors="replace")
    before, line, after = _json_part(path, text, draw)
    if line is None:
        return None
    changed, where = _strange(json.loads(line), draw)
    path.write_text(before + json.dumps(changed) + after, encoding="utf-8")
    return where


def nested(path: Path, draw: random.Random, _: Path) -> str | None:
    """Brackets without end."""
    if path.suffix not in (".json", ".jsonl"):
        return None
    opening = draw.choice(("[", '{"a":'))
    path.write_text(opening * 100_000)
    return f"100,000 times {opening}"


def header(path: Path, draw: random.Random, _: Path) -> str | None:
    """An object of an archive promises another size, or is of another kind."""
    content = bytearray(path.read_bytes())
    objects = [found.start() for found in re.finditer(rb"\0B(?:[FDC]M\d? |\x04)", content)]
    if path.suffix != ".ark" or not objects:
        return None
    at = draw.choice(objects) + 2
    matrix = content[at : at + 1] != b"\x04"
    places = {True: (at + 4, at + 9), False: (at + 1,)}[matrix]
    if draw.random() < 0.3:
        content[at : at + 3] = draw.choice((b"DM ", b"CM ", b"FV ", b"PKL", b"NPY", b"\x08  "))
        what = "of another kind"
    else:
        size = draw.choice(SIZES)
        where = draw.choice(places)
        content[where : where + 4] = struct.pack("<i", size)
        what = f"size {size}"
    path.write_bytes(content)
    return f"object at {at}, {what}"


def target(path: Path, draw: random.Random, canary: Path) -> str | None:
    """A line of a table points at something else, or at a command."""
    if path.suffix != ".scp":
        return None
    every = path.read_text().splitlines()
    at = draw.randrange(len(every))
    key, _, rest = every[at].partition(" ")
    other = draw.choice(
        (
            f"touch {canary} |", f"| touch {canary}", f"x;touch {canary};|:2", f"touch {canary}|:0",
            f"`touch {canary}`", "/dev/zero", "/etc/passwd", "-", "", ".", f"{rest}[0:1]",
            f"{rest}9", f"{rest.rpartition(':')[0]}:-1", f"{rest}{'9' * 30}", "\0", "x" * 5000,
        )
    )  # fmt: skip
    every[at] = f"{key} {other}"
    path.write_text("\n".join(every) + "\n")
    return f"line {at + 1} is {every[at][:60]!r}"


def pickled(path: Path, draw: random.Random, canary: Path) -> str | None:
    """The file is an object that makes a file when it is unpickled, in one of several disguises."""
    evil = pickle.dumps(Evil(canary))
    saved = io.BytesIO()
    torch.save({"format": "normrnn checkpoint 2", "model": Evil(canary)}, saved)
    disguise = draw.choice(("bare", "torch", "PKL", "behind a key", "NPY"))
    key = path.read_bytes().split(b" ", 1)[0][:40] + b" "
    path.write_bytes(
        {
            "bare": evil,
            "torch": saved.getvalue(),
            "PKL": b"PKL" + evil,
            "behind a key": key + b"PKL" + evil,
            "NPY": key + b"NPY\x02\x00\x01" + evil,
        }[disguise]
    )
    return disguise


def swapped(path: Path, draw: random.Random, _: Path) -> str | None:
    """The content of a file beside it."""
    others = [other for other in sorted(path.parent.iterdir()) if other.is_file() and other != path]
    if not others:
        return None
    other = draw.choice(others)
    content = other.read_bytes()
    if content == path.read_bytes():
        return None
    path.write_bytes(content)
    return f"now what {other.name} is"


def gone(path: Path, _: random.Random, __: Path) -> str | None:
    """No such file."""
    path.unlink()
    return "missing"


def replaced(path: Path, draw: random.Random, _: Path) -> str | None:
    """Not a file at all, or one that never ends."""
    what = draw.choice(("directory", "pipe", "endless", "dangling", "loop"))
    path.unlink()
    if what == "directory":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"endless": "/dev/zero", "dangling": "/no/such", "loop": path.name}[what])
    return f"now a {what}"


def forged(path: Path, draw: random.Random, _: Path) -> str | None:
    """One value is strange, and the checksum is right all the same: somebody made it so."""
    if path.suffix == ".pt":
        return _forged_checkpoint(path, draw)
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        size = int.from_bytes(content[:8], "little")
        changed, where = _strange(json.loads(content[8 : 8 + size]), draw)
        text = json.dumps(changed).encode()
        new = bytearray(len(text).to_bytes(8, "little") + text + content[8 + size :])
    else:
        text = content.decode(errors="replace")
        before, line, after = _json_part(path, text, draw)
        if line is None or not _sealed(content, path):
            return None
        changed, where = _strange(json.loads(line), draw)
        new = bytearray((before + json.dumps(changed) + after).encode())
    _seal_again(new)
    path.write_bytes(new)
    return where


BY_CHANCE: tuple[Kind, ...] = (flip, flip, flip, garble, blank, drop, repeat, cut, lines)
BY_HAND: tuple[Kind, ...] = (value, nested, header, target, swapped, gone, replaced)
ON_PURPOSE: tuple[Kind, ...] = (pickled, forged)
KINDS = (*BY_CHANCE, *BY_HAND, *ON_PURPOSE)


def _edited(
    path: Path, draw: random.Random, new: Callable[[bytes, int], Any], length: int
) -> str | None:
    content = path.read_bytes()
    if not content:
        return None
    at = draw.randrange(len(content))
    changed = content[:at] + bytes(new(content, at)) + content[at + length :]
    if changed == content:
        return None
    path.write_bytes(changed)
    return f"at byte {at} of {len(content)}"


def _json_part(path: Path, text: str, draw: random.Random) -> tuple[str, str | None, str]:
    """What is before, the JSON itself, and what is behind: a file, or one line of several."""
    if path.suffix == ".json":
        return "", text if _is_json(text) else None, "\n"
    if path.suffix == ".jsonl":
        every = text.splitlines(True)
        at = draw.randrange(len(every)) if every else 0
        if every and _is_json(every[at]):
            return "".join(every[:at]), every[at], "\n" + "".join(every[at + 1 :])
    return "", None, ""


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _strange(values: Any, draw: random.Random) -> tuple[Any, str]:
    """The same with a strange value in a random place, and the name of the place."""
    path: list[Any] = []
    at: Any = values
    while isinstance(at, dict | list) and at and (not path or draw.random() < 0.8):
        path.append(draw.choice(list(at) if isinstance(at, dict) else range(len(at))))
        at = at[path[-1]]
    new = draw.choice(STRANGE)
    if not path:
        return new, f"everything is {str(new)[:30]}"
    parent = values
    for name in path[:-1]:
        parent = parent[name]
    if draw.random() < 0.2:
        del parent[path[-1]]
        return values, f"{path} missing"
    parent[path[-1]] = new
    return values, f"{path} is {str(new)[:30]!a}"


def _sealed(content: bytes, path: Path) -> bool:
    try:
        return is_sealed(content, path)
    except Exception:
        return False


def _seal_again(content: bytearray, start: int = 0) -> None:
    """Put the right hash where there is a place for one."""
    found = re.compile(rb'"sha256": ?"([0-9a-f]{64})"').search(content, start)
    if found:
        content[found.start(1) : found.end(1)] = BLANK.encode()
        seal(content, start)


def _forged_checkpoint(path: Path, draw: random.Random) -> str | None:
    """Of a checkpoint the tensors or the note; of an export, which has none, what it holds."""
    content = path.read_bytes()
    note = content.rfind(START)
    payload = torch.load(io.BytesIO(content), weights_only=True)
    said = json.loads(content[note:]) if note >= 0 else None
    if said is not None and draw.random() < 0.3:
        said, where = _strange(said, draw)
    else:
        payload, where = _strange(payload, draw)
    saved = io.BytesIO()
    torch.save(payload, saved)
    if said is None:
        path.write_bytes(saved.getvalue())
        return f"forged: {where}"
    comment = json.dumps(said).encode()
    start = saved.seek(-2, os.SEEK_END) + 2
    saved.write(len(comment).to_bytes(2, "little") + comment)
    new = bytearray(saved.getvalue())
    _seal_again(new, start)
    path.write_bytes(new)
    return f"forged: {where}"
