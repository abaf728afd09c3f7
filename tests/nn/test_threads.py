"""One thread asks for other statistics; another that runs the same model notices nothing."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import normrnn
from tests.helpers import STATISTICAL, build


def elsewhere(call: Callable[[], Any]) -> Any:
    """What it returns in another thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("norm", STATISTICAL)
class TestAServingModel:
    def test_batch_statistics(self, norm: str) -> None:
        layer = build("lstm", norm, num_layers=2).eval()
        x = torch.randn(4, 3, 3, dtype=torch.float64)
        wanted = layer(x)[0]
        with normrnn.batch_statistics(layer):
            other = elsewhere(lambda: layer(x)[0])
            own = layer(x)[0]
        assert torch.equal(other, wanted)
        assert not torch.isclose(own, wanted).all()

    def test_recalibrate(self, norm: str) -> None:
        """Until it is done; and what the other thread computes is not pooled."""
        layer, twin = build("gru", norm).eval(), build("gru", norm).eval()
        twin.load_state_dict(layer.state_dict())
        x = torch.randn(4, 3, 3, dtype=torch.float64)
        before, others = layer(x)[0], []

        def step(model: Any, batch: Tensor) -> None:
            model(batch)
            others.append(elsewhere(lambda: model(batch * 5)[0]))
            others.append(elsewhere(lambda: model(batch)[0]))

        normrnn.recalibrate(layer, [x], step=step)
        assert torch.equal(others[1], before)
        normrnn.recalibrate(twin, [x])
        for (name, a), b in zip(layer.named_buffers(), twin.buffers(), strict=True):
            assert torch.equal(a, b), name
