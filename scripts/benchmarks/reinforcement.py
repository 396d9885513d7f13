r"""Reinforcement: whole steps beside the step as it is usually written, and sampled captions beside transformers' loop.

Legend: B images, G captions per image, N = B * G captions, T tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin

from hf_captionrl.captioners import Completions, decoding
from hf_captionrl.losses import IGNORE_INDEX
from hf_captionrl.retrieval import HFScorer
from scripts.benchmarks.models import RL_SHAPES, World, build_world, for_device
from scripts.benchmarks.timing import Case, Work

BARS = {"blip-base": 4.5, "clipcap": 2.2}
"""How many times as fast as the naive step ours has to be, with captions of COCO's lengths."""

GENERATION_BAR = 1.5

LENGTHS = {"COCO": (12.0, 2.6), "20 tokens": (20.0, 0.0)}
"""Mean and standard deviation of tokens per caption; COCO's captions have 10.5 words with standard deviation 2.4."""


def planned_lengths(mean: float, deviation: float, number: int, *, longest: int = 20) -> Tensor:
    """Tokens of each caption `(N,)`, with the end token, from 5 to `longest`."""
    return (mean + deviation * torch.randn(number)).round().long().clamp(min(5, longest), longest)


@contextmanager
def ending_at(lengths: Tensor, end: int = 3) -> Iterator[None]:
    """Both loops write the token `end` where a caption has its planned length, and no captions are shorter."""
    draw, multinomial, steps = decoding.draw_tokens, torch.multinomial, itertools.count(1)

    def uniforms(*size: int, **kwargs: Any) -> Tensor:
        numbers = torch.empty(size, **kwargs).uniform_(0.01, 1.0)  # (T, N)
        ends = torch.arange(1, size[0] + 1, device=numbers.device).unsqueeze(1) == lengths.to(numbers.device)
        return numbers.masked_fill(ends, 0.0)

    def drawn(scores: Tensor, numbers: Tensor) -> Tensor:
        return torch.where(numbers == 0, end, draw(scores, numbers))

    def sampled(probabilities: Tensor, num_samples: int) -> Tensor:
        ends = (lengths == next(steps)).to(probabilities.device)
        return torch.where(ends.unsqueeze(1), end, multinomial(probabilities, num_samples))

    with (
        mock.patch.object(decoding, "draw_tokens", drawn),
        mock.patch.object(torch, "rand", uniforms),
        mock.patch.object(torch, "multinomial", sampled),
    ):
        yield


# --- the naive step -------------------------------------------------------------------------------------------------


def padded_text(scorer: HFScorer, captions: list[str]) -> Any:
    """Tokens of captions, padded to the full length of the scorer."""
    settings = {"padding": "max_length", "truncation": True, "max_length": scorer.max_text_tokens}
    return scorer.tokenizer(captions, **settings, return_tensors="pt", return_token_type_ids=False)


