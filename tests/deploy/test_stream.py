"""A stream gives what the whole sequence gives, however it is cut."""

import copy
import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normrnn
from normrnn.speech.task import AcousticModel
from normrnn.text.task import LanguageModel, Reader
from tests.commands.conftest import Cli, cli
from tests.deploy.test_export import speech_model, text_model
from tests.helpers import CELLS, NORMS, build, randomise

__all__ = ["cli"]

CUTS = [[1] * 12, [12], [5, 1, 1, 5], [3, 9]]
SHARED = [name for name, how in NORMS.items() if "time_steps" not in how]


def pushed(stream: normrnn.Stream, x: Tensor, cut: list[int]) -> Tensor:
    """Pieces of one step go as single frames or tokens."""
    found = []
    for piece in x.split(cut):
        single = len(piece) == 1
        output = stream.push(piece[0] if single else piece)
        found.append(output[None] if single else output)
    return torch.cat(found)


class Own(nn.Module):
    """A user's model: projected inputs, layers by keyword, a state of pairs; maybe transposed."""

    def __init__(self, lower: Any, upper: Any, turns: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(2, 3)
        self.lower, self.upper, self.turns = lower, upper, turns

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        below, above = (None, None) if state is None else state
        x = self.project(x.transpose(0, 1) if self.turns else x)
        x, below = self.lower(x, below)
        x, above = self.upper(input=x, hx=above)
        return (x.transpose(0, 1) if self.turns else x), (below, above)


class Flattens(nn.Module):
    """As many language models do; ``last``: only the last step's output."""

    def __init__(self, batch_first: bool, last: bool = False) -> None:
        super().__init__()
        self.rnn = normrnn.GRU(2, 4, norm=None, batch_first=batch_first)
        self.last = last

    def forward(self, x: Tensor, state: Any = None) -> Any:
        output, state = self.rnn(x, state)
        if self.last:
            return output[:, -1] if self.rnn.batch_first else output[-1], state
        return output.flatten(0, 1), state


BATCH_FIRST: Any = {"batch_first": True}


def own(upper: Any, **options: Any) -> Any:
    model = Own(normrnn.LSTM(3, 4, norm="sequence", **options), upper(4, 5, 2, **options))
    randomise(model)
    return model.eval()


@pytest.mark.parametrize(
    "make",
    [
        *(lambda c=c, n=n: build(c, n, num_layers=2, dtype=torch.float32).eval()
          for c in CELLS for n in SHARED),
        *(lambda c=c, n=n: text_model(c, n)
          for c in ("lstm", "gru", "rnn") for n in ("none", "frame", "sequence", "layer")),
        *(lambda p=p: speech_model(bidirectional=False, peephole=p) for p in (None, "all")),
        lambda: nn.GRU(2, 3),
        lambda: own(normrnn.GRU),
        lambda: own(normrnn.GRU, **BATCH_FIRST),
        lambda: own(nn.GRU, **BATCH_FIRST),
        lambda: Flattens(False),
        lambda: Flattens(True),
    ],
)  # fmt: skip
@torch.no_grad()
def test_pieces_give_what_the_whole_gives(make: Any) -> None:
    model = make()
    if isinstance(model, LanguageModel):
        x = torch.randint(0, 7, (12,))
        wanted = model(x[:, None])[0][:, 0]
        assert normrnn.Stream(model).push(3).shape == (7,)
    elif isinstance(model, AcousticModel):
        x = torch.randn(12, 3)
        wanted = model.log_posteriors(x)
    else:
        x = torch.randn(12, getattr(model, "input_size", 2))
        first = any(getattr(layer, "batch_first", False) for layer in model.modules())
        wanted = model(x.unsqueeze(0 if first else 1))[0].reshape(12, -1)
    stream = normrnn.Stream(model)
    for cut in CUTS:
        torch.testing.assert_close(pushed(stream, x, cut), wanted, rtol=1e-5, atol=1e-5)
        stream.reset()


def test_outputs_without_steps_are_refused() -> None:
    for first in (False, True):
        with pytest.raises(ValueError, match=r"\(1, 4\)"):
            normrnn.Stream(Flattens(first, last=True)).push(torch.randn(6, 2))


@pytest.mark.parametrize(
    ("lower", "upper", "turns"),
    [
        (nn.LSTM(3, 4, batch_first=True), nn.GRU(4, 5), False),
        (nn.LSTM(3, 4, batch_first=True), nn.GRU(4, 5, batch_first=True), True),
        (nn.LSTM(3, 4), normrnn.LiGRU(4, 5, norm="layer", batch_first=True), False),
    ],
)
def test_layers_that_would_see_a_batch_are_refused(lower: Any, upper: Any, turns: bool) -> None:
    with pytest.raises(ValueError, match=r"\((4|1), (4|1), [34]\)"):
        normrnn.Stream(Own(lower, upper, turns)).push(torch.randn(4, 2))


def test_training_goes_on_without_touching_a_stream() -> None:
    model = text_model().train()
    stream = normrnn.Stream(model)
    before = stream.push(torch.arange(5))
    assert all(module.training for module in model.modules())
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            value.fill_(9)
    stream.reset()
    torch.testing.assert_close(stream.push(torch.arange(5)), before, rtol=0, atol=0)


def test_streams_of_one_set_of_weights_in_several_threads() -> None:
    model = text_model()
    first = normrnn.Stream(model)
    texts = torch.randint(0, 7, (16, 60))
    with torch.no_grad():
        wanted = model(texts.T)[0]

    def read(text: Tensor) -> Tensor:
        stream = first.fork()
        return torch.stack([stream.push(int(token)) for token in text])

    with ThreadPoolExecutor(4) as pool:
        for b, found in enumerate(pool.map(read, texts)):
            torch.testing.assert_close(found, wanted[:, b], rtol=1e-5, atol=1e-5)


def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match="bidirectional"):
        normrnn.Stream(speech_model())
    with pytest.raises(ValueError, match=r"differ over 3 time steps.*shared=True"):
        normrnn.Stream(normrnn.LSTM(3, 4, norm="frame", time_steps=3))
    stream = normrnn.Stream(text_model())
    for token in (7, -1, torch.tensor([1, 7])):
        with pytest.raises(IndexError):
            stream.push(token)
    with pytest.raises(RuntimeError):
        stream.push(torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match="3"):
        normrnn.Stream(normrnn.GRU(3, 4, norm=None)).push(torch.zeros(2))


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("time_steps", [None, 4])
def test_a_reader_cuts_windows_as_training_did(carried: bool, time_steps: int | None) -> None:
    model = LanguageModel(9, 6, 1, norm="frame", time_steps=time_steps, init=0.8)
    for _ in range(9):
        model(torch.randint(0, 9, (4, 8)))
    model.eval()
    ids = torch.randint(0, 9, (11,))
    state, wanted = None, []
    with torch.no_grad():
        for window in ids.split(4):
            logits, state = model(window[:, None], state if carried else None)
            wanted.append(logits[:, 0])
    for cut in ([1] * 11, [3, 8], [11]):
        reader = Reader(model, 4, carried, overlap=False)
        found = torch.cat([reader.push(piece.tolist()) for piece in ids.split(cut)])
        torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-5, atol=1e-5)


