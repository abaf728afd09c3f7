"""What ``RNN``, ``LSTM`` and ``GRU`` share in a call: the door, and the choice of a path.

The choice between torch's fused kernels and the recurrence of :mod:`normrnn.ops` is made here,
per call, by :meth:`Normalised._path`.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from normrnn.nn import door, stack, tracing
from normrnn.nn.normaliser import watched
from normrnn.nn.parameters import Parameters
from normrnn.ops import kernel
from normrnn.ops.call import State
from normrnn.ops.native.library import library
from normrnn.ops.scan import is_onnx_export
from normrnn.ops.steps import Steps, Traced

FEW_ROWS = 32
"""Folding is a pass over the weights. For fewer rows, as in sampling, it does not pay."""


class Absent(Enum):
    """An argument that was not given, which means what None means.

    Not None itself: a model that hands on its own ``lengths=None`` needs a layer that takes
    ``lengths=``. An enum, since compilers know its members as constants.
    """

    ABSENT = "absent"


ABSENT = Absent.ABSENT
Function = TypeVar("Function", bound=Callable[..., Any])


def shown_as_none(function: Function) -> Function:
    """The same function, whose signature has None for what is absent.

    It is the truth for whoever reads it, and torch's old ONNX exporter takes the defaults from
    there and hands them over as inputs, of which it knows few types.
    """
    signature = inspect.signature(function)
    shown = [
        one.replace(default=None) if one.default is ABSENT else one
        for one in signature.parameters.values()
    ]
    vars(function)["__signature__"] = signature.replace(parameters=shown)
    return function


class Normalised(Parameters):
    """What the three layers share."""

    lengths_seen = resets_seen = False
    """Whether a call of this layer named them, be it as None: what :func:`normrnn.fold` has to
    keep working."""
    _alone_said = False
    looks_ahead_warned = False
    """Of the class: whether the warning about the default norm was given in this process."""

    @shown_as_none
    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | tuple[Tensor, Tensor] | None = None,
        lengths: Tensor | Sequence[int] | Absent | None = ABSENT,
        resets: Tensor | PackedSequence | Absent | None = ABSENT,
    ) -> tuple[Tensor | PackedSequence, Tensor | tuple[Tensor, Tensor]]:
        """Runs the layer.

        Args:
            input: (T, B, I), or (B, T, I) with ``batch_first``; (T, I) unbatched; or packed.
            hx: initial state as torch takes it, (layers × directions, B, H) each; zeros if None.
            lengths: of each sequence, for a padded ``input``; padding is never looked at. A
                length of 0 gives zeros, and the initial state as the final one.
            resets: boolean, (T, B), (B, T) with ``batch_first``, (T,) unbatched, packed like a
                packed input. Where true the state starts from zero before that frame, and the
                backward direction's at the frame before it: as if the sequence had been cut
                there. At frame 0 it discards ``hx``. Statistics are over all rows as ever.

        Returns:
            What torch's layer returns for such an input. Padded output has 0 in the padding.
        """
        if isinstance(input, torch.fx.Proxy):
            given = {"lengths": lengths, "resets": resets}
            given = {name: value for name, value in given.items() if value is not ABSENT}
            return tracing.leaf(self, input, hx, **given)  # type: ignore[return-value]
        if not torch.compiler.is_exporting():  # which lets nobody write down anything
            if lengths is not ABSENT:
                self.lengths_seen = True
            if resets is not ABSENT:
                self.resets_seen = True
        if self.training and not self.norm_given:
            self._warn_looks_ahead()
        lengths = None if isinstance(lengths, Absent) else lengths
        resets = None if isinstance(resets, Absent) else resets
        self._check_state(hx)
        if hx is not None and not torch.compiler.is_compiling():
            self._check_batch_first(input, hx)
        if resets is not None and torch.jit.is_tracing():
            tracing.refuse(self, "torch.jit.trace", "resets=")
        if lengths is not None and tracing.is_hidden(lengths):
            return self._traced(input, hx, lengths, resets)  # type: ignore[arg-type]
        if lengths is not None:
            lengths = door.checked(input, lengths, self.batch_first)  # type: ignore[arg-type]
        cuts: Any = None
        if resets is not None:
            cuts = door.checked_resets(resets, input)
        if lengths is not None:
            return self._padded(input, hx, lengths, cuts)  # type: ignore[arg-type]
        return self._whole(input, hx, cuts)

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
        if torch.jit.is_tracing():
            tracing.check_plain(self, "torch.jit.trace")
            return "torch"
        if self._is_regularised():
            return "own"
        normalisers = self.normalisers()
        traced = torch.compiler.is_compiling()
        if (on_cpu and (traced or torch._C._are_functorch_transforms_active())) or (
            traced and packed
        ):
            # One operator: torch's would be T copies of a step, knows no vmap, and cannot be
            # traced where only the batch sizes know how many rows a step has.
            return "own"
        if not normalisers:
            if self.peephole is not None:
                return "own"
            slow = packed or autocast or self._trains_here(data)
            return "own" if slow and on_cpu and self.proj_size == 0 else "torch"
        if any(watched(n) for n in normalisers):
            return "own"  # folded weights would pass over their hooks
        if self.peephole is not None or (on_cpu and packed) or autocast:
            return "own"
        if all(n.is_fixed_map for n in normalisers):
            return self._at_test_time(data)
        return "folded" if not on_cpu and all(n.is_batch_map for n in normalisers) else "own"

    def _is_regularised(self) -> bool:
        """Whether the next pass has something that torch's kernels do not know."""
        locked = self.dropout_kind == "locked" and self.dropout > 0 and self.num_layers > 1
        return any(self.zoneout) or (self.training and (locked or self.weight_drop > 0))

    def _at_test_time(self, data: Tensor) -> str:
        """Statistics shared over time: folded weights can be avoided, or are worth it.

        The compiled recurrence reads statistics as it goes, for nothing. Without it torch's
        kernel is the faster one; its weights are made anew at every call, since nothing tells of
        a change through ``p.data``, and to look takes longer than to multiply.
        """
        like, rows = self.weight_hh_l0, data.shape[:-1].numel()
        real = like.dtype == torch.float32 and like.is_cpu and not self.proj_size
        known = all(n.compiled_at_test_time for n in self.normalisers())
        compiled = real and known and library() is not None
        return "own" if compiled or rows < FEW_ROWS else "folded"

    def _trains_here(self, data: Tensor) -> bool:
        """Whether this is a training step that our kernel takes, and faster than torch's."""
        wanted = torch.is_grad_enabled() and data.dtype == self.weight_hh_l0.dtype == torch.float32
        if not wanted or data.dim() < 2:
            return False
        time = data.shape[1 if self.batch_first and data.dim() == 3 else 0]
        return kernel.prefers(time, self.hidden_size)

    def _stack(self, given: stack.Given, path: str) -> tuple[Tensor, State]:
        weights = self.weights()
        normalisers = self.normalisers() or [None] * len(weights)
        if any(n is not None and n.is_alone(given.steps) for n in normalisers):
            self._say_alone()
        how = self.mode, self.directions, weights, normalisers, self.dropout, self.training
        regularisers = self.dropout_kind, self.weight_drop, self.zoneout
        rows, final = stack.run(stack.Stack(*how, *regularisers), given, path == "folded")
        if self.mode != "LSTM" and rows.requires_grad:
            # The way back reads what it gave out. torch's GRU and RNN let people write into that,
            # as `output += x` does, and its LSTM does not.
            rows = rows.clone()
        return rows, final

    def _warn_looks_ahead(self) -> None:
        """Once per process; not from inside a graph, which would end there."""
        if Normalised.looks_ahead_warned or self.bidirectional or torch.compiler.is_compiling():
            return
        Normalised.looks_ahead_warned = True
        warnings.warn(
            f"{type(self).__name__}: norm was not given. The default, norm='sequence', normalises "
            "over all frames of the batch: while training, outputs depend on later frames. For a "
            "causal model choose norm='frame', 'layer' or None; else say norm='sequence'",
            stacklevel=5,
        )

    def _say_alone(self) -> None:
        """Once: a last batch of one is no reason to end a training run. Not from inside a graph,
        which would end there."""
        if not self._alone_said and not torch.compiler.is_compiling():
            self._alone_said = True
            warnings.warn(
                f"{type(self).__name__}: a batch with a single row per time step has no statistics "
                "of its own; it is normalised with the running ones, which stay as they are",
                stacklevel=2,
            )

    def _padded(self, input: Tensor, hx: Any, lengths: Tensor, resets: Tensor | None) -> Any:
        batch_first, batch = self.batch_first, len(lengths)
        time = input.shape[1 if batch_first else 0]
        shortest = int(lengths.min()) if batch else time
        if not batch or shortest == time > 0:
            return self._whole(input, hx, resets)
        if shortest == 0:
            return self._without_the_empty(input, hx, lengths, resets)
        packed, cuts = door.pack(input, lengths, batch_first), None
        if resets is not None:
            cuts = packed._replace(data=door.pack(resets, lengths, batch_first).data)
        output, final = self._whole(packed, hx, cuts)
        return door.unpack(output, batch_first, time), final

    def _without_the_empty(
        self, input: Tensor, hx: Any, lengths: Tensor, resets: Tensor | None
    ) -> Any:
        """Sequences of length 0 stand aside: zeros, and the initial state as the final one."""
        x = input.transpose(0, 1) if self.batch_first else input
        state = self._initial(hx)
        self._check(input, state, None)
        start = stack.zeros(self.mode, self.cells(), len(lengths)) if state is None else state
        kept, axis = lengths.nonzero().squeeze(1).to(input.device), 0 if self.batch_first else 1
        if not len(kept):
            output, final = self._of_nobody(x, state)
            return output.transpose(0, 1) if self.batch_first else output, self._as_torch(final)
        some = None if state is None else tuple(s.index_select(1, kept) for s in state)
        part, final = self._padded(
            input.index_select(axis, kept),
            None if some is None else self._as_torch(some),
            lengths[lengths > 0],
            None if resets is None else resets.index_select(axis, kept),
        )
        shape = *input.shape[:2], part.shape[2]
        output = part.new_zeros(shape).index_copy(axis, kept, part)
        final = final if self.mode == "LSTM" else (final,)
        pairs = zip(start, final, strict=True)
        return output, self._as_torch(tuple(s.to(f.dtype).index_copy(1, kept, f) for s, f in pairs))

    def _traced(self, input: Tensor, hx: Any, lengths: Any, resets: Any) -> Any:
        """A padded batch whose lengths are not known yet: all its rows go to the operator."""
        if self._shows_scan():
            return self._padded_scan(input, hx, lengths, resets)
        x, lengths, order = door.sorted_by_length(input, lengths, self.batch_first)
        state = self._initial(hx)
        self._check(input, state, None)
        T, B, _ = x.shape
        if state is not None:
            state = tuple(s.index_select(1, order) for s in state)
        if resets is not None:
            resets = (resets.t() if self.batch_first else resets).index_select(1, order).reshape(-1)
        alive = (torch.arange(T, device=lengths.device).unsqueeze(1) < lengths).sum(1)
        steps = Traced(T, B, T * B, alive, padded=True)
        given = stack.Given(x.reshape(T * B, -1), steps, state, None, resets)
        output, final = self._stack(given, "own")
        back = order.argsort()
        output = output.view(T, B, -1).index_select(1, back)
        final = tuple(s.index_select(1, back) for s in final)
        return output.transpose(0, 1) if self.batch_first else output, self._as_torch(final)

    def _padded_scan(self, input: Tensor, hx: Any, lengths: Any, resets: Any) -> Any:
        """The same for an exporter, in torch's own operators."""
        lengths = door.traced_lengths(input, lengths, self.batch_first)
        state = self._initial(hx)
        self._check(input, state, None)
        x = input.transpose(0, 1) if self.batch_first else input
        T, B, _ = x.shape
        if resets is not None:
            resets = door.checked_resets(resets, input)
            resets = (resets.t() if self.batch_first else resets).reshape(-1)
        steps = Traced(T, B, T * B, scanned=True, sequence_lengths=lengths)
        given = stack.Given(x.reshape(T * B, -1), steps, state, None, resets)
        output, final = self._stack(given, "own")
        output = output.view(T, B, -1)
        return output.transpose(0, 1) if self.batch_first else output, self._as_torch(final)

    def _shows_scan(self) -> bool:
        """Whether an exporter is shown torch's own operators: nothing is trained, drawn at random
        or measured. RuntimeError if ONNX is wanted and has no form of the layer."""
        if not torch.compiler.is_exporting():
            return False
        normalisers = self.normalisers()
        dropout = self.dropout if self.num_layers > 1 else 0
        draws = self.training and (dropout or self.weight_drop or any(self.zoneout))
        possible = not draws and all(n.is_fixed for n in normalisers)
        if is_onnx_export():
            if not possible:
                tracing.refuse_onnx(self, "dropout" if draws else "batch statistics")
            if any(n.needs_eigenvectors for n in normalisers):
                tracing.refuse_onnx(self, f"norm={self.norm!r}")
            return True
        return possible and not self.training

    def _whole(self, input: Any, hx: Any, resets: Any) -> Any:
        path = "own" if resets is not None or self._shows_scan() else self._path(input)
        if path == "torch":
            return super().forward(input, hx)  # type: ignore[call-arg]
        if isinstance(input, PackedSequence):
            return self._packed(input, hx, resets, path)
        return self._tensor(input, hx, resets, path)

    def _packed(self, input: PackedSequence, hx: Any, resets: Any, path: str) -> Any:
        data, batch_sizes, sorted_indices, unsorted_indices = input
        state = self._initial(hx)
        self._check(data, state, batch_sizes)
        if state is not None and sorted_indices is not None:
            state = tuple(s.index_select(1, sorted_indices) for s in state)
        cuts = None if resets is None else resets.data
        if is_onnx_export():
            tracing.refuse_onnx(self, "a PackedSequence")
        if tracing.is_hidden(batch_sizes):
            given = state[0].shape[1] if state is not None else None
            batch = len(sorted_indices) if sorted_indices is not None else given
            batch = int(batch_sizes[0]) if batch is None else batch
            steps: Steps = Traced(batch_sizes.shape[0], batch, data.shape[0], batch_sizes)
        else:
            steps = Steps.packed(batch_sizes)
        given = stack.Given(data, steps, state, batch_sizes, cuts)
        output, final = self._stack(given, path)
        if unsorted_indices is not None:
            final = tuple(s.index_select(1, unsorted_indices) for s in final)
        packed = PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices)
        return packed, self._as_torch(final)

    def _tensor(self, input: Tensor, hx: Any, resets: Tensor | None, path: str) -> Any:
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
        if resets is not None:
            resets = (resets.t() if self.batch_first and batched else resets).reshape(-1)
        if B == 0:
            output, final = self._of_nobody(x, state)
        else:
            scanned = self._shows_scan()
            steps = Traced(T, B, T * B, scanned=True) if scanned else Steps.dense(T, B)
            given = stack.Given(x.reshape(T * B, -1), steps, state, None, resets)
            output, final = self._stack(given, path)
            output = output.view(T, B, -1)
        if self.batch_first:
            output = output.transpose(0, 1)
        if not batched:
            output, final = output.squeeze(axis), tuple(s.squeeze(1) for s in final)
        return output, self._as_torch(final)

    def _of_nobody(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Of (T, B, I) without a frame in it, or without a sequence; nothing is updated."""
        T, B, _ = x.shape
        cells = self.cells()
        final = stack.zeros(self.mode, cells, B) if state is None else state
        output = final[0].new_zeros(T, B, self.directions * cells[0].sizes[0])
        # 0, but of all parameters: a loss of it has gradients, which are 0.
        zero = sum(p.flatten()[:0].sum() for p in self.parameters())
        if any(n.meets_others for n in self.normalisers()):
            # Other ranks have rows, and wait for the count of ours.
            zero = zero + stack.meet(self.weights(), self.normalisers(), self.directions, x)
        return output + zero, final

    def _check_state(self, hx: Any) -> None:
        if hx is None:
            return
        if _is_like_lengths(hx):
            kind = RuntimeError if isinstance(hx, Tensor) else ValueError  # torch's, and ours
            raise kind(
                f"hx is the initial state of {type(self).__name__}, and got what looks like "
                "lengths: give them by name, lengths="
            )
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
            kind = data.device.type
            autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
            wrong = [s.dtype for s in state if s.dtype != data.dtype and not autocast]
            if wrong:
                raise RuntimeError(
                    f"hx must have the dtype of the input, {data.dtype}, got {wrong[0]}"
                )

    def _check_batch_first(self, input: Any, hx: Any) -> None:
        """A hint where the state fits the other dimension of a batch."""
        h = hx[0] if self.mode == "LSTM" else hx
        if isinstance(input, PackedSequence) or input.dim() != 3 or h.dim() != 3:
            return
        batch, time = input.shape[:2] if self.batch_first else input.shape[1::-1]
        if h.shape[1] == time != batch:
            raise RuntimeError(
                f"hx is of {time} sequences and the input {tuple(input.shape)} of {batch}: with "
                f"batch_first={not self.batch_first} they would fit"
            )

    def _as_torch(self, state: State) -> Any:
        return state if self.mode == "LSTM" else state[0]

    def __prepare_scriptable__(self) -> Any:
        return tracing.plain(self)


def _is_like_lengths(hx: Any) -> bool:
    """Whether a state was meant to be lengths: integers, or one number per sequence."""
    if isinstance(hx, Tensor):
        return hx.dim() == 1 or not (hx.is_floating_point() or hx.is_complex())
    return isinstance(hx, list | tuple) and bool(hx) and all(isinstance(n, int) for n in hx)


tracing.allow(Normalised)
tracing.prepare_for_script_modules(Normalised)
