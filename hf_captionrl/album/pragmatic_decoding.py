r"""Pragmatic decoding: captions that a listener would not take for one of the similar images.

Reference: Cohn-Gordon, Goodman and Potts 2018, "Pragmatically Informative Image Captioning with Character-Level Inference",
with words instead of characters.

Legend: B images, K images of a group (the target first, then its distractors), N rows = B * K * beams, V vocabulary, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from hf_captionrl.captioners import Captioner
from hf_captionrl.captioners.eval_mode import evaluating

__all__ = ["PragmaticProcessor", "pragmatic_captions"]


class PragmaticProcessor(LogitsProcessor):
    r"""Makes every step of generation prefer words that the other images of a group make less likely.

    The literal speaker is the captioner, `S0(w | image, prefix)`. The incremental listener knows the group,
    `L(image | prefix, w) ∝ L(image | prefix) S0(w | image, prefix)`, starting from the uniform distribution. The score of
    a word is `log S0(w | target, prefix) + rationality * log L(target | prefix, w)`.

    All rows of a group get the scores of its target, so that they continue the same text; with beams, each row of the
    group therefore has the same beams.

    `rationality` is the listener's weight, >= 0; 0 is the captioner alone.
    """

    def __init__(self, group_size: int, num_beams: int = 1, rationality: float = 1.0) -> None:
        if group_size < 1 or rationality < 0:
            raise ValueError(
                f"group_size is {group_size} and rationality {rationality}. Use at least 1 image, and a rationality of 0 or "
                "more."
            )
        self.group_size = group_size
        self.num_beams = num_beams
        self.rationality = rationality
        self._before: tuple[Tensor, Tensor] | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """Logits or log-probabilities of a step, `(N, V)`, replaced by those of the pragmatic speaker."""
        shape = (len(scores) // (self.group_size * self.num_beams), self.group_size, self.num_beams)
        speaker = scores.float().log_softmax(-1).view(*shape, scores.shape[-1])  # (B, K, beams, V)
        prefix = input_ids.view(*shape, input_ids.shape[-1])[:, 0]  # (B, beams, T)
        joint = self._prior(prefix, speaker)[..., None] + speaker
        # A floor, because a word that no image of the group allows has no listener.
        listener = joint - joint.logsumexp(1, keepdim=True).clamp(min=-1e30)  # (B, K, beams, V)
        target = (speaker[:, 0] + self.rationality * listener[:, 0]).log_softmax(-1)
        self._before = (prefix, listener)
        return target[:, None].expand_as(speaker).reshape(scores.shape).to(scores.dtype)

    def _prior(self, prefix: Tensor, speaker: Tensor) -> Tensor:
        """`log L(image | prefix)`, `(B, K, beams)`: the listener's after the last word of each prefix."""
        uniform = speaker.new_full(speaker.shape[:3], -math.log(self.group_size))
        if self._before is None:
            return uniform
        before, listener = self._before
        if before.shape[-1] + 1 != prefix.shape[-1] or len(before) != len(prefix):
            raise ValueError("The processor has been used before. Use a new PragmaticProcessor for each generation.")
        # Beams are sorted anew at every step: find the one that each continues.
        same = (prefix[:, :, None, :-1] == before[:, None]).all(-1)  # (B, beams, beams before)
        parent = same.int().argmax(-1)  # (B, beams)
        batch = torch.arange(len(prefix), device=prefix.device)[:, None]
        return listener[batch, :, parent, prefix[:, :, -1]].transpose(1, 2)


def pragmatic_captions(
    captioner: Captioner,
    images: Sequence[Image.Image],
    groups: Sequence[Sequence[int]],
    *,
    rationality: float = 1.0,
    num_beams: int = 4,
    num_return_sequences: int = 1,
    **settings: Any,
) -> list[list[str]]:
    """Captions that distinguish the first image of each group from the others.

    A group holds rows of the images, the target first; all groups have the same size. Returns the best caption first.
    """
    size = len(groups[0])
    if any(len(group) != size for group in groups):
        raise ValueError(f"The groups have {sorted({len(g) for g in groups})} images. Use groups of equal size.")
    rows = torch.tensor([row for group in groups for row in group])
    with evaluating(captioner.model), torch.no_grad():
        inputs = {name: value.to(captioner.device) for name, value in captioner.encode_images(list(images)).items()}
        inputs["image_features"] = captioner.encode(captioner.base_model, dict(inputs))
        del inputs["pixel_values"]
        processor = PragmaticProcessor(size, num_beams, rationality)
        found = captioner.generate(
            **{name: value[rows.to(value.device)] for name, value in inputs.items()},
            do_sample=False,
            num_beams=num_beams,
            num_return_sequences=num_return_sequences,
            logits_processor=LogitsProcessorList([processor]),
            **settings,
        ).captions
    each = size * num_return_sequences
    return [found[start : start + num_return_sequences] for start in range(0, len(found), each)]
