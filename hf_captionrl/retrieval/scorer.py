"""Frozen image-text scorers: CLIP, SigLIP and other dual encoders of transformers; loads any scorer by name.

Legend: N captions, T tokens.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.checkpoints.files import TOKENIZER_FILES, check_json_files, find_file, hub_name
from hf_captionrl.checkpoints.loading import check_complete, load_pretrained
from hf_captionrl.checkpoints.shipped_models import model_path
from hf_captionrl.checkpoints.weights import usable_revision
from hf_captionrl.retrieval.content_hashes import model_fingerprint
from hf_captionrl.retrieval.open_clip_scorer import OpenClipScorer
from hf_captionrl.retrieval.scorer_base import DualEncoder, Scorer, TokenScorer

__all__ = ["HFScorer", "OpenClipScorer", "Scorer", "TokenScorer", "load_scorer"]

logger = logging.getLogger(__name__)

# Text towers that pool at the last position and were trained without an attention mask; see HFScorer.
_FIXED_LENGTH = frozenset({"siglip", "siglip2", "siglip_text_model", "siglip2_text_model"})
# Text towers that pool at the highest token id if eos_token_id is 2 in the config.
_LEGACY_POOLING = frozenset(
    {"clip", "clip_text_model", "clipseg", "clipseg_text_model"}
    | {"xclip", "xclip_text_model", "groupvit", "groupvit_text_model"}
)


def load_scorer(name_or_path: Any, **kwargs: Any) -> Scorer:
    """Load a scorer.

    Args:
        name_or_path: Hub name or folder of a transformers dual encoder; a shipped scorer (`"scenes:siglip-held-out"`);
            `"open_clip:NAME@TAG"`, `"open_clip:hf-hub:..."` or a folder with `open_clip_config.json`; a model in
            memory; or a scorer, which is returned unchanged.
        **kwargs: Arguments of `HFScorer` or `OpenClipScorer`: `dtype`, `device`, `batch_size`, ...

    Returns:
        `Scorer`: `HFScorer` or `OpenClipScorer`.

    Raises:
        FileNotFoundError: If there is no such model, or it has no weights in safetensors.
        ValueError: If the model is not an image-text dual encoder, or lacks weights.
    """
    if isinstance(name_or_path, torch.nn.Module):
        is_open_clip = hasattr(name_or_path, "encode_text") and hasattr(name_or_path, "encode_image")
        return OpenClipScorer(name_or_path, **kwargs) if is_open_clip else HFScorer(name_or_path, **kwargs)
    if isinstance(name_or_path, (str, os.PathLike)):
        name = model_path(os.fspath(name_or_path))
        if name.startswith("open_clip:"):
            name, _, tag = name.removeprefix("open_clip:").partition("@")
            return OpenClipScorer(name, tag or kwargs.pop("pretrained", None), **kwargs)
        if (Path(name) / "open_clip_config.json").is_file():
            return OpenClipScorer(name, **kwargs)
        return HFScorer(name, **kwargs)
    if isinstance(name_or_path, Scorer):
        return name_or_path
    raise ValueError(
        f"{name_or_path!r} is not a scorer. Pass a name or folder of a model, 'open_clip:NAME@TAG', or a model."
    )


class HFScorer(DualEncoder):
    """Scorer from any transformers model with `get_text_features` and `get_image_features`.

    Captions are padded to the longest in their batch. This is exact for causal text towers (CLIP) and for text towers
    with an attention mask. SigLIP is neither: it was trained with a fixed length and without a mask, and pools at the
    last position. Its captions are therefore always padded to the full length, and the mask is not passed.

    Args:
        name_or_path_or_model: Hub name, folder, or a model (which is frozen, cast and moved in place).
        processor: Processor with `tokenizer` and `image_processor`; required for a model in memory.
        revision: Branch, tag or commit on the Hub.
        dtype: Data type of the weights; results are always fp32.
        device: By default the GPU if there is one, or the device of a model in memory.
        batch_size: Captions or images per forward pass.
        padding: `"longest"`, `"max_length"`, or `"auto"` as described above.
        max_text_tokens: Lower limit for truncation than that of the model.
        logit_scale: Factor on the cosine similarity, if the model has none.
        allow_legacy_pooling: Accept a CLIP with `eos_token_id == 2` in its config although EOS is not the highest id.
            transformers pools such a model at the highest token id, so the words after that token are ignored.

    Raises:
        ValueError: If the model is not a dual encoder, weights are missing, the processor lacks a part, or the model
            would not pool at EOS.
        FileNotFoundError: If there is no such model.
    """

    def __init__(
        self,
        name_or_path_or_model: Any,
        processor: Any = None,
        *,
        revision: str | None = None,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device | None = None,
        batch_size: int = 64,
        padding: Literal["auto", "longest", "max_length"] = "auto",
        max_text_tokens: int | None = None,
        logit_scale: float | None = None,
        allow_legacy_pooling: bool = False,
    ):
        import transformers

        commit = None
        if isinstance(name_or_path_or_model, torch.nn.Module):
            model, model_id = name_or_path_or_model, type(name_or_path_or_model).__name__
            device = device if device is not None else next(model.parameters()).device
        else:
            name = model_path(os.fspath(name_or_path_or_model))
            model, loaded = _from_pretrained(name, revision, with_processor=processor is None)
            processor = processor if processor is not None else loaded
            is_folder = Path(name).is_dir()
            model_id = Path(name).resolve().name if is_folder else name  # the path is not portable
            commit = None if is_folder else getattr(model.config, "_commit_hash", None)
        if not (hasattr(model, "get_text_features") and hasattr(model, "get_image_features")):
            raise ValueError(
                f"{type(model).__name__} is not an image-text dual encoder: it lacks get_text_features or "
                "get_image_features. Use CLIP, SigLIP or another contrastive model as scorer."
            )
        self.tokenizer: Any = getattr(processor, "tokenizer", None)
        self.image_processor: Any = getattr(processor, "image_processor", None)
        if self.tokenizer is None or self.image_processor is None:
            raise ValueError(
                f"The processor of {model_id} is {type(processor).__name__}, but a scorer needs a tokenizer and an "
                "image_processor. Pass processor=, for example CLIPProcessor(image_processor, tokenizer)."
            )
        if padding not in ("auto", "longest", "max_length"):
            raise ValueError(f"padding is {padding!r}. Use 'auto', 'longest' or 'max_length'.")
        self._fixed = _text_config(model).model_type in _FIXED_LENGTH
        self.padding = ("max_length" if self._fixed else "longest") if padding == "auto" else padding
        self._positions = _text_positions(model, self.tokenizer)
        limit = self._positions if max_text_tokens is None else max_text_tokens
        if not 2 <= limit <= self._positions:
            raise ValueError(f"max_text_tokens is {limit}, but must be between 2 and the model's {self._positions}.")
        _check_pooling(model, self.tokenizer, allow_legacy_pooling)

        images = f"{type(self.image_processor).__name__} {self.image_processor.to_json_string()}"
        if commit:
            fingerprint = hashlib.blake2b(f"{model_id}@{commit} {images}".encode(), digest_size=16).hexdigest()
        else:
            fingerprint = model_fingerprint(model, images)
        super().__init__(
            model,
            model_id=model_id,
            fingerprint=fingerprint,
            revision=(commit or fingerprint)[:12],
            # Before the cast: in bf16, ln(100) is rounded, and the scale would be 99.5 or 102.
            logit_scale=_own_logit_scale(model) if logit_scale is None else float(logit_scale),
            max_text_tokens=limit,
            dtype=dtype,
            device=device,
            batch_size=batch_size,
            extra=(f"pad:{self.padding}", f"transformers:{transformers.__version__}"),
        )
        self._image_arguments = frozenset(inspect.signature(model.get_image_features).parameters)

    def _rows(self, captions: list[str]) -> dict[str, list[list[int]]]:
        return dict(self.tokenizer(captions, truncation=False, padding=False, verbose=False))

    def _num_tokens(self, captions: list[str]) -> list[int]:
        return [len(ids) for ids in self._rows(captions)["input_ids"]]

    def _tokenize(self, captions: list[str]) -> list[dict[str, list[int]]]:
        encoded = self._rows(captions)
        if self._fixed:
            encoded = {"input_ids": encoded["input_ids"]}
        special = set(self.tokenizer.all_special_ids)
        limit = self.max_text_tokens
        rows = []
        for i, ids in enumerate(encoded["input_ids"]):
            row = {name: list(values[i]) for name, values in encoded.items()}
            if len(ids) > limit:
                # Keep EOS, at which the text towers pool.
                kept = 1 if ids[-1] in special else 0
                row = {name: r[: limit - kept] + r[len(r) - kept :] for name, r in row.items()}
            rows.append(row)
        return rows

    def _encode_text(self, rows: list[dict[str, list[int]]]) -> Tensor:
        length = self._positions if self.padding == "max_length" else max(len(row["input_ids"]) for row in rows)
        left = getattr(self.tokenizer, "padding_side", "right") == "left"
        return _pooled(self.model.get_text_features(**self._padded(rows, length, left)), "get_text_features")

    def _encode_tokens(self, rows: list[dict[str, list[int]]]) -> Tensor:
        tower, projection = (getattr(self.model, name, None) for name in ("text_model", "text_projection"))
        if self._fixed or tower is None or not isinstance(projection, torch.nn.Linear):
            return super()._encode_tokens(rows)
        # Pad on the right, so that the tokens of a caption come first; causal towers ignore what follows.
        batch = self._padded(rows, max(len(row["input_ids"]) for row in rows), left=False)
        return projection(tower(**batch).last_hidden_state)

    def _padded(self, rows: list[dict[str, list[int]]], length: int, left: bool) -> dict[str, Tensor]:
        pad = self.tokenizer.pad_token_id
        fill = {"input_ids": pad if pad is not None else self.tokenizer.eos_token_id or 0}
        batch = {}
        for name in rows[0]:
            padded = []
            for row in rows:
                blank = [fill.get(name, 0)] * (length - len(row[name]))  # 0: not attended, or token type 0
                padded.append(blank + row[name] if left else row[name] + blank)
            batch[name] = torch.tensor(padded, device=self.device)  # (N, T)
        return batch

    def _encode_images(self, images: list[Image.Image]) -> Tensor:
        batch = self.image_processor(images=images, return_tensors="pt")
        inputs = {}
        for name, value in batch.items():
            if name in self._image_arguments:
                inputs[name] = value.to(self.device, self.dtype if value.is_floating_point() else None)
        return _pooled(self.model.get_image_features(**inputs), "get_image_features")


def _from_pretrained(name: str, revision: str | None, *, with_processor: bool) -> tuple[Any, Any]:
    from transformers import AutoModel, AutoProcessor

    _check_place(name)
    revision = usable_revision(name, revision)
    # "auto" keeps the stored precision, because the logit scale must be read before a cast.
    model, missing = load_pretrained(AutoModel, name, revision=revision, dtype="auto")
    check_complete(name, model, missing)
    if not with_processor:
        return model, None
    check_json_files(name, revision)
    remedy = (
        "Use a folder or repository with the files of the tokenizer and the image processor (processor.save_pretrained), or "
        "'open_clip:NAME@TAG'."
    )
    if not any(find_file(name, file, revision) for file in TOKENIZER_FILES):
        raise FileNotFoundError(f"The scorer {name!r} has no tokenizer. {remedy}")
    try:
        processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=False)
        if getattr(processor, "tokenizer", None) is not None:
            processor.tokenizer(["a"])  # an incomplete tokenizer loads, but fails here
        return model, processor
    except Exception as error:
        said = " ".join(str(error).split())
        raise ValueError(f"The processor of the scorer {name!r} cannot be loaded ({said[:200]}). {remedy}") from error


def _check_place(name: str) -> None:
    if not Path(name).is_dir() and (hub_name(name) is None or name.startswith((".", "~"))):
        raise FileNotFoundError(
            f"The scorer {name!r} is not a folder. Use a folder with config.json, model.safetensors and the files of the "
            "processor, a Hub name, or 'open_clip:NAME@TAG'."
        )


def _pooled(output: Any, method: str) -> Tensor:
    # transformers 4 returns the tensor, transformers 5 an output object with the tensor.
    features = output if isinstance(output, Tensor) else getattr(output, "pooler_output", None)
    if features is None:
        raise ValueError(
            f"{method} returned {type(output).__name__} without pooler_output. Use a model with a pooled embedding."
        )
    return features


def _text_config(model: Any) -> Any:
    return getattr(model.config, "text_config", None) or model.config


def _text_positions(model: Any, tokenizer: Any) -> int:
    """Longest input of the text tower: the smaller of its number of positions and the tokenizer's limit."""
    config = _text_config(model)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and any(part in config.model_type for part in ("roberta", "altclip", "camembert")):
        positions -= (config.pad_token_id or 0) + 1  # these families number positions from pad_token_id + 1
    return min(positions or 10**6, getattr(tokenizer, "model_max_length", None) or 10**6)


