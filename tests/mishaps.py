"""A process that trains, and to which something happens: `python -m tests.mishaps WHAT OUT DATA`.

The mishap comes at a given update, so that it always meets the same state.
"""

import contextlib
import resource
import subprocess
import sys
import time
from pathlib import Path

from normrnn.cli import guarded
from normrnn.config.base import OptimizerConfig
from normrnn.engine.callbacks import TensorBoard
from normrnn.engine.display import Status
from normrnn.engine.start import train
from normrnn.text.config import EvaluationConfig, LanguageConfig, ModelConfig, TrainConfig
from tests.tiny_runs import Silent

AT = 45
DAY = 86_400.0


def config(data: Path) -> LanguageConfig:
    """150 updates with checkpoints every ten."""
    return LanguageConfig(
        recipe="ptb-small",
        norm="frame",
        data=str(data),
        epochs=3,
        threads=1,
        model=ModelConfig(hidden=12, dropout=0.25, init=0.2),
        optimizer=OptimizerConfig(lr=0.7, clip_norm=0.5),
        train=TrainConfig(batch=8, steps=5, segments=2, log_every=7, checkpoint_every=10),
        evaluation=EvaluationConfig(train_tokens=300, recalibrate_windows=6),
    )


class Mishap(Silent):
    """Lets it happen."""

    def __init__(self, what: str, out: Path) -> None:
        super().__init__()
        self.what, self.out, self.now = what, out, time.time

    def update(self, status: Status) -> None:
        """At the right moment."""
        if status.updates == AT and self.what != "nothing":
            getattr(self, self.what)()
        if status.updates == 2 * AT and self.what == "clock":
            time.time = lambda: self.now() + 365 * DAY

    def full(self) -> None:
        """Not a byte is left on the disk."""
        with contextlib.suppress(OSError), (self.out / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def limit(self) -> None:
        """No file may grow beyond a few bytes; the system's own word for it is another."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))

    def remount(self) -> None:
        """The disk can be read only from now on; what is open stays open, so it is mounted over."""
        subprocess.run(["mount", "--bind", str(self.out), str(self.out)], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(self.out)], check=True)

    def chmod(self) -> None:
        """So can the directory."""
        self.out.chmod(0o555)

    def replace(self) -> None:
        """The directory is elsewhere, and a file where it was."""
        self.out.rename(self.out.with_name("elsewhere"))
        self.out.touch()

    def clock(self) -> None:
        """It is a day earlier; and, later, next year."""
        time.time = lambda: self.now() - DAY

    def wait(self) -> None:
        """Until somebody says go."""
        (self.out / "waiting").touch()
        while not (self.out / "go").exists():
            time.sleep(0.02)


def main(what: str, out: Path, data: Path) -> int:
    """Train."""
    mishap = Mishap(what, out)
    if what != "clock":
        train(config(data), out, mishap)
        return 0
    board = TensorBoard(out)
    train(config(data), out, mishap, callbacks=[board])
    board.close()
    return 0


if __name__ == "__main__":
    what, *places = sys.argv[1:]
    sys.exit(guarded(lambda places: main(what, *map(Path, places)), places))
