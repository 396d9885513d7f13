"""Interface and base class of scorers: frozen models that map captions and images to unit vectors.

Legend: N captions, B images, D features.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.retrieval.feature_checks import unit_length

__all__ = ["DualEncoder", "Scorer", "TokenScorer"]

_DTYPES = {
    **dict.fromkeys(("float32", "fp32", "torch.float32"), torch.float32),
    **dict.fromkeys(("float16", "fp16", "torch.float16"), torch.float16),
    **dict.fromkeys(("bfloat16", "bf16", "torch.bfloat16"), torch.bfloat16),
}


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
        """Captions as unit vectors.

        Args:
            captions: N captions; empty captions are allowed, because a policy may generate them.

        Returns:
            `torch.Tensor` of shape `(N, D)`: float32, each row of norm 1.
        """
        ...

    def image_features(self, images: Sequence[Image.Image]) -> Tensor:
        """Images as unit vectors.

        Args:
            images: B PIL images.

        Returns:
            `torch.Tensor` of shape `(B, D)`: float32, each row of norm 1.
        """
        ...

    def count_truncated(self, captions: Sequence[str]) -> int:
        """Number of captions that are longer than `max_text_tokens`.

        Args:
            captions: N captions.

        Returns:
            `int`: Between 0 and N.
        """
        ...


@runtime_checkable
class TokenScorer(Scorer, Protocol):
    """A scorer that also returns the tokens of captions and their features, such as `HFScorer` and `OpenClipScorer`."""

    def count_tokens(self, captions: Sequence[str]) -> list[int]:
        """Number of tokens of captions, before truncation.

        Args:
            captions: N captions.

        Returns:
            `list[int]`: N numbers, including special tokens.
        """
        ...

    def token_ids(self, captions: Sequence[str]) -> list[list[int]]:
        """Token ids of captions, after truncation.

        Args:
            captions: N captions.

        Returns:
            `list[list[int]]`: At most `max_text_tokens` ids per caption, including start and end token.
        """
        ...

    def token_features(self, captions: Sequence[str]) -> list[Tensor]:
        """Features of each token in the space of the image features.

        Args:
            captions: N captions.

        Returns:
            `list[torch.Tensor]`: N tensors of shape `(T, D)`, float32, not normalised; one row per id of `token_ids`.

        Raises:
            ValueError: If the model has no such features.
        """
        ...


class DualEncoder(TokenScorer, abc.ABC):
    """Base class of scorers with batching, freezing, precision and checks. Subclasses tokenise and run the model.

    The weights may be fp16 or bf16. Normalisation and results are fp32, also under autocast, because a similarity in
    bf16 has an error of 0.2 nats at scale 100.

    Args:
        model: Dual encoder; it is frozen, set to eval mode, cast and moved in place.
        model_id: Name in the signature.
        fingerprint: Hash of weights, config and image processor.
        revision: Short revision in the signature (a commit, or the beginning of the fingerprint).
        logit_scale: Factor on the cosine similarity.
        max_text_tokens: Longer captions are truncated.
        dtype: Data type of the weights: `"float32"`, `"float16"`, `"bfloat16"` or the torch dtype.
        device: By default the GPU if there is one.
        batch_size: Captions or images per forward pass.
        extra: More parts of the signature.

    Raises:
        ValueError: If `dtype` or `batch_size` is not supported.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        model_id: str,
        fingerprint: str,
        revision: str,
        logit_scale: float,
        max_text_tokens: int,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device | None = None,
        batch_size: int = 64,
        extra: Sequence[str] = (),
    ):
        if str(dtype) not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}. Use 'float32', 'float16' or 'bfloat16'.")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}. Use at least 1.")
        self.dtype = _DTYPES[str(dtype)]
        self.device = torch.device(device) if device is not None else _default_device()
        self.model: Any = model.requires_grad_(False).eval().to(device=self.device, dtype=self.dtype)
        self.model_id, self.fingerprint, self.revision = model_id, fingerprint, revision
        self.logit_scale = logit_scale
        self.max_text_tokens = max_text_tokens
        self.batch_size = batch_size
        self.extra = tuple(extra)

    @property
    def signature(self) -> str:
        precision = str(self.dtype).removeprefix("torch.")
        return "|".join((f"{self.model_id}@{self.revision}", precision, f"text:{self.max_text_tokens}", *self.extra))

    @property
    def cache_revision(self) -> str:
        """Identifies everything that affects image features: weights, config, image processor and dtype."""
        return f"{self.fingerprint}|{str(self.dtype).removeprefix('torch.')}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.signature!r}, device={str(self.device)!r})"

    def to(self, device: str | torch.device) -> DualEncoder:
        """Move the model.

        Args:
            device: The new device.

        Returns:
            `DualEncoder`: The same object.
        """
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
        raise ValueError(
            f"{self.model_id} has features of captions, but not of their tokens. Use a CLIP model, or compute the "
            "features of the tokens yourself."
        )

    def text_features(self, captions: Sequence[str]) -> Tensor:
        """Captions as unit vectors on the device; equal captions are encoded once and have bit-equal features."""
        captions = _check_captions(captions)
        unique = {caption: i for i, caption in enumerate(dict.fromkeys(captions or [""]))}
        rows = self._tokenize(list(unique))
        # Batches of captions with similar lengths need little padding.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            parts = [self._encode_text([rows[i] for i in part]) for part in _batches(order, self.batch_size)]
        place = torch.empty(len(order), dtype=torch.long)
        place[torch.tensor(order)] = torch.arange(len(order))
        index = place[torch.tensor([unique[caption] for caption in captions], dtype=torch.long)]  # (N,)
        features = torch.cat(parts)[index.to(self.device)]  # (N, D)
        return _unit(features, "caption", self.dtype)

    def image_features(self, images: Sequence[Image.Image]) -> Tensor:
        pictures = []
        for i, image in enumerate(images):
            if not isinstance(image, Image.Image):
                raise ValueError(f"images[{i}] is a {type(image).__name__}, but must be a PIL image. Open it first.")
            pictures.append(image if image.mode == "RGB" else image.convert("RGB"))
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

    def token_ids(self, captions: Sequence[str]) -> list[list[int]]:
        captions = _check_captions(captions)
        if not captions:
            return []
        # Rows are already padded if the model always reads its full length.
        pairs = zip(self._tokenize(captions), self._num_tokens(captions), strict=True)
        return [row["input_ids"][:number] for row, number in pairs]

    def token_features(self, captions: Sequence[str]) -> list[Tensor]:
        """As [`TokenScorer.token_features`]; the last token has the direction of the caption."""
        rows = self._tokenize(texts) if (texts := _check_captions(captions)) else []
        found: list[Tensor] = []
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            for part in _batches(rows, self.batch_size):
                encoded = self._encode_tokens(part).float()  # (B, T, D)
                found += [features[: len(row["input_ids"])] for features, row in zip(encoded, part, strict=True)]
        return found


