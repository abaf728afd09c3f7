"""Every layer against the naive loop: outputs, all gradients, all buffers, in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import normrnn
from tests.helpers import CELLS, NORMS, STATISTICAL, build, check_against_reference

DEPTHS = [1, 2]
DIRECTIONS = [False, True]


@pytest.mark.matrix(8)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("bidirectional", DIRECTIONS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", CELLS)
class TestEveryLayer:
    def layer(self, cell: str, norm: str, bidirectional: bool, depth: int, **options: Any) -> Any:
        return build(cell, norm, bidirectional=bidirectional, num_layers=depth, **options)

    def test_dense(self, cell: str, norm: str, bidirectional: bool, depth: int) -> None:
        layer = self.layer(cell, norm, bidirectional, depth)
        check_against_reference(layer, [5, 5, 5], "dense")

    # Lengths 2, 5, 3 in T = 6: unsorted, a lone tail at t = 3 and 4, a step that nobody reaches.
    @pytest.mark.parametrize("form", ["padded", "batch_first", "unsorted"])
    def test_ragged(self, cell: str, norm: str, bidirectional: bool, depth: int, form: str) -> None:
        options = {"batch_first": True} if form == "batch_first" else {}
        layer = self.layer(cell, norm, bidirectional, depth, **options)
        check_against_reference(layer, [2, 5, 3], form, T=6)

    def test_sorted_packed(self, cell: str, norm: str, bidirectional: bool, depth: int) -> None:
        layer = self.layer(cell, norm, bidirectional, depth)
        check_against_reference(layer, [5, 4, 4, 1], "sorted")

    def test_unbatched(self, cell: str, norm: str, bidirectional: bool, depth: int) -> None:
        layer = self.layer(cell, norm, bidirectional, depth)
        layer.train(norm in ("sequence", "layer", "none"))  # else every time slice is a single row
        check_against_reference(layer, [5], "unbatched")

    @pytest.mark.parametrize("form", ["dense", "padded", "unsorted"])
    def test_test_time(
        self, cell: str, norm: str, bidirectional: bool, depth: int, form: str
    ) -> None:
        layer = self.layer(cell, norm, bidirectional, depth).eval()
        check_against_reference(layer, [5, 5, 5] if form == "dense" else [4, 1, 5], form)

    def test_batch_statistics(self, cell: str, norm: str, bidirectional: bool, depth: int) -> None:
        layer = self.layer(cell, norm, bidirectional, depth)
        with normrnn.batch_statistics(layer):
            check_against_reference(layer, [4, 2, 4], "padded", batch_statistics=True)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("options", [{"bias": False}, {"affine": False}], ids=["bias", "affine"])
def test_without_bias_or_affine(cell: str, norm: str, options: dict[str, Any]) -> None:
    layer = build(cell, norm, bidirectional=True, **options)
    check_against_reference(layer, [2, 5, 3], "padded", T=6)
    check_against_reference(build(cell, norm, **options).eval(), [4, 4], "dense")


@pytest.mark.matrix(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_no_initial_state(cell: str, norm: str) -> None:
    layer = build(cell, norm, num_layers=2, bidirectional=True)
    check_against_reference(layer, [2, 5, 3], "padded", with_state=False)


@pytest.mark.parametrize("norm", STATISTICAL)
@pytest.mark.parametrize(("eps", "momentum"), [(0.1, None), (1e-3, 0.7), (1e-5, 0.0), (1e-5, 1.0)])
def test_eps_and_momentum(norm: str, eps: float, momentum: float | None) -> None:
    layer = build("gru", norm, num_layers=2, eps=eps, momentum=momentum)
    check_against_reference(layer, [2, 5, 3], "padded")


@pytest.mark.parametrize("norm", ["sequence", "frame", "hidden"])
@pytest.mark.parametrize("training", [True, False])
def test_without_running_statistics_the_batch_is_used(norm: str, training: bool) -> None:
    layer = build("lstm", norm, track_running_stats=False).train(training)
    assert not list(layer.buffers())
    check_against_reference(layer, [4, 4, 4], "dense", batch_statistics=True)


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"bias": False}, {"eps": 0.1}])
@pytest.mark.parametrize("bidirectional", DIRECTIONS)
@pytest.mark.parametrize("cell", ["lstm", "lstm-output", "lstm-all"])
def test_layer_norm_of_the_cell(cell: str, bidirectional: bool, options: dict[str, Any]) -> None:
    options = {"cell_norm": True, "bidirectional": bidirectional, **options}
    layer = build(cell, "layer", num_layers=2, **options)
    check_against_reference(layer, [2, 5, 3], "padded", T=6)
    check_against_reference(layer, [4, 4], "dense")
    check_against_reference(layer.eval(), [5], "unbatched")


ragged = st.lists(st.integers(1, 7), min_size=2, max_size=5)


@given(
    lengths=ragged,
    more=st.integers(0, 2),
    cell=st.sampled_from(list(CELLS)),
    norm=st.sampled_from(list(NORMS)),
    bidirectional=st.booleans(),
    depth=st.integers(1, 2),
    training=st.booleans(),
    form=st.sampled_from(["padded", "unsorted"]),
)
def test_any_lengths(
    lengths: list[int],
    more: int,
    cell: str,
    norm: str,
    bidirectional: bool,
    depth: int,
    training: bool,
    form: str,
) -> None:
    torch.manual_seed(sum(lengths))
    layer = build(cell, norm, bidirectional=bidirectional, num_layers=depth).train(training)
    T = max(lengths) + (more if form == "padded" else 0)
    check_against_reference(layer, lengths, form, T=T, tol=1e-9)
