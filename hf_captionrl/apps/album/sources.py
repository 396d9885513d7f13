"""Step 1 of an album: its images, existing captions, and facts of the images: hashes, features, copies.

Legend: M images, D features, k neighbours.
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.apps.album.phrases import split_tags
from hf_captionrl.captioners.pipeline import ChosenImages
from hf_captionrl.data import ImageError, choose_split, open_image
from hf_captionrl.data.columns import caption_lists, undecoded
from hf_captionrl.data.features import source_key
from hf_captionrl.data.images import paths_without_bytes, refuse_outside
from hf_captionrl.data.loading import list_images
from hf_captionrl.evaluation.caption_files import read_caption_file
from hf_captionrl.retrieval import FeatureCache, Scorer, image_hash
from hf_captionrl.utils.images import to_rgb

logger = logging.getLogger(__name__)


# --- Images and existing captions: a folder, a list of files, a data set ---------------------------------------------


@dataclass
class AlbumSource:
    """Images of an album, none of them opened."""

    images: Sequence[Any]  # anything that `open_image` opens, read on access
    image_ids: list[str]  # their names, all different; relative paths in a folder
    captions: list[list[str]] = field(default_factory=list)  # existing captions per image, perhaps none
    paths: list[str | None] = field(default_factory=list)  # files of the images; None for images that are not files
    root: Path | None = None  # folder that relative paths start from, if there is one

    def __post_init__(self) -> None:
        number = len(self.images)
        self.captions = self.captions or [[] for _ in range(number)]
        self.paths = self.paths or [os.fspath(i) if isinstance(i, str | os.PathLike) else None for i in self.images]
        if number == 0:
            raise ValueError("The album has no images. Use at least one.")
        if len(set(self.image_ids)) < number:
            twice = Counter(self.image_ids).most_common(1)[0][0]
            raise ValueError(f"Two images are called {twice!r}. Use different image ids.")

    def first(self, number: int) -> AlbumSource:
        """The first images."""
        rows = range(min(number, len(self.images)))
        kept = (self.image_ids[:number], self.captions[:number], self.paths[:number])
        return AlbumSource(ChosenImages(self.images, rows), *kept, self.root)

    def stamps(self, progress: Callable[[int], Any]) -> list[str]:
        """What tells an image from another one of the same name: size and time of change of a file, else the hash of the bytes."""
        found = []
        for row, path in enumerate(self.paths):
            try:
                if path is not None:
                    facts = os.stat(path)
                    found.append(f"{facts.st_size}-{facts.st_mtime_ns}")
                else:
                    found.append(source_key(self.images[row]))
                    progress(1)
            except (ImageError, OSError):
                found.append("unreadable")  # the step that reads the image says why
        return found


def sidecar_of(path: str, extension: str = ".txt") -> Path:
    """The text file beside an image."""
    return Path(path).with_suffix(extension)


def read_regular(path: Path) -> bytes | None:
    """The content of a file; None if it does not exist, or is a link, a pipe or a device, which is never opened."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None
        # The file may have been exchanged since.
        flags = (getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
        with open(os.open(path, sum(flags)), "rb") as file:
            return file.read() if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    except FileNotFoundError:
        return None


def sidecar_captions(path: Path, *, by_line: bool = False) -> list[str]:
    """The captions of a text file: one per line, or one of all lines, which are joined by spaces, those of tags by commas."""
    text = (read_regular(path) or b"").decode("utf-8-sig")
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    if by_line or len(lines) < 2:
        return lines
    tags = ", ".join(line.rstrip(" ,") for line in lines)
    return [tags if len(lines) > 2 and split_tags(tags) else " ".join(lines)]


def load_album_source(
    name: Any,
    *,
    sidecars: bool = True,
    extension: str = ".txt",
    by_line: bool = False,
    ignore_metadata: bool = False,
    **source: Any,
) -> AlbumSource:
    """Find the images that the command takes, or a data set in memory, and their captions: their own, or text files.

    `by_line` reads a caption per line, `ignore_metadata` takes all images of a folder, and `source` are options of
    [`load_captions`].
    """
    path = Path(name) if isinstance(name, str | os.PathLike) else None
    if path is not None and path.suffix.lower() == ".txt" and path.is_file():
        found = _listed(path, source.get("image_root"))
    elif path is not None and path.is_dir() and ignore_metadata:
        names = list_images(path).images
        found = AlbumSource([str(path / name) for name in names], names, root=path)
    else:
        if path is not None and path.is_dir() and all(found.is_dir() for found in path.rglob("*")):
            raise ValueError(f"The folder {str(path)!r} contains no files. Use a folder that contains images.")
        found = _data_set(name, path, source)
    unread: dict[str, list[Path]] = {}
    other = ".caption" if extension == ".txt" else ".txt"
    for row, image in enumerate(found.paths):
        if image is None or found.captions[row]:
            continue
        if sidecars:
            path, unasked = sidecar_of(image, extension), sidecar_of(image, other)
            try:
                found.captions[row] = sidecar_captions(path, by_line=by_line)
            except UnicodeDecodeError:
                unread.setdefault("not UTF-8. Convert them", []).append(path)
                continue
            if os.path.lexists(path):
                if read_regular(path) is None:
                    unread.setdefault("links, or no regular files. Replace them by regular files", []).append(path)
            elif unasked.is_file():
                unread.setdefault(f"{other} files. Use --caption_extension {other} to read them", []).append(unasked)
    for reason, paths in unread.items():
        logger.warning(
            "%d text files beside images are not read, such as %s: they are %s.", len(paths), paths[0], reason
        )
    return found


def _listed(path: Path, image_root: str | None) -> AlbumSource:
    root = path.parent if image_root is None else Path(image_root)
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    parts = data.split(b"\0") if b"\0" in data else data.splitlines()
    try:
        names = list(dict.fromkeys(part.decode("utf-8") for part in parts if part.strip()))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}). Write the list of image paths in UTF-8.") from None
    if not names:
        raise ValueError(f"{path} lists no images. Write one path per line.")
    files = [str(root / name) for name in names]
    refuse_outside(files, root, str(path))
    return AlbumSource(files, names, root=root)


