"""Norm of the gradient of the first mini-batch in float64, at initialisation.

    python studies/permuted-mnist/gradients.py MNIST

For γ 0.1 and 1.0 of "recurrent" and five seeds; the largest float32 is 3.4e38.
"""

import sys
from dataclasses import replace

import torch
import torch.nn.functional as F

import normrnn
from normrnn.arrays.config import ArrayConfig
from normrnn.config.registry import recipe, task_of


def gradient_norm(config: ArrayConfig) -> float:
    """The global norm over all parameters."""
    task = task_of(config).open(config)
    torch.manual_seed(config.seed)
    task.build(torch.device("cpu"))
    batch = task.batch("train", task.batches("train", 0)[0])
    model = task.model.double().train()
    with normrnn.backend("loop"):
        F.cross_entropy(model(batch.inputs.double()), batch.targets).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(grads))


def main(data: str) -> None:
    base = recipe("permuted-mnist")
    assert isinstance(base, ArrayConfig)
    for gamma in (0.1, 1.0):
        model = replace(base.model, gamma=gamma)
        norms = [
            gradient_norm(replace(base, data=data, norm="recurrent", model=model, seed=seed))
            for seed in range(1, 6)
        ]
        print(f"γ {gamma}: {', '.join(f'{norm:.1e}' for norm in norms)}")


if __name__ == "__main__":
    main(sys.argv[1])
