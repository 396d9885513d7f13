"""Options of `captionrl serve-rewards` and `pairs`; light to import, because `--help` needs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from hf_captionrl.data.options import DatasetOptions
from hf_captionrl.utils.options import CacheOptions, DeviceOptions, Number, Positive, Range, option

_Port = Annotated[int, Range(at_least=0, at_most=65535)]
_Images = Annotated[int, Range(at_least=2)]
_SPEC = "NAME or NAME:FIELD=VALUE,FIELD=VALUE"


@dataclass
class RewardOptions(DeviceOptions, CacheOptions, DatasetOptions):
    """Rewards, and the images that they know by id."""

    heading: ClassVar[str] = "rewards"

    reward_weights: list[Number] | None = option(None, metavar="X", help="weight of each reward (default: 1 each)")
    scorer: str | None = option(
        None,
        metavar="NAME",
        help="reward scorer, a dual encoder: a folder, a name on the Hub, open_clip:NAME@TAG, scenes:clip-reward (default: "
        "scenes:clip-reward for --dataset scenes; else required by self_retrieval)",
    )
    tokenizer: str | None = option(
        None,
        metavar="NAME",
        help="tokenizer of the policy, whose tokens cider, diversity and the penalties count (default: words, as CIDEr-D does)",
    )
    dataset: str = option(
        "",
        group=DatasetOptions.heading,
        metavar="NAME",
        help=f"images that may be named by id: {DatasetOptions.__dataclass_fields__['dataset'].metadata['help']}",
        shown_default="none; every request holds its images",
    )


@dataclass
class ServeOptions(RewardOptions):
    """Serve the rewards of this package over HTTP, to trainers in any process or language.

    A request holds captions and images, as ids of --dataset or as files in base64; the answer holds the weighted sum and each
    reward. GET /schema describes both. The images of one request are distractors of each other. The same request always gets the
    same numbers, those of the reward in process. SIGTERM or Ctrl-C ends the server after the requests that it has begun.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl serve-rewards --reward self_retrieval --dataset scenes --split train
          captionrl serve-rewards --reward self_retrieval length:max_tokens=20 --reward_weights 1 0.5 \\
              --scorer openai/clip-vit-base-patch32 --dataset imagefolder --data_dir photos
          captionrl serve-rewards --reward self_retrieval:distractor_scope=bank,bank_size=500 --dataset scenes --split train

        from hf_captionrl.apps.serving.client import RemoteReward
        trainer = GRPOTrainer(model, reward_funcs=RemoteReward("http://127.0.0.1:8787"), ...)
    """

    reward: list[str] = option(metavar="REWARD", help=f"rewards, as {_SPEC}")
    host: str = option(
        "127.0.0.1", help="address to listen at; any other one than 127.0.0.1 is open to other machines"
    )
    port: _Port = option(8787, help="port; 0: any free port")
    max_body: Positive = option(64 * 2**20, help="largest body of a request in bytes")
    max_captions: Positive = option(4096, help="most captions, and most images, of a request")
    max_pixels: Positive = option(89_478_485, help="most pixels of all images of a request that are sent as files")


@dataclass
class PairsOptions(RewardOptions):
    """Write preference pairs for TRL's DPOTrainer from several captions per image, by any reward or metric.

    A pair is two captions of an image whose scores differ by --margin or more; those that differ most come first. The columns are
    those of TRL's vision preference format (prompt, chosen, rejected, images), and image_id, score_chosen, score_rejected. The
    shares of ties and of pairs under the margin are printed.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl caption scenes:blip-mle --do_sample --num_return_sequences 5 --output sampled.jsonl
          captionrl pairs --captions sampled.jsonl --dataset scenes --reward self_retrieval --margin 0.5
          captionrl pairs --captions a.jsonl b.jsonl --dataset scenes --metric cider_d --margin 0.1 --output cider.parquet
    """

    captions: list[Path] = option(
        metavar="FILE", help="files of captions, one or several per image; those of an image are pooled"
    )
    output: Path = option(Path("pairs.parquet"), metavar="FILE", help="Parquet file to write")
    reward: list[str] | None = option(None, metavar="REWARD", help=f"rewards that score the captions, as {_SPEC}")
    metric: str | None = option(
        None, metavar="METRIC", help="instead, a metric of `captionrl agreement`, or package.module:function"
    )
    margin: Annotated[float, Range(above=0)] = option(0.1, help="smallest difference of the scores of a pair")
    max_pairs_per_image: Positive = option(1, help="most pairs of an image")
    prompt: str = option(
        "Describe the image in one sentence.", metavar="TEXT", help="the user's message beside the image"
    )
    rollout_images: _Images = option(100, help="images scored at once, at least; they are distractors of each other")
    dataset: str = option(
        "scenes",
        metavar="NAME",
        group=DatasetOptions.heading,
        help=DatasetOptions.__dataclass_fields__["dataset"].metadata["help"],
    )
