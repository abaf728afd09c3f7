"""The recorder against values worked out by hand, and on whole recipes."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import normrnn
from normrnn.analysis.gradients import describe, growth, record, recorded
from normrnn.cli import main
from normrnn.config.registry import task_of
from normrnn.engine.task import Loss
from normrnn.errors import UserError
from normrnn.recipes import ptb_char
from normrnn.speech.config import SpeechConfig
from normrnn.speech.task import SpeechTask
from normrnn.text.config import EvaluationConfig, LanguageConfig
from tests.helpers import NORMS
from tests.tiny_runs import run_tiny


class Toy:
    """A layer with one unit on given inputs (T, B, 1); the loss is Σ c_b h_tb over all steps."""

    per_step = True
    unit = "tokens"

    def __init__(self, norm: str | None, inputs: list[list[float]], signs: list[float]) -> None:
        options = {"time_steps": 9, "eps": 0.5} if norm else {}
        self.rnn = normrnn.RNN(1, 1, norm=norm, dtype=torch.float64, **options)  # type: ignore[arg-type]
        self.model = nn.ModuleList([self.rnn])
        self.inputs = torch.tensor(inputs, dtype=torch.float64)[:, :, None]
        self.signs = torch.tensor(signs, dtype=torch.float64)
        with torch.no_grad():
            for name, value in {"weight_ih_l0": 0.7, "weight_hh_l0": -1.3}.items():
                getattr(self.rnn, name).fill_(value)

    def set(self, **values: float) -> None:
        for name, value in values.items():
            with torch.no_grad():
                self.rnn.get_parameter(name.replace("__", ".")).fill_(value)

    def updates(self, epoch: int) -> int:
        return 1 + epoch

    def reset(self) -> None:
        pass

    def loss(self, epoch: int, index: int) -> Loss:
        assert epoch == index == 0
        output, _ = self.rnn(self.inputs)
        total = (output[:, :, 0] * self.signs).sum()
        return Loss(total, objective=total, count=1)


def _record(toy: Toy) -> dict[str, Any]:
    return record(ptb_char(), toy, 1)["layers"]["l0"]  # type: ignore[arg-type]


def test_plain_recurrence_by_hand() -> None:
    toy = Toy(None, [[0.4], [-0.2], [0.9]], [1.0])
    toy.set(bias_ih_l0=0.1, bias_hh_l0=0.0)
    w, u, b = 0.7, -1.3, 0.1
    a1 = w * 0.4 + b
    a2 = w * -0.2 + u * math.tanh(a1) + b
    a3 = w * 0.9 + u * math.tanh(a2) + b
    slope2, slope3 = (1 - math.tanh(a) ** 2 for a in (a2, a3))
    found = _record(toy)
    # The total derivative: directly, and through every later state.
    d2 = 1 + u * slope3
    assert found["gradient"] == pytest.approx([abs(1 + u * slope2 * d2), abs(d2), 1])
    end = [abs(u * slope2 * u * slope3), abs(u * slope3), 1]
    assert found["gradient_of_the_end"] == pytest.approx(end)
    assert found["growth_per_step"] == pytest.approx(math.sqrt(end[0]))


def test_normalised_recurrence_by_hand() -> None:
    """Two rows ±d: x̂ = ±f(d), f(d) = d/√(d²+ε); a push of one row moves both by half of it."""
    gamma, eps, w, u = 1.7, 0.5, 0.7, -1.3
    toy = Toy("hidden", [[0.4, -0.4], [0.9, -0.9]], [1.0, -1.0])
    toy.set(norm_l0__weight=gamma, norm_l0__bias=0.0)

    def f(d: float) -> float:
        return d / math.sqrt(d * d + eps)

    d1 = w * 0.4
    d2 = w * 0.9 + u * math.tanh(gamma * f(d1))
    slope = (1 - math.tanh(gamma * f(d2)) ** 2) * gamma * eps / (d2 * d2 + eps) ** 1.5
    back = u * slope  # dL/dh_1 of the first row through step 2; of the second row, its opposite
    found = _record(toy)
    both = math.sqrt(2)
    assert found["gradient"] == pytest.approx([abs(1 + back) * both, both])
    assert found["gradient_of_the_end"] == pytest.approx([abs(back) * both, both])
    assert found["growth_per_step"] == pytest.approx(abs(back))


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("norm", NORMS)
def test_recorded_layers_compute_the_same(kind: str, norm: str) -> None:
    options = {"num_layers": 2, "bidirectional": True, **NORMS[norm]}
    if kind != "LSTM":
        options.pop("cell_norm", None)
    layer = getattr(normrnn, kind)(3, 2, **options).double()
    x: Tensor = torch.randn(4, 5, 3, dtype=torch.float64)
    expected, final = layer(x)
    buffers = {name: value.clone() for name, value in layer.named_buffers()}
    with recorded(layer) as states:
        output, last = layer(x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(last, final)
    assert set(states) == {"l0", "l0_reverse", "l1", "l1_reverse"}
    for name, value in layer.named_buffers():
        assert torch.equal(value, buffers[name])
    torch.testing.assert_close(layer(x)[0], expected)
    for lengths in ([4, 4, 2], [2, 4, 4]):  # packed rows keep their order
        packed = pack_sequence([x[:n, b] for b, n in enumerate(lengths)], enforce_sorted=False)
        wanted, _ = layer(packed)
        with recorded(layer):
            output, _ = layer(packed)
        torch.testing.assert_close(output, wanted)


@pytest.fixture
def small(text_dir: Path) -> LanguageConfig:
    config = ptb_char()
    return replace(
        config,
        data=str(text_dir),
        epochs=1,
        model=replace(config.model, hidden=7, embedding=5, layers=2, time_steps=10),
        train=replace(config.train, batch=12, steps=10, epoch_tokens=2000),
        evaluation=EvaluationConfig(train_tokens=0, recalibrate_windows=2),
    )


def _cli(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as exited:
        main([str(a) for a in arguments])
    assert exited.value.code == code


def test_zoneout_is_refused(small: LanguageConfig) -> None:
    config = replace(small, model=replace(small.model, zoneout_h=0.1))
    with pytest.raises(UserError, match="zoneout"):
        record(config, task_of(config).open(config).build(torch.device("cpu")))


def test_the_command_on_runs_and_on_recipes(small: LanguageConfig, tmp_path: Path, capsys) -> None:
    for norm in ("none", "hidden"):
        run_tiny(replace(small, norm=norm), tmp_path / norm)
    out = tmp_path / "g.json"
    _cli("gradients", tmp_path / "none", tmp_path / "hidden", "--batches", 2, "-o", out)
    said = capsys.readouterr().out
    assert "hidden, l1: a gradient from the last step" in said
    plain, hidden = json.loads(out.read_text())
    assert (plain["norm"], hidden["norm"]) == ("none", "hidden")
    for found in (plain, hidden):
        assert set(found["layers"]) == {"l0", "l1"}
        assert all(len(layer["gradient"]) == 10 for layer in found["layers"].values())
        # A loss of the last step says nothing about other outputs of the top layer directly.
        top = found["layers"]["l1"]
        assert top["gradient_of_the_end"][-1] == pytest.approx(top["gradient"][-1])

    flags = ["--data", small.data, "--model.hidden", 7, "--train.batch", 12, "--train.steps", 8]
    flags += ["--batches", 1, "--norms", "none,hidden", "-o", tmp_path / "h.json"]
    _cli("gradients", "ptb-char", *flags)
    out = tmp_path / "h.json"
    fresh = json.loads(out.read_text())
    assert [r["label"] for r in fresh] == ["norm none", "norm hidden"]
    assert fresh[0]["loss"] != plain["loss"]
    assert len(fresh[1]["layers"]["l2"]["gradient"]) == 8


def test_other_data_than_the_runs_is_refused(small: LanguageConfig, tmp_path: Path, capsys) -> None:
    """As many symbols, in other places: the shapes alone would fit."""
    run_tiny(small, tmp_path / "run")
    moved, other = tmp_path / "moved", tmp_path / "other"
    for target, table in ((moved, {}), (other, str.maketrans("0123456789", "5678901234"))):
        target.mkdir()
        for file in Path(small.data).iterdir():
            (target / file.name).write_text(file.read_text().translate(table))
    out = tmp_path / "g.json"
    _cli("gradients", tmp_path / "run", "--data", moved, "--batches", 1, "-o", out)
    out.unlink()
    _cli("gradients", tmp_path / "run", "--data", other, "-o", out, code=1)
    assert f"{other} is not what {tmp_path / 'run'}" in capsys.readouterr().err
    assert not out.exists()


def test_ragged_batches_by_hand(tiny_speech: SpeechConfig) -> None:
    """Speech, one direction, no normaliser: every utterance by itself through torch's own cell."""
    config = replace(
        tiny_speech,
        norm="none",
        model=replace(tiny_speech.model, layers=1, bidirectional=False),
        train=replace(tiny_speech.train, pool=1),
    )
    task = task_of(config).open(config).build(torch.device("cpu"))
    assert isinstance(task, SpeechTask)
    found = record(config, task, 99)
    assert found["batches"] == task.updates(0)
    rnn = task.model.rnn
    cell = nn.LSTMCell(rnn.input_size, rnn.hidden_size, dtype=torch.float64)
    cell.load_state_dict({k.removesuffix("_l0"): v for k, v in rnn.state_dict().items()})
    squares: list[dict[int, float]] = []
    ends: list[dict[int, float]] = []
    for key in task.batches("train"):
        batch = [task.pieces["train"][i] for i in key]
        longest = max(piece.length for piece in batch)
        squares.append(dict.fromkeys(range(longest), 0.0))
        ends.append(dict.fromkeys(range(longest), 0.0))
        for piece in batch:
            x = (task.corpus.train.features(*piece) - task.model.mean) * task.model.variance.rsqrt()
            state, states, losses = None, [], []
            for t, label in enumerate(task.corpus.train.labels(*piece)):
                state = cell(x[t : t + 1].double(), state)
                states.append(state[0])
                logits = task.model.decoder(state[0])
                losses.append(nn.functional.cross_entropy(logits, label[None].long()) / len(batch))
            grads = torch.autograd.grad(torch.stack(losses).sum(), states, retain_graph=True)
            for t, grad in enumerate(grads):
                squares[-1][t] += grad.square().sum().item()
            if piece.length == longest:
                for k, grad in enumerate(reversed(torch.autograd.grad(losses[-1], states))):
                    ends[-1][k] += grad.square().sum().item()
    assert len({len(one) for one in ends}) > 1  # batches of several lengths
    layer = found["layers"]["l0"]
    assert layer["gradient"] == pytest.approx(_mean_roots(squares), rel=1e-6)
    way = _mean_roots(ends)
    assert layer["gradient_of_the_end"][::-1] == pytest.approx(way, rel=1e-6)
    shortest = min(len(one) for one in ends)
    expected = (way[shortest - 1] / way[0]) ** (1 / (shortest - 1))
    assert layer["growth_per_step"] == pytest.approx(expected, rel=1e-6)


def _mean_roots(squares: list[dict[int, float]]) -> list[float]:
    steps = range(max(len(one) for one in squares))
    return [statistics.mean(math.sqrt(one[k]) for one in squares if k in one) for k in steps]


@pytest.mark.parametrize(
    ("name", "factor", "words"),
    [
        ("l0", 0.5, "0.500 per step back (2.00e+00 to 5.00e-01 over 2 steps): it vanishes"),
        ("l0_reverse", 2.0, "(5.00e-01 to 2.00e+00 over 2 steps): it explodes"),
        ("l0", 0.99, "keeps its size"),
        ("l0", None, "one time step"),
    ],
)
def test_growth_in_words(name: str, factor: float | None, words: str) -> None:
    layer = {"gradient_of_the_end": [0.5, 1.0, 2.0], "growth_per_step": factor}
    assert words in describe(name, layer)
    assert growth([1.0]) is growth([0.0, 1.0]) is None