_Item = TypeVar("_Item")


def _batches(items: Sequence[_Item], size: int) -> list[list[_Item]]:
    return [list(items[i : i + size]) for i in range(0, len(items), size)]


def _default_device() -> torch.device:
    # `current_device` is this process's GPU in a multi-process run.
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _check_captions(captions: Sequence[str]) -> list[str]:
    if isinstance(captions, str):
        raise ValueError(f"captions is the string {captions!r}, but must be a list of strings. Write [caption].")
    captions = list(captions)
    for i, caption in enumerate(captions):
        if not isinstance(caption, str):
            raise ValueError(f"captions[{i}] is {caption!r} ({type(caption).__name__}). Pass strings.")
    return captions


def _unit(features: Tensor, what: str, dtype: torch.dtype) -> Tensor:
    if features.ndim != 2:
        raise ValueError(
            f"The model returns {what} features of shape {tuple(features.shape)}, but a scorer needs one vector per "
            f"{what}. Use a model with a pooled embedding, such as CLIP or SigLIP."
        )
    features = features.float()
    largest = torch.linalg.vector_norm(features, ord=torch.inf, dim=1)
    good = torch.isfinite(largest) & (largest > 0)
    if not bool(good.all()):
        i = int((~good).nonzero()[0, 0])
        raise ValueError(
            f"The features of {what} {i} have norm {float(features[i].norm())} in {dtype}, but must be finite and not zero "
            f"({int((~good).sum())} of {len(good)} rows). Load the scorer with dtype='float32' or 'bfloat16'."
        )
    return unit_length(features)
