"""Train the shipped models of the embedded world, from nothing, on one machine without network.

    python scripts/train_scenes_models.py scorer --name clip-reward --seed 1
    python scripts/train_scenes_models.py scorer --name clip-judge --seed 2
    python scripts/train_scenes_models.py language-model --seed 3
    python scripts/train_scenes_models.py captioner --seed 4
    python scripts/train_scenes_models.py clipcap --seed 5
    python scripts/train_scenes_models.py adapter --name blip-smile --seed 6
    python scripts/train_scenes_models.py adapter --name blip-sr --seed 7
    python scripts/train_scenes_models.py measure --name blip-mle

A contrastive loss alone learns this world slowly, so every vision tower first learns the facts with linear heads that
are then thrown away. Each stage appends to `training_log.json` beside the checkpoints.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessor,
    BlipProcessor,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    GPT2Config,
    GPT2LMHeadModel,
)

from hf_captionrl.captioners import load_captioner
from hf_captionrl.metrics import caption_perplexity
from hf_captionrl.metrics.suites import smile_suite
from hf_captionrl.models.clipcap import ClipCapConfig, ClipCapForConditionalGeneration, ClipCapProcessor
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import BAG_SIZES, bags, check, load_scenes
from hf_captionrl.scenes.grammar import ANNOTATORS, Annotator, annotate, full_caption
from hf_captionrl.scenes.models import MODELS
from hf_captionrl.scenes.render import CELL, IMAGE_SIZE, render_scene
from hf_captionrl.scenes.vocabulary import vocabulary
from hf_captionrl.scenes.world import (
    BACKGROUNDS,
    COUNTS,
    EMOJI_KINDS,
    ORIENTATIONS,
    POSITIONS,
    RELATIONS,
    SIZES,
    Facts,
    Scene,
    sample_scene,
    vary_scene,
)
from hf_captionrl.trainers.captioning import generate_captions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only scripts/ is on the path
from scripts.scenes_adapters import ADAPTERS, train_adapter

__all__ = ["main"]

CHECKPOINTS = Path(__file__).parent.parent / "hf_captionrl" / "scenes" / "checkpoints"
HIDDEN, HEADS, MLP = 128, 4, 256
MEAN = STD = [0.5, 0.5, 0.5]
FACT_VALUES: dict[str, tuple[Any, ...]] = {
    "kind": EMOJI_KINDS,
    "count": COUNTS,
    "size": SIZES,
    "orientation": ORIENTATIONS,
    "position": POSITIONS,
    "background": BACKGROUNDS,
    "second": ("", *EMOJI_KINDS),
    "relation": ("", *RELATIONS),
}


def make_tokenizer(max_length: int, **special: str) -> BertTokenizer:
    """The shared WordPiece tokenizer.

    Args:
        max_length (`int`): Longest input of the model, in tokens.
        special (`str`): Special tokens that the model names differently.

    Returns:
        `BertTokenizer`: Lower-casing, with `[CLS] ... [SEP]` around every text.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocab.txt"
        file.write_text("\n".join(vocabulary()) + "\n", encoding="utf-8")
        return BertTokenizer(str(file), model_max_length=max_length, do_lower_case=True, **special)


