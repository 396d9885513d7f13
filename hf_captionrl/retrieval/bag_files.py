"""Files of bags and of ranked neighbours, with image ids (not row numbers) and the signature of the scorer.

Legend: N images, k ranked neighbours of an image, K images of a bag, T bags.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hf_captionrl.io import atomic_write_bytes, write_json

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
"""Endings of a file of bags."""

Features = Literal["image", "multimodal"]
"""Features of the similarity: of the images alone, or of images and captions."""

_KEY = b"captionrl"  # of the metadata in a Parquet file


@dataclass(frozen=True)
class BagFile:
    """Bags and their provenance.

    Attributes:
        bags: Bags of image ids, of any sizes, the query first.
        similarities: Mean cosine between the query and the others, one per bag.
        signature: Of the scorer, `model@revision|...`.
        features: Features of the similarity, `"image"` or `"multimodal"`.
        kind: `"truematch"` and `"training"` bags are disjoint within a size; `"candidates"` may overlap.
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
            `dict[int, list[list[int]]]`: Bags by their size, as `bag_ranks` and the metrics expect them.

        Raises:
            ValueError: If an id is not in the data set.
        """
        row = _row_of(image_ids)
        _check_known(self.bags, row, "The file of bags")
        found: dict[int, list[list[int]]] = {}
        for bag in self.bags:
            found.setdefault(len(bag), []).append([row[i] for i in bag])
        return found


@dataclass(frozen=True)
class NeighbourFile:
    """Ranked neighbours and their provenance.

    Attributes:
        indices (`torch.Tensor` of shape `(N, k)`): int64 rows, most similar first.
        similarities (`torch.Tensor` of shape `(N, k)`): Their float32 cosines.
        image_ids: Id of each row.
        signature: Of the scorer, `model@revision|...`.
        features: Features of the similarity, `"image"` or `"multimodal"`.
    """

    indices: Tensor
    similarities: Tensor
    image_ids: list[str] = field(repr=False)
    signature: str
    features: str = "multimodal"


def save_bags(path: str | Path, file: BagFile) -> Path:
    """Write bags as Parquet or JSON, by the ending.

    Args:
        path: Where to write, ending in .parquet or .json.
        file: The bags.

    Returns:
        `Path`: The path written.

    Raises:
        ValueError: If the ending is another, the signature names no revision, or a bag is bad.
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
    """Read bags, refusing those of another data set or another scorer.

    Args:
        path: File from [`save_bags`].
        image_ids: Ids of the data set the bags are for.
        signature: Signature of the scorer they must come from, as `Scorer.signature`, or its part `model@revision`.

    Returns:
        `BagFile`: The bags.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not a file of bags, an id is unknown or repeated, or the scorer differs.
    """
    path = Path(path)
    _check_ending(path, BAG_FORMATS)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Make one with `captionrl bags`.")
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
            f"{path} is no file of bags ({type(error).__name__}: {error}). `captionrl bags` makes one."
        ) from error
    _check_bag_file(file, str(path))
    _check_signature(file.signature, signature, str(path))
    if image_ids is not None:
        _check_known(file.bags, _row_of(image_ids), str(path))
    return file


def save_neighbours(path: str | Path, file: NeighbourFile) -> Path:
    """Write ranked neighbours as safetensors.

    Args:
        path: Where to write, ending in .safetensors.
        file: The neighbours.

    Returns:
        `Path`: The path written.

    Raises:
        ValueError: If the ending is another, shapes disagree, or the neighbours fit no data set.
    """
    from safetensors.torch import save

    from hf_captionrl.retrieval.bags import check_neighbours

    path = Path(path)
    _check_ending(path, (".safetensors",))
    check_neighbours(file.indices, len(file.image_ids))
    _row_of(file.image_ids)
    _check_revision(file.signature, str(path))
    if file.similarities.shape != file.indices.shape:
        raise ValueError(
            f"indices have shape {tuple(file.indices.shape)} and similarities {tuple(file.similarities.shape)}. Give "
            "both as nearest_neighbours returns them."
        )
    # Ids as bytes of a tensor: a safetensors header ends at 100 MB, which is some millions of ids.
    names = json.dumps([str(i) for i in file.image_ids]).encode("ascii")
    tensors = {
        "indices": file.indices.int().contiguous(),
        "similarities": file.similarities.float().contiguous(),
        "image_ids": torch.frombuffer(bytearray(names), dtype=torch.uint8),
    }
    return atomic_write_bytes(path, save(tensors, metadata={"signature": file.signature, "features": file.features}))


