"""Arms of a comparison: processes, refusals, interruptions."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import normrnn
from normrnn.config.base import checked_norms
from normrnn.config.jsonio import to_dict
from normrnn.errors import UsageError, UserError
from normrnn.experiments.jobs import Progress, RunJob, plan, run_jobs
from normrnn.extras import install_command
from normrnn.recipes import read_config, recipe
from normrnn.runs.records import DIVERGED
from normrnn.text.config import LanguageConfig
from tests.commands.conftest import Cli
from tests.tiny_runs import run_tiny

SMALL = ["--model.hidden", "8", "--train.batch", "8", "--train.steps", "5", "--epochs", "1"]


def test_plan_has_one_arm_per_norm_and_seed(tiny: LanguageConfig, tmp_path: Path) -> None:
    arms = plan(replace(tiny, seed=3), ["none", "frame"], 2, tmp_path)
    assert [arm.out.name for arm in arms] == ["none-3", "frame-3", "none-4", "frame-4"]
    assert [(arm.config.norm, arm.config.seed) for arm in arms[1:3]] == [("frame", 3), ("none", 4)]
    assert arms[1].label == "frame, seed 3"


def test_compare_from_the_command_line_and_once_more(
    cli: Cli, text_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mk[" / "x]" / "[bold]z"
    settings = ["--model.hidden", "12", "--train.batch", "8", "--train.steps", "5"]
    settings += ["--epochs", "2", "--train.log-every", "5", "--evaluation.train-tokens", "0"]
    given = ["compare", "ptb-small", "--data", text_dir, "--out", out, *settings]
    code, shown, _ = cli(*given)
    assert code == 0
    for name in ("none-1", "frame-1"):
        config = json.loads((out / name / "config.json").read_text())
        assert config["norm"] == name.split("-")[0]
        assert config["threads"] == 1
    assert "test perplexity" in shown
    assert "one seed" in shown
    for name in ("none, seed 1", "frame, seed 1"):
        assert f"{name}: epoch 2/2" in shown
    assert "  train " not in shown
    for words in ("vocabulary 26", "0.0% <unk>", "2 of 2 runs done"):
        assert words in shown
    assert f"report: {out / 'report.html'}\n" in shown
    lines = shown.splitlines()
    assert not [line for line in lines if line.endswith(" ")]
    assert "(running)" not in "".join(line for line in lines if line.startswith("none"))

    # What has ended is read, and no process is started for it.
    started: list[RunJob] = []

    def start(job: RunJob) -> None:
        started.append(job)
        job.child = Sleeper(0, 1)  # type: ignore[assignment]

    monkeypatch.setattr(RunJob, "start", start)
    code, again, _ = cli(*given)
    assert (code, started) == (0, [])
    assert again.splitlines()[-3:] == shown.splitlines()[-3:]
    (out / "frame-1" / DIVERGED).write_text("the loss is inf at update 2")
    code, again, _ = cli(*given)
    assert (code, started) == (0, [])
    assert "frame, seed 1 diverged: the loss is inf at update 2" in again
    cli(*given, "--epochs", "3")
    assert [job.config.norm for job in started] == ["none", "frame"]
    with (out / "none-1" / "metrics.jsonl").open("a") as file:
        file.write('{"torn')
    code, _, err = cli(*given)
    assert (code, "none-1" in err, len(started)) == (1, True, 2)


def test_a_comparison_without_matplotlib_has_no_pictures(
    cli: Cli, text_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "out"
    code, said, _ = cli("compare", "ptb-small", "--data", text_dir, "--out", out, *SMALL)
    assert code == 0
    assert said.count(install_command("report")) == 2  # before the runs, and at the end
    assert {path.name for path in out.iterdir()} == {"none-1", "frame-1", "report.html"}
    assert "<img" not in (out / "report.html").read_text()
    assert cli("report", out)[1].count(install_command("report")) == 1


@pytest.mark.parametrize("command", ["compare", "search"])
def test_what_is_missing_is_said_before_any_run(
    cli: Cli, text_dir: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The typo is in --data; later the package, or the text is too short."""
    out, space = tmp_path / "out", tmp_path / "space.json"
    space.write_text('{"optimizer.lr": [0.1, 1.0]}')
    given = [command, "ptb-small", "--out", out]
    given += ["--space", space] if command == "search" else []
    code, _, err = cli(*given, "--data", tmp_path / "typo")
    assert (code, "typo does not exist" in err) == (1, True)
    if command == "compare":
        code, _, err = cli(*given, "--data", text_dir, "--train.batch", "5000")
        assert (code, "5000 streams" in err) == (1, True)
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        code, _, err = cli(*given, "--data", text_dir, "--tensorboard")
        assert (code, install_command("report") in err) == (1, True)
    assert not out.exists()
    if command == "compare":
        out.mkdir()
        (out / "report.html").write_text("<h1>mine</h1>")
        code, _, err = cli(*given, "--data", text_dir)
        assert (code, "report.html exists and is not a report" in err) == (1, True)
        assert (out / "report.html").read_text() == "<h1>mine</h1>"


