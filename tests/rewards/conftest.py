"""Rollouts, a word-level tokenizer and a scorer without a model."""

import pytest
import torch
from torch import Tensor

from hf_captionrl.rewards import Reward, RewardContext, RewardData

EOS = 0


class Words:
    """A tokenizer of whole words like the trainer's `encode`: without start token, with end token."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {"<end>": EOS}
        self.calls = 0

    def __call__(self, captions) -> tuple[Tensor, Tensor]:
        self.calls += 1
        rows = [[*(self.ids.setdefault(w, len(self.ids)) for w in caption.split()), EOS] for caption in captions]
        width = max(map(len, rows))
        ids = torch.tensor([row + [EOS] * (width - len(row)) for row in rows])
        return ids, torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]


class TableScorer:
    """A scorer that reads the features of captions from a table."""

    logit_scale = 100.0
    max_text_tokens = 77
    signature = "table"

    def __init__(self, texts: dict[str, Tensor], images: Tensor) -> None:
        self.texts, self.images = texts, images
        self.read: list[list[str]] = []

    def text_features(self, captions) -> Tensor:
        self.read.append(list(captions))
        return torch.stack([self.texts[caption] for caption in captions])

    def image_features(self, images) -> Tensor:
        return self.images

    def count_truncated(self, captions) -> int:
        return sum(len(caption) > 20 for caption in captions)


class Rollouts:
    """Makes the contexts and the training data of one tokenizer."""

    def __init__(self) -> None:
        self.words = Words()

    def context(self, captions: list[str], rows: list[int], *, ended: bool = True, **kwargs) -> RewardContext:
        ids, mask = self.words(captions)
        if not ended:
            mask = mask & (ids != EOS)
        settings = {
            "ended": torch.full((len(captions),), ended),
            "candidates": torch.tensor(rows),
            "positions": torch.arange(len(rows)),
            "references": [[] for _ in rows],
        } | kwargs
        return RewardContext(
            captions=captions,
            ids=ids,
            mask=mask,
            rows=torch.tensor(rows),
            image_ids=[f"i{row}" for row in rows],
            **settings,
        )

    def data(self, references: list[list[str]], scorer=None, **kwargs) -> RewardData:
        return RewardData(
            image_ids=[f"i{n}" for n in range(len(references))],
            references=references,
            image_features=lambda scorer: scorer.images,
            encode=self.words,
            eos_token_id=EOS,
            device=torch.device("cpu"),
            scorer=scorer,
            **kwargs,
        )


@pytest.fixture
def rollouts() -> Rollouts:
    return Rollouts()


class OfContext(Reward):
    def __init__(self, function, name="of_context"):
        self.function, self.name = function, name

    def __call__(self, context):
        return torch.as_tensor(self.function(context))
