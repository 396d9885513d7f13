"""Training examples: one caption per image and epoch, or all of them; also from the data sets of users."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import datasets
import numpy as np
import torch
from PIL import Image

from hf_captionrl.data.columns import (
    CAPTION_COLUMNS,
    by_split_column,
    caption_column,
    clean_caption,
    frames_of,
    id_column,
    replace_column,
    undecoded,
)
from hf_captionrl.data.images import ImageError, open_image
from hf_captionrl.data.loading import load_captions
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


class CaptionDataset(torch.utils.data.Dataset):
    """Images with one caption each, drawn again in every epoch (see `draw_caption`), or with each of their captions.

    The epoch is in shared memory: `set_epoch` in the main process reaches workers that are already running, so
    `persistent_workers=True` is safe. Call it between epochs, before iterating: prefetched items do not change.

    Args:
        ds (`datasets.Dataset`): Columns `image`, `image_id` and `captions`, as `load_captions` gives them. Videos need
            `image_features`.
        seed (`int`): Seed of the draw.
        image_features (`Any`, *optional*): Cached outputs of the frozen vision tower, indexable by row: a tensor, an
            array or a memory map of shape `(len(ds), M, D)`. Images are then never opened.
        pixels (`Any`, *optional*): Rows of `cached_pixels`, instead of `image_features`.
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
        pixels: Any | None = None,
        resample: bool = True,
        captions_per_image: Literal["one", "all"] = "one",
    ) -> None:
        if image_features is None and frames_of(ds):
            raise ValueError(
                "The data set holds videos. Pass image_features of cached_features; for trainers set "
                "freeze_vision_tower=True and cache_image_features=True."
            )
        # Other columns (and, with features or pixels, the image's bytes) are never read.
        columns = ["image_id", "captions"] + (["image"] if image_features is None and pixels is None else [])
        self._rows = undecoded(ds.select_columns(columns).with_format(None))
        self._seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._image_features, self._pixels, self._resample = image_features, pixels, resample
        self._ends: np.ndarray | None = None  # of the captions of each image among all captions
        if captions_per_image == "all":
            self._ends = np.cumsum([len(texts) for texts in caption_column(self._rows)], dtype=np.int64)

    @property
    def num_images(self) -> int:
        """Number of images, which may differ from the number of items."""
        return len(self._rows)

    @property
    def epoch(self) -> int:
        """The epoch whose captions are drawn."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, here and in every running worker."""
        if self._resample:
            self._epoch.fill_(int(epoch))

    def __len__(self) -> int:
        return len(self._rows) if self._ends is None else int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> CaptionItem:
        index, number = range(len(self))[int(index)], None  # as a list for negative and out-of-range numbers
        if self._ends is not None:
            item, index = index, int(np.searchsorted(self._ends, index, side="right"))
            number = item - int(self._ends[index])  # from the end: -1 is the last caption
        row = self._rows[index]
        image_id = str(row["image_id"])
        captions = [row["captions"]] if isinstance(row["captions"], str) else row["captions"] or []
        if number is None:
            number = draw_caption(len(captions), seed=self._seed, epoch=self.epoch, image_id=image_id)
        image: Image.Image | torch.Tensor | None = None
        features = None
        if self._image_features is not None:
            # Copied, because memory maps are read-only and a view would pickle the whole map.
            features = self._image_features[index]
            is_tensor = isinstance(features, torch.Tensor)
            features = features.detach().clone() if is_tensor else torch.from_numpy(np.array(features))
        elif self._pixels is not None:
            image = torch.from_numpy(np.array(self._pixels[index]))
        else:
            try:
                image = open_image(row["image"])
            except ImageError as error:
                error.add_note(f"This is row {index}, image_id {image_id!r}. check_captions skips such rows.")
                raise
        return {
            "image": image,
            "image_features": features,
            "caption": captions[number],
            "image_id": image_id,
            "index": index,
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
        captions, features = ([item[key] for item in items] for key in ("caption", "image_features"))
        cached = None if features[0] is None else torch.stack(features)
        images = None if cached is not None else [item["image"] for item in items]
        return self.captioner.collate(images, captions, image_features=cached, max_length=self.max_length)


# --- The data sets given to trainers ---------------------------------------------------------------------------------


def training_rows(dataset: Any, *, whole_set_for: str | None = None) -> Any:
    """Training data in the columns that trainers read; every row is checked for captions before training.

    `dataset` is what `load_captions` accepts; of a `DatasetDict`, `train`. `whole_set_for` says why a trainer with rewards
    needs each image in one row; captions may then be missing.
    """
    if dataset is None:
        return dataset
    # Rewards check captions themselves; self-retrieval needs none.
    rewarded = whole_set_for is not None
    rows = _with_columns(dataset, "train", require_captions=not rewarded)
    if not len(rows):
        raise ValueError("The training data hold no rows. Use a data set with at least one image.")
    if rewarded:
        image_id, times = Counter(id_column(rows)).most_common(1)[0]
        if times > 1:
            raise ValueError(
                f"image_id {image_id!r} occurs in several rows of the training data, and {whole_set_for}. Use "
                "load_captions, which joins such rows."
            )
    else:  # otherwise they would stop training in the middle of an epoch
        for row, texts in enumerate(caption_column(rows)):
            if not texts or not all(isinstance(text, str) and clean_caption(text) for text in texts):
                raise ValueError(
                    f"train_dataset: row {row} (image_id {id_column(rows)[row]!r}) has an empty caption or none: "
                    f"{texts!r:.80}. Remove such rows and captions with hf_captionrl.data.check_captions."
                )
    return rows


def evaluation_rows(dataset: Any, split: str = "validation") -> Any:
    """As [`training_rows`], for evaluation: `split` of a `DatasetDict`, each of several in a dict; captions may be missing."""
    if dataset is None:
        return dataset
    if isinstance(dataset, Mapping) and not isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        return {name: evaluation_rows(rows, split) for name, rows in dataset.items()}
    return _with_columns(dataset, split, require_captions=False)


def _with_columns(dataset: Any, split: str, *, require_captions: bool) -> datasets.Dataset:
    if isinstance(dataset, datasets.Dataset):
        if {*dataset.column_names} >= {"image", "image_id", "captions"}:
            captions = dataset.features["captions"]
            is_text = isinstance(getattr(captions, "feature", captions), datasets.Value)
            if is_text and getattr(dataset.features["image"], "dtype", None) not in ("string", "large_string"):
                return dataset
        split = split if by_split_column(dataset) else "all"
    rows: Any = load_captions(dataset, split=split, require_captions=require_captions)
    source = dataset.get(split) if isinstance(dataset, datasets.DatasetDict) else dataset
    if not isinstance(source, datasets.Dataset) or len(rows) != len(source):  # rows of one image were joined
        return rows
    # The captions also under the caller's name, because reward functions use the column names of the data.
    source = source.with_format(None)
    for name in CAPTION_COLUMNS:
        if name in source.column_names and name not in rows.column_names:
            rows = replace_column(rows, name, source[name][:], source.features[name])
    return rows
