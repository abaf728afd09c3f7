"""The compiled recurrence among threads and processes."""

import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from normrnn.ops.native.library import describe
from tests.kernel_cases import (
    Case,
    check,
    computed,
    in_float64,
    native,
    problem,
    tensors_of,
    threads,
)
from tests.torchrun import ended, start_python

pytestmark = pytest.mark.skipif(describe()["kernels"] == "torch", reason="no kernels here")
CASE = Case("LSTM", "sequence", (9, 9, 7, 5, 5), (False, True), 11, 19, peephole="ifo")
PROGRAM = """
import os, torch
from normrnn.ops.native.library import describe
from normrnn.ops.recurrence import recur
from tests.torchrun import ended, start_python
from tests.kernel_cases import computed, one_direction, tensors_of
from tests.ops.test_kernel_processes import CASE, bits
"""


def bits() -> str:
    """A checksum of all outputs and gradients."""
    found, grads = computed(CASE, tensors_of(CASE), native)
    parts = [t.detach().numpy().tobytes() for t in (*found.values(), *grads.values())]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def started(code: str, **environment: str) -> "subprocess.Popen[str]":
    return start_python("-c", PROGRAM + code, **environment)


def test_another_process_gives_the_same_bits() -> None:
    with threads(1):
        wanted = bits()
    one = started("print(torch.get_num_threads(), bits())", OMP_NUM_THREADS="1")
    assert ended(one).split() == ["1", wanted]


def test_without_kernels_numbers_are_equal_to_tolerance(tmp_path: Path) -> None:
    code = "print(describe()); torch.save(computed(CASE, tensors_of(CASE), recur), PATH)"
    code = code.replace("PATH", repr(str(tmp_path / "numbers.pt")))
    assert ended(started(code, NORMRNN_NATIVE="0")) == "{'kernels': 'torch'}\n"
    found, grads = torch.load(tmp_path / "numbers.pt", weights_only=True)
    own, own_grads = computed(CASE, tensors_of(CASE), native)
    check(own, found, 1e-5)
    check(own_grads, grads, 1e-4)


@pytest.mark.slow
def test_a_child_with_one_thread() -> None:
    """After threads have run in the parent; as a worker of torch's DataLoader."""
    code = """
for count in (2, 1):
    torch.set_num_threads(count)
    wanted = bits()
child = os.fork()
if not child:
    os._exit(0 if bits() == wanted else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
torch.set_num_threads(2)
bits()
"""
    ended(started(code))


@pytest.mark.slow
def test_two_processes_on_the_same_cores_both_end() -> None:
    """Threads that wait for each other let others run meanwhile."""
    code = "torch.set_num_threads(4); print(len({bits() for _ in range(30)}))"
    both = [started(code) for _ in range(2)]
    assert [ended(process) for process in both] == ["1\n", "1\n"]


def test_threads_change_between_the_passes() -> None:
    tensors = tensors_of(CASE)
    leaves = {n: t for n, t in tensors.items() if t.requires_grad}
    wanted = in_float64(CASE, tensors)[1]
    for forward, backward in ((1, 3), (3, 1), (2, 5)):
        with threads(forward):
            result = native(*problem(CASE, tensors))
        g = torch.Generator().manual_seed(CASE.seed + 1)
        outputs = [result.rows, *result.state]
        heads = [torch.randn(out.shape, generator=g) for out in outputs]
        with threads(backward):
            grads = torch.autograd.grad(outputs, [*leaves.values()], heads)
        check(dict(zip(leaves, grads, strict=True)), wanted, 1e-4)


def test_pythons_threads_at_once() -> None:
    """C runs without the interpreter's lock."""
    with ThreadPoolExecutor(3) as pool:
        assert {*pool.map(lambda _: bits(), range(60))} == {bits()}


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_an_allocation_that_fails_raises_memory_error() -> None:
    """W_h of 48 MB is packed into as much again, which the limit forbids."""
    code = """
import resource
from normrnn import ops
def limit(bytes):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + bytes if bytes else -1, -1))
def run(size, x):
    return one_direction("LSTM", x, torch.zeros(4 * size, size), ops.Steps((2,)))[0]
torch.set_num_threads(1)
run(8, torch.zeros(2, 32, requires_grad=True)).sum().backward()
size, w, steps = 1750, torch.zeros(7000, 1750), ops.Steps((2,))
x = torch.zeros(2, 4 * size, requires_grad=True)
rows = one_direction("LSTM", x, w, steps)[0]
for call in (lambda: one_direction("LSTM", x, w, steps), lambda: rows.sum().backward()):
    limit(20 << 20)
    try:
        call()
    except MemoryError:
        print("MemoryError")
    limit(0)
rows.sum().backward()
"""
    assert ended(started(code)).split() == ["MemoryError"] * 2
