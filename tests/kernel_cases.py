"""Small problems for the compiled recurrence, and the loop in float64 beside it."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normrnn.ops import Norm, Result, Spec, Steps, Weights, describe_call, recur
from normrnn.ops import Tensors as CallTensors
from normrnn.ops.backend import backend
from normrnn.ops.call import CELLS
from normrnn.ops.call import check as check_call
from normrnn.ops.loop import loop
from normrnn.ops.recurrence import can_run_native

Tensors = dict[str, Tensor]
Compute = Callable[[Spec, Steps, CallTensors], Result]
NORMS = {
    "plain": (False, 0),
    "sequence": (True, 1),
    "sequence fixed": (False, 1),
    "frame": (True, 1),
    "frame slots": (True, 2),
    "frame fixed": (False, 1),
    "frame fixed slots": (False, 2),
    "step": (True, 1),
    "step fixed": (False, 1),
    "step fixed slots": (False, 2),
    "row": (False, 0),
    "row cell": (False, 0),
    "rms": (False, 0),
    "rms cell": (False, 0),
    "recurrent": (True, 1),
    "recurrent slots": (True, 2),
    "recurrent fixed": (False, 1),
    "recurrent fixed slots": (False, 2),
    "recurrent cell": (True, 1),
    "recurrent cell fixed": (False, 1),
    "recurrent cell fixed slots": (False, 2),
}
"""Each with whether it takes the batch's statistics, and what it is given: nothing, one slot for
all steps, or one for each."""


def pairs(*modes: str) -> list[tuple[str, str]]:
    """Every mode with every norm that it has: a cell is the LSTM's alone."""
    return [(m, p) for m in modes for p in NORMS if m == "LSTM" or not Case(m, p, ()).has_cell]


@dataclass(frozen=True)
class Case:
    mode: str
    norm: str
    sizes: tuple[int, ...]
    reverse: tuple[bool, ...] = (False,)
    inputs: int = 3
    """Features of x; 0: ready gate inputs."""
    hidden: int = 5
    state: bool = True
    affine: bool = True
    peephole: str = ""
    threads: int = 1
    seed: int = 0
    zoneout: str = ""
    """Masks or shares, and of what: "masks h", "shares hc", …"""
    resets: bool = False
    reset_to: bool = False
    """Whether resets start from a state that is given."""
    constant: tuple[int, ...] = ()
    """Time steps at which all sequences have the same frame."""

    @property
    def has_cell(self) -> bool:
        """Whether the cell is normalised too."""
        return "cell" in self.norm.split()

    @property
    def zoned(self) -> str:
        """The parts of a state of which something stays."""
        parts = self.zoneout.split()[-1] if self.zoneout else ""
        return parts if self.mode == "LSTM" else parts.replace("c", "")

    @property
    def is_steep(self) -> bool:
        """Whether float32 loses digits step by step: a product is divided by the spread of a few
        rows, and its errors with it. Then nobody's float32 is as near as elsewhere."""
        return self.norm.startswith("recurrent") and NORMS[self.norm][0]

    @property
    def few(self) -> bool:
        """Whether some statistics are those of three rows or fewer: badly conditioned."""
        batch, _ = NORMS[self.norm]
        rows = [sum(self.sizes)] if self.norm == "sequence" else self.sizes
        return batch and any(1 < n < 4 for n in rows)

    def __str__(self) -> str:
        ways = "".join("<" if r else ">" for r in self.reverse)
        sizes = "-".join(map(str, self.sizes))
        more = [self.zoneout, "resets" * self.resets, "to a state" * self.reset_to]
        return f"{self.mode} {self.norm} {ways} {sizes} I{self.inputs} H{self.hidden} {more}"


