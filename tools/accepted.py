"""What an installed normrnn must do; `tools.acceptance` runs it in an empty environment."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import normrnn
from normrnn.ops.native import build, library


def said(*arguments: str, code: int = 0) -> str:
    """What the command line says."""
    command = shutil.which("normrnn")
    assert command is not None
    done = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def kernels() -> None:
    """They come from the package; nothing was compiled, and there is one OpenMP runtime."""
    for name in ("cc", "gcc", "clang", os.environ.get("CC", "cc")):
        assert shutil.which(name) is None, f"{name} is on the PATH"
    loaded = library.library()
    assert loaded is not None, "no kernels"
    assert loaded.path.parent == build.FOLDER, loaded.path
    assert loaded.threaded
    names = build.VARIANTS if build.is_x86() else ["baseline"]
    assert all(build.packaged(name).is_file() for name in names)
    maps = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ""
    runtimes = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line}
    assert len(runtimes) <= 1, runtimes
    cache = Path(os.environ["XDG_CACHE_HOME"], "normrnn")
    assert not cache.exists(), f"{cache} was written to"
    print(f"kernels: {loaded.path.name}, of {len(names)} variants")


def layers() -> None:
    """Trained, against torch's, and folded back."""
    x = torch.randn(30, 8, 12)
    for kind, plain in ((normrnn.LSTM, torch.nn.LSTM), (normrnn.GRU, torch.nn.GRU)):
        ours = kind(12, 20, norm=None)
        same = plain(12, 20)
        same.load_state_dict(ours.state_dict())
        torch.testing.assert_close(ours(x)[0], same(x)[0], rtol=1e-4, atol=1e-5)
        layer = kind(12, 20, num_layers=2, bidirectional=True)
        lengths = [30, 29, 20, 11, 11, 5, 2, 1]
        layer(x, lengths=lengths)[0].square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        folded = layer.eval().fold()
        torch.testing.assert_close(folded(x)[0], layer(x)[0], rtol=1e-4, atol=1e-5)
    print("layers: trained and folded")


def commands() -> None:
    """A comparison without pictures, and an install command for every extra that is missing."""
    assert importlib.util.find_spec("matplotlib") is None
    text = " ".join(said("compare", "quickstart", "--out", "runs").split())
    assert re.search("pip install .*matplotlib", text)
    assert "frame, 1 seed:" in text
    run = "runs/frame-1"
    assert said("sample", run, "--tokens", "20", "--seed", "1").strip()
    text = said("export", run, "-o", "out", "--format", "onnx", code=1)
    assert re.search("pip install .*onnx", text)
    assert "How to load" in (said("export", run, "-o", "plain") and said("info", "plain"))
    assert re.search("pip install .*matplotlib", said("report", "runs"))
    speaker = Path("sound", "1", "2")
    speaker.mkdir(parents=True)
    (speaker / "1-2.trans.txt").write_text("1-2-0000 A WORD\n")
    (speaker / "1-2-0000.flac").write_bytes(b"no sound")
    speech = said("prepare", "librispeech", "sound", "--out", "prepared", code=1)
    assert re.search("pip install .*kaldi-native-fbank", speech), speech
    print("commands: compared as text, sampled, exported; extras are asked for by name")


if __name__ == "__main__":
    print(f"normrnn {normrnn.__version__} in {Path(normrnn.__file__).parent}")
    assert Path(normrnn.__file__).is_relative_to(sys.prefix)
    kernels()
    layers()
    commands()
    print("accepted")
