"""``reset_to`` and ``learn_initial_state``: the states that resets and sequences start from."""

from typing import Any

import pytest
import torch

import normrnn
from tests.helpers import CELLS, NORMS, build, check_against_reference

LENGTHS = [2, 6, 4]
FORMS = ["dense", "padded", "batch_first", "sorted", "unsorted"]


def resets(form: str) -> torch.Tensor:
    torch.manual_seed(len(form))
    return torch.rand(6, 3) < 0.4


@pytest.mark.matrix(8)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_reset_to_against_the_reference(
    cell: str, norm: str, form: str, bidirectional: bool
) -> None:
    """For every sequence, or one for all; in training and eval mode."""
    options: dict[str, Any] = {"batch_first": form == "batch_first", "num_layers": 2}
    layer = build(cell, norm, bidirectional=bidirectional, **options)
    lengths = {"dense": [6, 6, 6], "sorted": [6, 4, 2]}.get(form, LENGTHS)
    more: dict[str, Any] = {"T": 6, "resets": resets(form)}
    check_against_reference(layer, lengths, form, reset_to=3, **more)
    check_against_reference(layer.eval(), lengths, form, reset_to=1, with_state=False, **more)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_learned_states_against_the_reference(cell: str, norm: str, form: str) -> None:
    """Where no state is given; a given one counts instead."""
    options: dict[str, Any] = {"batch_first": form == "batch_first", "num_layers": 2}
    layer = build(cell, norm, bidirectional=True, learn_initial_state=True, **options)
    lengths = {"dense": [6, 6, 6], "sorted": [6, 4, 2]}.get(form, LENGTHS)
    check_against_reference(layer, lengths, form, T=6, resets=resets(form), with_state=False)
    layer = build(cell, norm, learn_initial_state=True, **options).eval()
    layer.requires_grad_(False)
    x = torch.randn(6, 3, 3, dtype=torch.float64)
    x = x.transpose(0, 1) if layer.batch_first else x
    zero = torch.zeros(2, 3, 2, dtype=torch.float64)
    given = layer(x, (zero, zero) if layer.mode == "LSTM" else zero)[0]
    for name, parameter in layer.named_parameters():
        if name.startswith(("h_0", "c_0")):
            parameter.zero_()
    torch.testing.assert_close(layer(x)[0], given)


@pytest.mark.parametrize("options", [{}, {"zoneout": (0.3, 0.0)}, {"weight_drop": 0.3}])
@pytest.mark.parametrize("norm", ["sequence", "layer", "rms", "none"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "ligru"])
def test_float32_is_float64(cell: str, norm: str, options: dict[str, Any]) -> None:
    """By the compiled kernels, where there are any, in eager and compiled mode."""
    layer = build(cell, norm, learn_initial_state=True, **options).eval()
    single = build(cell, norm, learn_initial_state=True, dtype=torch.float32, **options).eval()
    single.load_state_dict(layer.state_dict())
    x, cut = torch.randn(6, 3, 3), resets("dense")
    results = []
    for model, value in ((layer, x.double()), (single, x)):
        output, _ = model(value, resets=cut, lengths=[6, 3, 5])
        output.square().sum().backward()
        results.append([output, *(p.grad for p in model.parameters())])
    for wide, narrow in zip(*results, strict=True):
        torch.testing.assert_close(narrow, wide.float(), rtol=1e-3, atol=1e-4)


def test_unbatched_and_empty() -> None:
    layer = build("lstm", "layer", learn_initial_state=True)
    check_against_reference(
        layer, [5], "unbatched", resets=torch.rand(5, 1) < 0.5, with_state=False
    )
    layer = build("gru", "layer")
    check_against_reference(
        layer, [5], "unbatched", resets=torch.rand(5, 1) < 0.5, reset_to=1, with_state=False
    )
    layer = build("lstm", "layer", learn_initial_state=True)
    output, (h, _) = layer(torch.randn(4, 2, 3, dtype=torch.float64), lengths=[0, 3])
    assert not output[:, 0].any()
    torch.testing.assert_close(h[:, 0], layer.h_0_l0[None])


def test_second_derivatives() -> None:
    layer = build("lstm", "layer")
    x = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    start = torch.randn(1, 1, 2, dtype=torch.float64, requires_grad=True)
    cut = torch.tensor([[False, True], [True, False], [False, True]])

    def run(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return layer(x, resets=cut, reset_to=(start, start))[0]

    assert torch.autograd.gradgradcheck(run, (x, start))


@pytest.mark.parametrize("cell", ["lstm", "ligru"])
def test_in_a_graph(cell: str) -> None:
    """torch.export and the compiler see what eager mode computes."""
    layer = build(cell, "sequence", learn_initial_state=True, dtype=torch.float32).eval()
    layer.requires_grad_(False)
    x, cut = torch.randn(6, 3, 3), resets("dense")
    start = torch.randn(1, 1, 2)
    to: Any = (start, start) if cell == "lstm" else start
    program = torch.export.export(layer, (x,), {"resets": cut, "reset_to": to})
    wanted = layer(x, resets=cut, reset_to=to)[0]
    torch.testing.assert_close(program.module()(x, resets=cut, reset_to=to)[0], wanted)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, resets=cut, reset_to=to)[0], wanted)


def test_arguments_that_do_not_fit() -> None:
    layer: Any = normrnn.LSTM(3, 2, norm="layer")
    x = torch.randn(4, 3, 3)
    start, cut = torch.zeros(1, 1, 2), torch.zeros(4, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="resets"):
        layer(x, reset_to=(start, start))
    with pytest.raises(ValueError, match="reset_to"):
        layer(x, resets=cut, reset_to=start)
    for wrong in (torch.zeros(1, 2, 2), torch.zeros(2, 1, 2), torch.zeros(1, 1, 3)):
        with pytest.raises(RuntimeError, match="reset_to"):
            layer(x, resets=cut, reset_to=(wrong, wrong))


def test_folding_keeps_the_learned_state() -> None:
    model = torch.nn.Sequential(build("lstm", "sequence", learn_initial_state=True)).eval()
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    with pytest.warns(UserWarning, match="initial state"):
        plain: Any = normrnn.fold(model)
    assert isinstance(plain[0], normrnn.LSTM)
    assert plain[0].norm is None
    torch.testing.assert_close(plain(x)[0], model(x)[0])
    layer: Any = model[0]
    torch.testing.assert_close(layer.fold()(x)[0], model(x)[0])
    with pytest.raises(ValueError, match="initial states"):
        normrnn.fold(model, plain=True)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_parameters() -> None:
    layer = normrnn.LSTM(3, 5, 2, norm=None, proj_size=2, learn_initial_state=True)
    shapes = {n: tuple(p.shape) for n, p in layer.named_parameters() if n[:3] in ("h_0", "c_0")}
    assert shapes == {"h_0_l0": (2,), "c_0_l0": (5,), "h_0_l1": (2,), "c_0_l1": (5,)}
    layer.reset_parameters()
    assert not any(p.any() for n, p in layer.named_parameters() if n in shapes)
    assert layer(torch.randn(4, 3, 3))[0].shape == (4, 3, 2)
