"""LoRA on the language model, the image tower, or both."""

from __future__ import annotations

import re
import warnings
from typing import Any, ClassVar, Literal

__all__ = ["Adapting"]


class Adapting:
    """The part of [`Captioner`] that adds adapters."""

    model: Any
    base_model: Any
    connector_paths: ClassVar[tuple[str, ...]]
    language_lora: ClassVar[str] = ""
    """Regular expression, matched in full: the modules of the language model that get LoRA."""
    vision_lora: ClassVar[str] = ""
    """Likewise for the image tower."""

    def lora_targets(self, tune: Literal["language", "vision", "both"] = "language") -> str:
        """Which modules get LoRA.

        Reference: "No Detail Left Behind", SR-L, SR-V and SR-LV: attention and the MLP's output in the language model,
        attention inputs and both layers of the MLP in the image tower.

        Args:
            tune: The part to adapt.

        Returns:
            `str`: A regular expression for PEFT's `target_modules`.

        Raises:
            ValueError: If `tune` is none of the three, or nothing in this model matches.
        """
        patterns = {"language": [self.language_lora], "vision": [self.vision_lora]}
        patterns["both"] = patterns["language"] + patterns["vision"]
        if tune not in patterns:
            raise ValueError(f"tune ({tune!r}) must be 'language', 'vision' or 'both'.")
        for pattern in patterns[tune]:
            if not any(re.fullmatch(pattern, name) for name, _ in self.base_model.named_modules()):
                raise ValueError(
                    f"No module of {type(self.base_model).__name__} matches {pattern!r}. "
                    "Pass target_modules, the names of the linear layers to adapt."
                )
        return "|".join(f"(?:{pattern})" for pattern in patterns[tune])

    def add_lora(
        self,
        tune: Literal["language", "vision", "both"] = "language",
        r: int = 32,
        alpha: float = 16,
        dropout: float = 0.0,
        *,
        target_modules: str | list[str] | None = None,
        modules_to_save: list[str] | None = None,
    ) -> None:
        """Wrap the model with LoRA; only the adapter and `modules_to_save` are trained then.

        Args:
            tune: The part to adapt.
            r (`int`): Rank.
            alpha (`float`): Scaling is `alpha / r`.
            dropout (`float`): Of the adapters' input, in [0, 1).
            target_modules (`str` or `list[str]`, *optional*): In place of `lora_targets(tune)`.
            modules_to_save (`list[str]`, *optional*): Trained whole; by default the modules between image tower and
                language model, where there are any.
        """
        from peft import LoraConfig, get_peft_model

        whole = list(self.connector_paths) if modules_to_save is None else modules_to_save
        present = {name for name, _ in self.base_model.named_modules()}
        if modules_to_save is None:
            whole = [name for name in whole if name in present]
        config = LoraConfig(
            r=r,
            lora_alpha=alpha,
            lora_dropout=dropout,
            target_modules=target_modules or self.lora_targets(tune),
            modules_to_save=whole or None,
            # The task types' wrappers expect text-only inputs.
            task_type=None,
        )
        with warnings.catch_warnings():
            # PEFT finds out by itself, layer by layer, that GPT-2 stores its weights transposed.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            self.model = get_peft_model(self.model, config)