def tensors_of(case: Case) -> Tensors:
    """Random float32 leaves, by name."""
    g = torch.Generator().manual_seed(case.seed)
    D, H, C = len(case.reverse), case.hidden, CELLS[case.mode].gates * case.hidden
    rows, batch = sum(case.sizes), case.sizes[0]
    made: Tensors = {}

    def normal(name: str, *shape: int, scale: float = 1.0) -> None:
        made[name] = (torch.randn(shape, generator=g) * scale).requires_grad_()

    def positive(name: str, *shape: int) -> None:
        made[name] = (torch.rand(shape, generator=g) + 0.4).requires_grad_()

    normal("x", rows, case.inputs or D * C)
    with torch.no_grad():
        for t in case.constant:
            first = sum(case.sizes[:t])
            made["x"][first : first + case.sizes[t]] = made["x"][first]
    if case.state:
        normal("h0", D, batch, H, scale=0.5)
        if case.mode == "LSTM":
            normal("c0", D, batch, H, scale=0.5)
    for d in range(D):
        if case.inputs:
            normal(f"w_ih{d}", C, case.inputs, scale=case.inputs**-0.5)
        normal(f"w_hh{d}", C, H, scale=H**-0.5)
        if case.mode == "GRU" and case.affine:
            normal(f"bias_hn{d}", H)
        for gate in case.peephole if case.mode == "LSTM" else "":
            normal(f"peephole_{gate}{d}", H, scale=0.3)
    if case.affine:
        normal("bias", D * C, scale=0.3)
        if case.norm != "plain":
            positive("weight", D * C)
        if case.norm.startswith(("row", "rms", "recurrent")):
            positive("gamma_hh", D * C)
        if case.has_cell:
            positive("weight_c", D * H)
            normal("bias_c", D * H, scale=0.3)
    slots = NORMS[case.norm][1]
    if slots:
        K = len(case.sizes) if slots == 2 else 1
        width = 2 * C + H * case.has_cell if case.norm.startswith("recurrent") else C
        made["mean"] = torch.randn(K, D * width, generator=g)
        made["var"] = torch.rand(K, D * width, generator=g) + 0.5
    for part in case.zoned:
        if case.zoneout.startswith("masks"):
            made[f"kept_{part}"] = torch.rand(rows, D * H, generator=g) < 0.4
        else:
            made[f"kept_{part}"] = torch.rand(1, D * H, generator=g)
    if case.resets:
        made["resets"] = torch.rand(rows, generator=g) < 0.3
    if case.reset_to:
        normal("reset_h", D, batch, H, scale=0.5)
        if case.mode == "LSTM":
            normal("reset_c", D, batch, H, scale=0.5)
    return made


def one_direction(
    mode: str,
    gates: Tensor,
    w_hh: Tensor,
    steps: Steps,
    *state: Tensor,
    reverse: bool = False,
    resets: Tensor | None = None,
    **vectors: Tensor,
) -> tuple[Tensor, ...]:
    """The recurrence of gate inputs (N, C): rows and the final state, (B, H) each."""
    start = tuple(part[None] for part in state) or None
    weights = [Weights(None, w_hh, **vectors)]
    spec, tensors = describe_call(mode, (reverse,), gates, weights, Norm(), start, resets)
    result = recur(spec, steps, tensors)
    return result.rows, *(part[0] for part in result.state)


def native(spec: Spec, steps: Steps, tensors: CallTensors) -> Result:
    """The compiled kernels, or an error."""
    with backend("native"):
        return recur(spec, steps, tensors)


def is_native(spec: Spec, steps: Steps, tensors: CallTensors) -> bool:
    """Whether the call is valid, and the compiled kernels take it."""
    try:
        check_call(spec, steps, tensors)
    except ValueError:
        return False
    return can_run_native(spec, steps, tensors)


def problem(case: Case, t: Tensors) -> tuple[Spec, Steps, CallTensors]:
    weights = [
        Weights(
            t.get(f"w_ih{d}"),
            t[f"w_hh{d}"],
            t.get(f"bias_hn{d}"),
            *(t.get(f"peephole_{gate}{d}") for gate in "ifo"),
        )
        for d in range(len(case.reverse))
    ]
    state = tuple(t[name] for name in ("h0", "c0") if name in t) or None
    zoneout = t.get("kept_h"), t.get("kept_c")
    call = case.mode, case.reverse, t["x"], weights, _norm(case, t), state, t.get("resets")
    reset_to = tuple(t[name] for name in ("reset_h", "reset_c") if name in t) or None
    spec, tensors = describe_call(*call, zoneout, reset_to)
    return spec, Steps.packed(case.sizes), tensors


def _norm(case: Case, t: Tensors) -> Norm:
    kind, batch = case.norm.split()[0], NORMS[case.norm][0]
    kinds = {"plain": "none", "sequence": "input", "frame": "input"}
    return Norm(
        kinds.get(kind, kind),
        0.0 if kind == "plain" else 1e-5,
        kind in ("frame", "step", "recurrent"),
        batch,
        case.has_cell,
        *(t.get(name) for name in Norm._fields[5:]),
    )


def outputs_of(result: Result) -> Tensors:
    """All that a call returns, by name."""
    found: Tensors = {"rows": result.rows, **dict(zip("hc", result.state, strict=False))}
    if result.statistics is not None:
        found |= result.statistics._asdict()
    return found


def computed(case: Case, tensors: Tensors, compute: Compute) -> tuple[Tensors, Tensors]:
    """Outputs, and gradients of every leaf with random cotangents, each by name."""
    found = outputs_of(compute(*problem(case, tensors)))
    g = torch.Generator().manual_seed(case.seed + 1)
    pulled = [found[name] for name in ("rows", "h", "c") if name in found]
    heads = [torch.randn(out.shape, generator=g).to(out) for out in pulled]
    leaves = {name: t for name, t in tensors.items() if t.requires_grad}
    grads = torch.autograd.grad(pulled, list(leaves.values()), heads, materialize_grads=True)
    return found, dict(zip(leaves, grads, strict=True))


