"""The gallery reward equals a plain loop, also with a memory-mapped gallery and an index of faiss' interface."""

import numpy as np
import pytest
import torch

from hf_captionrl.experimental.gallery import GalleryReward, nearest_in_gallery
from hf_captionrl.rewards.base import resolve_rewards
from tests.rewards.conftest import TableScorer, rollouts
from tests.tolerances import close

__all__ = ["rollouts"]
ROWS, G, K = [3, 1, 6], 2, 3


class Index:
    """The interface of faiss, in NumPy."""

    def __init__(self, vectors):
        self.vectors = vectors

    def search(self, queries, k):
        scores = queries @ self.vectors.T
        rows = np.argsort(-scores, axis=1)[:, :k]
        return np.take_along_axis(scores, rows, 1), rows


@pytest.mark.parametrize("kind", ["training images", "memory-mapped", "index", "faiss"])
def test_reward_equals_a_plain_loop(rollouts, tmp_path, kind):
    generator = torch.Generator().manual_seed(0)
    unit = torch.nn.functional.normalize
    images, others = (unit(torch.randn(n, 5, generator=generator), dim=1) for n in (8, 30))
    captions = [f"image {row} caption {g}" for row in ROWS for g in range(G)]
    texts = unit(images[ROWS].repeat_interleave(G, 0) + torch.randn(6, 5, generator=generator), dim=1)
    scorer = TableScorer(dict(zip(captions, texts, strict=True)), images)
    np.save(tmp_path / "gallery.npy", others.numpy())
    gallery = None if kind == "training images" else np.load(tmp_path / "gallery.npy", mmap_mode="r")
    index = Index(np.asarray(gallery)) if kind == "index" else None
    if kind == "faiss":
        index = pytest.importorskip("faiss", reason="faiss is not installed").IndexFlatIP(5)
        index.add(np.asarray(gallery))
    reward = GalleryReward(scorer, gallery, index, num_retrieved=K, consistency_weight=0.5)
    reward.prepare(rollouts.data([["a"]] * 8))
    context, expected = rollouts.context(captions, ROWS), []
    for n, caption in enumerate(captions):
        target = ROWS[n // G]
        pool = images if gallery is None else others
        rows = [row for row in range(len(pool)) if gallery is not None or row != target]
        rows = sorted(rows, key=lambda row: -float(pool[row] @ scorer.texts[caption]))[:K]
        pairs = [float(pool[a] @ pool[b]) for a in rows for b in rows if a != b]
        expected.append(sum(float(pool[row] @ images[target]) for row in rows) / K + 0.5 * sum(pairs) / len(pairs))
    assert reward(context).tolist() == close(expected, dtype="float32")
    assert sorted(context.statistics) == ["gallery/consistency", "gallery/relevance"]


def test_search_in_blocks_finds_what_one_product_finds(monkeypatch):
    queries, gallery = torch.randn(4, 6), torch.randn(50, 6)
    monkeypatch.setattr("hf_captionrl.experimental.gallery._BLOCK", 7)
    assert nearest_in_gallery(queries, gallery.numpy(), 9).tolist() == (queries @ gallery.T).topk(9).indices.tolist()


def test_name_empty_captions_and_what_cannot_work(rollouts):
    assert resolve_rewards("gallery").names == ["gallery"]
    images = torch.nn.functional.normalize(torch.randn(8, 4), dim=1)
    scorer = TableScorer({"a": images[0], "": images[1]}, images)
    reward = GalleryReward(scorer, num_retrieved=2)
    reward.prepare(rollouts.data([["a"]] * 8))
    assert [value == 0 for value in reward(rollouts.context(["a", ""], [0, 1])).tolist()] == [False, True]
    with pytest.raises(ValueError, match="num_retrieved"):
        GalleryReward(scorer, num_retrieved=8).prepare(rollouts.data([["a"]] * 8))
    reward = GalleryReward(scorer, images, Index(images[:1].numpy()), num_retrieved=2)
    reward.index.search = lambda queries, k: (None, np.full((len(queries), k), -1))  # as faiss pads
    reward.prepare(rollouts.data([["a"]] * 8))
    with pytest.raises(ValueError, match="nprobe"):
        reward(rollouts.context(["a", ""], [0, 1]))
    with pytest.raises(ValueError, match="scorer"):
        GalleryReward().prepare(rollouts.data([["a"]] * 8))
