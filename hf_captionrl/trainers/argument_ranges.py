"""Ranges of numbers in a configuration that transformers does not check, or only during the run."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["check_ranges"]

_AT_LEAST_ONE = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "generation_num_beams",
    "generation_max_new_tokens",
)
_NOT_NEGATIVE = ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm")
_BELOW_ONE = ("adam_beta1", "adam_beta2")


def check_ranges(args: Any) -> None:
    """Refuse numbers outside their range."""

    def refuse(name: str, rule: str) -> None:
        raise ValueError(f"{name} is {getattr(args, name)}, but must be {rule}. Use a number in this range.")

    def number(name: str) -> float | None:
        value = getattr(args, name, None)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    for name in _AT_LEAST_ONE:
        if (value := number(name)) is not None and not value >= 1:
            refuse(name, "1 or more")
    for name in _NOT_NEGATIVE:
        if (value := number(name)) is not None and not 0 <= value < math.inf:
            refuse(name, "finite and not negative")
    for name in _BELOW_ONE:
        if (value := number(name)) is not None and not 0 <= value < 1:
            refuse(name, "in [0, 1)")
    if (value := number("neftune_noise_alpha")) is not None and value < 0:
        refuse("neftune_noise_alpha", "not negative")
