"""The two image-text models, and the language model that measures fluency.

The reward scorer learns as CLIP did: from short captions of pictures that have little in common. The held-out scorer has
another architecture and loss, sees other pictures, and learns from details, similar pictures and swapped objects.
"""

from __future__ import annotations

from dataclasses import replace
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
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipProcessor,
)

from hf_captionrl.scenes import check, full_caption
from hf_captionrl.scenes.render import IMAGE_SIZE
from hf_captionrl.scenes.world import Facts, sample_scene
from scripts.scenes_models.parts import (
    CHECKPOINTS,
    HEADS,
    HEADS_OF,
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
    random_caption,
)

_TEXT_LENGTH = 40
_SIZE = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
_REWARD_FACTS = ("kind", "second", "background", "colour", "count")


def swap_objects(facts: Facts) -> Facts:
    """The facts with the two objects in each other's place, so that every relation and colour is bound wrongly."""
    return replace(facts, kind=facts.second, second=facts.kind, colour=facts.second_colour, second_colour=facts.colour)


def _towers(tokenizer: Any, width: int, mlp: int, heads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configurations of the text and the vision tower."""
    shared = {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
    }
    text = {
        **shared,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": _TEXT_LENGTH,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return text, {**shared, "image_size": IMAGE_SIZE, "patch_size": PATCH}


def train_reward_scorer(name: str, seed: int, fact_steps: int, steps: int) -> dict[str, Any]:
    """Train a CLIP on annotators' short captions: five facts first, then contrastive alignment."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(_TEXT_LENGTH, bos_token="[CLS]", eos_token="[SEP]")
    text_config, vision_config = _towers(tokenizer, HIDDEN, MLP, HEADS)
    model = CLIPModel(CLIPConfig(text_config=text_config, vision_config=vision_config, projection_dim=HIDDEN))
    pool = ScenePool(seed, NUM_GROUPS)
    log: dict[str, Any] = {"stage": "reward-scorer", "name": name, "seed": seed}
    log |= {"fact_steps": fact_steps, "steps": steps}
    learn_facts(model.vision_model, pool, _REWARD_FACTS, HIDDEN, seed, fact_steps, log)
    optimizers = _optimizers(model)
    rng = np.random.default_rng((seed, 1))

    def loss_of() -> Tensor:
        scenes, pixels = pool.draw(rng, 128)
        # Captions from the web are loose about what belongs to which object.
        loose = [swap_objects(s.facts) if s.facts.second and rng.random() < 0.2 else s.facts for s in scenes]
        captions = [random_caption(rng, facts, (0.4, 1.2)) for facts in loose]
        text = tokenizer(captions, padding=True, return_tensors="pt")
        out = model(pixel_values=pixels, input_ids=text["input_ids"], attention_mask=text["attention_mask"])
        # Identical captions share a target.
        same = torch.tensor([[a == b for b in captions] for a in captions]).float()
        target = same / same.sum(1, keepdim=True)
        return (F.cross_entropy(out.logits_per_text, target) + F.cross_entropy(out.logits_per_image, target)) / 2

    def bound_scale() -> None:
        with torch.no_grad():
            model.logit_scale.clamp_(max=np.log(100.0))

    _, log["contrastive_cpu_s"] = fit(
        "clip", steps, loss_of, optimizers, clipped=model.parameters(), after=bound_scale
    )
    image_processor = CLIPImageProcessor(size=_SIZE, do_center_crop=False, image_mean=MEAN, image_std=STD)
    folder = CHECKPOINTS / name
    model.half().save_pretrained(folder)  # scorers are read in fp32 whatever their file holds
    CLIPProcessor(image_processor, tokenizer).save_pretrained(folder)
    return log


def _optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """The vision tower already sees, so it follows the text slowly."""
    vision = list(model.vision_model.parameters())  # type: ignore[union-attr,operator]
    ids = {id(p) for p in vision}
    rest = [p for p in model.parameters() if id(p) not in ids]
    return [torch.optim.AdamW([{"params": rest}, {"params": vision, "lr": 3e-4}], lr=1e-3, weight_decay=0.01)]


def train_held_out_scorer(name: str, seed: int, fact_steps: int, steps: int) -> dict[str, Any]:
    """Train a SigLIP on details: all facts first, then the sigmoid loss with similar pictures and swapped objects."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(_TEXT_LENGTH, bos_token="[CLS]", eos_token="[SEP]")
    width = 160
    text_config, vision_config = _towers(tokenizer, width, 2 * width, 5)
    text_config["projection_size"] = width
    model = SiglipModel(SiglipConfig(text_config=text_config, vision_config=vision_config))
    with torch.no_grad():  # as in the paper: most pairs do not fit
        model.logit_scale.fill_(np.log(10.0))
        model.logit_bias.fill_(-10.0)
    pool = ScenePool(seed, NUM_GROUPS)
    log: dict[str, Any] = {"stage": "held-out-scorer", "name": name, "seed": seed}
    log |= {"fact_steps": fact_steps, "steps": steps}
    learn_facts(model.vision_model, pool, tuple(HEADS_OF), width, seed, fact_steps, log)
    optimizers = make_optimizers(model, 1e-3, 0.01, slow=model.vision_model)
    pool = ScenePool(100 + seed, NUM_GROUPS, NUM_GROUPS // 2)
    rng = np.random.default_rng((seed, 1))

    def loss_of() -> Tensor:
        scenes, pixels = pool.draw_groups(rng, 24)
        facts = [scene.facts for scene in scenes]
        is_full = rng.random(len(facts)) < 0.5
        captions = [
            full_caption(f) if full else random_caption(rng, f, (1.0, 4.0))
            for f, full in zip(facts, is_full, strict=True)
        ]
        # Of pictures with two objects also the captions with swapped objects, which fit none of them.
        wrong = [full_caption(swap_objects(f)) for f in facts[::2] if f.second]
        text = tokenizer([*captions, *wrong], padding="max_length", max_length=_TEXT_LENGTH, return_tensors="pt")
        logits = model(pixel_values=pixels, input_ids=text["input_ids"]).logits_per_text.T  # images, captions
        fits = torch.eye(len(facts), logits.shape[1])
        # Whether a short caption fits another image is not known without reading it. In its own group it is read; in other
        # groups it is left out where the kind is the same. A full caption fits its own image alone: what it does not say
        # is not there.
        kinds = np.array([f.kind for f in facts])
        counts = torch.ones_like(fits)
        counts[:, : len(facts)] = torch.from_numpy((kinds[:, None] != kinds[None, :]) | is_full[None, :])
        for at, mine in enumerate(facts):
            start = at - at % 4
            for other in range(start, start + 4):
                if other == at or is_full[other]:
                    counts[at, other] = 1.0
                else:
                    counts[at, other] = float(bool(check(captions[other], mine).wrong))
        signs = 2 * fits - 1
        return -(F.logsigmoid(signs * logits) * counts).sum() / len(facts)

    _, log["contrastive_cpu_s"] = fit("siglip", steps, loss_of, optimizers, clipped=model.parameters())
    image_processor = SiglipImageProcessor(size=_SIZE, image_mean=MEAN, image_std=STD)
    folder = CHECKPOINTS / name
    model.half().save_pretrained(folder)
    SiglipProcessor(image_processor, tokenizer).save_pretrained(folder)
    return log


def train_language_model(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train a tiny GPT-2 on true captions of every verbosity; it measures fluency by perplexity."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(64, bos_token="[CLS]", eos_token="[SEP]")
    config = gpt2_config(tokenizer, positions=64, layers=2)
    model = GPT2LMHeadModel(config)
    rng = np.random.default_rng((seed, 2))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)]

    def loss_of() -> Tensor:
        captions = [random_caption(rng, sample_scene(rng).facts) for _ in range(128)]
        batch = tokenizer(captions, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss

    losses, seconds = fit("lm", steps, loss_of, optimizers)
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
