"""The ways a layer can run, against each other: own recurrence, torch's kernel, torch's layer."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.helpers import (
    CELLS,
    STATISTICAL,
    build,
    check_against_reference,
    close,
    inputs,
    pull,
    run,
    states,
)

PLAIN_CELLS = ["tanh", "relu", "lstm", "gru"]


def forced(monkeypatch: pytest.MonkeyPatch, layer: Any, path: str) -> None:
    monkeypatch.setattr(layer, "_path", lambda _: path)


@pytest.mark.matrix(5)
@pytest.mark.parametrize("form", ["dense", "padded", "unsorted", "sorted"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cell", PLAIN_CELLS)
@pytest.mark.parametrize("path", ["own", "folded"])
class TestSequenceWise:
    """Both paths in training and at test time, whatever the layer itself would have chosen."""

    def test_training(
        self,
        monkeypatch: pytest.MonkeyPatch,
        path: str,
        cell: str,
        depth: int,
        bidirectional: bool,
        form: str,
    ) -> None:
        layer = build(cell, "sequence", num_layers=depth, bidirectional=bidirectional)
        forced(monkeypatch, layer, path)
        lengths = {"dense": [4, 4, 4], "sorted": [5, 2, 2]}.get(form, [2, 5, 3])
        check_against_reference(layer, lengths, form)

    def test_test_time(
        self,
        monkeypatch: pytest.MonkeyPatch,
        path: str,
        cell: str,
        depth: int,
        bidirectional: bool,
        form: str,
    ) -> None:
        layer = build(cell, "sequence", num_layers=depth, bidirectional=bidirectional).eval()
        forced(monkeypatch, layer, path)
        lengths = {"dense": [4, 4, 4], "sorted": [5, 2, 2]}.get(form, [2, 5, 3])
        check_against_reference(layer, lengths, form)


@pytest.mark.parametrize("form", ["dense", "padded"])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("norm", ["frame", "hidden-shared"])
def test_shared_statistics_at_test_time_take_either_path(
    monkeypatch: pytest.MonkeyPatch, norm: str, cell: str, form: str
) -> None:
    paths = ["own"] if "-" in cell else ["own", "folded"]
    for path in paths:
        layer = build(cell, norm, num_layers=2, bidirectional=True).eval()
        forced(monkeypatch, layer, path)
        check_against_reference(layer, [4, 4] if form == "dense" else [4, 1, 3], form)


@pytest.mark.parametrize("form", ["dense", "unsorted"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", PLAIN_CELLS)
def test_own_recurrence_without_norm_is_torch(
    monkeypatch: pytest.MonkeyPatch, cell: str, bias: bool, form: str
) -> None:
    layer = build(cell, "none", num_layers=2, bidirectional=True, bias=bias)
    lengths = [4, 4, 4] if form == "dense" else [2, 5, 3]
    x, state = inputs(max(lengths), lengths), states(layer, 3)
    found: dict[str, list[torch.Tensor]] = {}
    for path in ("own", "torch"):
        layer.zero_grad()
        leaves = [v.detach().clone().requires_grad_() for v in (x, *state)]
        forced(monkeypatch, layer, path)
        outputs = run(layer, leaves[0], lengths, form, (leaves[1], leaves[2]))
        pull(outputs)
        grads = [v.grad for v in (*leaves, *layer.parameters()) if v.grad is not None]
        found[path] = [*outputs, *grads]
    assert len(found["own"]) == len(found["torch"]) > 10
    for k, (own, theirs) in enumerate(zip(found["own"], found["torch"], strict=True)):
        close(own, theirs, f"tensor {k}")


@pytest.mark.parametrize("norm", ["sequence", "frame"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_paths_agree_in_the_dtype_people_use(
    monkeypatch: pytest.MonkeyPatch, norm: str, dtype: torch.dtype
) -> None:
    layer = build("lstm", norm, num_layers=2, bidirectional=True, dtype=dtype).eval()
    x = torch.randn(7, 4, 3, dtype=dtype)
    outputs = []
    for path in ("own", "folded"):
        forced(monkeypatch, layer, path)
        outputs.append(layer(x)[0])
    tol = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(*outputs, rtol=tol, atol=tol)


def test_the_layer_chooses_by_itself() -> None:
    """Ragged input on a CPU never takes torch's slow way."""
    x = torch.randn(20, 3, 3, dtype=torch.float64)
    packed = pack_padded_sequence(x, torch.tensor([20, 3, 3]))
    assert build("lstm", "none")._path(x) == "torch"
    assert build("lstm", "none")._path(packed) == "own"
    assert build("lstm", "none", proj_size=1)._path(packed) == "torch"
    assert build("lstm-all", "none")._path(x) == "own"
    for norm in ("sequence", "frame"):
        assert build("gru", norm)._path(x) == "own"
        assert build("gru", norm).eval()._path(x) == "folded"
        assert build("gru", norm).eval()._path(packed) == "own"
        assert build("gru", norm).eval()._path(x[:1]) == "own"  # as in sampling, word by word
    assert build("gru", "frame-slots").eval()._path(x) == "own"
    assert build("gru", "hidden").eval()._path(x) == "own"
    assert build("gru", "hidden-shared").eval()._path(x) == "folded"
    assert build("gru", "layer").eval()._path(x) == "own"
    assert build("lstm-output", "sequence").eval()._path(x) == "own"


