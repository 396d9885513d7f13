"""Options of `captionrl convert`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_captionrl.utils.options import CommandOptions, Positive, option


@dataclass
class ConvertOptions(CommandOptions):
    """Write a checkpoint as safetensors, which every command loads.

    SOURCE is a folder or a name on the Hub with pickles (pytorch_model.bin, in one file or several; adapter_model.bin;
    open_clip_pytorch_model.bin), or a file of the published code of BLIP (captioners), OpenAI's CLIP (state dicts) or
    ClipCap. Pickles are opened only for tensors (weights_only). The command prints size and SHA-256 of every file that it read
    and wrote. It copies configuration, tokenizer and processor, and no code.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl convert Salesforce/blip-image-captioning-base blip-base
          captionrl convert outputs/old_adapter outputs/adapter
          captionrl convert model_base_capfilt_large.pth blip-pretrained --image_size 384 \\
              --config Salesforce/blip-image-captioning-base
          captionrl convert clip_ViT-B-32.pth pac-s --config openai/clip-vit-base-patch32
          captionrl convert coco_weights.pt clipcap-coco
          captionrl convert open_clip_weights.pt open_clip_weights.safetensors
    """

    source: str = option(positional=True, metavar="SOURCE", help="a folder, a name on the Hub, or a file")
    output: str = option(positional=True, metavar="OUT", help="folder to write, or NAME.safetensors for one file")
    revision: str | None = option(None, metavar="REV", help="branch, tag or commit on the Hub")
    config: str | None = option(
        None,
        metavar="MODEL",
        help="model with the configuration and processor for a file of BLIP or CLIP (default: the base one)",
    )
    image_size: Positive | None = option(
        None, metavar="PIXELS", help="image size for which the positions of a file of BLIP are interpolated"
    )
    vision_model: str | None = option(
        None, group="ClipCap", metavar="MODEL", help="vision tower (default: openai/clip-vit-base-patch32)"
    )
    language_model: str | None = option(
        None, group="ClipCap", metavar="MODEL", help="language model (default: openai-community/gpt2)"
    )
    normalize_image_embeds: bool = option(False, group="ClipCap", help="the model was trained with --normalize_prefix")
    num_mapper_heads: Positive | None = option(None, group="ClipCap", metavar="N", help="heads of transformer mappers")
    stop_at_period: bool = option(True, group="ClipCap", help="captions end at a full stop")
