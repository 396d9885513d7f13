"""The two contrastive scorers and the language model that judges fluency."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    GPT2LMHeadModel,
)

from hf_captionrl.scenes.render import CELL, IMAGE_SIZE
from hf_captionrl.scenes.world import sample_scene
from scripts.scenes_models.parts import (
    CHECKPOINTS,
    HEADS,
    HIDDEN,
    MEAN,
    MLP,
    STD,
    caption_batches,
    fit,
    gpt2_config,
    learn_facts,
    make_tokenizer,
    random_caption,
    to_pixels,
)


def train_scorer(name: str, seed: int, fact_steps: int, steps: int) -> dict[str, Any]:
    """Train a CLIP: facts first, then contrastive alignment.

    Returns:
        `dict`: The log of the run.
    """
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(40, bos_token="[CLS]", eos_token="[SEP]")
    shared: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
    }
    config = CLIPConfig(
        text_config={
            **shared,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 40,
            "bos_token_id": tokenizer.cls_token_id,
            "eos_token_id": tokenizer.sep_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={**shared, "image_size": IMAGE_SIZE, "patch_size": CELL},
        projection_dim=HIDDEN,
    )
    model = CLIPModel(config)
    log: dict[str, Any] = {"stage": "scorer", "name": name, "seed": seed, "fact_steps": fact_steps, "steps": steps}
    learn_facts(model.vision_model, seed, fact_steps, log)
    # The tower already sees; it may follow the text slowly.
    vision = list(model.vision_model.parameters())
    ids = {id(p) for p in vision}
    rest = [p for p in model.parameters() if id(p) not in ids]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": vision, "lr": 3e-4}], lr=1e-3, weight_decay=0.01)
    batches = caption_batches(seed)

    def loss_of() -> Tensor:
        scenes, captions = next(batches)
        text = tokenizer(captions, padding=True, return_tensors="pt")
        out = model(pixel_values=to_pixels(scenes), input_ids=text["input_ids"], attention_mask=text["attention_mask"])
        same = torch.tensor(
            [[a == b for b in captions] for a in captions]
        ).float()  # identical captions share a target
        target = same / same.sum(1, keepdim=True)
        return (F.cross_entropy(out.logits_per_text, target) + F.cross_entropy(out.logits_per_image, target)) / 2

    def bound_scale() -> None:
        with torch.no_grad():
            model.logit_scale.clamp_(max=np.log(100.0))

    _, log["contrastive_cpu_s"] = fit("clip", steps, loss_of, optimizer, clipped=model.parameters(), after=bound_scale)
    image_processor = CLIPImageProcessor(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}, do_center_crop=False, image_mean=MEAN, image_std=STD
    )
    folder = CHECKPOINTS / name
    model.save_pretrained(folder)
    CLIPProcessor(image_processor, tokenizer).save_pretrained(folder)
    return log


def train_language_model(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train a tiny GPT-2 on true captions of every verbosity; it judges fluency by perplexity.

    Returns:
        `dict`: The log of the run.
    """
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(64, bos_token="[CLS]", eos_token="[SEP]")
    config = gpt2_config(tokenizer, positions=64, layers=2)
    model = GPT2LMHeadModel(config)
    rng = np.random.default_rng((seed, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def loss_of() -> Tensor:
        captions = [random_caption(rng, sample_scene(rng).facts) for _ in range(128)]
        batch = tokenizer(captions, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss

    losses, seconds = fit("lm", steps, loss_of, optimizer)
    folder = CHECKPOINTS / name
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {
        "stage": "language-model",
        "name": name,
        "seed": seed,
        "steps": steps,
        "last_loss": round(losses[-1], 4),
        "cpu_s": seconds,
    }
