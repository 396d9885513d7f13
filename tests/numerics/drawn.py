"""Examples for the properties of this folder: extreme logits in three precisions, and captions of 0 to 5 tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

IGNORE = -100
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("normal", "wide", "edge", "equal", "one word alone")
V = 11

# The same examples in every run, few enough for the whole folder to take seconds.
few = settings(max_examples=40, deadline=None, derandomize=True, database=None)
fewer = settings(few, max_examples=15)

seeds = st.integers(0, 10_000)
dtypes = st.sampled_from(DTYPES)
kinds = st.sampled_from(KINDS)


def extreme(shape: tuple[int, ...], kind: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Logits of a kind in fp64, each representable in the dtype.

    `edge` stays a factor of 2 below the largest fp16, and at 1e29 where the dtype has fp32's range: masks are made by
    -1e30 (`losses.subset.FILL`).
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "wide":
        drawn = 1e4 * drawn.sign()
    elif kind == "edge":
        drawn = drawn.sign() * (3e4 if dtype == torch.float16 else 1e29)
    elif kind == "equal":
        drawn = torch.full_like(drawn, float(drawn.flatten()[0]) * 100) if drawn.numel() else drawn
    elif kind == "one word alone":
        drawn = torch.full_like(drawn, -1e4)
        drawn[..., seed % shape[-1]] = 1e4
    return drawn.to(dtype).double()


@dataclass
class Drawn:
    """Logits `(B, T, V)` in their dtype and labels `(B, T)`."""

    logits: Tensor
    labels: Tensor

    @property
    def supervised(self) -> Tensor:
        return self.labels != IGNORE

    @property
    def size(self) -> float:
        """Largest logit: the unit of the rounding error of a sum in fp32."""
        return float(self.logits.double().abs().max()) if self.logits.numel() else 0.0


@st.composite
def captions(draw, *, kinds=KINDS, dtypes=DTYPES, least: int = 0) -> Drawn:
    """Up to three captions of 0 to 5 tokens after a prompt; at least `least` tokens are supervised."""
    seed = draw(seeds)
    dtype, kind = draw(st.sampled_from(dtypes)), draw(st.sampled_from(kinds))
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(lambda n: sum(n) >= least))
    prompt = draw(st.integers(0, 2))
    words = draw(st.sampled_from([1, 2, V]))  # V_D of one word is common
    T = prompt + max(max(lengths), 1)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.full((len(lengths), T), IGNORE)
    for row, length in enumerate(lengths):
        labels[row, prompt : prompt + length] = (torch.randint(words, (length,), generator=generator) + seed % V) % V
    return Drawn(extreme((*labels.shape, V), kind, dtype, seed).to(dtype), labels)
