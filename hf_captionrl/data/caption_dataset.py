"""Training examples: one caption per image and epoch, or all of them; also from streams and from the data sets of users."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import datasets
import numpy as np
import torch
from PIL import Image

from hf_captionrl.data.columns import (
    USUAL_NAMES,
    ColumnView,
    by_split_column,
    caption_column,
    clean_caption,
    frames_of,
    id_column,
    pick_column,
    replace_column,
    to_caption_list,
    undecoded,
)
from hf_captionrl.data.images import MAX_PIXELS, ImageError, open_image
from hf_captionrl.data.loading import load_captions
from hf_captionrl.retrieval.feature_cache import RowLookup
from hf_captionrl.utils.options import Positive, check_values


class CaptionItem(TypedDict):
    """One training example.

    Attributes:
        image (`PIL.Image.Image` or `torch.Tensor`, *optional*): RGB; with `pixels` its prepared pixels, `(3, H, W)` uint8;
            `None` if there are `image_features`.
        image_features (`torch.Tensor` of shape `(M, D)`, *optional*): Cached output of the vision tower.
        caption (`str`): The caption drawn for this epoch.
        image_id (`str`): Id of the image.
        index (`int`): Row of the image in the data set.
    """

    image: Image.Image | torch.Tensor | None
    image_features: torch.Tensor | None
    caption: str
    image_id: str
    index: int


def draw_caption(num_captions: int, *, seed: int, epoch: int, image_id: str) -> int:
    """Number of the training caption of an image in an epoch, by a hash: processes, workers and resumed runs share no state."""
    if num_captions < 1:
        raise ValueError(f"Image {image_id!r} has {num_captions} captions. Run check_captions first.")
    # The key is unambiguous, because seed and epoch contain no "/".
    key = f"{int(seed)}/{int(epoch)}/{image_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % num_captions


class CaptionDraw:
    """Draws one caption of an image per epoch with `draw_caption`.

    The epoch is in shared memory: `set_epoch` in the main process reaches workers that are already running, so
    `persistent_workers=True` is safe. Call it between epochs, before iterating: prefetched items do not change.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch whose captions are drawn."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, here and in every running worker."""
        self._epoch.fill_(int(epoch))

    def draw(self, captions: Sequence[str], image_id: str) -> str:
        """The caption of the current epoch."""
        return captions[draw_caption(len(captions), seed=self._seed, epoch=self.epoch, image_id=image_id)]