class NaiveStep:
    """Repeats each image for its captions and encodes it in every forward pass; pads texts to the scorer's full length;
    computes the log-probabilities of the policy that wrote in a separate pass, from `(N, T, V)` logits.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.model = world.stock
        self.group_size = world.shape.group_size
        # (N, 3, H, W)
        self.pixel_values = world.batch["pixel_values"].repeat_interleave(self.group_size, dim=0)

    def generate(self) -> tuple[Tensor, Tensor, list[str]]:
        """Sample. Returns ids with the start token `(N, 1 + T)`, which of them count, and the captions."""
        captioner = self.world.captioner
        settings: dict[str, Any] = {"suppress_tokens": self.world.suppressed} if self.world.suppressed else {}
        settings |= {"do_sample": True, "top_k": 0, "max_new_tokens": self.world.shape.num_tokens}
        self.model.eval()
        with torch.no_grad():
            input_ids = self.model.generate(pixel_values=self.pixel_values, **settings)
        self.model.train()
        ended = (input_ids[:, 1:] == captioner.eos_token_id).long()
        mask = F.pad((ended.cumsum(1) - ended == 0).long(), (1, 0), value=1)  # (N, 1 + T)
        return input_ids, mask, captioner.tokenizer.batch_decode(input_ids, skip_special_tokens=True)

    def scorer_images(self) -> Tensor:
        """Features of the images `(B, D)`, which our trainer has cached."""
        with torch.no_grad():
            encoded = self.world.scorer.model.get_image_features(pixel_values=self.world.scorer_pixels)
        return F.normalize(encoded.pooler_output, dim=-1)

    def score(self, captions: list[str]) -> Tensor:
        """Leave-one-out advantages `(N,)` of rewards against the other images of the batch."""
        scorer, G = self.world.scorer, self.group_size
        text = padded_text(scorer, captions).to(self.world.scorer_pixels.device)
        with torch.no_grad():
            text_features = F.normalize(scorer.model.get_text_features(**text).pooler_output, dim=-1)  # (N, D)
        similarity = scorer.logit_scale * text_features @ self.scorer_images().T  # (N, B)
        targets = torch.arange(len(similarity), device=similarity.device) // G
        rewards = similarity.log_softmax(-1).gather(1, targets[:, None]).view(-1, G)  # (B, G)
        return (rewards - (rewards.sum(1, keepdim=True) - rewards) / (G - 1)).flatten()

    def log_probs(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Of each token behind the first, from full logits: `(N, 1 + T)` to `(N, T)`."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        logits = self.model(pixel_values=self.pixel_values, **inputs).logits  # (N, 1 + T, V)
        return logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)

    def loss(self, input_ids: Tensor, attention_mask: Tensor, advantages: Tensor) -> Tensor:
        """The clipped surrogate of captions `(N, 1 + T)` with their advantages `(N,)`."""
        with torch.no_grad():
            old = self.log_probs(input_ids, attention_mask)
        new = self.log_probs(input_ids, attention_mask)
        ratio, advantages = (new - old).exp(), advantages.to(new.dtype)[:, None]
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)  # (N, T)
        mask = attention_mask[:, 1:].to(new.dtype)
        return -((gain * mask).sum(1) / mask.sum(1)).mean()


# --- whole steps ----------------------------------------------------------------------------------------------------


def _planned(world: World) -> Any:
    return nullcontext() if world.lengths is None else ending_at(world.lengths)


def _ours(world: World, *, cached: bool) -> Tensor:
    """The trainer's step; with `cached`, its data loader brings features, not pixels."""
    inputs = dict(world.batch)
    if cached:
        inputs["image_features"] = world.cached_features
        del inputs["pixel_values"]
    with _planned(world):
        world.trainer.rollouts.roll_out([inputs], world.trainer.state, bag_size=0)
    world.trainer.compute_loss(world.trainer.model, inputs).backward()
    return (inputs["labels"] != IGNORE_INDEX).sum(1)


def _naive(world: World) -> Tensor:
    step = NaiveStep(world)
    with _planned(world):
        input_ids, mask, captions = step.generate()
    step.loss(input_ids, mask, step.score(captions)).backward()
    return mask[:, 1:].sum(1)


STEPS: dict[str, Callable[[World], Tensor]] = {
    "ours": functools.partial(_ours, cached=False),
    "ours, images cached": functools.partial(_ours, cached=True),
    "naive": _naive,
}
"""From a world to the tokens of each caption; the gradients are left in the parameters."""


def take_gradients(world: World) -> dict[str, Tensor]:
    """The gradients of all weights, which have none afterwards."""
    found = {name: p.grad for name, p in world.parameters.items() if p.grad is not None}
    for parameter in world.parameters.values():
        parameter.grad = None
    return found


def check_equal(world: World, nats: float = 1e-3, relative: float = 1e-4) -> dict[str, float]:
    """Make sure that both steps compute the same advantages and gradients from one rollout."""
    inputs, naive = dict(world.batch), NaiveStep(world)
    with _planned(world):
        world.trainer.rollouts.roll_out([inputs], world.trainer.state, bag_size=0)
    world.trainer.compute_loss(world.trainer.model, inputs).backward()
    ours = take_gradients(world)
    captions = world.captioner.decode(inputs["labels"].clamp(min=0), inputs["labels"] != IGNORE_INDEX)
    advantages = naive.score(captions)
    naive.loss(inputs["input_ids"], inputs["attention_mask"], inputs["advantages"]).backward()
    theirs = take_gradients(world)
    if ours.keys() != theirs.keys():
        raise RuntimeError(
            f"Only one of the steps has a gradient of {sorted(ours.keys() ^ theirs.keys())[:3]}: they do not train the "
            "same weights, so their times say nothing. Compare what is frozen."
        )
    difference = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours)
    length = sum(float(gradient.double().square().sum()) for gradient in theirs.values())
    found = {
        "advantages": float((advantages - inputs["advantages"]).abs().max()),
        "gradients": (difference / length) ** 0.5 if length else float("nan"),
    }
    for name, bound in (("advantages", nats), ("gradients", relative)):
        if not found[name] <= bound:
            raise RuntimeError(
                f"The {name} of the two steps differ by {found[name]:.2e}, more than {bound:.0e}: a time would say "
                "nothing. Compare log-probabilities and rewards of one caption."
            )
    return found


