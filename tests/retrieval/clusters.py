"""Clustered features, and the searches as plain loops."""

import math

import torch


def clustered(count, width=16, seed=0, noise=0.7):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(max(count // 20, 1), width, generator=generator)
    which = torch.randint(len(centres), (count,), generator=generator)
    return centres[which] + noise * torch.randn(count, width, generator=generator)


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def plain_neighbours(features, k):
    """Neighbours in descending order of cosine similarity, ties by row; computed with Python floats."""
    rows = [[float(x) for x in row] for row in features]
    found = []
    for i, row in enumerate(rows):
        others = sorted((-cosine(row, other), j) for j, other in enumerate(rows) if j != i)
        found.append([(j, -score) for score, j in others[:k]])
    return found
