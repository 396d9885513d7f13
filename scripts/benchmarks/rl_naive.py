r"""The reinforcement step as it is usually written, with nothing but transformers: the baseline for ours.

Legend: B images, G captions per image, N = B * G captions, T tokens, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_captionrl.retrieval import HFScorer
from scripts.benchmarks.rl_models import World


def padded_text(scorer: HFScorer, captions: list[str]) -> Any:
    """Tokens of captions, padded to the full length of the scorer."""
    return scorer.tokenizer(
        captions,
        padding="max_length",
        truncation=True,
        max_length=scorer.max_text_tokens,
        return_tensors="pt",
        return_token_type_ids=False,
    )


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
        settings = {"suppress_tokens": self.world.suppressed} if self.world.suppressed else {}
        self.model.eval()
        with torch.no_grad():
            input_ids = self.model.generate(
                pixel_values=self.pixel_values,
                do_sample=True,
                top_k=0,
                max_new_tokens=self.world.shape.num_tokens,
                **settings,
            )
        self.model.train()
        ended = (input_ids[:, 1:] == captioner.eos_token_id).long()
        mask = F.pad((ended.cumsum(1) - ended == 0).long(), (1, 0), value=1)  # (N, 1 + T)
        captions = captioner.tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        return input_ids, mask, captions

    def score(self, captions: list[str], images: Callable[[], AbstractContextManager[None]] | None = None) -> Tensor:
        """Rewards against the other images of the batch, and leave-one-out advantages. Returns `(N,)`."""
        scorer, G = self.world.scorer, self.group_size
        text = padded_text(scorer, captions).to(self.world.scorer_pixels.device)
        with torch.no_grad():
            text_features = F.normalize(scorer.model.get_text_features(**text).pooler_output, dim=-1)  # (N, D)
            with images() if images is not None else torch.no_grad():
                encoded = scorer.model.get_image_features(pixel_values=self.world.scorer_pixels)
            image_features = F.normalize(encoded.pooler_output, dim=-1)  # (B, D)
        similarity = scorer.logit_scale * text_features @ image_features.T  # (N, B)
        targets = torch.arange(len(similarity), device=similarity.device) // G
        rewards = similarity.log_softmax(-1).gather(1, targets[:, None]).view(-1, G)  # (B, G)
        return (rewards - (rewards.sum(1, keepdim=True) - rewards) / (G - 1)).flatten()

    def log_probs(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Of each token behind the first, from full logits.

        `(N, 1 + T)` to `(N, T)`.
        """
        logits = self.model(
            pixel_values=self.pixel_values, input_ids=input_ids, attention_mask=attention_mask
        ).logits  # (N, 1 + T, V)
        return logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)

    def loss(self, input_ids: Tensor, attention_mask: Tensor, advantages: Tensor) -> Tensor:
        """The clipped surrogate.

        `input_ids` and `attention_mask` `(N, 1 + T)`, `advantages` `(N,)`.
        """
        with torch.no_grad():
            old = self.log_probs(input_ids, attention_mask)
        new = self.log_probs(input_ids, attention_mask)
        ratio, advantages = (new - old).exp(), advantages.to(new.dtype)[:, None]
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)  # (N, T)
        mask = attention_mask[:, 1:].to(new.dtype)
        return -((gain * mask).sum(1) / mask.sum(1)).mean()
