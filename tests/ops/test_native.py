"""The optional C kernels give what torch's own operations give, and are really optional."""

import os
import subprocess
import sys

import pytest
import torch

import normrnn
from normrnn.ops import Groups, Peephole, Statistics, Steps, cells, native, normalise
from normrnn.ops.running import update_shared_

needs_compiler = pytest.mark.skipif(
    native.library() is None, reason="no C compiler here: the optional kernels cannot be built"
)
SIZES = [(5, 5, 5), (6, 6, 3, 3, 1), (20, 19, 9, 9, 2), (1, 1)]


@pytest.fixture
def without(monkeypatch):
    """A function that turns the kernels off."""

    def off():
        monkeypatch.setattr(native, "library", lambda: None)

    return off


@needs_compiler
def test_what_the_kernels_take():
    assert native.usable(torch.zeros(1))
    assert not native.usable(torch.zeros(1, dtype=torch.float64))


@needs_compiler
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("peep", ["", "o", "ifo"])
@pytest.mark.parametrize("from_zero", [False, True])
def test_lstm_steps(sizes, reverse, peep, from_zero):
    torch.manual_seed(0)
    steps, H = Steps(sizes), 7
    N, B = steps.rows, steps.batch
    gates, weight = torch.randn(4 * H, N), torch.randn(4 * H, H) * 0.3
    h0 = torch.zeros(H, B) if from_zero else torch.randn(H, B)
    c0 = torch.randn(H, B)
    peephole = Peephole(*(torch.randn(H) if gate in peep else None for gate in "ifo"))
    dhs, dc = torch.randn(H, N), torch.randn(H, B)
    results = []
    for module, dtype in ((native, torch.float32), (cells, torch.float64)):
        wide = [x.to(dtype) for x in (gates.clone(), h0, c0, weight)]
        p = Peephole(*(None if x is None else x.to(dtype) for x in peephole))
        trace = module.lstm_forward(*wide, p, steps, reverse, from_zero)
        dh0, d_c = torch.zeros(H, B, dtype=dtype), dc.to(dtype, copy=True)
        weight_t = wide[3].t().contiguous()
        grad = module.lstm_backward(
            dhs.to(dtype, copy=True), d_c, trace, dh0, wide[2], weight_t, p, steps, reverse
        )
        results.append((*trace, grad, dh0, d_c))
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=2e-5, atol=2e-6)


@needs_compiler
@pytest.mark.parametrize("peephole", [None, "all"])
def test_parameters_need_not_lie_together(peephole):
    """Expanded, or a column of something: γ, β and peepholes through functional_call."""
    torch.manual_seed(0)
    layer = normrnn.LSTM(3, 5, norm="frame", peephole=peephole)
    names = [n for n, p in layer.named_parameters() if p.dim() == 1]
    together = {n: torch.rand(layer.get_parameter(n).shape) + 0.5 for n in names}
    apart = {n: torch.stack([v, -v], 1)[:, 0] for n, v in together.items()}
    apart["norm_l0.bias"] = torch.tensor(2.0).expand(20)
    together["norm_l0.bias"] = torch.full((20,), 2.0)
    assert not any(v.is_contiguous() for v in apart.values())
    x, results = torch.randn(6, 4, 3), []
    for values in (together, apart):
        values = {n: v.requires_grad_() for n, v in values.items()}
        out = torch.func.functional_call(layer, values, (x,))[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), list(values.values()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@needs_compiler
def test_activations_over_their_whole_range():
    x = torch.cat([torch.linspace(-95, 95, 9001), torch.tensor([0.0, 1e-30, -1e-6, 3e38, -3e38])])
    n, H = x.numel(), 1
    trace = native.lstm_forward(
        x.repeat(4, 1),
        torch.zeros(H, n),
        torch.zeros(H, n),
        torch.zeros(4, 1),
        Peephole(),
        Steps((n,)),
        False,
        True,
    )
    i, f, g, o = trace.gates.double()
    for gate in (i, f, o):
        torch.testing.assert_close(gate, x.double().sigmoid(), rtol=5e-7, atol=1e-37)
    torch.testing.assert_close(g, x.double().tanh(), rtol=5e-7, atol=0.0)


@needs_compiler
def test_not_a_number_stays_one():
    bad = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0]]).repeat(4, 1)
    zeros = torch.zeros(1, 4)
    trace = native.lstm_forward(
        bad, zeros, zeros, torch.zeros(4, 1), Peephole(), Steps((4,)), False, True
    )
    assert trace.hs[0].isnan().tolist() == [True, False, False, False]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("affine", [False, True])
