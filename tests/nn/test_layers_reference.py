"""Every layer against the naive loop: outputs, final states, all gradients, all buffers.

For each cell and norm some combinations of all other options are drawn at random.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import normrnn
from tests import reference
from tests.helpers import (
    CELLS,
    NORMS,
    STATISTICAL,
    build,
    check_against_reference,
    close,
    inputs,
    randomise,
    settings_of,
    tensors_of,
)

PLAIN_CELLS = {"tanh", "relu", "lstm", "gru"}
FORMS = ["dense", "padded", "batch_first", "sorted", "unsorted", "unbatched"]
MODES = ["train", "train", "eval", "batch statistics"]
LENGTHS = {
    "dense": [[5, 5, 5], [4, 4, 4]],
    "sorted": [[5, 4, 4, 1], [6, 4, 2]],
    "unbatched": [[5]],
    # A single row at the end; sequences without frames.
    "unsorted": [[2, 5, 3], [5, 1, 4, 5]],
    "padded": [[2, 5, 3], [5, 1, 4, 5], [2, 0, 5, 0, 3]],
}
WIDE = [9, 3, 9, 7, 9, 3, 8, 8, 9, 9, 9, 3, 5]
"""For float32: at least six rows in every time step."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"affine": False},
    {"eps": 0.1, "momentum": None},
    {"momentum": 1.0},
    {"learn_initial_state": True},
    {"track_running_stats": False},
    {"proj_size": 1},
    {"cell_norm": True},
    {"zoneout": (0.3, 0.0)},
    {"zoneout": (0.3, 0.6)},
]


@dataclass(frozen=True)
class Case:
    cell: str
    norm: str
    form: str
    mode: str
    lengths: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    is_wide: bool = False
    """Float32 and larger sizes, for the kernels."""
    backend: Any = "auto"
    resets: bool = False
    how: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = self.cell, self.norm, self.form, self.mode, self.backend, self.lengths, self.options
        more = " resets" * self.resets + " float32" * self.is_wide
        return " ".join(map(str, parts)) + more + f" {self.how}"


def drawn(cell: str, norm: str, draw: random.Random, is_wide: bool) -> Case:
    is_lstm = cell.startswith("lstm")
    form = draw.choice(["dense", "padded"] if is_wide else FORMS)
    mode = draw.choice(MODES)
    if mode != "eval" and form == "unbatched" and norm not in ("sequence", "layer", "rms", "none"):
        mode = "eval"  # every time step is a single row
    lengths = draw.choice(LENGTHS.get(form, LENGTHS["padded"]))
    if is_wide:
        lengths = [9] * 13 if form == "dense" else WIDE
    option = dict(draw.choice(OPTIONS))
    if "cell_norm" in option and not (is_lstm and norm in ("layer", "rms", "recurrent-shared")):
        option = {}
    if "zoneout" in option and (mode != "eval" or (option["zoneout"][1] and not is_lstm)):
        option = {}  # shares at test time; random masks in training
    if "proj_size" in option and cell != "lstm":
        option = {}
    if "track_running_stats" in option and (norm not in STATISTICAL or form != "dense"):
        option = {}
    resets = draw.random() < 0.4
    how = {
        "T": max(lengths) + (draw.random() < 0.5 and form in ("padded", "batch_first")),
        "with_state": draw.random() < 0.7,
        "reset_to": draw.choice([0, 1, len(lengths)]) if resets else 0,
        "constant": draw.choice([(), (), (0,), (1, 3)]) if not is_wide else (),
    }
    if norm.startswith("hidden") and not how["with_state"]:
        how["constant"] = ()  # no variance at all: rounding decides
    by_torch = cell in PLAIN_CELLS and not resets and "zoneout" not in option
    by_torch &= norm in ("sequence", "frame", "frame-slots", "whiten", "none") or (
        mode == "eval"
        and norm in ("hidden-shared", "recurrent-shared")
        and "cell_norm" not in option
    )
    backend = draw.choice(["auto", "loop", "torch"] if by_torch else ["auto", "loop"])
    option |= {"num_layers": draw.choice([1, 2]), "bidirectional": draw.random() < 0.6}
    option["batch_first"] = form in ("batch_first", "unbatched")
    return Case(cell, norm, form, mode, lengths, option, is_wide, backend, resets, how)


