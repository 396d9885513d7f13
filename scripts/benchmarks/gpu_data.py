"""What surrounds the captioner on a GPU: the scorer, the search for similar images, and the loading of images.

Legend: B images, G captions per image, N = B * G captions, Q queries, D features.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import tempfile
from collections.abc import Callable
from typing import Any, get_args

import datasets
import numpy as np
import torch
from PIL import Image

from hf_captionrl.data import DecodedPixels, PixelForm, cached_pixels, open_image
from hf_captionrl.retrieval.neighbours import normalised, rank_rows
from hf_captionrl.rewards.self_retrieval import retrieval_rewards
from scripts.benchmarks.bags import _features
from scripts.benchmarks.gpu_steps import TINY
from scripts.benchmarks.gpu_timing import Budget, measure
from scripts.benchmarks.loader import ImageInputs
from scripts.benchmarks.rl_models import RLShape, _image_processor, _made_up_images, _scorer, _scorer_pixels
from scripts.benchmarks.rl_naive import padded_text

SCORERS = {"clip-vit-b-32": RLShape("blip", 100), "tiny": TINY}
"""100 images and 500 captions a call."""


@dataclasses.dataclass(frozen=True)
class Mine:
    """A search: the `top` nearest of `queries` among `images` of `width` features, `block` queries at once."""

    images: int
    width: int
    top: int
    queries: int
    block: int


MINES = {"coco-118k": Mine(118_000, 1024, 200, 8192, 1024), "tiny": Mine(300, 8, 5, 32, 16)}
"""COCO's training images with image and text features of 512 each; `tiny` is for tests."""


@dataclasses.dataclass(frozen=True)
class Photos:
    """`number` JPEG files of `width` x `height` pixels, prepared for a vision tower of `size` x `size`."""

    number: int
    width: int
    height: int
    size: int


PHOTOS = {"coco-640": Photos(32, 640, 480, 224), "tiny": Photos(2, 24, 16, 8)}
"""A batch of COCO's photos; `tiny` is for tests."""


def measure_scorer(
    name: str, device: str, dtype: torch.dtype, *, rounds: int, warm_up: int, seed: int, budget: Budget
) -> dict[str, Any]:
    """Time what a scorer does for a rollout.

    Returns the shape, and under `steps` what [`measure`] gives for captions padded to the longest and to the scorer's
    full length, images from pixels and from pictures, and rewards.
    """
    shape = SCORERS[name]
    torch.manual_seed(seed)
    images = _made_up_images(shape, seed)
    scorer = _scorer(shape).to(device)
    scorer.dtype = dtype
    scorer.model.to(dtype)
    pictures = [row["image"] for row in images]
    pixels = _scorer_pixels(scorer, images, range(len(images))).to(device, dtype)
    words = torch.randint(4, shape.scorer_vocab_size, (shape.num_images * shape.group_size, shape.num_tokens)).tolist()
    captions = [" ".join(f"w{word - 4}" for word in row) for row in words]
    similarity = torch.randn(len(captions), len(pictures), device=device)
    columns = torch.arange(len(captions), device=device) // shape.group_size

    def padded() -> Any:
        return scorer.model.get_text_features(**padded_text(scorer, captions).to(device))

    works = {
        "captions, padded to the longest": lambda: scorer.text_features(captions),
        "captions, padded to the full length": padded,
        "images, from pixels on the device": lambda: scorer.model.get_image_features(pixel_values=pixels),
        "images, from pictures": lambda: scorer.image_features(pictures),
        "rewards": lambda: retrieval_rewards(similarity, columns, scale=100.0),
    }
    with torch.no_grad():
        found = measure(works, device, rounds=rounds, warm_up=warm_up, seed=seed, budget=budget)
    return {"size": f"{shape.num_images} images, {len(captions)} captions", "steps": found}


def measure_mining(
    name: str, device: str, dtype: torch.dtype, *, rounds: int, warm_up: int, seed: int, budget: Budget
) -> dict[str, Any]:
    """Time the exact nearest neighbours beside the bare blocked product.

    Returns the sizes, and under `steps` what [`measure`] gives.
    """
    mine = MINES[name]
    unit = normalised(_features(mine.images, mine.width, seed)).to(device)
    rows = torch.randperm(mine.images, generator=torch.Generator().manual_seed(seed))[: mine.queries]
    buffer = torch.empty(mine.block, mine.images, device=device)

    def bare() -> None:
        for part in rows.split(mine.block):
            torch.mm(unit[part.to(device)], unit.T, out=buffer[: len(part)])

    works = {
        "neighbours": lambda: rank_rows(unit, mine.top, rows=rows, block_size=mine.block),
        "bare product": bare,
    }
    found = measure(works, device, rounds=rounds, warm_up=warm_up, seed=seed, budget=budget)
    size = f"{mine.top} nearest of {mine.queries} among {mine.images} images x {mine.width} features, fp32"
    return {"size": size, "steps": found}


def _photo_files(photos: Photos, seed: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    files = []
    for _ in range(photos.number):
        # Enlarged noise gives files of about the length of photos.
        noise = rng.integers(0, 256, (photos.height // 8, photos.width // 8, 3), dtype=np.uint8)
        with io.BytesIO() as file:
            Image.fromarray(noise).resize((photos.width, photos.height)).save(file, "JPEG", quality=90)
            files.append(file.getvalue())
    return files


def measure_loader(
    name: str, device: str, dtype: torch.dtype, *, rounds: int, warm_up: int, seed: int, budget: Budget
) -> dict[str, Any]:
    """Time the way of a batch of photos to the device: decoding and preparing in this process, without workers, and copying.

    Returns the sizes, and under `steps` what [`measure`] gives for Pillow's decoder, for torchvision's (`image_decoder`) and for
    both forms of `cache_pixels`.
    """
    photos = PHOTOS[name]
    files = _photo_files(photos, seed)
    rows = datasets.Dataset.from_dict({"image": [{"bytes": file, "path": None} for file in files]})
    rows = rows.cast_column("image", datasets.Image())
    inputs = ImageInputs(_image_processor(photos.size))

    def decoded() -> list[Image.Image]:
        return [open_image(file) for file in files]

    def prepared() -> torch.Tensor:
        return inputs.encode_images(decoded())["pixel_values"]

    def read(pixels: Any) -> torch.Tensor:
        return inputs.encode_pixels([pixels[row] for row in range(photos.number)])["pixel_values"]

    with tempfile.TemporaryDirectory() as folder:
        parts = inputs.prepared_pixels
        stored: dict[str, Any] = {"image_decoder=torchvision": DecodedPixels(rows, parts)}
        for form in get_args(PixelForm):
            stored[f"cache_pixels={form}"] = cached_pixels(rows, parts, form=form, directory=folder, progress=False)
        for exact in ("image_decoder=torchvision", "cache_pixels=uint8"):
            if not torch.equal(read(stored[exact]), prepared()):
                raise RuntimeError(f"The pixels of {exact} are not those of the image processor.")

        def copied(pixels: Any) -> torch.Tensor:
            return read(pixels).to(device, dtype)

        works: dict[str, Callable[[], Any]] = {
            "decode": decoded,
            "decode and processor": prepared,
            "decode, processor and copy to the device": lambda: prepared().to(device, dtype),
            **{f"{key} and copy": functools.partial(copied, pixels) for key, pixels in stored.items()},
        }
        found = measure(works, device, rounds=rounds, warm_up=warm_up, seed=seed, budget=budget)
    size = f"{photos.number} JPEGs of {photos.width} x {photos.height}, {len(files[0]) // 1024} KiB each"
    return {"size": size, "steps": found}