def _data_set(name: Any, path: Path | None, source: dict[str, Any]) -> AlbumSource:
    split = source.pop("split", None)
    if name == "scenes":
        source = {}
    else:
        source.setdefault("require_captions", False)
        split = split or "all"
    rows = choose_split(name if path is None else str(name), split, **source).dataset
    column = undecoded(rows.with_format(None)).select_columns("image")
    files: list[str | None] = [None] * len(rows)  # images inside a table, and files that do not exist
    root = None
    if path is not None and path.exists():  # else files are in the cache of the Hub
        listed = paths_without_bytes(column.with_format("arrow")["image"][:]).to_pylist() or files
        files = [file if file and os.path.isfile(file) else None for file in listed]
        root = path if path.is_dir() else Path(source.get("image_root") or path.parent)
    captions = [[text for text in texts if text and text.strip()] for texts in caption_lists(rows)]
    return AlbumSource(column["image"], [str(image_id) for image_id in rows["image_id"][:]], captions, files, root)


def read_captions_for(source: AlbumSource, path: str | os.PathLike[str]) -> list[list[str]]:
    """Captions of a file, in any layout of [`read_caption_file`], for the images of an album; empty ones are left out."""
    captions = read_caption_file(path, is_repeatable=True).captions
    if captions.keys().isdisjoint(source.image_ids):
        raise ValueError(
            f"None of the {len(captions)} captions of {path} belongs to an image of the album: it has ids such as "
            f"{next(iter(captions), None)!r}, and the album such as {source.image_ids[0]!r}. Check the folder and the file."
        )
    # Only an image whose captions are all empty keeps an empty one: somebody has removed its caption.
    filled = {key: [text for text in texts if text.strip()] or texts[:1] for key, texts in captions.items()}
    return [filled.get(image_id, []) for image_id in source.image_ids]


# --- Facts of the images, each opened once ---------------------------------------------------------------------------

MAX_CHUNK_PIXELS = 2**25
"""Pixels of decoded images that are held at once: 100 MB, one photograph of 24 megapixels or thousands of small ones."""
_HASH_BYTES = 16


@dataclass
class ImageFacts:
    """Facts of the readable images of an album."""

    rows: list[int]  # their rows in the album
    keys: list[str]  # hashes of their pixels
    pictures: np.ndarray  # (M, 768) uint8: see [`small_picture`]
    features: Tensor  # (M, D), on the CPU; bit-equal for equal pixels


def opened_chunks(
    images: Sequence[Any], rows: Sequence[int], batch_size: int, unreadable: dict[int, str] | None = None
) -> Iterator[tuple[list[int], list[Image.Image]]]:
    """Decoded images and their rows; a list is emptied when the next one is requested. Without `unreadable`, errors are raised."""
    chunk: list[int] = []
    opened: list[Image.Image] = []
    pixels = 0
    for row in rows:
        try:
            image = open_image(images[row])
        except ImageError as error:
            if unreadable is None:
                raise
            unreadable[row] = str(error)
            continue
        size = image.width * image.height
        if chunk and (len(chunk) == batch_size or pixels + size > MAX_CHUNK_PIXELS):
            yield chunk, opened
            opened.clear()  # the caller's variable would hold them while the next image is decoded
            chunk, opened, pixels = [], [], 0
        chunk.append(row)
        opened.append(image)
        pixels += size
        del image
    if chunk:
        yield chunk, opened


