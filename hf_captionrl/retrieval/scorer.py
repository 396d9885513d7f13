"""Frozen image-text scorers, which map captions and images to unit vectors: CLIP, SigLIP and other dual encoders.

Legend: N captions, B images, T tokens, D features.
"""

from __future__ import annotations

import abc
import hashlib
import inspect
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.retrieval.feature_cache import model_fingerprint, tower_in_parts
from hf_captionrl.retrieval.ranking import unit_length
from hf_captionrl.utils.images import to_rgb
from hf_captionrl.utils.model_files import (
    TOKENIZER_FILES,
    check_complete,
    check_width,
    find_file,
    hub_name,
    load_image_processor,
    load_pretrained,
    model_path,
)

# The default token ids of a SigLIP lie outside its default vocabulary, of which transformers warns when it prints any SigLIP.
logging.getLogger("transformers.configuration_utils").addFilter(
    lambda record: "31999), got 4940" not in record.getMessage()
)

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


@runtime_checkable
class Scorer(Protocol):
    """A frozen image-text model. The similarity is `logit_scale * text_features @ image_features.T`, in fp32.

    Attributes:
        logit_scale: The model's factor on the cosine similarity (100 for OpenAI's CLIP), after the exponential.
        max_text_tokens: Longer captions are truncated; includes special tokens.
    """

    logit_scale: float
    max_text_tokens: int

    @property
    def signature(self) -> str:
        """`model@revision|dtype|...`: the model and the settings that computed a result."""
        ...

    def text_features(self, captions: Sequence[str]) -> Tensor:
        """N captions as unit vectors `(N, D)`, float32; empty captions are allowed, because a policy may generate them."""
        ...

    def image_features(self, images: Sequence[Image.Image]) -> Tensor:
        """B PIL images as unit vectors `(B, D)`, float32."""
        ...

    def count_truncated(self, captions: Sequence[str]) -> int:
        """Number of captions that are longer than `max_text_tokens`."""
        ...


@runtime_checkable
class TokenScorer(Scorer, Protocol):
    """A scorer that also returns the tokens of captions and their features, such as `HFScorer` and `OpenClipScorer`."""

    def count_tokens(self, captions: Sequence[str]) -> list[int]:
        """Number of tokens of each caption before truncation, including special tokens."""
        ...

    def token_features(self, captions: Sequence[str]) -> list[Tensor]:
        """Features of each token in the space of the image features: N tensors `(T, D)`, float32, not normalised.

        One row per token, of at most `max_text_tokens`, including start and end token. Raises ValueError if the model has no such features.
        """
        ...


