"""Sampling of transformers with given random numbers: an oracle for the decoding loop."""

from collections.abc import Callable

import torch
from torch import Tensor


def multinomial_of(uniforms: Tensor) -> Callable[[Tensor, int], Tensor]:
    """A `torch.multinomial` that inverts the cumulative distribution in a plain loop; call t uses `uniforms[t]` `(N,)`."""
    steps = iter(uniforms)

    def multinomial(probabilities: Tensor, num_samples: int) -> Tensor:
        chosen = []
        for row, draw in zip(probabilities.double(), next(steps).tolist(), strict=True):
            token, total = -1, 0.0
            while total <= draw * float(row.sum()):
                token += 1
                total += float(row[token])
            chosen.append([token])
        return torch.tensor(chosen)

    return multinomial
