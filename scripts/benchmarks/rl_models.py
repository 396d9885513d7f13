r"""The captioners, scorers and images whose reinforcement step is timed: published shapes with random weights.

Captioner and scorer share a made-up vocabulary of one token per word, so that a caption has as many tokens for one as for
the other, as it has with their real tokenizers; what an untrained captioner writes would be broken into pieces there.

Legend: B images, G captions per image, N = B * G captions, T tokens.
"""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
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
    PreTrainedTokenizerFast,
)

from hf_captionrl.captioners import Captioner, ProcessorPair, load_captioner
from hf_captionrl.captioners.clipcap import ClipCapConfig, ClipCapForConditionalGeneration
from hf_captionrl.data import open_image
from hf_captionrl.retrieval import HFScorer, Scorer, load_scorer
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SelfRetrievalConfig, SelfRetrievalTrainer
from hf_captionrl.utils.model_files import model_path

_SPECIAL = ("[PAD]", "[UNK]", "[BOS]", "[EOS]")


@dataclasses.dataclass(frozen=True)
class RLShape:
    """A captioner, a scorer and a rollout."""

    # `"blip"`, `"clipcap"`, or `"scenes"` (the shipped captioner and scorer, with trained weights; of the other
    # arguments only those of the rollout count).
    kind: str
    num_images: int
    group_size: int = 5
    # T, the longest caption. Special tokens are never sampled, except for `"scenes"`, so captions are this long
    # unless `World.lengths` plans their lengths.
    num_tokens: int = 20
    vocab_size: int = 30_524
    width: int = 768  # of its text model and vision tower
    layers: int = 12
    heads: int = 12  # of attention, in the scorer's vision tower too
    image_size: int = 224  # side in pixels
    patch_size: int = 16  # of the captioner's vision tower
    prefix_length: int = 10  # of `"clipcap"`
    scorer_text_width: int = 512  # of the scorer's text tower; 64 a head
    scorer_layers: int = 12  # of both its towers; its patches are 32 wide
    scorer_vocab_size: int = 49_408


SHAPES = {
    "blip-base": RLShape("blip", 4),
    "clipcap": RLShape("clipcap", 4, vocab_size=50_257, patch_size=32),
    "scenes": RLShape("scenes", 16),
}
"""Measured shapes: BLIP-base, ClipCap on CLIP ViT-B/32 and GPT-2 small, and the embedded world's captioner; the scorer of
the first two has the shape of CLIP ViT-B/32."""


@dataclasses.dataclass
class World:
    """Everything that a step needs."""

    shape: RLShape  # what was asked for
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
    """One made-up word per token; `framed` puts start and end token around every text, as CLIP's tokenizer does."""
    tokens = [*_SPECIAL, *(f"w{i}" for i in range(vocab_size - len(_SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if framed:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 2), ("[EOS]", 3)]
        )
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), _SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **names)


def _image_processor(size: int) -> CLIPImageProcessor:
    return CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})


def _policy(shape: RLShape) -> Any:
    special = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    tower = {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": 4 * shape.width,
    }
    vision = {**tower, "image_size": shape.image_size, "patch_size": shape.patch_size}
    if shape.kind == "blip":
        text = {
            **tower,
            **special,
            "sep_token_id": 3,
            "encoder_hidden_size": shape.width,
            "vocab_size": shape.vocab_size,
        }
        # BLIP's default, 1e-10, makes denormal numbers, which a CPU is slow at and no trained model has.
        config = BlipConfig(text_config=text, vision_config={**vision, "initializer_range": 0.02})
        return BlipForConditionalGeneration(config)
    if shape.kind != "clipcap":
        raise ValueError(f"kind ({shape.kind!r}) must be 'blip', 'clipcap' or 'scenes'.")
    gpt2 = GPT2Config(
        vocab_size=shape.vocab_size,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        # Both steps run without dropout, BLIP's default too: else their gradients could not be compared.
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **special,
    )
    clip = CLIPVisionConfig(**vision, projection_dim=shape.scorer_text_width)
    model = ClipCapForConditionalGeneration(
        ClipCapConfig(vision_config=clip, text_config=gpt2, prefix_length=shape.prefix_length)
    )
    model.generation_config.update(**special)
    return model


