"""Training and eval mode of a model's modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode for a while, and each of its parts back into its own mode."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
