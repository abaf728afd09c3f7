"""`tools.shared_start`: eval agrees with training by the rule that the package has."""

from typing import Any

import pytest
import torch

import normrnn
from tools.shared_start import RULES, FrameNorm, main


@pytest.mark.parametrize("slots", [None, 5])
def test_the_chosen_rule_is_the_package_s(slots: int | None) -> None:
    layer = normrnn.RNN(3, 4, norm="frame", time_steps=slots)
    norm, x = FrameNorm(4, "step", slots), torch.randn(5, 6, 3)
    x[0] = x[0, 0]
    gates = x @ layer.weight_ih_l0.detach().t()
    for _ in range(3):
        norm(gates)
        layer(x)
    own: Any = layer.norm_l0
    torch.testing.assert_close(norm.mean.squeeze(0), own.running_mean)
    torch.testing.assert_close(norm.var.squeeze(0), own.running_var)
    with torch.no_grad():
        layer.weight_hh_l0.zero_()
    torch.testing.assert_close(norm(gates).tanh(), layer(x)[0])


def test_it_prints_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--updates", "4"])
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2 * (len(RULES) + 1)
