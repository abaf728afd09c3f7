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