def to_pixels(scenes: list[Scene]) -> Tensor:
    """Scenes as the image processors would give them.

    Args:
        scenes (`list[Scene]`): B scenes.

    Returns:
        `torch.Tensor` of shape `(B, 3, IMAGE_SIZE, IMAGE_SIZE)`: In [-1, 1].
    """
    array = np.stack([np.asarray(render_scene(scene)) for scene in scenes])
    return torch.from_numpy(array).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def random_caption(rng: np.random.Generator, facts: Facts) -> str:
    """A true caption of any verbosity in any annotator's words.

    Args:
        rng (`numpy.random.Generator`): Source of randomness.
        facts (`Facts`): The scene's facts.

    Returns:
        `str`: A caption.
    """
    small, large = (("small", "large"), ("little", "big"), ("tiny", "huge"))[int(rng.integers(3))]
    generic = float(rng.random() < 0.25)
    return annotate(rng, facts, Annotator(float(rng.random()), generic, small, large, bool(rng.random() < 0.3)))


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Linear warm-up over 5 % of the steps, then a cosine to zero.

    Args:
        optimizer (`torch.optim.Optimizer`): Its learning rate is the peak.
        steps (`int`): Length of the run.

    Returns:
        `torch.optim.lr_scheduler.LRScheduler`: To be stepped after every update.
    """
    warm = max(1, steps // 20)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm, 0.5 * (1 + np.cos(np.pi * min(1.0, s / steps))))
    )


def learn_facts(tower: nn.Module, seed: int, steps: int, log: dict[str, Any]) -> None:
    """Teach a vision tower to see: linear heads for every fact on its pooled output.

    Args:
        tower (`nn.Module`): Called with `pixel_values`, returns `pooler_output` of shape `(B, HIDDEN)`.
        seed (`int`): Seed of scenes and heads.
        steps (`int`): Updates with 64 fresh scenes each.
        log (`dict`): Receives accuracy per fact on 1,000 fresh scenes, and CPU seconds.
    """
    rng = np.random.default_rng((seed, 0))
    heads = nn.ModuleDict({name: nn.Linear(HIDDEN, len(values)) for name, values in FACT_VALUES.items()})
    optimizer = torch.optim.AdamW([*tower.parameters(), *heads.parameters()], lr=2e-3, weight_decay=0.01)
    scheduler = one_cycle(optimizer, steps)

    def targets(scenes: list[Scene]) -> dict[str, Tensor]:
        return {
            name: torch.tensor([values.index(getattr(s.facts, name)) for s in scenes])
            for name, values in FACT_VALUES.items()
        }

    start = time.process_time()
    for step in range(steps):
        scenes = [sample_scene(rng) for _ in range(64)]
        pooled = tower(pixel_values=to_pixels(scenes)).pooler_output
        loss = torch.stack([F.cross_entropy(heads[n](pooled), t) for n, t in targets(scenes).items()]).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 250 == 0:
            print(f"facts {step:5d} loss {loss.item():.3f} cpu_s {time.process_time() - start:.0f}", flush=True)
    scenes = [sample_scene(rng) for _ in range(1000)]
    with torch.no_grad():
        pooled = tower(pixel_values=to_pixels(scenes)).pooler_output
        accuracy = {n: (heads[n](pooled).argmax(-1) == t).float().mean().item() for n, t in targets(scenes).items()}
    log["fact_accuracy"] = {n: round(a, 4) for n, a in accuracy.items()}
    log["facts_cpu_s"] = round(time.process_time() - start)
    print(log, flush=True)


def caption_batches(seed: int) -> Iterator[tuple[list[Scene], list[str]]]:
    """Batches that only details can solve: 32 scenes, each with three near-duplicates; half of the captions are full.

    Args:
        seed (`int`): Seed of the stream.

    Returns:
        `Iterator`: Scenes and captions, 128 of each.
    """
    rng = np.random.default_rng((seed, 1))
    while True:
        scenes: list[Scene] = []
        for _ in range(32):
            base = sample_scene(rng)
            scenes += [base, *(vary_scene(rng, base) for _ in range(3))]
        yield (
            scenes,
            [full_caption(s.facts) if rng.random() < 0.5 else random_caption(rng, s.facts) for s in scenes],
        )


def train_scorer(name: str, seed: int, fact_steps: int, steps: int) -> dict[str, Any]:
    """Train a CLIP: facts first, then contrastive alignment.

    Args:
        name (`str`): Folder under `CHECKPOINTS`.
        seed (`int`): Seed of weights and data.
        fact_steps (`int`): Updates of the vision tower on facts.
        steps (`int`): Contrastive updates.

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
    scheduler = one_cycle(optimizer, steps)
    start = time.process_time()
    batches = caption_batches(seed)
    for step in range(steps):
        scenes, captions = next(batches)
        text = tokenizer(captions, padding=True, return_tensors="pt")
        out = model(pixel_values=to_pixels(scenes), input_ids=text["input_ids"], attention_mask=text["attention_mask"])
        same = torch.tensor(
            [[a == b for b in captions] for a in captions]
        ).float()  # identical captions share a target
        target = same / same.sum(1, keepdim=True)
        loss = (F.cross_entropy(out.logits_per_text, target) + F.cross_entropy(out.logits_per_image, target)) / 2
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=np.log(100.0))
        if step % 100 == 0:
            print(f"clip {step:5d} loss {loss.item():.3f} cpu_s {time.process_time() - start:.0f}", flush=True)
    log["contrastive_cpu_s"] = round(time.process_time() - start)
    image_processor = CLIPImageProcessor(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}, do_center_crop=False, image_mean=MEAN, image_std=STD
    )
    folder = CHECKPOINTS / name
    model.save_pretrained(folder)
    CLIPProcessor(image_processor, tokenizer).save_pretrained(folder)
    return log


