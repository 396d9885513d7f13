"""The captioners: BLIP and ClipCap after maximum likelihood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    BatchEncoding,
    BertTokenizer,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessor,
    BlipProcessor,
    CLIPImageProcessor,
    CLIPModel,
)

from hf_captionrl.captioners.clipcap import ClipCapConfig, ClipCapForConditionalGeneration, ClipCapProcessor
from hf_captionrl.scenes.grammar import ANNOTATORS, annotate
from hf_captionrl.scenes.render import IMAGE_SIZE
from scripts.scenes_models.parts import (
    CHECKPOINTS,
    HEADS,
    HIDDEN,
    MEAN,
    MLP,
    NUM_GROUPS,
    PATCH,
    STD,
    ScenePool,
    fit,
    gpt2_config,
    learn_facts,
    make_optimizers,
    make_tokenizer,
)

_SEEN_FACTS = (
    "kind",
    "colour",
    "size",
    "position",
    "background",
    "pattern",
    "weather",
    "time",
    "second",
    "second_colour",
)
"""Facts that the captioner's tower is taught. It learns count, orientation and relation from captions, or not at all."""


def _annotated(
    pool: ScenePool, rng: np.random.Generator, tokenizer: BertTokenizer
) -> tuple[np.ndarray, BatchEncoding]:
    """Rows, and a fresh caption each: from five captions per image a captioner learns by heart who mentioned what."""
    rows = rng.choice(len(pool.scenes), 96, replace=False)
    texts = [annotate(rng, pool.scenes[row].facts, ANNOTATORS[rng.integers(len(ANNOTATORS))]) for row in rows]
    return rows, tokenizer(texts, padding=True, return_tensors="pt")


@torch.no_grad()
def _encode(pool: ScenePool, encode: Callable[[Tensor], Tensor]) -> Tensor:
    """What a frozen tower makes of the pool."""
    rows = np.arange(len(pool.scenes))
    return torch.cat([encode(pool.take(part)[1]) for part in np.split(rows, len(rows) // 500)])


def train_captioner(name: str, seed: int, fact_steps: int, steps: int) -> dict[str, Any]:
    """Train a tiny BLIP: facts first, then maximum likelihood on annotators' captions of fresh scenes, tower frozen."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(48)
    shared: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
    }
    config = BlipConfig(
        text_config={
            **shared,
            "vocab_size": len(tokenizer),
            "encoder_hidden_size": HIDDEN,
            "max_position_embeddings": 48,
            "bos_token_id": tokenizer.convert_tokens_to_ids("[DEC]"),
            "eos_token_id": tokenizer.sep_token_id,
            "sep_token_id": tokenizer.sep_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "label_smoothing": 0.0,
        },
        # BLIP's own default, 1e-10, leaves all positions alike: a tower trained from nothing then never learns where.
        vision_config={**shared, "image_size": IMAGE_SIZE, "patch_size": PATCH, "initializer_range": 0.02},
        projection_dim=HIDDEN,
        image_text_hidden_size=HIDDEN,
    )
    model = BlipForConditionalGeneration(config)
    log: dict[str, Any] = {"stage": "captioner", "name": name, "seed": seed, "fact_steps": fact_steps, "steps": steps}
    pool = ScenePool(seed, NUM_GROUPS)
    learn_facts(model.vision_model, pool, _SEEN_FACTS, HIDDEN, seed, fact_steps, log)
    model.vision_model.requires_grad_(False)

    rng = np.random.default_rng((seed, 3))
    optimizers = make_optimizers(model.text_decoder, 1e-3, 0.05)
    encoded = _encode(pool, lambda pixels: model.vision_model(pixel_values=pixels).last_hidden_state)  # (N, M, D)
    bos = config.text_config.bos_token_id

    def loss_of() -> Tensor:
        rows, batch = _annotated(pool, rng, tokenizer)
        input_ids = batch["input_ids"].clone()
        input_ids[:, 0] = bos  # BLIP's decoder starts with [DEC], not [CLS]
        labels = input_ids.masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, 0] = -100
        return model.text_decoder(
            input_ids=input_ids,
            attention_mask=batch["attention_mask"],
            encoder_hidden_states=encoded[rows],
            labels=labels,
        ).loss

    losses, seconds = fit("blip", steps, loss_of, optimizers, clipped=model.parameters())
    log |= {"last_loss": round(float(np.mean(losses[-100:])), 4), "mle_cpu_s": seconds}
    image_processor = BlipImageProcessor(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}, image_mean=MEAN, image_std=STD
    )
    folder = CHECKPOINTS / name
    model.requires_grad_(True)
    model.save_pretrained(folder)
    BlipProcessor(image_processor, tokenizer).save_pretrained(folder)
    return log


def train_clipcap(name: str, seed: int, tower: str, steps: int) -> dict[str, Any]:
    """Train a tiny ClipCap: the vision tower of a scorer, frozen, then maximum likelihood on fresh scenes.

    As in DiscriTune, the embedding that the captions are made of is that of the scorer which rewards later.
    """
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(48, bos_token="[CLS]", eos_token="[SEP]")
    scorer = CLIPModel.from_pretrained(CHECKPOINTS / tower, use_safetensors=True, dtype=torch.float32)
    vision_config = scorer.config.vision_config
    vision_config.projection_dim = scorer.config.projection_dim
    config = ClipCapConfig(
        vision_config,
        gpt2_config(tokenizer, positions=52, layers=2),
        prefix_length=5,
        normalize_image_embeds=True,
    )
    model = ClipCapForConditionalGeneration(config)
    encoder = model.vision_tower.encoder
    encoder.vision_model.load_state_dict(scorer.vision_model.state_dict())
    encoder.visual_projection.load_state_dict(scorer.visual_projection.state_dict())
    model.vision_tower.requires_grad_(False)

    pool = ScenePool(seed, NUM_GROUPS)
    rng = np.random.default_rng((seed, 3))
    optimizers = [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.05)]

    def loss_of() -> Tensor:
        rows, batch = _annotated(pool, rng, tokenizer)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return model(
            pixel_values=pool.take(rows)[1],
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            labels=labels,
        ).loss

    losses, seconds = fit("clipcap", steps, loss_of, optimizers, clipped=model.parameters())
    image_processor = CLIPImageProcessor(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}, do_center_crop=False, image_mean=MEAN, image_std=STD
    )
    folder = CHECKPOINTS / name
    model.requires_grad_(True)
    model.save_pretrained(folder)
    ClipCapProcessor(image_processor, tokenizer).save_pretrained(folder)
    return {
        "stage": "clipcap",
        "name": name,
        "seed": seed,
        "tower": tower,
        "steps": steps,
        "last_loss": round(float(np.mean(losses[-100:])), 4),
        "mle_cpu_s": seconds,
    }