class DualEncoder(TokenScorer, abc.ABC):
    """Base class of scorers with batching, freezing, precision and checks. Subclasses tokenise and run the model.

    The model is frozen, set to eval mode, cast and moved in place. Its weights may be fp16 or bf16; normalisation and results
    are fp32, also under autocast, because a similarity in bf16 has an error of 0.2 nats at scale 100.
    """

    canonical_text = ""
    """How captions are changed before the tokenizer, which may change more: "lower", or not at all."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        model_id: str,
        fingerprint: str,  # hash of weights, config and image processor
        commit: str | None = None,  # else the fingerprint is the revision
        logit_scale: float,
        max_text_tokens: int,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device | None = None,
        batch_size: int = 64,
        extra: Sequence[str] = (),  # more parts of the signature
    ):
        self._precision = str(dtype).removeprefix("torch.")
        if self._precision not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}. Use one of {list(_DTYPES)}.")
        self.dtype = _DTYPES[self._precision]
        if device is None:  # `current_device` is this process's GPU in a multi-process run
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.model: Any = model.requires_grad_(False).eval().to(device=self.device, dtype=self.dtype)
        self.model_id, self.fingerprint, self.revision = model_id, fingerprint, (commit or fingerprint)[:12]
        self.logit_scale, self.max_text_tokens = logit_scale, max_text_tokens
        self.batch_size, self.extra = batch_size, tuple(extra)

    @property
    def signature(self) -> str:
        name = f"{self.model_id}@{self.revision}"
        return "|".join((name, self._precision, f"text:{self.max_text_tokens}", *self.extra))

    @property
    def cache_revision(self) -> str:
        """Identifies everything that affects image features: weights, config, image processor and dtype."""
        return f"{self.fingerprint}|{self._precision}"

    def to(self, device: str | torch.device) -> DualEncoder:
        """Move the model; returns the same object."""
        self.device = torch.device(device)
        self.model.to(self.device)
        return self

    @abc.abstractmethod
    def _tokenize(self, captions: list[str]) -> list[dict[str, list[int]]]:
        """One dict of token lists per caption, truncated to `max_text_tokens` but with EOS."""

    @abc.abstractmethod
    def _num_tokens(self, captions: list[str]) -> list[int]:
        """Tokens of each caption before truncation."""

    @abc.abstractmethod
    def _encode_text(self, rows: list[dict[str, list[int]]]) -> Tensor:
        """Features of tokenised captions, not normalised."""

    @abc.abstractmethod
    def _encode_images(self, images: list[Image.Image]) -> Tensor:
        """Features of RGB images, not normalised."""

    def _encode_tokens(self, rows: list[dict[str, list[int]]]) -> Tensor:
        """Features `(N, T, D)` of the tokens of tokenised captions, padded to the longest, not normalised."""
        raise ValueError(f"{self.model_id} has features of captions, but not of their tokens. Use a CLIP model.")

    def text_features(self, captions: Sequence[str]) -> Tensor:
        """Captions as unit vectors on the device; equal captions are encoded once and have bit-equal features."""
        captions = _check_captions(captions)
        unique = {caption: i for i, caption in enumerate(dict.fromkeys(captions or [""]))}
        rows = self._tokenize(list(unique))
        # Batches of captions with similar lengths need little padding.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            parts = [self._encode_text([rows[i] for i in part]) for part in _batches(order, self.batch_size)]
        place = torch.tensor(order).argsort()  # of each caption in the batches
        index = place[torch.tensor([unique[caption] for caption in captions], dtype=torch.long)]  # (N,)
        features = torch.cat(parts)[index.to(self.device)]  # (N, D)
        return _unit(features, "caption", self.dtype)

    def image_features(self, images: Sequence[Image.Image]) -> Tensor:
        pictures = list(map(to_rgb, images))
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            # Without images, encode a grey square to get D.
            batches = list(_batches(pictures, self.batch_size)) or [[Image.new("RGB", (32, 32), "grey")]]
            features = torch.cat([self._encode_images(part) for part in batches])[: len(pictures)]  # (B, D)
        return _unit(features, "image", self.dtype)

    def count_truncated(self, captions: Sequence[str]) -> int:
        return sum(number > self.max_text_tokens for number in self.count_tokens(captions))

    def count_tokens(self, captions: Sequence[str]) -> list[int]:
        captions = _check_captions(captions)
        return self._num_tokens(captions) if captions else []

    def token_features(self, captions: Sequence[str]) -> list[Tensor]:
        """As [`TokenScorer.token_features`]; the last token has the direction of the caption."""
        rows = self._tokenize(texts) if (texts := _check_captions(captions)) else []
        parts: list[Tensor] = []
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            for part in _batches(rows, self.batch_size):
                encoded = self._encode_tokens(part).float()  # (B, T, D)
                parts += [features[: len(row["input_ids"])] for features, row in zip(encoded, part, strict=True)]
        return parts


def _batches(items: list[Any], size: int) -> list[list[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _check_captions(captions: Sequence[str]) -> list[str]:
    if isinstance(captions, str):
        raise ValueError(f"captions is the string {captions!r}, but must be a list of strings. Write [caption].")
    return list(captions)


def _unit(features: Tensor, what: str, dtype: torch.dtype) -> Tensor:
    features = features.float()
    largest = torch.linalg.vector_norm(features, ord=torch.inf, dim=1)
    good = torch.isfinite(largest) & (largest > 0)
    if not bool(good.all()):
        i = int((~good).nonzero()[0, 0])
        raise ValueError(
            f"The features of {what} {i} have norm {float(features[i].norm())} in {dtype}, but must be finite and not zero. Load the "
            "scorer with dtype='float32' or 'bfloat16'."
        )
    return unit_length(features)


# Text towers that pool at the last position and were trained without an attention mask; see HFScorer.
_FIXED_LENGTH = frozenset({"siglip", "siglip2", "siglip_text_model", "siglip2_text_model"})
# Text towers that pool at the highest token id if eos_token_id is 2 in the config.
_LEGACY_POOLING = frozenset(
    {"clip", "clip_text_model", "clipseg", "clipseg_text_model"}
    | {"xclip", "xclip_text_model", "groupvit", "groupvit_text_model"}
)


def _open_clip_scorer(*args: Any, **kwargs: Any) -> Scorer:
    from hf_captionrl.retrieval.open_clip_scorer import OpenClipScorer

    return OpenClipScorer(*args, **kwargs)


def load_scorer(name_or_path: Any, **kwargs: Any) -> Scorer:
    """Load a scorer.

    Args:
        name_or_path: Hub name or folder of a transformers dual encoder; a shipped scorer (`"scenes:siglip-held-out"`);
            `"open_clip:NAME@TAG"`, `"open_clip:hf-hub:..."` or a folder with `open_clip_config.json`; a model in
            memory; or a scorer, which is returned unchanged.
        **kwargs: Arguments of `HFScorer` or `OpenClipScorer`: `dtype`, `device`, `batch_size`, ...
    Returns:
        `Scorer`: `HFScorer` or `OpenClipScorer`.
    """
    if isinstance(name_or_path, torch.nn.Module):
        is_open_clip = hasattr(name_or_path, "encode_text") and hasattr(name_or_path, "encode_image")
        return _open_clip_scorer(name_or_path, **kwargs) if is_open_clip else HFScorer(name_or_path, **kwargs)
    if isinstance(name_or_path, (str, os.PathLike)) and name_or_path != "none":
        name = model_path(os.fspath(name_or_path))
        if name.startswith("open_clip:"):
            name, _, tag = name.removeprefix("open_clip:").partition("@")
            return _open_clip_scorer(name, tag or kwargs.pop("pretrained", None), **kwargs)
        if (Path(name) / "open_clip_config.json").is_file():
            return _open_clip_scorer(name, **kwargs)
        return HFScorer(name, **kwargs)
    if isinstance(name_or_path, Scorer):
        return name_or_path
    raise ValueError(f"{name_or_path!r} is not a scorer. Pass a model, its name or folder, or 'open_clip:NAME@TAG'.")


def assemble_scorer(vision_model: str, text_model: str, projection_dim: int | None = None) -> tuple[Any, Any]:
    """A `VisionTextDualEncoder` of two pretrained encoders with untrained projections, and its processor.

    `projection_dim` is by default the width of the text encoder, whose projection then begins as the identity.
    """
    import transformers

    names = model_path(vision_model), model_path(text_model)
    vision, text = (load_pretrained(transformers.AutoModel, name, dtype=torch.float32)[0] for name in names)
    vision, text = getattr(vision, "vision_model", vision), getattr(text, "text_model", text)
    for part, name in zip((vision, text), names, strict=True):
        check_width(part.config, name)
    size = projection_dim or text.config.hidden_size
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        vision.config, text.config, projection_dim=size
    )
    config.untrained = True  # for `captionrl train scorer`, which scales the projection of the images to the data
    model = transformers.VisionTextDualEncoderModel(config, vision_model=vision, text_model=text)
    with torch.no_grad():
        if size == text.config.hidden_size:
            model.text_projection.weight.copy_(torch.eye(size))
        model.logit_scale.fill_(3.2)
    processor = transformers.VisionTextDualEncoderProcessor(
        load_image_processor(names[0]),
        transformers.AutoTokenizer.from_pretrained(names[1], trust_remote_code=False),
    )
    return model.eval(), processor


class HFScorer(DualEncoder):
    """Scorer from any transformers model with `get_text_features` and `get_image_features`.

    Captions are padded to the longest in their batch. This is exact for causal text towers (CLIP) and for text towers
    with an attention mask. SigLIP is neither: it was trained with a fixed length and without a mask, and pools at the
    last position. Its captions are therefore always padded to the full length, and the mask is not passed.
    """

    def __init__(
        self,
        name_or_path_or_model: Any,  # a model is frozen, cast and moved in place
        processor: Any = None,  # with `tokenizer` and `image_processor`; required for a model in memory
        *,
        revision: str | None = None,  # branch, tag or commit on the Hub
        dtype: str | torch.dtype = "float32",  # of the weights; results are always fp32
        device: str | torch.device | None = None,  # None: that of a model in memory, or the GPU if there is one
        batch_size: int = 64,  # captions or images per forward pass
        logit_scale: float | None = None,  # factor on the cosine similarity, if the model has none
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
                f"{type(model).__name__} lacks get_text_features or get_image_features. Use a dual encoder, such as CLIP or SigLIP."
            )
        self.tokenizer: Any = getattr(processor, "tokenizer", None)
        self.image_processor: Any = getattr(processor, "image_processor", None)
        if self.tokenizer is None or self.image_processor is None:
            raise ValueError(
                f"The processor of {model_id} is {type(processor).__name__}, but a scorer needs a tokenizer and an image_processor. "
                "Pass processor=."
            )
        self._fixed = _text_config(model).model_type in _FIXED_LENGTH
        # SigLIP 2, which was trained on lower-case text; transformers lowers it only for `model_type: siglip2`.
        classes = f"{type(self.tokenizer).__name__} {self.tokenizer.init_kwargs.get('tokenizer_class')}"
        self.canonical_text = "lower" if self._fixed and "Gemma" in classes else ""
        self.padding = "max_length" if self._fixed else "longest"
        _check_pooling(model, self.tokenizer)

        images = f"{type(self.image_processor).__name__} {self.image_processor.to_json_string()}"
        named = hashlib.blake2b(f"{model_id}@{commit} {images}".encode(), digest_size=16).hexdigest()
        fingerprint = named if commit else model_fingerprint(model, images)
        super().__init__(
            model,
            model_id=model_id,
            fingerprint=fingerprint,
            commit=commit,
            # Before the cast: in bf16, ln(100) is rounded, and the scale would be 99.5 or 102.
            logit_scale=_own_logit_scale(model) if logit_scale is None else float(logit_scale),
            max_text_tokens=_text_positions(model, self.tokenizer),
            dtype=dtype,
            device=device,
            batch_size=batch_size,
            extra=(
                *[f"case:{self.canonical_text}"] * bool(self.canonical_text),
                *(f"pad:{self.padding}", f"transformers:{transformers.__version__}"),
            ),
        )
        self._image_arguments = frozenset(inspect.signature(model.get_image_features).parameters)

    def _rows(self, captions: list[str]) -> dict[str, list[list[int]]]:
        texts = [caption.lower() for caption in captions] if self.canonical_text == "lower" else captions
        return dict(self.tokenizer(texts, truncation=False, padding=False, verbose=False))

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
            cut = len(ids) - len(special.intersection(ids[-1:]))  # keep EOS, at which the text towers pool
            start = cut if len(ids) <= limit else limit - (len(ids) - cut)
            rows.append({name: list(values[i][:start]) + list(values[i][cut:]) for name, values in encoded.items()})
        return rows

    def _encode_text(self, rows: list[dict[str, list[int]]]) -> Tensor:
        length = self.max_text_tokens if self.padding == "max_length" else max(len(row["input_ids"]) for row in rows)
        left = getattr(self.tokenizer, "padding_side", "right") == "left"
        return _pooled(self.model.get_text_features(**self._padded(rows, length, left)))

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

        def padded(name: str, row: list[int]) -> list[int]:
            blank = [fill.get(name, 0)] * (length - len(row))  # 0: not attended, or token type 0
            return blank + row if left else row + blank

        return {
            name: torch.tensor([padded(name, row[name]) for row in rows], device=self.device)  # (N, T)
            for name in rows[0]
        }

    def _encode_images(self, images: list[Image.Image]) -> Tensor:
        batch = self.image_processor(images=images, return_tensors="pt")
        inputs = {
            name: value.to(self.device, self.dtype if value.is_floating_point() else None)
            for name, value in batch.items()
            if name in self._image_arguments
        }
        if inputs.keys() == {"pixel_values"}:
            return tower_in_parts(
                lambda pixels: _pooled(self.model.get_image_features(pixels)), inputs["pixel_values"]
            )
        return _pooled(self.model.get_image_features(**inputs))


def _from_pretrained(name: str, revision: str | None, *, with_processor: bool) -> tuple[Any, Any]:
    from transformers import AutoModel, AutoProcessor

    if not Path(name).is_dir() and (hub_name(name) is None or name.startswith((".", "~"))):
        raise FileNotFoundError(
            f"The scorer {name!r} is not a folder. Use a folder with config.json, model.safetensors and the files of the "
            "processor, a Hub name, or 'open_clip:NAME@TAG'."
        )
    # "auto" keeps the stored precision, because the logit scale must be read before a cast.
    model, missing = load_pretrained(AutoModel, name, revision=revision, dtype="auto")
    check_complete(name, model, missing)
    if not with_processor:
        return model, None
    if not any(find_file(name, file, revision) for file in TOKENIZER_FILES):
        raise FileNotFoundError(f"The scorer {name!r} has no tokenizer. Save it there with processor.save_pretrained.")
    return model, AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=False)


def _pooled(output: Any) -> Tensor:
    # transformers 4 returns the tensor, transformers 5 an output object with the tensor.
    return output if isinstance(output, Tensor) else output.pooler_output


def _text_config(model: Any) -> Any:
    return getattr(model.config, "text_config", None) or model.config


def _text_positions(model: Any, tokenizer: Any) -> int:
    """Longest input of the text tower: the smaller of its number of positions and the tokenizer's limit."""
    config = _text_config(model)
    positions = getattr(config, "max_position_embeddings", None)
    if positions and config.model_type in _LEGACY_POOLING:
        return int(positions)  # CLIP is trained at all of them; LongCLIP keeps a tokenizer whose limit is 77
    if positions is not None and any(part in config.model_type for part in ("roberta", "altclip", "camembert")):
        positions -= (config.pad_token_id or 0) + 1  # these families number positions from pad_token_id + 1
    return min(positions or 10**6, getattr(tokenizer, "model_max_length", None) or 10**6)