def train_language_model(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train a tiny GPT-2 on true captions of every verbosity; it judges fluency by perplexity.

    Args:
        name (`str`): Folder under `CHECKPOINTS`.
        seed (`int`): Seed of weights and data.
        steps (`int`): Updates with 128 captions each.

    Returns:
        `dict`: The log of the run.
    """
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(64, bos_token="[CLS]", eos_token="[SEP]")
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=HIDDEN,
        n_layer=2,
        n_head=HEADS,
        n_inner=MLP,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = GPT2LMHeadModel(config)
    rng = np.random.default_rng((seed, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    scheduler = one_cycle(optimizer, steps)
    start = time.process_time()
    loss = torch.zeros(())
    for step in range(steps):
        batch = tokenizer(
            [random_caption(rng, sample_scene(rng).facts) for _ in range(128)], padding=True, return_tensors="pt"
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 100 == 0:
            print(f"lm {step:5d} loss {loss.item():.3f} cpu_s {time.process_time() - start:.0f}", flush=True)
    folder = CHECKPOINTS / name
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {
        "stage": "language-model",
        "name": name,
        "seed": seed,
        "steps": steps,
        "last_loss": round(loss.item(), 4),
        "cpu_s": round(time.process_time() - start),
    }


def train_captioner(name: str, seed: int, fact_steps: int, steps: int) -> dict[str, Any]:
    """Train a tiny BLIP: facts first, then maximum likelihood on annotators' captions of fresh scenes, tower frozen.

    Args:
        name (`str`): Folder under `CHECKPOINTS`.
        seed (`int`): Seed of weights and data.
        fact_steps (`int`): Updates of the vision tower on facts.
        steps (`int`): Updates of the text decoder with 64 captions each.

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
        vision_config={**shared, "image_size": IMAGE_SIZE, "patch_size": CELL, "initializer_range": 0.02},
        projection_dim=HIDDEN,
        image_text_hidden_size=HIDDEN,
    )
    model = BlipForConditionalGeneration(config)
    log: dict[str, Any] = {"stage": "captioner", "name": name, "seed": seed, "fact_steps": fact_steps, "steps": steps}
    learn_facts(model.vision_model, seed, fact_steps, log)
    model.vision_model.requires_grad_(False)

    rng = np.random.default_rng((seed, 3))
    optimizer = torch.optim.AdamW(model.text_decoder.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = one_cycle(optimizer, steps)
    bos = config.text_config.bos_token_id
    start = time.process_time()
    losses: list[float] = []
    for step in range(steps):
        # Fresh scenes: on the 5,000 of the training split the captioner learns by heart who mentioned what.
        scenes = [sample_scene(rng) for _ in range(64)]
        texts = [annotate(rng, s.facts, ANNOTATORS[rng.integers(len(ANNOTATORS))]) for s in scenes]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            features = model.vision_model(pixel_values=to_pixels(scenes)).last_hidden_state  # (B, M, D)
        input_ids = batch["input_ids"].clone()
        input_ids[:, 0] = bos  # BLIP's decoder starts with [DEC], not [CLS]
        labels = input_ids.masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, 0] = -100
        loss = model.text_decoder(
            input_ids=input_ids,
            attention_mask=batch["attention_mask"],
            encoder_hidden_states=features,
            labels=labels,
        ).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if step % 100 == 0:
            print(
                f"blip {step:5d} loss {np.mean(losses[-100:]):.3f} cpu_s {time.process_time() - start:.0f}", flush=True
            )
    log |= {"last_loss": round(float(np.mean(losses[-100:])), 4), "mle_cpu_s": round(time.process_time() - start)}
    image_processor = BlipImageProcessor(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}, image_mean=MEAN, image_std=STD
    )
    folder = CHECKPOINTS / name
    model.requires_grad_(True)
    model.save_pretrained(folder)
    BlipProcessor(image_processor, tokenizer).save_pretrained(folder)
    return log


