"""The forward pass of ``RNN``, ``LSTM``, ``GRU`` and ``LiGRU``.

A call goes through three steps: any form of input becomes a :class:`~normrnn.nn.stack.Batch` of
rows, the normalisers resolve their state, and the recurrence of :mod:`normrnn.ops` runs layer by
layer. Without a norm :meth:`Normalised._uses_torch` chooses between that and torch's own layer.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from normrnn.nn import packing, stack, tracing
from normrnn.nn.parameters import Parameters
from normrnn.nn.stack import Batch, Parts
from normrnn.ops.backend import choice
from normrnn.ops.call import State
from normrnn.ops.layout import Steps, Traced, is_unknown
from normrnn.ops.native.library import library
from normrnn.ops.scan import is_onnx_export

WORTH_NATIVE = 500
"""T·H from which on the compiled kernels train a plain dense batch faster than torch's."""


class Normalised(Parameters):
    """The base class of the layers."""

    takes_lengths = takes_resets = False
    """Whether the layer was called with ``lengths`` or ``resets``, which :func:`normrnn.fold` has
    to keep working."""
    _warned_single_row = False
    looks_ahead_warned = False
    """Class attribute: whether the warning about the default norm was given in this process."""

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | tuple[Tensor, Tensor] | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        resets: Tensor | PackedSequence | None = None,
        reset_to: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor | tuple[Tensor, Tensor]]:
        """Run the layer.

        Args:
            input: (T, B, I), or (B, T, I) with ``batch_first``; (T, I) unbatched; or packed.
            hx: initial state as torch takes it, (layers × directions, B, H) each; if None, zeros
                or what ``learn_initial_state`` has learned.
            lengths: of each sequence, for a padded ``input``; padding is never read. A length of
                0 gives zeros, and the initial state as the final one.
            resets: boolean, (T, B), (B, T) with ``batch_first``, (T,) unbatched, packed like a
                packed input. Where true the state restarts before that frame, and the backward
                direction's at the frame before it: as if the sequence was cut there. At frame 0
                it discards ``hx``. Statistics are over all rows in any case.
            reset_to: the state that a reset starts from, in the form of ``hx``, of B sequences or
                of one for all; if None, zeros or what ``learn_initial_state`` has learned.

        Returns:
            What torch's layer returns for such an input. Padded output has 0 in the padding.
        """
        if isinstance(input, torch.fx.Proxy):
            options = {"lengths": lengths, "resets": resets, "reset_to": reset_to}
            options = {name: value for name, value in options.items() if value is not None}
            return tracing.leaf(self, input, hx, **options)  # type: ignore[return-value]
        if self.training and not self.norm_given:
            self._warn_looks_ahead()
        if hx is not None:
            self._check_state(input, hx)
        if reset_to is not None:
            if resets is None:
                raise ValueError("reset_to= is the state that resets= start from: give both")
            self._check_state(input, reset_to, "reset_to")
        if self.learn_initial_state:
            learned = self._learned_state(input)
            hx = learned if hx is None else hx
            reset_to = learned if reset_to is None and resets is not None else reset_to
        if not torch.compiler.is_exporting():  # which cannot set attributes
            if lengths is not None:
                self.takes_lengths = True
            if resets is not None:
                self.takes_resets = True
        if resets is not None and torch.jit.is_tracing():
            tracing.refuse_torchscript(self)
        if lengths is None:
            if resets is not None:
                resets = packing.check_resets(resets, input)
            return self._forward_whole(input, hx, resets, reset_to)
        if is_unknown(lengths):
            padded: Any = input
            return self._forward_traced(padded, hx, lengths, resets, reset_to)
        lengths = packing.check_lengths(input, lengths, self.batch_first)  # type: ignore[arg-type]
        if resets is not None:
            resets = packing.check_resets(resets, input)
        return self._forward_padded(input, hx, lengths, resets, reset_to)  # type: ignore[arg-type]

    # From any form of input to rows, and back.

    def _forward_padded(
        self, input: Tensor, hx: Any, lengths: Tensor, resets: Tensor | None, reset_to: Any
    ) -> Any:
        batch_first, batch = self.batch_first, len(lengths)
        time = input.shape[1 if batch_first else 0]
        shortest = int(lengths.min()) if batch else time
        if not batch or shortest == time > 0:
            return self._forward_whole(input, hx, resets, reset_to)
        if shortest == 0:
            return self._forward_with_empty(input, hx, lengths, resets, reset_to)
        packed, packed_resets = packing.pack(input, lengths, batch_first), None
        if resets is not None:
            packed_resets = packed._replace(data=packing.pack(resets, lengths, batch_first).data)
        output, final = self._forward_whole(packed, hx, packed_resets, reset_to)
        return packing.unpack(output, batch_first, time), final

    def _forward_with_empty(
        self, input: Tensor, hx: Any, lengths: Tensor, resets: Tensor | None, reset_to: Any
    ) -> Any:
        """Leave out sequences of length 0: zeros, and the initial state as the final one."""
        x = input.transpose(0, 1) if self.batch_first else input
        state = self._initial(hx)
        self._check_sizes(input, state, None)
        kept, axis = lengths.nonzero().squeeze(1).to(input.device), 0 if self.batch_first else 1
        if not len(kept):
            output, final = self._empty_batch_output(x, state)
            return output.transpose(0, 1) if self.batch_first else output, self._as_torch(final)
        some = None if state is None else tuple(s.index_select(1, kept) for s in state)
        to = self._reset_state(reset_to, len(lengths))
        part, final = self._forward_padded(
            input.index_select(axis, kept),
            None if some is None else self._as_torch(some),
            lengths[lengths > 0],
            None if resets is None else resets.index_select(axis, kept),
            None if to is None else self._as_torch(tuple(s.index_select(1, kept) for s in to)),
        )
        output = part.new_zeros(*input.shape[:2], part.shape[2]).index_copy(axis, kept, part)
        start = stack.zero_state(self, self.weights(), len(lengths)) if state is None else state
        final = final if self.mode == "LSTM" else (final,)
        pairs = zip(start, final, strict=True)
        return output, self._as_torch(tuple(s.to(f.dtype).index_copy(1, kept, f) for s, f in pairs))

    def _forward_traced(
        self, input: Tensor, hx: Any, lengths: Any, resets: Any, reset_to: Any
    ) -> Any:
        """Run a padded batch of unknown lengths: all its rows go to an operator, or a scan."""
        state = self._initial(hx)
        if self._uses_scan():
            lengths = packing.traced_lengths(input, lengths, self.batch_first)
            x, order = input.transpose(0, 1) if self.batch_first else input, None
        else:
            x, lengths, order = packing.sorted_by_length(input, lengths, self.batch_first)
        self._check_sizes(input, state, None)
        T, B, _ = x.shape
        reset_to = self._reset_state(reset_to, B)
        if resets is not None:
            resets = packing.check_resets(resets, input)
            resets = resets.t() if self.batch_first else resets
        if order is None:
            steps = Traced(T, B, T * B, is_scanned=True, sequence_lengths=lengths)
        else:
            state = state and tuple(s.index_select(1, order) for s in state)
            reset_to = reset_to and tuple(s.index_select(1, order) for s in reset_to)
            resets = None if resets is None else resets.index_select(1, order)
            time = torch.arange(T, device=lengths.device).unsqueeze(1)
            steps = Traced(T, B, T * B, (time < lengths).sum(1), is_padded=True)
        resets = None if resets is None else resets.reshape(-1)
        batch = Batch(x.reshape(T * B, -1), steps, state, resets, reset_to)
        output, final = self._run(batch)
        output = output.view(T, B, -1)
        if order is not None:
            back = order.argsort()
            output = output.index_select(1, back)
            final = tuple(s.index_select(1, back) for s in final)
        return output.transpose(0, 1) if self.batch_first else output, self._as_torch(final)

    def _forward_whole(self, input: Any, hx: Any, resets: Any, reset_to: Any) -> Any:
        """Run a dense batch or a PackedSequence."""
        uses_scan = torch.compiler.is_exporting() and self._uses_scan()
        if not self._norm_names or torch.jit.is_tracing():
            is_packed = isinstance(input, PackedSequence)
            data = input.data if is_packed else input
            if not uses_scan and self._uses_torch(data, is_packed, resets):
                return super().forward(input, hx)  # type: ignore[call-arg]
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx, resets, reset_to)
        return self._forward_dense(input, hx, resets, reset_to, uses_scan)

    def _forward_packed(self, input: PackedSequence, hx: Any, resets: Any, reset_to: Any) -> Any:
        data, batch_sizes, sorted_indices, unsorted_indices = input
        state = self._initial(hx)
        self._check_sizes(data, state, batch_sizes)
        if state is not None and sorted_indices is not None:
            state = tuple(s.index_select(1, sorted_indices) for s in state)
        if torch.compiler.is_exporting() and is_onnx_export():
            tracing.refuse_onnx(self, "a PackedSequence")
        if is_unknown(batch_sizes):
            state_batch = state[0].shape[1] if state is not None else None
            batch = len(sorted_indices) if sorted_indices is not None else state_batch
            batch = int(batch_sizes[0]) if batch is None else batch
            steps: Steps = Traced(batch_sizes.shape[0], batch, data.shape[0], batch_sizes)
        else:
            steps = Steps.packed(batch_sizes)
        rows = None if resets is None else resets.data
        to = self._reset_state(reset_to, steps.batch)
        if to is not None and sorted_indices is not None:
            to = tuple(s.index_select(1, sorted_indices) for s in to)
        output, final = self._run(Batch(data, steps, state, rows, to))
        if unsorted_indices is not None:
            final = tuple([s.index_select(1, unsorted_indices) for s in final])
        packed = PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices)
        return packed, final if len(final) == 2 else final[0]

    def _forward_dense(
        self, input: Tensor, hx: Any, resets: Tensor | None, reset_to: Any, uses_scan: bool
    ) -> Any:
        if input.dim() not in (2, 3):
            raise ValueError(
                f"{type(self).__name__}: Expected input to be 2D or 3D, got {input.dim()}D instead"
            )
        is_batched, axis = input.dim() == 3, 0 if self.batch_first else 1
        x = input if is_batched else input.unsqueeze(axis)
        state = self._initial(hx, is_batched)
        self._check_sizes(x, state, None)
        x = x.transpose(0, 1) if self.batch_first else x
        T, B, _ = x.shape
        if T == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        if resets is not None:
            resets = (resets.t() if self.batch_first and is_batched else resets).reshape(-1)
        if B == 0:
            output, final = self._empty_batch_output(x, state)
        else:
            steps = Traced(T, B, T * B, is_scanned=True) if uses_scan else Steps.dense(T, B)
            to = self._reset_state(reset_to, B, is_batched)
            batch = Batch(x.reshape(T * B, -1), steps, state, resets, to)
            output, final = self._run(batch)
            output = output.view(T, B, -1)
        if self.batch_first:
            output = output.transpose(0, 1)
        if not is_batched:
            output, final = output.squeeze(axis), tuple(s.squeeze(1) for s in final)
        return output, final if len(final) == 2 else final[0]

    def _empty_batch_output(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return zeros for (T, B, I) without a frame or a sequence; nothing is updated."""
        (T, B, _), weights = x.shape, self.weights()
        final = stack.zero_state(self, weights, B) if state is None else state
        output = final[0].new_zeros(T, B, self.directions * weights[0].w_hh.shape[1])
        # Depends on all parameters, so that a loss of it has gradients, which are 0.
        zero = sum(p.flatten()[:0].sum() for p in self.parameters())
        if any(n.waits_for_ranks for n in self.normalisers()):
            zero = zero + stack.run_without_rows(self, x)
        return output + zero, final

    # Rows: the state of the normalisers, the choice of a path, and the call.

    def _run(self, batch: Batch) -> tuple[Tensor, State]:
        normalisers = self.normalisers()
        resolved = [normaliser.resolve(batch.steps) for normaliser in normalisers]
        for each in resolved:
            if each.is_single_row:
                self._warn_single_row()
        rows, final = stack.run(self, batch, Parts(self.weights(), normalisers, resolved))
        if self.mode != "LSTM" and rows.requires_grad:
            # The backward pass reads the output. torch's GRU and RNN allow changing it in place,
            # as in `output += x`, and its LSTM does not.
            rows = rows.clone()
        return rows, final

    def _uses_torch(self, data: Tensor, is_packed: bool, resets: Any) -> bool:
        """Choose torch's layer or the recurrence, for a layer without norm.

        The first line that applies:

        ==============================================================  ===========
        torch.jit.trace                                                 torch
        LiGRU, resets, peephole, zoneout, weight_drop, locked dropout   recurrence
        ``backend("torch")``                                            torch
        any other ``backend`` but ``"auto"``                            recurrence
        torch.compile, torch.func                                       recurrence
        a CPU, and packed input or autocast, without a projection       recurrence
        training in float32 on a CPU, T·H ≥ 500                         recurrence
        otherwise                                                       torch
        ==============================================================  ===========

        On a CPU torch's packed kernel takes time that grows with T², and its LSTM fails under
        autocast. A compiler unrolls torch's loops.
        """
        if torch.jit.is_tracing():
            tracing.check_plain(self)
            return True
        is_other = self.mode == "LIGRU" or self.peephole is not None
        if resets is not None or is_other or self._has_regularisers():
            return False
        if choice.selected != "auto":
            return choice.selected == "torch"
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return False
        is_slow = data.is_cpu and (is_packed or torch.is_autocast_enabled("cpu"))
        return self.proj_size > 0 or not (is_slow or self._trains_natively(data))

    def _has_regularisers(self) -> bool:
        """Whether the next pass has a regulariser that torch's kernels do not have."""
        if any(self.zoneout):
            return True
        is_locked = self.dropout_kind == "locked" and self.dropout > 0 and self.num_layers > 1
        return self.training and (is_locked or self.weight_drop > 0)

    def _trains_natively(self, data: Tensor) -> bool:
        """Whether a training step without a norm is faster by the compiled kernels.

        A rule, not a measurement, so that the same program always computes the same bits.
        """
        is_float = data.dtype == self.weight_hh_l0.dtype == torch.float32
        if not (is_float and data.is_cpu and torch.is_grad_enabled()) or data.dim() < 2:
            return False
        time = data.shape[1 if self.batch_first and data.dim() == 3 else 0]
        return time * self.hidden_size >= WORTH_NATIVE and library() is not None

    def _uses_scan(self) -> bool:
        """Whether an exporter sees torch's own operators: nothing is trained, drawn at random or
        measured. RuntimeError if ONNX has no form of the layer."""
        if not torch.compiler.is_exporting():
            return False
        normalisers = self.normalisers()
        dropout = self.dropout if self.num_layers > 1 else 0
        draws = self.training and (dropout or self.weight_drop or any(self.zoneout))
        is_possible = not draws and all(n.is_fixed for n in normalisers)
        if is_onnx_export():
            if self.mode == "LIGRU":
                tracing.refuse_onnx(self, "its cell, which has no ONNX operator")
            if not is_possible:
                tracing.refuse_onnx(self, "dropout" if draws else "batch statistics")
            if any(n.needs_eigenvectors for n in normalisers):
                tracing.refuse_onnx(self, f"norm={self.norm!r}")
            return True
        return is_possible and not self.training

    # Checks and warnings.

    def _warn_looks_ahead(self) -> None:
        """Warn once per process; not inside a graph, which would break there."""
        if Normalised.looks_ahead_warned or self.bidirectional or torch.compiler.is_compiling():
            return
        Normalised.looks_ahead_warned = True
        warnings.warn(
            f"{type(self).__name__}: norm was not given. The default, norm='sequence', normalises "
            "over all frames of the batch: while training, outputs depend on later frames. For a "
            "causal model choose norm='frame', 'layer' or None; else say norm='sequence'",
            stacklevel=5,
        )

    def _warn_single_row(self) -> None:
        """Warn once: a last batch of one sequence should not end a training run."""
        if not self._warned_single_row and not torch.compiler.is_compiling():
            self._warned_single_row = True
            warnings.warn(
                f"{type(self).__name__}: a batch with a single row per time step has no statistics "
                "of its own; it is normalised with the running ones, which stay as they are",
                stacklevel=2,
            )

    def _check_state(self, input: Any, hx: Any, name: str = "hx") -> None:
        if _looks_like_lengths(hx):
            kind = RuntimeError if isinstance(hx, Tensor) else ValueError  # as torch, and as ours
            raise kind(
                f"{name} is the initial state of {type(self).__name__}, and got what looks like "
                "lengths: give them by name, lengths="
            )
        if self.mode != "LSTM":
            if not isinstance(hx, Tensor):
                raise ValueError(
                    f"{name} of {type(self).__name__} must be one tensor, h_0, "
                    f"got a {type(hx).__name__}"
                )
        elif len(hx) != 2 or not all(isinstance(s, Tensor) for s in hx):
            raise ValueError(f"{name} must be the pair (h_0, c_0) of tensors, got {len(hx)} parts")
        h = hx[0] if self.mode == "LSTM" else hx
        if isinstance(input, PackedSequence) or torch.compiler.is_compiling():
            return
        if input.dim() != 3 or h.dim() != 3:
            return
        batch, time = input.shape[:2] if self.batch_first else input.shape[1::-1]
        if h.shape[1] == time != batch:
            raise RuntimeError(
                f"{name} is of {time} sequences and the input {tuple(input.shape)} of {batch}: "
                f"with batch_first={not self.batch_first} they would fit"
            )

    def _initial(self, hx: Any, is_batched: bool = True) -> State | None:
        """Return the initial state, (layers × directions, B, H) each; None for zeros."""
        if hx is None:
            return None
        state = tuple(hx) if self.mode == "LSTM" else (hx,)
        dims = 3 if is_batched else 2
        for name, s in zip(("h_0", "c_0"), state, strict=False):
            if s.dim() != dims:
                kind = "batched 3-D" if is_batched else "unbatched 2-D"
                raise RuntimeError(
                    f"For {kind} input, hx should also be {dims}-D but got {name} of {s.dim()}-D"
                )
        return state if is_batched else tuple(s.unsqueeze(1) for s in state)

    def _learned_state(self, input: Any) -> Any:
        """Return the learned initial state in the form of ``hx``."""
        batch, dims = 1, 3
        if isinstance(input, PackedSequence):
            order = input.sorted_indices
            batch = int(input.batch_sizes[0]) if order is None else len(order)
        elif input.dim() == 3:
            batch = input.shape[0 if self.batch_first else 1]
        else:
            dims = 2
        parts = [torch.stack(vectors).unsqueeze(1) for vectors in self._initial_parameters()]
        state = tuple(s.expand(-1, batch, -1) if dims == 3 else s.squeeze(1) for s in parts)
        return self._as_torch(state)

    def _reset_state(self, reset_to: Any, batch: Any, is_batched: bool = True) -> State | None:
        """Return the state that resets start from, (layers × directions, B, H) each."""
        state = self._initial(reset_to, is_batched)
        if state is None:
            return None
        count = self.num_layers * self.directions
        for s, size in zip(
            state, (self.proj_size or self.hidden_size, self.hidden_size), strict=False
        ):
            if s.shape[0] != count or s.shape[2] != size or s.shape[1] not in (1, batch):
                raise RuntimeError(
                    f"reset_to should have the sizes ({count}, {batch} or 1, {size}), "
                    f"got {tuple(s.shape)}"
                )
        return tuple(s.expand(-1, batch, -1) for s in state)

    def _check_sizes(self, data: Tensor, state: State | None, batch_sizes: Tensor | None) -> None:
        """Check sizes and types by torch's own methods."""
        if state is None:
            self.check_input(data, batch_sizes)
            return
        self.check_forward_args(data, self._as_torch(state), batch_sizes)
        kind = data.device.type
        autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        wrong = [s.dtype for s in state if s.dtype != data.dtype and not autocast]
        if wrong:
            raise RuntimeError(f"hx must have the dtype of the input, {data.dtype}, got {wrong[0]}")

    def _as_torch(self, state: State) -> Any:
        return state if self.mode == "LSTM" else state[0]

    def __prepare_scriptable__(self) -> Any:
        tracing.refuse_torchscript(self)


def _looks_like_lengths(hx: Any) -> bool:
    """Whether a state holds integers, or one number per sequence."""
    if isinstance(hx, Tensor):
        return hx.dim() == 1 or not (hx.is_floating_point() or hx.is_complex())
    return isinstance(hx, list | tuple) and bool(hx) and all(isinstance(n, int) for n in hx)


tracing.allow(Normalised)
