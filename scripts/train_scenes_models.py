"""Train the shipped models of the embedded world from scratch, on one machine without a network.

    python scripts/train_scenes_models.py reward-scorer --seed 1
    python scripts/train_scenes_models.py held-out-scorer --seed 2
    python scripts/train_scenes_models.py language-model --seed 3
    python scripts/train_scenes_models.py captioner --seed 4
    python scripts/train_scenes_models.py clipcap --seed 5
    python scripts/train_scenes_models.py adapter --name blip-smile --seed 6
    python scripts/train_scenes_models.py adapter --name blip-sr --seed 7
    python scripts/train_scenes_models.py measure --name blip-mle
    python scripts/train_scenes_models.py reward-scorer --seed 1 --fact_steps 1200 --facts 4 --name DIR   # "Who is listening?"
    python scripts/train_scenes_models.py world --seed 0 --name DIR   # scenes, scorers and captioner drawn anew
    python scripts/train_scenes_models.py world --seed 20 --name DIR --kind shapes --annotators alt_text   # other things

A contrastive loss alone learns this world slowly. Every vision tower therefore first learns the facts with linear
heads, which are discarded. Each stage appends to `training_log.json` beside the checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    BatchEncoding,
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
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipProcessor,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program, only scripts/ is on the path
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.clipcap import ClipCapConfig, ClipCapForConditionalGeneration, ClipCapProcessor
from hf_captionrl.captioners.pipeline import generate_captions
from hf_captionrl.metrics import caption_perplexity
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import BAG_SIZES, bags, check, full_caption, load_scenes
from hf_captionrl.scenes.dataset import DOMAINS, KINDS
from hf_captionrl.scenes.grammar import ANNOTATORS, OPINIONS, WORDS, Annotator, annotate
from hf_captionrl.scenes.render import IMAGE_SIZE, render_scene
from hf_captionrl.scenes.world import (
    BACKGROUNDS,
    CATEGORIES,
    COLOURS,
    EMOJI_KINDS,
    FACT_VALUES,
    RELATIONS,
    SIZES,
    Facts,
    Scene,
    names_of,
    plural,
    sample_look_alikes,
    sample_scene,
    vary_scene,
)
from hf_captionrl.utils.io import write_json
from hf_captionrl.utils.model_files import MODELS
from reproduction.omission import sentence

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINTS = ROOT / "hf_captionrl" / "scenes" / "checkpoints"
HIDDEN, HEADS, MLP = 128, 4, 256
MEAN = STD = [0.5, 0.5, 0.5]
PATCH = 24
"""Side of a patch in pixels. Smaller ones cost five times as many steps for the same accuracy."""

NUM_GROUPS = 10_000
"""Groups of four images that a model is trained on."""


SPECIAL_TOKENS: tuple[str, ...] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]", "[ENC]")
"""BLIP's special tokens. The end token `[SEP]` has id 3: a CLIP whose end token has id 2 pools at the wrong place."""


def vocabulary() -> list[str]:
    """All tokens, in the order of their ids."""
    words = set("a an two three some with alone at in on the of image picture background ,".split())
    words |= {*BACKGROUNDS, *filter(None, COLOURS), *SIZES, *OPINIONS}
    words |= {form for kind in EMOJI_KINDS for name in names_of(kind) for form in (name, plural(name))}
    words |= {form for category in CATEGORIES for form in (category, plural(category))}
    words |= {word for phrases in (*WORDS.values(), RELATIONS) for phrase in phrases for word in phrase.split()}
    words |= {"moving", "still", "rest", "up", "down", "slowly", "fast"}
    characters = string.ascii_lowercase + string.digits
    first_words = ("a", "an", "two", "three", "some")
    pieces = [f"##{c}" for c in characters] + [f"##{w}" for w in first_words if len(w) > 1]
    return [*SPECIAL_TOKENS, *sorted(words), *(c for c in characters if c not in words), *pieces]