def train_clipcap(name: str, seed: int, tower: str, steps: int) -> dict[str, Any]:
    """Train a tiny ClipCap: the image tower of a scorer, frozen, then maximum likelihood on fresh scenes.

    As in DiscriTune, the embedding that the captions are made of is that of the scorer which rewards later.

    Args:
        name (`str`): Folder under `CHECKPOINTS`.
        seed (`int`): Seed of weights and data.
        tower (`str`): Folder of the scorer.
        steps (`int`): Updates of mapper and language model with 64 captions each.

    Returns:
        `dict`: The log of the run.
    """
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(48, bos_token="[CLS]", eos_token="[SEP]")
    scorer = CLIPModel.from_pretrained(CHECKPOINTS / tower)
    vision_config = scorer.config.vision_config
    vision_config.projection_dim = scorer.config.projection_dim
    config = ClipCapConfig(
        vision_config,
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=52,
            n_embd=HIDDEN,
            n_layer=3,
            n_head=HEADS,
            n_inner=MLP,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.cls_token_id,
            eos_token_id=tokenizer.sep_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        prefix_length=5,
        normalize_image_embeds=True,
    )
    model = ClipCapForConditionalGeneration(config)
    encoder = model.vision_tower.encoder
    encoder.vision_model.load_state_dict(scorer.vision_model.state_dict())
    encoder.visual_projection.load_state_dict(scorer.visual_projection.state_dict())
    model.vision_tower.requires_grad_(False)

    rng = np.random.default_rng((seed, 3))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.05)
    scheduler = one_cycle(optimizer, steps)
    start = time.process_time()
    losses: list[float] = []
    for step in range(steps):
        scenes = [sample_scene(rng) for _ in range(64)]
        texts = [annotate(rng, s.facts, ANNOTATORS[rng.integers(len(ANNOTATORS))]) for s in scenes]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(
            pixel_values=to_pixels(scenes),
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            labels=labels,
        ).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if step % 100 == 0:
            mean, seconds = np.mean(losses[-100:]), time.process_time() - start
            print(f"clipcap {step:5d} loss {mean:.3f} cpu_s {seconds:.0f}", flush=True)
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
        "mle_cpu_s": round(time.process_time() - start),
    }


def measure(name: str) -> dict[str, float]:
    """What a shipped model reaches on the test split.

    Args:
        name (`str`): Folder under `CHECKPOINTS`.

    Returns:
        `dict[str, float]`: Fractions, or perplexity.
    """
    test = load_scenes(num_train=0, num_validation=0)["test"]
    folder = str(CHECKPOINTS / name)
    full = list(test["full_caption"])
    references = [row[2] for row in test["captions"]]
    if name.startswith("clip-"):
        scorer = load_scorer(folder)
        images = scorer.image_features(list(test["image"]))
        numbers: dict[str, float] = {}
        for kind, captions in {"full_caption": full, "reference": references}.items():
            text = scorer.text_features(captions)
            row = smile_suite(
                captions,
                text_features=text,
                image_features=images,
                bags={size: bags(list(test["bag_id"]), size) for size in BAG_SIZES},
            )
            numbers |= {f"{kind}_{key}": row[key] for key in row if "recall_at_1" in key and not key.endswith("_ci")}
        return numbers
    if name.startswith("gpt2"):
        model, tokenizer = GPT2LMHeadModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        shuffled = [" ".join(np.random.default_rng(i).permutation(c.split())) for i, c in enumerate(full)]
        texts = {"full_caption": full, "reference": references, "shuffled_full_caption": shuffled}
        return {
            f"{kind}_perplexity": caption_perplexity(captions, model, tokenizer)["perplexity"]
            for kind, captions in texts.items()
        }
    captioner = load_captioner(folder, dtype=torch.float32)
    captions = generate_captions(captioner, list(test["image"]), batch_size=250, num_beams=3, max_new_tokens=30)
    judge = load_scorer(str(CHECKPOINTS / "clip-judge"))
    row = smile_suite(
        captions,
        text_features=judge.text_features(captions),
        image_features=judge.image_features(list(test["image"])),
        bags={size: bags(list(test["bag_id"]), size) for size in BAG_SIZES},
        facts=list(test["facts"]),
        check=check,
        references=list(test["captions"]),
    )
    lengths = [len(c.split()) for group in test["captions"] for c in group]
    return {
        "length": row["length"],
        "reference_length": float(np.mean(lengths)),
        **{key: row[key] for key in ("hallucination", "fact_recall", "cider_d", "lexical_diversity")},
        **{key: row[key] for key in row if "recall_at_1" in key and not key.endswith("_ci")},
    }