def cases(rounds: int, wide: int) -> list[Case]:
    draw = random.Random(rounds)
    kinds = [False] * rounds + [True] * wide
    return [drawn(c, n, draw, is_wide) for c in CELLS for n in NORMS for is_wide in kinds]


def check(case: Case) -> None:
    if case.is_wide:
        make, own = CELLS[case.cell]
        options = {**own, **NORMS[case.norm], **case.options}
        if "proj_size" in options:
            options["proj_size"] = 7
        layer = make(5, 11, **options)
        randomise(layer)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(0.5)
    else:
        layer = build(case.cell, case.norm, **case.options)
    layer.train(case.mode == "train")
    tracks = case.options.get("track_running_stats", True)
    batch = True if case.mode == "batch statistics" or not tracks else None
    T, B = case.how["T"], len(case.lengths)
    resets = torch.rand(T, B) < 0.3 if case.resets else None
    how: dict[str, Any] = {**case.how, "batch_statistics": batch, "resets": resets}
    how["tol"] = 1e-7 if case.norm == "whiten" else 1e-9
    with normrnn.backend(case.backend):
        if case.mode == "batch statistics":
            with normrnn.batch_statistics(layer):
                check_against_reference(layer, case.lengths, case.form, **how)
        else:
            check_against_reference(layer, case.lengths, case.form, **how)


FAST = cases(5, 1)
pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:norm='layer' of a single input feature"),
]


@pytest.mark.parametrize("case", FAST, ids=str)
def test_a_layer_is_the_reference(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(40, 8), ids=str)
def test_a_layer_is_the_reference_at_length(case: Case) -> None:
    check(case)


def test_the_drawn_cases_cover_the_options() -> None:
    """With every norm."""
    for norm in NORMS:
        own = [case for case in FAST if case.norm == norm]
        assert {case.form for case in own} == set(FORMS)
        assert {case.mode for case in own} == set(MODES)
        assert {case.resets for case in own} == {case.is_wide for case in own} == {True, False}
        assert {"auto", "loop"} <= {case.backend for case in own}
    used = {key for case in FAST for key, value in case.options.items() if value is not None}
    assert {key for option in OPTIONS for key in option} <= used | {"momentum"}
    assert "torch" in {case.backend for case in FAST}


# The reference itself: every formula written out with torch's functions.


