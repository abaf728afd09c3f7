"""What ``RNN``, ``LSTM`` and ``GRU`` share in a call: the door, and the choice of a path.

The choice between torch's fused kernels and the recurrence of :mod:`normrnn.ops` is made here,
per call, by :meth:`Normalised._path`.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from normrnn.nn import door, stack
from normrnn.nn.batch import Normaliser
from normrnn.nn.parameters import Parameters
from normrnn.ops import kernel
from normrnn.ops.call import State
from normrnn.ops.steps import Steps

FEW_ROWS = 32
"""Folding is a pass over the weights. For fewer rows, as in sampling, it does not pay."""


class Normalised(Parameters):
    """What the three layers share."""

    def forward(
        self, input: Any, hx: Any = None, lengths: Tensor | Sequence[int] | None = None
    ) -> Any:
        """Runs the layer.

        Args:
            input: (T, B, I), or (B, T, I) with ``batch_first``; (T, I) unbatched; or packed.
            hx: initial state as torch takes it, (layers × directions, B, H) each; zeros if None.
            lengths: of each sequence, for a padded ``input``; padding is never looked at.

        Returns:
            What torch's layer returns for such an input. Padded output has 0 in the padding.
        """
        if "torch._dynamo" in sys.modules:  # else nobody compiles
            from normrnn.nn.uncompiled import run

            return run(self, input, hx, lengths)
        return self.run(input, hx, lengths)

    def run(self, input: Any, hx: Any, lengths: Tensor | Sequence[int] | None) -> Any:
        """``forward``, out of sight of torch.compile: a loop over time is never traced."""
        self._check_state(hx)
        if lengths is not None:
            values = door.checked(input, lengths, self.batch_first)
            time = input.shape[1 if self.batch_first else 0]
            if int(values.sum()) == len(values) * time:
                return self.run(input, hx, None)
            output, final = self.run(door.pack(input, values, self.batch_first), hx, None)
            return door.unpack(output, self.batch_first, time), final
        path = self._path(input)
        if path == "torch":
            return super().forward(input, hx)  # type: ignore[call-arg]
        if isinstance(input, PackedSequence):
            return self._packed(input, hx, path)
        return self._tensor(input, hx, path)

    def _path(self, input: Tensor | PackedSequence) -> str:
        """The fastest right way: torch's layer, its kernel with folded weights, or our own.

        On a CPU torch leaves its fused kernel for packed input, and then takes time that grows
        with T²; and our recurrence beats folding in training. Elsewhere the fused kernel wins.
        """
        packed = isinstance(input, PackedSequence)
        data = input.data if packed else input
        on_cpu = data.device.type == "cpu"
        # torch's CPU LSTM has no bfloat16 kernel on most machines and fails under autocast.
        autocast = on_cpu and torch.is_autocast_enabled("cpu")
        normalisers = self.normalisers()
        if not normalisers:
            if self.peephole is not None:
                return "own"
            slow = packed or autocast or self._trains_here(data)
            return "own" if slow and on_cpu and self.proj_size == 0 else "torch"
        if self.peephole is not None or (on_cpu and packed) or autocast:
            return "own"
        if all(n.is_fixed_map for n in normalisers):
            return "own" if data.shape[:-1].numel() < FEW_ROWS else "folded"
        return "folded" if not on_cpu and all(n.is_batch_map for n in normalisers) else "own"

    def _trains_here(self, data: Tensor) -> bool:
        """Whether this is a training step that our kernel takes, and faster than torch's."""
        wanted = torch.is_grad_enabled() and data.dtype == self.weight_hh_l0.dtype == torch.float32
        if not wanted or data.dim() < 2:
            return False
        time, batch = (data.shape[0], 1) if data.dim() == 2 else data.shape[:2]
        if self.batch_first and data.dim() == 3:
            time, batch = batch, time
        return kernel.prefers(time, batch, self.hidden_size)

    def _stack(self, given: stack.Given, path: str) -> tuple[Tensor, State]:
        weights = self.weights()
        normalisers = self.normalisers() or [None] * len(weights)
        how = self.mode, self.directions, weights, normalisers, self.dropout, self.training
        return stack.run(stack.Stack(*how), given, path == "folded")

    def _packed(self, input: PackedSequence, hx: Any, path: str) -> Any:
        data, batch_sizes, sorted_indices, unsorted_indices = input
        state = self._initial(hx)
        self._check(data, state, batch_sizes)
        if state is not None and sorted_indices is not None:
            state = tuple(s.index_select(1, sorted_indices) for s in state)
        given = stack.Given(data, Steps.packed(batch_sizes), state, batch_sizes)
        output, final = self._stack(given, path)
        if unsorted_indices is not None:
            final = tuple(s.index_select(1, unsorted_indices) for s in final)
        packed = PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices)
        return packed, self._as_torch(final)

    def _tensor(self, input: Tensor, hx: Any, path: str) -> Any:
        if input.dim() not in (2, 3):
            raise ValueError(
                f"{type(self).__name__}: Expected input to be 2D or 3D, got {input.dim()}D instead"
            )
        batched, axis = input.dim() == 3, 0 if self.batch_first else 1
        x = input if batched else input.unsqueeze(axis)
        state = self._initial(hx, batched)
        self._check(x, state, None)
        x = x.transpose(0, 1) if self.batch_first else x
        T, B, _ = x.shape
        if T == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        if B == 0:
            output, final = self._of_nobody(x, state)
        else:
            given = stack.Given(x.reshape(T * B, -1), Steps.dense(T, B), state, None)
            output, final = self._stack(given, path)
            output = output.view(T, B, -1)
        if self.batch_first:
            output = output.transpose(0, 1)
        if not batched:
            output, final = output.squeeze(axis), tuple(s.squeeze(1) for s in final)
        return output, self._as_torch(final)

    def _of_nobody(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """A batch of no sequences, (T, 0, I)."""
        if any(isinstance(n, Normaliser) and n.mode.batch for n in self.normalisers()):
            raise ValueError("batch statistics need at least one sequence, got a batch of 0")
        if state is None:
            zeros = x.new_zeros(self.num_layers * self.directions, 0, self.hidden_size)
            state = (zeros,) * (2 if self.mode == "LSTM" else 1)
        return x.new_zeros(len(x), 0, self.directions * self.hidden_size), state

    def _check_state(self, hx: Any) -> None:
        if hx is None:
            return
        if self.mode != "LSTM":
            if not isinstance(hx, Tensor):
                raise ValueError(
                    f"hx of {type(self).__name__} must be one tensor, h_0, "
                    f"got a {type(hx).__name__}"
                )
        elif len(hx) != 2 or not all(isinstance(s, Tensor) for s in hx):
            raise ValueError(f"hx must be the pair (h_0, c_0) of tensors, got {len(hx)} parts")

    def _initial(self, hx: Any, batched: bool = True) -> State | None:
        """The initial state, (layers × directions, B, H) each; None for zeros."""
        if hx is None:
            return None
        state = tuple(hx) if self.mode == "LSTM" else (hx,)
        dims = 3 if batched else 2
        for name, s in zip(("h_0", "c_0"), state, strict=False):
            if s.dim() != dims:
                kind = "batched 3-D" if batched else "unbatched 2-D"
                raise RuntimeError(
                    f"For {kind} input, hx should also be {dims}-D but got {name} of {s.dim()}-D"
                )
        return state if batched else tuple(s.unsqueeze(1) for s in state)

    def _check(self, data: Tensor, state: State | None, batch_sizes: Tensor | None) -> None:
        """torch's own looks at sizes and types."""
        if state is None:
            self.check_input(data, batch_sizes)
        else:
            self.check_forward_args(data, self._as_torch(state), batch_sizes)

    def _as_torch(self, state: State) -> Any:
        return state if self.mode == "LSTM" else state[0]