def _own_logit_scale(model: Any) -> float:
    if getattr(model, "logit_scale", None) is not None:
        return float(model.logit_scale.detach().double().exp())
    if getattr(model, "temperature", None) is not None:  # ALIGN divides by it
        return 1.0 / float(model.temperature)
    raise ValueError(f"{type(model).__name__} has no logit_scale. Pass logit_scale=, for example 100.0.")


def _check_pooling(model: Any, tokenizer: Any) -> None:
    """Raise if a text tower would not pool at EOS: many captions would silently get the same features."""
    configured = getattr(getattr(model, "text_model", None), "eos_token_id", None)
    if not isinstance(configured, int):
        return  # does not pool at EOS
    probe = tokenizer(["a"])["input_ids"][0]
    position = probe.index(configured) if configured in probe else 0
    if configured == 2 and _text_config(model).model_type in _LEGACY_POOLING:
        # As in OpenAI's checkpoints, whose EOS is the highest id of the vocabulary.
        position = probe.index(highest) if (highest := max(tokenizer.get_vocab().values())) in probe else 0
    if position != len(probe) - 1:
        raise ValueError(
            f"The text tower pools a caption at the first token {configured} (eos_token_id of the config; 2 means the highest id), but "
            f"'a' becomes {probe}, of which position {position} would be pooled. Set that to the tokenizer's EOS, or let the tokenizer "
            "add EOS."
        )
