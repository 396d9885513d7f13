"""LoRA on the language model, the vision tower, or both."""

from __future__ import annotations

import copy
import re
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig


_STANDARD_NORMAL = "captionrl_standard_normal"
"""Attribute of a `LoraConfig`: PEFT has no N(0, 1), its "gaussian" has standard deviation 1/r. It is not a field, so that PEFT
can read the saved configuration."""


class Adapting:
    """The part of [`Captioner`] that adds adapters."""

    model: Any
    base_model: Any
    connector_paths: ClassVar[tuple[str, ...]]
    language_lora: ClassVar[str] = ""
    """Regular expression for the full names of the modules of the language model that get LoRA."""
    vision_lora: ClassVar[str] = ""
    """The same for the vision tower."""

    def lora_targets(self, tune: Literal["language", "vision", "both"] = "language") -> str:
        """Names of the modules that get LoRA.

        Reference: "No Detail Left Behind", SR-L, SR-V and SR-LV. For ClipCap these are the modules of the authors' code:
        `attn.c_attn` and `attn.c_proj` of GPT-2, and attention inputs and both layers of the MLP in CLIP. Other families have
        attention and the output of the MLP in the language model.

        Args:
            tune: The part to adapt.

        Returns:
            `str`: A regular expression for PEFT's `target_modules`.

        Raises:
            ValueError: If `tune` is unknown, or no module matches.
        """
        patterns = {"language": [self.language_lora], "vision": [self.vision_lora]}
        patterns["both"] = patterns["language"] + patterns["vision"]
        if tune not in patterns:
            raise ValueError(f"tune is {tune!r}. Use 'language', 'vision' or 'both'.")
        for pattern in patterns[tune]:
            if not any(re.fullmatch(pattern, name) for name, _ in self.base_model.named_modules()):
                raise ValueError(
                    f"No module of {type(self.base_model).__name__} matches {pattern!r}. "
                    "Pass target_modules, the names of the linear layers to adapt."
                )
        return "|".join(f"(?:{pattern})" for pattern in patterns[tune])

    def lora_config(
        self,
        tune: Literal["language", "vision", "both"] = "language",
        r: int = 32,
        alpha: float = 16,
        dropout: float = 0.0,
        *,
        init: Literal["peft", "paper"] = "peft",
        target_modules: str | list[str] | None = None,
        modules_to_save: list[str] | None = None,
    ) -> LoraConfig:
        """The paper's LoRA configuration for this model.

        Reference: "No Detail Left Behind", SR-L, SR-V and SR-LV (`tune="language"`, `"vision"`, `"both"`).

        Args:
            tune: The part to adapt.
            r (`int`): Rank.
            alpha (`float`): Scaling is `alpha / r`.
            dropout (`float`): Dropout on the adapters' input, in [0, 1).
            init: Initial factors of the update. `"peft"`: A is uniform with standard deviation `1 / sqrt(3 * width)`, B is 0.
                `"paper"`: one factor is N(0, 1) and the other 0, as in the authors' code, so that the first updates are
                `sqrt(3 * width)` times larger (48 times for GPT-2). It takes effect in `add_adapter` and in the
                trainers, not in `peft.get_peft_model`.
            target_modules (`str` or `list[str]`, *optional*): Modules to adapt instead of `lora_targets(tune)`.
            modules_to_save (`list[str]`, *optional*): Modules that are trained in full; by default those between the
                vision tower and the language model, if there are any.

        Returns:
            `peft.LoraConfig`: For `peft_config` of a trainer, or for `peft.get_peft_model`.

        Raises:
            ValueError: If `tune` or `init` is unknown, or no module matches.
        """
        from peft import LoraConfig

        if init not in ("peft", "paper"):
            raise ValueError(f"init is {init!r}. Use 'peft' or 'paper'.")
        if modules_to_save is None:
            present = {name for name, _ in self.base_model.named_modules()}
            modules_to_save = [name for name in self.connector_paths if name in present]
        config = LoraConfig(
            r=r,
            lora_alpha=alpha,
            lora_dropout=dropout,
            target_modules=target_modules or self.lora_targets(tune),
            modules_to_save=modules_to_save or None,
            task_type=None,  # PEFT's wrappers of task types expect text-only inputs
        )
        setattr(config, _STANDARD_NORMAL, init == "paper")
        return config

    def add_lora(self, tune: Literal["language", "vision", "both"] = "language", **settings: Any) -> None:
        """Wrap the model with LoRA, so that only the adapter and `modules_to_save` are trained.

        Args:
            tune: The part to adapt.
            settings (`Any`): The other arguments of `lora_config`.
        """
        self.add_adapter(self.lora_config(tune, **settings))

    def add_adapter(self, config: PeftConfig) -> None:
        """Wrap the model with a PEFT adapter.

        Args:
            config (`peft.PeftConfig`): The adapter. `target_modules` defaults to PEFT's default for the model type,
                and to `lora_targets("language")` if PEFT has none. `task_type` is ignored: PEFT's wrappers of task
                types expect text-only inputs.

        Raises:
            ValueError: If the model already has an adapter, the adapter is a learned prompt, or its `target_modules` are
                not in the model.
        """
        from peft import get_peft_model

        if hasattr(self.model, "peft_config"):
            raise ValueError(
                "The model already has an adapter, and peft_config would add another one. Omit peft_config to train the "
                "existing adapter, or merge it first (model.merge_and_unload())."
            )
        if config.is_prompt_learning:
            raise ValueError(
                f"peft_config is a {type(config).__name__}, a learned prompt, which captioners do not support. Use "
                "peft.LoraConfig or another adapter of weights."
            )
        config = copy.deepcopy(config)  # PEFT modifies it, and several models may share a configuration
        config.task_type = None
        if getattr(config, "target_modules", "") is None and not self._peft_knows_targets(config):
            config.target_modules = self.lora_targets("language")  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            # PEFT detects per layer that GPT-2 stores its weights transposed.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            before = set(self.model.modules())  # a part of the model, such as its language model, may have an adapter
            self.model = get_peft_model(self.model, config)
        if getattr(config, _STANDARD_NORMAL, False):
            _draw_standard_normal(self.model, before)

    def _peft_knows_targets(self, config: PeftConfig) -> bool:
        from peft.utils import constants

        known = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        return self.base_model.config.model_type in known or config.peft_type != "LORA"


def _draw_standard_normal(model: torch.nn.Module, before: set[torch.nn.Module]) -> None:
    """One factor of every new adapter from N(0, 1), the other 0: `W + (B A) * alpha / rank` of the authors with B = 0."""
    from peft.tuners.lora.layer import LoraLayer
    from transformers.pytorch_utils import Conv1D

    for layer in model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        # The authors multiply B and A in the order of the stored weight, and Conv1D stores (in, out) instead of (out, in).
        swapped = isinstance(layer.get_base_layer(), Conv1D)
        for first, second in zip(layer.lora_A.values(), layer.lora_B.values(), strict=True):
            if first in before:
                continue
            random, zero = (second, first) if swapped else (first, second)
            torch.nn.init.normal_(random.weight)
            torch.nn.init.zeros_(zero.weight)