class CaptionDataset(CaptionDraw, torch.utils.data.Dataset):
    """Images with one caption each, drawn again in every epoch (see `CaptionDraw`), or with each of their captions.

    Args:
        ds (`datasets.Dataset`): Columns `image`, `image_id` and `captions`, as `load_captions` gives them. Videos need
            `image_features`.
        seed (`int`): Seed of the draw.
        image_features (`Any`, *optional*): Cached outputs of the frozen vision tower, indexable by row: a tensor, an
            array or a memory map of shape `(len(ds), M, D)`. Images are then never opened.
        pixels ([`CachedPixels`] or [`DecodedPixels`], *optional*): Prepared pixels, indexable by row.
        transform (`Callable`, *optional*): RGB image to image, applied after opening. Excludes `image_features` and
            `pixels`, which exclude each other.
        max_pixels (`int`): As for `open_image`.
        resample (`bool`): `False` keeps the captions of epoch 0 and ignores `set_epoch`. For evaluation, because
            accelerate counts every evaluation as an epoch, and losses on different captions are not comparable.
        captions_per_image (`str`): `"one"`: an item per image, with a caption drawn for the epoch. `"all"`: an item per
            caption, in the order of the images.
    """

    def __init__(
        self,
        ds: datasets.Dataset,
        *,
        seed: int = 0,
        image_features: Any | None = None,
        pixels: Sequence[torch.Tensor] | None = None,
        transform: Callable[[Image.Image], Image.Image] | None = None,
        max_pixels: int = MAX_PIXELS,
        resample: bool = True,
        captions_per_image: Literal["one", "all"] = "one",
    ) -> None:
        super().__init__(seed)
        prepared: dict[str, Any] = {"image_features": image_features, "pixels": pixels, "transform": transform}
        given = [name for name, rows in prepared.items() if rows is not None]
        by_row = [name for name in given if name != "transform"]
        needed = {"image_id", "captions"} | (set() if by_row else {"image"})
        if missing := sorted(needed - set(ds.column_names)):
            raise ValueError(
                f"The data set lacks the columns {missing}; it has {ds.column_names}. Load it with load_captions."
            )
        if image_features is None and frames_of(ds):
            raise ValueError(
                "The data set holds videos. Pass image_features of cached_features; for trainers set "
                "freeze_vision_tower=True and cache_image_features=True."
            )
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: each determines the image. Pass one of them.")
        for name in by_row:
            if (number := len(prepared[name])) != len(ds):
                raise ValueError(
                    f"{name} has {number} rows and the data set {len(ds)}. Compute it again from this data set."
                )
        # Other columns (and, with features or pixels, the image's bytes) are never read.
        self._rows = undecoded(ds.select_columns(sorted(needed)).with_format(None))
        self._image_features = image_features
        self._pixels = pixels
        self._transform = transform
        self._max_pixels = max_pixels
        self._resample = resample
        self._ends: np.ndarray | None = None  # of the captions of each image among all captions
        if captions_per_image == "all":
            counts = np.fromiter(map(len, caption_column(self._rows)), np.int64, len(ds))
            if 0 in counts:
                row = int(np.argmin(counts))
                draw_caption(0, seed=seed, epoch=0, image_id=str(self._rows[row]["image_id"]))  # raises
            self._ends = np.cumsum(counts)

    @property
    def num_images(self) -> int:
        """Number of images, which may differ from the number of items."""
        return len(self._rows)

    def set_epoch(self, epoch: int) -> None:
        if self._resample:
            super().set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._rows) if self._ends is None else int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> CaptionItem:
        index, number = range(len(self))[int(index)], None  # as a list for negative and out-of-range numbers
        if self._ends is not None:
            item, index = index, int(np.searchsorted(self._ends, index, side="right"))
            number = item - int(self._ends[index])  # from the end: -1 is the last caption
        row = self._rows[index]
        image_id = str(row["image_id"])
        image: Image.Image | torch.Tensor | None = None
        features = None
        if self._image_features is not None:
            # Copied, because memory maps are read-only and a view would pickle the whole map.
            features = self._image_features[index]
            is_tensor = isinstance(features, torch.Tensor)
            features = features.detach().clone() if is_tensor else torch.from_numpy(np.array(features))
        else:
            try:
                image = self._pixels[index] if self._pixels is not None else self._open(row["image"])
            except ImageError as error:
                error.add_note(f"This is row {index}, image_id {image_id!r}. check_captions skips such rows.")
                raise
        captions = row["captions"] or []
        captions = [captions] if isinstance(captions, str) else captions
        return {
            "image": image,
            "image_features": features,
            "caption": self.draw(captions, image_id) if number is None else captions[number],
            "image_id": image_id,
            "index": index,
        }

    def _open(self, value: Any) -> Image.Image:
        image = open_image(value, max_pixels=self._max_pixels)
        return image if self._transform is None else self._transform(image)


# --- Captions of iterable data sets ----------------------------------------------------------------------------------


class StreamedCaptions(CaptionDraw, torch.utils.data.IterableDataset):
    """Images of an iterable data set with one caption each, as items of a `CaptionDataset`; ids are `image_id` or row numbers.

    Images are opened by the collator, because with several processes each reads the whole stream and keeps its rows.
    """

    def __init__(self, rows: datasets.IterableDataset, *, seed: int = 0, name: str = "train_dataset") -> None:
        super().__init__(seed)
        names = rows.column_names
        if names is None:  # a generator without features: its first row shows them
            names = list(next(iter(rows.take(1)), {}))
        self._name = name
        self._image = pick_column(names, "image", "image_column", name)
        self._captions = pick_column(names, "captions", "caption_column", name)
        if isinstance((rows.features or {}).get(self._image), datasets.Image):
            rows = rows.cast_column(self._image, datasets.Image(decode=False))
        self._rows = rows

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._rows.set_epoch(int(epoch))  # the order of a shuffled stream depends on the epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, row in zip(itertools.count(), self._rows):
            image_id = str(number) if row.get("image_id") is None else str(row["image_id"])
            where = f"{self._name}: row {number} (image_id {image_id!r})"
            if isinstance(row[self._image], str):
                raise ValueError(
                    f"{where} holds text as its image, and streams have no image_root. Cast the column to "
                    "datasets.Image."
                )
            captions = [text for text in to_caption_list(row[self._captions]) if text]
            if not captions:
                raise ValueError(f"{where} has no caption: {row[self._captions]!r:.60}. Filter such rows out.")
            yield {
                "image": row[self._image],
                "image_features": None,
                "caption": self.draw(captions, image_id),
                "image_id": image_id,
                "index": number,
            }