def test_standard_input_is_scored_as_a_file(
    cli: Cli, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (trained / "text-data" / "valid.txt").read_text() + "w3 nobody knows\n\n"
    (tmp_path / "text").write_text(text)
    wanted = cli("score", trained / "text", tmp_path / "text", "--lines")[1].splitlines()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    found = cli("score", trained / "text", "-")[1].splitlines()
    for one, other in zip(found[:-1], wanted[:-1], strict=True):
        a, b = one.split("\t"), other.split("\t")
        assert (a[1:], float(a[0])) == (b[1:], pytest.approx(float(b[0]), rel=1e-3))
    assert found[-1].split(":")[1] == wanted[-1].split(":")[1]


def test_lines_are_answered_as_they_come(trained: Path) -> None:
    call = [sys.executable, "-m", "normrnn.cli", "score", str(trained / "text"), "-"]
    pipe = subprocess.PIPE
    with subprocess.Popen(call, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in ("w1 w2", "w3"):
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            wanted = f"{len(line.split()) + 1}\t{line}\n"
            assert process.stdout.readline().partition("\t")[2] == wanted
        process.stdin.close()
        assert process.stdout.readline().startswith("standard input: 5 tokens")
    assert process.returncode == 0


def test_an_empty_input_is_refused(
    cli: Cli, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert cli("score", trained / "text", "-")[::2] == (1, "normrnn: standard input is empty\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xff\n")))
    exit_code, _, err = cli("score", trained / "text", "-")
    assert exit_code == 1
    assert "standard input" in err


@pytest.mark.parametrize("norm", ["sequence", "layer", "none"])
@pytest.mark.parametrize("cell", CELLS)
def test_writing_to_an_output_does_not_change_the_stream(cell: str, norm: str) -> None:
    layer = build(cell, norm, dtype=torch.float32).eval()
    x, one, other = torch.randn(4, 3), normrnn.Stream(layer), normrnn.Stream(layer)
    copied = copy.deepcopy(other)
    for frame in x:
        expected = one.push(frame).clone()
        for stream in (other, copied):
            output = stream.push(frame)
            torch.testing.assert_close(output, expected, rtol=0, atol=0)
            output.fill_(7)


def test_frames_that_are_no_tensors() -> None:
    """numpy's numbers are of double precision, and people write whole ones."""
    layer = normrnn.LSTM(3, 4, norm=None)
    frame = [1, 2, 3]
    expected = normrnn.Stream(layer).push(torch.tensor([1.0, 2.0, 3.0]))
    for given in (frame, np.array(frame, dtype=float), np.array(frame)):
        torch.testing.assert_close(normrnn.Stream(layer).push(given), expected)
