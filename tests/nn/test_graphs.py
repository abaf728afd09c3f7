"""Batches with too few rows inside compiled graphs, which cannot look at them: as eagerly."""

from typing import Any

import pytest
import torch

import normrnn

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"  # torch's own
)
LAST: dict[str, tuple[int, int]] = dict.fromkeys(("frame", "hidden", "recurrent"), (5, 1))
LAST |= dict.fromkeys(("sequence", "whiten"), (1, 1))


@pytest.fixture(autouse=True)
def _own_graphs() -> None:
    torch._dynamo.reset()  # of all layers there may be no more than a few


@pytest.mark.parametrize("norm", LAST)
def test_a_last_batch_of_one_ends_no_compiled_run(norm: str) -> None:
    """It is normalised with the running statistics, which stay as they are."""
    layer = normrnn.GRU(3, 4, norm=norm)
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(5, 4, 3))[0].sum().backward()
    kept = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    x = torch.randn(*LAST[norm], 3)
    output = compiled(x)[0]
    output.sum().backward()
    torch.testing.assert_close(dict(layer.named_buffers()), kept, rtol=0, atol=0)
    torch.testing.assert_close(output, layer.eval()(x)[0])


@pytest.mark.parametrize("norm", ["frame", "hidden"])
def test_one_sequence_among_empty_ones_updates_nothing(norm: str) -> None:
    layer = normrnn.GRU(3, 4, norm=norm)
    compiled: Any = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(5, 4, 3)
    compiled(x, lengths=torch.tensor([5, 3, 3, 1]))
    kept = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    assert int(kept["norm_l0.num_batches_tracked"]) == 1
    compiled(x, lengths=torch.tensor([5, 0, 0, 0]))
    torch.testing.assert_close(dict(layer.named_buffers()), kept, rtol=0, atol=0)


def test_a_singular_covariance_is_not_kept() -> None:
    """Five frames of six features among fifteen of padding."""
    layer: Any = normrnn.GRU(6, 4, norm="whiten")
    compiled: Any = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(5, 4, 6)
    compiled(x, lengths=torch.tensor([2, 1, 1, 1]))
    assert int(layer.norm_l0.num_batches_tracked) == 0
    compiled(x, lengths=torch.tensor([5, 4, 1, 1]))
    assert int(layer.norm_l0.num_batches_tracked) == 1
