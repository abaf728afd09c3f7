"""Damaged and hostile files, one at a time, in front of the command that reads them.

    python -m benchmarks.damage --files 10000 [--seed 1] [--only NUMBER]

A file of a run, of prepared or given data, of a search or of the cache is flipped, cut, garbled,
edited, replaced or forged, and the command that reads it is run: most in a process forked from a
warm one, one in a hundred as a new process. No command may print a stack trace, hang or crash, no
command in a file may be run, and no number may change in silence: the command refuses in one
sentence, or says a word, or it says and leaves what it does of the undamaged file. Files that were
given to us (texts, Kaldi directories, sound) carry no checksum, and what is forged carries a right
one: of these numbers may change, and all the rest holds. Exits with 1 on any failure; `--only`
repeats one case and shows what was said.
"""

import argparse
import contextlib
import faulthandler
import importlib
import io
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.damage_kinds import KINDS, Kind, forged
from benchmarks.damage_scenes import ROOTS, SCENES, Scene
from benchmarks.faults import same
from normrnn.cli import COMMANDS
from normrnn.cli import main as command_line
from normrnn.errors import notice
from normrnn.ops.native import library

SECONDS = 30
"""After which a command hangs; tried twice, for the machine may be busy."""
MEMORY = 3 << 30
"""More than any of these commands needs on top of what is loaded."""
REAL = 100
"""One in so many is a new process."""
PROGRESS = 250
"""Files after which a word is said."""
A_WORD = re.compile(
    r"damaged|not what|no checksum|not verified|left out|is no |cannot be read|was changed"
    r"|going on from|is missing|lacks|other kernels|is empty|not recorded"
)


class Outcome(NamedTuple):
    """What came of a command: its exit code (None: it hung), what it said, what it left."""

    code: int | None
    out: str
    err: str
    left: Any = None


