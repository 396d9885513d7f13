r"""The captioners, scorers, images and batches whose steps are timed: published shapes with random weights.

Captions have the lengths of COCO's; nothing else about the data changes how long a step takes.

Legend: B images or captions, G captions per image, N = B * G, T tokens, V vocabulary, D features, P prefix embeddings.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    BlipConfig,
    BlipForConditionalGeneration,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from hf_captionrl.captioners import Captioner, ProcessorPair, load_captioner
from hf_captionrl.captioners.clipcap import ClipCapConfig, ClipCapForConditionalGeneration
from hf_captionrl.captioners.families import BlipCaptioner, EncoderDecoderCaptioner
from hf_captionrl.captioners.head_tap import tap_head
from hf_captionrl.data import open_image
from hf_captionrl.losses import IGNORE_INDEX
from hf_captionrl.retrieval import HFScorer, load_scorer
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SelfRetrievalConfig, SelfRetrievalTrainer
from hf_captionrl.utils.model_files import model_path

# Words and punctuation marks per caption, counted in the 25,000 captions of COCO's Karpathy test split: 11.3 on average.
_LENGTHS = {7: 106, 8: 1277, 9: 4226, 10: 5211, 11: 4879, 12: 3546, 13: 2187, 14: 1319, 15: 842, 16: 462, 17: 314,
            18: 193, 19: 126, 20: 73, 22: 93, 24: 83, 27: 63}  # fmt: skip
_NAMES = ("[PAD]", "[UNK]", "[BOS]", "[EOS]")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
_FEATURES = 512
"""Width of ClipCap's cached features, that of CLIP ViT-B/32."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A captioner, a scorer and a batch."""

    # `"blip"`, `"vit-gpt2"`, `"llama"` (text only), `"clipcap"`, or `"scenes"`: the shipped captioner and scorer
    kind: str
    batch_size: int  # B
    vocab_size: int = 30_524
    width: int = 768  # D, of the text model and of the vision tower
    layers: int = 12
    heads: int = 12
    intermediate: int = 3072
    image_size: int = 224  # side in pixels
    patch_size: int = 16
    prefix_length: int = 10  # P, of `"clipcap"`
    frozen: bool = False  # train only what stands in front of the language model of `"clipcap"`
    group_size: int = 5  # G, of reinforcement
    num_tokens: int = 20  # T, the longest sampled caption
    scorer_text_width: int = 512
    scorer_layers: int = 12
    scorer_vocab_size: int = 49_408


TINY = Shape(
    "blip",
    2,
    vocab_size=60,
    width=32,
    layers=1,
    heads=2,
    intermediate=64,
    image_size=32,
    prefix_length=2,
    group_size=2,
    num_tokens=5,
    scorer_text_width=32,
    scorer_layers=1,
    scorer_vocab_size=60,
)
"""For tests; its times say nothing."""

STEP_SHAPES = {
    "blip-base": Shape("blip", 4),
    "vit-gpt2": Shape("vit-gpt2", 4, 50_257),
    "llama-32k": Shape("llama", 8, 32_000, width=4096, layers=1, heads=32, intermediate=11_008),
    "clipcap": Shape("clipcap", 40, 50_257),
    "clipcap-frozen": Shape("clipcap", 40, 50_257, frozen=True),
    "tiny": dataclasses.replace(TINY, kind="clipcap", batch_size=3),
}
"""SMILE steps. `clipcap` trains GPT-2 and the mapping network on cached features, `clipcap-frozen` the mapping network only."""

RL_SHAPES = {
    "blip-base": Shape("blip", 4),
    "clipcap": Shape("clipcap", 4, 50_257, patch_size=32),
    "scenes": Shape("scenes", 16),
    "tiny": TINY,
}
"""Reinforcement steps: BLIP-base, ClipCap on CLIP ViT-B/32 and GPT-2 small, and the embedded world's captioner; the scorer of the
first two has the shape of CLIP ViT-B/32."""


