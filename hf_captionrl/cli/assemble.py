"""`captionrl assemble`: a captioner from a vision tower and a language model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hf_captionrl.utils.io import temporary_path
from hf_captionrl.utils.options import CommandOptions, Positive, SeedOptions, option


@dataclass
class AssembleOptions(SeedOptions, CommandOptions):
    """Connect a vision tower and a language model to a ClipCap with an untrained mapper.

    The mapper turns the image into prefix vectors of the language model. Train the result with `captionrl train mle-clipcap`
    before any other method.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl assemble google/efficientnet-b0 HuggingFaceTB/SmolLM2-135M clipcap
          captionrl assemble openai/clip-vit-base-patch32 openai-community/gpt2 clipcap --prefix_length 10
          captionrl train mle-clipcap --model_name_or_path clipcap --dataset_name imagefolder --data_dir photos
    """

    vision: str = option(
        positional=True,
        metavar="VISION",
        help="vision tower: a folder or a name on the Hub; of CLIP or SigLIP, its image side",
    )
    language: str = option(
        positional=True,
        metavar="LANGUAGE",
        help="causal language model: a folder, also one with a single GGUF file, or a name on the Hub",
    )
    output: Path = option(positional=True, metavar="OUT", help="folder to write, empty or new")
    prefix_length: Positive = option(10, help="number of prefix vectors before a caption")
    mapping_type: Literal["mlp", "transformer"] = option("mlp", help="mapper from the image to the prefix")


def write_captioner(options: AssembleOptions) -> None:
    """Assemble the captioner, and save it."""
    if options.output.exists() and not (options.output.is_dir() and not any(options.output.iterdir())):
        raise ValueError(f"{str(options.output)!r} is a file or a folder that is not empty. Use another OUT.")
    from transformers import set_seed

    from hf_captionrl.captioners.clipcap.assembly import assemble

    set_seed(options.seed)  # initialises the mapper
    model, processor = assemble(
        options.vision, options.language, prefix_length=options.prefix_length, mapping_type=options.mapping_type
    )
    with temporary_path(options.output.parent, is_folder=True) as folder:
        model.save_pretrained(whole := folder / "whole")
        processor.save_pretrained(whole)
        whole.replace(options.output)
    parts: dict[str, Any] = {"vision": model.vision_tower, "language": model.language_model, "all": model}
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
    total = sizes.pop("all")
    sizes["mapper"] = total - sum(sizes.values())
    if options.json:
        print(json.dumps({"output": str(options.output), "parameters": sizes}))
        return
    parts_of = ", ".join(f"{name} {number / 1e6:.1f} million" for name, number in sizes.items())
    print(f"{options.output}: a ClipCap of {total / 1e6:.1f} million parameters ({parts_of}).")
