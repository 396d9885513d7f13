"""Converts the arguments of users to those of `hf_captionrl.metrics`: models by name, features, and the pool of images.

Legend: N captions, M images of the pool, R references of a caption, D features.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import hf_captionrl.retrieval as retrieval
from hf_captionrl.metrics.caption_checks import check_captions, check_groups
from hf_captionrl.metrics.evaluate_modules.metric import is_missing
from hf_captionrl.retrieval.ranking import as_features


@functools.lru_cache(maxsize=2)
def _named_scorer(name: str) -> Any:
    return retrieval.load_scorer(name)


def resolve_scorer(scorer: Any) -> Any:
    """A scorer from its name; each name is loaded once."""
    if scorer is None:
        raise ValueError(
            "scorer is missing: it computes the features of captions and images. Pass for instance "
            "scorer='openai/clip-vit-base-patch32', or text_features and image_features that you have."
        )
    return _named_scorer(scorer) if isinstance(scorer, str) else retrieval.load_scorer(scorer)


@functools.lru_cache(maxsize=2)
def _named_language_model(name: str) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    from hf_captionrl.utils.model_files import load_language_model, model_path

    model = load_language_model(name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(model_path(name), trust_remote_code=False)


def load_language_model(model: Any, tokenizer: Any = None) -> tuple[Any, Any]:
    """A causal language model, in fp32, and its tokenizer; each name is loaded once."""
    if isinstance(model, str):
        loaded, own = _named_language_model(model)
        return loaded, own if tokenizer is None else tokenizer
    if model is None or tokenizer is None:
        name = "model" if model is None else "tokenizer"
        raise ValueError(f"{name} is missing. Pass model='openai-community/gpt2', or a model with its tokenizer.")
    return model, tokenizer


def caption_features(captions: Sequence[str], text_features: Any, scorer: Any, prefix: str = "") -> Tensor:
    """Features of captions `(N, D)`, on the CPU: `text_features`, or the scorer's."""
    if captions and isinstance(captions[0], list):
        if text_features is not None:
            raise ValueError("predictions are features, and text_features are given too. Pass one of them.")
        return as_features(list(captions), "predictions")
    texts = check_captions(captions, "predictions")
    if text_features is None:
        # On the CPU, like features that are passed.
        return resolve_scorer(scorer).text_features([prefix + text for text in texts]).cpu()
    if len(text_features) != len(texts):
        raise ValueError(f"{len(texts)} predictions and {len(text_features)} rows of text_features: pass one each.")
    return as_features(text_features, "text_features").cpu()


def reference_features_of(
    references: Sequence[Any] | None, given: Sequence[Any] | None, scorer: Any, prefix: str
) -> list[Tensor] | None:
    """Features of the reference captions, N tensors `(R, D)`: of those passed, or of a references column with texts."""
    name = "reference_captions"
    if given is None:
        if not (
            references and isinstance(references[0], list) and references[0] and isinstance(references[0][0], str)
        ):
            return None
        given, name = references, "references"
    groups = check_groups(given, name)
    flat = resolve_scorer(scorer).text_features([prefix + text for group in groups for text in group])
    return list(flat.cpu().split(list(map(len, groups))))


def scorer_signature(scorer: Any) -> str:
    """The signature of a scorer; None without one."""
    return "" if scorer is None else str(resolve_scorer(scorer).signature)


def truncation(captions: Sequence[Any], scorer: Any, prefix: str = "") -> dict[str, Any]:
    """Number of captions that the scorer truncates."""
    if scorer is None or not isinstance(captions[0], str):
        return {}
    count = int(resolve_scorer(scorer).count_truncated([prefix + caption for caption in captions]))
    return {"num_truncated": count, "truncated_share": count / len(captions)}


# Number of images opened at a time.
_CHUNK = 256


def image_features_of(images: Iterable[Any], scorer: Any, name: str = "images") -> Tensor:
    """Features `(M, D)` of images by a scorer, on the CPU; a few images are opened at a time.

    Equal images are encoded once and get bit-equal features, so that duplicates in a pool tie; the rounding of a model
    depends on the position in a batch.
    """
    from hf_captionrl.data.images import open_image

    resolved, parts, opened = resolve_scorer(scorer), [], []
    row_of: dict[str, int] = {}
    rows = []
    for i, image in enumerate(images):
        try:
            picture = open_image(image)
        except ValueError as error:
            raise ValueError(f"{name}[{i}]: {error}") from error
        key = retrieval.image_hash(picture)
        if key not in row_of:
            row_of[key] = len(row_of)
            opened.append(picture)
        rows.append(row_of[key])
        if len(opened) == _CHUNK:
            parts.append(resolved.image_features(opened))
            opened = []
    if opened:
        parts.append(resolved.image_features(opened))
    if not parts:
        raise ValueError(f"{name} is empty. Pass at least one image.")
    return torch.cat(parts).cpu()[rows]


def captions_and_pool(
    predictions: Sequence[Any],
    references: Sequence[Any] | None,
    text_features: Any,
    scorer: Any,
    prefix: str,
    **pool: Any,
) -> tuple[Tensor, Tensor, Sequence[int] | None]:
    """Features of the captions `(N, D)`, the pool `(M, D)`, and the row of each caption's image, see [`image_pool`]."""
    text = as_features(caption_features(predictions, text_features, scorer, prefix), "text_features")
    return text, *image_pool(references, scorer=scorer, dtype=text.dtype, **pool)