def for_device(shape: Shape, device: str) -> Shape:
    """A GPU gets 32 images where a CPU gets 4."""
    return dataclasses.replace(shape, batch_size=32) if device == "cuda" and shape.batch_size == 4 else shape


def _tower(shape: Shape) -> dict[str, Any]:
    return {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate,
    }


def _vision(shape: Shape) -> dict[str, Any]:
    # BLIP's default range, 1e-10, makes denormal numbers, which a CPU is slow at and no trained model has.
    sizes = {"image_size": shape.image_size, "patch_size": shape.patch_size}
    return {**_tower(shape), **sizes, "initializer_range": 0.02}


def _blip(shape: Shape) -> BlipForConditionalGeneration:
    text = {**_tower(shape), **SPECIAL, "sep_token_id": 3, "vocab_size": shape.vocab_size}
    text["encoder_hidden_size"] = shape.width
    return BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=_vision(shape)))


def _gpt2(shape: Shape, **settings: Any) -> GPT2Config:
    sizes = {"n_embd": shape.width, "n_layer": shape.layers, "n_head": shape.heads, "n_inner": shape.intermediate}
    return GPT2Config(vocab_size=shape.vocab_size, **sizes, **SPECIAL, **settings)


# --- a SMILE step ---------------------------------------------------------------------------------------------------