def heads_of(kinds: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    """What a linear head can tell of each fact."""
    return {**FACT_VALUES, "kind": kinds, "second": ("", *kinds), "relation": ("", *FACT_VALUES["relation"])}


class ScenePool:
    """Pictures that models are trained on: groups of one scene and three that differ from it in one fact, or cliques.

    Drawing a picture takes longer than a step on it, so all of them are drawn once.
    """

    def __init__(
        self, seed: int, num_groups: int, num_look_alike_sets: int = 0, kinds: tuple[str, ...] = EMOJI_KINDS
    ) -> None:
        rng = np.random.default_rng((seed, 0))
        self.kinds = kinds
        self.scenes: list[Scene] = []
        for _ in range(num_groups - num_look_alike_sets):
            base = sample_scene(rng, kinds)
            self.scenes += [base, *(vary_scene(rng, base, kinds) for _ in range(3))]
        for _ in range(num_look_alike_sets):
            self.scenes += sample_look_alikes(rng, 4, kinds)
        shape = (len(self.scenes), IMAGE_SIZE, IMAGE_SIZE, 3)
        self.images: np.ndarray = np.empty(shape, dtype=np.uint8)
        for image, scene in zip(self.images, self.scenes, strict=True):
            image[...] = render_scene(scene)

    def draw(self, rng: np.random.Generator, number: int) -> tuple[list[Scene], Tensor]:
        """Scenes at random, and their pixels `(B, 3, IMAGE_SIZE, IMAGE_SIZE)` in [-1, 1]."""
        return self.take(rng.choice(len(self.scenes), number, replace=False))

    def draw_groups(self, rng: np.random.Generator, number: int) -> tuple[list[Scene], Tensor]:
        """Whole groups at random, one after the other."""
        groups = rng.choice(len(self.scenes) // 4, number, replace=False)
        return self.take((groups[:, None] * 4 + np.arange(4)).ravel())

    def take(self, rows: np.ndarray) -> tuple[list[Scene], Tensor]:
        """Scenes of some rows."""
        pixels = torch.from_numpy(self.images[rows]).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
        return [self.scenes[row] for row in rows], pixels


def make_tokenizer(max_length: int, kinds: tuple[str, ...] = EMOJI_KINDS, **special: str) -> BertTokenizer:
    """The shared WordPiece tokenizer, with the names of other kinds added at its end."""
    words = [form for kind in kinds for name in names_of(kind) for form in (name, plural(name))]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocab.txt"
        file.write_text("\n".join(dict.fromkeys([*vocabulary(), *words])) + "\n", encoding="utf-8")
        return BertTokenizer(str(file), model_max_length=max_length, do_lower_case=True, **special)


def special_ids(tokenizer: BertTokenizer) -> dict[str, Any]:
    """The special tokens of a text model."""
    ids = {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    return {**ids, "pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer)}


def gpt2_config(tokenizer: BertTokenizer, *, positions: int) -> GPT2Config:
    """A tiny GPT-2 without dropout."""
    sizes = {"n_positions": positions, "n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "n_inner": MLP}
    return GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **special_ids(tokenizer))


def random_caption(rng: np.random.Generator, facts: Facts, verbosity: tuple[float, float] = (0.3, 3.0)) -> str:
    """A caption of any verbosity in any style."""
    how: dict[str, Any] = {"verbosity": float(rng.uniform(*verbosity))}  # drawn in this order
    how |= {"setting_first": bool(rng.random() < 0.3), "alt_text": bool(rng.random() < 0.2)}
    return annotate(rng, facts, Annotator(generic=0.1, **how))


def stated(rng: np.random.Generator, facts: Facts, number: int) -> str:
    """A true caption that states `number` facts of a scene, or all if it has fewer: its kind, and others at random."""
    said = facts.to_dict()
    order = list(rng.permutation([n for n, value in said.items() if value and value != "upright" and n != "kind"]))
    # Nothing is said of the second object before it is named.
    places = [place for place, name in enumerate(order) if name in ("second", "relation", "second_colour")]
    for place, name in zip(places, sorted((order[p] for p in places), key="second".__ne__), strict=True):
        order[place] = name
    return sentence(rng, facts, set(order[: number - 1]))


def make_optimizers(
    model: nn.Module, lr: float, weight_decay: float, *extra: nn.Module, slow: nn.Module | None = None
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the transformer layers that are trained, AdamW for all other parameters.

    A tower learns the facts in half as many steps as with AdamW alone. Parameters of `slow` have 0.3 of the learning rate.
    """
    named = [(name, p) for module in (model, *extra) for name, p in module.named_parameters() if p.requires_grad]
    is_slow = {id(p) for p in slow.parameters()} if slow is not None else set()

    def groups(of_matrices: bool, rate: float) -> list[dict[str, Any]]:
        chosen = [p for name, p in named if (p.ndim == 2 and ".layer" in name) == of_matrices]
        parts = [([p for p in chosen if (id(p) in is_slow) == s], rate * (0.3 if s else 1.0)) for s in (False, True)]
        return [{"params": params, "lr": lr} for params, lr in parts if params]

    return [
        torch.optim.AdamW(groups(False, lr), weight_decay=weight_decay),
        torch.optim.Muon(groups(True, 10 * lr), weight_decay=weight_decay),
    ]


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Linear warm-up over 5 % of the steps, then a cosine to zero."""
    warm = max(1, steps // 20)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm, 0.5 * (1 + np.cos(np.pi * min(1.0, s / steps))))
    )


def fit(
    title: str,
    steps: int,
    loss_of: Callable[[], Tensor],
    optimizers: list[torch.optim.Optimizer],
    *,
    clipped: Iterable[nn.Parameter] = (),
    after: Callable[[], object] | None = None,
    every: int = 100,
) -> tuple[list[float], int]:
    """The training loop of every model here; returns the losses, and CPU seconds."""
    schedulers = [one_cycle(optimizer, steps) for optimizer in optimizers]
    clipped = list(clipped)
    start = time.process_time()
    losses: list[float] = []
    for step in range(steps):
        loss = loss_of()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        if clipped:
            nn.utils.clip_grad_norm_(clipped, 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        if after is not None:
            after()
        losses.append(loss.item())
        if step % every == 0:
            mean, seconds = np.mean(losses[-every:]), time.process_time() - start
            print(f"{title} {step:5d} loss {mean:.3f} cpu_s {seconds:.0f}", flush=True)
    return losses, round(time.process_time() - start)


def augment(pixels: Tensor, rng: np.random.Generator, largest: int = 2) -> Tensor:
    """Move a batch of images by a few pixels, the same for all, and change the light of each; edges repeat."""
    padded = F.pad(pixels, (largest,) * 4, mode="replicate")
    y, x = rng.integers(2 * largest + 1, size=2)
    moved = padded[..., y : y + pixels.shape[-2], x : x + pixels.shape[-1]]
    light = torch.from_numpy(rng.uniform(0.85, 1.15, (len(pixels), 3, 1, 1)).astype(np.float32))
    return ((moved + 1) * light - 1).clamp(-1, 1)


def _in_cells(scenes: list[Scene], values: dict[str, tuple[Any, ...]]) -> dict[str, Tensor]:
    """Kind (`second`), colour and orientation of the thing in each cell `(B, 9)`: 0 and -100, -100 in an empty one."""
    found = {"second": torch.zeros(len(scenes), 9, dtype=torch.long)}
    found |= {name: torch.full((len(scenes), 9), -100) for name in ("colour", "orientation")}
    for row, scene in enumerate(scenes):
        facts = scene.facts
        main = {"second": facts.kind, "colour": facts.colour, "orientation": facts.orientation}
        cells = [(scene.row, scene.column + i, main) for i in range(facts.count)]
        if (second := scene.second_cell()) is not None:
            look = {"second": facts.second, "colour": facts.second_colour, "orientation": "upright"}
            cells.append((*second, look))
        for y, x, look in cells:
            for name, value in look.items():
                found[name][row, 3 * y + x] = values[name].index(value)
    return found


def learn_facts(
    tower: nn.Module, pool: ScenePool, names: tuple[str, ...], width: int, seed: int, steps: int, log: dict[str, Any]
) -> None:
    """Teach a vision tower to see, with linear heads that are discarded: facts from its pooled output, things from its patches.

    The tower's `pooler_output` is `(B, width)`; the last nine vectors of its `last_hidden_state` belong to the cells.
    `log` receives the accuracy per fact on 1,000 fresh scenes, and CPU seconds.
    """
    rng = np.random.default_rng((seed, 0))
    values = heads_of(pool.kinds)
    heads = nn.ModuleDict({name: nn.Linear(width, len(values[name])) for name in names})
    in_cells = _in_cells(pool.scenes, values)
    if "orientation" not in names:
        del in_cells["orientation"]
    cells = nn.ModuleDict({name: nn.Linear(width, len(values[name])) for name in in_cells})

    def targets(scenes: list[Scene]) -> dict[str, Tensor]:
        return {name: torch.tensor([values[name].index(getattr(s.facts, name)) for s in scenes]) for name in names}

    pooled_targets = targets(pool.scenes)

    def loss_of() -> Tensor:
        rows = rng.choice(len(pool.scenes), 128, replace=False)
        _, pixels = pool.take(rows)
        out = tower(pixel_values=augment(pixels, rng))
        patches = out.last_hidden_state[:, -9:]
        seen = [F.cross_entropy(heads[n](out.pooler_output), t[rows]) for n, t in pooled_targets.items()]
        seen += [
            (4 if name == "second" else 1) * F.cross_entropy(cells[name](patches).flatten(0, 1), t[rows].flatten())
            for name, t in in_cells.items()
        ]
        return torch.stack(seen).sum()

    start = time.process_time()
    optimizers = make_optimizers(tower, 2e-3, 0.01, heads, cells)
    fit("facts", steps, loss_of, optimizers, clipped=tower.parameters(), every=250)
    scenes, pixels = ScenePool(10_000 + seed, 250, kinds=pool.kinds).take(np.arange(1000))
    with torch.no_grad():
        out = tower(pixel_values=pixels)
        accuracy = {
            n: (heads[n](out.pooler_output).argmax(-1) == t).float().mean().item() for n, t in targets(scenes).items()
        }
        kinds = _in_cells(scenes, values)["second"]
        right = cells["second"](out.last_hidden_state[:, -9:]).argmax(-1) == kinds
        accuracy["kind in its cell"] = right[kinds > 0].float().mean().item()
    log["fact_accuracy"] = {n: round(a, 4) for n, a in accuracy.items()}
    log["facts_cpu_s"] = round(time.process_time() - start)
    print(log, flush=True)


def save(name: str, *parts: Any) -> None:
    """Write a model and its processor."""
    for part in parts:
        part.save_pretrained(CHECKPOINTS / name)


_TEXT_LENGTH = 40
_SIZE = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
_REWARD_FACTS = ("kind", "second", "background", "colour", "count")


def swap_objects(facts: Facts) -> Facts:
    """The facts with the two objects in each other's place, so that every relation and colour is bound wrongly."""
    return replace(facts, kind=facts.second, second=facts.kind, colour=facts.second_colour, second_colour=facts.colour)


def _towers(tokenizer: Any, width: int, mlp: int, heads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configurations of the text and the vision tower."""
    shared = {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": 2, "num_attention_heads": heads}
    text = {**shared, **special_ids(tokenizer), "max_position_embeddings": _TEXT_LENGTH}
    return text, {**shared, "image_size": IMAGE_SIZE, "patch_size": PATCH}


def train_reward_scorer(
    name: str, seed: int, fact_steps: int, steps: int, facts: int | None = None, kinds: tuple[str, ...] = EMOJI_KINDS
) -> dict[str, Any]:
    """Train a CLIP on annotators' short captions, or on [`stated`] ones: five facts first, then contrastive alignment."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(_TEXT_LENGTH, kinds, bos_token="[CLS]", eos_token="[SEP]")
    text_config, vision_config = _towers(tokenizer, HIDDEN, MLP, HEADS)
    model = CLIPModel(CLIPConfig(text_config=text_config, vision_config=vision_config, projection_dim=HIDDEN))
    pool = ScenePool(seed, NUM_GROUPS, kinds=kinds)
    log: dict[str, Any] = {"stage": "reward-scorer", "name": name, "seed": seed}
    log |= {"fact_steps": fact_steps, "steps": steps}
    learn_facts(model.vision_model, pool, _REWARD_FACTS, HIDDEN, seed, fact_steps, log)
    optimizers = _optimizers(model)
    rng = np.random.default_rng((seed, 1))

    def loss_of() -> Tensor:
        scenes, pixels = pool.draw(rng, 128)
        # Captions from the web are loose about what belongs to which object.
        loose = [swap_objects(s.facts) if s.facts.second and rng.random() < 0.2 else s.facts for s in scenes]
        captions = [stated(rng, f, facts) if facts else random_caption(rng, f, (0.4, 1.2)) for f in loose]
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
    save(name, model.half(), CLIPProcessor(image_processor, tokenizer))  # scorers are read in fp32
    return log


def _optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """The vision tower already sees, so it follows the text slowly."""
    vision = list(model.vision_model.parameters())  # type: ignore[union-attr,operator]
    ids = {id(p) for p in vision}
    rest = [p for p in model.parameters() if id(p) not in ids]
    return [torch.optim.AdamW([{"params": rest}, {"params": vision, "lr": 3e-4}], lr=1e-3, weight_decay=0.01)]


def train_held_out_scorer(
    name: str, seed: int, fact_steps: int, steps: int, kinds: tuple[str, ...] = EMOJI_KINDS
) -> dict[str, Any]:
    """Train a SigLIP on details: all facts first, then the sigmoid loss with similar pictures and swapped objects."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(_TEXT_LENGTH, kinds, bos_token="[CLS]", eos_token="[SEP]")
    width = 160
    text_config, vision_config = _towers(tokenizer, width, 2 * width, 5)
    text_config["projection_size"] = width
    model = SiglipModel(SiglipConfig(text_config=text_config, vision_config=vision_config))
    with torch.no_grad():  # as in the paper: most pairs do not fit
        model.logit_scale.fill_(np.log(10.0))
        model.logit_bias.fill_(-10.0)
    pool = ScenePool(seed, NUM_GROUPS, kinds=kinds)
    log: dict[str, Any] = {"stage": "held-out-scorer", "name": name, "seed": seed}
    log |= {"fact_steps": fact_steps, "steps": steps}
    learn_facts(model.vision_model, pool, tuple(heads_of(kinds)), width, seed, fact_steps, log)
    optimizers = make_optimizers(model, 1e-3, 0.01, slow=model.vision_model)
    pool = ScenePool(100 + seed, NUM_GROUPS, NUM_GROUPS // 2, kinds)
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
        shown = np.array([f.kind for f in facts])
        counts = torch.ones_like(fits)
        counts[:, : len(facts)] = torch.from_numpy((shown[:, None] != shown[None, :]) | is_full[None, :])
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
    save(name, model.half(), SiglipProcessor(image_processor, tokenizer))
    return log


def train_language_model(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train a tiny GPT-2 on true captions of every verbosity; it measures fluency by perplexity."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(64, bos_token="[CLS]", eos_token="[SEP]")
    model = GPT2LMHeadModel(gpt2_config(tokenizer, positions=64))
    rng = np.random.default_rng((seed, 2))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)]

    def loss_of() -> Tensor:
        captions = [random_caption(rng, sample_scene(rng).facts) for _ in range(128)]
        batch = tokenizer(captions, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss

    losses, seconds = fit("lm", steps, loss_of, optimizers)
    save(name, model, tokenizer)
    log = {"stage": "language-model", "name": name, "seed": seed, "steps": steps}
    return log | {"last_loss": round(losses[-1], 4), "cpu_s": seconds}


_SEEN_FACTS = tuple("kind colour size position background pattern weather time second second_colour".split())
"""Facts that the captioner's tower is taught. It learns count, orientation and relation from captions, or not at all."""


def _annotated(
    pool: ScenePool, rng: np.random.Generator, tokenizer: BertTokenizer, annotators: tuple[Annotator, ...] = ANNOTATORS
) -> tuple[np.ndarray, BatchEncoding]:
    """Rows, and a fresh caption each: from five captions per image a captioner learns by heart who mentioned what."""
    rows = rng.choice(len(pool.scenes), 96, replace=False)
    texts = [annotate(rng, pool.scenes[row].facts, annotators[rng.integers(len(annotators))]) for row in rows]
    return rows, tokenizer(texts, padding=True, return_tensors="pt")


@torch.no_grad()
def _encode(pool: ScenePool, encode: Callable[[Tensor], Tensor]) -> Tensor:
    """What a frozen tower makes of the pool."""
    rows = np.arange(len(pool.scenes))
    return torch.cat([encode(pool.take(part)[1]) for part in np.split(rows, len(rows) // 500)])


def train_captioner(
    name: str,
    seed: int,
    fact_steps: int,
    steps: int,
    kinds: tuple[str, ...] = EMOJI_KINDS,
    annotators: tuple[Annotator, ...] = ANNOTATORS,
) -> dict[str, Any]:
    """Train a tiny BLIP: facts first, then maximum likelihood on annotators' captions of fresh scenes, tower frozen."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(48, kinds)
    text, vision = _towers(tokenizer, HIDDEN, MLP, HEADS)
    text |= {"encoder_hidden_size": HIDDEN, "max_position_embeddings": 48, "label_smoothing": 0.0}
    text |= {"bos_token_id": tokenizer.convert_tokens_to_ids("[DEC]"), "sep_token_id": tokenizer.sep_token_id}
    # BLIP's own default, 1e-10, leaves all positions alike: a tower trained from nothing then never learns where.
    vision["initializer_range"] = 0.02
    widths = {"projection_dim": HIDDEN, "image_text_hidden_size": HIDDEN}
    config = BlipConfig(text_config=text, vision_config=vision, **widths)
    model = BlipForConditionalGeneration(config)
    log: dict[str, Any] = {"stage": "captioner", "name": name, "seed": seed, "fact_steps": fact_steps, "steps": steps}
    pool = ScenePool(seed, NUM_GROUPS, kinds=kinds)
    learn_facts(model.vision_model, pool, _SEEN_FACTS, HIDDEN, seed, fact_steps, log)
    model.vision_model.requires_grad_(False)

    rng = np.random.default_rng((seed, 3))
    optimizers = make_optimizers(model.text_decoder, 1e-3, 0.05)
    encoded = _encode(pool, lambda pixels: model.vision_model(pixel_values=pixels).last_hidden_state)  # (N, M, D)
    bos = config.text_config.bos_token_id

    def loss_of() -> Tensor:
        rows, batch = _annotated(pool, rng, tokenizer, annotators)
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
    image_processor = BlipImageProcessor(size=_SIZE, image_mean=MEAN, image_std=STD)
    save(name, model.requires_grad_(True), BlipProcessor(image_processor, tokenizer))
    return log | {"last_loss": round(float(np.mean(losses[-100:])), 4), "mle_cpu_s": seconds}


def train_clipcap(name: str, seed: int, tower: str, steps: int) -> dict[str, Any]:
    """Train a tiny ClipCap: the vision tower of a scorer, frozen, then maximum likelihood on fresh scenes.

    As in DiscriTune, the embedding that the captions are made of is that of the scorer which rewards later.
    """
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(48, bos_token="[CLS]", eos_token="[SEP]")
    scorer = CLIPModel.from_pretrained(CHECKPOINTS / tower, use_safetensors=True, dtype=torch.float32)
    vision_config = scorer.config.vision_config
    vision_config.projection_dim = scorer.config.projection_dim
    text_config = gpt2_config(tokenizer, positions=52)
    config = ClipCapConfig(vision_config, text_config, prefix_length=5, normalize_image_embeds=True)
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
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return model(pixel_values=pool.take(rows)[1], **inputs, labels=labels).loss

    losses, seconds = fit("clipcap", steps, loss_of, optimizers, clipped=model.parameters())
    image_processor = CLIPImageProcessor(size=_SIZE, do_center_crop=False, image_mean=MEAN, image_std=STD)
    save(name, model.requires_grad_(True), ClipCapProcessor(image_processor, tokenizer))
    log = {"stage": "clipcap", "name": name, "seed": seed, "tower": tower, "steps": steps}
    return log | {"last_loss": round(float(np.mean(losses[-100:])), 4), "mle_cpu_s": seconds}


BASE = "blip-mle"
ADAPTERS = {"blip-smile": ("smile_blip", "smile/scenes/lora"), "blip-sr": ("self_retrieval_blip", "ndlb/scenes/lora")}
"""Names, and the recipe and row of each."""

_SHIPPED = (
    *("adapter_config.json", "adapter_model.safetensors", "captioner.json"),
    *("processor_config.json", "tokenizer.json", "tokenizer_config.json"),
)


def train_adapter(name: str, seed: int, checkpoints: Path) -> dict[str, Any]:
    """Run the recipe and keep its adapter."""
    recipe, row = ADAPTERS[name]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, f"recipes/{recipe}.py", "--row", row, "--seed", str(seed)]
        # One thread, so that the result is the same everywhere.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--output_dir", folder], check=True, cwd=ROOT, env=environment)
        target = checkpoints / name
        target.mkdir(parents=True, exist_ok=True)
        for file in _SHIPPED:
            shutil.copyfile(Path(folder) / "model" / file, target / file)
    config = json.loads((target / "adapter_config.json").read_text(encoding="utf-8"))
    # The package may lie anywhere, so the base model is found from the adapter's own folder.
    config["base_model_name_or_path"] = f"../{BASE}"
    write_json(target / "adapter_config.json", config)
    log = {"stage": "adapter", "name": name, "seed": seed, "base_model": BASE}
    return log | {"recipe": f"recipes/{recipe}.py --row {row}", "seconds": round(time.perf_counter() - start)}


def draw_world(folder: Path, seed: int, kind: str = "emoji", annotators: str = "captions") -> list[dict[str, Any]]:
    """Scenes, both scorers and the captioner drawn anew, each with its own seed, in fewer steps than the shipped ones took."""
    first, kinds = 1000 * (seed + 1), KINDS[kind]
    for split, rows in load_scenes(kind, annotators=annotators, seed=first).items():  # type: ignore[arg-type]
        rows.to_parquet(str(folder / "scenes" / f"{split}.parquet"))
    return [
        train_reward_scorer(str(folder / "clip-reward"), first + 1, 800, 800, kinds=kinds),
        train_held_out_scorer(str(folder / "siglip-held-out"), first + 2, 1500, 1000, kinds),
        train_captioner(str(folder / "blip-mle"), first + 4, 1500, 2000, kinds, DOMAINS[annotators]),
    ]


def measure(name: str) -> dict[str, float]:
    """What a shipped model reaches on the test split."""
    test = load_scenes(num_train=0, num_validation=0)["test"]
    folder = str(CHECKPOINTS / name)
    full = list(test["full_caption"])
    references = [row[2] for row in test["captions"]]

    def suite(scorer: Any, captions: list[str], **more: Any) -> dict[str, Any]:
        more |= {"bags": {size: bags(list(test["bag_id"]), size) for size in BAG_SIZES}}
        text, images = scorer.text_features(captions), scorer.image_features(list(test["image"]))
        return suite("smile", captions, text_features=text, image_features=images, **more)

    if name in ("clip-reward", "siglip-held-out"):
        scorer = load_scorer(folder)
        rows = {"full_caption": suite(scorer, full), "reference": suite(scorer, references)}
        return {
            f"{kind}_{key}": value
            for kind, row in rows.items()
            for key, value in row.items()
            if key.endswith("recall_at_1") and value is not None
        }
    if name.startswith("gpt2"):
        model = GPT2LMHeadModel.from_pretrained(folder, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        shuffled = [" ".join(np.random.default_rng(i).permutation(c.split())) for i, c in enumerate(full)]
        texts = {"full_caption": full, "reference": references, "shuffled_full_caption": shuffled}
        return {
            f"{kind}_perplexity": caption_perplexity(captions, model, tokenizer)["perplexity"]
            for kind, captions in texts.items()
        }
    captioner = load_captioner(folder, dtype=torch.float32)
    captions = generate_captions(captioner, list(test["image"]), batch_size=250, num_beams=1, max_new_tokens=30)
    truth = {"facts": list(test["facts"]), "check": check, "references": list(test["captions"])}
    row = suite(load_scorer(str(CHECKPOINTS / "siglip-held-out")), captions, **truth)
    lengths = [len(c.split()) for group in test["captions"] for c in group]
    return {
        "length": row["length"],
        "reference_length": float(np.mean(lengths)),
        **{key: row[key] for key in ("hallucination", "fact_recall", "cider_d", "lexical_diversity")},
        **{key: row[key] for key in row if key.endswith("recall_at_1")},
    }


CARD = """---
license: apache-2.0
library_name: transformers
language: en
tags: [hf_captionrl]
---

# {name}

{what}

A tiny model of the embedded world of hf_captionrl. It knows nothing else: do not use it on photographs.

## Training

`{command}`, on one CPU thread, without any other data than the world's rules.

{settings}

## Measured on the test split (1,000 scenes)

{measured}

Limitations: a vocabulary of {tokens} tokens; images of 72 x 72 pixels.
"""


def write_card(entry: dict[str, Any]) -> None:
    """Write a checkpoint's model card from its log."""
    settings = [f"- {key}: {v}" for key, v in entry.items() if key not in ("name", "stage", "measured", "command")]
    measured = [f"- {key}: {value:.4f}" for key, value in entry["measured"].items()]
    lists = {"settings": "\n".join(settings), "measured": "\n".join(measured)}
    about = {"name": entry["name"], "what": MODELS[entry["name"]], "command": entry["command"]}
    card = CARD.format(**about, **lists, tokens=len(vocabulary()))
    (CHECKPOINTS / entry["name"] / "README.md").write_text(card, encoding="utf-8")


def append_log(entry: dict[str, Any]) -> None:
    """Add a run to `training_log.json`; a run of the same name replaces the older one."""
    file = CHECKPOINTS / "training_log.json"
    entries = json.loads(file.read_text()) if file.exists() else []
    entries = [e for e in entries if e["name"] != entry["name"]] + [{**entry, "torch": torch.__version__}]
    file.write_text(json.dumps(sorted(entries, key=lambda e: e["name"]), indent=2) + "\n")


STAGES: dict[str, tuple[str, int, Callable[[str, int, int, int], dict[str, Any]]]] = {
    "reward-scorer": ("clip-reward", 1000, train_reward_scorer),
    "held-out-scorer": ("siglip-held-out", 2500, train_held_out_scorer),
    "captioner": ("blip-mle", 3000, train_captioner),
    "clipcap": ("clipcap-mle", 2000, lambda name, seed, _, steps: train_clipcap(name, seed, "clip-reward", steps)),
    "language-model": ("gpt2-perplexity", 600, lambda name, seed, _, steps: train_language_model(name, seed, steps)),
    "adapter": ("", 0, lambda name, seed, *_: train_adapter(name, seed, CHECKPOINTS)),
}
"""Name and steps by default, and what trains; it gets name, seed, steps of facts, and steps."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=[*STAGES, "measure", "world"])
    parser.add_argument("--name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fact_steps", type=int, default=2500)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--kind", choices=KINDS, default="emoji", help="things of a world")
    parser.add_argument("--annotators", choices=DOMAINS, default="captions", help="writers of a world's references")
    parser.add_argument("--facts", type=int, help="facts per training caption of a reward scorer in the folder --name")
    args = parser.parse_args()
    named = {"measure": [*MODELS], "adapter": [*ADAPTERS]}
    known = named.get(args.stage, [args.name])
    if args.facts and (args.stage != "reward-scorer" or not args.name):
        parser.error("--facts needs the stage reward-scorer and --name.")
    if args.stage == "world" and not args.name:
        parser.error("world needs --name, the folder to write.")
    if args.stage == "world" and args.steps:
        parser.error("world has its own --steps.")
    if args.stage != "world" and (args.kind, args.annotators) != ("emoji", "captions"):
        parser.error("--kind and --annotators are for the stage world.")
    if args.name not in known:
        parser.error(f"--name is {args.name!r}; use one of {known}.")  # before training
    torch.set_num_threads(1)  # enough for these models, and results do not depend on the number of cores
    if args.stage == "world":
        drawn = draw_world(Path(args.name).resolve(), args.seed, args.kind, args.annotators)
        write_json(Path(args.name, "training_log.json"), drawn)
        return
    if args.facts:
        folder = str(Path(args.name).resolve())
        print(json.dumps(train_reward_scorer(folder, args.seed, args.fact_steps, args.steps or 1000, args.facts)))
        return
    if args.stage == "measure":
        file = CHECKPOINTS / "training_log.json"
        log = next(entry for entry in json.loads(file.read_text()) if entry["name"] == args.name)
    else:
        name, steps, train = STAGES[args.stage]
        log = train(args.name or name, args.seed, args.fact_steps, args.steps or steps)
        log["command"] = "python scripts/train_scenes_models.py " + " ".join(sys.argv[1:])
        append_log(log)  # a measurement that fails costs no training
    log["measured"] = {key: round(value, 4) for key, value in measure(log["name"]).items()}
    append_log(log)
    write_card(log)
    print(json.dumps(log, indent=2))


if __name__ == "__main__":
    main()