def second_derivatives(case: Case, tensors: Tensors, compute: Compute) -> Tensors:
    """Of the squares of all first derivatives, by every leaf, from all outputs."""
    result = compute(*problem(case, tensors))
    leaves = {n: t for n, t in tensors.items() if t.requires_grad}
    loss = torch.stack([(r * r).sum() for r in (result.rows, *result.state)]).sum()
    first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    penalty = torch.stack([(g * g).sum() for g in first]).sum()
    second = torch.autograd.grad(penalty, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, second, strict=True))


def in_float64(case: Case, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The same by the loop, from the same numbers."""
    return computed(case, as_type(tensors, torch.float64), loop)


def as_type(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """New leaves; what is bool stays so."""
    return {
        name: t.detach()
        .to(dtype if t.is_floating_point() else t.dtype, copy=True)
        .requires_grad_(t.requires_grad)
        for name, t in tensors.items()
    }


def check(
    actual: Tensors,
    expected: Tensors,
    tolerance: float,
    least: float = 0.0,
    beside: Tensors | None = None,
) -> None:
    """Every entry within ``tolerance`` of the largest of its tensor, or of ``least``; or within
    three times what somebody ``beside`` is off by, in the same precision."""
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        assert actual[name].shape == wanted.shape, name
        size = max(wanted.abs().max().item(), least, 1e-30)
        error = (actual[name] - wanted).abs().max().item() / size
        bound = tolerance
        if beside is not None:
            bound = max(bound, 3 * (beside[name] - wanted).abs().max().item() / size)
        assert error <= bound, f"{name}: off by {error:.2g} of its largest entry"


def check_against_float64(case: Case) -> None:
    """Outputs and gradients of the kernels, beside the loop in float64."""
    tensors = tensors_of(case)
    with threads(case.threads):
        assert is_native(*problem(case, tensors))
        outputs, grads = computed(case, tensors, native)
        with torch.no_grad():  # what has no backward pass may be computed another way
            alone = outputs_of(native(*problem(case, tensors)))
    wanted, wanted_grads = in_float64(case, tensors)
    beside, beside_grads = computed(case, tensors, loop) if case.is_steep else (None, None)
    check(outputs, wanted, 2e-5, beside=beside)
    check(alone, wanted, 2e-5, beside=beside)
    check(grads, wanted_grads, 1e-3 if case.few else 1e-4, least=1e-2, beside=beside_grads)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def drawn(mode: str, norm: str, reverse: tuple[bool, ...], draw: random.Random) -> Case:
    """A case with the rest at random, away from what float32 cannot do: variances of two rows
    or features, and gradients that are 0 but for ε (of one feature, whose scale is divided out)."""
    batch, _ = NORMS[norm]
    B, T = draw.choice([1, 2, 3, 5, 7, 17, 33]), draw.choice([1, 2, 5, 9])
    hidden = draw.choice([1, 4, 7, 13, 16, 24, 33, 40, 65])
    if batch:
        B = B if B == 1 or B > 3 else B + 3
        T = max(T, 5) if B == 1 else T
    if norm.startswith(("row", "rms", "recurrent")):
        hidden = max(hidden, 5)
    divided = norm.startswith(("row", "rms")) or (batch and not norm.startswith("step"))
    sizes = (B,) * T
    if draw.random() < 0.5:
        lengths = [T] + [draw.randint(1, T) for _ in range(B - 1)]
        sizes = tuple(sum(n > t for n in lengths) for t in range(T))
    if batch and norm != "sequence":  # two rows become three, or a lone one
        sizes = tuple(3 if n == 2 and B > 1 and t < T - 1 else n for t, n in enumerate(sizes))
        sizes = tuple(min(sizes[: t + 1]) for t in range(T))
        sizes = (*sizes[:-1], 1) if sizes[-1] == 2 else sizes
    case = Case(
        mode,
        norm,
        sizes,
        reverse,
        inputs=draw.choice([0, 3, 8, 17, 40] if divided else [0, 1, 3, 8, 17, 40]),
        hidden=hidden,
        state=draw.random() < 0.5,
        affine=draw.random() < 0.8,
        peephole=draw.choice(["", "o", "ifo"]),
        threads=draw.choice([1, 2, 3]),
        seed=draw.randrange(10**6),
    )
    more = random.Random(case.seed)
    zones = ["", "", "masks h", "masks c", "masks hc", "shares h", "shares c", "shares hc"]
    case = replace(case, zoneout=more.choice(zones), resets=more.random() < 0.4)
    return replace(case, reset_to=case.resets and more.random() < 0.6)