def read_batch(
    images: Sequence[Any],
    rows: Sequence[int],
    scorer: Scorer,
    cache: FeatureCache | None = None,
    unreadable: dict[int, str] | None = None,
) -> dict[int, dict[str, Any]]:
    """Facts of some images, by row: `key`, `picture` and `features`; every different image is encoded once.

    An image whose small picture and features are in the cache is not opened. Features are only looked up: if every process
    added some, those of an image would depend on which process is the first.
    """
    seen: dict[int, tuple[str, np.ndarray]] = {}  # hash and small picture of each row
    features: dict[str, np.ndarray] = {}  # by hash
    sources: dict[int, str] = {}  # hashes of the files' bytes, by which `captionrl features` and training know them
    if cache is not None:
        # The hash of the pixels and the small picture of an image, (784,), by the bytes of its file; they depend on no model.
        pictures = FeatureCache(cache.root, model_id="image_hash", revision="1", what="small_pictures", dtype="uint8")
        for row in rows:
            # An image in memory has no bytes to hash, and need not be decoded. What cannot be read is left to `open_image`.
            if not isinstance(value := images[row], Image.Image):
                with suppress(ImageError, OSError):
                    sources[row] = source_key(value)
        for row, stored in _cached(pictures, sources).items():
            seen[row] = stored[:_HASH_BYTES].tobytes().hex(), stored[_HASH_BYTES:]
        features = _cached_features(cache, seen, sources)
    found: dict[int, dict[str, Any]] = {}

    def add_facts() -> None:
        for row, (key, picture) in seen.items():
            if key in features:
                found[row] = {"key": key, "picture": picture, "features": features[key]}

    add_facts()
    for chunk, opened in opened_chunks(images, [row for row in rows if row not in found], len(rows), unreadable):
        seen = {row: (image_hash(image), small_picture(image)) for row, image in zip(chunk, opened, strict=True)}
        if cache is not None:
            features |= _cached_features(cache, seen, sources)
            files = {
                sources[row]: np.concatenate([np.frombuffer(bytes.fromhex(key), np.uint8), picture])
                for row, (key, picture) in seen.items()
                if row in sources
            }
            if files:
                pictures.put(list(files), np.stack(list(files.values())))
        new = {seen[row][0]: image for row, image in zip(chunk, opened, strict=True) if seen[row][0] not in features}
        if new:
            features |= dict(zip(new, scorer.image_features(list(new.values())).float().cpu().numpy(), strict=True))
        del opened, new  # else they are held while the next chunk is decoded
        add_facts()
    return found


def _cached(cache: FeatureCache, names: Mapping[Any, str]) -> dict[Any, np.ndarray]:
    """The cached rows of some names."""
    absent = set(cache.missing(list(names.values())))
    known = {key: name for at, (key, name) in enumerate(names.items()) if at not in absent}
    return dict(zip(known, np.asarray(cache.get(list(known.values()))), strict=True)) if known else {}


def _cached_features(
    cache: FeatureCache, seen: Mapping[int, tuple[str, np.ndarray]], sources: Mapping[int, str]
) -> dict[str, np.ndarray]:
    """Features by the hash of the pixels; the cache has them by that hash, or by the bytes of the file."""
    found = _cached(cache, {key: key for key, _ in seen.values()})
    of_files = {row: sources[row] for row, (key, _) in seen.items() if key not in found and row in sources}
    for row, features in _cached(cache, of_files).items():
        found.setdefault(seen[row][0], features)
    return {key: features.astype(np.float32) for key, features in found.items()}


def read_images(
    images: Sequence[Any],
    scorer: Scorer,
    *,
    cache: FeatureCache | None = None,
    batch_size: int = 16,
    unreadable: dict[int, str] | None = None,
) -> ImageFacts:
    """Facts of all images; the cache gets the new features."""
    found: dict[int, dict[str, Any]] = {}
    for start in range(0, len(images), batch_size):
        rows = range(start, min(start + batch_size, len(images)))
        found |= read_batch(images, rows, scorer, cache, unreadable)
    return image_facts(found, unreadable or {}, cache)


