"""Files of bags and of ranked neighbours, with image ids (not row numbers) and the signature of the scorer.

Legend: N images, k ranked neighbours per image, K images per bag, T bags.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.io import atomic_write_bytes, write_json
from hf_captionrl.retrieval.row_lookup import RowLookup

__all__ = [
    "BAG_FORMATS",
    "BagFile",
    "NeighbourFile",
    "load_bags",
    "load_neighbours",
    "save_bags",
    "save_neighbours",
]

BAG_FORMATS = (".parquet", ".json")
"""Suffixes of bag files."""

Features = Literal["image", "multimodal"]
"""Features that define the similarity: of the images alone, or of images and captions."""

_KEY = b"captionrl"  # key of the metadata in a Parquet file


@dataclass(frozen=True)
class BagFile:
    """Bags and their provenance.

    Attributes:
        bags: Bags of image ids, of any sizes; the first image of a bag is the query.
        similarities: Mean cosine similarity between the query and the other images, one per bag.
        signature: Signature of the scorer, `model@revision|...`.
        features: Features that define the similarity, `"image"` or `"multimodal"`.
        kind: `"truematch"` and `"training"` bags of the same size are disjoint; `"candidates"` may overlap.
    """

    bags: list[list[str]]
    similarities: list[float]
    signature: str
    features: str = "multimodal"
    kind: str = "truematch"

    @property
    def model(self) -> str:
        """Id of the scorer."""
        return self.signature.partition("@")[0]

    @property
    def revision(self) -> str:
        """Commit or fingerprint of the scorer."""
        return self.signature.partition("@")[2].partition("|")[0]

    def rows(self, image_ids: Sequence[Any]) -> dict[int, list[list[int]]]:
        """The bags as rows of a data set.

        Args:
            image_ids: Id of each row.

        Returns:
            `dict[int, list[list[int]]]`: From bag sizes to bags, as `bag_ranks` and the metrics expect them.

        Raises:
            ValueError: If an id is not in the data set.
        """
        rows = iter(_known_rows(self.bags, _unique(image_ids), "The bag file").tolist())
        found: dict[int, list[list[int]]] = {}
        for bag in self.bags:
            found.setdefault(len(bag), []).append(list(islice(rows, len(bag))))
        return found


@dataclass(frozen=True)
class NeighbourFile:
    """Ranked neighbours and their provenance.

    Attributes:
        indices (`torch.Tensor` of shape `(N, k)`): int64 rows, most similar first.
        similarities (`torch.Tensor` of shape `(N, k)`): Their cosine similarities, float32.
        image_ids: Id of each row.
        signature: Signature of the scorer, `model@revision|...`.
        features: Features that define the similarity, `"image"` or `"multimodal"`.
    """

    indices: Tensor
    similarities: Tensor
    image_ids: Sequence[str] = field(repr=False)
    signature: str
    features: str = "multimodal"


def save_bags(path: str | Path, file: BagFile) -> Path:
    """Write bags as Parquet or JSON, depending on the suffix.

    Args:
        path: Output path, ending in .parquet or .json.
        file: The bags.

    Returns:
        `Path`: The path written.

    Raises:
        ValueError: If the suffix is not supported, the signature has no revision, or a bag is invalid.
    """
    path = Path(path)
    _check_ending(path, BAG_FORMATS)
    _check_bag_file(file, str(path))
    head = {
        "kind": file.kind,
        "features": file.features,
        "model": file.model,
        "revision": file.revision,
        "signature": file.signature,
    }
    if path.suffix == ".json":
        rows = [
            {"image_ids": bag, "similarity": score} for bag, score in zip(file.bags, file.similarities, strict=True)
        ]
        return write_json(path, {**head, "bags": rows})
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema(
        {"size": pyarrow.int32(), "image_ids": pyarrow.list_(pyarrow.string()), "similarity": pyarrow.float64()},
        metadata={_KEY: json.dumps(head)},
    )
    columns = {"size": [len(b) for b in file.bags], "image_ids": file.bags, "similarity": file.similarities}
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(columns, schema=schema), buffer)
    return atomic_write_bytes(path, buffer.getvalue())


def load_bags(path: str | Path, *, image_ids: Sequence[Any] | None = None, signature: str | None = None) -> BagFile:
    """Read bags, and check that they belong to the data set and the scorer.

    Args:
        path: File from [`save_bags`].
        image_ids: Ids of the data set.
        signature: Expected `Scorer.signature`, or its first part `model@revision`.

    Returns:
        `BagFile`: The bags.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it is not a bag file, an id is unknown or repeated, or the scorer differs.
    """
    path = Path(path)
    _check_ending(path, BAG_FORMATS)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Create it with `captionrl bags`.")
    try:
        if path.suffix == ".json":
            head = json.loads(path.read_text(encoding="utf-8"))
            bags = [row["image_ids"] for row in head["bags"]]
            scores = [row["similarity"] for row in head["bags"]]
        else:
            from pyarrow import parquet

            table = parquet.read_table(path)
            head = json.loads(table.schema.metadata[_KEY])
            bags, scores = table["image_ids"].to_pylist(), table["similarity"].to_pylist()
        file = BagFile(
            [[str(i) for i in bag] for bag in bags],
            [float(score) for score in scores],
            head["signature"],
            head["features"],
            head["kind"],
        )
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ValueError(
            f"{path} is not a bag file ({type(error).__name__}: {error}). Create one with `captionrl bags`."
        ) from error
    _check_bag_file(file, str(path))
    _check_signature(file.signature, signature, str(path))
    if image_ids is not None:
        _known_rows(file.bags, _unique(image_ids), str(path))
    return file


def save_neighbours(path: str | Path, file: NeighbourFile) -> Path:
    """Write ranked neighbours as safetensors.

    Args:
        path: Output path, ending in .safetensors.
        file: The neighbours.

    Returns:
        `Path`: The path written.

    Raises:
        ValueError: If the suffix is not supported, shapes disagree, or the neighbours are invalid.
    """
    from safetensors.torch import save

    from hf_captionrl.retrieval.bags import check_neighbours

    path = Path(path)
    _check_ending(path, (".safetensors",))
    check_neighbours(file.indices, len(file.image_ids))
    _unique(file.image_ids)
    _check_revision(file.signature, str(path))
    if file.similarities.shape != file.indices.shape:
        raise ValueError(
            f"indices have shape {tuple(file.indices.shape)} and similarities {tuple(file.similarities.shape)}, but must "
            "have the same. Pass both as nearest_neighbours returns them."
        )
    # Ids are bytes of a tensor, because a safetensors header is limited to 100 MB, a few million ids.
    names = bytearray(b"[")
    for i in file.image_ids:
        names += (", " if len(names) > 1 else "").encode() + json.dumps(str(i)).encode("ascii")
    names += b"]"
    tensors = {
        "indices": file.indices.int().contiguous(),
        "similarities": file.similarities.float().contiguous(),
        "image_ids": torch.frombuffer(names, dtype=torch.uint8),
    }
    return atomic_write_bytes(path, save(tensors, metadata={"signature": file.signature, "features": file.features}))


def load_neighbours(
    path: str | Path, *, image_ids: Sequence[Any] | None = None, signature: str | None = None
) -> NeighbourFile:
    """Read ranked neighbours in the order of a data set.

    Args:
        path: File from [`save_neighbours`].
        image_ids: Ids of the data set; if it has the same images in another order, rows are renumbered.
        signature: Expected `Scorer.signature`, or its first part `model@revision`.

    Returns:
        `NeighbourFile`: The neighbours.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it is not a neighbour file, the scorer differs, or the data set has other images.
    """
    from safetensors import SafetensorError, safe_open

    from hf_captionrl.retrieval.bags import check_neighbours

    path = Path(path)
    _check_ending(path, (".safetensors",))
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Create it with `captionrl bags --mode neighbours`.")
    try:
        with safe_open(path, framework="pt") as opened:
            head = opened.metadata() or {}
            indices, similarities = opened.get_tensor("indices").long(), opened.get_tensor("similarities")
            names = json.loads(opened.get_tensor("image_ids").numpy().tobytes())
        found, features = head["signature"], head["features"]
    except (KeyError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{path} is not a neighbour file ({type(error).__name__}: {error}). Create one with `captionrl bags --mode "
            "neighbours`."
        ) from error
    _check_signature(found, signature, str(path))
    check_neighbours(indices, len(names))
    if image_ids is not None:
        lookup = _unique(image_ids)
        to = torch.from_numpy(lookup.rows(names))  # row of the data set of each row of the file
        unknown = (to < 0).nonzero()
        if len(unknown) or len(names) != len(lookup):
            some = "some images are not in the file"
            which = f"image {names[int(unknown[0])]!r} is not in the data set" if len(unknown) else some
            raise ValueError(
                f"{path} has neighbours of {len(names)} images, but the data set has {len(lookup)} images: {which}. Create "
                "the file again for this data set."
            )
        order = to.argsort()
        indices, similarities, names = to[indices][order], similarities[order], [names[i] for i in order.tolist()]
    return NeighbourFile(indices, similarities, names, found, features)


def _unique(image_ids: Sequence[Any]) -> RowLookup:
    """Rows by id; refuses ids that occur twice."""
    is_column = not isinstance(image_ids, list | tuple) and len(image_ids) and isinstance(image_ids[0], str)
    ids = image_ids if is_column else list(map(str, image_ids))
    lookup = RowLookup(ids)
    first = lookup.first_rows()
    repeated = np.flatnonzero(first != np.arange(len(first)))
    if len(repeated):
        twice = ids[int(repeated[0])]
        raise ValueError(f"image_ids contains {twice!r} twice, but bags need unique ids. Make the ids unique.")
    return lookup


def _check_ending(path: Path, endings: Sequence[str]) -> None:
    if path.suffix not in endings:
        raise ValueError(f"The name of {str(path)!r} has an unsupported suffix. Use {' or '.join(endings)}.")


def _check_revision(signature: str, name: str) -> None:
    model, _, revision = signature.partition("@")
    if not model or not revision:
        raise ValueError(f"{name}: the signature is {signature!r}, but must be model@revision. Pass scorer.signature.")


def _check_signature(found: str, expected: str | None, name: str) -> None:
    if expected is not None and found != expected and not (expected and found.startswith(f"{expected}|")):
        raise ValueError(
            f"{name} was created with features of {found!r}, but the scorer is {expected!r}. Create it again with this "
            "scorer, or use the other one."
        )


def _check_bag_file(file: BagFile, name: str) -> None:
    _check_revision(file.signature, name)
    if len(file.bags) != len(file.similarities):
        raise ValueError(
            f"{name}: there are {len(file.bags)} bags and {len(file.similarities)} similarities. Use one similarity per "
            "bag."
        )
    if not file.bags:
        raise ValueError(f"{name} has no bags. Use bags that are smaller than the number of images.")
    where: dict[tuple[int, str], int] = {}
    for number, bag in enumerate(file.bags):
        if len(bag) < 2:
            raise ValueError(f"{name}: bag {number} has {len(bag)} image(s). Use at least 2 images per bag.")
        if len(set(bag)) < len(bag):
            twice = next(i for i in bag if bag.count(i) > 1)
            raise ValueError(
                f"{name}: bag {number} contains image {twice!r} twice, so the copy would be a distractor of it. Remove it."
            )
        if file.kind == "candidates":
            continue
        for image_id in bag:
            first = where.setdefault((len(bag), image_id), number)
            if first != number:
                raise ValueError(
                    f"{name}: image {image_id!r} is in bags {first} and {number}, both of size {len(bag)}. Bags of kind "
                    f"{file.kind!r} must be disjoint. Use kind 'candidates' for bags that overlap."
                )


def _known_rows(bags: Sequence[Sequence[str]], lookup: RowLookup, name: str) -> np.ndarray:
    """Row of each image of each bag, one after the other."""
    rows = lookup.rows([image_id for bag in bags for image_id in bag])
    if (rows < 0).any():
        place = int((rows < 0).argmax())
        number = int(np.searchsorted(np.cumsum([len(bag) for bag in bags]), place, side="right"))
        image_id = bags[number][place - sum(map(len, bags[:number]))]
        raise ValueError(
            f"{name}: bag {number} contains image {image_id!r}, which is not in the data set of {len(lookup)} images. "
            "Create the bags again for this data set."
        )
    return rows
