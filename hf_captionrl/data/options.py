"""Options that several commands share, and loading of the images that they name."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from hf_captionrl.utils.io import counted, folded, say
from hf_captionrl.utils.options import (
    CacheOptions,
    CommandOptions,
    DeviceOptions,
    Fraction,
    NotNegative,
    Positive,
    Range,
    Share,
    option,
)

if TYPE_CHECKING:
    import datasets

    from hf_captionrl.retrieval.feature_cache import RowLookup


# The options of training have no other metadata than these two, because all of it reaches argparse when training parses them.


@dataclass
class SplitArguments:
    """Where images and captions come from, and how they are split; shared by the commands and by training."""

    heading: ClassVar[str] = "data set"

    dataset_config: str | None = option(
        None, metavar="NAME", help="Configuration of a data set on the Hub; of scenes: alt_text, shapes or held_back."
    )
    dataset_revision: str | None = option(None, metavar="REV", help="Branch, tag or commit of a data set on the Hub.")
    data_dir: str | None = option(
        None,
        metavar="DIR",
        help="Folder of a local data set, such as the images of 'imagefolder' with their metadata.jsonl.",
    )
    image_root: str | None = option(None, metavar="DIR", help="Folder that image paths are relative to.")
    image_column: str = option("image", metavar="NAME", help="Column with the images.")
    caption_column: str = option(
        "captions", metavar="NAME", help="Column with the captions, a string or a list of strings."
    )
    concept_column: str | None = option(
        None,
        metavar="NAME",
        help="Column with what an image shows, such as a product; 'folder': its subfolder. Images of one concept do not compete.",
    )
    validation_share: Share = option(
        0.1,
        metavar="X",
        help="Share of the images, in [0, 1), that becomes the validation split of data without one, by a hash of the "
        "image ids (commands: only if --split names a missing split).",
    )
    test_share: Share = option(
        0.1,
        metavar="X",
        help="Share of the images, in [0, 1), that becomes the test split of data without one, by a hash of the image "
        "ids (commands: only if --split names a missing split).",
    )
    split_seed: NotNegative = option(
        0,
        metavar="N",
        help="Seed of the hash that splits the data; independent of --seed, so that all runs and commands split alike.",
    )
    max_bad_fraction: Fraction = option(
        0.05,
        metavar="X",
        help="Largest share of invalid rows, in [0, 1]. Invalid rows are left out and listed; a larger share is an error.",
    )

    @property
    def source(self) -> dict[str, Any]:
        """Arguments of `load_captions`."""
        names = ("dataset_config", "data_dir", "image_root", "image_column", "caption_column", "concept_column")
        shares = (1 - self.validation_share - self.test_share, self.validation_share, self.test_share)
        more = {"revision": self.dataset_revision, "split_fractions": shares, "seed": self.split_seed}
        return {name: getattr(self, name) for name in names} | more


@dataclass
class LoadingArguments:
    """How the weights of a captioner are loaded; shared by `captionrl caption` and by training."""

    heading: ClassVar[str] = "captioner"

    attn_implementation: str | None = option(
        None,
        metavar="NAME",
        help="Implementation of attention: 'sdpa', 'eager', 'flash_attention_2', ... None: transformers' choice.",
    )
    load_in_4bit: bool = option(
        False, help="Quantize the weights to 4 bits. Needs bitsandbytes and a GPU, in training also --tune."
    )
    load_in_8bit: bool = option(
        False, help="Quantize the weights to 8 bits. Needs bitsandbytes and a GPU, in training also --tune."
    )

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `load_captioner` that were set."""
        names = ("attn_implementation", "load_in_4bit", "load_in_8bit")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


@dataclass
class DatasetOptions(SplitArguments, CommandOptions):
    """The images that a command reads."""

    heading: ClassVar[str] = SplitArguments.heading

    dataset: str = option(
        "scenes",
        metavar="NAME",
        help="'scenes' (the embedded world), 'imagefolder' with --data_dir, a Karpathy-split JSON or COCO's captions_*.json with --image_root, "
        "'nocaps', 'concadia' or 'imagecode' with --data_dir, a folder, a .jsonl/.csv/.parquet file, or any data set on the Hub",
    )
    split: str | None = option(
        None,
        metavar="SPLIT",
        help="a split, several ('validation+test'), or 'all' (default: 'test' of data that name several splits, else "
        "'all')",
    )
    max_images: Positive | None = option(None, metavar="N", help="use only the first N images")