# --- Collates items of a `CaptionDataset` to a batch of a captioner --------------------------------------------------


@dataclass
class CaptionCollator:
    """Collate items of a `CaptionDataset` with a captioner.

    Args:
        captioner: Its `collate(images, captions, *, image_features, max_length)` makes a batch of B images, or of
            their prepared pixels, `(3, H, W)` each, or of `(B, M, D)` features in their place.
        max_length (`int`): Longest caption in tokens, with the prompt (40 in the papers).
    """

    captioner: Any
    max_length: Positive = 40

    def __post_init__(self) -> None:
        check_values(self)

    def __call__(self, items: Sequence[CaptionItem]) -> dict[str, Any]:
        """Collate B items, all with images or all with features of the same shape."""
        captions = [item["caption"] for item in items]
        features = [item["image_features"] for item in items if item["image_features"] is not None]
        if features:
            shapes = sorted({tuple(feature.shape) for feature in features})
            if len(features) != len(items) or len(shapes) > 1:
                raise ValueError(
                    f"{len(features)} of {len(items)} items have image_features, of shapes {shapes}; a batch needs "
                    "one shape. Use one CaptionDataset and one image processor for the whole run."
                )
            stacked = torch.stack(features)
            return self.captioner.collate(None, captions, image_features=stacked, max_length=self.max_length)
        if missing := sum(item["image"] is None for item in items):
            raise ValueError(
                f"{missing} of {len(items)} items have neither image nor image_features. Use items of a "
                "CaptionDataset."
            )
        # Images of a stream are opened here.
        images: list[Any] = [item["image"] for item in items]
        images = [image if isinstance(image, Image.Image | torch.Tensor) else open_image(image) for image in images]
        return self.captioner.collate(images, captions, image_features=None, max_length=self.max_length)


# --- The data sets given to trainers ---------------------------------------------------------------------------------

_Stream = datasets.IterableDataset | datasets.IterableDatasetDict
_checked: set[str] = set()


def training_rows(dataset: Any, args: Any = None, *, whole_set_for: str | None = None) -> Any:
    """Training data in the columns that trainers read; every row is checked for captions before training.

    `dataset` is what `load_captions` accepts (of a `DatasetDict`, `train`), or a `datasets.IterableDataset`, which becomes
    [`StreamedCaptions`] and needs `max_steps`. `whole_set_for` says why a trainer with rewards needs the whole data set; iterable
    data are then refused, and captions may be missing.
    """
    if dataset is None or isinstance(dataset, StreamedCaptions):
        return dataset
    if isinstance(dataset, _Stream):
        return _stream(dataset, args, whole_set_for)
    # Rewards check captions themselves; self-retrieval needs none.
    rewarded = whole_set_for is not None
    rows = _with_columns(dataset, "training", "train", require_captions=not rewarded)
    if not len(rows):
        raise ValueError("The training data hold no rows. Use a data set with at least one image.")
    if rewarded:
        ids = id_column(rows)
        is_repeated = np.bincount(RowLookup(ids).first_rows()) > 1
        if is_repeated.any():
            raise ValueError(
                f"image_id {ids[int(is_repeated.argmax())]!r} occurs in several rows of the training data, and "
                f"{whole_set_for}. Use load_captions, which joins such rows."
            )
    elif rows._fingerprint not in _checked:
        # Otherwise they would stop training in the middle of an epoch.
        for row, texts in enumerate(caption_column(rows)):
            if not texts or not all(isinstance(text, str) and clean_caption(text) for text in texts):
                raise ValueError(
                    f"train_dataset: row {row} (image_id {id_column(rows)[row]!r}) has an empty caption or none: "
                    f"{texts!r:.80}. Remove such rows and captions with hf_captionrl.data.check_captions."
                )
        _checked.add(rows._fingerprint)
    return rows