def image_facts(
    found: Mapping[int, Mapping[str, Any]], unreadable: Mapping[int, str], cache: FeatureCache | None = None
) -> ImageFacts:
    """The facts of all images, whose features are put into the cache; refuses an album without readable images."""
    if not found:
        raise ValueError(f"No image of the album can be read: {next(iter(unreadable.values()), 'there are none')}")
    rows = sorted(found)
    keys = [found[row]["key"] for row in rows]
    first = {found[row]["key"]: found[row]["features"] for row in reversed(rows)}
    features = torch.from_numpy(np.stack([first[key] for key in keys]))
    if cache is not None and cache.missing(keys):
        cache.put(keys, features)
    return ImageFacts(rows, keys, np.stack([found[row]["picture"] for row in rows]), features)


# --- Copies: the same pixels, and near-copies such as the same photograph saved again --------------------------------

_SIDE = 16
MAX_DIFFERENCE = 6.0
"""Largest mean difference of small pictures of near-copies, in levels of 255; [`saved_again`] changes small noisy images by 5."""
CALIBRATION_IMAGES = 64
"""Largest number of images, the first of the album, from which the threshold of copies is computed."""
_QUANTILE = 0.05
_PAIRS = 2**16


def small_picture(image: Image.Image) -> np.ndarray:
    """The image at 16 x 16 pixels, `(768,)` uint8."""
    return np.asarray(to_rgb(image).resize((_SIDE, _SIDE), Image.Resampling.BOX), dtype=np.uint8).reshape(-1)


def saved_again(image: Image.Image) -> Image.Image:
    """The image at four fifths of its size, as JPEG of quality 60: as messengers and web sites save copies."""
    size = tuple(max(8, round(side * 0.8)) for side in image.size)
    buffer = io.BytesIO()
    to_rgb(image).resize(size, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=60)  # type: ignore[arg-type]
    buffer.seek(0)
    return Image.open(buffer).convert("RGB")


def copy_threshold(images: Sequence[Any], facts: ImageFacts, scorer: Scorer, cache: FeatureCache | None) -> float:
    """Cosine from which two images may be near-copies: 95 % of the images reach it with a re-encoded copy of themselves."""
    rows, keys = facts.rows[:CALIBRATION_IMAGES], facts.keys[:CALIBRATION_IMAGES]

    def compute(asked: Sequence[int]) -> np.ndarray:
        cosines = []
        for _, opened in opened_chunks(images, [rows[at] for at in asked], 1):
            own, copy = scorer.image_features([*opened, saved_again(opened.pop())])
            cosines.append([float(own @ copy)])
        return np.array(cosines, np.float32)

    if cache is None:
        cosines: Any = compute(range(len(rows)))
    else:
        cosines = FeatureCache.for_scorer(scorer, cache.root, what="saved_again").get_or_compute(keys, compute)
    return float(np.quantile(np.asarray(cosines, np.float64), _QUANTILE))


def copy_leaders(
    keys: Sequence[str],
    pictures: np.ndarray,
    features: Tensor,
    neighbours: tuple[Tensor, Tensor] | None,
    threshold: float,
) -> np.ndarray:
    """The first image that each image is a copy of; for images that are not copies, their row.

    Near-copies have a cosine of at least the threshold and small pictures that differ by at most `MAX_DIFFERENCE`, because
    scorers that overlook details give look-alikes high cosines, too. Every copy is compared with the first image of its group, so
    that groups do not grow along chains. Shapes: `pictures` `(M, 768)`, `features` `(M, D)`, rows and cosines of neighbours `(M, k)`.
    """
    leader = np.arange(len(keys))
    first: dict[str, int] = {}
    for row, key in enumerate(keys):
        leader[row] = first.setdefault(key, row)
    if neighbours is None:
        blocks = range(0, len(features), 1024)
        near = [torch.nonzero(features[at : at + 1024] @ features.T >= threshold).cpu() for at in blocks]
        pairs = torch.cat([found + torch.tensor([at, 0]) for at, found in zip(blocks, near, strict=True)])
    else:
        row, column = torch.nonzero(neighbours[1] >= threshold, as_tuple=True)
        pairs = torch.stack([row, neighbours[0][row, column]], 1)
    pairs = torch.stack([pairs.amax(1), pairs.amin(1)], 1)  # the later row, the earlier one
    pairs = pairs[pairs[:, 0] > pairs[:, 1]].unique(dim=0)  # sorted
    for part in pairs.split(_PAIRS):  # the frames of a video give millions of pairs
        for later, earlier in part.tolist():
            if leader[later] == later and leader[earlier] == earlier:
                difference = np.abs(pictures[later].astype(np.int16) - pictures[earlier].astype(np.int16)).mean()
                if difference <= MAX_DIFFERENCE:
                    leader[later] = earlier
    # An image may lead copies and become a copy of an earlier image.
    return leader[leader]