def test_norms_in_every_spelling(tmp_path: Path) -> None:
    for norms in ("none,frame", "None,frame", (None, "frame"), ["none", "frame"]):
        assert checked_norms(norms, "norms") == ("none", "frame")
    for norm in (None, "None", "none"):
        assert read_config({**to_dict(recipe("ptb-small")), "norm": norm}).norm == "none"
    with pytest.raises(UserError, match="nowhere"):
        normrnn.compare("ptb-small", norms=(None, "frame"), data=tmp_path / "nowhere")


def test_arms_run_in_any_thread(tiny: LanguageConfig, tmp_path: Path) -> None:
    """A notebook or a server may call from another than the first; one that fails is named."""
    job, failing = (RunJob(tmp_path / f"{n}-1", replace(tiny, epochs=1)) for n in ("a", "b"))
    thread = threading.Thread(target=run_jobs, args=([job], 1, 0.05))
    thread.start()
    thread.join()
    assert job.code == 0
    (Path(tiny.data) / "valid.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"b-1 failed: .*valid\.txt: .*not UTF-8"):
        run_jobs([failing], 1, interval=0.05)


class Sleeper:
    """A child that ends when it was looked at often enough."""

    def __init__(self, polls: int = 9, at_last: int = 0) -> None:
        self.polls, self.at_last = polls, at_last

    @property
    def code(self) -> int | None:
        self.polls -= 1
        return self.at_last if self.polls < 0 else None

    def wait(self, seconds: float | None = None) -> None:
        pass

    terminate = kill = wait

    def failure_reason(self) -> str:
        return "the disk is full"


def test_failing_arm_is_told_while_others_run(
    cli: Cli, text_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after hours; and again at the end, as the reason why there is no comparison."""

    def start(arm: RunJob) -> None:
        child = Sleeper(0, 1) if arm.config.norm == "none" else Sleeper(30)
        arm.child = child  # type: ignore[assignment]

    monkeypatch.setattr(RunJob, "start", start)
    given = ("compare", "ptb-small", "--data", text_dir, "--workers", 2, "--out", tmp_path / "out")
    code, said, error = cli(*given)
    assert code == 1
    assert said.count("none, seed 1 failed: the disk is full; the other runs continue") == 1
    assert "none-1 failed: the disk is full\n" in error


def test_never_more_processes_than_jobs(
    tiny: LanguageConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0

    def start(arm: RunJob) -> None:
        nonlocal most
        arm.child = Sleeper()  # type: ignore[assignment]
        most = max(most, sum(a.child is not None and a.code is None for a in arms))

    monkeypatch.setattr(RunJob, "start", start)
    arms = plan(tiny, ["none", "frame"], 3, tmp_path)
    run_jobs(arms, 2, interval=0.001)
    assert most == 2
    assert [arm.code for arm in arms] == [0] * 6


def test_runs_done_and_time_left(
    tiny: LanguageConfig, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = plan(replace(tiny, epochs=4), ["none", "frame"], 3, tmp_path)
    arms[0].ended = 0  # earlier: says nothing about the speed
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    progress = Progress(arms)
    progress.show()  # nothing new: prints nothing
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    arms[1].out.mkdir()
    row = {"split": "train", "epoch": 3, "updates": 1, "loss": 1.0, "count": 1, "seconds": 1.0}
    (arms[1].out / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    progress.show()
    for arm in arms[1:]:
        arm.ended = 0
        progress.show()
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == "2 of 6 runs done, about 0:06:40 left"
    assert (len(shown), shown[-1]) == (6, "6 of 6 runs done")
    lines: list[str] = []  # of a notebook, which shows the last
    line = SimpleNamespace(update=lambda data, **_: lines.append(data["text/plain"]))
    display = SimpleNamespace(display=lambda *_, **__: line)
    module = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=0), display=display)
    monkeypatch.setitem(sys.modules, "IPython", module)
    Progress([replace(arms[0], ended=None), *arms[1:]]).show()
    assert (lines, capsys.readouterr().out) == (["5 of 6 runs done"], "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_arms_stop_with_their_comparison_and_save(
    tiny: LanguageConfig, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """By Ctrl-C, or when it is killed."""
    arguments = ["compare", "ptb-small", "--data", tiny.data, "--out", str(tmp_path / "out")]
    arguments += ["--epochs", "500", "--model.hidden", "12", "--train.batch", "8"]
    process = subprocess.Popen(
        [sys.executable, "-m", "normrnn.cli", *arguments, "--train.log-every", "5"],
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    runs = [tmp_path / "out" / name for name in ("none-1", "frame-1")]
    deadline = time.monotonic() + 120
    while not all((run / "metrics.jsonl").exists() for run in runs):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert (b"the same command resumes" in shown) == (code == 130)
    while not all("stopped; the same" in (run / "log.txt").read_text() for run in runs):
        assert time.monotonic() < deadline, "the arms outlive their parent"
        time.sleep(0.1)
    assert all((run / "checkpoint.pt").exists() for run in runs)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_arms_end_before_they_can_save(
    tiny: LanguageConfig, tmp_path: Path, number: signal.Signals
) -> None:
    """Started by a script in the background, where SIGINT is ignored, and ended at once."""
    out = tmp_path / "begun"
    arguments = ["compare", "ptb-small", "--data", tiny.data, "--out", str(out), "--epochs", "9999"]
    process = subprocess.Popen(
        [sys.executable, "-m", "normrnn.cli", *arguments, "--model.hidden", "12"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    deadline = time.monotonic() + 60
    while not (children := _children(process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    try:
        process.wait(timeout=60)
    finally:
        process.kill()
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "the arms outlive their parent"
        time.sleep(0.1)


def _children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_what_was_begun_differently_is_refused_before_anything_trains(
    tiny: LanguageConfig, tmp_path: Path
) -> None:
    """With another rate, another text, or before the tuning."""
    out, other = tmp_path / "runs", tmp_path / "mine.txt"
    config = replace(tiny, epochs=1, threads=1)
    run_tiny(config, out / "none-1")
    other.write_text("one two three four five six seven\n" * 400)
    for changed, more, said in (
        (config, {"lr": 0.25}, r"none-1 holds .*optimizer\.lr was 0\.7, is now 0\.25"),
        (replace(config, data=str(other)), {}, "the data has changed"),
        (config, {"tune": "optimizer.lr"}, r"none-1 was begun before optimizer\.lr was tuned"),
    ):
        with pytest.raises(UsageError, match=said):
            normrnn.compare(changed, out=out, norms=("frame", "none"), seeds=2, **more)  # type: ignore[arg-type]
        assert [path.name for path in out.iterdir()] == ["none-1"]


def test_a_run_that_diverges_is_a_finding(cli: Cli, text_dir: Path, tmp_path: Path) -> None:
    wild = ["--optimizer.lr", "1e38", "--optimizer.clip-norm", "0", "--norms", "none,frame"]
    given = ["compare", "ptb-small", "--data", text_dir, "--out", tmp_path / "o", *SMALL, *wild]
    code, said, _ = cli(*given)
    assert code == 0
    assert "none, seed 1 diverged: the loss is inf at update 2" in said
    code, said, _ = cli("report", tmp_path / "o", "-o", tmp_path / "r.html")
    assert code == 0
    assert "none: 1 of 1 runs diverged" in said
    assert "diverged after" in (tmp_path / "r.html").read_text()


def test_a_closed_output_is_no_accident() -> None:
    """As a service may start us, and `| head` does."""
    command = f"{sys.executable} -m normrnn"
    for ending, code in ((">&-", 0), ("<&- >&- 2>&-", 0)):
        done = subprocess.run(f"{command} recipes {ending}", shell=True, capture_output=True)
        assert done.returncode == code, done.stderr
        assert not done.stderr
    whole = f"set -o pipefail; {command} recipes | true"
    assert subprocess.run(["bash", "-c", whole], capture_output=True).returncode in (0, 141)
