"""A feature cache with known rows, and processes that fill it."""

import zlib

import numpy as np
import torch

from hf_captionrl.retrieval.feature_cache import FeatureCache

KEYS = [f"image {i}" for i in range(60)]


def truth(keys, shape=(16,), dtype=np.float32):
    """The features of keys, in place of a model's."""
    size = int(np.prod(shape))
    rows = [np.random.default_rng(zlib.crc32(key.encode())).standard_normal(size) for key in keys]
    return np.stack(rows).reshape(-1, *shape).astype(dtype)


class Compute:
    """A model that records the requested rows."""

    def __init__(self, keys, **kwargs):
        self.keys, self.kwargs, self.calls = keys, kwargs, []

    def __call__(self, rows):
        self.calls.append(list(rows))
        return torch.from_numpy(truth([self.keys[i] for i in rows], **self.kwargs))

    @property
    def rows(self):
        return sorted(i for call in self.calls for i in call)


def must_not_compute(rows):
    raise AssertionError(f"{rows} were computed although they are cached")


def make(directory, **kwargs):
    return FeatureCache(directory, **{"model_id": "tiny", "revision": "r1", **kwargs})
