"""One caption per image and epoch, the same in every process, worker and platform; or all captions of every image."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

import datasets
import numpy as np
import torch
from PIL import Image

from hf_captionrl.data.arrow_columns import caption_column
from hf_captionrl.data.caption_columns import undecoded
from hf_captionrl.data.images import MAX_PIXELS, ImageError, open_image
from hf_captionrl.data.video import frames_of

__all__ = ["CaptionDataset", "CaptionDraw", "CaptionItem", "draw_caption"]


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
    """Choose the training caption of an image in an epoch.

    The choice is a hash, so processes, workers and resumed runs need no shared random state, and the caption of an
    image does not depend on the other images of the data set.

    Args:
        num_captions (`int`): Number of captions of the image.
        seed (`int`): Seed of the run.
        epoch (`int`): Epoch, from 0.
        image_id (`str`): Id of the image.

    Returns:
        `int`: Number of the caption in `range(num_captions)`, uniform over seeds, epochs and images.

    Raises:
        ValueError: If the image has no caption.
    """
    if num_captions < 1:
        raise ValueError(
            f"Image {image_id!r} has {num_captions} captions, but needs at least one. Run check_captions first."
        )
    # The key is unambiguous, because seed and epoch contain no "/".
    key = f"{int(seed)}/{int(epoch)}/{image_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % num_captions


class CaptionDraw:
    """Draws one caption of an image per epoch with `draw_caption`.

    The epoch is in shared memory: `set_epoch` in the main process reaches workers that are already running, so
    `persistent_workers=True` is safe. Call it between epochs, before iterating: prefetched items do not change.

    Args:
        seed (`int`): Seed of the draw.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch whose captions are drawn."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, here and in every running worker.

        Args:
            epoch (`int`): Epoch, from 0.
        """
        self._epoch.fill_(int(epoch))

    def draw(self, captions: Sequence[str], image_id: str) -> str:
        """The caption of the current epoch.

        Args:
            captions (`Sequence[str]`): All captions of the image.
            image_id (`str`): Id of the image.

        Returns:
            `str`: One of `captions`.
        """
        return captions[draw_caption(len(captions), seed=self._seed, epoch=self.epoch, image_id=image_id)]


class CaptionDataset(CaptionDraw, torch.utils.data.Dataset):
    """Images with one caption each, drawn again in every epoch (see `CaptionDraw`), or with each of their captions.

    Args:
        ds (`datasets.Dataset`): Columns `image`, `image_id` and `captions`, as `load_captions` gives them.
        seed (`int`): Seed of the draw.
        image_features (`Any`, *optional*): Cached outputs of the frozen vision tower, indexable by row: a tensor, an
            array or a memory map of shape `(len(ds), M, D)`. Images are then never opened.
        pixels ([`CachedPixels`] or [`DecodedPixels`], *optional*): Prepared pixels, indexable by row.
        transform (`Callable`, *optional*): RGB image to image, applied after opening.
        max_pixels (`int`): As for `open_image`.
        resample (`bool`): `False` keeps the captions of epoch 0 and ignores `set_epoch`. For evaluation, because
            accelerate counts every evaluation as an epoch, and losses on different captions are not comparable.
        captions_per_image (`str`): `"one"`: an item per image, with a caption drawn for the epoch. `"all"`: an item per
            caption, in the order of the images.

    Raises:
        ValueError: If a column is missing, an image has no caption with `captions_per_image="all"`, `image_features` or
            `pixels` has another number of rows than `ds`, more than one of `image_features`, `pixels` and `transform` is given,
            or `ds` holds videos without `image_features`.
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
        prepared = {"image_features": image_features, "pixels": pixels}
        given = [name for name, rows in prepared.items() if rows is not None]
        needed = {"image_id", "captions"} | (set() if given else {"image"})
        missing = sorted(needed - set(ds.column_names))
        if missing:
            raise ValueError(
                f"The data set lacks the columns {missing}; it has {ds.column_names}. Load it with load_captions, "
                f"which takes image_column, caption_column and image_id_column."
            )
        if image_features is None and frames_of(ds):
            raise ValueError(
                "The data set holds videos, for which a captioner needs the features of their frames. Pass image_features "
                "of cached_features; trainers do so with freeze_vision_tower=True and "
                "cache_image_features=True."
            )
        if len(given) + (transform is not None) > 1:
            given += ["transform"] * (transform is not None)
            raise ValueError(f"{' and '.join(given)} exclude each other: each determines the image. Pass one of them.")
        for name in given:
            if (number := len(prepared[name])) != len(ds):  # type: ignore[arg-type]
                raise ValueError(
                    f"{name} has {number} rows and the data set {len(ds)}; they must be equal. Compute the {name} again from "
                    "this data set."
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
        image, features = None, None
        if self._image_features is None:
            image = self._open(index, row, image_id)
        else:
            # Copied, because memory maps are read-only and a view would pickle the whole map.
            row_features = self._image_features[index]
            if isinstance(row_features, torch.Tensor):
                features = row_features.detach().clone()
            else:
                features = torch.from_numpy(np.array(row_features))
        captions = _as_list(row["captions"])
        return {
            "image": image,
            "image_features": features,
            "caption": self.draw(captions, image_id) if number is None else captions[number],
            "image_id": image_id,
            "index": index,
        }

    def _open(self, index: int, row: dict[str, Any], image_id: str) -> Image.Image | torch.Tensor:
        try:
            if self._pixels is not None:
                return self._pixels[index]
            image = open_image(row["image"], max_pixels=self._max_pixels)
        except ImageError as error:
            error.add_note(f"This is row {index}, image_id {image_id!r}. check_captions skips such rows.")
            raise
        return image if self._transform is None else self._transform(image)


def _as_list(captions: str | Sequence[str] | None) -> Sequence[str]:
    return [captions] if isinstance(captions, str) else captions or []
