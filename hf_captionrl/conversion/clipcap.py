"""Checkpoints of ClipCap's published code: the mapper (`clip_project.*`) and usually GPT-2 (`gpt.*`).

They hold nothing else: the vision tower, the tokenizer and the shape of the language model come from other checkpoints.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_captionrl.checkpoints.loading import read_config
from hf_captionrl.checkpoints.shipped import model_path

if TYPE_CHECKING:
    from hf_captionrl.models.clipcap import ClipCapForConditionalGeneration

__all__ = ["assemble_clipcap", "check_shapes", "is_clipcap", "mapper_settings", "renamed"]

MAPPER, LANGUAGE_MODEL = "clip_project.", "gpt."
CAUSAL_MASK = re.compile(r"\.attn\.(masked_)?bias$")
"""Buffers of old versions of GPT-2; today's makes its mask itself."""


def is_clipcap(names: set[str]) -> bool:
    """Whether tensors have the names of ClipCap's published code."""
    return any(name.startswith(MAPPER) for name in names)


def mapper_settings(state: dict[str, Tensor], width: int) -> dict[str, Any]:
    """Find out the mapper's kind and lengths from the shapes."""
    first, last, constant = (state.get(MAPPER + n) for n in ("model.0.weight", "model.2.weight", "prefix_const"))
    if constant is not None:
        layers = {name.split(".")[3] for name in state if name.startswith(MAPPER + "transformer.layers.")}
        linear = state.get(MAPPER + "linear.weight")
        if linear is None or linear.size(0) % width or constant.size(1) != width:
            raise ValueError(
                f"The transformer mapper was made for a language model of width {constant.size(1)}, not {width}. Pass the "
                "right --language_model."
            )
        return {
            "mapping_type": "transformer",
            "prefix_length": constant.size(0),
            "clip_length": linear.size(0) // width,
            "num_mapper_layers": len(layers),
        }
    if first is None or last is None:
        raise ValueError(
            f"{MAPPER}* is neither the published MLP (model.0, model.2) nor the published transformer (prefix_const)."
        )
    if last.size(0) % width:
        raise ValueError(
            f"The MLP's output ({last.size(0)}) is not a multiple of the language model's width ({width}). Pass the right "
            "--language_model."
        )
    return {"mapping_type": "mlp", "prefix_length": last.size(0) // width}


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names for the published ones."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if CAUSAL_MASK.search(name):
            continue
        if name.startswith(MAPPER):
            found["mapper." + name.removeprefix(MAPPER)] = value
        elif name.startswith(LANGUAGE_MODEL):
            found["language_model." + name.removeprefix(LANGUAGE_MODEL)] = value
        else:
            raise ValueError(
                f"{name} belongs to neither {MAPPER}* nor {LANGUAGE_MODEL}*. Use a checkpoint of ClipCap as it was released."
            )
    return found


def check_shapes(found: dict[str, Tensor], model: ClipCapForConditionalGeneration) -> None:
    """Refuse a checkpoint that does not fill mapper and language model exactly."""
    expected = {n: v for n, v in model.state_dict().items() if not n.startswith("vision_tower.")}
    if not any(name.startswith("language_model.") for name in found):
        expected = {n: v for n, v in expected.items() if n.startswith("mapper.")}
    wrong = [f"{n} is missing" for n in sorted(expected.keys() - found.keys())]
    wrong += [f"{n} is unknown" for n in sorted(found.keys() - expected.keys())]
    wrong += [
        f"{n} is {tuple(found[n].shape)} instead of {tuple(expected[n].shape)}"
        for n in sorted(found.keys() & expected.keys())
        if found[n].shape != expected[n].shape
    ]
    if wrong:
        shown = "; ".join(wrong[:5]) + ("; ..." if len(wrong) > 5 else "")
        raise ValueError(
            f"The checkpoint does not fit --vision_model and --language_model: {shown}. Pass those it was trained with."
        )


def assemble_clipcap(
    state: dict[str, Tensor], *, vision_model: str, language_model: str, **settings: Any
) -> tuple[ClipCapForConditionalGeneration, Any, bool]:
    """Make the model of a published checkpoint."""
    from hf_captionrl.models.clipcap.assembly import assemble

    found = renamed(state)
    mapper_alone = not any(name.startswith("language_model.") for name in found)
    width = read_config(model_path(language_model)).hidden_size
    model, processor = assemble(
        vision_model,
        language_model,
        fresh_language_model=not mapper_alone,
        **settings,
        **mapper_settings(state, width),
    )
    check_shapes(found, model)
    model.load_state_dict(found, strict=False)
    return model, processor, mapper_alone