def normalisers(norm: str | None, p: dict[str, Tensor], rows: Tensor) -> Any:
    """W_x x of all steps (T, B, G·H), and what is done to W_h h, their sum, and c."""
    gamma, gamma_h, beta = (p.get(f"norm_l0.{n}") for n in ("weight", "gamma_hh", "bias"))
    gamma_c, beta_c = p.get("norm_l0.weight_c"), p.get("norm_l0.bias_c")

    def batch(a: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
        return F.batch_norm(a, None, None, weight, bias, training=True)

    def layer(a: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
        return F.layer_norm(a, a.shape[-1:], weight, bias)

    def rms(a: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
        out = F.rms_norm(a, a.shape[-1:], weight, 1e-5)
        return out if bias is None else out + bias

    def same(a: Tensor, _: int = 0) -> Tensor:
        return a

    def sums(a: Tensor, first: int = 0) -> Tensor:
        """Of features ``first``…"""
        own = slice(first, first + a.shape[1])
        return batch(a, gamma[own], beta[own])  # type: ignore[index]

    if norm == "sequence":
        return batch(rows.flatten(0, 1), gamma, beta).view_as(rows), same, same, same
    if norm == "frame":
        return torch.stack([batch(a, gamma, beta) for a in rows]), same, same, same
    if norm == "hidden":
        return rows, same, sums, same
    if norm is None:
        return rows + p["bias_ih_l0"] + p["bias_hh_l0"], same, same, same
    of = {"layer": layer, "rms": rms, "recurrent": batch}[norm]
    of_cell = same if gamma_c is None else lambda c: of(c, gamma_c, beta_c)
    return torch.stack([of(a, gamma, beta) for a in rows]), lambda u: of(u, gamma_h), same, of_cell


def written_out(layer: Any, x: Tensor) -> Tensor:
    p, H = dict(layer.named_parameters()), layer.hidden_size
    rows, of_h, of_sum, of_cell = normalisers(layer.norm, p, x @ p["weight_ih_l0"].T)
    h, c, outputs = x.new_zeros(x.shape[1], H), x.new_zeros(x.shape[1], H), []
    for a in rows:
        u = of_h(h @ p["weight_hh_l0"].T)
        if layer.mode == "GRU":
            r, z = of_sum((a + u)[:, : 2 * H]).sigmoid().chunk(2, 1)
            n = of_sum(a[:, 2 * H :] + r * (u[:, 2 * H :] + p["bias_hn_l0"]), 2 * H).tanh()
            h = (1 - z) * n + z * h
        elif layer.mode == "LIGRU":
            z, candidate = of_sum(a + u).chunk(2, 1)
            h = z.sigmoid() * h + (1 - z.sigmoid()) * candidate.relu()
        elif layer.mode == "LSTM":
            i, f, g, o = of_sum(a + u).chunk(4, 1)
            i, f = (v + p.get(f"weight_c{k}_l0", 0) * c for v, k in ((i, "i"), (f, "f")))
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = (o + p.get("weight_co_l0", 0) * c).sigmoid() * of_cell(c).tanh()
        else:
            h = of_sum(a + u).tanh() if layer.mode == "RNN_TANH" else of_sum(a + u).relu()
        outputs.append(h)
    return torch.stack(outputs)


@pytest.mark.parametrize("norm", [None, "sequence", "frame", "hidden", "layer", "rms", "recurrent"])
@pytest.mark.parametrize("cell", CELLS)
def test_three_steps(cell: str, norm: str | None) -> None:
    if cell == "gru" and norm is None:
        return  # torch's own function
    options = {"time_steps": None, "cell_norm": True if cell == "lstm" else None}
    if norm not in ("layer", "rms", "recurrent"):
        del options["cell_norm"]
    layer = build(cell, norm or "none", **options)
    x = inputs(3, [3] * 4).detach()
    wanted = written_out(layer, x)
    result = reference.stack(x, [3] * 4, tensors_of(layer), settings_of(layer))
    torch.testing.assert_close(result.output, wanted)
    torch.testing.assert_close(layer(x)[0], wanted)


def test_whitened_rows_are_uncorrelated() -> None:
    """relu(x) − relu(−x) shows the whitened rows; W_x = (1, −1)."""
    layer: Any = normrnn.RNN(3, 6, nonlinearity="relu", norm="whiten", eps=1e-12).double()
    with torch.no_grad():
        layer.weight_ih_l0.copy_(torch.cat([torch.eye(3), -torch.eye(3)]))
        layer.weight_hh_l0.zero_()
    x = torch.randn(9, 7, 3).double() @ torch.randn(3, 3).double() + 5
    result = reference.stack(x, [9] * 7, tensors_of(layer), settings_of(layer))
    for out in (layer(x)[0], result.output):
        rows = (out[..., :3] - out[..., 3:]).flatten(0, 1)
        close(rows.mean(0), torch.zeros(3).double(), "mean", 1e-8)
        close(rows.t() @ rows / len(rows), torch.eye(3).double(), "covariance", 1e-8)


@pytest.mark.parametrize("norm", [n for n in NORMS if n not in ("none", "layer", "rms", "whiten")])
def test_running_statistics_of_the_reference(norm: str) -> None:
    """Rows 1, 2, 6 and a step without frames: mean 3, unbiased variance 7."""
    one: Any = normrnn.RNN(1, 1, **NORMS[norm]).double()
    with torch.no_grad():
        one.weight_ih_l0.fill_(1)
        one.weight_hh_l0.zero_()
    x = torch.tensor([1.0, 2.0, 6.0]).double().view(1, 3, 1)
    own, how = tensors_of(one), settings_of(one)
    after = reference.stack(x, [1, 1, 1], own, how).buffers
    assert after["norm_l0.running_mean"].flatten()[0].item() == pytest.approx(0.3)
    assert after["norm_l0.running_var"].flatten()[0].item() == pytest.approx(0.9 + 0.7)
    assert after["norm_l0.num_batches_tracked"].flatten()[0].item() == 1
