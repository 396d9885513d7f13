"""Options of `captionrl boost`; light to import, because `--help` needs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hf_captionrl.data.options import DatasetOptions, PublicationOptions, RequestOptions
from hf_captionrl.utils.options import Fraction, Positive, SeedOptions, option


@dataclass
class _Backends(SeedOptions, RequestOptions):
    heading: ClassVar[str] = "backends"

    text: str | None = option(
        None, metavar="BACKEND", help="language model that writes BlendCap and HolisticCap, as listed below"
    )
    vision: str | None = option(None, metavar="BACKEND", help="vision model that writes VisualCap, as listed below")
    text_url: str | None = option(
        None, metavar="URL", help="address of the endpoint of a language model openai:NAME, without /chat/completions"
    )
    vision_url: str | None = option(
        None, metavar="URL", help="address of the endpoint of a vision model openai:NAME (default: that of --text_url)"
    )
    batch_size: Positive = option(8, metavar="N", help="prompts per batch of transformers")
    max_new_tokens: Positive = option(256, metavar="N", help="longest answer in tokens")
    error_rate: Fraction = option(
        0.15, metavar="X", help="share of the facts that the describer of scenes gets wrong, in [0, 1]"
    )


@dataclass
class BoostOptions(_Backends, DatasetOptions, PublicationOptions):
    """Visual Caption Boosting (No Detail Left Behind, section 2).

    A language model blends the references of an image into a BlendCap, a vision model describes the image (VisualCap), and
    the language model adds the new details to the BlendCap (HolisticCap). Where the two contradict, the BlendCap wins.

    The output folder gets the journals of all answers, captions.parquet, skipped.jsonl, statistics.json, lengths.png, and
    README.md, the card with which `captionrl push` publishes it. To train on the captions, boost the split that is trained
    on with --split train; the default is test, as in all commands.

    After a crash or `kill -9`, give the same command again: no question is asked twice.
    """

    examples: ClassVar[str] = """
        backends, for --text and --vision:
          scenes               the embedded world: rules that blend, and a describer with a known error rate (the default
                               there)
          transformers:NAME    a model of transformers: a folder or a name on the Hub
          captioner:NAME       --vision only: a captioner of this package, such as scenes:blip-mle
          openai:NAME          any endpoint with OpenAI's chat completions (vLLM, Ollama), at --text_url or --vision_url; the
                               key comes only from the environment variable named by --api_key_env

        examples:
          captionrl boost --dataset scenes --split train --output boosted
          captionrl boost --dataset dataset_coco.json --image_root coco --split train --output boosted \\
              --text transformers:mistralai/Mistral-7B-Instruct-v0.2 --vision transformers:Salesforce/instructblip-vicuna-7b
          captionrl boost --dataset dataset_coco.json --image_root coco --split train --output boosted --concurrency 32 \\
              --text openai:mistral --text_url http://127.0.0.1:8000/v1 --vision openai:llava --vision_url http://127.0.0.1:8001/v1

        publish: --embed_images includes images that are files, --no_images leaves them out; a finished run asks nothing
    """

    output: Path = option(Path("boosted"), metavar="DIR", help="folder to write into")
    attempts: Positive = option(
        3, metavar="N", help="largest number of answers per prompt, until one passes the checks"
    )
    embed_images: bool = option(False, help="store images in the file, not their paths")
    tokenizer: str | None = option(
        None,
        metavar="NAME",
        help="tokenizer whose tokens are counted; the paper uses CLIP's (default: scenes:siglip-held-out on scenes, else none)",
    )
