"""How a recurrent stack and its softmax begin."""

import torch
from torch import nn

from normrnn.nn.base import Normalised


@torch.no_grad()
def glorot_(rnn: Normalised, decoder: nn.Linear) -> None:
    """U(-b, b), b = √(6/(I+H)), for each gate's own matrix; biases 0; γ and β left alone.

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
            parameter.uniform_(-bound, bound)
    nn.init.xavier_uniform_(decoder.weight)
    decoder.bias.zero_()


def train_one_bias(rnn: Normalised) -> None:
    """torch's two biases get the same gradient and would learn at twice the rate of β.

    So `bias_hh`, as far as there is one, stays at zero; of the GRU's the candidate's part, which
    is inside r ⊙ (W_h h + b), is trained.
    """
    for name, parameter in rnn.named_parameters(recurse=False):
        if "bias_hh" not in name:
            continue
        with torch.no_grad():
            if rnn.mode == "GRU":
                inside = 2 * rnn.hidden_size
                parameter[:inside] = 0
                parameter.register_hook(lambda d, n=inside: torch.cat([d.new_zeros(n), d[n:]]))
            else:
                parameter.zero_().requires_grad_(False)