def _own_logit_scale(model: Any) -> float:
    if getattr(model, "logit_scale", None) is not None:
        return float(model.logit_scale.detach().double().exp())
    if getattr(model, "temperature", None) is not None:  # ALIGN divides by it
        return 1.0 / float(model.temperature)
    raise ValueError(f"{type(model).__name__} has no logit_scale. Pass logit_scale=, for example 100.0.")


def _check_pooling(model: Any, tokenizer: Any, allow_legacy: bool) -> None:
    """Raise if a text tower would not pool at EOS: many captions would silently get the same features."""
    tower = getattr(model, "text_model", None)
    configured = getattr(tower, "eos_token_id", None)
    if not isinstance(configured, int):
        return  # does not pool at EOS
    probe = tokenizer(["a"])["input_ids"][0]
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if configured == 2 and _text_config(model).model_type in _LEGACY_POOLING:
        highest = max(tokenizer.get_vocab().values())
        if eos == highest and probe[-1] == eos:
            return  # as in OpenAI's checkpoints: EOS is the highest id, so both rules agree
        if allow_legacy:
            logger.warning("The text tower pools at the highest token id, which may not be EOS (%s).", eos)
            return
        raise ValueError(
            "The config has eos_token_id == 2, for which transformers pools a caption at its highest token id. EOS is "
            f"{eos}, but the highest id of the vocabulary is {highest}, so the rest of most captions would be ignored. Use "
            "an EOS id other than 2 in tokenizer and config (and train again), or pass allow_legacy_pooling=True."
        )
    position = probe.index(configured) if configured in probe else 0
    if position != len(probe) - 1:
        raise ValueError(
            f"The text tower pools at the first token {configured} (eos_token_id of the config), but the tokenizer "
            f"ends a caption with {probe[-1]}: 'a' becomes {probe}, and position {position} would be pooled. Set "
            "model.text_model.eos_token_id to the tokenizer's EOS, or let the tokenizer add EOS."
        )