class PrefixGPT2(GPT2LMHeadModel):
    """GPT-2 that reads P embeddings, made from one feature vector per image by ClipCap's two-layer network, before text.

    Reference: Mokady et al. 2021, "ClipCap: CLIP Prefix for Image Captioning".
    """

    def __init__(self, config: Any, prefix_length: int) -> None:
        super().__init__(config)
        width = config.n_embd * prefix_length
        self.prefix_length = prefix_length
        self.mapping = nn.Sequential(nn.Linear(_FEATURES, width // 2), nn.Tanh(), nn.Linear(width // 2, width))

    def forward(  # GPT-2's, behind the prefix
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        prefix_features: Tensor,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        prefix = self.mapping(prefix_features).view(len(input_ids), self.prefix_length, -1)  # (B, P, D)
        before = (self.prefix_length, 0)
        if labels is not None:
            labels = F.pad(labels, before, value=IGNORE_INDEX)
        embeddings = torch.cat([prefix, self.transformer.wte(input_ids)], 1)
        mask = F.pad(attention_mask, before, value=1)
        return super().forward(inputs_embeds=embeddings, attention_mask=mask, labels=labels, **kwargs)


class _TextFirst(Captioner):
    """Enough of a family for the tap where no module of the model reads pixels."""

    family = "text"


def build_model(shape: Shape, seed: int) -> Any:
    """A randomly initialised model with the package's tap, in training mode."""
    torch.manual_seed(seed)
    # GPT-2: else transformers guesses the loss from the class's name, and warns.
    gpt2 = _gpt2(shape, loss_type="ForCausalLM")
    model: Any
    family: type[Captioner] = _TextFirst
    if shape.kind == "blip":
        model, family = _blip(shape), BlipCaptioner
    elif shape.kind == "vit-gpt2":
        ids = {"decoder_start_token_id": 2, "pad_token_id": 0, "eos_token_id": 3}
        joined = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**_vision(shape)), gpt2, **ids)
        model, family = VisionEncoderDecoderModel(joined), EncoderDecoderCaptioner
    elif shape.kind == "llama":
        sizes = {**_tower(shape), **SPECIAL, "vocab_size": shape.vocab_size}
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    elif shape.kind == "clipcap":
        model = PrefixGPT2(gpt2, shape.prefix_length)
        model.requires_grad_(not shape.frozen)
        model.mapping.requires_grad_(True)
    else:
        raise ValueError(f"kind ({shape.kind!r}) must be 'blip', 'vit-gpt2', 'llama' or 'clipcap'.")
    tap_head(model, family)
    return model.train()


def draw_batch(shape: Shape, rng: np.random.Generator) -> dict[str, Tensor]:
    """Captions of COCO's lengths, padded to the longest, with random images or features, as the package's `collate` makes them."""
    counts = np.array(list(_LENGTHS.values()))
    lengths = rng.choice(list(_LENGTHS), shape.batch_size, p=counts / counts.sum())  # (B,)
    input_ids = np.zeros((shape.batch_size, lengths.max() + 2), dtype=np.int64)  # (B, T)
    input_ids[:, 0] = 2
    reserved = 8
    for row, length in zip(input_ids, lengths, strict=True):
        # Zipf: word k is 1/k as frequent as the first, so that some words occur twice, as "a" does.
        words = np.exp(rng.uniform(0, math.log(shape.vocab_size - reserved), length)).astype(np.int64) - 1
        row[1 : length + 1] = reserved + words
        row[length + 1] = 3
    positions = np.arange(input_ids.shape[1])
    mask = positions < lengths[:, None] + 2  # (B, T)
    labels = np.where(mask & (positions > 0), input_ids, IGNORE_INDEX)
    arrays = {"input_ids": input_ids, "attention_mask": mask.astype(np.int64), "labels": labels}
    if shape.kind in ("blip", "vit-gpt2"):
        size = (shape.batch_size, 3, shape.image_size, shape.image_size)
        arrays["pixel_values"] = rng.standard_normal(size, dtype=np.float32)
    elif shape.kind == "clipcap":
        arrays["prefix_features"] = rng.standard_normal((shape.batch_size, _FEATURES), dtype=np.float32)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


# --- a reinforcement step -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class World:
    """Everything that a reinforcement step needs."""

    shape: Shape
    captioner: Captioner  # the policy; its vision tower is frozen
    # A model of the class in transformers (or of the architecture) with the same parameter objects, which nothing of
    # the package was attached to.
    stock: Any
    scorer: Any
    trainer: SelfRetrievalTrainer
    batch: dict[str, Tensor]  # one micro-batch of its data loader: all B images
    scorer_pixels: Tensor  # (B, 3, H, W): the same images, prepared for the scorer
    suppressed: list[int]  # tokens that are never sampled
    lengths: Tensor | None = None  # (N,): planned tokens of the sampled captions

    @functools.cached_property
    def cached_features(self) -> Tensor:
        """What the run-long cache of a frozen vision tower holds of the batch: `(B, M, D)`, before any step."""
        with torch.no_grad():
            return self.captioner.image_features(self.batch["pixel_values"])

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parts, by name."""
        return {name: p for name, p in self.captioner.model.named_parameters() if p.requires_grad}


def _tokenizer(vocab_size: int, *, framed: bool = False, max_length: int = 10**6) -> Any:
    """One made-up word per token, so that a caption has as many tokens for the captioner as for the scorer; what an untrained
    captioner writes would be broken into pieces by a real tokenizer. `framed` puts start and end token around every text."""
    tokens = [*_NAMES, *(f"w{i}" for i in range(vocab_size - len(_NAMES)))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if framed:
        frame = {"single": "[BOS] $A [EOS]", "special_tokens": [("[BOS]", 2), ("[EOS]", 3)]}
        tokenizer.post_processor = processors.TemplateProcessing(**frame)
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), _NAMES, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **names)


def _image_processor(size: int) -> CLIPImageProcessor:
    """CLIP's, for another size."""
    return CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})


def _policy(shape: Shape) -> Any:
    if shape.kind == "blip":
        return _blip(shape)
    if shape.kind != "clipcap":
        raise ValueError(f"kind ({shape.kind!r}) must be 'blip', 'clipcap' or 'scenes'.")
    # Both steps run without dropout, BLIP's default too: else their gradients could not be compared.
    text = _gpt2(shape, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0))
    clip = CLIPVisionConfig(**_vision(shape), projection_dim=shape.scorer_text_width)
    config = ClipCapConfig(vision_config=clip, text_config=text, prefix_length=shape.prefix_length)
    model = ClipCapForConditionalGeneration(config)
    model.generation_config.update(**SPECIAL)
    return model


