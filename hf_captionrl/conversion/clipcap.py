"""Checkpoints of ClipCap's published code: the mapper (`clip_project.*`) and usually GPT-2 (`gpt.*`).

The vision tower, the tokenizer and the shape of the language model come from other checkpoints.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_captionrl.checkpoints.loading import read_config
from hf_captionrl.checkpoints.shipped_models import model_path
from hf_captionrl.conversion.sizes import misfits

if TYPE_CHECKING:
    from hf_captionrl.models.clipcap import ClipCapForConditionalGeneration

__all__ = ["assemble_clipcap", "check_shapes", "is_clipcap", "mapper_settings", "renamed"]

MAPPER, LANGUAGE_MODEL = "clip_project.", "gpt."
CAUSAL_MASK = re.compile(r"\.attn\.(masked_)?bias$")
"""Buffers of old versions of GPT-2; the current one computes its mask."""


def is_clipcap(names: set[str]) -> bool:
    """Whether tensors have the names of ClipCap's published code."""
    return any(name.startswith(MAPPER) for name in names)


def mapper_settings(state: dict[str, Tensor], width: int) -> dict[str, Any]:
    """Kind and lengths of the mapper, from the shapes."""
    first, last, constant = (state.get(MAPPER + n) for n in ("model.0.weight", "model.2.weight", "prefix_const"))
    if constant is not None:
        layers = {name.split(".")[3] for name in state if name.startswith(MAPPER + "transformer.layers.")}
        linear = state.get(MAPPER + "linear.weight")
        if linear is None or linear.size(0) % width or constant.size(1) != width:
            raise ValueError(
                f"The transformer mapper needs a language model of width {constant.size(1)}, not {width}. Use the "
                "--language_model that it was trained with."
            )
        return {
            "mapping_type": "transformer",
            "prefix_length": constant.size(0),
            "clip_length": linear.size(0) // width,
            "num_mapper_layers": len(layers),
        }
    if first is None or last is None:
        raise ValueError(
            f"{MAPPER}* is neither the published MLP (model.0, model.2) nor the published transformer (prefix_const). "
            "Use a checkpoint of ClipCap as it was released."
        )
    if last.size(0) % width:
        raise ValueError(
            f"The MLP's output ({last.size(0)}) is not a multiple of the language model's width ({width}). Use the "
            "--language_model that it was trained with."
        )
    return {"mapping_type": "mlp", "prefix_length": last.size(0) // width}


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of `ClipCapForConditionalGeneration`."""
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
    """Raise if the tensors are not those of mapper and language model."""
    expected = {n: v for n, v in model.state_dict().items() if not n.startswith("vision_tower.")}
    if not any(name.startswith("language_model.") for name in found):
        expected = {n: v for n, v in expected.items() if n.startswith("mapper.")}
    if wrong := misfits(found, expected):
        raise ValueError(
            f"The checkpoint does not fit --vision_model and --language_model: {wrong}. Use those it was trained with."
        )


def assemble_clipcap(
    state: dict[str, Tensor], *, vision_model: str, language_model: str, **settings: Any
) -> tuple[ClipCapForConditionalGeneration, Any, bool]:
    """Build the model of a published checkpoint; also returns its processor, and whether only the mapper was stored."""
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
