"""Check and time every norm on a GPU (or on whatever device there is); compile the Triton kernels.

    python -m benchmarks.gpu [--device cuda] [--norms layer,frame] [--shape T,B,I,H] [--seconds 1]
    python -m benchmarks.gpu --compile-only

We have no GPU: please send in the table that the first command prints. It checks outputs and all
gradients of a training step against the same layer in float64 on the CPU, with TF32 off, and times
training steps with torch's own settings. The second command needs no GPU: it prints registers and
spilled bytes of the Triton kernels for sm_80 and sm_90.
"""

import argparse
import copy
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import normrnn
from benchmarks.machine import describe
from normrnn import norms
from normrnn.ops.backend import choice
from normrnn.ops.fused import without_tf32

LENGTHS = (9, 9, 7, 4, 3, 2, 2)
ACCEPTED = 1e-3
"""Largest relative difference of float32 from float64 that counts as equal."""
TRITON = "layer, Triton"
ARCHITECTURES = (80, 90)
HIDDEN = (64, 128, 256)
POINTERS = {"resets": "*u8", "lengths": "*i32", "offsets": "*i64"}
SCALARS = {"B": "i32", "backwards": "i32", "eps": "fp32"}


def layer_of(norm: str, sizes: tuple[int, int], device: torch.device) -> Any:
    torch.manual_seed(0)
    kind: Any = None if norm == norms.BASELINE else norm
    return normrnn.LSTM(*sizes, bidirectional=True, norm=kind).to(device)


def differences(norm: str, device: torch.device) -> dict[str, float]:
    """Relative differences of a ragged training step from float64 on the CPU."""
    layer = layer_of(norm, (5, 24), device)
    exact = copy.deepcopy(layer).cpu().double()
    x = torch.randn(max(LENGTHS), len(LENGTHS), 5, dtype=torch.float64)
    lengths, head = torch.tensor(LENGTHS), torch.randn(sum(LENGTHS), 48, dtype=torch.float64)
    found = []
    selected = choice.selected
    runs = (layer, device, torch.float32, selected), (exact, "cpu", torch.float64, "loop")
    for module, where, dtype, backend in runs:
        own = x.detach().to(where, dtype).requires_grad_()
        with normrnn.backend(backend):
            output, state = module(pack_padded_sequence(own, lengths))
        (output.data * head.to(output.data)).sum().backward()
        tensors = {"output": output.data, "h_n": state[0], "c_n": state[1], "input": own.grad}
        tensors |= {name: p.grad for name, p in module.named_parameters()}
        found.append({name: t.detach().cpu().double() for name, t in tensors.items()})
    ours, theirs = found
    return {n: float((ours[n] - v).abs().max() / v.abs().max()) for n, v in theirs.items()}


