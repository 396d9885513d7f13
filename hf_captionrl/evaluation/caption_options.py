"""Options of `captionrl caption`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hf_captionrl.engine import EngineOptions
from hf_captionrl.evaluation.dataset_options import CaptionerOptions, DatasetOptions
from hf_captionrl.options import option, positive

__all__ = ["CaptionOptions"]


@dataclass
class CaptionOptions(EngineOptions, CaptionerOptions, DatasetOptions):
    """Caption every image of a folder or data set. The data need no captions.

    Each line of the output is {"image_id", "caption"}, plus "captions" if --num_return_sequences asks for several. Images
    that cannot be read are counted, and listed in NAME.quarantine.jsonl. Each batch is on disk as soon as it is written:
    after a crash or `kill -9` the same command resumes. NAME.run.json keeps the settings; a file is never resumed with
    other settings.

    With --processes or --engine the output is a folder of Parquet shards, which the other commands read like a file.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl caption scenes:blip-mle --dataset scenes --output mle.jsonl
          captionrl caption Salesforce/blip-image-captioning-base --dataset imagefolder --data_dir photos
          captionrl caption outputs/smile_blip/model --dataset dataset_coco.json --image_root coco --num_beams 3

        five captions per image, for the diversity suite (`captionrl evaluate --suite sle`):
          captionrl caption MODEL --num_return_sequences 5 --do_sample          random samples, "rs" in the paper
          captionrl caption MODEL --num_return_sequences 5 --num_beams 5        the five best of a beam, "bs"

        on all GPUs of this machine, and on a Ray cluster:
          captionrl caption MODEL --dataset OWNER/NAME --split train --output captions --processes 8
          captionrl caption MODEL --dataset OWNER/NAME --split train --output /shared/captions --engine ray --address auto
    """

    model: str = option(
        positional=True, metavar="MODEL", help="captioner: a folder, a name on the Hub, or scenes:blip-mle"
    )
    output: Path | None = option(
        None,
        metavar="FILE",
        help="file to write, or to resume; a folder with --processes or --engine (default: captions.jsonl, or captions)",
    )
    overwrite: bool = option(False, help="start again even if the file exists")
    batch_size: int = option(16, parse=positive, metavar="N", group="captioner", help="images captioned at once")
    attn_implementation: str | None = option(
        None,
        metavar="NAME",
        group="captioner",
        help="implementation of attention: 'sdpa', 'eager', 'flash_attention_2', ... (default: transformers')",
    )
    load_in_4bit: bool = option(
        False, group="captioner", help="quantize the weights to 4 bits; needs bitsandbytes and a GPU"
    )
    load_in_8bit: bool = option(
        False, group="captioner", help="quantize the weights to 8 bits; needs bitsandbytes and a GPU"
    )
    compile_decoding: bool = option(
        False,
        group="decoding",
        help="compile the decoding step with torch.compile; needs greedy or sampled captions (--num_beams 1)",
    )
    cache_implementation: Literal["dynamic", "static"] | None = option(
        None,
        group="decoding",
        help="cache of keys and values; transformers compiles the decoding step of a static cache on a GPU",
    )
    num_beams: int | None = option(
        None, parse=positive, metavar="N", group="decoding", help="number of beams (default: 3, or 1 with --do_sample)"
    )
    max_new_tokens: int = option(40, parse=positive, metavar="N", group="decoding", help="longest caption in tokens")
    num_return_sequences: int = option(
        1, parse=positive, metavar="N", group="decoding", help="number of captions per image"
    )
    rerank: str | None = option(
        None,
        metavar="SCORER",
        group="decoding",
        help="write only the caption most similar to its image, by this scorer: a folder, a name on the Hub, scenes:clip-reward; "
        "needs --num_return_sequences above 1, as in the authors' code of SLE (100 samples)",
    )
    length_penalty: float = option(
        1.0,
        metavar="X",
        group="decoding",
        help="exponent of the length that divides a beam's score; above 0: longer captions",
    )
    repetition_penalty: float = option(1.0, metavar="X", group="decoding", help="penalty on repeated tokens; 1: none")
    do_sample: bool = option(False, group="decoding", help="sample captions from the whole distribution")
    temperature: float = option(1.0, metavar="X", group="decoding", help="temperature of sampling")
    top_p: float = option(
        1.0,
        metavar="X",
        group="decoding",
        help="nucleus sampling: smallest probability mass that is kept; 1: all tokens",
    )
    top_k: int = option(0, metavar="N", group="decoding", help="sample only from this many tokens; 0: all tokens")
    seed: int = option(0, metavar="N", group="decoding", help="seed of sampling")

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `load_captioner` that were set."""
        names = ("attn_implementation", "load_in_4bit", "load_in_8bit")
        return {name: getattr(self, name) for name in names if getattr(self, name)}
