"""Features of a scorer on a GPU can be combined with features in main memory."""

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import hf_captionrl.metrics as metrics
from tests.tolerances import close


class Elsewhere(torch.Tensor):
    """A tensor that cannot be combined with plain tensors, as if it were on another device."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.cpu, torch.Tensor.numpy):
            assert function is torch.Tensor.cpu, "only what lies on the CPU becomes an array"
            return torch.Tensor.as_subclass(args[0], torch.Tensor)
        if any(type(leaf) is torch.Tensor and leaf.ndim for leaf in tree_leaves((args, kwargs))):
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(function, types, args, kwargs or {})


def away(features):
    return features.as_subclass(Elsewhere)


@pytest.fixture
def remote(held_out_scorer, monkeypatch):
    for name in ("text_features", "image_features", "token_features"):
        made = getattr(held_out_scorer, name)
        monkeypatch.setattr(
            held_out_scorer,
            name,
            lambda rows, made=made: (
                away(found) if isinstance(found := made(rows), torch.Tensor) else [away(row) for row in found]
            ),
        )
    return held_out_scorer


def test_tensors_of_two_devices_cannot_be_combined():
    with pytest.raises(RuntimeError, match="same device"):
        away(torch.eye(2)) @ torch.eye(2)
    with pytest.raises(AssertionError, match="on the CPU"):
        away(torch.eye(2)).numpy()


def test_modules_accept_features_on_any_device(evaluate, scenes, features, remote):
    captions, images, ids = [row[0] for row in scenes["captions"]], list(scenes["image"]), scenes["image_id"]
    text, pool = features
    retrieval, score = (evaluate.load(name, keep_in_memory=True) for name in ("self_retrieval", "clip_score"))
    ranks = metrics.self_retrieval(text, pool, num_bootstrap=0)["ranks"].tolist()
    vectors = [row.tolist() for row in pool]
    for given in (
        {"references": images},
        {"references": vectors},
        {"references": ids, "image_features": dict(zip(ids, pool, strict=True))},
        {"references": ids, "image_ids": ids, "image_features": away(pool)},
        {"references": images, "text_features": away(text)},
    ):
        found = retrieval.compute(predictions=captions, scorer=remote, num_bootstrap=0, **given)
        assert found["ranks"] == ranks
    expected = metrics.ref_clip_score(text, pool, text[:, None])["ref_clip_score"]
    for given in ({"reference_captions": [[caption] for caption in captions]}, {"reference_features": text[:, None]}):
        found = score.compute(predictions=captions, references=vectors, scorer=remote, prefix="", **given)
        assert found["ref_clip_score"] == close(expected, dtype="float32")
    found = evaluate.load("emscore", keep_in_memory=True).compute(
        predictions=captions[:2], frames=[images[:2], images[1:3]], scorer=remote
    )
    assert -1 <= found["f"] <= 1


def test_emscore_computes_on_the_device_of_its_features():
    tokens, frames = torch.eye(3), torch.eye(3)[:2]
    found = metrics.emscore([away(tokens)], [away(frames)], reference_features=[[away(frames)]])
    expected = metrics.emscore([tokens], [frames], reference_features=[[frames]])
    for name, values in expected["per_sample"].items():
        np.testing.assert_array_equal(found["per_sample"][name], values)
