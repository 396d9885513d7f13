"""Options of `captionrl pairs`; light to import, because `--help` needs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from hf_captionrl.data.options import DatasetOptions
from hf_captionrl.utils.options import CacheOptions, DeviceOptions, Number, Positive, Range, option


@dataclass
class PairsOptions(DeviceOptions, CacheOptions, DatasetOptions):
    """Write preference pairs for TRL's DPOTrainer from several captions per image, by rewards.

    A pair is two captions of an image whose rewards differ by --margin or more; those that differ most come first. The columns are
    those of TRL's vision preference format (prompt, chosen, rejected, images), and image_id, score_chosen, score_rejected.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl caption scenes:blip-mle --do_sample --num_return_sequences 5 --output sampled.jsonl
          captionrl pairs --captions sampled.jsonl --dataset scenes --reward self_retrieval --margin 0.5
          captionrl pairs --captions a.jsonl b.jsonl --dataset scenes --reward cider --margin 0.1 --output cider.parquet
    """

    captions: list[Path] = option(metavar="FILE", help="files of captions; those of an image are pooled")
    output: Path = option(Path("pairs.parquet"), metavar="FILE", help="Parquet file to write; replaced if it exists")
    reward: list[str] = option(["self_retrieval"], metavar="REWARD", help="registered rewards that score the captions")
    reward_weights: list[Number] | None = option(None, metavar="X", help="weight of each reward (default: 1 each)")
    scorer: str | None = option(
        None, metavar="NAME", help="reward scorer, required by self_retrieval (default for scenes: scenes:clip-reward)"
    )
    margin: Annotated[float, Range(above=0)] = option(0.1, help="smallest difference of the rewards of a pair")
    max_pairs_per_image: Positive = option(1, help="most pairs of an image")
    prompt: str = option("Describe the image in one sentence.", metavar="TEXT", help="the user's message")