def plan_lengths(world: World) -> None:
    """Draw COCO's lengths for the captions of the next steps; the shipped captioner ends its captions by itself."""
    if world.shape.kind != "scenes":
        number = world.shape.batch_size * world.shape.group_size
        world.lengths = planned_lengths(*LENGTHS["COCO"], number, longest=world.shape.num_tokens)


def _size(world: World) -> str:
    return f"{world.shape.batch_size} x {world.shape.group_size} captions"


def rl_case(name: str, device: str, dtype: torch.dtype, seed: int) -> Case:
    """Sample, score, update: `SelfRetrievalTrainer` beside [`NaiveStep`], on the very same weights and images."""
    world = build_world(for_device(RL_SHAPES[name], device), seed, device=device)
    plan_lengths(world)
    # Sums of bf16 in another order differ visibly; whether both are the same step is seen in fp32.
    differences = check_equal(world)
    optimizer = torch.optim.AdamW(list(world.parameters.values()), lr=1e-7, fused=True)

    def step(which: str) -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            STEPS[which](world)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    works: dict[str, Work] = {which: functools.partial(step, which) for which in STEPS}
    works["the scorer's images, which ours has cached"] = NaiveStep(world).scorer_images
    bars = [("naive", which, BARS.get(name)) for which in STEPS if which != "naive"]
    return Case(_size(world), works, bars, functools.partial(plan_lengths, world), {"differences": differences}, True)


# --- sampled captions -----------------------------------------------------------------------------------------------


def write(world: World, loop: str, lengths: Tensor, **settings: Any) -> Completions:
    """Sampled captions of the planned lengths `(N,)` from cached features, by our loop or that of transformers."""
    if loop == "transformers":
        settings["custom_generate"] = GenerationMixin._sample  # what `generate` calls without our loop
    with ending_at(lengths):
        written = world.captioner.generate(
            image_features=world.cached_features,
            max_new_tokens=world.shape.num_tokens,
            do_sample=True,
            top_k=0,
            num_return_sequences=world.shape.group_size,
            suppress_tokens=world.suppressed,
            **settings,
        )
    wrote = written.mask.sum(1).tolist()
    if wrote != lengths.tolist():
        raise AssertionError(f"{loop} wrote captions of {wrote} tokens, not {lengths.tolist()}.")
    return written


def generation_case(name: str, device: str, dtype: torch.dtype, seed: int) -> Case:
    """Our decoding loop beside that of transformers; on a GPU also with a static cache, where the model has one."""
    world = build_world(for_device(RL_SHAPES[name], device), seed, dtype, device)
    _ = world.cached_features  # encoded before anything is timed
    number = world.shape.batch_size * world.shape.group_size
    works: dict[str, Work] = {}
    bars: list[tuple[str, str, float | None]] = []
    for kind, (mean, deviation) in LENGTHS.items():
        lengths = planned_lengths(mean, deviation, number, longest=world.shape.num_tokens).to(device)
        for loop in ("ours", "transformers"):
            works[f"{loop}, {kind}"] = functools.partial(write, world, loop, lengths)
        bars.append((f"transformers, {kind}", f"ours, {kind}", GENERATION_BAR if kind == "COCO" else None))
        if kind == "COCO" and device == "cuda" and world.shape.kind == "clipcap":
            static = {"cache_implementation": "static"}
            works["transformers, static cache"] = functools.partial(write, world, "transformers", lengths, **static)
    return Case(_size(world), works, bars)
