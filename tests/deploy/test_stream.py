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
from normrnn.text.model import LanguageModel
from normrnn.text.reading import Reader
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


@pytest.mark.parametrize("norm", SHARED)
@pytest.mark.parametrize("cell", CELLS)
def test_layers(cell: str, norm: str) -> None:
    layer = build(cell, norm, num_layers=2, dtype=torch.float32).eval()
    x = torch.randn(12, 3)
    with torch.no_grad():
        wanted = layer(x)[0]
    stream = normrnn.Stream(layer)
    for cut in CUTS:
        torch.testing.assert_close(pushed(stream, x, cut), wanted, rtol=1e-5, atol=1e-5)
        stream.reset()


@pytest.mark.parametrize("norm", ["none", "frame", "sequence", "layer"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_language_models(cell: str, norm: str) -> None:
    model = text_model(cell, norm)
    tokens = torch.randint(0, 7, (12,))
    with torch.no_grad():
        wanted = model(tokens[:, None])[0][:, 0]
    for cut in CUTS:
        found = pushed(normrnn.Stream(model), tokens, cut)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert normrnn.Stream(model).push(3).shape == (7,)


@pytest.mark.parametrize("peephole", [None, "all"])
def test_acoustic_models(peephole: Any) -> None:
    model = speech_model(bidirectional=False, peephole=peephole)
    x = torch.randn(12, 3)
    with torch.no_grad():
        wanted = model.log_posteriors(x)
    for cut in CUTS:
        found = pushed(normrnn.Stream(model), x, cut)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


class Own(nn.Module):
    """A user's model: projected inputs, a state that is a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(2, 3)
        self.rnn = normrnn.LSTM(3, 4, norm="sequence")

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        return self.rnn(self.project(x), state)


def test_a_users_own_model_and_torchs_layers() -> None:
    model = Own()
    randomise(model)
    x = torch.randn(12, 2)
    with torch.no_grad():
        wanted = model.eval()(x[:, None])[0][:, 0]
    torch.testing.assert_close(pushed(normrnn.Stream(model), x, [1, 1, 10]), wanted)
    plain = nn.GRU(2, 3)
    with torch.no_grad():
        wanted = plain(x)[0]
    torch.testing.assert_close(pushed(normrnn.Stream(plain), x, [1, 1, 10]), wanted)


class BatchFirst(nn.Module):
    """A user's model of batches (B, T, …), or of (T, B, …) that it transposes."""

    def __init__(self, lower: Any, upper: Any, turns: bool = False) -> None:
        super().__init__()
        self.lower, self.upper, self.turns = lower, upper, turns

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        below, above = (None, None) if state is None else state
        x = x.transpose(0, 1) if self.turns else x
        x, below = self.lower(x, below)
        x, above = self.upper(input=x, hx=above)
        return (x.transpose(0, 1) if self.turns else x), (below, above)


@pytest.mark.parametrize("upper", [normrnn.GRU, nn.GRU])
@torch.no_grad()
def test_a_users_own_model_that_is_batch_first(upper: Any) -> None:
    how: Any = {"batch_first": True}
    model = BatchFirst(normrnn.LSTM(3, 4, **how), upper(4, 5, 2, **how))
    randomise(model)
    model.eval()
    x = torch.randn(12, 3)
    wanted = model(x[None])[0][0]
    for cut in ([12], [1, 1, 10], [5, 1, 6]):
        found = pushed(normrnn.Stream(model), x, cut)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


class Flattens(nn.Module):
    """As many language models do; ``last``: only the last step's output."""

    def __init__(self, batch_first: bool, last: bool = False) -> None:
        super().__init__()
        self.rnn = normrnn.GRU(3, 4, norm=None, batch_first=batch_first)
        self.last = last

    def forward(self, x: Tensor, state: Any = None) -> Any:
        output, state = self.rnn(x, state)
        if self.last:
            return output[:, -1] if self.rnn.batch_first else output[-1], state
        return output.flatten(0, 1), state


@pytest.mark.parametrize("batch_first", [False, True])
@torch.no_grad()
def test_outputs_that_are_flattened(batch_first: bool) -> None:
    model, x = Flattens(batch_first), torch.randn(6, 3)
    stream = normrnn.Stream(model)
    found = [stream.push(x[0])[None], stream.push(x[1:5]), stream.push(x[5:])]
    wanted, _ = model(x.unsqueeze(0 if batch_first else 1))
    torch.testing.assert_close(torch.cat(found), wanted)
    with pytest.raises(ValueError, match=r"\(1, 4\)"):
        normrnn.Stream(Flattens(batch_first, last=True)).push(x)


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
        normrnn.Stream(BatchFirst(lower, upper, turns)).push(torch.randn(4, 3))


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


def test_one_stream_from_several_threads_keeps_every_step() -> None:
    """Their order is whose turn it is; with equal inputs the state after all is known."""
    model = text_model()
    stream = normrnn.Stream(model)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(stream.push, [2] * 200))
    with torch.no_grad():
        wanted = model(torch.full((201, 1), 2))[0][-1, 0]
    torch.testing.assert_close(stream.push(2), wanted, rtol=1e-5, atol=1e-5)


def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match="bidirectional"):
        normrnn.Stream(speech_model())
    with pytest.raises(ValueError, match=r"differ over 3 time steps.*shared=True"):
        normrnn.Stream(normrnn.LSTM(3, 4, norm="frame", time_steps=3))
    with pytest.raises(ValueError, match="no running statistics"):
        normrnn.Stream(normrnn.LSTM(3, 4, track_running_stats=False, norm="sequence"))
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
    assert [line.split("\t")[1:] for line in found[:-1]] == [
        line.split("\t")[1:] for line in wanted[:-1]
    ]
    for a, b in zip(found[:-1], wanted[:-1], strict=True):
        assert float(a.split("\t")[0]) == pytest.approx(float(b.split("\t")[0]), rel=1e-3)
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
            assert process.stdout.readline().split("\t")[1:] == [
                str(len(line.split()) + 1),
                f"{line}\n",
            ]
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
