"""torch's tracers: compile, export, fake tensors, torch.func, TorchScript, fx."""

import copy
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normrnn
from tests.helpers import CELLS, NORMS, build, gradients, same, unchanged
from tests.torchrun import ended, start_python
from tests.traced import TOOLS, needs_normrnn

EACH = [f"{cell}:{norm}" for cell, norm in zip(itertools.cycle(CELLS), NORMS, strict=False)]
ALL = [f"{cell}:{norm}" for cell in CELLS for norm in NORMS]
FEW = ["differentiated:lstm:sequence", "differentiated:tanh:layer", "transformed:lstm-all:sequence"]
FEW += ["transformed:gru:hidden-shared", "compiled:lstm-all:sequence"]
"""By tool; each with every cell and norm is among the slow ones."""


def check(cases: list[str], timeout: float) -> None:
    out = ended(start_python("-m", "tests.traced", *cases), timeout)
    assert out.splitlines() == [f"{case} {mode}" for case in cases for mode in ("train", "eval")]


def test_a_tracer_sees_what_the_layer_computes() -> None:
    """All in one process: most of its time goes into imports."""
    check(FEW, 500)


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_every_cell_and_norm(tool: str) -> None:
    check([f"{tool}:{case}" for case in (EACH if tool == "inductor" else ALL)], 7200)


@pytest.mark.parametrize(
    "first", ["torch._dynamo", pytest.param("normrnn", marks=pytest.mark.slow)]
)
def test_it_does_not_matter_what_is_imported_first(first: str) -> None:
    """torch.compile refuses what derives from its own layers; theirs it refuses still."""
    code = f"""
import torch
import {first}
import normrnn
layers = torch.nn.Sequential(normrnn.GRU(3, 2, norm="sequence"))
inside = torch.compile(layers, fullgraph=True, backend="eager")
assert inside(torch.randn(4, 3, 3))[0].shape == (4, 3, 2)
try:
    torch.compile(torch.nn.GRU(3, 2), fullgraph=True, backend="eager")(torch.randn(4, 3, 3))
except torch._dynamo.exc.Unsupported:
    print("refused")
"""
    assert ended(start_python("-c", code), 300) == "refused\n"


OTHER_TORCH = """
import importlib.machinery, importlib.util, sys
class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        text = self.get_source(name).replace("wrap_module", "wrap_one")
        return self.source_to_code(text, self.path)
class Finder:
    def find_spec(self, name, path, target=None):
        if name != "torch._dynamo.variables.builder":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        return importlib.util.spec_from_loader(name, Loader(name, spec.origin))
sys.meta_path.insert(0, Finder())
import torch, normrnn
layer, x = normrnn.GRU(3, 2, norm="sequence"), torch.randn(4, 3, 3)
model = torch.nn.Sequential(layer.eval())
assert torch.equal(torch.compile(model, backend="eager")(x)[0], model(x)[0])
torch.compiler.reset()
try:
    torch.compile(model, fullgraph=True, backend="eager")(x)
except torch._dynamo.exc.Unsupported:
    print("refused")
"""


@pytest.mark.slow
def test_a_compiler_without_the_place_we_tell_it_runs_layers_eagerly() -> None:
    """As another torch may be: its compiler and our layers still work."""
    assert ended(start_python("-c", OTHER_TORCH), 300) == "refused\n"


class Tagger(nn.Module):
    def __init__(self, norm: Any, peephole: Any = None):
        super().__init__()
        self.rnn = normrnn.LSTM(3, 4, 2, bidirectional=True, norm=norm, peephole=peephole)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


