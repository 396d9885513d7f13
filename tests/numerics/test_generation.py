"""Log-probabilities of sampled tokens are equal in generation and in the loss, for every family.

Generation uses caches, one token at a time; log-probabilities come from one pass over the whole caption, from the
tapped head. They are compared with the scores that `generate` sampled from.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from hf_captionrl.captioners import Captioner, load_captioner
from hf_captionrl.trainers.caption_rl_trainer import drawing_from_the_policy
from tests.tiny import FAMILIES, tiny_images, tiny_model
from tests.tiny.chat import CHAT_TYPES, tiny_chat
from tests.tiny.families import FAMILY_NAMES, tiny_family
from tests.tolerances import assert_close

TOKENS, G = 4, 2


class Recorder(LogitsProcessor):
    """Records the scores of every step."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.steps.append(scores.detach().float().clone())
        return scores


def build(name: str) -> Captioner:
    make: Any = tiny_model if name in FAMILIES else tiny_family if name in FAMILY_NAMES else tiny_chat
    model, processor = make(name)
    return load_captioner(model, processor=processor)


def write(captioner: Captioner, images: dict[str, Tensor], **settings: Any) -> tuple[Any, Tensor]:
    """Sampled captions, and the log-probabilities `(N, T, V)` of their distributions."""
    recorder = Recorder()
    torch.manual_seed(0)
    how = {"do_sample": True, "top_k": 0, "max_new_tokens": TOKENS, "num_return_sequences": G, **settings}
    with drawing_from_the_policy(captioner):
        written = captioner.generate(**images, logits_processor=LogitsProcessorList([recorder]), **how)
    return written, torch.stack(recorder.steps, dim=1).log_softmax(-1)


def given(captioner: Captioner, images: dict[str, Tensor], written: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities `(N, T)` of the tokens by the captioner, and logits `(N, T, V)` of the model's forward."""
    batch = {**captioner.encode_completions(written.ids, written.mask), **images}
    labels = captioner.align_labels(batch["labels"])
    mine, logits = [], []
    with torch.no_grad():
        log_probs = captioner.log_probs(batch)
        whole = captioner.model(**{key: value for key, value in batch.items() if key != "labels"}).logits.float()
    whole = whole if captioner.is_encoder_decoder else whole[:, -labels.size(1) - 1 : -1]
    T = written.ids.size(1)
    for row, label in enumerate(labels):
        at = (label != -100).nonzero()[:, 0]
        at = torch.cat([at, at.new_zeros(T - len(at))])  # padding is ignored
        mine.append(log_probs[row, at])
        logits.append(whole[row, at])
    return torch.stack(mine), torch.stack(logits)


@pytest.mark.parametrize("name", [*FAMILIES, *FAMILY_NAMES, *CHAT_TYPES])
def test_log_probs_of_generation_and_loss_are_equal(name):
    captioner = build(name)
    images = captioner.encode_images(tiny_images(2, size=20))
    written, sampled_from = write(captioner, images)
    assert len(written.ids) == 2 * G
    mine, logits = given(captioner, images, written)
    mask = written.mask
    assert mask.sum() > len(mask)  # captions of more than one token
    ids = written.ids.unsqueeze(-1)
    whole = logits.log_softmax(-1).gather(-1, ids)[..., 0]
    assert_close(mine[mask], whole[mask], magnitude=10)
    # Chat models never generate their image token; the other tokens share its probability.
    sampled_from = sampled_from[:, : mask.size(1)]
    allowed = logits.masked_fill(sampled_from.isinf(), -torch.inf).log_softmax(-1)
    assert sampled_from.isinf().sum(-1).max() <= 1
    for step in range(mask.size(1)):
        here = mask[:, step]
        assert_close(sampled_from[here, step], allowed[here, step], ulps=32, magnitude=10)


def test_another_caption_is_detected():
    """Negative control: the same scores against the captions of the other image."""
    captioner = build("blip")
    images = captioner.encode_images(tiny_images(2, size=20))
    written, sampled_from = write(captioner, images)
    swapped = {name: value.flip(0) for name, value in images.items()}
    _, logits = given(captioner, swapped, written)
    assert (sampled_from[:, 0] - logits.log_softmax(-1)[:, 0]).abs().max() > 1e-2


def test_another_temperature_is_detected():
    """Negative control: log-probabilities at another temperature differ."""
    captioner = build("git")
    images = captioner.encode_images(tiny_images(2, size=20))
    written, _ = write(captioner, images, temperature=0.5)
    batch = {**captioner.encode_completions(written.ids, written.mask), **images}
    with torch.no_grad():
        one, half = (captioner.log_probs(batch, temperature=t).sum(1) for t in (1.0, 0.5))
    assert (half - one).abs().min() > 1e-2
