"""The pool of images that captions retrieve, from images, features, ids or references.

Legend: N captions, M images of the pool, D features.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.data.images import open_image
from hf_captionrl.metrics.caption_checks import check_captions, check_groups
from hf_captionrl.metrics.evaluate_modules.metric import is_missing
from hf_captionrl.retrieval import image_hash
from hf_captionrl.retrieval.ranking import as_features
from hf_captionrl.retrieval.scorer import load_scorer
from hf_captionrl.utils.model_files import load_language_model as read_language_model
from hf_captionrl.utils.model_files import model_path

# --- Converts the user's arguments to those of `hf_captionrl.metrics`: models by name, features and groups of captions ---
# Legend: N captions, B images, R references of a caption, D features.


@functools.lru_cache(maxsize=2)
def _named_scorer(name: str) -> Any:
    return load_scorer(name)


def resolve_scorer(scorer: Any) -> Any:
    """A scorer from its name; each name is loaded once."""
    if scorer is None:
        raise ValueError(
            "scorer is missing: it computes the features of captions and images. Pass for instance "
            "scorer='openai/clip-vit-base-patch32', or text_features and image_features that you have."
        )
    return _named_scorer(scorer) if isinstance(scorer, str) else load_scorer(scorer)


@functools.lru_cache(maxsize=2)
def _named_language_model(name: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoTokenizer

    model = read_language_model(name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(model_path(name), trust_remote_code=False)


def load_language_model(model: Any, tokenizer: Any = None) -> tuple[Any, Any]:
    """A causal language model, in fp32, and its tokenizer; each name is loaded once."""
    if isinstance(model, str):
        loaded, own = _named_language_model(model)
        return loaded, own if tokenizer is None else tokenizer
    if model is None or tokenizer is None:
        raise ValueError(
            f"{'model' if model is None else 'tokenizer'} is missing. Pass model='openai-community/gpt2', or a model "
            "together with its tokenizer."
        )
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


def reference_texts(references: Sequence[Any] | None, given: Sequence[Any] | None) -> list[list[str]] | None:
    """Reference captions: those passed, or the references column if it holds texts."""
    if given is not None:
        return check_groups(given, "reference_captions")
    if references and isinstance(references[0], list) and references[0] and isinstance(references[0][0], str):
        return check_groups(references, "references")
    return None


def grouped_features(texts: Sequence[Sequence[str]], scorer: Any, prefix: str = "") -> list[Tensor]:
    """Features of several texts for each caption, on the CPU: N tensors `(R, D)`."""
    flat = resolve_scorer(scorer).text_features([prefix + text for group in texts for text in group])
    return list(flat.cpu().split([len(group) for group in texts]))


def scorer_signature(scorer: Any) -> str:
    """The signature of a scorer; None without one."""
    return "" if scorer is None else str(resolve_scorer(scorer).signature)


def truncation(captions: Sequence[Any], scorer: Any, prefix: str = "") -> dict[str, Any]:
    """Number of captions that the scorer truncates."""
    if scorer is None or not isinstance(captions[0], str):
        return {}
    count = int(resolve_scorer(scorer).count_truncated([prefix + caption for caption in captions]))
    return {"num_truncated": count, "truncated_share": count / len(captions)}


# --- The pool of images that captions retrieve, from images, features, ids or references -----------------------------

# Number of images opened at a time.
_CHUNK = 256


def image_features_of(images: Iterable[Any], scorer: Any, name: str = "images") -> Tensor:
    """Features of images by a scorer, on the CPU; a few images are opened at a time.

    Equal images are encoded once and get bit-equal features, so that duplicates in a pool tie; the rounding of a model
    depends on the position in a batch.

    Returns `(M, D)`.
    """
    resolved, parts, opened = resolve_scorer(scorer), [], []
    row_of: dict[str, int] = {}
    rows = []
    for i, image in enumerate(images):
        try:
            picture = open_image(image)
        except ValueError as error:
            raise ValueError(f"{name}[{i}]: {error}") from error
        key = image_hash(picture)
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


def image_pool(
    references: Sequence[Any] | None,
    *,
    images: Any = None,
    image_features: Any = None,
    image_ids: Sequence[str] | None = None,
    targets: Sequence[int] | None = None,
    scorer: Any = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Sequence[int] | None]:
    """The pool of images, on the CPU, and which of them each caption belongs to.

    The pool is `image_features` (a matrix, a mapping of ids, or a `FeatureCache`), else `images`, else the references:
    images, vectors, or paths (equal paths are one image). With a separate pool, references are ids (of `image_ids`, the
    mapping or the store), row numbers, or omitted (caption i belongs to image i).

    Args:
        image_features: `(M, D)` features, a mapping of ids to vectors, or a store with `get(ids)`.
        dtype: Dtype of vectors that were stored as references.

    Returns:
        `tuple`: Features `(M, D)`, and N row numbers or `None`.
    """
    known = [] if is_missing(references) else list(references or ())
    if image_features is not None and images is not None:
        raise ValueError("images and image_features are both given. Pass one of them.")
    if targets is not None and len(known) and not isinstance(known[0], list):
        raise ValueError("targets and references both say which image each caption belongs to. Pass one of them.")
    pool = images if image_features is None else image_features
    if isinstance(pool, Mapping):
        ids = list(pool) if image_ids is None else list(image_ids)
        unknown = [i for i, name in enumerate(ids) if name not in pool]
        if unknown:
            first = unknown[0]
            raise ValueError(f"image_ids[{first}] is {ids[first]!r}, which the mapping lacks ({len(unknown)} such).")
        values = [pool[i] for i in ids]
        stacked = image_features_of(values, scorer) if image_features is None else _stack(values)
        return stacked, _rows_of(known, ids) if targets is None else targets
    if image_features is not None and not _is_matrix(image_features):
        ids = list(image_ids) if image_ids is not None else list(dict.fromkeys(k for k in known if isinstance(k, str)))
        if not ids:
            raise ValueError("references must be ids of the feature store. Otherwise pass image_ids.")
        try:
            features = image_features.get(ids)
        except KeyError as error:
            name, asked = ("references", known) if image_ids is None else ("image_ids", ids)
            lacking = next((i for i, key in enumerate(asked) if key not in image_features), None)
            where = name if lacking is None else f"{name}[{lacking}]"
            raise ValueError(f"{where}: {error.args[0]}") from error
        return features.tensor(), _rows_of(known, ids) if targets is None else targets
    if pool is not None:
        features = (
            image_features_of(images, scorer)
            if image_features is None
            else as_features(image_features, "image_features").cpu()
        )
        if image_ids is not None and len(image_ids) != len(features):
            raise ValueError(f"{len(features)} images in the pool and {len(image_ids)} image_ids: pass one each.")
        return features, _rows_of(known, image_ids) if targets is None else targets
    if image_ids is not None:
        raise ValueError("image_ids name images of a pool, but there is none. Pass images or image_features.")
    empty = next((i for i, row in enumerate(known) if isinstance(row, list) and not row), None)
    if empty is not None:
        raise ValueError(f"references[{empty}] is an empty list. Pass the features of an image, or leave the row out.")
    if not known or isinstance(known[0], int) or (isinstance(known[0], list) and isinstance(known[0][0], str)):
        raise ValueError(
            "there are no images. Pass them as references (images, paths, feature vectors), or as images= or "
            "image_features= and let references be their ids or rows."
        )
    if isinstance(known[0], list):
        return _stack(known, dtype), targets
    if isinstance(known[0], str):
        paths = list(dict.fromkeys(known))
        return image_features_of(paths, scorer, "references"), _rows_of(known, paths)
    return image_features_of(known, scorer, "references"), targets


def _is_matrix(features: Any) -> bool:
    # A FeatureCache has a length as well, but no shape.
    return hasattr(features, "shape") or isinstance(features, list | tuple)


def _stack(rows: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
    tensors = [torch.as_tensor(row, dtype=dtype, device="cpu") for row in rows]
    for i, row in enumerate(tensors):
        if row.shape != tensors[0].shape or row.ndim != 1:
            raise ValueError(
                f"image {i} has features of shape {tuple(row.shape)}, the first {tuple(tensors[0].shape)}: all must "
                "be vectors of one length."
            )
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
            f"references[0] is the id {references[0]!r}, but the pool has no ids. Pass image_ids, one per row."
        )
    row: dict[str, int] = {}
    for i, name in enumerate(ids):
        if row.setdefault(name, i) != i:
            raise ValueError(f"image_ids[{i}] is {name!r}, as is image_ids[{row[name]}]. Every id must be unique.")
    for i, name in enumerate(references):
        if name not in row:
            raise ValueError(f"references[{i}] is {name!r}, which is not an id of the pool of {len(row)} images.")
    return [row[name] for name in references]


def target_features(pool: Any, rows: Sequence[int] | None) -> Tensor:
    """Features `(N, D)` of the image of each caption, from the pool's features `(M, D)`."""
    features = torch.as_tensor(pool)
    if rows is None:
        return features
    for i, row in enumerate(rows):
        if not 0 <= row < len(features):
            raise ValueError(f"caption {i} belongs to image {row}, but the pool has {len(features)} images, from 0.")
    return features[torch.as_tensor(rows)]