@dataclass
class Workshop:
    """Directories to damage, and how they were."""

    where: Path
    expected: dict[str, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.work, self.pristine = self.where / "work", self.where / "pristine"
        for folder in (self.work, self.pristine, self.where / "tmp"):
            folder.mkdir()
        self.canary = self.where / "canary"

    def set_up(self, scene: Scene) -> None:
        """Every directory of a scene as it was, and nothing else."""
        for name in scene.roots:
            if not (self.pristine / name).exists():
                self._build(name)
        self._lay_out(scene.roots)

    def _build(self, name: str) -> None:
        make, needs = ROOTS[name]
        for needed in needs:
            if not (self.pristine / needed).exists():
                self._build(needed)
        self._lay_out(needs)
        code = self._forked(lambda: make(self.work / name))
        assert code == 0, (code, *self._spoken())
        shutil.copytree(self.work / name, self.pristine / name, symlinks=True)

    def _lay_out(self, roots: Any) -> None:
        for old in self.work.iterdir():
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            elif old.name != "cc":
                old.unlink()
        for name in roots:
            shutil.copytree(self.pristine / name, self.work / name, symlinks=True)

    def run(self, scene: Scene, real: bool = False) -> Outcome:
        """The command of a scene as things are."""
        code = self._new_process(scene) if real else self._forked(lambda: self._called(scene))
        return Outcome(code, *self._spoken(), self._left(scene) if code == 0 else None)

    def _left(self, scene: Scene) -> Any:
        try:
            return scene.products()
        except Exception as error:
            return f"what it left cannot be read: {error}"

    def undamaged(self, name: str) -> Outcome:
        """What a scene comes to."""
        if name not in self.expected:
            scene = SCENES[name]
            if scene.warms:
                self._warm_up(scene)
            self.set_up(scene)
            self.expected[name] = self.run(scene)
        return self.expected[name]

    def _warm_up(self, scene: Scene) -> None:
        """Here, so that whatever is forked later finds its libraries loaded."""
        self.set_up(scene)
        aside = io.StringIO()
        quiet = contextlib.redirect_stdout(aside), contextlib.redirect_stderr(aside)
        with quiet[0], quiet[1], contextlib.suppress(SystemExit):
            command_line(scene.command)
        notice.cache_clear()

    def _called(self, scene: Scene) -> None:
        if scene.before is not None:
            scene.before(self.work)
        command_line(scene.command)

    def _forked(self, function: Callable[[], None]) -> int | None:
        sys.stdout.flush()
        process = os.fork()
        if not process:
            self._listened_to()
            _limit_memory()
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
        return _ended(process, SECONDS)

    def _new_process(self, scene: Scene) -> int | None:
        env = os.environ | {name: str(self.work / at) for name, at in scene.variables.items()}
        call = [sys.executable, "-m", "normrnn.cli", *scene.command]
        process = os.fork()
        if not process:
            self._listened_to()
            os.execve(sys.executable, call, env)
        return _ended(process, 2 * SECONDS)

    def _listened_to(self) -> None:
        """In a new process: a group of its own, and what it says goes to files."""
        os.setsid()
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(self.where / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)

    def _spoken(self) -> tuple[str, str]:
        out, err = ((self.where / name).read_text(errors="replace") for name in ("out", "err"))
        return out, err


@dataclass(frozen=True)
class Case:
    """One file, damaged in one way."""

    number: int
    scene: str
    file: Path
    kind: str
    detail: str
    outcome: Outcome
    problems: list[str]

    def __str__(self) -> str:
        told = f"{self.number}: {self.scene}, {self.file}, {self.kind} {self.detail}"
        return f"{told}: {'; '.join(self.problems) or 'fine'}"


def attempt(shop: Workshop, number: int, seed: int) -> Case:
    """Damage a file and see."""
    draw = random.Random(f"{seed}/{number}")
    name = draw.choices(list(SCENES), [scene.weight for scene in SCENES.values()])[0]
    scene, expected, real = SCENES[name], shop.undamaged(name), number % REAL == 0
    state = draw.getstate()
    for again in (False, True):
        draw.setstate(state)
        shop.set_up(scene)
        file = draw.choice(scene.files())
        kind, detail = _damaged(file, draw, shop.canary)
        outcome = shop.run(scene, real)
        if outcome.code is not None or again:
            break
    given = scene.is_given(file) or kind is forged
    problems = judged(scene, expected, outcome, given)
    if shop.canary.exists():
        problems.append("a command was run")
        shop.canary.unlink()
    return Case(number, name, file, kind.__name__, detail, outcome, problems)


def _damaged(file: Path, draw: random.Random, canary: Path) -> tuple[Kind, str]:
    while True:
        kind = draw.choice(KINDS)
        detail = kind(file, draw, canary)
        if detail is not None:
            return kind, detail


def judged(scene: Scene, expected: Outcome, outcome: Outcome, given: bool) -> list[str]:
    """What must not be."""
    code, out, err, left = outcome
    if code is None:
        return ["it hung"]
    if code < 0:
        return [f"it was ended by {signal.Signals(-code).name}"]
    if "Traceback" in out + err or "not foreseen" in out + err:
        return ["a stack trace"]
    if code not in (0, 1, 2):
        return [f"exit code {code}"]
    sentences = [line for line in err.splitlines() if line.startswith("normrnn: ")]
    if code:
        return [] if len(sentences) == 1 else [f"{len(sentences)} sentences, not one"]
    if given or (same(left, expected.left) and (not scene.said or out == expected.out)):
        return []
    new = set((out + err).splitlines()) - set((expected.out + expected.err).splitlines())
    return [] if A_WORD.search("\n".join(new)) else ["something changed in silence"]


def _ended(process: int, seconds: float) -> int | None:
    """Its exit code; None if it computed or waited for so long.

    Time in which the machine let others run does not count, nor does time in which we slept.
    """
    waiting = os.pidfd_open(process)
    counted, computed, ready = 0.0, 0.0, False
    while counted < seconds:
        begin = time.monotonic()
        ready = bool(select.select([waiting], [], [], 0.5)[0])
        if ready:
            break
        passed = min(time.monotonic() - begin, 1.0)
        runnable, used = _family(process)
        counted += max(used - computed, 0.0) if runnable else passed
        computed = used
    os.close(waiting)
    if not ready:
        os.killpg(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return code if ready else None


def _family(process: int) -> tuple[bool, float]:
    """Whether it or a process below it would run if it might, and the seconds they computed."""
    everybody = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            about = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            everybody[int(folder.name)] = about
    members = [process]
    for member in members:
        members += [child for child, about in everybody.items() if int(about[1]) == member]
    found = [everybody[member] for member in members if member in everybody]
    ticks = sum(int(count) for about in found for count in about[11:15])
    return any(about[0] in "RD" for about in found), ticks / os.sysconf("SC_CLK_TCK")


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _warm_up() -> None:
    for name in COMMANDS:
        importlib.import_module(f"normrnn.commands.{name}")
    for name in ("reporting.page", "search.worker", "analysis.gradients", "speech.posteriors"):
        importlib.import_module(f"normrnn.{name}")
    torch.set_num_threads(1)
    library.library()


def work(numbers: Sequence[int], seed: int, show: bool = False) -> tuple[Counter, list[str]]:
    """These cases: what came of them, and what failed."""
    where = Path(tempfile.mkdtemp(prefix="normrnn-damage-"))
    os.environ["TMPDIR"] = str(where / "tmp")  # for the stack traces of what is not foreseen
    shop = Workshop(where)
    os.chdir(shop.work)
    counts, failures = Counter(), []
    for done, number in enumerate(numbers, 1):
        case = attempt(shop, number, seed)
        counts["refused" if case.outcome.code else "the same, or a word was said"] += 1
        counts["in new processes"] += number % REAL == 0
        if case.problems:
            failures.append(str(case))
            print(f"FAILED {case}\n  {case.outcome.err.strip()[-300:]}", flush=True)
        elif show:
            print(case, *case.outcome[:3], sep="\n")
        if done % PROGRESS == 0:
            print(f"{done} of {len(numbers)} files, {len(failures)} failures", flush=True)
    os.chdir("/")
    shutil.rmtree(where)
    return counts, failures


def main() -> None:
    """Damage and judge."""
    parser = argparse.ArgumentParser(description="No damaged file may do harm or be believed.")
    parser.add_argument("--files", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", type=int, help="repeat this case alone")
    options = parser.parse_args()
    faulthandler.enable()
    _warm_up()
    begin = time.monotonic()
    if options.only is not None:
        counts, failures = work([options.only], options.seed, show=True)
    else:
        parts = [range(k, options.files, options.processes) for k in range(options.processes)]
        with ProcessPoolExecutor(options.processes, get_context("fork")) as pool:
            done = list(pool.map(work, parts, [options.seed] * len(parts)))
        counts = sum((counts for counts, _ in done), Counter())
        failures = [failure for _, failures in done for failure in failures]
    told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    total = 1 if options.only is not None else options.files
    print(
        f"{total} damaged files ({told}) in {time.monotonic() - begin:.0f} s,"
        f" seed {options.seed}: {len(failures)} failures"
    )
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
