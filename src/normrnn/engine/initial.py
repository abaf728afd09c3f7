"""Initial values of a network's parameters, and the seeds they come from."""

from collections.abc import Callable
from hashlib import sha256

import torch
from torch import nn

from normrnn.nn.base import Normalised

Generators = Callable[[str], torch.Generator]


def derived_seed(*parts: int | str) -> int:
    """Return a seed that depends on all `parts` and on nothing else.

    >>> derived_seed(1, "weight") == derived_seed(1, "weight") != derived_seed(2, "weight")
    True
    """
    return int.from_bytes(sha256(repr(parts).encode()).digest()[:8], "little")


def generators_by_name() -> Generators:
    """Return a function from a parameter's name to a generator of its own.

    All depend on one draw from torch's generator. Variants of a network built from the same seed
    therefore start from the same values of the parameters that they share, whatever else they have.
    """
    base = int(torch.randint(2**62, (), device="cpu"))
    return lambda name: torch.Generator().manual_seed(derived_seed(base, name))


@torch.no_grad()
def glorot_(rnn: Normalised, decoder: nn.Linear, generators: Generators) -> None:
    """Draw U(-b, b), b = √(6/(I+H)), for each gate's own matrix; set biases to 0; keep γ and β.

    A stacked (4H, I) matrix counts as four of (H, I), a diagonal peephole as the diagonal of an
    (H, H) one.
    """
    H = rnn.hidden_size
    for name, parameter in rnn.named_parameters(recurse=False):
        if name.startswith("bias"):
            parameter.zero_()
        else:
            inputs = parameter.shape[1] if parameter.dim() == 2 else H
            bound = (6 / (inputs + H)) ** 0.5
            parameter.uniform_(-bound, bound, generator=generators(f"rnn.{name}"))
    nn.init.xavier_uniform_(decoder.weight, generator=generators("decoder.weight"))
    decoder.bias.zero_()


@torch.no_grad()
def train_one_bias(rnn: Normalised) -> None:
    """Train only one of torch's two biases, which get equal gradients, as long as they are two.

    Otherwise they would learn at twice the rate of β. ``bias_hh`` stays at zero; of a GRU's the
    candidate's part, which is inside r ⊙ (W_h h + b), is trained.
    """
    is_gru, inside = rnn.mode == "GRU", 2 * rnn.hidden_size

    def without_other_gates(grad: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(grad[:inside]), grad[inside:]])

    for name, bias in rnn.named_parameters(recurse=False):
        if "bias_hh" in name:
            bias[: inside if is_gru else None] = 0
            bias.requires_grad_(is_gru)
            if is_gru:
                bias.register_hook(without_other_gates)
