"""`captionrl convert`: write a checkpoint of pickles, or of published code, as safetensors."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hf_captionrl.cli.arguments import add_common, positive

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Write a checkpoint as safetensors, which every command loads. SOURCE is a folder or a name on the Hub with pickles
(pytorch_model.bin, in one file or several; adapter_model.bin; open_clip_pytorch_model.bin), or a file of the published code
of BLIP (captioners), OpenAI's CLIP (state dicts) or ClipCap. A process of its own opens the pickles, for tensors alone (weights_only), and
without the Hub's token. Size and SHA-256 of every file that was read and written are printed. Configuration, tokenizer and
processor are copied; code is not.
"""

_EPILOG = """\
examples:
  captionrl convert Salesforce/blip-image-captioning-base blip-base
  captionrl convert outputs/old_adapter outputs/adapter
  captionrl convert model_large_caption.pth blip-large --config Salesforce/blip-image-captioning-large
  captionrl convert clip.pth clip --config openai/clip-vit-base-patch32
  captionrl convert coco_weights.pt clipcap-coco
  captionrl convert transformer_weights.pt clipcap-transformer --normalize_image_embeds
  captionrl convert outputs/clipcap clipcap-with-code --with_code
  captionrl convert open_clip_weights.pt open_clip_weights.safetensors
"""


def add_parser(subcommands: Any) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "convert",
        help="write a checkpoint of pickles as safetensors",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="a folder, a name on the Hub, or a file")
    parser.add_argument(
        "output",
        metavar="OUT",
        help="folder to write; NAME.safetensors: the tensors of one file under their own names",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub")
    parser.add_argument(
        "--config",
        metavar="MODEL",
        help="for a file of BLIP or CLIP: folder or name with the configuration (attention heads, activation), tokenizer "
        "and processor of the same model; without it sizes come from the shapes, and heads are 64 wide",
    )
    group = parser.add_argument_group("ClipCap")
    group.add_argument("--vision_model", metavar="MODEL", help="vision tower (default: openai/clip-vit-base-patch32)")
    group.add_argument("--language_model", metavar="MODEL", help="with tokenizer (default: openai-community/gpt2)")
    group.add_argument("--normalize_image_embeds", action="store_true", help="it was trained with --normalize_prefix")
    group.add_argument("--num_mapper_heads", type=positive, metavar="N", help="of a transformer mapper (default: 8)")
    group.add_argument(
        "--stop_at_period", action=argparse.BooleanOptionalAction, default=True, help="captions end at a full stop"
    )
    group.add_argument(
        "--with_code", action="store_true", help="put ClipCap's code beside it, for people without this package"
    )
    add_common(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Convert, and print sizes and hashes."""
    from hf_captionrl.conversion import convert

    names = ("vision_model", "language_model", "num_mapper_heads")
    clipcap = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    clipcap |= {
        "normalize_image_embeds": arguments.normalize_image_embeds,
        "stop_at_period": arguments.stop_at_period,
    }
    report = convert(
        arguments.source,
        arguments.output,
        revision=arguments.revision,
        config=arguments.config,
        with_code=arguments.with_code,
        **clipcap,
    )
    print(json.dumps(report.to_dict()) if arguments.json else "\n".join(report.lines()))