@dataclass
class CaptionerOptions(DeviceOptions, CommandOptions):
    """The captioner."""

    heading: ClassVar[str] = "captioner"

    revision: str | None = option(None, metavar="REV", help="branch, tag or commit of the model on the Hub")
    prompt: str | None = option(
        None, metavar="TEXT", help="text that every caption continues (default: the model's prompt)"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", help="dtype of the weights")


@dataclass
class RequestOptions:
    """How endpoints are asked."""

    heading: ClassVar[str] = "endpoint"

    api_key_env: str | None = option(
        None, metavar="NAME", help="environment variable with the key of the endpoint; a key is never an argument"
    )
    concurrency: Positive = option(4, metavar="N", help="number of concurrent requests")
    timeout_s: Annotated[float, Range(above=0, at_most=86_400)] = option(
        120.0, metavar="S", help="time limit of a request, in seconds"
    )
    tries: Positive = option(6, metavar="N", help="largest number of requests per answer")
    backoff_s: Annotated[float, Range(at_least=0)] = option(
        1.0, metavar="S", help="seconds before the second request; doubled before each further one"
    )

    @property
    def requests(self) -> dict[str, Any]:
        """Arguments of `HTTPBackend`."""
        names = ("api_key_env", "concurrency", "timeout_s", "tries", "backoff_s")
        return {name: getattr(self, name) for name in names}


@dataclass
class EndpointOptions(RequestOptions):
    """A vision-language model behind an endpoint, instead of a captioner in this process."""

    heading: ClassVar[str] = RequestOptions.heading

    endpoint: str | None = option(
        None,
        metavar="URL",
        help="ask the model of this name at an OpenAI-compatible endpoint (Ollama, vLLM, LM Studio, llama.cpp), such as "
        "http://127.0.0.1:11434/v1",
    )

    def check_endpoint(self, without_effect: str) -> None:
        """Refuse options, named in one string, that an endpoint does not support."""
        fields: Any = type(self).__dataclass_fields__
        for name in without_effect.split() if self.endpoint is not None else ():
            value = getattr(self, name)
            if value not in (fields[name].default, None, 0, False):
                raise ValueError(f"--{name} {value} has no effect with --endpoint. Leave one of them out.")
        if self.endpoint is None and self.api_key_env is not None:
            raise ValueError(f"--api_key_env {self.api_key_env} has an effect only with --endpoint. Use both.")


@dataclass
class WordingOptions:
    """What captions must not say, and their least length."""

    heading: ClassVar[str] = "wording"

    do_not_mention: list[str] = option(
        [],
        nargs="+",
        metavar="WORD",
        help="words or phrases that captions should not contain: chat models and endpoints are told, and models in this "
        "process are kept from the tokens of each word in every casing",
    )
    min_new_tokens: NotNegative = option(0, metavar="N", help="shortest caption in tokens")

    def check_wording(self) -> None:
        """Refuse lengths that no caption has, and blank words."""
        if any(not word.strip() for word in self.do_not_mention):
            raise ValueError(f"--do_not_mention {self.do_not_mention} has a blank word. Leave it out.")
        if self.min_new_tokens > (longest := getattr(self, "max_new_tokens", self.min_new_tokens)):
            raise ValueError(
                f"--min_new_tokens {self.min_new_tokens} is above --max_new_tokens {longest}. Raise the latter."
            )


@dataclass
class SimilarityOptions(DeviceOptions, CacheOptions, CommandOptions):
    """The scorer that defines which images look alike."""

    heading: ClassVar[str] = "similarity"

    scorer: str | None = option(
        None,
        metavar="NAME",
        help="dual encoder: a folder, a name on the Hub, open_clip:NAME@TAG, scenes:clip-reward (default: "
        "scenes:clip-reward on the embedded world, else openai/clip-vit-base-patch32)",
    )
    features: Literal["multimodal", "concatenated", "image"] = option(
        "multimodal",
        help="images and their captions with equal weights, concatenated as in the paper, where captions that differ weigh "
        "less, or images alone",
    )
    batch_size: Positive = option(64, metavar="N", help="images encoded at once")


@dataclass
class PublicationOptions(CommandOptions):
    """What the card says of a data set that a command writes."""

    heading: ClassVar[str] = "publication"

    no_images: bool = option(False, help="leave the images out, if their licence does not allow copies")
    repo_id: str | None = option(
        None, metavar="NAME", help="name of the data set on the card (default: the folder's name)"
    )
    license: str = option("other", metavar="NAME", help="licence of what this command adds")
    source_license: str | None = option(
        None, metavar="TEXT", help="licence of the images and references (default: see the source)"
    )
    language: str = option("en", metavar="CODE", help="language of the captions")

    def source_license_of(self, dataset: str) -> str:
        """The licence of the source as the card shows it."""
        return self.source_license or ("apache-2.0" if dataset == "scenes" else "see there")


@dataclass
class TrainingImagesOptions(CommandOptions):
    """The images that a captioner was trained on."""

    heading: ClassVar[str] = SplitArguments.heading

    include_training_images: bool = option(
        False, help="keep the images that a captioner was trained on; by default they are counted and left out"
    )

    def without(self, rows: Any, trained: Collection[str], model: str, *, quiet: bool = False) -> Any:
        """The rows without the image ids `trained` that a model was trained on, and a line on stderr that says so."""
        from hf_captionrl.data.columns import id_column

        if not trained:
            return rows
        names = ", ".join(map(repr, sorted(trained)[:3])) + ", ..." * (len(trained) > 3)
        text = f"{len(trained):,} of {len(rows):,} images ({names}) were in the training of {model}"
        if self.include_training_images:
            outcome = "; their captions are no test of it."
        else:
            outcome = " and are left out. Use --include_training_images to keep them."
            rows = rows.select([row for row, image_id in enumerate(id_column(rows)) if image_id not in trained])
            if not len(rows):
                raise ValueError(f"{text}, so nothing is left. Use --split test, or --include_training_images.")
        if not quiet:
            say(folded(f"captionrl: {text}{outcome}"))
        return rows


class LoadedSplit(NamedTuple):
    """Checked images of a split."""

    dataset: datasets.Dataset
    all_ids: RowLookup
    split: str
    sizes: dict[str, int]
    trained: Sequence[str] = ()  # ids of images that the captioner was trained on


def load_split(
    arguments: DatasetOptions | argparse.Namespace,
    *,
    quarantine_path: str | os.PathLike[str] | None,
    require_captions: bool | None = True,
    expected_ids: str | None = None,
) -> LoadedSplit:
    """Load the images that the options name, describe them on stderr, and list bad rows in a file.

    `require_captions=None` requires them if any image has one. With `expected_ids`, the process is one of several: it describes nothing and checks that it has the same images.
    """
    from hf_captionrl.data.columns import caption_column, id_column
    from hf_captionrl.data.loading import choose_split
    from hf_captionrl.data.quarantine import check_captions
    from hf_captionrl.retrieval.feature_cache import RowLookup

    embedded = arguments.dataset == "scenes"
    source = arguments.source | {"require_captions": bool(require_captions)}
    chosen = choose_split(arguments.dataset, arguments.split, **source)
    arguments.split = chosen.split
    rows: Any = chosen.dataset
    if require_captions is None:
        require_captions = any(caption_column(rows))
    all_ids = RowLookup(id_column(rows))
    if not embedded and expected_ids is None:
        folder = arguments.data_dir if arguments.dataset == "imagefolder" else arguments.dataset
        images = counted(len(rows), "image")
        text = f"{images}, split {chosen.split!r}" if chosen.split != "all" else f"all {images}"
        if list(chosen.sizes) != [chosen.split]:
            text += f" ({', '.join(f'{size:,} in {split}' for split, size in chosen.sizes.items())})"
        if arguments.max_images is not None:
            text += f"; --max_images takes the first {arguments.max_images:,}"
        say(folded(f"captionrl: {Path(str(folder)).name}: {text}."))
    trained: list[str] = []
    if isinstance(arguments, TrainingImagesOptions) and (model := getattr(arguments, "model", None)):
        from hf_captionrl.data.features import image_hashes, training_images

        if trained_on := training_images(model):
            hashes = zip(id_column(rows), image_hashes(rows), strict=True)
            trained = [image_id for image_id, digest in hashes if digest in trained_on]
            rows = arguments.without(rows, set(trained), model, quiet=expected_ids is not None)
    if arguments.max_images is not None:
        rows = rows.select(range(min(arguments.max_images, len(rows))))
    if not embedded and quarantine_path is not None:
        rows, entries = check_captions(
            rows,
            quarantine_path=Path(quarantine_path),
            max_bad_fraction=arguments.max_bad_fraction,
            require_captions=require_captions,
        )
        if not entries:
            Path(quarantine_path).unlink(missing_ok=True)
    if expected_ids is not None and ids_digest(rows) != expected_ids:
        raise ValueError(
            f"--dataset {arguments.dataset!r} has other images in this process than in the first. Use a path that all "
            "machines share, and leave the data unchanged."
        )
    return LoadedSplit(rows, all_ids, chosen.split, chosen.sizes, trained)


def ids_digest(dataset: datasets.Dataset, column: str = "image_id") -> str:
    """Digest of the image ids, or of another column, in their order."""
    values = [str(value) for value in dataset.with_format(None)[column][:]]
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()