def triton_runs(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


def check(names: list[str], device: torch.device) -> bool:
    """Print a table of correctness; whether all is well."""
    print("\n| norm | largest relative difference | of | result |\n|---|---|---|---|")
    well = True
    with without_tf32(device):
        for name in names:
            try:
                with variant(name) as norm:
                    found = differences(norm, device)
                worst = max(found, key=lambda n: found[n])
                is_equal = all(error <= ACCEPTED for error in found.values())  # False with NaN
                print(
                    f"| {name} | {found[worst]:.1e} | {worst} | {'ok' if is_equal else 'FAILS'} |"
                )
            except Exception as error:  # the table goes on: other norms may work
                is_equal = False
                first = str(error).strip().splitlines()[:1]
                print(f"| {name} | – | – | FAILS: {type(error).__name__} {first} |")
            well &= is_equal
    return well


@contextmanager
def variant(name: str) -> Iterator[str]:
    """Select the backend of a row of the tables, and yield its norm."""
    is_triton = name == TRITON
    with normrnn.backend("triton" if is_triton else "auto"):
        yield "layer" if is_triton else name


def training_step(module: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        module.zero_grad()
        module(x)[0].sum().backward()

    return step


def best_time(step: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Seconds of the best step."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    step()
    finish()
    best, end, rounds = float("inf"), time.perf_counter() + seconds, 0
    while time.perf_counter() < end or rounds < 3:
        start = time.perf_counter()
        step()
        finish()
        best = min(best, time.perf_counter() - start)
        rounds += 1
    return best


def time_all(
    names: list[str], device: torch.device, shape: tuple[int, ...], seconds: float
) -> None:
    T, B, I, H = shape  # noqa: E741
    x = torch.randn(T, B, I, device=device)
    plain = nn.LSTM(I, H, bidirectional=True).to(device)
    base = best_time(training_step(plain, x), device, seconds)
    print(f"\nTraining step of a bidirectional LSTM, T {T}, B {B}, I {I}, H {H}, float32\n")
    print("| layer | ms | × nn.LSTM |\n|---|---|---|")
    print(f"| nn.LSTM | {1e3 * base:.2f} | 1 |", flush=True)
    for name in names:
        try:
            with variant(name) as norm:
                step = training_step(layer_of(norm, (I, H), device), x)
                found = best_time(step, device, seconds)
            print(f"| {name} | {1e3 * found:.2f} | {found / base:.2f} |", flush=True)
        except Exception as error:  # already shown by the check above
            print(f"| {name} | – | {type(error).__name__} |", flush=True)


def compiled(kernel: Any, H: int, arch: int) -> dict[str, int]:
    """Registers per thread, bytes of spill stores and loads, and bytes of shared memory of a kernel
    as it would be launched."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    from normrnn.ops import triton_layer

    is_backward = kernel is triton_layer._backward
    fixed = triton_layer.launch_options(H, resets=True, backward=is_backward)
    launch = {n: fixed.pop(n) for n in ("num_warps", "num_stages", "enable_fp_fusion")}
    fixed["KEEP"] = True
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for place, name in enumerate(kernel.arg_names):
        if name in fixed:
            signature[name], constants[(place,)] = "constexpr", fixed[name]
        elif name in SCALARS:
            signature[name] = SCALARS[name]
        else:
            signature[name] = POINTERS.get(name, "*fp32")
            attributes[(place,)] = [["tt.divisibility", 16]]  # as torch allocates
    source = ASTSource(kernel, signature, constants, attributes)
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(result.asm["ptx"])
        target = re.search(r"\.target (\w+)", result.asm["ptx"])
        assert target is not None
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={target[1]}", str(ptx)]
        command += ["-o", str(Path(folder, "kernel.cubin"))]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", printed)
    spilled = re.findall(r"(\d+) bytes spill", printed)
    assert registers is not None, printed
    return {
        "warps": launch["num_warps"],
        "registers": int(registers[1]),
        "spilled": sum(map(int, spilled)),
        "shared": result.metadata.shared,
    }


def compile_only(sizes: list[int]) -> None:
    from normrnn.ops import triton_layer

    if triton_layer.INTERPRETED:
        raise SystemExit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    print("| kernel | H | GPU | warps | registers | bytes spilled and reloaded | bytes shared |")
    print("|---|---|---|---|---|---|---|")
    for H in sizes:
        kernels = {"forward": triton_layer._forward, "backward": triton_layer._backward}
        for name, kernel in kernels.items():
            for arch in ARCHITECTURES:
                found = compiled(kernel, H, arch)
                values = " | ".join(str(v) for v in found.values())
                print(f"| {name} | {H} | sm_{arch} | {values} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--norms", default=",".join(norms.names()), help="separated by commas")
    parser.add_argument("--shape", default="100,32,128,128", help="T,B,I,H of the timed step")
    parser.add_argument("--seconds", type=float, default=1.0, help="per norm")
    parser.add_argument("--compile-only", action="store_true", help="compile the Triton kernels")
    parser.add_argument("--hidden", default=",".join(map(str, HIDDEN)), help="of --compile-only")
    args = parser.parse_args()
    if args.compile_only:
        compile_only([int(h) for h in args.hidden.split(",")])
        return
    device, names = torch.device(args.device), args.norms.split(",")
    if triton_runs(device) and "layer" in names:
        names.append(TRITON)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    print(
        f"{name}; {describe()}; CUDA {torch.version.cuda}; cuDNN {torch.backends.cudnn.version()}"
    )
    well = check(names, device)
    time_all(names, device, tuple(int(n) for n in args.shape.split(",")), args.seconds)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