def evaluation_rows(dataset: Any, split: str = "validation") -> Any:
    """As [`training_rows`], for evaluation: `split` of a `DatasetDict`, each of several in a dict; captions may be missing."""
    if dataset is None:
        return dataset
    if isinstance(dataset, Mapping) and not isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        return {name: evaluation_rows(rows, split) for name, rows in dataset.items()}
    if isinstance(dataset, _Stream):
        raise ValueError(_refused("eval_dataset", dataset, "evaluation ranks each image among all others"))
    return _with_columns(dataset, "evaluation", split, require_captions=False)


def _with_columns(dataset: Any, data: str, split: str, *, require_captions: bool) -> datasets.Dataset:
    if isinstance(dataset, datasets.Dataset):
        names, usual = set(dataset.column_names), USUAL_NAMES
        if names >= {"image", "image_id", "captions"}:
            captions = dataset.features["captions"]
            is_text = isinstance(getattr(captions, "feature", captions), datasets.Value)
            if is_text and getattr(dataset.features["image"], "dtype", None) not in ("string", "large_string"):
                return dataset
        missing = [] if names & set(usual["image_column"]) else ["image"]
        missing += [] if names & set(usual["caption_column"]) or not require_captions else ["captions"]
        if missing:
            # The rows of TRL's trainers for text
            of_text = names & {"messages", "prompt", "completion", "text"} if "image" in missing else set()
            remedy = "For text without images use SmileSFTTrainer; else rename them" if of_text else "Rename them"
            raise ValueError(
                f"The {data} data lack the column(s) {missing}; there are {dataset.column_names}. {remedy}, or use "
                "load_captions, which takes image_column and caption_column."
            )
        split = split if by_split_column(dataset) else "all"
    found: Any = load_captions(dataset, split=split, require_captions=require_captions)
    given = dataset.get(split) if isinstance(dataset, datasets.DatasetDict) else dataset
    if not isinstance(given, datasets.Dataset) or len(found) != len(given):  # rows of one image were joined
        return found
    # The captions also under the caller's name, because reward functions use the column names of the data.
    for name in USUAL_NAMES["caption_column"]:
        if name in given.column_names and name not in found.column_names:
            found = replace_column(found, name, ColumnView(given, name), given.features[name])
    return found


def _refused(name: str, dataset: Any, reason: str) -> str:
    return (
        f"{name} is an {type(dataset).__name__}, which is read row by row, but {reason}. Use a Dataset: "
        "load_dataset without streaming=True, or Dataset.from_list(list(rows.take(n)))."
    )


def _stream(dataset: Any, args: Any, whole_set_for: str | None) -> StreamedCaptions:
    if isinstance(dataset, datasets.IterableDatasetDict):
        raise ValueError(
            f"train_dataset is an IterableDatasetDict of {list(dataset)}. Pass one of them, e.g. ['train']."
        )
    for name, verb in (("cache_image_features", "encodes"), ("cache_pixels", "prepares")):
        if getattr(args, name, None):
            whole_set_for = whole_set_for or f"{name} {verb} every image before training"
    if getattr(args, "image_decoder", "pillow") != "pillow":
        whole_set_for = whole_set_for or f"image_decoder={args.image_decoder!r} reads images by their row"
    if whole_set_for is not None:
        raise ValueError(_refused("train_dataset", dataset, whole_set_for))
    if args is None or args.max_steps <= 0:
        raise ValueError(
            "train_dataset is an IterableDataset, whose length is unknown. Set max_steps to the number of optimizer "
            "steps."
        )
    if args.accelerator_config.dispatch_batches is None:
        # By default accelerate reads on the main process and joins batches, but their texts differ in length.
        args.accelerator_config.dispatch_batches = False
    seed = args.seed if args.data_seed is None else args.data_seed
    return StreamedCaptions(dataset, seed=seed)
