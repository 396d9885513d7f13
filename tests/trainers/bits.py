"""Bit-exact comparison of two runs: parameters and the optimizer's state."""

from __future__ import annotations

from typing import Any

import torch


def bits(trainer: Any) -> dict[str, torch.Tensor]:
    """Parameters and the optimizer's state."""
    found = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for index, state in trainer.optimizer.state_dict()["state"].items():
        found |= {f"{index}/{name}": value.clone() for name, value in state.items()}
    return found


def different(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that differ in any bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]