def write_card(entry: dict[str, Any]) -> None:
    """Write a checkpoint's model card from its log.

    Args:
        entry (`dict`): Its entry of `training_log.json`.
    """
    library = "transformers"
    lines = [
        "---",
        "license: apache-2.0",
        f"library_name: {library}",
        "language: en",
        "tags: [hf_captionrl]",
        "---",
        "",
    ]
    lines += [f"# {entry['name']}", "", MODELS[entry["name"]], ""]
    lines += [
        "A tiny model of the embedded world of hf_captionrl. It knows nothing else: do not use it on photographs.",
        "",
    ]
    lines += [
        "## Training",
        "",
        f"`{entry['command']}`, on one CPU thread, without any other data than the world's rules.",
        "",
    ]
    skipped = ("name", "stage", "measured", "command")
    lines += [f"- {key}: {value}" for key, value in entry.items() if key not in skipped]
    lines += ["", "## Measured on the test split (1,000 scenes)", ""]
    lines += [f"- {key}: {value:.4f}" for key, value in entry["measured"].items()]
    lines += ["", "Limitations: a vocabulary of 167 tokens; images of 72 x 72 pixels; one grid cell a patch.", ""]
    (CHECKPOINTS / entry["name"] / "README.md").write_text("\n".join(lines), encoding="utf-8")


def append_log(entry: dict[str, Any]) -> None:
    """Add a run to `training_log.json`; a run of the same name replaces the older one.

    Args:
        entry (`dict`): The log of a run, with its `name`.
    """
    file = CHECKPOINTS / "training_log.json"
    entries = json.loads(file.read_text()) if file.exists() else []
    entries = [e for e in entries if e["name"] != entry["name"]] + [{**entry, "torch": torch.__version__}]
    file.write_text(json.dumps(sorted(entries, key=lambda e: e["name"]), indent=2) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["scorer", "language-model", "captioner", "clipcap", "adapter", "measure"])
    parser.add_argument("--name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fact_steps", type=int, default=2500)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the models are too small for more, and the result is then the same everywhere
    if args.stage == "measure":
        file = CHECKPOINTS / "training_log.json"
        log = next(entry for entry in json.loads(file.read_text()) if entry["name"] == args.name)
        log["measured"] = {key: round(value, 4) for key, value in measure(args.name).items()}
        append_log(log)
        write_card(log)
        print(json.dumps(log["measured"], indent=2))
        return
    if args.stage == "scorer":
        log = train_scorer(args.name, args.seed, args.fact_steps, args.steps or 1500)
    elif args.stage == "captioner":
        log = train_captioner(args.name or "blip-mle", args.seed, args.fact_steps, args.steps or 5000)
    elif args.stage == "adapter":
        if args.name not in ADAPTERS:
            parser.error(f"--name is {args.name!r}; the adapters are {sorted(ADAPTERS)}.")
        log = train_adapter(args.name, args.seed, CHECKPOINTS)
    elif args.stage == "clipcap":
        log = train_clipcap(args.name or "clipcap-mle", args.seed, "clip-reward", args.steps or 2000)
    else:
        log = train_language_model(args.name or "gpt2-perplexity", args.seed, args.steps or 600)
    log["command"] = "python scripts/train_scenes_models.py " + " ".join(sys.argv[1:])
    log["measured"] = {key: round(value, 4) for key, value in measure(log["name"]).items()}
    append_log(log)
    write_card(log)
    print(json.dumps(log, indent=2))


if __name__ == "__main__":
    main()
