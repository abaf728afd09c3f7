"""Weight drop, locked dropout and zoneout: their masks, pinned; by hand; and ragged."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import normrnn
from normrnn.ops import Norm, Steps, Weights, describe_call, recur
from tests.helpers import CELLS, NORMS, build, close

X: Any = {"dtype": torch.float64}
LENGTHS = (2, 5, 3)


def dropped(shape: Sequence[int], p: float) -> Tensor:
    """A mask by the next numbers of torch's generator."""
    return torch.rand(tuple(shape)) < p


def plain_of(layer: Any) -> Any:
    """The same weights without regularisers."""
    twin = copy.deepcopy(layer)
    twin.weight_drop, twin.zoneout, twin.dropout = 0.0, (0.0, 0.0), 0.0
    return twin


class TestWeightDrop:
    @pytest.mark.parametrize("norm", ["none", "sequence", "frame", "layer", "recurrent"])
    @pytest.mark.parametrize("cell", ["tanh", "lstm", "gru"])
    def test_is_dropout_of_the_recurrent_weights(self, cell: str, norm: str) -> None:
        """A mask for each layer and direction, in their order; gradients reach what was kept."""
        layer = build(cell, norm, weight_drop=0.4, num_layers=2, bidirectional=True)
        twin, x = plain_of(layer), torch.randn(5, 3, 3, **X)
        names = [f"weight_hh_{suffix}" for suffix in layer._suffixes]
        torch.manual_seed(5)
        masks = [(~dropped(getattr(twin, name).shape, 0.4)).double() / 0.6 for name in names]
        with torch.no_grad():
            for name, mask in zip(names, masks, strict=True):
                getattr(twin, name).mul_(mask)
        torch.manual_seed(5)
        output = layer(x, lengths=LENGTHS)[0]
        expected = twin(x, lengths=LENGTHS)[0]
        close(output, expected, "output")
        output.sum().backward()
        expected.sum().backward()
        for name, mask in zip(names, masks, strict=True):
            close(getattr(layer, name).grad, getattr(twin, name).grad * mask, name)
        entries = torch.cat([mask.flatten() for mask in masks])
        assert 0 < (entries == 0).sum() < entries.numel()

    def test_a_mask_per_call_and_none_at_test_time(self) -> None:
        layer, x = build("lstm", "none", weight_drop=0.5), torch.randn(5, 3, 3, **X)
        assert not torch.equal(layer(x)[0], layer(x)[0])
        layer.eval()
        assert torch.equal(layer(x)[0], plain_of(layer)(x)[0])
        assert torch.equal(layer(x)[0], layer.fold()(x)[0])


@pytest.mark.parametrize("lengths", [LENGTHS, None])
@pytest.mark.parametrize("norm", ["none", "sequence", "recurrent"])
def test_locked_dropout_has_one_mask_per_sequence(norm: str, lengths: Any) -> None:
    """The second layer sees the first one's output times a mask that does not change in time;
    of packed sequences, longest first."""
    how: dict[str, Any] = {"bidirectional": True, **NORMS[norm], **X}
    layer = normrnn.LSTM(3, 2, 2, dropout=0.5, dropout_kind="locked", **how)
    lower, upper = (normrnn.LSTM(n, 2, **how) for n in (3, 4))
    state, x = layer.state_dict(), torch.randn(5, 3, 3, **X)
    lower.load_state_dict({k: v for k, v in state.items() if "_l0" in k})
    upper.load_state_dict({k.replace("_l1", "_l0"): v for k, v in state.items() if "_l1" in k})
    torch.manual_seed(3)
    mask = F.dropout(torch.ones(3, 4, **X), 0.5)
    assert 0 < (mask == 0).sum() < mask.numel()
    if lengths is not None:
        order = sorted(range(3), key=lambda b: -lengths[b])
        mask = mask[[order.index(b) for b in range(3)]]
    torch.manual_seed(3)
    output = layer(x, lengths=lengths)[0]
    close(output, upper(lower(x, lengths=lengths)[0] * mask, lengths=lengths)[0], "output")


