"""The reference itself: against torch.nn, and against numbers worked out by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests import reference
from tests.helpers import close
from tests.reference import Settings

PLAIN: dict[str, Any] = {
    "tanh": lambda **how: nn.RNN(3, 2, **how),
    "relu": lambda **how: nn.RNN(3, 2, nonlinearity="relu", **how),
    "lstm": lambda **how: nn.LSTM(3, 2, **how),
    "gru": lambda **how: nn.GRU(3, 2, **how),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", PLAIN)
def test_without_norm_it_is_torch(cell: Any, bias: bool) -> None:
    plain = PLAIN[cell](num_layers=2, bidirectional=True, bias=bias).double()
    x, lengths = torch.randn(5, 3, 3).double(), [2, 5, 3]
    h, c = torch.randn(2, 4, 3, 2).double()
    packed, final = plain(
        pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False),
        (h, c) if cell == "lstm" else h,
    )
    how = Settings(cell, None, num_layers=2, bidirectional=True)
    result = reference.stack(x, lengths, dict(plain.named_parameters()), how, (h, c))
    close(result.output, pad_packed_sequence(packed)[0], "output", 1e-12)
    if cell == "lstm":
        close(result.h, final[0], "h", 1e-12)
        close(result.c, final[1], "c", 1e-12)
    else:
        close(result.h, final, "h", 1e-12)


def frames(cell: Any, norm: Any, x: torch.Tensor, lengths: list[int], **extra: Any) -> Any:
    """A one-feature layer without recurrence, so that outputs are the normalised numbers."""
    p = {"weight_ih_l0": torch.ones(1, 1), "weight_hh_l0": torch.zeros(1, 1)} | {
        f"norm_l0.{name}": torch.as_tensor(value) for name, value in extra.items()
    }
    return reference.stack(x.view(*x.shape, 1), lengths, p, Settings(cell, norm, eps=0.0))


def test_sequence_wise_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0], [6.0, float("nan")]])  # rows 1, 2, 6: mean 3, variance 14 / 3
    output = frames("relu", "sequence", x, [2, 1]).output[..., 0]
    assert output.tolist() == [[0, 0], [pytest.approx(3 / (14 / 3) ** 0.5), 0]]


def test_frame_wise_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 6.0], [5.0, 9.0, float("nan")]])
    output = frames("relu", "frame", x, [2, 2, 1]).output[..., 0]
    assert output[0].tolist() == [0, 0, pytest.approx(3 / (14 / 3) ** 0.5)]
    assert output[1].tolist() == [0, 1, 0]


def test_running_statistics_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0], [6.0, float("nan")]])
    buffers = {"running_mean": [10.0], "running_var": [2.0], "num_batches_tracked": 4}
    after = frames("relu", "sequence", x, [2, 1], **buffers).buffers
    assert after["norm_l0.running_mean"].item() == pytest.approx(0.9 * 10 + 0.1 * 3)
    assert after["norm_l0.running_var"].item() == pytest.approx(0.9 * 2 + 0.1 * 7)  # 14 / (3 - 1)
    assert after["norm_l0.num_batches_tracked"].item() == 5


def test_slots_by_hand() -> None:
    nan = float("nan")
    x = torch.tensor([[1.0, 3.0], [2.0, 6.0], [4.0, nan], [7.0, nan]])
    buffers = {
        "running_mean": [[10.0], [20.0], [30.0]],
        "running_var": [[1.0], [4.0], [9.0]],
        "num_batches_tracked": [0, 1, 0],
    }
    result = frames("relu", "frame", x, [4, 2], **buffers)
    # Steps 2 and 3 are lone rows: slot 1, the last one updated, as it was before this batch.
    assert result.output[:, 0, 0].tolist() == [0, 0, 0, 0]
    assert result.buffers["norm_l0.running_mean"].flatten().tolist() == pytest.approx(
        [0.9 * 10 + 0.1 * 2, 0.9 * 20 + 0.1 * 4, 30]
    )
    assert result.buffers["norm_l0.running_var"].flatten().tolist() == pytest.approx(
        [0.9 * 1 + 0.1 * 2, 0.9 * 4 + 0.1 * 8, 9]
    )
    assert result.buffers["norm_l0.num_batches_tracked"].tolist() == [1, 2, 0]
    x = x + 20
    output = frames("relu", "frame", x, [4, 2], **buffers).output[:, 0, 0]
    assert output.tolist() == pytest.approx([0, 0, (24 - 20) / 2, (27 - 20) / 2])


def test_normalises_as_torch_does() -> None:
    x = torch.randn(4, 3, 2).double()
    p = {
        "weight_ih_l0": torch.eye(2).double(),
        "weight_hh_l0": torch.zeros(2, 2).double(),
        "norm_l0.weight": torch.tensor([0.5, 2.0]).double(),
        "norm_l0.bias": torch.tensor([0.1, -0.2]).double(),
    }
    for norm, rows in (("sequence", x.view(1, 12, 2)), ("frame", x)):
        expected = torch.stack(
            [
                F.batch_norm(r, None, None, p["norm_l0.weight"], p["norm_l0.bias"], True)
                for r in rows
            ]
        )
        result = reference.stack(x, [4, 4, 4], p, Settings("tanh", norm))  # type: ignore
        close(result.output, expected.view(4, 3, 2).tanh(), norm, 1e-12)


@pytest.mark.parametrize(("norm", "lengths"), [("sequence", [1]), ("frame", [3]), ("hidden", [3])])
def test_lone_rows_are_refused(norm: Any, lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="one row"):
        frames("relu", norm, torch.ones(max(lengths), 1), lengths)


def test_what_the_gates_see_includes_peepholes() -> None:
    """One cell, by hand: i and f see c of the step before, o that of this one."""
    p = {"weight_ih_l0": torch.ones(4, 1), "weight_hh_l0": torch.zeros(4, 1)}
    peepholes = {"i": 2.0, "f": 3.0, "o": 5.0}
    p |= {f"weight_c{gate}_l0": torch.full((1,), w) for gate, w in peepholes.items()}
    x = torch.tensor([[[0.5]], [[-0.25]]])
    seen = reference.stack(x, [2], p, Settings("lstm", None)).steps["l0"]
    first = torch.tensor(0.5).sigmoid() * torch.tensor(0.5).tanh()
    torch.testing.assert_close(seen[0].pre, torch.tensor([[0.5, 0.5, 0.5, 0.5 + 5 * first]]))
    i, f = -0.25 + 2 * first, -0.25 + 3 * first
    second = f.sigmoid() * first + i.sigmoid() * torch.tensor(-0.25).tanh()
    torch.testing.assert_close(seen[1].pre, torch.tensor([[i, f, -0.25, -0.25 + 5 * second]]))
    torch.testing.assert_close(seen[1].sums, torch.full((1, 4), -0.25))
