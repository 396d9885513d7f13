"""Rows by id, against a dictionary; also with equal hashes of different ids."""

import hashlib
import random

import datasets
import numpy as np
import pytest

from hf_captionrl.data.columns import id_column
from hf_captionrl.retrieval import feature_cache as row_lookup
from hf_captionrl.retrieval.feature_cache import RowLookup, key_digests, key_hashes


@pytest.fixture(params=["64 bits", "2 bits", "no bits"])
def hashes(request, monkeypatch):
    """Hashes that tell ids apart, seldom, or never."""
    bits = {"64 bits": 64, "2 bits": 2, "no bits": 0}[request.param]

    def fewer(keys):
        return key_hashes(keys) & np.uint64((1 << bits) - 1)

    monkeypatch.setattr(row_lookup, "key_hashes", fewer)
    return request.param


def names(number, different, seed=0):
    draw = random.Random(seed)
    return [f"é {draw.randrange(different)}" for _ in range(number)]


def first_rows(ids):
    seen = {}
    return [seen.setdefault(image_id, row) for row, image_id in enumerate(ids)]


@pytest.mark.parametrize("kind", ["list", "column"])
def test_rows_of_names_are_those_of_a_dictionary(hashes, kind):
    ids = names(300, 120)
    column = ids if kind == "list" else id_column(datasets.Dataset.from_dict({"image_id": ids}))
    lookup, asked = RowLookup(column), [*names(200, 400, seed=1), "", "é"]
    row_of = {image_id: row for row, image_id in reversed(list(enumerate(ids)))}  # the first of equal ids
    assert lookup.rows(asked).tolist() == [row_of.get(name, -1) for name in asked]
    assert lookup.missing(asked) == [name for name in asked if name not in row_of]
    assert lookup.first_rows().tolist() == first_rows(ids)


def test_lookup_is_a_set_of_unique_ids(hashes):
    lookup = RowLookup(["c", "a", "b"])
    assert len(lookup) == 3
    assert "a" in lookup
    assert "d" not in lookup
    assert 1 not in lookup
    assert lookup == {"a", "b", "c"}
    assert lookup & {"a", "d"} == {"a"}
    assert {"a", "d"} - lookup == {"d"}
    assert sorted(lookup) == ["a", "b", "c"]


@pytest.mark.parametrize("ids", [[], ["a"], ["a", "a"], ["b", "a", "b", "a", "b"]])
def test_few_ids(hashes, ids):
    lookup = RowLookup(ids)
    assert lookup.first_rows().tolist() == first_rows(ids)
    assert lookup.rows(["a", "z"]).tolist() == [ids.index("a") if "a" in ids else -1, -1]
    assert lookup.rows([]).tolist() == []


def test_many_names_are_looked_up_in_parts(monkeypatch):
    ids = names(500, 200)
    whole = RowLookup(ids).rows(ids).tolist()
    monkeypatch.setattr(row_lookup, "_AT_ONCE", 7)
    lookup = RowLookup(ids)
    assert lookup.rows(ids).tolist() == whole == first_rows(ids)
    assert lookup.first_rows().tolist() == whole


def test_digests_of_many_keys_are_those_of_each(monkeypatch):
    keys = [f"key {i}" for i in range(10)]
    each = [hashlib.blake2b(key.encode(), digest_size=16).digest() for key in keys]
    monkeypatch.setattr(row_lookup, "_AT_ONCE", 3)
    assert key_digests(keys).tobytes() == b"".join(each)
    assert key_hashes(keys).tobytes() == b"".join(digest[:8] for digest in each)