class TestZoneout:
    @pytest.mark.parametrize("reverse", [False, True])
    def test_masks_by_hand(self, reverse: bool) -> None:
        """Drawn for the rows: those of h, then those of c, of both directions side by side."""
        layer = build("lstm", "none", bidirectional=True, zoneout=(0.3, 0.6))
        x, end = torch.randn(5, 3, 3, **X), "_reverse" if reverse else ""
        torch.manual_seed(9)
        masks = [dropped((10, 4), share)[:, 2 * reverse :][:, :2] for share in (0.3, 0.6)]
        torch.manual_seed(9)
        output = layer(x, lengths=LENGTHS)[0][:, 1, 2 * reverse :][:, :2]
        cell: Any = torch.nn.LSTMCell(3, 2, **X)
        for name, parameter in cell.named_parameters():
            parameter.data = getattr(layer, f"{name}_l0{end}").data
        state, rows = torch.zeros(2, 1, 2, **X), (0, 3, 6, 8, 9)  # of the longest sequence
        for t in reversed(range(5)) if reverse else range(5):
            new = cell(x[t, 1:2], tuple(state))
            kept = [mask[rows[t]] for mask in masks]
            state = [torch.where(k, old, n) for k, old, n in zip(kept, state, new, strict=True)]
            close(output[t], state[0][0], f"h of step {t}")

    def test_shares_of_every_row(self) -> None:
        """Shares are for all rows or for each; nobody gets a gradient of them."""
        weights, x = Weights(None, torch.randn(4, 4, **X)), torch.randn(6, 4, **X)

        def run(kept: Tensor) -> Tensor:
            call = "RNN_TANH", (False,), x, [weights], Norm(), None, None, (kept, None)
            spec, tensors = describe_call(*call)
            return recur(spec, Steps((3, 3)), tensors).rows

        for rows in (1, 6):
            share = torch.full((rows, 4), 0.3, **X)
            close(run(share)[:3], 0.7 * x[:3].tanh(), "rows")
        for wrong in (torch.ones(2, 4, **X), torch.ones(1, 4, dtype=torch.bool)):
            with pytest.raises(ValueError, match="zoneout_h should"):
                run(wrong)
        with pytest.raises(ValueError, match="zoneout has no gradient"):
            run(share.requires_grad_())


@pytest.mark.parametrize("cell", CELLS)
def test_padding_is_never_looked_at(cell: str) -> None:
    zoneout = (0.2, 0.2 if cell.startswith("lstm") else 0.0)
    how: dict[str, Any] = {"weight_drop": 0.3, "dropout": 0.3, "dropout_kind": "locked"}
    layer = build(cell, "recurrent", num_layers=2, bidirectional=True, zoneout=zoneout, **how)
    x = torch.randn(6, 3, 3, **X)
    is_padding = torch.arange(6)[:, None] >= torch.tensor(LENGTHS)
    poisoned, outputs = x.masked_fill(is_padding[:, :, None], float("nan")), []
    for one, given in ((copy.deepcopy(layer), x), (layer, poisoned)):
        torch.manual_seed(2)
        outputs.append(one(given, lengths=LENGTHS)[0])
    assert torch.equal(*outputs)
    outputs[1].sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.slow
def test_compiled_as_eager() -> None:
    """The same masks in a graph; and the shares of test time in an exported one."""
    how: dict[str, Any] = {"num_layers": 2, "dropout": 0.3, "dropout_kind": "locked"}
    layer = normrnn.LSTM(3, 4, norm="frame", weight_drop=0.3, zoneout=(0.2, 0.2), **how)
    x, found = torch.randn(5, 4, 3), []
    for one in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        torch.manual_seed(6)
        output = one(x)[0]
        output.sum().backward()
        found.append([output, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(*found)
    layer.eval()
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x)[0], layer(x)[0])
