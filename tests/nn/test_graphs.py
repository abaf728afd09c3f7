"""Batches with too few rows inside compiled graphs, which cannot look at them: as eagerly."""

import copy
from typing import Any

import pytest
import torch

import normrnn
from tests.helpers import Tagger, unchanged

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"  # torch's own
)
LAST: dict[str, tuple[int, int]] = dict.fromkeys(("frame", "hidden", "recurrent"), (5, 1))
LAST |= dict.fromkeys(("sequence", "whiten"), (1, 1))


@pytest.fixture(autouse=True)
def _own_graphs() -> None:
    torch._dynamo.reset()  # of all layers there may be no more than a few


@pytest.mark.matrix(2)
@pytest.mark.parametrize("norm", LAST)
def test_a_last_batch_of_one_ends_no_compiled_run(norm: Any) -> None:
    """It is normalised with the running statistics, which stay as they are."""
    layer = normrnn.GRU(3, 4, norm=norm)
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(5, 4, 3))[0].sum().backward()
    x = torch.randn(*LAST[norm], 3)
    with unchanged(layer):
        output = compiled(x)[0]
        output.sum().backward()
    torch.testing.assert_close(output, layer.eval()(x)[0])


@pytest.mark.parametrize("norm", ["frame", "hidden"])
def test_one_sequence_among_empty_ones_updates_nothing(norm: Any) -> None:
    layer = normrnn.GRU(3, 4, norm=norm)
    compiled: Any = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(5, 4, 3)
    compiled(x, lengths=torch.tensor([5, 3, 3, 1]))
    assert int(layer.norm_l0.num_batches_tracked) == 1  # type: ignore[arg-type,union-attr]
    with unchanged(layer):
        compiled(x, lengths=torch.tensor([5, 0, 0, 0]))


def test_a_singular_covariance_is_not_kept() -> None:
    """Five frames of six features among fifteen of padding."""
    layer: Any = normrnn.GRU(6, 4, norm="whiten")
    compiled: Any = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(5, 4, 6)
    compiled(x, lengths=torch.tensor([2, 1, 1, 1]))
    assert int(layer.norm_l0.num_batches_tracked) == 0
    compiled(x, lengths=torch.tensor([5, 4, 1, 1]))
    assert int(layer.norm_l0.num_batches_tracked) == 1


def exported(layer: Any, time: int) -> Any:
    """A graph of any batch size."""
    dynamic, example = {"input": {1: torch.export.Dim("batch")}}, (torch.randn(time, 5, 3),)
    return torch.export.export(layer, example, dynamic_shapes=dynamic).module()


@pytest.mark.parametrize("norm", ["frame", "sequence", "recurrent"])
def test_an_exported_graph_uses_running_statistics_for_a_batch_of_one(norm: Any) -> None:
    """They stay as they are; before there are any it is an error, as in an eager call."""
    (time, _), layer = LAST[norm], normrnn.LSTM(3, 4, norm=norm)
    graph, one = exported(layer, time), torch.randn(*LAST[norm], 3)
    with pytest.raises(ValueError, match="single row"):
        graph(one)
    graph(torch.randn(time, 5, 3))  # which updates
    layer.load_state_dict(graph.state_dict())
    with unchanged(graph):
        torch.testing.assert_close(graph(one)[0], layer.eval()(one)[0])


@pytest.mark.parametrize("norm", ["frame", "hidden"])
def test_an_exported_graph_without_running_statistics_refuses_a_batch_of_one(norm: Any) -> None:
    layer = normrnn.LSTM(3, 4, norm=norm, track_running_stats=False).eval()
    graph, x = exported(layer, 5), torch.randn(5, 3, 3)
    torch.testing.assert_close(graph(x)[0], layer(x)[0])
    with pytest.raises(ValueError, match="single row"):
        graph(x[:, :1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_exported_graph_takes_shorter_sequences_than_slots(dtype: torch.dtype) -> None:
    """Padded to six steps, statistics of six steps, four steps long at most."""

    model = Tagger(normrnn.LSTM(3, 4, norm="frame", time_steps=6)).to(dtype)
    x = torch.randn(6, 5, 3, dtype=dtype)
    model(x, torch.tensor([6, 5, 4, 3, 3]))
    graph = torch.export.export(model, (x, torch.tensor([6, 5, 4, 3, 3])), strict=False).module()
    shorter = torch.tensor([4, 3, 2, 2, 2])
    state = copy.deepcopy(model.state_dict())
    found = graph(x, shorter)
    model.load_state_dict(state)
    torch.testing.assert_close(found, model(x, shorter))
