"""The captioners: BLIP and ClipCap after maximum likelihood."""

from __future__ import annotations

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

from hf_captionrl.models.clipcap import ClipCapConfig, ClipCapForConditionalGeneration, ClipCapProcessor
from hf_captionrl.scenes.grammar import ANNOTATORS, annotate
from hf_captionrl.scenes.render import IMAGE_SIZE
from scripts.scenes_models.parts import (
    CHECKPOINTS,
    HEADS,
    HIDDEN,
    MEAN,
    MLP,
    PATCH,
    STD,
    ScenePool,
    fit,
    gpt2_config,
    learn_facts,
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


def _annotated(pool: ScenePool, rng: np.random.Generator, tokenizer: BertTokenizer) -> tuple[Tensor, BatchEncoding]:
    """Pixels, and a fresh caption each: from five captions per image a captioner learns by heart who mentioned what."""
    scenes, pixels = pool.draw(rng, 64)
    texts = [annotate(rng, s.facts, ANNOTATORS[rng.integers(len(ANNOTATORS))]) for s in scenes]
    return pixels, tokenizer(texts, padding=True, return_tensors="pt")


def train_captioner(name: str, seed: int, fact_steps: int, steps: int) -> dict[str, Any]:
    """Train a tiny BLIP: facts first, then maximum likelihood on annotators' captions of fresh scenes, tower frozen.

    Returns:
        `dict`: The log of the run.
    """
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
    pool = ScenePool(seed, 6000)
    learn_facts(model.vision_model, pool, _SEEN_FACTS, HIDDEN, seed, fact_steps, log)
    model.vision_model.requires_grad_(False)

    rng = np.random.default_rng((seed, 3))
    optimizer = torch.optim.AdamW(model.text_decoder.parameters(), lr=1e-3, weight_decay=0.05)
    bos = config.text_config.bos_token_id

    def loss_of() -> Tensor:
        pixels, batch = _annotated(pool, rng, tokenizer)
        with torch.no_grad():
            features = model.vision_model(pixel_values=pixels).last_hidden_state  # (B, M, D)
        input_ids = batch["input_ids"].clone()
        input_ids[:, 0] = bos  # BLIP's decoder starts with [DEC], not [CLS]
        labels = input_ids.masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, 0] = -100
        return model.text_decoder(
            input_ids=input_ids,
            attention_mask=batch["attention_mask"],
            encoder_hidden_states=features,
            labels=labels,
        ).loss

    losses, seconds = fit("blip", steps, loss_of, optimizer, clipped=model.parameters())
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

    Returns:
        `dict`: The log of the run.
    """
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(48, bos_token="[CLS]", eos_token="[SEP]")
    scorer = CLIPModel.from_pretrained(CHECKPOINTS / tower, use_safetensors=True)
    vision_config = scorer.config.vision_config
    vision_config.projection_dim = scorer.config.projection_dim
    config = ClipCapConfig(
        vision_config,
        gpt2_config(tokenizer, positions=52, layers=3),
        prefix_length=5,
        normalize_image_embeds=True,
    )
    model = ClipCapForConditionalGeneration(config)
    encoder = model.vision_tower.encoder
    encoder.vision_model.load_state_dict(scorer.vision_model.state_dict())
    encoder.visual_projection.load_state_dict(scorer.visual_projection.state_dict())
    model.vision_tower.requires_grad_(False)

    pool = ScenePool(seed, 6000)
    rng = np.random.default_rng((seed, 3))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.05)

    def loss_of() -> Tensor:
        pixels, batch = _annotated(pool, rng, tokenizer)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return model(
            pixel_values=pixels,
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            labels=labels,
        ).loss

    losses, seconds = fit("clipcap", steps, loss_of, optimizer, clipped=model.parameters())
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