# torch's, of its own layers too.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean")
class TestTorchScript:
    x, other = torch.randn(5, 4, 3), torch.randn(9, 7, 3)

    def test_without_a_norm_a_trace_is_torchs(self) -> None:
        model = Tagger(None)
        traced: Any = torch.jit.trace(model, self.x)
        torch.testing.assert_close(traced(self.other), model(self.other))

    @pytest.mark.parametrize(
        "options",
        [
            {"norm": "sequence"},
            {"norm": "layer"},
            {"norm": None, "peephole": "all"},
            {"norm": None, "zoneout": (0.1, 0.2)},
            {"norm": None, "weight_drop": 0.5},
        ],
    )
    def test_with_more_it_says_what_to_do(self, options: Any) -> None:
        """What a tracer does not see must not run: it would write down whatever memory holds."""
        for tool in (torch.jit.script, lambda model: torch.jit.trace(model, self.x)):
            with pytest.raises(RuntimeError, match=r"LSTM: use torch\.export, or normrnn\.fold"):
                tool(normrnn.LSTM(3, 4, **options))

    def test_resets_and_cells_are_refused(self) -> None:
        layer, resets = normrnn.LSTM(3, 4, norm=None).eval(), torch.zeros(5, 4, dtype=torch.bool)
        for name, model, x in (
            ("LSTM", lambda x: layer(x, resets=resets)[0], self.x),
            ("GRUCell", normrnn.GRUCell(3, 4), self.x[0]),
        ):
            with pytest.raises(RuntimeError, match=rf"{name}: use torch\.export"):
                torch.jit.trace(model, x)

    def test_folded_it_goes_through(self) -> None:
        model = Tagger("sequence")
        model(self.x)
        scripted = torch.jit.script(normrnn.fold(model.eval()))
        torch.testing.assert_close(scripted(self.other), model(self.other))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@torch.no_grad()
def test_strict_export_without_our_operators() -> None:
    layer, x = build("gru", "layer", dtype=torch.float32).eval(), torch.randn(5, 4, 3)
    program = torch.export.export(layer, (x,), strict=True)
    assert not needs_normrnn(program)
    torch.testing.assert_close(program.module()(x), layer(x))


