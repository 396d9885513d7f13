"""Models that do not change in training: the reference model of the KL penalty, and the scorers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.eval_mode import evaluating

__all__ = ["make_reference", "reference_policy", "refuse_shared_parameters"]


def make_reference(captioner: Captioner) -> Captioner:
    """The current captioner as reference: itself if its adapter can be disabled, else a frozen copy."""
    if hasattr(captioner.model, "disable_adapter"):
        return captioner
    reference = copy.copy(captioner)
    reference.model = copy.deepcopy(captioner.model).requires_grad_(False).eval()
    return reference


@contextmanager
def reference_policy(reference: Captioner, policy: Captioner) -> Iterator[Captioner]:
    """The reference on the policy's device, in eval mode, adapter disabled."""
    if reference is not policy and reference.device != policy.device:
        reference.model.to(policy.device)
    without = reference.model.disable_adapter() if reference is policy else nullcontext()
    with without, evaluating(reference.model):
        yield reference


def refuse_shared_parameters(policy: nn.Module, scorers: Iterable[Any]) -> None:
    """Refuse scorers that share parameters with the policy and would be trained with it."""
    names = {p.data_ptr(): name for name, p in policy.named_parameters() if p.numel()}
    for scorer in scorers:
        model = getattr(scorer, "model", None)
        for name, parameter in model.named_parameters() if isinstance(model, nn.Module) else ():
            if parameter.numel() and parameter.data_ptr() in names:
                raise ValueError(
                    f"The scorer's parameter {name} is the policy's {names[parameter.data_ptr()]}, so training would change "
                    "the scorer. Load the scorer separately, with load_scorer(name)."
                )