def _scorer(shape: RLShape) -> HFScorer:
    layers = {"num_hidden_layers": shape.scorer_layers}
    text = {
        **layers,
        "hidden_size": shape.scorer_text_width,
        "intermediate_size": 4 * shape.scorer_text_width,
        "num_attention_heads": max(shape.scorer_text_width // 64, 1),
        "vocab_size": shape.scorer_vocab_size,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 0,
    }
    vision = {
        **layers,
        "hidden_size": shape.width,
        "intermediate_size": 4 * shape.width,
        "num_attention_heads": shape.heads,
        "image_size": shape.image_size,
        "patch_size": 32,
    }
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=shape.scorer_text_width))
    tokenizer = _tokenizer(shape.scorer_vocab_size, framed=True, max_length=77)
    return HFScorer(model, ProcessorPair(_image_processor(shape.image_size), tokenizer))


def _made_up_images(shape: RLShape, seed: int) -> datasets.Dataset:
    rng = np.random.default_rng(seed)
    size = (shape.num_images, shape.image_size, shape.image_size, 3)
    images = [Image.fromarray(pixels) for pixels in rng.integers(0, 256, size, dtype=np.uint8)]
    return datasets.Dataset.from_dict(
        {
            "image": images,
            "image_id": [str(i) for i in range(len(images))],
            "captions": [["w1 w2 w3"] for _ in images],
        },
        features=datasets.Features(
            {
                "image": datasets.Image(),
                "image_id": datasets.Value("string"),
                "captions": datasets.List(datasets.Value("string")),
            }
        ),
    )


def build(
    shape: RLShape, seed: int, folder: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> World:
    """Models, images and trainer."""
    torch.manual_seed(seed)
    scorer: Scorer
    if shape.kind == "scenes":
        images = load_scenes(num_train=shape.num_images, num_validation=0, num_test=0, seed=seed)["train"]
        captioner = load_captioner(model_path("scenes:blip-mle"), dtype=dtype)
        model = captioner.model
        stock = BlipForConditionalGeneration(model.config).to(dtype)
        scorer = load_scorer(model_path("scenes:clip-reward"))
        suppressed: list[int] = []
    else:
        images = _made_up_images(shape, seed)
        model = _policy(shape).to(dtype)
        stock = copy.deepcopy(model)
        pair = ProcessorPair(_image_processor(shape.image_size), _tokenizer(shape.vocab_size))
        captioner = load_captioner(model, processor=pair, prompt="")
        scorer = _scorer(shape)
        suppressed = list(range(len(_SPECIAL)))
    # The very same parameters, not copies of them.
    stock.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    captioner.freeze_vision()
    scorer.to(device)  # type: ignore[attr-defined]
    trainer = _trainer(shape, captioner, scorer, images, suppressed, Path(folder), device)
    stock.to(device)  # its parameters are there with the policy's; buffers are not shared
    batch = dict(next(iter(trainer.get_train_dataloader())))
    batch["pixel_values"] = batch["pixel_values"].to(dtype)
    model.train()
    stock.train()
    return World(
        shape=shape,
        captioner=captioner,
        stock=stock,
        scorer=scorer,
        trainer=trainer,
        batch=batch,
        scorer_pixels=_scorer_pixels(scorer, images, batch["rows"].tolist()).to(device),
        suppressed=suppressed,
    )


def _trainer(
    shape: RLShape,
    captioner: Captioner,
    scorer: Scorer,
    images: datasets.Dataset,
    suppressed: list[int],
    folder: Path,
    device: str,
) -> SelfRetrievalTrainer:
    return SelfRetrievalTrainer(
        captioner,
        scorer,
        SelfRetrievalConfig(
            str(folder / "run"),
            feature_cache_dir=str(folder / "features"),
            per_device_train_batch_size=shape.num_images,
            num_generations=shape.group_size,
            do_sample=True,
            max_completion_length=shape.num_tokens,
            generation_kwargs={"suppress_tokens": suppressed} if suppressed else None,
            baseline="leave_one_out",
            freeze_vision_tower=True,
            guard="off",
            report_to="none",
            use_cpu=device == "cpu",
        ),
        images,
    )


def _scorer_pixels(scorer: Any, images: datasets.Dataset, rows: Sequence[int]) -> Tensor:
    opened = [open_image(images[row]["image"]).convert("RGB") for row in rows]
    return scorer.image_processor(images=opened, return_tensors="pt")["pixel_values"]