class Steps(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell = getattr(normrnn, kind)(3, 4)

    def forward(self, x: Tensor) -> Any:
        return self.cell(x, self.cell(x))


def nodes(traced: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in traced.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("what", ["RNNCell", "LSTMCell", "GRUCell", *NORMS])
def test_a_node_of_fx(what: str) -> None:
    if what in NORMS:
        model = nn.Sequential(build("gru", what, dtype=torch.float32)).eval()
        x = torch.randn(6, 4, 3)
        with pytest.raises(TypeError, match="trace the model that has it"):
            torch.fx.symbolic_trace(model[0])
    else:
        model, x = Steps(what), torch.randn(6, 3)
    traced = torch.fx.symbolic_trace(model)
    assert nodes(traced) == (["0"] if what in NORMS else ["cell"] * 2)
    same(traced(x), model(x))


class Counting:
    """A backend that counts how often its graphs run."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:  # noqa: ARG002
        def run(*args: Any) -> Any:
            self.count += 1
            return graph(*args)

        return run

    def runs(self, model: Any, x: Tensor) -> int:
        before = self.count
        model(x)
        return self.count - before


class TestAskingCompiledModels:
    """``fullgraph=True`` as examples/compiled.py has it: what is asked for is asked eagerly."""

    x = torch.randn(6, 4, 3) * 3 + 1

    @pytest.fixture(autouse=True)
    def _anew(self) -> Iterator[None]:
        torch.compiler.reset()
        with torch.no_grad():
            yield

    @pytest.mark.parametrize("part", [False, True])
    def test_numbers_are_those_of_the_eager_model(self, part: bool) -> None:
        eager = nn.Sequential(normrnn.LSTM(3, 5, norm="sequence"))
        backend, model = Counting(), copy.deepcopy(eager)
        whole: Any = torch.compile(model, fullgraph=True, backend=backend)
        if part:
            whole = model
            model[0] = torch.compile(model[0], fullgraph=True, backend=backend)  # type: ignore
        assert backend.runs(whole.eval(), self.x) == 1
        with normrnn.batch_statistics(whole), normrnn.batch_statistics(eager):
            torch.testing.assert_close(whole(self.x)[0], eager(self.x)[0])
        for each in (whole, eager):
            assert normrnn.recalibrate(each, self.x.split(2)) is each
        for one, other in zip(whole.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(one, other)
        assert backend.runs(whole, self.x) == 1
        torch.testing.assert_close(whole(self.x)[0], eager.eval()(self.x)[0])

    def test_afterwards_it_is_compiled_as_before(self) -> None:
        """Nested, after errors, and while another thread still asks for its own model."""
        backend, layer = Counting(), normrnn.GRU(3, 2, norm="sequence").eval()
        model: Any = torch.compile(layer, fullgraph=True, backend=backend)
        assert backend.runs(model, self.x) == 1
        with normrnn.batch_statistics(model):
            with normrnn.batch_statistics(normrnn.RNN(3, 2, norm="sequence")):
                assert backend.runs(model, self.x) == 0
            assert backend.runs(model, self.x) == 0
        assert backend.runs(model, self.x) == 1
        with pytest.raises(ValueError, match="a batch is a tensor"):
            normrnn.recalibrate(model, [3])
        assert backend.runs(model, self.x) == 1
        with torch.compiler.set_stance("fail_on_recompile"):
            normrnn.recalibrate(model, [self.x])
            with pytest.raises(RuntimeError, match="recompile"):
                model(self.x.double())
        usual = layer(self.x)[0]
        other = normrnn.batch_statistics(normrnn.RNN(3, 2, norm="sequence"))
        with ThreadPoolExecutor(1) as thread:
            thread.submit(other.__enter__).result()
            with normrnn.batch_statistics(model):
                assert not torch.allclose(model(self.x)[0], usual)
            torch.testing.assert_close(model(self.x)[0], usual)
            thread.submit(other.__exit__, None, None, None).result()
        assert backend.runs(model, self.x) == 1

    def test_inside_of_what_is_compiled(self) -> None:
        layer = normrnn.RNN(3, 2, norm="sequence").eval()

        def both(x: Tensor) -> tuple[Tensor, Tensor]:
            usual = layer(x)[0]
            with normrnn.batch_statistics(layer):
                return usual, layer(x)[0]

        expected = both(self.x)
        compiled: Any = torch.compile(both, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(self.x), expected)
        backend, rnn = Counting(), normrnn.RNN(3, 2, norm="sequence")
        other: Any = torch.compile(rnn, fullgraph=True, backend=backend)
        assert backend.runs(other, self.x) == 1

    def test_the_compiler_is_not_imported_for_it(self) -> None:
        code = """
import sys, torch, normrnn
layer, x = normrnn.GRU(3, 2, norm="sequence"), torch.randn(4, 3, 3)
normrnn.recalibrate(layer, [x])
with normrnn.batch_statistics(layer):
    layer(x)
print("torch._dynamo" in sys.modules)
"""
        assert ended(start_python("-c", code), 300) == "False\n"


def test_many_batches_at_once_do_not_update_buffers() -> None:
    layer = normrnn.GRU(3, 2, norm="sequence")
    with pytest.raises(RuntimeError, match="cannot be updated under vmap"):
        torch.func.vmap(lambda x: layer(x)[0])(torch.randn(2, 5, 4, 3))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's
class TestCompiledLengths:
    """Values that a graph learns when it runs; they are checked there."""

    x, h = torch.randn(6, 5, 3), torch.randn(1, 5, 4)

    @pytest.mark.parametrize("norm", ["sequence", "frame", "layer", None])
    @pytest.mark.parametrize("training", [True, False])
    def test_of_nobody(self, norm: Any, training: bool) -> None:
        """Padding alone: output 0, the state as it was, gradients 0 and that of the state."""
        torch.compiler.reset()
        layer = normrnn.LSTM(3, 4, norm=norm).train(training)
        h, c = self.h.clone().requires_grad_(), torch.randn(1, 5, 4)
        made = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with unchanged(layer):
            out, state = made(self.x, (h, c), lengths=torch.zeros(5, dtype=torch.long))
        assert not out.any()
        assert all(map(torch.equal, state, (h, c)))
        (out.sum() + (3 * state[0]).sum()).backward()
        assert torch.equal(h.grad, torch.full_like(h, 3))  # type: ignore[arg-type]
        assert not any(grad.any() for grad in gradients(layer).values())

    def test_that_cannot_be(self) -> None:
        torch.compiler.reset()
        layer = normrnn.LSTM(3, 4, norm="sequence").eval()
        made = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for wrong in (12, -1):
            with pytest.raises(RuntimeError, match="neither negative nor greater than T"):
                made(self.x, lengths=torch.tensor([6, 6, 5, 4, wrong]))
        for wrong in (torch.ones(5), torch.ones(4, dtype=torch.long)):
            with pytest.raises(Exception, match="Observed exception"):
                made(self.x, lengths=wrong)


@pytest.mark.parametrize("norm", NORMS)
def test_vmap_without_gradients(norm: str) -> None:
    layer = build("lstm", norm, dtype=torch.float32).eval()
    x = torch.randn(4, 3, 5, 3)
    with torch.no_grad():
        found = torch.func.vmap(lambda one: layer(one)[0])(x)
        expected = torch.stack([layer(one)[0] for one in x])
    torch.testing.assert_close(found, expected)
