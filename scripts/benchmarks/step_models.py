r"""The models and batches whose training step is timed: shapes of published captioners with random weights.

Captions have the lengths of COCO's; nothing else about the data changes how long a step takes.

Legend: B captions, T tokens, V vocabulary, D features, P prefix embeddings.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BlipConfig,
    BlipForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from hf_captionrl.captioners import Captioner
from hf_captionrl.captioners.families import BlipCaptioner, EncoderDecoderCaptioner
from hf_captionrl.captioners.head_tap import tap_head
from hf_captionrl.losses import IGNORE_INDEX

# Words and punctuation marks per caption, counted in the 25,000 captions of COCO's Karpathy test split: 11.3 on average.
_LENGTHS = {7: 106, 8: 1277, 9: 4226, 10: 5211, 11: 4879, 12: 3546, 13: 2187, 14: 1319, 15: 842, 16: 462, 17: 314,
            18: 193, 19: 126, 20: 73, 22: 93, 24: 83, 27: 63}  # fmt: skip
_RESERVED = 8
"""Token ids below it are kept for start, end and padding."""
_START, _END, _PAD = 1, 2, 0


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and a batch."""

    kind: str  # `"blip"`, `"vit-gpt2"`, `"llama"` (text only) or `"clipcap"` (GPT-2 behind cached features)
    batch_size: int
    vocab_size: int
    width: int = 768  # D, of the text model and of the vision tower
    layers: int = 12  # of the text model, and of the vision tower where there is one
    heads: int = 12
    intermediate: int = 3072  # width of the feed-forward layers
    image_size: int = 224  # side in pixels; patches are 16 wide
    prefix_length: int = 0  # P, of `"clipcap"`
    frozen: bool = False  # train only what stands in front of the language model of `"clipcap"`


SHAPES = {
    "blip-base": Shape("blip", 4, 30_524),
    "vit-gpt2": Shape("vit-gpt2", 4, 50_257),
    "llama-32k": Shape("llama", 8, 32_000, width=4096, layers=1, heads=32, intermediate=11_008),
    "clipcap": Shape("clipcap", 40, 50_257, prefix_length=10),
    "clipcap-frozen": Shape("clipcap", 40, 50_257, prefix_length=10, frozen=True),
}
"""Measured shapes. `clipcap` trains GPT-2 and the mapping network, `clipcap-frozen` the mapping network only."""

_FEATURES = 512
"""Width of the cached features, that of CLIP ViT-B/32."""


class PrefixGPT2(GPT2LMHeadModel):
    """GPT-2 that reads P embeddings, made from one feature vector per image by ClipCap's two-layer network, before text.

    Reference: Mokady et al. 2021, "ClipCap: CLIP Prefix for Image Captioning".
    """

    def __init__(self, config: Any, prefix_length: int) -> None:
        super().__init__(config)
        width = config.n_embd * prefix_length
        self.prefix_length = prefix_length
        self.mapping = nn.Sequential(nn.Linear(_FEATURES, width // 2), nn.Tanh(), nn.Linear(width // 2, width))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        prefix_features: Tensor,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """GPT-2's forward behind the prefix.

        Shapes: `input_ids` `(B, T)`, `attention_mask` `(B, T)`, `prefix_features` `(B, 512)`, `labels` `(B, T)`.
        """
        prefix = self.mapping(prefix_features).view(len(input_ids), self.prefix_length, -1)  # (B, P, D)
        before = (self.prefix_length, 0)
        if labels is not None:
            labels = F.pad(labels, before, value=IGNORE_INDEX)
        return super().forward(
            inputs_embeds=torch.cat([prefix, self.transformer.wte(input_ids)], 1),
            attention_mask=F.pad(attention_mask, before, value=1),
            labels=labels,
            **kwargs,
        )


class _TextFirst(Captioner):
    """Enough of a family for the tap where no module of the model reads pixels."""

    family = "text"


def build(shape: Shape, seed: int) -> Any:
    """A randomly initialised model with the package's tap, in training mode."""
    torch.manual_seed(seed)
    tower = {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate,
    }
    # BLIP's default, 1e-10, makes denormal numbers, which a CPU is slow at and no trained model has.
    vision = {**tower, "image_size": shape.image_size, "patch_size": 16, "initializer_range": 0.02}
    special = {"bos_token_id": _START, "eos_token_id": _END, "pad_token_id": _PAD}
    gpt2 = GPT2Config(
        vocab_size=shape.vocab_size,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.intermediate,
        loss_type="ForCausalLM",  # else transformers guesses it from the class's name, and warns
        **special,
    )
    model: Any
    family: type[Captioner] = _TextFirst
    if shape.kind == "blip":
        text = {**tower, **special, "encoder_hidden_size": shape.width, "vocab_size": shape.vocab_size}
        model = BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=vision))
        family = BlipCaptioner
    elif shape.kind == "vit-gpt2":
        joined = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            ViTConfig(**vision), gpt2, decoder_start_token_id=_START, pad_token_id=_PAD, eos_token_id=_END
        )
        model = VisionEncoderDecoderModel(joined)
        family = EncoderDecoderCaptioner
    elif shape.kind == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(**tower, **special, vocab_size=shape.vocab_size, tie_word_embeddings=False)
        )
    elif shape.kind == "clipcap":
        model = PrefixGPT2(gpt2, shape.prefix_length)
        model.requires_grad_(not shape.frozen)
        model.mapping.requires_grad_(True)
    else:
        raise ValueError(f"kind ({shape.kind!r}) must be 'blip', 'vit-gpt2', 'llama' or 'clipcap'.")
    tap_head(model, family)
    return model.train()


def draw_batch(shape: Shape, rng: np.random.Generator) -> dict[str, Tensor]:
    """Captions of COCO's lengths, padded to the longest, with random images or features.

    Returns the inputs of the model's forward, labels among them, as the package's `collate` makes them.
    """
    counts = np.array(list(_LENGTHS.values()))
    lengths = rng.choice(list(_LENGTHS), shape.batch_size, p=counts / counts.sum())  # (B,)
    input_ids = np.full((shape.batch_size, lengths.max() + 2), _PAD)  # (B, T)
    input_ids[:, 0] = _START
    for row, length in zip(input_ids, lengths, strict=True):
        # Zipf: word k is 1/k as frequent as the first, so that some words occur twice, as "a" does.
        words = np.exp(rng.uniform(0, math.log(shape.vocab_size - _RESERVED), length)).astype(np.int64) - 1
        row[1 : length + 1] = _RESERVED + words
        row[length + 1] = _END
    positions = np.arange(input_ids.shape[1])
    mask = positions < lengths[:, None] + 2  # (B, T)
    labels = np.where(mask & (positions > 0), input_ids, IGNORE_INDEX)
    batch = {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        "labels": torch.from_numpy(labels),
    }
    if shape.kind in ("blip", "vit-gpt2"):
        size = (shape.batch_size, 3, shape.image_size, shape.image_size)
        batch["pixel_values"] = torch.from_numpy(rng.standard_normal(size, dtype=np.float32))
    elif shape.kind == "clipcap":
        features = rng.standard_normal((shape.batch_size, _FEATURES), dtype=np.float32)
        batch["prefix_features"] = torch.from_numpy(features)
    return batch
