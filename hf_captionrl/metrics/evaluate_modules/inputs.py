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
from hf_captionrl.metrics.evaluate_modules.metric import is_missing, kind_of
from hf_captionrl.retrieval.ranking import as_features

_CHUNK = 256  # images opened at a time


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
        return _named_language_model(model)
    if model is None or tokenizer is None:
        name = "model" if model is None else "tokenizer"
        raise ValueError(f"{name} is missing. Pass model='openai-community/gpt2', or a model with its tokenizer.")
    return model, tokenizer


def scorer_signature(scorer: Any) -> str:
    """The signature of a scorer; empty without one."""
    return "" if scorer is None else str(resolve_scorer(scorer).signature)


def truncation(captions: Sequence[Any], scorer: Any, prefix: str = "") -> dict[str, Any]:
    """Number of captions that the scorer truncates."""
    if scorer is None or not isinstance(captions[0], str):
        return {}
    count = int(resolve_scorer(scorer).count_truncated([prefix + caption for caption in captions]))
    return {"num_truncated": count, "truncated_share": count / len(captions)}


# Features lie on the CPU, those of users and those of scorers.


def text_features_of(captions: Sequence[Any], text_features: Any, scorer: Any, prefix: str = "") -> Tensor:
    """Features of captions `(N, D)`: captions that are features, `text_features`, or the scorer's."""
    if isinstance(captions[0], list):
        return as_features(captions, "predictions")
    texts = check_captions(captions, "predictions")
    if text_features is None:
        return resolve_scorer(scorer).text_features([prefix + text for text in texts]).cpu()
    if len(text_features) != len(texts):
        raise ValueError(f"{len(texts)} predictions and {len(text_features)} rows of text_features: pass one each.")
    return as_features(text_features, "text_features").cpu()


def reference_features_of(groups: Any, scorer: Any, prefix: str) -> list[Tensor]:
    """Features of the reference captions of each image, N tensors `(R, D)`."""
    groups = check_groups(groups, "reference captions")
    flat = resolve_scorer(scorer).text_features([prefix + text for group in groups for text in group])
    return list(flat.cpu().split(list(map(len, groups))))


def image_features_of(images: Iterable[Any], scorer: Any, name: str = "images") -> Tensor:
    """Features `(M, D)` of images by a scorer; a few images are opened at a time.

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
    return torch.cat(parts).cpu()[rows]


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
    """The pool of images `(M, D)`, and the row of each caption's image, None for caption i and image i.

    The pool is `image_features` (a matrix, a mapping of ids to vectors, or a `FeatureCache`), else `images` (or a mapping of
    ids), else the references: images, vectors of `dtype`, or paths (equal paths are one image). With a separate pool,
    references are ids (of `image_ids`, the mapping or the cache), row numbers, or omitted.
    """
    rows = None if references is None or is_missing(references) else references
    kind = "missing" if rows is None else kind_of(rows[0])
    if image_features is not None and images is not None:
        raise ValueError("images and image_features are both given. Pass one of them.")
    if targets is not None and kind in ("text", "row"):
        raise ValueError("targets and references both say which image each caption belongs to. Pass one of them.")
    pool, ids = (images if image_features is None else image_features), image_ids
    if pool is None:
        if rows is None or kind not in ("image", "text", "vector"):
            raise ValueError(
                "there are no images. Pass them as references (images, paths, feature vectors), or as images= or "
                "image_features= and let references be their ids (image_ids) or rows."
            )
        if kind == "vector":
            return torch.as_tensor(as_features(list(rows), "references"), dtype=dtype), targets
        if kind == "image":
            return image_features_of(rows, scorer, "references"), targets
        ids = list(dict.fromkeys(rows))
        features = image_features_of(ids, scorer, "references")
    elif isinstance(pool, Mapping):
        ids = list(pool) if ids is None else list(ids)
        if unknown := [f"image_ids[{i}] is {name!r}" for i, name in enumerate(ids) if name not in pool]:
            raise ValueError(f"{unknown[0]}, which the mapping lacks ({len(unknown)} such).")
        values = [pool[name] for name in ids]
        is_encoded = image_features is not None
        features = as_features(values, "image_features").cpu() if is_encoded else image_features_of(values, scorer)
    elif image_features is None:
        features = image_features_of(images, scorer)
    elif hasattr(pool, "shape") or isinstance(pool, list | tuple):
        features = as_features(pool, "image_features").cpu()
    else:  # a FeatureCache
        ids = list(dict.fromkeys(rows or ())) if ids is None else list(ids)
        try:
            features = pool.get(ids).tensor()
        except KeyError as error:
            raise ValueError(f"image_ids or references: {error.args[0]}") from error
    if ids is not None and len(ids) != len(features):
        raise ValueError(f"{len(features)} images in the pool and {len(ids)} image_ids: pass one each.")
    if rows is None or kind in ("texts", "vector"):  # omitted, or for another module of a combination
        return features, targets
    if kind == "row":
        return features, list(rows)
    if kind != "text" or ids is None:
        raise ValueError(
            f"references[0] is {rows[0]!r:.60}, and a pool is given too. Pass its rows, or ids with image_ids= as references; if "
            "references are captions, as in evaluate.combine, compute this metric alone."
        )
    row_of = {name: row for row, name in enumerate(ids)}
    if len(row_of) < len(ids):
        raise ValueError("image_ids has a name twice. Every id must be unique.")
    for i, name in enumerate(rows):
        if name not in row_of:
            raise ValueError(f"references[{i}] is {name!r}, which is not an id of the pool of {len(ids)} images.")
    return features, [row_of[name] for name in rows]