def _scorer(shape: Shape) -> HFScorer:
    """A scorer in the shape of CLIP ViT-B/32."""
    layers = {"num_hidden_layers": shape.scorer_layers}
    text = {
        "hidden_size": shape.scorer_text_width,
        "intermediate_size": 4 * shape.scorer_text_width,
        "num_attention_heads": max(shape.scorer_text_width // 64, 1),
        "vocab_size": shape.scorer_vocab_size,
    }
    vision = {**_vision(shape), "patch_size": 32}
    config = CLIPConfig(
        text_config={**text, **layers, **SPECIAL},
        vision_config={**vision, **layers},
        projection_dim=shape.scorer_text_width,
    )
    tokenizer = _tokenizer(shape.scorer_vocab_size, framed=True, max_length=77)
    return HFScorer(CLIPModel(config), ProcessorPair(_image_processor(shape.image_size), tokenizer))


def _images(shape: Shape, seed: int) -> datasets.Dataset:
    """Images of noise with one caption each."""
    size = (shape.batch_size, shape.image_size, shape.image_size, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    rows = {
        "image": [Image.fromarray(image) for image in pixels],
        "image_id": [str(i) for i in range(len(pixels))],
        "captions": [["w1 w2 w3"] for _ in pixels],
    }
    return datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())


def build_world(shape: Shape, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> World:
    """Models, images and trainer of a reinforcement step."""
    torch.manual_seed(seed)
    scorer: Any
    if shape.kind == "scenes":
        images = load_scenes(num_train=shape.batch_size, num_validation=0, num_test=0, seed=seed)["train"]
        captioner = load_captioner(model_path("scenes:blip-mle"), dtype=dtype)
        model = captioner.model
        stock: Any = BlipForConditionalGeneration(model.config).to(dtype)
        scorer, suppressed = load_scorer(model_path("scenes:clip-reward")), []
    else:
        images = _images(shape, seed)
        model = _policy(shape).to(dtype)
        stock = copy.deepcopy(model)
        pair = ProcessorPair(_image_processor(shape.image_size), _tokenizer(shape.vocab_size))
        captioner = load_captioner(model, processor=pair, prompt="")
        scorer, suppressed = _scorer(shape), list(range(len(_NAMES)))
    # The very same parameters, not copies of them.
    stock.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    captioner.freeze_vision()
    scorer.to(device)
    with tempfile.TemporaryDirectory() as folder:
        config = SelfRetrievalConfig(
            str(Path(folder) / "run"),
            feature_cache_dir=str(Path(folder) / "features"),
            per_device_train_batch_size=shape.batch_size,
            num_generations=shape.group_size,
            do_sample=True,
            max_completion_length=shape.num_tokens,
            generation_kwargs={"suppress_tokens": suppressed} if suppressed else None,
            baseline="leave_one_out",
            freeze_vision_tower=True,
            guard="off",
            report_to="none",
            use_cpu=device == "cpu",
        )
        trainer = SelfRetrievalTrainer(captioner, scorer, config, images)
    stock.to(device)  # its parameters are there with the policy's; buffers are not shared
    batch = dict(next(iter(trainer.get_train_dataloader())))
    batch["pixel_values"] = batch["pixel_values"].to(dtype)
    model.train()
    stock.train()
    opened = [open_image(image).convert("RGB") for image in images.select(batch["rows"].tolist())["image"]]
    pixels = scorer.image_processor(images=opened, return_tensors="pt")["pixel_values"].to(device)
    return World(shape, captioner, stock, scorer, trainer, batch, pixels, suppressed)