def load_neighbours(
    path: str | Path, *, image_ids: Sequence[Any] | None = None, signature: str | None = None
) -> NeighbourFile:
    """Read ranked neighbours in the order of a data set.

    Args:
        path: File from [`save_neighbours`].
        image_ids: Ids of the data set; where it holds the same images in another order, rows are renumbered.
        signature: Signature of the scorer they must come from, or its part `model@revision`.

    Returns:
        `NeighbourFile`: The neighbours.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not a file of neighbours, the scorer differs, or the data set holds other images.
    """
    from safetensors import SafetensorError, safe_open

    from hf_captionrl.retrieval.bags import check_neighbours

    path = Path(path)
    _check_ending(path, (".safetensors",))
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Make one with `captionrl bags --mode neighbours`.")
    try:
        with safe_open(path, framework="pt") as opened:
            head = opened.metadata() or {}
            indices, similarities = opened.get_tensor("indices").long(), opened.get_tensor("similarities")
            names = json.loads(bytes(opened.get_tensor("image_ids").tolist()))
        found, features = head["signature"], head["features"]
    except (KeyError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{path} is no file of neighbours ({type(error).__name__}: {error}). `captionrl bags --mode neighbours` "
            "makes one."
        ) from error
    _check_signature(found, signature, str(path))
    check_neighbours(indices, len(names))
    if image_ids is not None:
        row = _row_of(image_ids)
        unknown = [name for name in names if name not in row]
        if unknown or len(names) != len(row):
            which = f"holds image {unknown[0]!r}, which the data set does not" if unknown else "lacks some of them"
            raise ValueError(
                f"{path} has neighbours of {len(names)} images and the data set has {len(row)}; it {which}. Make the "
                "file again for this data set."
            )
        to = torch.tensor([row[name] for name in names])  # row of the data set of each row of the file
        order = to.argsort()
        indices, similarities, names = to[indices][order], similarities[order], [names[i] for i in order.tolist()]
    return NeighbourFile(indices, similarities, names, found, features)


def _row_of(image_ids: Sequence[Any]) -> dict[str, int]:
    row = {str(image_id): number for number, image_id in enumerate(image_ids)}
    if len(row) < len(image_ids):
        seen: set[str] = set()
        twice = next(i for i in map(str, image_ids) if i in seen or seen.add(i))  # type: ignore[func-returns-value]
        raise ValueError(
            f"image_ids holds {twice!r} twice, so a bag cannot say which image it means. Make ids unique."
        )
    return row


def _check_ending(path: Path, endings: Sequence[str]) -> None:
    if path.suffix not in endings:
        raise ValueError(f"{str(path)!r} must end in {' or '.join(endings)}.")


def _check_revision(signature: str, name: str) -> None:
    model, _, revision = signature.partition("@")
    if not model or not revision:
        raise ValueError(
            f"{name}: the signature is {signature!r}, but must name model and revision. Pass scorer.signature."
        )


def _check_signature(found: str, wanted: str | None, name: str) -> None:
    if wanted is not None and found != wanted and not (wanted and found.startswith(f"{wanted}|")):
        raise ValueError(
            f"{name} was made with features of {found!r}, and {wanted!r} is wanted. Make it again with that scorer, or "
            "use the scorer it was made with."
        )


def _check_bag_file(file: BagFile, name: str) -> None:
    _check_revision(file.signature, name)
    if len(file.bags) != len(file.similarities):
        raise ValueError(f"{name}: there are {len(file.bags)} bags and {len(file.similarities)} similarities.")
    if not file.bags:
        raise ValueError(f"{name} holds no bags. Are there fewer images than a bag takes?")
    where: dict[tuple[int, str], int] = {}
    for number, bag in enumerate(file.bags):
        if len(bag) < 2:
            raise ValueError(f"{name}: bag {number} has {len(bag)} image(s); a bag needs at least 2.")
        if len(set(bag)) < len(bag):
            twice = next(i for i in bag if bag.count(i) > 1)
            raise ValueError(f"{name}: bag {number} holds image {twice!r} twice; its copy would count against it.")
        if file.kind == "candidates":
            continue
        for image_id in bag:
            first = where.setdefault((len(bag), image_id), number)
            if first != number:
                raise ValueError(
                    f"{name}: image {image_id!r} stands in bags {first} and {number}, both of {len(bag)}. Bags of kind "
                    f"{file.kind!r} are disjoint; only 'candidates' may overlap."
                )


def _check_known(bags: Sequence[Sequence[str]], row: dict[str, int], name: str) -> None:
    for number, bag in enumerate(bags):
        for image_id in bag:
            if image_id not in row:
                raise ValueError(
                    f"{name}: bag {number} holds image {image_id!r}, which is not in the data set of {len(row)} images. "
                    "Make the bags again for this data set."
                )