@pytest.mark.parametrize("norm", ["sequence", "frame"])
def test_frozen_normalisers_keep_dropout(norm: str) -> None:
    """A common habit: train on with the normalisers in eval mode. Dropout must stay."""
    layer = build("lstm", norm, num_layers=2, dropout=0.5)
    for normaliser in layer.normalisers():
        normaliser.eval()
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    torch.manual_seed(1)
    first = layer(x)[0]
    assert not torch.equal(first, layer(x)[0])
    torch.manual_seed(1)
    assert torch.equal(first, layer(x)[0])


def test_normalisers_may_differ_in_mode() -> None:
    layer = build("gru", "sequence", num_layers=2)
    layer.norm_l0.eval()
    before = {name: b.clone() for name, b in layer.named_buffers()}
    layer(torch.randn(6, 4, 3, dtype=torch.float64))
    after = dict(layer.named_buffers())
    assert torch.equal(after["norm_l0.running_mean"], before["norm_l0.running_mean"])
    assert not torch.equal(after["norm_l1.running_mean"], before["norm_l1.running_mean"])


@pytest.mark.parametrize("which", ["norm_l0", "norm_l0_reverse"])
@pytest.mark.parametrize("norm", STATISTICAL)
def test_directions_may_differ_in_mode(norm: str, which: str) -> None:
    """Each does what it would do among its like."""
    layer = build("gru", norm, bidirectional=True)
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    state = copy.deepcopy(layer.state_dict())
    wanted = {}
    for training in (True, False):
        layer.load_state_dict(state)
        wanted[training] = (
            layer.train(training)(x)[0].chunk(2, 2),
            copy.deepcopy(layer.state_dict()),
        )
    layer.load_state_dict(state)
    layer.train()
    getattr(layer, which).eval()
    output = layer(x)[0].chunk(2, 2)
    for d, name in enumerate(("norm_l0", "norm_l0_reverse")):
        (expected, buffers) = wanted[name != which]
        close(output[d], expected[d], name)
        for key, value in layer.state_dict().items():
            if key.startswith(f"{name}."):
                close(value, buffers[key], key)


def test_ours_are_torchs_layers() -> None:
    for cell, base in (("tanh", nn.RNN), ("lstm", nn.LSTM), ("gru", nn.GRU)):
        for norm in ("sequence", "none"):
            assert isinstance(build(cell, norm), base)