def test_normalise(groups, affine, without):
    torch.manual_seed(0)
    C, width = 6, 37
    pre = torch.randn(C, groups * width) * 5 + 100
    weight, bias = (torch.rand(C), torch.randn(C)) if affine else (None, None)
    kind = Groups.sequence if groups == 1 else Groups.frame
    layout = kind(Steps((width,) * groups))
    out, statistics = normalise(pre, weight, bias, layout)
    weight64, bias64 = (None if v is None else v.double() for v in (weight, bias))
    truth, expected = normalise(pre.double(), weight64, bias64, layout)
    torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-5)
    for ours, right in zip(statistics, expected, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-6)
    without()
    plain, _ = normalise(pre, weight, bias, layout)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5)


def test_variance_of_a_large_offset_is_not_lost():
    """E[x²] − E[x]² in float32 would give nonsense here (trap 4)."""
    x = torch.tensor([[4096.0, 4097.0, 4098.0, 4099.0]])
    _, statistics = normalise(x, None, None, Groups.sequence(Steps((4,))))
    assert statistics.var.item() == 1.25


@pytest.mark.parametrize("groups", [1, 3])
def test_running_update(groups, without):
    torch.manual_seed(0)
    C, width = 5, 4
    batch = Statistics(
        torch.randn(C, groups), torch.rand(C, groups), torch.full((groups,), float(width))
    )
    buffers = []
    for turn in range(2):
        if turn:
            without()
        mean, var, tracked = torch.randn(C), torch.rand(C), torch.tensor(3)
        torch.manual_seed(1)
        mean.normal_()
        var.uniform_()
        update_shared_(mean, var, tracked, batch, 0.1)
        buffers.append((mean, var, tracked))
    for ours, truth in zip(*buffers, strict=True):
        torch.testing.assert_close(ours, truth)
    assert buffers[0][2] == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_running_update_refuses_what_is_not_finite(bad, which):
    values = [torch.ones(3, 1), torch.ones(3, 1)]
    values[which][1] = bad
    mean, var, tracked = torch.zeros(3), torch.ones(3), torch.tensor(0)
    batch = Statistics(values[0], values[1], torch.tensor([8.0]))
    update_shared_(mean, var, tracked, batch, 0.1)
    assert (mean.tolist(), var.tolist(), tracked.item()) == ([0.0] * 3, [1.0] * 3, 0)


@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (64, 33)])
def test_transposed(shape):
    matrix = torch.randn(shape)
    copy = native.transposed(matrix)
    assert copy.is_contiguous()
    assert torch.equal(copy, matrix.t())


@pytest.mark.parametrize("b", [1, 2, 7, 9, 15, 16, 17, 23])
@pytest.mark.parametrize("at", [0, 3, "end"])
def test_widened_products(b, at):
    """Neighbouring columns are read, and must not matter: here they are NaN."""
    K, N = 5, 64
    start = N - b if at == "end" else at
    big, weight = torch.full((K, N), float("nan")), torch.randn(4, K)
    big[:, start : start + b] = torch.randn(K, b)
    target = torch.randn(4, b)
    expected = target + weight @ big[:, start : start + b].clone()
    result = cells.add_product_(target, weight, big[:, start : start + b])
    torch.testing.assert_close(result, expected)
    assert result is target


@pytest.mark.parametrize("norm", ["sequence", "frame", None])
@pytest.mark.parametrize("lengths", [None, [9, 4, 9, 2, 9, 9]])
def test_layer_with_and_without(norm, lengths, without):
    torch.manual_seed(0)
    layer = normrnn.LSTM(6, 8, num_layers=2, bidirectional=True, norm=norm)
    # Four rows or more in every step: the variance of two is too ill-conditioned to compare.
    x = torch.randn(9, 6, 6, requires_grad=True)
    start = {k: v.clone() for k, v in layer.state_dict().items()}
    results = []
    for turn in range(2):
        if turn:
            without()
            layer.load_state_dict(start)
        layer.zero_grad()
        x.grad = None
        output, (h, c) = layer(x, lengths=lengths)
        (output.square().sum() + h.sin().sum() + c.cos().sum()).backward()
        grads = [p.grad for p in (x, *layer.parameters())]
        results.append([output, h, c, *grads, *layer.buffers()])
        results[-1] = [t.detach().clone() for t in results[-1] if t is not None]
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reason", ["NORMRNN_NATIVE", "CC", "broken compiler", "read-only cache"])
def test_everything_works_without(reason, tmp_path):
    env = dict(os.environ, XDG_CACHE_HOME=str(tmp_path), OMP_NUM_THREADS="1")
    if reason == "NORMRNN_NATIVE":
        env["NORMRNN_NATIVE"] = "0"
    elif reason == "CC":
        env["CC"] = "no-such-compiler"
    elif reason == "broken compiler":
        env["CC"] = "false"
    else:
        env["XDG_CACHE_HOME"] = "/proc/nowhere"
    code = (
        "import torch, normrnn; from normrnn.ops import native; "
        "layer = normrnn.LSTM(3, 4); layer(torch.randn(5, 2, 3))[0].sum().backward(); "
        "print(native.library(), layer.weight_hh_l0.grad.isfinite().all().item())"
    )
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.stdout.split() == ["None", "True"], run.stderr