def image_pool(
    references: Sequence[Any] | None,
    *,
    images: Any,
    image_features: Any,
    image_ids: Sequence[str] | None,
    targets: Sequence[int] | None,
    scorer: Any,
    dtype: torch.dtype,
) -> tuple[Tensor, Sequence[int] | None]:
    """The pool of images `(M, D)`, on the CPU, and the row of each caption's image, None for caption i and image i.

    The pool is `image_features` (a matrix, a mapping of ids to vectors, or a `FeatureCache`), else `images` (or a mapping of
    ids), else the references: images, vectors of `dtype`, or paths (equal paths are one image). With a separate pool,
    references are ids (of `image_ids`, the mapping or the cache), row numbers, or omitted.
    """
    known = [] if is_missing(references) else list(references or ())
    if image_features is not None and images is not None:
        raise ValueError("images and image_features are both given. Pass one of them.")
    if targets is not None and len(known) and not isinstance(known[0], list):
        raise ValueError("targets and references both say which image each caption belongs to. Pass one of them.")
    pool = images if image_features is None else image_features
    if pool is None:
        if image_ids is not None:
            raise ValueError("image_ids name images of a pool, but there is none. Pass images or image_features.")
        features, rows = _pool_of_references(known, scorer, dtype)
        return features, targets if rows is None else rows
    ids = None if image_ids is None else list(image_ids)
    if isinstance(pool, Mapping):
        ids = list(pool) if ids is None else ids
        unknown = [i for i, name in enumerate(ids) if name not in pool]
        if unknown:
            first = unknown[0]
            raise ValueError(f"image_ids[{first}] is {ids[first]!r}, which the mapping lacks ({len(unknown)} such).")
        values = [pool[i] for i in ids]
        features = image_features_of(values, scorer) if image_features is None else _stack(values)
    elif image_features is None:
        features = image_features_of(images, scorer)
    elif hasattr(pool, "shape") or isinstance(pool, list | tuple):
        features = as_features(pool, "image_features").cpu()
    else:  # a FeatureCache, which has a length as well, but no shape
        name, asked = ("references", known) if ids is None else ("image_ids", ids)
        ids = list(dict.fromkeys(key for key in known if isinstance(key, str))) if ids is None else ids
        if not ids:
            raise ValueError("references must be ids of the feature store. Otherwise pass image_ids.")
        try:
            features = pool.get(ids).tensor()
        except KeyError as error:
            lacking = next((f"{name}[{i}]" for i, key in enumerate(asked) if key not in pool), name)
            raise ValueError(f"{lacking}: {error.args[0]}") from error
    if ids is not None and len(ids) != len(features):
        raise ValueError(f"{len(features)} images in the pool and {len(ids)} image_ids: pass one each.")
    return features, _rows_of(known, ids) if targets is None else targets


def _pool_of_references(known: Sequence[Any], scorer: Any, dtype: torch.dtype) -> tuple[Tensor, list[int] | None]:
    empty = next((i for i, row in enumerate(known) if isinstance(row, list) and not row), None)
    if empty is not None:
        raise ValueError(f"references[{empty}] is an empty list. Pass the features of an image, or leave the row out.")
    if not known or isinstance(known[0], int) or (isinstance(known[0], list) and isinstance(known[0][0], str)):
        raise ValueError(
            "there are no images. Pass them as references (images, paths, feature vectors), or as images= or "
            "image_features= and let references be their ids or rows."
        )
    if isinstance(known[0], list):
        return _stack(known, dtype), None
    if isinstance(known[0], str):
        paths = list(dict.fromkeys(known))
        return image_features_of(paths, scorer, "references"), _rows_of(known, paths)
    return image_features_of(known, scorer, "references"), None


def _stack(rows: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
    tensors = [torch.as_tensor(row, dtype=dtype, device="cpu") for row in rows]
    for i, row in enumerate(tensors):
        if row.shape != tensors[0].shape or row.ndim != 1:
            shapes = tuple(row.shape), tuple(tensors[0].shape)
            raise ValueError(f"image {i} has features of shape {shapes[0]}, the first {shapes[1]}. Use equal lengths.")
    return torch.stack(tensors)


def _rows_of(references: Sequence[Any], ids: Sequence[str] | None) -> list[int] | None:
    if not references or isinstance(references[0], list):
        return None  # omitted, or texts for another module of a combination
    if isinstance(references[0], int):
        return list(references)
    if not isinstance(references[0], str):
        raise ValueError("references are images, and a pool is given too. Pass one, or ids as references.")
    if ids is None:
        raise ValueError(
            f"references[0] is the id {references[0]!r}, but the pool has no ids. Pass image_ids; if references are captions, as in "
            "evaluate.combine, compute this metric alone."
        )
    row: dict[str, int] = {}
    for i, name in enumerate(ids):
        if row.setdefault(name, i) != i:
            raise ValueError(f"image_ids[{i}] is {name!r}, as is image_ids[{row[name]}]. Every id must be unique.")
    for i, name in enumerate(references):
        if name not in row:
            raise ValueError(f"references[{i}] is {name!r}, which is not an id of the pool of {len(row)} images.")
    return [row[name] for name in references]
