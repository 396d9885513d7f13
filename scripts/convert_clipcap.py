"""Convert a checkpoint of the published ClipCap code (a `.pt` state dict) to a folder that transformers loads.

    python scripts/convert_clipcap.py coco_weights.pt clipcap-coco
    python scripts/convert_clipcap.py transformer_weights.pt clipcap-transformer \
        --vision_model openai/clip-vit-base-patch32 --normalize_image_embeds

The `.pt` holds the mapper (`clip_project.*`) and usually GPT-2 (`gpt.*`), nothing else: the image tower comes from
`--vision_model`, tokenizer and shape of the language model from `--language_model`. Nothing is unpickled but tensors.
"""

from __future__ import annotations

import argparse
import pickle  # for the name of its error # nosec B403
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from hf_captionrl.models.clipcap import ClipCapForConditionalGeneration
from hf_captionrl.models.clipcap.assembly import assemble

MAPPER, LANGUAGE_MODEL = "clip_project.", "gpt."
CAUSAL_MASK = re.compile(r"\.attn\.(masked_)?bias$")
"""Buffers of old versions of GPT-2; today's makes its mask itself."""


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a `.pt` file, running no code that may be in it.

    Args:
        path (`pathlib.Path`): A state dict.

    Returns:
        `dict`: Names and tensors.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file holds anything but tensors, or they are not ClipCap's.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Give the .pt of a published ClipCap.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} is not a plain file of tensors, and anything else in a pickle could run code. Save the state dict "
            "alone, torch.save(model.state_dict(), ...)."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} holds no state dict. Save one with torch.save(model.state_dict(), ...).")
    if not any(name.startswith(MAPPER) for name in state):
        raise ValueError(
            f"{path} has no tensor {MAPPER}*, so it is no checkpoint of the published ClipCap. It has "
            f"{sorted(state)[:3]} ..."
        )
    return state


def mapper_settings(state: dict[str, Tensor], width: int) -> dict[str, Any]:
    """Find out the mapper's kind and lengths from the shapes.

    Args:
        state (`dict`): Of `read_checkpoint`.
        width (`int`): Of the language model.

    Returns:
        `dict`: Fields of [`ClipCapConfig`].

    Raises:
        ValueError: If the mapper is of neither published kind, or was made for another width.
    """
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
            f"The MLP's output ({last.size(0)}) is no multiple of the language model's width ({width}). Pass the right "
            "--language_model."
        )
    return {"mapping_type": "mlp", "prefix_length": last.size(0) // width}


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names for the published ones.

    Args:
        state (`dict`): Of `read_checkpoint`.

    Returns:
        `dict`: Without the causal masks.

    Raises:
        ValueError: If there is a tensor that belongs to neither mapper nor language model.
    """
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if CAUSAL_MASK.search(name):
            continue
        if name.startswith(MAPPER):
            found["mapper." + name.removeprefix(MAPPER)] = value
        elif name.startswith(LANGUAGE_MODEL):
            found["language_model." + name.removeprefix(LANGUAGE_MODEL)] = value
        else:
            raise ValueError(f"{name} belongs to neither {MAPPER}* nor {LANGUAGE_MODEL}*. Is this ClipCap?")
    return found


def check_shapes(found: dict[str, Tensor], model: ClipCapForConditionalGeneration) -> None:
    """Refuse a checkpoint that does not fill mapper and language model exactly.

    Args:
        found (`dict`): Of `renamed`.
        model ([`ClipCapForConditionalGeneration`]): To be filled.

    Raises:
        ValueError: If a tensor is missing, too many, or of another shape.
    """
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


def convert(
    checkpoint: Path,
    output: Path,
    *,
    vision_model: str,
    language_model: str,
    normalize_image_embeds: bool = False,
    num_mapper_heads: int = 8,
    stop_at_period: bool = True,
) -> ClipCapForConditionalGeneration:
    """Convert and save.

    Args:
        checkpoint (`pathlib.Path`): The `.pt` file.
        output (`pathlib.Path`): Folder to write.
        vision_model (`str`): CLIP, or another tower with a pooled output; a folder or a name on the Hub.
        language_model (`str`): Likewise.
        normalize_image_embeds (`bool`): Whether it was trained with `--normalize_prefix`.
        num_mapper_heads (`int`): Of the transformer mapper; no shape tells it.
        stop_at_period (`bool`): Published checkpoints know no other end.

    Returns:
        [`ClipCapForConditionalGeneration`]: The model.

    Raises:
        ValueError: If the file is not what it should be, or does not fit the two models.
    """
    state = read_checkpoint(checkpoint)
    found = renamed(state)
    mapper_alone = not any(name.startswith("language_model.") for name in found)
    if mapper_alone:
        print(f"{checkpoint} holds the mapper alone; the language model is {language_model} as it stands.")
    width = AutoConfig.from_pretrained(language_model, trust_remote_code=False).hidden_size
    model, processor = assemble(
        vision_model,
        language_model,
        fresh_language_model=not mapper_alone,
        normalize_image_embeds=normalize_image_embeds,
        num_mapper_heads=num_mapper_heads,
        stop_at_period=stop_at_period,
        **mapper_settings(state, width),
    )
    check_shapes(found, model)
    model.load_state_dict(found, strict=False)
    model.save_pretrained(output)
    processor.save_pretrained(output)
    return model


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="state dict of the published code")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--vision_model", default="openai/clip-vit-base-patch32", help="image tower")
    parser.add_argument("--language_model", default="openai-community/gpt2", help="language model and tokenizer")
    parser.add_argument("--normalize_image_embeds", action="store_true", help="it was trained with --normalize_prefix")
    parser.add_argument("--num_mapper_heads", type=int, default=8, help="of a transformer mapper")
    parser.add_argument(
        "--stop_at_period", action=argparse.BooleanOptionalAction, default=True, help="captions end at a full stop"
    )
    arguments = vars(parser.parse_args(argv))
    try:
        convert(**arguments)
    except (OSError, ValueError) as error:
        raise SystemExit(f"convert_clipcap: {error}") from error


if __name__ == "__main__":
    main()
